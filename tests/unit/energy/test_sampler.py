"""The energy sampler: a thread only if there are sources, a clean stop, and no missed counter wrap."""

import threading
import time

import numpy as np

from harness.jobs import LIMIT_S
from hpcdist.energy import sampler as sampling
from hpcdist.energy.sampler import EDGE_ATTEMPTS, EnergySampler
from hpcdist.energy.sources.counters import NoPowerReading, SensorReadError


class Clock(NoPowerReading):
    """A counter of 1 mJ each millisecond that wraps every 50 ms."""

    name, kind, per_mj, span = "package-0", "cpu", 1, 50

    def read(self):
        return time.monotonic_ns() // 1_000_000 % self.span


class Broken(Clock):
    fails = 10**9

    def read(self):
        self.fails -= 1
        if self.fails >= 0:
            raise SensorReadError("no answer")
        return super().read()


def sampler_threads():
    return [thread for thread in threading.enumerate() if thread.name == "energy sampler"]


def test_samples_unroll_wraps_and_the_thread_stops():
    sampler = EnergySampler([Clock(), Clock()], 0.005)
    assert not sampler_threads()
    sampler.start()
    assert len(sampler_threads()) == 1 and sampler_threads()[0].daemon
    samples = sampler.drain().samples
    while len(samples) < 40:
        samples = [*samples, *sampler.drain().samples]
    sampler.stop()
    assert not sampler_threads()
    for source in range(2):
        times, energy = zip(*((t, mj) for t, result, mj in samples if result == source), strict=True)
        assert list(times) == sorted(times) and list(energy) == sorted(energy), "wraps are unrolled"
    assert sampler.drain().samples.shape[1] == 3 and sampler.drain().samples.shape == (0, 3)


def test_sampler_without_source_starts_no_thread():
    sampler = EnergySampler([], 0.001)
    sampler.start()
    assert not sampler_threads()
    assert sampler.read()[1] == []
    sampler.stop()


def test_edge_read_retries_and_counts_every_failure():
    transient = Broken()
    transient.fails = EDGE_ATTEMPTS - 1
    sampler = EnergySampler([Broken(), transient], 1.0)
    _, (dead, alive) = sampler.read()
    assert dead is None and alive is not None
    assert [track.failed_reads for track in sampler.tracks] == [EDGE_ATTEMPTS, EDGE_ATTEMPTS - 1]
    assert len(sampler.drain().samples) == 1, "a failed read leaves no sample"
    sampler.read()
    assert sampler.tracks[0].failed_reads == EDGE_ATTEMPTS + 1, "a source that keeps failing is read once"


def test_failing_sensor_does_not_stop_the_thread():
    sampler = EnergySampler([Broken(), Clock()], 0.001)
    sampler.start()
    while sampler.tracks[0].failed_reads < 5:
        time.sleep(0.001)
    assert sampler_threads()
    sampler.stop()
    assert set(sampler.drain().samples[:, 1]) == {1}


class Watts(Clock):
    """A counter that also reports power."""

    def power_mw(self):
        return 5000


class Gaps(Clock):
    """A counter with a gap before every fourth read."""

    reads = gaps = 0

    def read(self):
        self.reads += 1
        self.gaps = self.reads // 4
        return super().read()


def test_power_and_utilisation_are_recorded_with_energy():
    looks = iter(range(10**6))
    sampler = EnergySampler([Clock(), Watts()], 0.005, lambda: np.array([0.5, next(looks)]), 0.02)
    sampler.start()
    while len(sampler._looks) < 3 or not sampler._powers:
        time.sleep(0.005)
    assert sampler.stop()
    drained = sampler.drain()
    assert set(drained.powers[:, 1]) == {1} and set(drained.powers[:, 2]) == {5000}
    assert drained.powers.dtype == drained.samples.dtype == np.int64
    assert drained.shares[:, 1].tolist() == list(range(len(drained.looks)))
    assert np.all(np.diff(drained.looks) > 0)


def test_utilisation_failure_is_reported_once_and_sampling_goes_on():
    lines = []

    def look():
        raise ZeroDivisionError("no such thing")

    sampler = EnergySampler([Clock()], 0.002, look, 0.002, lines.append)
    sampler.start()
    while not lines or len(sampler._samples) < 5:
        time.sleep(0.005)
    assert sampler.stop()
    assert lines == ["the utilisation of this node cannot be read: ZeroDivisionError: no such thing"]


def test_utilisation_needs_no_counter():
    sampler = EnergySampler([], 0.1, lambda: np.zeros(3), 0.01)
    sampler.start()
    assert len(sampler_threads()) == 1
    while not len(sampler.drain().looks):
        time.sleep(0.005)
    assert sampler.stop() and not sampler_threads()


def test_unexpected_source_error_is_reported_once():
    class Wild(Clock):
        def read(self):
            raise KeyError("handle")

    lines = []
    sampler = EnergySampler([Wild()], 0.001, tell=lines.append)
    sampler.start()
    while sampler.tracks[0].failed_reads < 20:
        time.sleep(0.001)
    sampler.stop()
    assert len(lines) == 1 and "KeyError: 'handle'" in lines[0]
    assert sampler.read()[1] == [None]


def test_hanging_sensor_does_not_block_the_caller(monkeypatch):
    monkeypatch.setattr(sampling, "HANG_TIMEOUT_S", 0.05)
    goes_on = threading.Event()

    class Hanging(Clock):
        def read(self):
            goes_on.wait(LIMIT_S)
            return 1

    sampler = EnergySampler([Hanging(), Clock()], 0.001)
    sampler.start()
    time.sleep(0.05)
    assert sampler.read()[1] == [None, None], "the caller does not wait for a lock that is held for ever"
    assert "has not answered" in sampler.tracks[0].explain()
    assert not sampler.stop(), "stop() returns False, so the driver must not be closed"
    goes_on.set()
    for thread in sampler_threads():
        thread.join(10)


def test_intervals_are_contiguous_and_mark_gaps():
    sampler = EnergySampler([Clock(), Gaps()], 1.0)
    first = [sampler.read()[1] for _ in range(6)]
    one, two = sampler.intervals()
    assert (one.name, one.kind, one.energy_mj.tolist()) == ("package-0", "cpu", [row[0] for row in first])
    assert one.known.all() and two.known.tolist() == [True, True, False, True, True]
    second = [sampler.read()[1] for _ in range(3)]
    again = sampler.intervals()
    assert again[0].energy_mj.tolist() == [first[-1][0], *(row[0] for row in second)]
    assert again[0].times_ns[0] == one.times_ns[-1]
    assert again[1].known.tolist() == [True, False, True]
    assert sampler.gaps_since_edge() == [1] and sampler.gaps_since_edge() == []
    assert [row[1] for row in sampler.drain().gaps] == [1, 1]


def test_unused_intervals_are_bounded():
    sampler = EnergySampler([Clock()], 1.0)
    for _ in range(50):
        for _ in range(4):
            sampler.read()
        sampler.drain()
    assert len(sampler.intervals()[0].times_ns) == 4


def test_read_time_is_counted_as_overhead():
    class Slow(Clock):
        def read(self):
            until_s = time.perf_counter() + 0.01
            while time.perf_counter() < until_s:
                pass
            return super().read()

    sampler = EnergySampler([Slow()], 0.001)
    assert sampler.overhead() == (0.0, 0.0)
    sampler.start()
    time.sleep(0.2)
    sampler.read()
    sampler.stop()
    busy_s, lasted_s = sampler.overhead()
    assert 0.01 < busy_s <= lasted_s + 0.05
    assert sampler.overhead()[1] == lasted_s, "the time ends with the sampler"


def test_undrained_samples_are_bounded_and_lose_no_energy(monkeypatch):
    """Half of the samples are dropped, but never the last sample of a source."""
    monkeypatch.setattr(sampling, "MAX_ROWS", 8)
    sampler = EnergySampler([Clock(), Clock()], 1.0, look=lambda: np.zeros(1))
    for _ in range(100):
        _, last = sampler.read()
        sampler._look_around(lambda: np.zeros(1))
        assert max(map(len, (sampler._samples, sampler._recent, sampler._looks))) <= 8
    rows = sampler.drain().samples
    for source in range(2):
        local_input = rows[rows[:, 1] == source]
        assert local_input[-1, 2] == last[source] and len(local_input) >= 2
        assert (np.diff(local_input[:, 0]) > 0).all() and (np.diff(local_input[:, 2]) >= 0).all()


def test_gap_of_dropped_sample_moves_to_kept_sample():
    rows = [(number, number % 2, 10 * number) for number in range(12)]
    left, gaps = sampling._halved(rows, {(4, 0), (6, 0), (7, 1)})
    assert left == [rows[number] for number in (2, 3, 6, 7, 10, 11)]
    assert gaps == {(6, 0), (7, 1)}
