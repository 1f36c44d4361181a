"""Documents packed into samples give the run of one process, over real messages."""

import numpy as np
import pytest

from harness.trainings import TOLERANCE, check_training, recipe_keys, run_single_process, trainer_of

STEPS = 20
KEYS = recipe_keys(
    f"layers=2 hidden=24 heads=4 vocabulary=257 data.context=42 steps={STEPS} global_batch=6 validation_samples=20 "
    "optimizer.warmup_steps=3 optimizer.clip_norm=0.7 precision.mode=float64 algorithm=ring document_end=32 "
    "data.packed=true"
)
CASES = {  # (data, pipeline, tensor, context), keys
    "zero3, float32": ((2, 1, 1, 1), "strategy=zero3 precision.mode=float32"),
    "pipeline": ((1, 2, 1, 1), "microbatches=3 tied=true"),
    "ring": ((1, 1, 1, 2), "context_method=ring dropout=0.1"),
    # of the full tier
    "zero3": ((2, 1, 1, 1), "strategy=zero3 microbatches=2"),
    "tensor by rows": ((1, 1, 2, 1), "sequence_parallel=true"),
    "heads for tokens, encoder": ((1, 1, 1, 2), "context_method=all_to_all kind=encoder positions=rotary"),
    "zero2 of 3": ((3, 1, 1, 1), "strategy=zero2"),
    "ring of 4": ((1, 1, 1, 4), "kv_heads=1"),
    "zero1 x ring": ((2, 1, 1, 2), "strategy=zero1"),
}


@pytest.mark.full_except("zero3, float32", "ring", "pipeline")
@pytest.mark.parametrize("case", CASES)
def test_rank_packed_training_matches_one_process(comm, folder, case):
    degrees, changed = CASES[case]
    if comm.size != np.prod(degrees):
        pytest.skip(f"{degrees} is for {np.prod(degrees)} ranks")
    axes = dict(zip(("data", "pipeline", "tensor", "context"), degrees, strict=True))
    keys = KEYS | {"data.path": folder / "text.txt"} | {f"parallel.{axis}": n for axis, n in axes.items()}
    keys |= recipe_keys(changed)
    expected, together, wide = (
        run_single_process(keys, STEPS),
        trainer_of(comm, keys),
        TOLERANCE[str(keys["precision.mode"])],
    )
    check_training(together, expected, STEPS, wide)
    together.close()
