"""Anomaly flags: planted anomalies are reported once with their reason; smooth noisy runs raise no flag."""

import math

import numpy as np
import pytest

from hpcdist.telemetry.anomalies import (
    BLOCK_S,
    BLOCK_STEPS,
    DATA_SHARE,
    KINDS,
    MAX_SKIPPED,
    MIN_BLOCKS,
    MIN_STEPS,
    STRAGGLER,
    WARM_STEPS,
    WINDOW,
    Anomalies,
)
from hpcdist.telemetry.metrics.quantities import DerivedFigures, StepRow

TOKENS = 4096.0
SECONDS = BLOCK_S / BLOCK_STEPS * 1.2  # of a step: a block is so many steps
ENOUGH = WARM_STEPS + (MIN_BLOCKS + 1) * BLOCK_STEPS  # steps after which it is known what is usual


def curve(rng, steps, noise):
    """Return a falling loss like the loss of a language model, with relative noise, clipped at four deviations."""
    start, floor, pace = rng.uniform(4, 11), rng.uniform(0.5, 3), rng.uniform(20, 2000)
    smooth = floor + (start - floor) * (1 + np.arange(steps) / pace) ** -rng.uniform(0.3, 1)
    return smooth * (1 + noise * np.clip(rng.standard_normal(steps), -4, 4))


def figures_of(rng, **changed):
    """Return the figures of an ordinary step."""
    usual = {
        "training_loss_nats": 2 + 0.02 * rng.uniform(-1, 1),
        "gradient_norm": float(rng.uniform(0.8, 1.2)),
        "step_seconds": SECONDS * rng.uniform(0.9, 1.1),
        "straggler_rank": 0.0,
        "straggler_ratio": 1.1,
        "phase_seconds[compute]": 0.08,
        "phase_seconds[data]": 0.01,
        "phase_seconds[other]": 0.01,
    }
    return {name: value for name, value in (usual | changed).items() if value is not None}


def watch_steps(looking, rng, steps, first=1, **changed):
    """Pass ``steps`` ordinary steps with the ``changed`` figures to ``looking``. Return the reported anomalies."""
    flags = {name: changed.pop(name) for name in ("skipped", "held_up") if name in changed}
    results = []
    for step in range(first, first + steps):
        results += looking.of(step, TOKENS, figures_of(rng, **changed), **flags)
    return results


@pytest.mark.parametrize("steps", [3000])
@pytest.mark.parametrize("noise", [0.0, 0.001, 0.005, 0.015])
def test_smooth_runs_raise_no_flag(steps, noise, rng):
    looking = Anomalies()
    results = []
    speed = rng.uniform(0.02, 2)
    for step, loss in enumerate(curve(rng, steps, noise), start=1):
        figures = figures_of(rng, training_loss_nats=loss, step_seconds=speed * rng.lognormal(0, 0.15))
        figures["gradient_norm"] = float(np.exp(np.clip(rng.standard_normal(), -3.5, 3.5) * 0.25)) * loss
        results += looking.of(step, TOKENS, figures)
    assert results == [] and looking.counts.total() == 0


def test_noisy_loss_is_rarely_flagged(rng):
    results = []
    looking = Anomalies()
    for step, loss in enumerate(curve(rng, 5000, 0.06), start=1):
        results += looking.of(step, TOKENS, {"training_loss_nats": loss})
    assert len(results) <= 5  # at five robust deviations one step in 100,000 is


def test_constant_or_rising_loss_is_no_anomaly(rng):
    looking = Anomalies()
    for step in range(1, 800):
        rising = 2.0 * 1.0004**step * (1 + 0.005 * np.clip(rng.standard_normal(), -4, 4))
        assert looking.of(step, TOKENS, {"training_loss_nats": rising}) == []
    flat = Anomalies()
    assert all(flat.of(step, TOKENS, {"training_loss_nats": 2.0}) == [] for step in range(1, 300))


@pytest.mark.parametrize("noise", [0.0, 0.003, 0.01])
def test_planted_loss_spike_is_reported_once(noise, rng):
    losses = curve(rng, 1000, noise)
    at, length = int(rng.integers(200, 800)), int(rng.integers(1, 30))
    losses[at : at + length] *= rng.uniform(1.5, 4)
    looking = Anomalies()
    results = []
    for step, loss in enumerate(losses, start=1):
        results += looking.of(step, TOKENS, {"training_loss_nats": loss})
    assert [(anomaly.kind, anomaly.step) for anomaly in results] == [("loss_spike", at + 1)]
    (anomaly,) = results
    assert anomaly.value == losses[at] and anomaly.reference == pytest.approx(np.median(losses[at - 100 : at]))
    assert anomaly.text.startswith(f"step {at + 1}: loss {losses[at]:.4g}, ")
    assert f"the median {anomaly.reference:.4g} of the 100 steps before" in anomaly.text
    assert looking.counts == {"loss_spike": 1}


def test_two_loss_spikes_are_reported_twice(rng):
    losses = curve(rng, 600, 0.005)
    losses[[300, 301, 340, 500]] *= 3  # the third belongs to the first
    looking = Anomalies()
    results = [a for step, loss in enumerate(losses) for a in looking.of(step, 1.0, {"training_loss_nats": loss})]
    assert [anomaly.step for anomaly in results] == [300, 500]


def test_increase_below_10_percent_is_no_spike(rng):
    looking = Anomalies()
    for step in range(200):
        assert looking.of(step, 1.0, {"training_loss_nats": 2.0 + 1e-4 * rng.uniform(-1, 1)}) == []
    assert looking.of(200, 1.0, {"training_loss_nats": 2.19}) == []
    assert [anomaly.kind for anomaly in looking.of(201, 1.0, {"training_loss_nats": 2.3})] == ["loss_spike"]


def test_loss_that_stays_high_becomes_the_reference(rng):
    losses = np.concatenate([curve(rng, 300, 0.003), np.full(500, 20.0)])
    losses[700] = 60.0
    looking = Anomalies()
    results = [a for step, loss in enumerate(losses) for a in looking.of(step, 1.0, {"training_loss_nats": loss})]
    assert [anomaly.step for anomaly in results] == [300, 700]


def test_first_steps_raise_no_flag(rng):
    looking = Anomalies()
    for step in range(MIN_STEPS):
        assert looking.of(step, 1.0, {"training_loss_nats": float(rng.uniform(0.1, 100))}) == []


def test_gradient_spike_is_reported(rng):
    looking = Anomalies()
    assert watch_steps(looking, rng, 150) == []
    (anomaly,) = watch_steps(looking, rng, 3, first=151, gradient_norm=50.0)
    assert (anomaly.kind, anomaly.step, anomaly.value) == ("gradient_spike", 151, 50.0)
    assert "norm of the gradient 50" in anomaly.text


def test_non_finite_figures_are_ignored(rng):
    looking = Anomalies()
    for value in (math.nan, math.inf, None):
        assert watch_steps(looking, rng, 100, training_loss_nats=value, gradient_norm=value, straggler_ratio=None) == []
    assert looking.of(7, TOKENS, {}) == []


def test_repeated_gradient_spikes_are_reported_once(rng):
    looking = Anomalies()
    results = []
    for step in range(1, 2000):
        burst = float(rng.pareto(1.5)) * 5 if step % 3 == 0 else 1.0
        results += looking.of(step, TOKENS, figures_of(rng, gradient_norm=burst))
    assert [anomaly.kind for anomaly in results] in ([], ["gradient_spike"])


@pytest.mark.parametrize("factor", [2.5, 10.0])
def test_throughput_drop_is_reported(factor, rng):
    looking = Anomalies()
    assert watch_steps(looking, rng, ENOUGH) == []
    result = watch_steps(looking, rng, 3 * BLOCK_STEPS, first=ENOUGH + 1, step_seconds=factor * SECONDS)
    assert [anomaly.kind for anomaly in result] == ["throughput_drop"]
    (anomaly,) = result
    assert ENOUGH < anomaly.step <= ENOUGH + 2 * BLOCK_STEPS
    assert anomaly.reference == pytest.approx(TOKENS / SECONDS, rel=0.1)
    assert f"{anomaly.reference:,.0f}" in anomaly.text and "tokens/s" in anomaly.text
    assert watch_steps(looking, rng, ENOUGH, first=500) == []  # it is over
    assert [a.kind for a in watch_steps(looking, rng, 30, first=800, step_seconds=10 * SECONDS)] == ["throughput_drop"]


def test_speed_that_stays_low_becomes_the_reference(rng):
    looking = Anomalies()
    watch_steps(looking, rng, 2 * ENOUGH)
    assert len(watch_steps(looking, rng, 1000, first=500, step_seconds=5 * SECONDS)) == 1
    assert len(watch_steps(looking, rng, 50, first=1500, step_seconds=25 * SECONDS)) == 1


def test_alternating_speed_is_reported_once(rng):
    looking = Anomalies()
    watch_steps(looking, rng, ENOUGH)
    results = []
    for first in range(1000, 1400, 2 * BLOCK_STEPS):
        results += watch_steps(looking, rng, BLOCK_STEPS, first=first, step_seconds=4 * SECONDS)
        results += watch_steps(looking, rng, BLOCK_STEPS, first=first + BLOCK_STEPS)
    assert len(results) == 1


def test_single_slow_steps_are_no_throughput_drop(rng):
    looking = Anomalies()
    watch_steps(looking, rng, ENOUGH)
    for first in range(1000, 1400, BLOCK_STEPS):
        assert watch_steps(looking, rng, BLOCK_STEPS // 2 - 1, first=first, step_seconds=1.5 * BLOCK_S) == []
        assert watch_steps(looking, rng, BLOCK_STEPS // 2 + 1, first=first + BLOCK_STEPS // 2 - 1) == []


def test_drop_of_a_few_seconds_is_not_reported(rng):
    looking = Anomalies()
    watch_steps(looking, rng, 100_000 // 20, step_seconds=0.02)
    assert watch_steps(looking, rng, 80, first=6000, step_seconds=0.05) == []
    assert watch_steps(looking, rng, 1000, first=7000, step_seconds=0.02) == []


def test_slow_steps_around_a_checkpoint_are_no_drop(rng):
    looking = Anomalies()
    watch_steps(looking, rng, ENOUGH)
    assert watch_steps(looking, rng, 30, first=ENOUGH + 1, step_seconds=50 * SECONDS, held_up=True) == []


def test_drop_below_the_threshold_is_not_reported(rng):
    for drop, output in ((0.5, 0), (0.2, 1)):
        looking = Anomalies(throughput_drop=drop, unit="samples")
        watch_steps(looking, rng, ENOUGH)
        assert len(watch_steps(looking, rng, 60, first=ENOUGH + 1, step_seconds=1.5 * SECONDS)) == output


def test_slow_first_steps_are_no_reference(rng):
    looking = Anomalies()
    assert watch_steps(looking, rng, WARM_STEPS, step_seconds=0.001) == []
    assert watch_steps(looking, rng, 2 * ENOUGH, first=WARM_STEPS + 1) == []


@pytest.mark.parametrize("off", ["loss_spike", "throughput_drop"])
def test_disabled_kinds_are_not_reported(off, rng):
    looking = Anomalies(**{off: 0.0})
    watch_steps(looking, rng, ENOUGH)
    result = watch_steps(looking, rng, 30, first=ENOUGH + 1, training_loss_nats=40.0, step_seconds=5 * SECONDS)
    assert {anomaly.kind for anomaly in result} == {"loss_spike", "throughput_drop"} - {off}


def test_straggler_is_reported(rng):
    looking = Anomalies()
    watch_steps(looking, rng, 50)
    (anomaly,) = watch_steps(looking, rng, 30, first=51, straggler_rank=3.0, straggler_ratio=1.8)
    assert (anomaly.kind, anomaly.value, anomaly.reference) == ("straggler", 1.8, 1.0)
    assert 51 < anomaly.step <= 51 + BLOCK_S / (0.9 * SECONDS) + 1
    assert "rank 3 computes 1.80 times" in anomaly.text
    assert watch_steps(looking, rng, WINDOW - 10, first=81) == []  # not yet over
    assert watch_steps(looking, rng, 30, first=181, straggler_rank=3.0, straggler_ratio=1.4) == []
    assert watch_steps(looking, rng, WINDOW + 10, first=211) == []
    assert len(watch_steps(looking, rng, 30, first=351, straggler_rank=3.0, straggler_ratio=1.4)) == 1  # again
    # Another one is told of when the first has been well for a while.
    result = watch_steps(looking, rng, WINDOW + 30, first=381, straggler_rank=2.0, straggler_ratio=1.4)
    assert ["rank 2" in anomaly.text for anomaly in result] == [True]


def test_alternating_stragglers_are_not_reported(rng):
    looking = Anomalies()
    for step in range(1, 500):
        rank = float(step // 3 % 4)
        assert looking.of(step, TOKENS, figures_of(rng, straggler_rank=rank, straggler_ratio=1.6)) == []


def test_momentary_straggler_is_not_reported(rng):
    looking = Anomalies()
    watch_steps(looking, rng, 50, step_seconds=0.01)
    assert watch_steps(looking, rng, 500, first=51, step_seconds=0.01, straggler_ratio=1.6) == []


def test_straggler_in_rows_is_reported(rng):
    """From rows to the flag, through `Derived`."""
    derived, looking, slow = DerivedFigures(50), Anomalies(), int(rng.integers(4))
    results = []
    for step in range(1, 200):
        compute_s = rng.uniform(1.0, 1.1, 4)
        compute_s[slow] *= 1 if step < 100 else 1.6
        ranks = {"compute_s": compute_s, "step_s": np.full(4, compute_s.max())}
        (figures,) = derived.of([StepRow(step, 0, 2.0, 0.1, TOKENS, ranks=ranks)])
        results += looking.of(step, TOKENS, figures)
    assert [anomaly.kind for anomaly in results] == ["straggler"]
    assert f"rank {slow} " in results[0].text and 100 < results[0].step <= 165 and results[0].value > STRAGGLER


def test_consecutive_skipped_steps_are_reported(rng):
    looking = Anomalies()
    for first in range(1, 200, MAX_SKIPPED):  # now and then one is skipped
        assert watch_steps(looking, rng, MAX_SKIPPED - 1, first=first, skipped=True) == []
        assert watch_steps(looking, rng, 1, first=first + MAX_SKIPPED - 1) == []
    result = watch_steps(looking, rng, 5 * MAX_SKIPPED, first=201, skipped=True)
    assert [(a.kind, a.step, a.value) for a in result] == [("skipped_steps", 200 + MAX_SKIPPED, MAX_SKIPPED)]


def test_waiting_for_data_is_reported(rng):
    looking = Anomalies()
    assert watch_steps(looking, rng, 50) == []
    slow = {"phase_seconds[data]": 0.2}
    result = watch_steps(looking, rng, 50, first=51, **slow)
    assert [anomaly.kind for anomaly in result] == ["slow_data"]
    assert result[0].value > DATA_SHARE and "waiting for data" in result[0].text
    watch_steps(looking, rng, ENOUGH, first=101)
    assert len(watch_steps(looking, rng, 50, first=300, **slow)) == 1
    assert watch_steps(Anomalies(), rng, 60, **{"phase_seconds[data]": None}) == []


def test_every_kind_can_be_reported_and_counted(rng):
    looking = Anomalies()
    watch_steps(looking, rng, ENOUGH)
    odd = {"training_loss_nats": 30.0, "gradient_norm": 90.0, "step_seconds": 9.0, "phase_seconds[data]": 1.0}
    result = watch_steps(looking, rng, 30, first=ENOUGH + 1, skipped=True, straggler_ratio=3.0, **odd)
    assert sorted(anomaly.kind for anomaly in result) == sorted(KINDS)
    assert looking.counts == dict.fromkeys(KINDS, 1)
    assert all(anomaly.text.startswith(f"step {anomaly.step}: ") for anomaly in result)
