"""Flags: planted anomalies are found once, with their reason; smooth runs with fresh noise raise none."""

import math

import numpy as np
import pytest

from hpcdist.telemetry.anomalies import DATA_SHARE, KINDS, LEAST, RECENT, SKIPPED, STRAGGLER, WARM_STEPS, Anomalies
from hpcdist.telemetry.derived import Derived, Row

TOKENS = 4096.0


def curve(rng, steps, noise):
    """A loss that falls as those of language models do, with noise relative to it, clipped at four deviations."""
    start, floor, pace = rng.uniform(4, 11), rng.uniform(0.5, 3), rng.uniform(20, 2000)
    smooth = floor + (start - floor) * (1 + np.arange(steps) / pace) ** -rng.uniform(0.3, 1)
    return smooth * (1 + noise * np.clip(rng.standard_normal(steps), -4, 4))


def figures_of(rng, **changed):
    """Figures of an ordinary step."""
    usual = {
        "training_loss_nats": 2 + 0.02 * rng.uniform(-1, 1),
        "gradient_norm": float(rng.uniform(0.8, 1.2)),
        "step_seconds": 0.1 * rng.uniform(0.9, 1.1),
        "straggler_rank": 0.0,
        "straggler_ratio": 1.1,
        "phase_seconds[compute]": 0.08,
        "phase_seconds[data]": 0.01,
        "phase_seconds[other]": 0.01,
    }
    return {name: value for name, value in (usual | changed).items() if value is not None}


def watched(looking, rng, steps, first=1, **changed):
    """Let ``looking`` see so many ordinary steps but for what is ``changed``; return what it tells."""
    flags = {name: changed.pop(name) for name in ("skipped", "held_up") if name in changed}
    found = []
    for step in range(first, first + steps):
        found += looking.of(step, TOKENS, figures_of(rng, **changed), **flags)
    return found


@pytest.mark.parametrize("steps", [3000])
@pytest.mark.parametrize("noise", [0.0, 0.001, 0.005, 0.015])
def test_smooth_runs_raise_no_alarm(steps, noise, rng):
    looking = Anomalies()
    found = []
    speed = rng.uniform(0.5, 2)
    for step, loss in enumerate(curve(rng, steps, noise), start=1):
        figures = figures_of(rng, training_loss_nats=loss, step_seconds=speed * rng.lognormal(0, 0.15))
        figures["gradient_norm"] = float(np.exp(np.clip(rng.standard_normal(), -3.5, 3.5) * 0.25)) * loss
        found += looking.of(step, TOKENS, figures)
    assert found == [] and looking.counts.total() == 0


def test_a_loss_that_varies_much_is_seldom_told_of(rng):
    found = []
    looking = Anomalies()
    for step, loss in enumerate(curve(rng, 5000, 0.06), start=1):
        found += looking.of(step, TOKENS, {"training_loss_nats": loss})
    assert len(found) <= 5  # at five robust deviations one step in 100,000 is


def test_a_loss_that_does_not_fall_is_no_anomaly(rng):
    looking = Anomalies()
    for step in range(1, 800):
        rising = 2.0 * 1.0004**step * (1 + 0.005 * np.clip(rng.standard_normal(), -4, 4))
        assert looking.of(step, TOKENS, {"training_loss_nats": rising}) == []
    flat = Anomalies()
    assert all(flat.of(step, TOKENS, {"training_loss_nats": 2.0}) == [] for step in range(1, 300))


@pytest.mark.parametrize("noise", [0.0, 0.003, 0.01])
def test_a_planted_spike_is_told_once(noise, rng):
    losses = curve(rng, 1000, noise)
    at, length = int(rng.integers(200, 800)), int(rng.integers(1, 30))
    losses[at : at + length] *= rng.uniform(1.5, 4)
    looking = Anomalies()
    found = []
    for step, loss in enumerate(losses, start=1):
        found += looking.of(step, TOKENS, {"training_loss_nats": loss})
    assert [(anomaly.kind, anomaly.step) for anomaly in found] == [("loss_spike", at + 1)]
    (anomaly,) = found
    assert anomaly.value == losses[at] and anomaly.reference == pytest.approx(np.median(losses[at - 100 : at]))
    assert anomaly.text.startswith(f"step {at + 1}: loss {losses[at]:.4g}, ")
    assert f"the median {anomaly.reference:.4g} of the 100 steps before" in anomaly.text
    assert looking.counts == {"loss_spike": 1}


def test_two_spikes_are_two(rng):
    losses = curve(rng, 600, 0.005)
    losses[[300, 301, 400]] *= 3
    looking = Anomalies()
    found = [a for step, loss in enumerate(losses) for a in looking.of(step, 1.0, {"training_loss_nats": loss})]
    assert [anomaly.step for anomaly in found] == [300, 400]


def test_less_than_a_tenth_is_no_spike(rng):
    looking = Anomalies()
    for step in range(200):
        assert looking.of(step, 1.0, {"training_loss_nats": 2.0 + 1e-4 * rng.uniform(-1, 1)}) == []
    assert looking.of(200, 1.0, {"training_loss_nats": 2.19}) == []
    assert [anomaly.kind for anomaly in looking.of(201, 1.0, {"training_loss_nats": 2.3})] == ["loss_spike"]


def test_a_loss_that_stays_high_becomes_usual(rng):
    losses = np.concatenate([curve(rng, 300, 0.003), np.full(300, 20.0)])
    losses[500] = 60.0
    looking = Anomalies()
    found = [a for step, loss in enumerate(losses) for a in looking.of(step, 1.0, {"training_loss_nats": loss})]
    assert [anomaly.step for anomaly in found] == [300, 500]


def test_nothing_is_usual_at_first(rng):
    looking = Anomalies()
    for step in range(LEAST):
        assert looking.of(step, 1.0, {"training_loss_nats": float(rng.uniform(0.1, 100))}) == []


def test_a_gradient_that_bursts(rng):
    looking = Anomalies()
    assert watched(looking, rng, 150) == []
    (anomaly,) = watched(looking, rng, 3, first=151, gradient_norm=50.0)
    assert (anomaly.kind, anomaly.step, anomaly.value) == ("gradient_spike", 151, 50.0)
    assert "norm of the gradient 50" in anomaly.text


def test_what_is_not_finite_is_not_looked_at(rng):
    looking = Anomalies()
    for value in (math.nan, math.inf, None):
        assert watched(looking, rng, 100, training_loss_nats=value, gradient_norm=value, straggler_ratio=None) == []
    assert looking.of(7, TOKENS, {}) == []


@pytest.mark.parametrize("factor", [2.5, 10.0])
def test_throughput_that_drops(factor, rng):
    looking = Anomalies()
    assert watched(looking, rng, 120) == []
    found = watched(looking, rng, 30, first=121, step_seconds=0.1 * factor)
    assert [anomaly.kind for anomaly in found] == ["throughput_drop"]
    (anomaly,) = found
    assert 121 + RECENT // 2 - 1 <= anomaly.step <= 121 + RECENT
    assert anomaly.reference == pytest.approx(TOKENS / 0.1, rel=0.1)
    assert f"{anomaly.reference:,.0f}" in anomaly.text and "tokens/s" in anomaly.text
    assert watched(looking, rng, 50, first=151) == []  # it is over
    assert [a.kind for a in watched(looking, rng, 30, first=201, step_seconds=1.0)] == ["throughput_drop"]


def test_a_speed_that_stays_low_becomes_usual(rng):
    looking = Anomalies()
    watched(looking, rng, 200)
    assert len(watched(looking, rng, 400, first=201, step_seconds=0.5)) == 1
    assert len(watched(looking, rng, 50, first=601, step_seconds=2.5)) == 1


def test_single_slow_steps_are_no_drop(rng):
    looking = Anomalies()
    watched(looking, rng, 100)
    for first in range(101, 400, RECENT):
        assert watched(looking, rng, RECENT // 2 - 1, first=first, step_seconds=9.0) == []
        assert watched(looking, rng, RECENT // 2 + 1, first=first + RECENT // 2 - 1) == []


def test_slow_steps_around_a_checkpoint_are_no_drop(rng):
    looking = Anomalies()
    watched(looking, rng, 100)
    assert watched(looking, rng, 30, first=101, step_seconds=5.0, held_up=True) == []


def test_a_drop_of_less_is_none(rng):
    looking = Anomalies(throughput_drop=0.5)
    watched(looking, rng, 100)
    assert watched(looking, rng, 60, first=101, step_seconds=0.15) == []
    strict = Anomalies(throughput_drop=0.2)
    watched(strict, rng, 100)
    assert len(watched(strict, rng, 60, first=101, step_seconds=0.15)) == 1


def test_slow_first_steps_are_no_reference(rng):
    looking = Anomalies()
    assert watched(looking, rng, WARM_STEPS, step_seconds=0.001) == []
    assert watched(looking, rng, 100, first=WARM_STEPS + 1) == []


@pytest.mark.parametrize("off", ["loss_spike", "throughput_drop"])
def test_off(off, rng):
    looking = Anomalies(**{off: 0.0})
    watched(looking, rng, 100)
    found = watched(looking, rng, 30, first=101, training_loss_nats=40.0, step_seconds=5.0)
    assert {anomaly.kind for anomaly in found} == {"loss_spike", "throughput_drop"} - {off}


def test_a_straggler(rng):
    looking = Anomalies()
    watched(looking, rng, 50)
    (anomaly,) = watched(looking, rng, 20, first=51, straggler_rank=3.0, straggler_ratio=1.8)
    assert (anomaly.kind, anomaly.step, anomaly.value, anomaly.reference) == ("straggler", 51, 1.8, 1.0)
    assert "rank 3 computes 1.80 times" in anomaly.text
    assert watched(looking, rng, 20, first=71, straggler_rank=3.0, straggler_ratio=1.25) == []  # not yet over
    assert watched(looking, rng, 20, first=91, straggler_rank=3.0, straggler_ratio=1.4) == []
    assert len(watched(looking, rng, 5, first=111, straggler_rank=2.0, straggler_ratio=1.4)) == 1  # another rank
    assert watched(looking, rng, 5, first=116) == []
    assert len(watched(looking, rng, 5, first=121, straggler_rank=2.0, straggler_ratio=1.4)) == 1  # again


def test_a_straggler_among_rows(rng):
    """From rows to the flag, by way of `Derived`."""
    derived, looking, slow = Derived(50), Anomalies(), int(rng.integers(4))
    found = []
    for step in range(1, 200):
        compute_s = rng.uniform(0.1, 0.11, 4)
        compute_s[slow] *= 1 if step < 100 else 1.6
        ranks = {"compute_s": compute_s, "step_s": np.full(4, compute_s.max())}
        (figures,) = derived.of([Row(step, 0, 2.0, 0.1, TOKENS, ranks=ranks)])
        found += looking.of(step, TOKENS, figures)
    assert [anomaly.kind for anomaly in found] == ["straggler"]
    assert f"rank {slow} " in found[0].text and 100 < found[0].step <= 151 and found[0].value > STRAGGLER


def test_steps_that_update_nothing(rng):
    looking = Anomalies()
    for first in range(1, 200, SKIPPED):  # now and then one is skipped
        assert watched(looking, rng, SKIPPED - 1, first=first, skipped=True) == []
        assert watched(looking, rng, 1, first=first + SKIPPED - 1) == []
    found = watched(looking, rng, 5 * SKIPPED, first=201, skipped=True)
    assert [(a.kind, a.step, a.value) for a in found] == [("skipped_steps", 200 + SKIPPED, SKIPPED)]


def test_waiting_for_data(rng):
    looking = Anomalies()
    assert watched(looking, rng, 50) == []
    slow = {"phase_seconds[data]": 0.2}
    found = watched(looking, rng, 50, first=51, **slow)
    assert [anomaly.kind for anomaly in found] == ["slow_data"]
    assert found[0].value > DATA_SHARE and "waiting for data" in found[0].text
    watched(looking, rng, 50, first=101)
    assert len(watched(looking, rng, 50, first=151, **slow)) == 1
    unknown = Anomalies()
    assert watched(unknown, rng, 60, **{"phase_seconds[data]": None}) == []


def test_every_kind_is_known_and_counted(rng):
    looking = Anomalies()
    watched(looking, rng, 100)
    odd = {"training_loss_nats": 30.0, "gradient_norm": 90.0, "step_seconds": 9.0, "phase_seconds[data]": 1.0}
    found = watched(looking, rng, 30, first=101, skipped=True, straggler_ratio=3.0, **odd)
    assert sorted(anomaly.kind for anomaly in found) == sorted(KINDS)
    assert looking.counts == dict.fromkeys(KINDS, 1)
    assert all(anomaly.text.startswith(f"step {anomaly.step}: ") for anomaly in found)
