"""Data x pipeline x tensor, every schedule, every ZeRO stage: each layout matches one process, with dropout.


By default a subset of the products runs, with fewer steps. HPCDIST_TEST_LAYOUTS=all runs all of them.
"""

import os

import numpy as np
import pytest

from harness.trainings import difference, losses, recipe_keys, run_single_process, trainer_of
from hpcdist.training.run.loop import mean_validation_loss

TOLERANCE = {"float32": 1e-5, "float64": 1e-12}
LAYOUTS = ((1, 1, 1), (1, 2, 1), (1, 4, 1), (2, 2, 1), (1, 2, 2), (2, 1, 2), (1, 1, 4))  # data, pipeline, tensor
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2", "zb-v")
STRATEGIES = ("allreduce", "zero1", "zero2", "zero3", "parameter_server")
ALL = os.environ.get("HPCDIST_TEST_LAYOUTS") == "all"
STEPS = 20 if ALL else 5
KEYS = recipe_keys(
    f"layers=6 hidden=24 heads=4 dropout=0.1 data.context=12 steps={STEPS} global_batch=8 "
    "validation_samples=20 optimizer.warmup_steps=3 optimizer.clip_norm=0.7 microbatches=4"
)

Cell = tuple[tuple[int, int, int], str, str, str]


def cells():
    """Yield (layout, schedule, strategy, precision)."""
    for layout in LAYOUTS:
        for schedule in SCHEDULES if layout[1] > 1 else ("sequential",):
            for number, strategy in enumerate(STRATEGIES):
                for mode in TOLERANCE:
                    turn = (number + SCHEDULES.index(schedule) if schedule in SCHEDULES else number) % 2
                    if ALL or ((mode == "float64") == (turn == 0) and runs_by_default(layout, schedule, number)):
                        yield layout, schedule, strategy, mode


def runs_by_default(layout, schedule, number):
    """Return True if a cell always runs: every schedule on every layout, and every strategy on some layouts."""
    data, pipeline, tensor = layout
    if pipeline == 1:
        return number in (0, 3) or data > 1
    place = SCHEDULES.index(schedule)
    if data > 1:
        return schedule == "1f1b" or number == place % len(STRATEGIES)
    return number == 3 * ((place + pipeline // 2 + tensor) % 2)


def name(cell):
    return "-".join(["x".join(map(str, cell[0])), *cell[1:]])


@pytest.mark.parametrize("cell", list(cells()), ids=name)
def test_rank_products_equal_one_process(comm, folder, cell):
    (data, pipeline, tensor), schedule, strategy, mode = cell
    if comm.size != data * pipeline * tensor:
        pytest.skip(f"{data} x {pipeline} x {tensor} is for {data * pipeline * tensor} ranks")
    keys = KEYS | {
        "data.path": folder / "text.txt",
        "precision.mode": mode,
        "parallel.data": data,
        "parallel.pipeline": pipeline,
        "parallel.tensor": tensor,
        "parallel.schedule": schedule,
        "parallel.strategy": strategy,
    }
    if strategy == "parameter_server":
        keys["parameter_server.placement"] = "colocated"
    if schedule == "interleaved":
        keys["parallel.chunks"] = 2
    if schedule.startswith("zb") and strategy in ("zero2", "zero3"):
        keys["zero.keep_gradients"] = "true"
    expected, together = run_single_process(keys, STEPS), trainer_of(comm, keys)
    assert expected.losses[-1] < expected.losses[0] - 0.1, "the model learns"
    np.testing.assert_allclose(losses(together, STEPS), expected.losses, rtol=TOLERANCE[mode])
    assert difference(together, expected.state) <= 10 * TOLERANCE[mode]
    np.testing.assert_allclose(mean_validation_loss(together), expected.validation, rtol=TOLERANCE[mode])
    together.close()
