"""Shifted steps: steps synchronous with a part-time sensor are sampled evenly with short waits; others do not wait."""

import math

import numpy as np
import pytest

from hpcdist.energy.part_time_sensor import PowerSensor
from hpcdist.training.observe import instrumentation
from hpcdist.training.observe.instrumentation import SHIFTED_STEPS, StepShifter

PART = PowerSensor(0.1, 0.025)


class Clock:
    """A clock that advances when somebody sleeps or steps."""

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
    result = Clock(int(rng.integers(10**12)))
    monkeypatch.setattr(instrumentation, "now_ns", lambda: result.now)
    monkeypatch.setattr(instrumentation.time, "sleep", result.sleep)
    return result


def positions(clock, shifted, step_s, steps):
    """Return the phase of the sensor's period, from 0 to 1, at the start of each step."""
    results = []
    for step in range(steps):
        shifted.wait(step)
        results.append(clock.now / 1e8 % 1)
        clock.now += round(step_s * 1e9)
    return np.array(results)


@pytest.mark.parametrize("step_s", [0.05, 0.1, 0.2, 0.5])
def test_shifted_steps_begin_at_all_phases_of_the_sensor(clock, step_s):
    kept = Kept()
    result = positions(clock, StepShifter(lambda: PART, kept), step_s, 10 * SHIFTED_STEPS)
    counts, _ = np.histogram(result, 8, (0, 1))
    assert counts.tolist() == [10 * SHIFTED_STEPS / 8] * 8
    assert sum(clock.slept_s) <= 10 * (0.1 + 0.0125)
    assert len(kept.rows) == len(clock.slept_s) and {row[:2] for row in kept.rows} == {("other", "shift")}


def test_steps_that_drift_by_themselves_hardly_wait(clock):
    positions(clock, StepShifter(lambda: PART, Kept()), 0.1 * math.e, 10 * SHIFTED_STEPS)
    assert sum(clock.slept_s) <= 10 * (0.1 + 0.0125)


@pytest.mark.parametrize("sensor", [None, PowerSensor(0.1, 0.1)])
def test_steps_do_not_wait_without_a_part_time_sensor(clock, sensor):
    positions(clock, StepShifter(lambda: sensor, Kept()), 0.1, 2 * SHIFTED_STEPS)
    assert clock.slept_s == []


def test_sensor_detected_later_counts_from_then_on(clock):
    reference = [None, PART]
    shifted = StepShifter(lambda: reference.pop(0), Kept())
    positions(clock, shifted, 0.1, SHIFTED_STEPS)
    assert clock.slept_s == []
    positions(clock, shifted, 0.1, SHIFTED_STEPS)
    assert clock.slept_s
