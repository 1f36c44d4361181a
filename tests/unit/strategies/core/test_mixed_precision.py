"""The loss scale: when it rises and falls, when a run gives up, and its state in a checkpoint."""

import math
from itertools import groupby
from types import SimpleNamespace

import pytest

from hpcdist.errors import NonFiniteError
from hpcdist.hdf5 import files
from hpcdist.strategies.core.mixed_precision import (
    INITIAL_SCALE,
    MAXIMUM_OVERFLOWS,
    MAXIMUM_SCALE,
    MINIMUM_SCALE,
    DynamicLossScale,
    FixedLossScale,
    NoLossScale,
    build_loss_scale,
)
from hpcdist.telemetry.metrics import side_tables
from hpcdist.telemetry.metrics.step_metrics import SCHEMA, VERSION, MetricsWriter


def scales(scale, norms):
    """Return the scale after each of ``norms``: "." is finite, "x" is not."""
    results = []
    for norm in norms:
        assert scale.after("step", 1.0 if norm == "." else math.inf) == (norm == ".")
        results.append(scale.scale)
    return results


def test_scale_halves_after_h_overflows_in_a_row_and_each_later_one():
    assert scales(DynamicLossScale(64.0, hysteresis=1), "x.x") == [32, 32, 16]
    assert scales(DynamicLossScale(64.0, hysteresis=2), "x.xx.xxx") == [64, 64, 64, 32, 32, 32, 16, 8]
    assert scales(DynamicLossScale(64.0, hysteresis=3), "xxxx") == [64, 64, 32, 16]


def test_scale_doubles_after_an_interval_without_overflow():
    assert scales(DynamicLossScale(8.0, interval=3, hysteresis=1), "......") == [8, 8, 16, 16, 16, 32]
    assert scales(DynamicLossScale(8.0, interval=3, hysteresis=2), "..x...") == [8, 8, 8, 8, 8, 16], "it counts anew"
    assert scales(DynamicLossScale(MAXIMUM_SCALE, interval=1), "..") == [MAXIMUM_SCALE, MAXIMUM_SCALE]


def by_runs(norms, start, interval, hysteresis, least):
    """Return the scale after each step, and the step that gives up.


    This reference handles runs of equal steps and keeps no counters between them.
    """
    results = []
    for kind, run in groupby(norms):
        length, first = len(list(run)), results[-1] if results else start
        if kind == ".":
            results += [min(first * 2.0 ** ((n + 1) // interval), MAXIMUM_SCALE) for n in range(length)]
            continue
        to_least = int(math.log2(first / least))
        results += [max(first / 2.0 ** max(0, n + 2 - hysteresis), least) for n in range(length)]
        stops = (hysteresis - 1 + to_least if to_least else 0) + MAXIMUM_OVERFLOWS - 1  # of the run, from 0
        if length > stops:
            return results[: len(results) - length + stops], len(results) - length + stops
    return results, None


@pytest.mark.parametrize("hysteresis", [1, 2, 5])
def test_scale_follows_the_rules_for_random_overflows(hysteresis, rng):
    stopped = 0
    for _ in range(200):
        likely, interval, least = rng.choice([0.1, 0.5, 0.9]), int(rng.integers(1, 6)), 2.0 ** int(rng.integers(-3, 4))
        norms = "".join(rng.choice([".", "x"], 60, p=[1 - likely, likely]))
        start = max(2.0 ** int(rng.integers(0, 24)), least)
        expected, stops = by_runs(norms, start, interval, hysteresis, least)
        scale = DynamicLossScale(start, interval=interval, hysteresis=hysteresis, least=least)
        assert scales(scale, norms[:stops]) == expected
        if stops is not None:
            stopped += 1
            with pytest.raises(
                NonFiniteError, match=f"for {MAXIMUM_OVERFLOWS} steps in a row at the loss scale {least:g}; "
            ):
                scale.after("", math.inf)
    assert 0 < stopped < 200, "both ends were met"


def test_scale_without_hysteresis_matches_pytorch(rng):
    torch = pytest.importorskip("torch", reason="PyTorch comes with the extra `reference`")
    theirs = torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=3)
    mine = DynamicLossScale(2.0**12, interval=3, hysteresis=1, least=2.0**-24)
    weight = torch.zeros(1, requires_grad=True)
    taken = []
    optimizer = SimpleNamespace(param_groups=[{"params": [weight]}], step=lambda: taken.append(1))
    for overflows in rng.random(60) < 0.3:
        theirs.scale(torch.zeros(1))
        weight.grad = torch.tensor([math.inf if overflows else 1.0])
        before = len(taken)
        theirs.step(optimizer)
        assert mine.after("", math.inf if overflows else 1.0) == (len(taken) > before)
        theirs.update()
        assert mine.scale == theirs.get_scale() and 2.0**-24 < mine.scale < MAXIMUM_SCALE


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_skipped_steps_are_counted(bad):
    scale = DynamicLossScale()
    assert [scale.after("", norm) for norm in (1.0, bad, bad, 0.0, bad)] == [True, False, False, True, False]
    assert scale.skipped == 3


def test_repeated_overflows_at_the_minimum_scale_raise():
    scale = DynamicLossScale(2.0 * MINIMUM_SCALE, hysteresis=1)
    assert scales(scale, "x" + "x" * (MAXIMUM_OVERFLOWS - 1) + "." + "x" * (MAXIMUM_OVERFLOWS - 1))[-1] == MINIMUM_SCALE
    with pytest.raises(
        NonFiniteError, match=rf"step 9: the gradient has overflowed float16 for {MAXIMUM_OVERFLOWS} steps .* scale 1;"
    ):
        scale.after("step 9", math.nan)


def test_repeated_overflows_at_a_fixed_scale_raise():
    scale = FixedLossScale(256.0)
    assert [scale.after("", norm) for norm in [math.inf] * (MAXIMUM_OVERFLOWS - 1) + [1.0]] == [False] * (
        MAXIMUM_OVERFLOWS - 1
    ) + [True]
    assert scale.scale == 256.0 and scale.skipped == MAXIMUM_OVERFLOWS - 1
    assert [scale.after("", norm) for norm in [math.inf] * (MAXIMUM_OVERFLOWS - 1)] == [False] * (MAXIMUM_OVERFLOWS - 1)
    with pytest.raises(NonFiniteError, match=r"scale 256; try a smaller precision\.loss_scale"):
        scale.after("", math.inf)


def test_restored_scale_continues_like_the_saved_one():
    script = "..x...xx..x.x" * 4
    for cut in range(0, len(script), 5):
        whole, first, second = (DynamicLossScale(2.0**10, interval=3, hysteresis=2) for _ in range(3))
        expected = scales(whole, script)
        before = scales(first, script[:cut])
        second.restore(first.state())
        assert before + scales(second, script[cut:]) == expected
        assert second == whole


def test_resume_may_add_or_drop_a_loss_scale():
    scale = DynamicLossScale()
    scale.restore(NoLossScale().state())
    assert scale.scale == INITIAL_SCALE
    NoLossScale().restore(scale.state())
    higher = DynamicLossScale(least=8.0)
    higher.restore(DynamicLossScale(4.0).state())
    assert higher.scale == 8.0, "the least of this run"
    fixed = FixedLossScale(8.0)
    fixed.restore(DynamicLossScale(4.0, skipped=3).state())
    assert (fixed.scale, fixed.skipped) == (8.0, 3)


def test_only_float16_has_a_loss_scale():
    assert type(build_loss_scale("bfloat16", 0.0, 10, 2)) is NoLossScale
    assert type(build_loss_scale("float32", 0.0, 10, 2)) is NoLossScale
    assert build_loss_scale("float16", 8.0, 10, 2) == FixedLossScale(8.0)
    assert build_loss_scale("float16", 0.0, 10, 3) == DynamicLossScale(INITIAL_SCALE, interval=10, hysteresis=3)
    assert build_loss_scale("float16", 0.0, 10, 3, 8.0) == DynamicLossScale(
        INITIAL_SCALE, interval=10, hysteresis=3, least=8.0
    )
    with pytest.raises(NonFiniteError, match="step 4"):
        NoLossScale().after("step 4", math.nan)


def test_metrics_record_the_scale_and_a_resume_rewrites_it(tmp_path):
    path, writer = tmp_path / "metrics.h5", MetricsWriter(tmp_path / "metrics.h5", world=1)
    for step, scale, skipped in ((1, 64.0, False), (5, 64.0, True), (6, 32.0, False), (5, 64.0, False)):
        writer.put(side_tables.LOSS_SCALE, step=step, scale=scale, skipped=skipped)
    with files.open_read(path, SCHEMA, VERSION) as file:
        result = side_tables.LOSS_SCALE.read(file)
    assert {name: values.tolist() for name, values in result.items()} == {
        "step": [1, 5],
        "session": [0, 0],
        "scale": [64.0, 64.0],
        "skipped": [0, 0],
    }
