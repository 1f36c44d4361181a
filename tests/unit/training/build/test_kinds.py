"""Every kind of model under every way of spreading it is the run of one process."""

import h5py
import numpy as np
import pytest

from harness.inputs import KINDS, STEPS, keys_of, write_data
from harness.marks import cases
from harness.models.steady import steady
from harness.trainings import alone, check_training, losses, recipe_keys, refused, trainer_of
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
    expected = alone(keys, STEPS)
    assert all(np.isfinite(expected.losses))

    def body(comm):
        together = trainer_of(comm, keys)
        check_training(together, expected, STEPS, 1e-11)
        together.close()

    run_threads(ranks, body)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", KINDS)
def test_training_is_that_of_one_process(kind, way, folder):
    compare(kind, *WAYS[way], folder)


@pytest.mark.parametrize("way", CUT)
@pytest.mark.parametrize("kind", [kind for kind in KINDS if not kind.startswith("convnet")])
def test_training_over_tensor_ranks_is_that_of_one_process(kind, way, folder):
    compare(kind, *CUT[way], folder)


@pytest.mark.parametrize("kind", ["gpt with the options of Llama", "encoder", "convnet"])
def test_the_model_learns(kind, folder):
    keys = keys_of(kind, folder) | {"optimizer.learning_rate": 0.01, "run.steps": 60}
    trainer = trainer_of(solo(), keys)
    before = mean_validation_loss(trainer)
    found = losses(trainer, 60)
    assert mean_validation_loss(trainer) < 0.75 * before
    assert np.mean(found[-5:]) < 0.75 * np.mean(found[:5])


def test_losses_of_an_encoder_are_means_over_what_it_says(folder):
    # A fresh model says every token of the vocabulary alike; a mean over all places would be 2/12 of that.
    trainer = trainer_of(solo(), keys_of("encoder", folder))
    assert trainer.model.tokens_per_sample == masked_predictions(12) == 2
    assert losses(trainer, 1)[0] == pytest.approx(np.log(257), abs=0.1)
    assert mean_validation_loss(trainer) == pytest.approx(np.log(257), abs=0.1)


@pytest.mark.parametrize("kind", ["encoder", "convnet"])
def test_a_step_allocates_nothing(kind, folder):
    """Neither the pictures, unfolded or not, nor the masked text are made anew by the model."""
    with h5py.File(folder / "large.h5", "w") as file:
        file["x"], file["y"] = np.zeros((64, 24, 24, 3), np.uint8), np.arange(64) % 5
    keys = {"model.kind": kind, "model.hidden": 128, "model.heads": 2, "data.context": 128}
    if kind == "convnet":
        keys = {"model.kind": kind, "model.hidden": 48, "data.path": folder / "large.h5"}
    keys |= {"run.steps": 20, "run.global_batch": 8, "parallel.microbatches": 2, "communication.algorithm": "ring"}
    found = steady(keys)
    assert found.after == found.before and found.largest > ALLOWED
    assert found.transient <= ALLOWED and found.left <= ALLOWED // 10


@cases(
    "kind, changed, said",
    ("convnet", TENSOR, "parallel.tensor = 2 with model.kind = 'convnet' .* train a gpt or an encoder"),
    ("encoder", {"parallel.tensor": 3}, r"parallel.tensor = 3 with model.heads = 4"),
    (
        "gpt with the options of Llama",
        {"parallel.tensor": 4},
        r"parallel.tensor = 4 with model.kv_heads = 2: .* choose one of \[1, 2\] ranks, or a multiple of 4 heads",
    ),
    ("encoder", TENSOR | {"model.feed_forward": 1}, "at least a column of the feed-forward"),
)
def test_what_cannot_be_cut_is_refused(kind, changed, said, folder):
    refused(keys_of(kind, folder) | changed, said)
