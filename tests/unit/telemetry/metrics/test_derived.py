"""Figures derived from rows, compared with plain loops over new rows, and with planted stragglers and overlaps."""

import math
import statistics

import numpy as np
import pytest

from hpcdist.telemetry.metrics import quantities
from hpcdist.telemetry.metrics.quantities import PER_RANK, DerivedFigures, StepRow, straggler_scores

PHASES = ("compute", "communication", "update")


def rows_of(rng, steps, world, tokens=1000.0, **changed):
    """Return rows with random times. ``changed`` replaces columns, (steps, world) or a number."""
    columns = {f"{phase}_s": rng.uniform(0.01, 0.1, (steps, world)) for phase in PHASES}
    columns["step_s"] = sum(columns.values()) + rng.uniform(0, 0.05, (steps, world))
    columns |= {name: np.broadcast_to(np.asarray(values, float), (steps, world)) for name, values in changed.items()}
    return [
        StepRow(
            step=step + 1,
            time_ns=step,
            loss=float(rng.uniform(1, 5)),
            learning_rate=1e-3,
            tokens=tokens,
            gradient_norm=float(rng.uniform(0.1, 2)),
            ranks={name: values[step] for name, values in columns.items()},
        )
        for step in range(steps)
    ]


def in_parts(rng, derived, rows):
    """Pass the rows in parts of any size, as flushes do."""
    results = []
    while len(results) < len(rows):
        size = int(rng.integers(1, 8))
        results += derived.of(rows[len(results) : len(results) + size])
    return results


@pytest.mark.parametrize("world", [1, 2, 5])
@pytest.mark.parametrize("window", [1, 4, 100])
def test_derived_figures_match_plain_loops(world, window, rng):
    rows = rows_of(rng, 30, world)
    result = in_parts(rng, DerivedFigures(window), rows)
    assert len(result) == len(rows)
    for index, (row, figures) in enumerate(zip(rows, result, strict=True)):
        steady = rows[max(0, index - window + 1) : index + 1]
        if len(steady) > 1 and steady[0] is rows[0]:
            steady = steady[1:]  # the first step compiles
        if window == 1 and index == 0:
            steady = [row]
        spent = sum(float(each.ranks["step_s"].max()) for each in steady)
        assert figures["tokens_per_second"] == pytest.approx(1000 * len(steady) / spent)
        share = sum(each.ranks["communication_s"].sum() for each in steady)
        share /= sum(each.ranks["step_s"].sum() for each in steady)
        assert figures["communication_ratio"] == pytest.approx(share)
        assert figures["step_seconds"] == row.ranks["step_s"].max()
        phases = {phase: float(row.ranks[f"{phase}_s"].mean()) for phase in PHASES}
        for phase, seconds in phases.items():
            assert figures[f"phase_seconds[{phase}]"] == pytest.approx(seconds)
        other = figures["phase_seconds[other]"]
        assert other + sum(phases.values()) == pytest.approx(float(row.ranks["step_s"].mean()))
        assert (figures["training_loss_nats"], figures["learning_rate"]) == (row.loss, row.learning_rate)
        assert figures["gradient_norm"] == row.gradient_norm


def test_derived_figures_do_not_depend_on_the_parts(rng):
    rows = rows_of(rng, 60, 3, exposed_s=0.01, overlapped_s=0.04)
    whole = DerivedFigures(10).of(rows)
    for _ in range(3):
        for one, other in zip(whole, in_parts(rng, DerivedFigures(10), rows), strict=True):
            assert {name: other[name] for name in one} == pytest.approx(one)
            assert set(other) - set(one) <= {"straggler_rank", "straggler_ratio"}  # with the last of each part


def test_derived_keys_are_in_the_catalogue(rng):
    rows = rows_of(rng, 3, 4, sent_bytes=5.0, exposed_s=0.01, overlapped_s=0.04)
    (_, _, figures) = DerivedFigures().of(rows)
    for name, label in {quantities.split(name) for name in figures}:
        assert bool(quantities.QUANTITIES[name].label) == (label is not None)
    assert {"straggler_rank", "hidden_communication_ratio"} <= set(figures)


@pytest.mark.parametrize("world", [3, 4, 8])
def test_planted_straggler_is_found(world, rng):
    compute_s = rng.uniform(0.1, 0.11, (40, world))
    slow, factor = int(rng.integers(world)), float(rng.uniform(1.3, 3))
    compute_s[:, slow] *= factor
    compute_s[rng.integers(40, size=5), rng.integers(world, size=5)] = 9.0  # single disturbed steps
    # The others wait for it, so that all steps are as long and the communication of the others is, too.
    step_s = np.repeat(compute_s.max(axis=1, keepdims=True) + 0.02, world, axis=1)
    derived = DerivedFigures(50)
    rows = rows_of(rng, 40, world, compute_s=compute_s, step_s=step_s, communication_s=step_s - compute_s)
    figures = derived.of(rows)[-1]
    assert figures["straggler_rank"] == slow
    assert figures["straggler_ratio"] == pytest.approx(factor, rel=0.15)
    others = np.delete(derived.scores, slow)
    assert derived.scores[slow] == figures["straggler_ratio"] and np.all(np.abs(others - 1) < 0.15)


def test_equal_ranks_have_no_straggler(rng):
    assert DerivedFigures().of(rows_of(rng, 30, 4, compute_s=0.2))[-1]["straggler_ratio"] == 1.0


def test_straggler_that_recovers_is_forgotten(rng):
    derived = DerivedFigures(10)
    slow = np.ones((10, 3)) * 0.1
    slow[:, 1] = 0.3
    assert derived.of(rows_of(rng, 10, 3, compute_s=slow))[-1]["straggler_ratio"] == pytest.approx(3)
    assert derived.of(rows_of(rng, 10, 3, compute_s=0.1))[-1]["straggler_ratio"] == pytest.approx(1)


def test_dedicated_servers_do_not_count_as_workers(rng):
    compute_s = np.tile([0.1, 0.1, 0.15, 0.0], (20, 1))
    communication_s = np.tile([0.1, 0.1, 0.05, 5.0], (20, 1))
    changed = {"compute_s": compute_s, "communication_s": communication_s, "step_s": compute_s + communication_s}
    derived = DerivedFigures()
    figures = derived.of(rows_of(rng, 20, 4, **changed))[-1]
    assert figures["straggler_rank"] == 2 and figures["straggler_ratio"] == pytest.approx(1.5)
    assert figures["communication_ratio"] == pytest.approx(0.25 / 0.6)
    assert figures["step_seconds"] == pytest.approx(0.2) and math.isnan(derived.scores[3])


def test_hidden_share_matches_the_summary(rng):
    from hpcdist.training.run.loop import StepStatistics
    from hpcdist.training.run.summary import overlap_figures

    exposed_s, overlapped_s = rng.uniform(0, 0.02, (30, 2)), rng.uniform(0.03, 0.05, (30, 2))
    rows = rows_of(rng, 30, 2, exposed_s=exposed_s, overlapped_s=overlapped_s)
    figures = DerivedFigures(100).of(rows)[-1]
    ranks = [StepStatistics(), StepStatistics()]
    for step in range(30):
        for rank, steps in enumerate(ranks):
            times = {"reductions_exposed_s": exposed_s[step, rank], "reductions_s": overlapped_s[step, rank]}
            steps.add(1.0, 0.0, **times)
    reference = overlap_figures([steps.measured() for steps in ranks])["communication_hidden_share"]
    assert figures["hidden_communication_ratio"] == pytest.approx(reference)


@pytest.mark.parametrize(("exposed", "total", "share"), [(0.05, 0.04, 0.0), (0.01, math.nan, None), (0.01, 0.0, None)])
def test_hidden_share_at_its_extremes(exposed, total, share, rng):
    figures = DerivedFigures().of(rows_of(rng, 4, 2, exposed_s=exposed, overlapped_s=total))[-1]
    assert figures.get("hidden_communication_ratio") == share


def test_missing_measurements_are_omitted(rng):
    ranks = {"step_s": np.array([0.5, math.nan]), "compute_s": np.array([0.2, 0.2])}
    row = StepRow(step=3, time_ns=0, loss=math.nan, learning_rate=0.1, tokens=10, ranks=ranks)
    shares = {"phase_seconds[compute]": 0.2, "straggler_rank": 0.0, "straggler_ratio": 1.0}
    reference = {"learning_rate": 0.1, "step_seconds": 0.5, "tokens_per_second": 20.0, **shares}
    assert DerivedFigures().of([row]) == [reference]
    assert DerivedFigures().of([StepRow(1, 0, 2.0, 0.1, 10)]) == [{"training_loss_nats": 2.0, "learning_rate": 0.1}]
    assert DerivedFigures().of([]) == []


def test_steps_without_times_are_excluded_from_the_speed(rng):
    rows = rows_of(rng, 10, 2, step_s=0.5)
    rows[5] = StepRow(6, 0, 1.0, 0.1, 1000.0, ranks={name: np.full(2, math.nan) for name in PER_RANK})
    result = DerivedFigures().of(rows)
    assert result[-1]["tokens_per_second"] == pytest.approx(2000)
    assert "step_seconds" not in result[5]


def test_first_step_is_excluded_once_there_is_another(rng):
    step_s = np.full((3, 2), 0.1)
    step_s[0] = 10.0
    result = DerivedFigures().of(rows_of(rng, 3, 2, step_s=step_s))
    assert [figures["tokens_per_second"] for figures in result] == pytest.approx([100, 10000, 10000])


def test_speed_of_asynchronous_workers(rng):
    step_s = np.tile([0.1, 0.3], (21, 1))
    step_s[::2, 0] = 0.2  # which of them is slower changes, but neither waits
    figures = DerivedFigures(lock_step=False).of(rows_of(rng, 21, 2, step_s=step_s))[-1]
    assert figures["tokens_per_second"] == pytest.approx(1000 * 20 / (0.3 * 20))
    step_s[::2, 1] = 0.0
    figures = DerivedFigures(lock_step=False).of(rows_of(rng, 21, 2, step_s=step_s))[-1]
    assert figures["tokens_per_second"] == pytest.approx(1000 * 20 / (0.3 * 10))
    assert DerivedFigures().of(rows_of(rng, 21, 2, step_s=step_s))[-1]["tokens_per_second"] == pytest.approx(
        1000 / 0.25
    )


def test_change_of_the_world_resets_the_figures(rng):
    derived = DerivedFigures(20)
    derived.of(rows_of(rng, 8, 4))
    before, after = rows_of(rng, 3, 4), rows_of(rng, 5, 3)
    result = derived.of([*before, *after])
    assert len(result) == 8 and derived.scores.shape == (3,)
    assert result[3:] == DerivedFigures(20).of(after)


def test_straggler_scores_of_ranks(rng):
    compute_s = rng.uniform(1, 2, (31, 5))
    compute_s[:, 3] = math.nan
    compute_s[rng.integers(31), 0] = math.nan
    scores = straggler_scores(compute_s)
    local_values = [
        statistics.median(column[np.isfinite(column)]) for column in compute_s.T if np.isfinite(column).any()
    ]
    assert scores[[0, 1, 2, 4]] == pytest.approx(np.array(local_values) / statistics.median(local_values))
    assert math.isnan(scores[3])
    assert np.isnan(straggler_scores(np.full((3, 2), math.nan))).all()
    assert straggler_scores(np.empty((0, 0))).shape == (0,)
