"""Counters: wraps are unrolled, failures counted and never zero, nonsense gives a counter up, its pace is observed."""

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
    """A counter that reads what it is told; None fails."""

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


def test_wraps_are_unrolled_over_several_turns():
    track = CounterReader(Script(900, 990, 20, 999, 5, 5, span=1000))
    assert reads(track, 6) == [900, 990, 1020, 1999, 2005, 2005]
    assert not track.explain()


def test_microjoules_lose_nothing_by_rounding():
    steps = [7 * number for number in range(2000)]
    assert reads(CounterReader(Script(*steps, per_mj=1000)), 2000)[-1] == steps[-1] // 1000


def test_a_failed_read_is_none_and_counted():
    track = CounterReader(Script(10, None, None, 30))
    assert reads(track, 4) == [10, None, None, 30]
    assert track.failed_reads == 2 and track.explain() == "package-0: 2 failed reads, the last: no answer"


def test_a_counter_that_goes_back_without_a_range_is_given_up():
    track = CounterReader(Script(500, 20, 30, 900))
    assert reads(track, 4) == [500, None, None, None]
    assert "went back from 500 to 20" in track.explain()


def test_a_gap_in_which_a_wrap_may_hide_gives_a_wrapping_counter_up():
    waiting = CounterReader(Script(1, 2, 3, span=1000))
    assert reads(waiting, 3, MAX_GAP_NS + 1) == [1, None, None]
    assert "may have wrapped unseen" in waiting.explain()
    assert reads(CounterReader(Script(1, 2, 3)), 3, MAX_GAP_NS + 1) == [1, 2, 3]


def test_a_pace_needs_two_changes():
    pace = UpdateInterval()
    for number, value in enumerate([5, 5, 6, 6, 6]):
        pace.see(number * 10 * MS, value)
    assert math.isnan(pace.update_s) and not pace.settled(10 * PROBE_NS)
    pace.see(50 * MS, 7)
    assert pace.update_s == pytest.approx(0.03)


def test_the_pace_of_a_counter_of_100_ms_polled_every_5_ms():
    pace = UpdateInterval()
    for now_ms in range(0, 2000, 5):
        pace.see(now_ms * MS, (now_ms + 37) // 100)
    assert pace.update_s == pytest.approx(0.1, rel=0.05)


def test_a_settled_pace_is_not_slowed_by_rare_polls():
    pace = UpdateInterval()
    for now_ms in [*range(0, 1000, 5), *range(1000, 100_000, 1000)]:
        pace.see(now_ms * MS, now_ms)
    assert pace.update_s == pytest.approx(0.005)


@pytest.mark.parametrize("nonsense", [2**64 - 1, -5])
def test_what_no_counter_reaches_is_a_failed_read(nonsense):
    track = CounterReader(Script(10, nonsense, 30))
    assert reads(track, 3) == [10, None, 30]
    assert track.failed_reads == 1 and f"it reads {nonsense}" in track.explain()


def test_a_counter_that_began_anew_is_given_up_and_whatever_else_it_raises_is_not():
    class Wild(Script):
        def read(self):
            found = super().read()
            if isinstance(found, Exception):
                raise found
            return found

    track = CounterReader(Wild(10, KeyError("handle"), 30, CounterResetError("restarted"), 50))
    assert reads(track, 5) == [10, None, 30, None, None]
    assert track.failure == "KeyError: 'handle'" and track.explain() == "package-0: restarted"
