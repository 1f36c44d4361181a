"""Samples that are cut over context ranks give the run of one process, over real messages."""

import numpy as np
import pytest

from harness.trainings import check_training, recipe_keys, run_single_process, trainer_of

STEPS = 8
KEYS = recipe_keys(
    f"layers=2 hidden=24 heads=4 vocabulary=257 data.context=42 steps={STEPS} global_batch=6 "
    "validation_samples=20 optimizer.warmup_steps=3 optimizer.clip_norm=0.7 dropout=0.1 precision.mode=float64"
)
CASES = {  # (data, pipeline, tensor, context) -> keys
    (1, 1, 1, 2): ["", "kv_heads=2 positions=rotary strategy=zero3"],
    (1, 1, 1, 3): ["kind=encoder strategy=zero2"],
    (2, 1, 1, 2): ["strategy=zero1"],
    (1, 1, 2, 2): ["sequence_parallel=true"],
    (1, 2, 1, 2): ["microbatches=3 tied=true"],
    (1, 1, 1, 4): ["kv_heads=1 window=9", "kv_heads=2 context_method=all_to_all"],
}


@pytest.mark.parametrize(("degrees", "changed"), [(degrees, keys) for degrees in CASES for keys in CASES[degrees]])
def test_rank_context_training_matches_one_process(comm, folder, degrees, changed):
    if comm.size != np.prod(degrees):
        pytest.skip(f"{degrees} is for {np.prod(degrees)} ranks")
    axes = dict(zip(("data", "pipeline", "tensor", "context"), degrees, strict=True))
    keys = KEYS | {"data.path": folder / "text.txt"} | {f"parallel.{axis}": n for axis, n in axes.items()}
    keys |= recipe_keys(changed)
    expected, together = run_single_process(keys, STEPS), trainer_of(comm, keys)
    check_training(together, expected, STEPS, 1e-12)
    together.close()
