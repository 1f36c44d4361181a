"""A steady step over real messages allocates no memory in any process, for every exchange."""

import pytest

from harness.models.steady import steps_of

ALLOWED = 160 << 10  # bytes: numpy's buffers of 32 KiB, views, lists, floats, requests
LEFT = 16 << 10
CASES = {
    "allreduce": {"parallel.strategy": "allreduce"},
    "zero2": {"parallel.strategy": "zero2", "parallel.microbatches": 2},
    "zero3, recompute": {"parallel.strategy": "zero3", "parallel.recompute": "true"},
    "zero3, bfloat16": {"parallel.strategy": "zero3", "precision.mode": "bfloat16"},
    "pipeline": {"parallel.pipeline": 2, "parallel.microbatches": 4},
}
RUNS = [("allreduce", "node_shared"), ("zero2", "native"), ("zero3, recompute", "native")]
RUNS += [("zero3, bfloat16", "ring"), ("pipeline", "ring")]


@pytest.mark.parametrize(("case", "algorithm"), RUNS)
@pytest.mark.full_except("allreduce-node_shared")
def test_rank_steady_step_allocates_nothing(comm, folder, case, algorithm):
    keys = {
        "model.layers": 2,
        "model.hidden": 128,
        "model.heads": 2,
        "data.path": folder / "text.txt",
        "data.context": 128,
        "run.steps": 20,
        "run.global_batch": 8 * comm.size,
        "optimizer.warmup_steps": 2,
        "communication.algorithm": algorithm,
    }
    if case == "pipeline" and comm.size % 2:
        pytest.skip("a pipeline of 2 stages needs an even number of ranks")
    result = steps_of(comm, keys | CASES[case])
    assert result.after == result.before, "the ledger is a flat line"
    assert result.largest > ALLOWED, "a copy of a matrix would show"
    assert result.transient <= ALLOWED and result.left <= LEFT
