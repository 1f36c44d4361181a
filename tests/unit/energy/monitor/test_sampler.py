"""The sampler: a thread only where there is something to read, which ends with its owner and misses no wrap."""

import threading
import time

import numpy as np

from harness.jobs import LIMIT_S
from hpcdist.energy.monitor import sampler as sampling
from hpcdist.energy.monitor.sampler import EDGE_ATTEMPTS, EnergySampler
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


def samplers():
    return [thread for thread in threading.enumerate() if thread.name == "energy sampler"]


def test_samples_are_whole_and_the_thread_ends():
    sampler = EnergySampler([Clock(), Clock()], 0.005)
    assert not samplers()
    sampler.start()
    assert len(samplers()) == 1 and samplers()[0].daemon
    samples = sampler.drain().samples
    while len(samples) < 40:
        samples = [*samples, *sampler.drain().samples]
    sampler.stop()
    assert not samplers()
    for source in range(2):
        times, energy = zip(*((t, mj) for t, found, mj in samples if found == source), strict=True)
        assert list(times) == sorted(times) and list(energy) == sorted(energy), "wraps are unrolled"
    assert sampler.drain().samples.shape[1] == 3 and sampler.drain().samples.shape == (0, 3)


def test_without_a_source_there_is_no_thread():
    sampler = EnergySampler([], 0.001)
    sampler.start()
    assert not samplers()
    assert sampler.read()[1] == []
    sampler.stop()


def test_an_edge_tries_again_and_counts_every_failure():
    transient = Broken()
    transient.fails = EDGE_ATTEMPTS - 1
    sampler = EnergySampler([Broken(), transient], 1.0)
    _, (dead, alive) = sampler.read()
    assert dead is None and alive is not None
    assert [track.failed_reads for track in sampler.tracks] == [EDGE_ATTEMPTS, EDGE_ATTEMPTS - 1]
    assert len(sampler.drain().samples) == 1, "a failed read leaves no sample"
    sampler.read()
    assert sampler.tracks[0].failed_reads == EDGE_ATTEMPTS + 1, "who is silent for long is asked once"


def test_a_failing_sensor_does_not_end_the_thread():
    sampler = EnergySampler([Broken(), Clock()], 0.001)
    sampler.start()
    while sampler.tracks[0].failed_reads < 5:
        time.sleep(0.001)
    assert samplers()
    sampler.stop()
    assert set(sampler.drain().samples[:, 1]) == {1}


class Watts(Clock):
    """Power beside energy."""

    def power_mw(self):
        return 5000


class Gaps(Clock):
    """Does not know what was used before every fourth read."""

    reads = gaps = 0

    def read(self):
        self.reads += 1
        self.gaps = self.reads // 4
        return super().read()


def test_power_and_looks_are_kept_beside_energy():
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


def test_a_look_that_fails_is_told_once_and_ends_nothing():
    told = []

    def look():
        raise ZeroDivisionError("no such thing")

    sampler = EnergySampler([Clock()], 0.002, look, 0.002, told.append)
    sampler.start()
    while not told or len(sampler._samples) < 5:
        time.sleep(0.005)
    assert sampler.stop()
    assert told == ["the utilisation of this node cannot be read: ZeroDivisionError: no such thing"]


def test_looks_need_no_counter():
    sampler = EnergySampler([], 0.1, lambda: np.zeros(3), 0.01)
    sampler.start()
    assert len(samplers()) == 1
    while not len(sampler.drain().looks):
        time.sleep(0.005)
    assert sampler.stop() and not samplers()


def test_a_failing_source_is_told_of_once_whatever_it_raises():
    class Wild(Clock):
        def read(self):
            raise KeyError("handle")

    told = []
    sampler = EnergySampler([Wild()], 0.001, tell=told.append)
    sampler.start()
    while sampler.tracks[0].failed_reads < 20:
        time.sleep(0.001)
    sampler.stop()
    assert len(told) == 1 and "KeyError: 'handle'" in told[0]
    assert sampler.read()[1] == [None]


def test_a_sensor_that_hangs_holds_nobody_up(monkeypatch):
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
    assert not sampler.stop(), "who would close the driver now is told not to"
    goes_on.set()
    for thread in samplers():
        thread.join(10)


def test_intervals_join_and_mark_what_is_not_known():
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


def test_who_never_asks_for_intervals_pays_with_no_memory():
    sampler = EnergySampler([Clock()], 1.0)
    for _ in range(50):
        for _ in range(4):
            sampler.read()
        sampler.drain()
    assert len(sampler.intervals()[0].times_ns) == 4


def test_what_reading_costs_is_counted():
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


def test_what_nobody_drains_is_bounded_and_loses_no_energy(monkeypatch):
    """Half of the samples go, never the last one of a source."""
    monkeypatch.setattr(sampling, "MAX_ROWS", 8)
    sampler = EnergySampler([Clock(), Clock()], 1.0, look=lambda: np.zeros(1))
    for _ in range(100):
        _, last = sampler.read()
        sampler._look_around(lambda: np.zeros(1))
        assert max(map(len, (sampler._samples, sampler._recent, sampler._looks))) <= 8
    rows = sampler.drain().samples
    for source in range(2):
        own = rows[rows[:, 1] == source]
        assert own[-1, 2] == last[source] and len(own) >= 2
        assert (np.diff(own[:, 0]) > 0).all() and (np.diff(own[:, 2]) >= 0).all()


def test_a_gap_is_handed_on_to_the_sample_that_stays():
    rows = [(number, number % 2, 10 * number) for number in range(12)]
    left, gaps = sampling._halved(rows, {(4, 0), (6, 0), (7, 1)})
    assert left == [rows[number] for number in (2, 3, 6, 7, 10, 11)]
    assert gaps == {(6, 0), (7, 1)}
