"""Part-time sensors: synthetic loads of known energy, seen for 25 ms of every 100 ms."""

import math

import numpy as np
import pytest

from benchmarks.operations.folded_energy import WorkIntervals, estimate, naive_j
from harness.marks import cases
from hpcdist.energy.part_time_sensor import UNKNOWN_SENSOR, PowerSensor, SensorShift, sensor_of
from stubs import synthetic_load

A100 = PowerSensor(0.1, 0.025)
BEGIN_NS = 10**15 + 12_345  # eleven days after a boot


def wave(rng, period_ms, duty, steps, *, shift=False, jitter=0.0, first_ns=None, sensor=A100, late=()):
    """Return a square wave of 400 W and 70 W with its sensor readings. The ``late`` steps begin 12.5 ms later."""
    lengths = np.rint(period_ms * 1e6 * (1 + jitter * rng.random(steps)))
    places = SensorShift(sensor, steps)
    count = iter(range(steps))

    def pause_s(now_ns):
        return places.pause_s(now_ns) if shift else 0.0125 * (next(count) in late)

    duties, watts = np.array([duty, 1 - duty]), np.array([400.0, 70.0])
    load = synthetic_load.training_load(duties, watts, lengths, 80.0, pause_s=pause_s, begin_ns=BEGIN_NS)
    if first_ns is None:
        first_ns = int(rng.integers(0, 10**8))
    return load, *synthetic_load.readings(load, sensor, BEGIN_NS + first_ns, rng, 3.0)


def estimate_energy(load, updates, power_w, sensor=A100):
    return estimate(sensor, updates, power_w, load.work, load.begin_ns, load.end_ns)


@pytest.mark.parametrize("period_ms", [50, 100, 200, 300])
@pytest.mark.parametrize("duty", [0.1, 0.25, 0.5, 0.75])
def test_square_waves_in_step_with_the_sensor_need_shifting(rng, period_ms, duty):
    still, updates, power_w = wave(rng, period_ms, duty, 128)
    result = estimate_energy(still, updates, power_w)
    assert math.isnan(result.energy_j) and "in step: shift them" in result.reason and result.seen_share < 0.9
    load, updates, power_w = wave(rng, period_ms, duty, 128, shift=True)
    result = estimate_energy(load, updates, power_w)
    assert result.energy_j == pytest.approx(load.energy_j, rel=0.05) and not result.reason
    assert result.seen_share == 1 and 0 < result.error_j < 0.05 * load.energy_j


@pytest.mark.parametrize("duty", [0.25, 0.5])
def test_correction_is_within_5_percent_if_naive_sum_is_30_percent_off(rng, duty):
    """Most steps are in step with the sensor, which samples them at their highest power."""
    late = set(range(160, 200, 5))  # eight steps of 200 begin a slot later each
    load, updates, power_w = wave(rng, 100, duty, 200, first_ns=25_000_000, late=late)
    naive = naive_j(power_w, A100.update_s) / load.energy_j - 1
    result = estimate_energy(load, updates, power_w)
    assert naive >= 0.3 and abs(result.energy_j / load.energy_j - 1) <= 0.05


def test_random_loads_are_within_5_percent_or_rejected(rng):
    """Without shifts, drifting steps are sampled gradually, and steady steps are rejected."""
    off = 0
    for _ in range(60):
        parts = int(rng.integers(2, 7))
        steady = rng.random() < 0.5
        length_ms = rng.choice([50, 100, 200]) if steady else rng.uniform(20, 600)
        steps = int(max(64, 10_000 / length_ms))
        lengths = np.rint(length_ms * 1e6 * (1 + (not steady) * 0.05 * rng.random(steps)))
        shares, watts = rng.dirichlet(np.ones(parts)), rng.uniform(60, 700, parts)
        first = BEGIN_NS + int(rng.integers(0, 10**8))
        for shifts in (False, True):
            pause_s = SensorShift(A100, steps).pause_s if shifts else lambda now_ns: 0.0
            load = synthetic_load.training_load(shares, watts, lengths, 80.0, pause_s=pause_s, begin_ns=BEGIN_NS)
            updates, power_w = synthetic_load.readings(load, A100, first, rng, 3.0)
            result = estimate_energy(load, updates, power_w)
            off += abs(naive_j(power_w, 0.1) / load.energy_j - 1) >= 0.3
            assert shifts is False or not result.reason
            assert result.reason or result.energy_j == pytest.approx(load.energy_j, rel=0.05)
    print(f"{off} naive sums of 120 were off by 30 % and more")


def test_phases_outside_of_steps_have_separate_joules(rng):
    """Each second of 37 ms steps is followed by a pause at 80 W. A checkpoint phase at 300 W comes last."""
    watts, shares = np.array([400.0, 100.0]), np.array([0.3, 0.7])
    wait = iter([0.2 * (step % 27 == 26) for step in range(400)])
    load = synthetic_load.training_load(shares, watts, np.full(400, 37e6), 80.0, pause_s=lambda now_ns: next(wait))
    end_ns = load.end_ns + 2 * 10**9
    whole = synthetic_load.SyntheticLoad(np.append(load.edges_ns, end_ns), np.append(load.power_w, 300.0), load.steps)
    updates, power_w = synthetic_load.readings(whole, A100, 40_000_000, rng, 3.0)
    work = WorkIntervals(load.steps, {"checkpoint": np.array([[load.end_ns, end_ns]])})
    result = estimate(A100, updates, power_w, work, 0, end_ns)
    assert result.by_phase["checkpoint"] == pytest.approx(600, rel=0.02)
    assert result.by_phase["idle"] == pytest.approx(80 * 0.2 * 14, rel=0.05)
    assert result.by_phase["step"] == pytest.approx(400 * 0.037 * 190, rel=0.02)
    assert result.energy_j == pytest.approx(sum(result.by_phase.values())) == pytest.approx(whole.energy_j, rel=0.02)


def test_edges_inside_a_step_follow_jitter(rng):
    """Backward takes 30 ms at 500 W, followed by a wait of 10 to 60 ms at 60 W. The profile shows the edge."""
    begins = np.concatenate([[0.0], np.cumsum(0.03 + rng.uniform(0.01, 0.06, 300))])
    steps = np.rint(np.stack([begins[:-1], begins[:-1] + 0.03, begins[1:]], axis=1) * 1e9).astype(np.int64)
    edges = np.append(steps[:, :2].ravel(), steps[-1, 2])
    load = synthetic_load.SyntheticLoad(edges, np.tile([500.0, 60.0], 300), steps)
    updates, power_w = synthetic_load.readings(load, A100, 40_000_000, rng, 3.0)
    result = estimate(A100, updates, power_w, WorkIntervals(steps), 0, load.end_ns)
    assert result.energy_j == pytest.approx(load.energy_j, rel=0.02)
    assert result.profile_w[0] > 400 and result.profile_w[-1] < 120


def test_phase_that_was_never_sampled_is_reported(rng):
    load, updates, power_w = wave(rng, 37, 0.5, 200)
    end_ns = load.end_ns + 10**9
    work = WorkIntervals(load.steps, {"checkpoint": np.array([[load.end_ns, end_ns]])})
    result = estimate(A100, updates, power_w, work, load.begin_ns, end_ns)
    assert math.isnan(result.energy_j) and result.reason == "the sensor never looked at checkpoint: measure for longer"
    few = estimate(A100, updates[:5], power_w[:5], load.work, load.begin_ns, load.end_ns)
    assert math.isnan(few.energy_j) and "5 new values" in few.reason
    with pytest.raises(ValueError, match="overlap"):
        estimate(A100, updates, power_w, WorkIntervals(load.steps, {"x": load.steps[3:5]}), load.begin_ns, end_ns)


def test_full_time_and_long_window_sensors_need_no_shift(rng):
    for sensor in (PowerSensor(0.1, 0.1), PowerSensor(0.1, 1.0)):
        load, updates, power_w = wave(rng, 87, 0.3, 300, sensor=sensor)
        assert estimate_energy(load, updates, power_w, sensor).energy_j == pytest.approx(load.energy_j, rel=0.03)
        assert SensorShift(sensor, 10).pause_s(123) == 0


def test_standard_error_matches_scatter_of_repetitions(rng):
    """Of normal errors, 68 % lie within one standard error, and next to none beyond ten."""
    ratios = []
    for _ in range(40):
        load, updates, power_w = wave(rng, float(rng.uniform(30, 300)), 0.4, 200, shift=True, jitter=0.03)
        result = estimate_energy(load, updates, power_w)
        ratios.append(abs(result.energy_j - load.energy_j) / result.error_j)
    assert 0.2 < np.median(ratios) < 2.5 and max(ratios) < 20


def test_steps_are_shifted_evenly_by_less_than_a_period(rng):
    for period_ms in (50, 100, 150, 200, 1000):
        load, _, _ = wave(rng, period_ms, 0.5, 160, shift=True)
        waited_s = (load.end_ns - load.begin_ns) / 1e9 - 160 * period_ms / 1e3
        offsets = (load.steps[:, 0] % 100_000_000) // 12_500_000
        assert set(np.bincount(offsets, minlength=8)) == {20} and 0 < waited_s < 0.1
    places = SensorShift(A100, 2)
    assert [places.pause_s(0) for _ in range(8)] == [pytest.approx(0.0125 * slot) for slot in range(8)]
    assert places.pause_s(0) == 0, "no pause remains after the last slot"


@cases(
    "name, window_s",
    ("NVIDIA A100-SXM4-80GB", 0.025),
    ("NVIDIA H100 PCIe", 0.025),
    ("NVIDIA H200", 0.025),
    ("NVIDIA GH200 480GB", 0.02),
    ("Tesla V100-SXM2-16GB", 0.01),
    ("NVIDIA GeForce GTX 1080 Ti", 0.01),
    ("Tesla T4", 0.1),
    ("NVIDIA GeForce RTX 3090", 0.1),
    ("NVIDIA RTX A6000", 0.1),
    ("Some Accelerator 9000", 0.1),
)
def test_sensor_window_of_known_devices(name, window_s):
    sensor = sensor_of(name)
    assert sensor.window_s == window_s and sensor.source
    assert (sensor.source == UNKNOWN_SENSOR) is name.startswith("Some")


def test_sensor_window_depends_on_field_and_update_interval():
    assert sensor_of("NVIDIA A100-SXM4-80GB", "average").window_s == 0.025, "a GA100 has no average"
    assert sensor_of("NVIDIA H100 PCIe", "average").window_s == 1.0
    assert sensor_of("Tesla T4").paced(0.12) == PowerSensor(0.12, 0.12, sensor_of("Tesla T4").source)
    assert A100.paced(0.12).window_s == 0.025 and A100.paced(math.nan) == A100
    assert A100.seen_share == 0.25 and PowerSensor(0.1, 1.0).seen_share == 1
