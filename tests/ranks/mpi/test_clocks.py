"""Clocks with offsets of hours, compared over real messages."""

import time

from hpcdist.comm.record.clock_offsets import HostClocks
from hpcdist.hdf5 import files
from hpcdist.telemetry.metrics import side_tables as table

HOUR_NS = 3_600_000_000_000


def test_planted_clock_offsets_are_measured(comm, rng, folder):
    """Every rank acts as a host. Other cases have pairs of ranks on a host, and two levels."""
    ahead = rng.integers(-HOUR_NS, HOUR_NS, comm.size).tolist()
    for together, flat in ((1, 16), (2, 16), (1, 2)):
        host = comm.rank // together
        watch = HostClocks(comm, f"boot {host}", lambda host=host: time.monotonic_ns() + ahead[host], flat)
        readings = watch.measure()
        assert watch.hosts.of_rank == tuple(rank // together for rank in range(comm.size))
        if comm.rank:
            assert readings == ()
            continue
        assert [one.host for one in readings] == list(range(len(watch.hosts.boots)))
        for one in readings:
            # All ranks run on one machine, so the true offset is the planted one.
            assert abs(one.offset_ns - (ahead[one.host] - ahead[0])) <= one.bound_ns
        path = folder / "metrics.h5"
        path.unlink(missing_ok=True)
        with files.edit(path, "hpcdist.metrics", 1) as file:
            table.append_clocks(file, 0, watch.hosts, readings, 5)
        assert table.read_clocks(path) == (table.ClockSession(0, watch.hosts, readings, 5),)


def test_clocks_of_one_host_are_not_measured(comm):
    watch = HostClocks(comm, "one boot")
    readings = watch.measure()
    assert len(readings) == (comm.rank == 0)
    assert not watch.due() and all(one.rtt_ns == 0 for one in readings)
