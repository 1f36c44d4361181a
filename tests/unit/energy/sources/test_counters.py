"""Energy counters: wraps, failed reads, impossible values and the observed update interval."""

import math

import pytest

from hpcdist.energy.sources.counters import (
    MAX_GAP_NS,
    PROBE_NS,
    CounterReader,
    CounterResetError,
    NoPowerReading,
    SensorReadError,
    UpdateInterval,
)

MS = 1_000_000


class Script(NoPowerReading):
    """A counter that returns the given values. None makes a read fail."""

    name, kind = "package-0", "cpu"

    def __init__(self, *values, span=None, per_mj=1):
        self.values, self.span, self.per_mj = iter(values), span, per_mj

    def read(self):
        value = next(self.values)
        if value is None:
            raise SensorReadError("no answer")
        return value


def reads(track, count, gap_ns=100 * MS):
    return [track.read(number * gap_ns) for number in range(1, count + 1)]


def test_wraps_are_unrolled():
    track = CounterReader(Script(900, 990, 20, 999, 5, 5, span=1000))
    assert reads(track, 6) == [900, 990, 1020, 1999, 2005, 2005]
    assert not track.explain()


def test_microjoules_have_no_rounding_loss():
    steps = [7 * number for number in range(2000)]
    assert reads(CounterReader(Script(*steps, per_mj=1000)), 2000)[-1] == steps[-1] // 1000


def test_failed_read_is_none_and_counted():
    track = CounterReader(Script(10, None, None, 30))
    assert reads(track, 4) == [10, None, None, 30]
    assert track.failed_reads == 2 and track.explain() == "package-0: 2 failed reads, the last: no answer"


def test_decreasing_counter_without_range_is_abandoned():
    track = CounterReader(Script(500, 20, 30, 900))
    assert reads(track, 4) == [500, None, None, None]
    assert "went back from 500 to 20" in track.explain()


def test_long_gap_abandons_only_wrapping_counters():
    waiting = CounterReader(Script(1, 2, 3, span=1000))
    assert reads(waiting, 3, MAX_GAP_NS + 1) == [1, None, None]
    assert "may have wrapped unseen" in waiting.explain()
    assert reads(CounterReader(Script(1, 2, 3)), 3, MAX_GAP_NS + 1) == [1, 2, 3]


def test_update_interval_needs_two_changes():
    pace = UpdateInterval()
    for number, value in enumerate([5, 5, 6, 6, 6]):
        pace.see(number * 10 * MS, value)
    assert math.isnan(pace.update_s) and not pace.settled(10 * PROBE_NS)
    pace.see(50 * MS, 7)
    assert pace.update_s == pytest.approx(0.03)


def test_update_interval_of_100_ms_is_observed_with_5_ms_polls():
    pace = UpdateInterval()
    for now_ms in range(0, 2000, 5):
        pace.see(now_ms * MS, (now_ms + 37) // 100)
    assert pace.update_s == pytest.approx(0.1, rel=0.05)


def test_settled_update_interval_ignores_rare_polls():
    pace = UpdateInterval()
    for now_ms in [*range(0, 1000, 5), *range(1000, 100_000, 1000)]:
        pace.see(now_ms * MS, now_ms)
    assert pace.update_s == pytest.approx(0.005)


@pytest.mark.parametrize("nonsense", [2**64 - 1, -5])
def test_impossible_value_is_a_failed_read(nonsense):
    track = CounterReader(Script(10, nonsense, 30))
    assert reads(track, 3) == [10, None, 30]
    assert track.failed_reads == 1 and f"it reads {nonsense}" in track.explain()


def test_only_a_reset_error_abandons_the_counter():
    class Wild(Script):
        def read(self):
            result = super().read()
            if isinstance(result, Exception):
                raise result
            return result

    track = CounterReader(Wild(10, KeyError("handle"), 30, CounterResetError("restarted"), 50))
    assert reads(track, 5) == [10, None, 30, None, None]
    assert track.failure == "KeyError: 'handle'" and track.explain() == "package-0: restarted"
