"""Offsets between the clocks of hosts: measured over messages, kept in the metrics file, read back."""

import time

import h5py
import numpy as np
import pytest

from hpcdist.comm.record import clock_offsets
from hpcdist.comm.record.clock_offsets import ClockReading, HostClocks, HostTable
from hpcdist.comm.record.timing import count_traffic
from hpcdist.comm.threads.communicator import run_threads
from hpcdist.errors import StorageError
from hpcdist.hdf5 import files
from hpcdist.telemetry.metrics import side_tables as table

HOUR_NS = 3_600_000_000_000


def measured(size, hosts, ahead_ns, flat=clock_offsets.FLAT):
    """Return what each rank gets where rank r is on host ``hosts[r]``, whose clock is ``ahead_ns`` of the true one."""

    def body(comm):
        host = hosts[comm.rank]
        watch = HostClocks(comm, f"boot {host}", lambda: time.monotonic_ns() + ahead_ns[host], flat)
        return watch.hosts, watch.measure(), watch.measure(rounds=3)

    return run_threads(size, body)


@pytest.mark.parametrize(("count", "flat"), [(2, 16), (5, 16), (5, 2), (9, 2), (10, 3), (17, 16)])
def test_offsets_of_hours_are_found_to_within_the_bound(rng, count, flat):
    ahead = [int(ns) for ns in rng.integers(-9 * HOUR_NS, 9 * HOUR_NS, count)]
    found = measured(count, list(range(count)), ahead, flat)
    assert all(readings == again == () for _, readings, again in found[1:])
    for readings in found[0][1:]:
        assert [reading.host for reading in readings] == list(range(count))
        assert readings[0].offset_ns == readings[0].rtt_ns == 0
        for reading in readings[1:]:
            assert abs(reading.offset_ns - (ahead[reading.host] - ahead[0])) <= reading.bound_ns
            assert reading.rtt_ns > 0
        # All were taken within the call, by the clock of rank 0.
        assert max(r.t_ns for r in readings) - min(r.t_ns for r in readings) < 60e9


def test_one_rank_of_each_host_takes_part(rng):
    hosts = [1, 0, 1, 2, 0, 2, 1]
    ahead = [0, HOUR_NS, -HOUR_NS]
    found = measured(len(hosts), hosts, ahead)
    told = found[0][0]
    assert all(other[0] == told for other in found)
    assert told.of_rank == (0, 1, 0, 2, 1, 2, 0), "hosts count in the order of their first ranks"
    assert told.boots == ("boot 1", "boot 0", "boot 2") and len(set(told.names)) == 1
    readings = found[0][1]
    true = [ahead[1] - ahead[1], ahead[0] - ahead[1], ahead[2] - ahead[1]]
    assert all(abs(one.offset_ns - true[one.host]) <= one.bound_ns for one in readings)


def test_of_many_hosts_nobody_asks_more_than_a_root():
    """36 hosts in groups of 6: rank 0 asks 5 heads and 5 of its own, a head 5, in 4 rounds; and each head reports."""

    def body(comm):
        with count_traffic(comm) as traffic:
            clock_offsets.measure_offsets(comm, time.monotonic_ns, rounds=4, flat=16)
        return traffic.calls["send"], traffic.calls["recv"]

    made = run_threads(36, body)
    assert made[0] == (40, 45)
    assert {made[rank] for rank in range(6, 36, 6)} == {(4 + 20 + 1, 4 + 20)}
    assert {calls for rank, calls in enumerate(made) if rank % 6} == {(4, 4)}


def test_on_one_host_there_is_nothing_to_measure():
    found = measured(3, [0, 0, 0], [HOUR_NS])
    assert [len(readings) for _, readings, _ in found] == [1, 0, 0]
    assert found[0][1][0].offset_ns == found[0][1][0].rtt_ns == 0


def test_only_rank_0_says_when_it_is_time_again():
    def body(comm):
        watch = HostClocks(comm, f"boot {comm.rank}")
        before = watch.due()
        watch.measure()
        return before, watch.due(), watch.due(every_s=0.0)

    assert run_threads(2, body) == [(True, False, True), (False, False, False)]


def test_the_shortest_round_counts():
    """A round in which a clock jumps is no use, whatever it says: forward, or back as wall clocks may."""
    took = [10**9, 7000, 1000, -(10**9), 5000]

    def body(comm):
        shows = [0]
        for ns in took:
            shows += [shows[-1] + 17, shows[-1] + 17 + ns]
        upcoming = iter(shows)
        return clock_offsets.measure_offsets(
            comm, (lambda: next(upcoming)) if comm.rank == 0 else (lambda: 123), rounds=len(took)
        )

    readings = run_threads(2, body)[0]
    begin = 10**9 + 7000 + 3 * 17
    assert readings[1] == ClockReading(1, begin + 500, 123 - begin - 500, 1000)


# -- the table


def test_the_table_over_sessions(tmp_path):
    path = tmp_path / "metrics.h5"
    large = 2**53 + 1  # a float would round it
    first = HostTable((0, 0, 1), ("a", "b"), ("boot-a", "boot-b"))
    second = HostTable((0, 1), ("b", "c"), ("boot-b", "boot-c"))
    rounds = [
        (0, first, [ClockReading(0, large, 0, 0), ClockReading(1, large + 2, -HOUR_NS, 901)], 7),
        (0, first, [ClockReading(0, large + 10, 0, 0), ClockReading(1, large + 12, -HOUR_NS + 3, 800)], 9),
        (2, second, [ClockReading(0, 5, 0, 0), ClockReading(1, 6, HOUR_NS, 700)], -4),
    ]
    for session, hosts, readings, wall_ns in rounds:
        with files.edit(path, "hpcdist.metrics", 1) as file:
            table.append_clocks(file, session, hosts, readings, wall_ns)
    found = table.read_clocks(path)
    assert [session.number for session in found] == [0, 2]
    assert found[0] == table.ClockSession(0, first, (*rounds[0][2], *rounds[1][2]), 9)
    assert found[1] == table.ClockSession(2, second, tuple(rounds[2][2]), -4)
    with h5py.File(path) as file:
        readings = file["clocks/readings"]
        assert readings["offset_ns"].dtype == np.int64 and readings["rtt_ns"].attrs["units"] == "ns"
        assert readings["wall_ns"][...].tolist() == [large + 7, large + 9, large + 19, large + 21, 1, 2]


@pytest.mark.full
def test_files_without_the_table_and_damaged_ones(tmp_path):
    path = tmp_path / "metrics.h5"
    with files.edit(path, "hpcdist.metrics", 1):
        pass
    assert table.read_clocks(path) == ()
    path.write_bytes(path.read_bytes()[:300])
    with pytest.raises(StorageError):
        table.read_clocks(path)
    with pytest.raises(StorageError):
        table.read_clocks(tmp_path / "none.h5")
