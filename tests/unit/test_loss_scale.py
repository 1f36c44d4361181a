"""The scale of the loss: when it rises and falls, when a run gives up, and what a checkpoint keeps of it."""

import math
from pathlib import Path

import pytest

from hpcdist.errors import NonFiniteError
from hpcdist.hdf5 import files, tables
from hpcdist.strategies.loss_scale import LEAST, MOST, PATIENCE, START, DynamicScale, FixedScale, Unscaled, build
from hpcdist.telemetry import loss_scales
from hpcdist.telemetry.metrics import SCHEMA, VERSION, MetricsWriter


def scales(scale: DynamicScale, norms: str) -> list[float]:
    """The scale after each of ``norms``: "." is finite, "x" is not."""
    found = []
    for norm in norms:
        assert scale.after("step", 1.0 if norm == "." else math.inf) == (norm == ".")
        found.append(scale.scale)
    return found


def test_it_halves_at_the_overflow_number_h_in_a_row_and_at_each_that_follows() -> None:
    assert scales(DynamicScale(64.0, hysteresis=1), "x.x") == [32, 32, 16]
    assert scales(DynamicScale(64.0, hysteresis=2), "x.xx.xxx") == [64, 64, 64, 32, 32, 32, 16, 8]
    assert scales(DynamicScale(64.0, hysteresis=3), "xxxx") == [64, 64, 32, 16]


def test_it_doubles_after_an_interval_without_overflow() -> None:
    assert scales(DynamicScale(8.0, interval=3, hysteresis=1), "......") == [8, 8, 16, 16, 16, 32]
    assert scales(DynamicScale(8.0, interval=3, hysteresis=2), "..x...") == [8, 8, 8, 8, 8, 16], "it counts anew"
    assert scales(DynamicScale(MOST, interval=1), "..") == [MOST, MOST]


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_skipped_steps_are_counted(bad: float) -> None:
    scale = DynamicScale()
    assert [scale.after("", norm) for norm in (1.0, bad, bad, 0.0, bad)] == [True, False, False, True, False]
    assert scale.skipped == 3


def test_at_the_least_scale_it_gives_up_after_some_steps_in_a_row() -> None:
    scale = DynamicScale(2.0 * LEAST, hysteresis=1)
    assert scales(scale, "x" + "x" * (PATIENCE - 1) + "." + "x" * (PATIENCE - 1))[-1] == LEAST
    with pytest.raises(NonFiniteError, match=rf"step 9: it has overflowed float16 for {PATIENCE} steps .* scale 1;"):
        scale.after("step 9", math.nan)


def test_a_fixed_scale_stays_and_gives_up_too() -> None:
    scale = FixedScale(256.0)
    assert [scale.after("", norm) for norm in [math.inf] * (PATIENCE - 1) + [1.0]] == [False] * (PATIENCE - 1) + [True]
    assert scale.scale == 256.0 and scale.skipped == PATIENCE - 1
    assert [scale.after("", norm) for norm in [math.inf] * (PATIENCE - 1)] == [False] * (PATIENCE - 1)
    with pytest.raises(NonFiniteError, match=r"scale 256; try a smaller precision\.loss_scale"):
        scale.after("", math.inf)


def test_a_restored_scale_goes_on_as_the_one_that_was_saved() -> None:
    script = "..x...xx..x.x" * 4
    for cut in range(0, len(script), 5):
        whole, first, second = (DynamicScale(2.0**10, interval=3, hysteresis=2) for _ in range(3))
        expected = scales(whole, script)
        before = scales(first, script[:cut])
        second.restore(first.state())
        assert before + scales(second, script[cut:]) == expected
        assert second == whole


def test_a_run_without_a_scale_starts_one_and_a_scaled_run_may_drop_it() -> None:
    scale = DynamicScale()
    scale.restore(Unscaled().state())
    assert scale.scale == START
    Unscaled().restore(scale.state())
    fixed = FixedScale(8.0)
    fixed.restore(DynamicScale(4.0, skipped=3).state())
    assert (fixed.scale, fixed.skipped) == (8.0, 3)


def test_only_float16_has_one() -> None:
    assert type(build("bfloat16", 0.0, 10, 2)) is Unscaled
    assert type(build("float32", 0.0, 10, 2)) is Unscaled
    assert build("float16", 8.0, 10, 2) == FixedScale(8.0)
    assert build("float16", 0.0, 10, 3) == DynamicScale(START, interval=10, hysteresis=3)
    with pytest.raises(NonFiniteError, match="step 4"):
        Unscaled().after("step 4", math.nan)


def test_the_metrics_keep_what_happened_and_a_resumed_run_writes_it_anew(tmp_path: Path) -> None:
    path, writer = tmp_path / "metrics.h5", MetricsWriter(tmp_path / "metrics.h5", world=1)
    for step, scale, skipped in ((1, 64.0, False), (5, 64.0, True), (6, 32.0, False), (5, 64.0, False)):
        row = (step, scale, skipped)
        writer.include(lambda file, session, row=row: loss_scales.append(file, session, *row))
    with files.open_read(path, SCHEMA, VERSION) as file:
        found = tables.read(file, loss_scales.TABLE)
    assert {name: values.tolist() for name, values in found.items()} == {
        "step": [1, 5],
        "session": [0, 0],
        "scale": [64.0, 64.0],
        "skipped": [0, 0],
    }
