"""Shifting: steps in step with a part-time sensor are seen whole, and hardly wait; others do not wait at all."""

import math

import numpy as np
import pytest

from hpcdist.energy.accounts.part_time_sensor import PowerSensor
from hpcdist.training.observe import instrumentation
from hpcdist.training.observe.instrumentation import SHIFTED_STEPS, StepShifter

PART = PowerSensor(0.1, 0.025)


class Clock:
    """A clock that moves when somebody sleeps or steps."""

    def __init__(self, start_ns):
        self.now = start_ns
        self.slept_s = []

    def sleep(self, seconds):
        self.slept_s.append(seconds)
        self.now += round(seconds * 1e9)


class Kept:
    def __init__(self):
        self.rows = []

    def add(self, *row):
        self.rows.append(row)


@pytest.fixture
def clock(monkeypatch, rng):
    found = Clock(int(rng.integers(10**12)))
    monkeypatch.setattr(instrumentation, "now_ns", lambda: found.now)
    monkeypatch.setattr(instrumentation.time, "sleep", found.sleep)
    return found


def positions(clock, shifted, step_s, steps):
    """Return where in the sensor's period each step began, from 0 to 1."""
    found = []
    for step in range(steps):
        shifted.wait(step)
        found.append(clock.now / 1e8 % 1)
        clock.now += round(step_s * 1e9)
    return np.array(found)


@pytest.mark.parametrize("step_s", [0.05, 0.1, 0.2, 0.5])
def test_steps_in_step_with_the_sensor_begin_everywhere_in_its_period(clock, step_s):
    kept = Kept()
    found = positions(clock, StepShifter(lambda: PART, kept), step_s, 10 * SHIFTED_STEPS)
    counts, _ = np.histogram(found, 8, (0, 1))
    assert counts.tolist() == [10 * SHIFTED_STEPS / 8] * 8
    assert sum(clock.slept_s) <= 10 * (0.1 + 0.0125)
    assert len(kept.rows) == len(clock.slept_s) and {row[:2] for row in kept.rows} == {("other", "shift")}


def test_steps_that_drift_by_themselves_hardly_wait(clock):
    positions(clock, StepShifter(lambda: PART, Kept()), 0.1 * math.e, 10 * SHIFTED_STEPS)
    assert sum(clock.slept_s) <= 10 * (0.1 + 0.0125)


@pytest.mark.parametrize("sensor", [None, PowerSensor(0.1, 0.1)])
def test_where_no_sensor_looks_part_of_the_time_nobody_waits(clock, sensor):
    positions(clock, StepShifter(lambda: sensor, Kept()), 0.1, 2 * SHIFTED_STEPS)
    assert clock.slept_s == []


def test_a_sensor_that_is_found_later_counts_from_then_on(clock):
    known = [None, PART]
    shifted = StepShifter(lambda: known.pop(0), Kept())
    positions(clock, shifted, 0.1, SHIFTED_STEPS)
    assert clock.slept_s == []
    positions(clock, shifted, 0.1, SHIFTED_STEPS)
    assert clock.slept_s
