"""Stages split by the measured time of their units: the same split on all ranks, and the same run, also resumed."""

from dataclasses import replace

import numpy as np
import pytest

from harness.trainings import losses, recipe_keys, run_single_process, trainer_of
from hpcdist.training.run.saving import CheckpointSaver

STEPS = 4
KEYS = recipe_keys(
    f"layers=6 hidden=24 heads=4 data.context=12 precision.mode=float64 steps={STEPS} global_batch=8 microbatches=4"
)


@pytest.mark.parametrize("tensor", [1, 2])
def test_rank_stages_split_by_measurement_agree_and_resume(comm, folder, tensor):
    if comm.size != 2 * tensor:
        pytest.skip(f"2 stages of {tensor} for {2 * tensor} ranks")
    keys = KEYS | {"data.path": folder / "text.txt"}
    cut = {"parallel.pipeline": 2, "parallel.tensor": tensor, "parallel.partition": "measured"}
    expected, first = run_single_process(keys, STEPS), trainer_of(comm, keys | cut)
    assert first.plan is not None and len(set(comm.allgather_object(first.plan.stage_units))) == 1
    assert first.context.chunks == first.plan.placement.of(first.context.pipeline.rank)
    np.testing.assert_allclose(losses(first, 2), expected.losses[:2], rtol=1e-12)
    path = CheckpointSaver(first, folder / f"measured-{tensor}").save(2)
    first = replace(first, first_step=2)
    goes_on = losses(first, STEPS)
    again = trainer_of(comm, keys | cut, path)
    assert again.plan is not None and again.plan.stage_units == first.plan.stage_units
    assert losses(again, STEPS) == goes_on, "the same sums in the same order"
    np.testing.assert_allclose(goes_on, expected.losses[2:], rtol=1e-12)


def test_rank_stages_split_by_hand_and_by_memory(comm, folder):
    if comm.size != 3:
        pytest.skip("for 3 ranks")
    keys = KEYS | {"data.path": folder / "text.txt", "parallel.pipeline": 3}
    expected = run_single_process(keys, STEPS)
    given = trainer_of(comm, keys | {"parallel.stage_units": "[1, 6, 1]"})
    assert [len(part) for part in given.context.placed.chunks] == [1, 6, 1]
    np.testing.assert_allclose(losses(given, 2), expected.losses[:2], rtol=1e-12)
    assert given.plan is not None
    limit = given.plan.rows[1].total_bytes - 1
    uneven = {"parallel.stage_speeds": "[1, 9, 1]", "parallel.stage_memory_bytes": f"[{limit}]"}
    limited = trainer_of(comm, keys | uneven)
    assert limited.plan is not None and max(row.total_bytes for row in limited.plan.rows) <= limit
    np.testing.assert_allclose(losses(limited, 2), expected.losses[:2], rtol=1e-12)
