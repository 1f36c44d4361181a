"""The sampler: a thread only where there is something to read, which ends with its owner and misses no wrap."""

import threading
import time

from hpcdist.energy.counters import ReadError, WithoutPower
from hpcdist.energy.sampler import EDGE_ATTEMPTS, Sampler


class Clock(WithoutPower):
    """A counter of 1 mJ each millisecond that wraps every 50 ms."""

    name, kind, per_mj, span = "package-0", "cpu", 1, 50

    def read(self):
        return time.monotonic_ns() // 1_000_000 % self.span


class Broken(Clock):
    fails = 10**9

    def read(self):
        self.fails -= 1
        if self.fails >= 0:
            raise ReadError("no answer")
        return super().read()


def samplers():
    return [thread for thread in threading.enumerate() if thread.name == "energy sampler"]


def test_samples_are_whole_and_the_thread_ends():
    sampler = Sampler([Clock(), Clock()], 0.005)
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
    sampler = Sampler([], 0.001)
    sampler.start()
    assert not samplers()
    assert sampler.read()[1] == []
    sampler.stop()


def test_an_edge_tries_again_and_counts_every_failure():
    transient = Broken()
    transient.fails = EDGE_ATTEMPTS - 1
    sampler = Sampler([Broken(), transient], 1.0)
    _, (dead, alive) = sampler.read()
    assert dead is None and alive is not None
    assert [track.failed_reads for track in sampler.tracks] == [EDGE_ATTEMPTS, EDGE_ATTEMPTS - 1]
    assert len(sampler.drain().samples) == 1, "a failed read leaves no sample"


def test_a_failing_sensor_does_not_end_the_thread():
    sampler = Sampler([Broken(), Clock()], 0.001)
    sampler.start()
    while sampler.tracks[0].failed_reads < 5:
        time.sleep(0.001)
    assert samplers()
    sampler.stop()
    assert set(sampler.drain().samples[:, 1]) == {1}
