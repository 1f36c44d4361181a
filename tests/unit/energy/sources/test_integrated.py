"""Integrated power: trapezoids for any read interval, and gaps that are not filled."""

import pytest

from hpcdist.energy.sources.counters import BRIDGE_S, IntegratedPower, SensorReadError, SourceInfo

S = 1_000_000_000


class Meter:
    """A power meter whose time and watts are set by the test."""

    def __init__(self, interval_s=0.1, note=""):
        self.now_ns, self.mw = 0, 0
        self.counter = IntegratedPower("a", self.power, SourceInfo(note=note), interval_s, lambda: self.now_ns)

    def power(self):
        if self.mw is None:
            raise SensorReadError("no answer")
        return self.mw

    def at(self, seconds, watts):
        self.now_ns, self.mw = round(seconds * S), None if watts is None else round(watts * 1e3)
        return self.counter.read() / 1e12


def test_uneven_reads_are_integrated_by_trapezoids(rng):
    meter, expected, before = Meter(), 0.0, None
    times = rng.uniform(0.001, 0.9, 200).cumsum()
    for seconds, watts in zip(times.tolist(), rng.integers(0, 700, 200).tolist(), strict=True):
        result = meter.at(seconds, watts)
        if before is not None:
            expected += (seconds - before[0]) * (watts + before[1]) / 2
        before = seconds, watts
        assert result == pytest.approx(expected, rel=1e-6, abs=1e-6)
    assert meter.counter.gaps == 0 and meter.counter.power_mw() == watts * 1000


def test_missed_read_is_bridged_but_long_gap_is_not():
    meter = Meter()
    meter.at(0, 100)
    with pytest.raises(SensorReadError):
        meter.at(0.5, None)
    assert meter.at(BRIDGE_S, 300) == pytest.approx(200) and meter.counter.gaps == 0
    assert meter.at(BRIDGE_S * 3, 300) == pytest.approx(200) and meter.counter.gaps == 1
    assert meter.at(BRIDGE_S * 4, 300) == pytest.approx(500) and meter.counter.gaps == 1


def test_long_read_interval_is_no_gap():
    meter = Meter(interval_s=10.0)
    meter.at(0, 100)
    assert meter.at(20, 100) == pytest.approx(2000) and meter.counter.gaps == 0
    meter.at(46, 100)
    assert meter.counter.gaps == 1


def test_note_of_counter_is_integrated_power():
    assert Meter().counter.about.note == "integrated power"
    assert Meter(note="shared by 2 ranks").counter.about.note == "integrated power; shared by 2 ranks"
