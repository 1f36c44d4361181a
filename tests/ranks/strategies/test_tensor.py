"""A gpt over tensor ranks matches one process, over real messages and shared memory of a node."""

import pytest

from harness.trainings import check_training, recipe_keys, run_single_process, trainer_of

STEPS = 8
KEYS = {"optimizer.groups": "['*bias*: weight_decay=0.3 rate_factor=0.5', '2.*: rate_factor=2.0']"} | recipe_keys(
    f"layers=2 hidden=24 heads=4 vocabulary=257 data.context=12 steps={STEPS} global_batch=6 "
    "validation_samples=20 optimizer.warmup_steps=3 optimizer.clip_norm=0.7 precision.mode=float64"
)
BY_ROWS = {"parallel.sequence_parallel": "true"}
# (data, pipeline, tensor) -> keys
CASES = {
    (1, 1, 2): [{}, {"communication.algorithm": "node_shared"}, BY_ROWS | {"communication.algorithm": "ring"}],
    (1, 1, 3): [BY_ROWS | {"communication.algorithm": "node_shared", "model.heads": 6}],
    (2, 1, 2): [BY_ROWS | {"parallel.strategy": "zero2", "model.tied": "true"}],
    (1, 2, 2): [BY_ROWS | {"parallel.microbatches": 3, "model.tied": "true"}],
    (1, 1, 4): [BY_ROWS | {"communication.algorithm": "node_shared"}],
}


@pytest.mark.parametrize(("degrees", "changed"), [(degrees, keys) for degrees in CASES for keys in CASES[degrees]])
def test_rank_tensor_training_matches_one_process(comm, folder, degrees, changed):
    data, pipeline, tensor = degrees
    if comm.size != data * pipeline * tensor:
        pytest.skip(f"{data} x {pipeline} x {tensor} is for {data * pipeline * tensor} ranks")
    keys = KEYS | {"data.path": folder / "text.txt", "parallel.pipeline": pipeline, "parallel.tensor": tensor} | changed
    expected, together = run_single_process(keys, STEPS), trainer_of(comm, keys)
    check_training(together, expected, STEPS, 1e-12)
    together.close()
