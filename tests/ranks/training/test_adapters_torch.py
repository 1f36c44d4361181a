"""Wrapped PyTorch models over real messages: every layout has the results of a plain script."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from harness.models.pytorch import Layout, Training, compare, gpt, tokens, wrap_model
from hpcdist.errors import NonFiniteError

STEPS, SAMPLES, BOUND = 6, 12, 2e-5
LAYOUTS = {
    "allreduce": (Layout(), (1, 2, 3, 4)),
    "zero1": (Layout(strategy="zero1"), (2, 3)),
    "zero2 accumulating": (Layout(strategy="zero2", microbatches=2), (2, 3)),
    "zero3 accumulating": (Layout(strategy="zero3", microbatches=3), (1, 2, 3, 4)),
    "1f1b": (Layout(pipeline=2, microbatches=3, schedule="1f1b"), (2, 4)),
    "1f1b of 3": (Layout(pipeline=3, microbatches=2, schedule="1f1b"), (3,)),
    "gpipe of 4, recomputing": (Layout(pipeline=4, microbatches=2, schedule="gpipe", recompute=True), (4,)),
    "1f1b with zero1": (Layout(pipeline=2, microbatches=2, strategy="zero1"), (4,)),
    "zero-bubble": (Layout(pipeline=2, microbatches=4, schedule="zb-h1"), (2,)),
}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.full_except("zero1-True")
def test_layouts_match_a_plain_script(name, tied, comm, rng):
    layout, sizes = LAYOUTS[name]
    if comm.size not in sizes:
        pytest.skip(f"for {sizes} ranks")
    seed, batches = int(rng.integers(1 << 31)), [tokens(rng, SAMPLES) for _ in range(STEPS)]
    training = Training(comm, wrap_model(gpt(seed, tied=tied), batches[0][0]), layout)
    compare(training, lambda: gpt(seed, tied=tied), batches, BOUND)


def test_zero3_pipeline_without_a_tied_table_matches_a_plain_script(comm, rng):
    if comm.size != 4:
        pytest.skip("for 4 ranks")
    seed, batches = int(rng.integers(1 << 31)), [tokens(rng, SAMPLES) for _ in range(STEPS)]
    training = Training(
        comm, wrap_model(gpt(seed), batches[0][0]), Layout(pipeline=2, microbatches=2, strategy="zero3")
    )
    compare(training, lambda: gpt(seed), batches, BOUND)


@pytest.mark.parametrize("strategy", ["allreduce", "zero3"])
def test_dropout_of_replicas_matches_one_process(strategy, comm, rng):
    """The dropout of a sample depends on its index in the whole batch.

    So 2 replicas of 6 samples match one process with 2 parts.
    """
    seed, batches = int(rng.integers(1 << 31)), [tokens(rng, SAMPLES) for _ in range(3)]
    training = Training(comm, wrap_model(gpt(seed, dropout=0.4), batches[0][0]), Layout(strategy=strategy), seed=5)
    results = [training.advance(x, y).loss for x, y in batches]
    local_data = comm.split(comm.rank)
    alone = Training(
        local_data, wrap_model(gpt(seed, dropout=0.4), batches[0][0]), Layout(microbatches=comm.size), seed=5
    )
    np.testing.assert_allclose(results, [alone.advance(x, y).loss for x, y in batches], rtol=1e-5)


def test_bad_value_is_reported_by_its_rank(comm, rng):
    """Only the pipeline rank or the replica that produces an infinity reports it."""
    module = gpt(3)
    culprit = comm.size - 1
    x, y = tokens(rng, SAMPLES)
    training = Training(comm, wrap_model(module, x), Layout())
    if comm.rank == culprit:
        with torch.no_grad():
            for parameter in module[2].mlp[0].parameters():
                parameter.register_hook(lambda gradient: gradient * float("inf"))
    with pytest.raises(NonFiniteError):
        training.advance(x, y)
    batch = [(training.mine(x), training.mine(y))]
    result = training.executor.inspect(training.operations, batch)
    assert (result is not None) == (comm.rank == culprit)
    if result is not None:
        assert result.startswith("gradient of 2.2.mlp.0."), result
