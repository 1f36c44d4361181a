"""Every kind of model in every distribution matches one process."""

import h5py
import numpy as np
import pytest

from harness.inputs import KINDS, STEPS, keys_of, write_data
from harness.marks import cases
from harness.models.steady import measure_steady_steps
from harness.trainings import assert_rejected, check_training, losses, recipe_keys, run_single_process, trainer_of
from hpcdist.comm.threads.communicator import run_threads, solo
from hpcdist.models.transformer import masked_predictions
from hpcdist.training.run.loop import mean_validation_loss

ALLOWED = 160 << 10  # bytes of a step's own objects; the largest tensor of each model is larger
TENSOR = {"parallel.tensor": 2}
BY_ROWS = TENSOR | {"parallel.sequence_parallel": "true"}
WAYS = {
    "2 replicas": (2, {}),
    "3 replicas, zero1": (3, {"parallel.strategy": "zero1"}),
    "2 replicas, zero2, accumulating": (2, recipe_keys("strategy=zero2 microbatches=2")),
    "2 replicas, zero3": (2, {"parallel.strategy": "zero3"}),
    "pipeline of 2": (2, recipe_keys("pipeline=2 microbatches=4")),
    "pipeline of 3, recomputing": (3, recipe_keys("pipeline=3 microbatches=4 recompute=true")),
    "pipeline of 2, zero-bubble": (2, recipe_keys("pipeline=2 microbatches=4 schedule=zb-v")),
    "pipeline of 2 by measured units": (2, recipe_keys("pipeline=2 microbatches=4 partition=measured")),
    "2 x 2, zero1": (4, recipe_keys("pipeline=2 microbatches=2 strategy=zero1")),
}
CUT = {
    "tensor of 2": (2, TENSOR),
    "tensor of 2 by rows": (2, BY_ROWS),
    "2 x 2 with tensor by rows, zero3": (4, BY_ROWS | {"parallel.strategy": "zero3"}),
    "pipeline of 2 x tensor of 2, zero-bubble": (
        4,
        BY_ROWS | {"parallel.pipeline": 2, "parallel.microbatches": 4, "parallel.schedule": "zb-v"},
    ),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("data")
    write_data(path)
    return path


def compare(kind, ranks, changed, folder):
    keys = keys_of(kind, folder) | changed
    expected = run_single_process(keys, STEPS)
    assert all(np.isfinite(expected.losses))

    def body(comm):
        together = trainer_of(comm, keys)
        check_training(together, expected, STEPS, 1e-11)
        together.close()

    run_threads(ranks, body)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", KINDS)
def test_training_of_each_kind_matches_one_process(kind, way, folder):
    compare(kind, *WAYS[way], folder)


@pytest.mark.parametrize("way", CUT)
@pytest.mark.parametrize("kind", [kind for kind in KINDS if not kind.startswith("convnet")])
def test_tensor_training_of_each_kind_matches_one_process(kind, way, folder):
    compare(kind, *CUT[way], folder)


@pytest.mark.parametrize("kind", ["gpt with the options of Llama", "encoder", "convnet"])
def test_each_kind_of_model_learns(kind, folder):
    keys = keys_of(kind, folder) | {"optimizer.learning_rate": 0.01, "run.steps": 60}
    trainer = trainer_of(solo(), keys)
    before = mean_validation_loss(trainer)
    actual_losses = losses(trainer, 60)
    assert mean_validation_loss(trainer) < 0.75 * before
    assert np.mean(actual_losses[-5:]) < 0.75 * np.mean(actual_losses[:5])


def test_encoder_loss_is_the_mean_over_masked_tokens(folder):
    # A fresh model says every token of the vocabulary alike; a mean over all places would be 2/12 of that.
    trainer = trainer_of(solo(), keys_of("encoder", folder))
    assert trainer.model.tokens_per_sample == masked_predictions(12) == 2
    assert losses(trainer, 1)[0] == pytest.approx(np.log(257), abs=0.1)
    assert mean_validation_loss(trainer) == pytest.approx(np.log(257), abs=0.1)


@pytest.mark.parametrize("kind", ["encoder", "convnet"])
def test_steady_step_of_each_kind_allocates_nothing(kind, folder):
    """The model reallocates neither pictures, unfolded or not, nor masked text."""
    with h5py.File(folder / "large.h5", "w") as file:
        file["x"], file["y"] = np.zeros((64, 24, 24, 3), np.uint8), np.arange(64) % 5
    keys = {"model.kind": kind, "model.hidden": 128, "model.heads": 2, "data.context": 128}
    if kind == "convnet":
        keys = {"model.kind": kind, "model.hidden": 48, "data.path": folder / "large.h5"}
    keys |= {"run.steps": 20, "run.global_batch": 8, "parallel.microbatches": 2, "communication.algorithm": "ring"}
    result = measure_steady_steps(keys)
    assert result.after == result.before and result.largest > ALLOWED
    assert result.transient <= ALLOWED and result.left <= ALLOWED // 10


@cases(
    "kind, changed, output",
    ("convnet", TENSOR, "parallel.tensor = 2 with model.kind = 'convnet' .* train a gpt or an encoder"),
    ("encoder", {"parallel.tensor": 3}, r"parallel.tensor = 3 with model.heads = 4"),
    (
        "gpt with the options of Llama",
        {"parallel.tensor": 4},
        r"parallel.tensor = 4 with model.kv_heads = 2: .* choose one of \[1, 2\] ranks, or a multiple of 4 heads",
    ),
    ("encoder", TENSOR | {"model.feed_forward": 1}, "at least a column of the feed-forward"),
)
def test_kinds_that_cannot_be_split_are_rejected(kind, changed, output, folder):
    assert_rejected(keys_of(kind, folder) | changed, output)
