"""Offsets between the clocks of hosts: measured with messages, stored in the metrics file, and read back."""

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


def measure_clocks(size, hosts, ahead_ns, flat=clock_offsets.FLAT):
    """Return the hosts and two measurements of each rank. Rank r is on ``hosts[r]``, ahead by ``ahead_ns[host]``."""

    def body(comm):
        host = hosts[comm.rank]
        watch = HostClocks(comm, f"boot {host}", lambda: time.monotonic_ns() + ahead_ns[host], flat)
        return watch.hosts, watch.measure(), watch.measure(rounds=3)

    return run_threads(size, body)


@pytest.mark.parametrize(("count", "flat"), [(2, 16), (5, 16), (5, 2), (9, 2), (10, 3), (17, 16)])
def test_large_offsets_are_measured_within_the_bound(rng, count, flat):
    ahead = [int(ns) for ns in rng.integers(-9 * HOUR_NS, 9 * HOUR_NS, count)]
    result = measure_clocks(count, list(range(count)), ahead, flat)
    assert all(readings == again == () for _, readings, again in result[1:])
    for readings in result[0][1:]:
        assert [reading.host for reading in readings] == list(range(count))
        assert readings[0].offset_ns == readings[0].rtt_ns == 0
        for reading in readings[1:]:
            assert abs(reading.offset_ns - (ahead[reading.host] - ahead[0])) <= reading.bound_ns
            assert reading.rtt_ns > 0
        # All readings were taken within the call, by the clock of rank 0.
        assert max(r.t_ns for r in readings) - min(r.t_ns for r in readings) < 60e9


def test_one_rank_per_host_is_measured(rng):
    hosts = [1, 0, 1, 2, 0, 2, 1]
    ahead = [0, HOUR_NS, -HOUR_NS]
    result = measure_clocks(len(hosts), hosts, ahead)
    output = result[0][0]
    assert all(other[0] == output for other in result)
    assert output.of_rank == (0, 1, 0, 2, 1, 2, 0), "hosts count in the order of their first ranks"
    assert output.boots == ("boot 1", "boot 0", "boot 2") and len(set(output.names)) == 1
    readings = result[0][1]
    true = [ahead[1] - ahead[1], ahead[0] - ahead[1], ahead[2] - ahead[1]]
    assert all(abs(one.offset_ns - true[one.host]) <= one.bound_ns for one in readings)


def test_no_rank_measures_more_than_square_root_of_hosts_times_two():
    """36 hosts, groups of 6: rank 0 measures 5 heads and 5 hosts of its group, a head measures 5 hosts and reports."""

    def body(comm):
        with count_traffic(comm) as traffic:
            clock_offsets.measure_offsets(comm, time.monotonic_ns, rounds=4, flat=16)
        return traffic.calls["send"], traffic.calls["recv"]

    made = run_threads(36, body)
    assert made[0] == (40, 45)
    assert {made[rank] for rank in range(6, 36, 6)} == {(4 + 20 + 1, 4 + 20)}
    assert {calls for rank, calls in enumerate(made) if rank % 6} == {(4, 4)}


def test_single_host_has_zero_offset():
    result = measure_clocks(3, [0, 0, 0], [HOUR_NS])
    assert [len(readings) for _, readings, _ in result] == [1, 0, 0]
    assert result[0][1][0].offset_ns == result[0][1][0].rtt_ns == 0


def test_only_rank_0_is_due_for_a_measurement():
    def body(comm):
        watch = HostClocks(comm, f"boot {comm.rank}")
        before = watch.due()
        watch.measure()
        return before, watch.due(), watch.due(every_s=0.0)

    assert run_threads(2, body) == [(True, False, True), (False, False, False)]


def test_shortest_round_gives_the_offset():
    """Rounds in which a clock jumps forward or backward are ignored."""
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


def test_clock_table_round_trips_over_sessions(tmp_path):
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
    result = table.read_clocks(path)
    assert [session.number for session in result] == [0, 2]
    assert result[0] == table.ClockSession(0, first, (*rounds[0][2], *rounds[1][2]), 9)
    assert result[1] == table.ClockSession(2, second, tuple(rounds[2][2]), -4)
    with h5py.File(path) as file:
        readings = file["clocks/readings"]
        assert readings["offset_ns"].dtype == np.int64 and readings["rtt_ns"].attrs["units"] == "ns"
        assert readings["wall_ns"][...].tolist() == [large + 7, large + 9, large + 19, large + 21, 1, 2]


@pytest.mark.full
def test_missing_table_is_empty_and_damaged_file_is_rejected(tmp_path):
    path = tmp_path / "metrics.h5"
    with files.edit(path, "hpcdist.metrics", 1):
        pass
    assert table.read_clocks(path) == ()
    path.write_bytes(path.read_bytes()[:300])
    with pytest.raises(StorageError):
        table.read_clocks(path)
    with pytest.raises(StorageError):
        table.read_clocks(tmp_path / "none.h5")
