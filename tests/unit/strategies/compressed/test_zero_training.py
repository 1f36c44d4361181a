"""Trainings from recipes with compressed ZeRO: all replicas follow one model, close to the dense model."""

from dataclasses import replace

import numpy as np
import pytest

from harness.marks import on_threads
from harness.trainings import assert_rejected, losses, recipe_keys, state, trainer_of
from hpcdist.comm.threads.communicator import run_threads
from hpcdist.strategies.data.coded_zero import CompressedGathers, CompressedSums
from hpcdist.strategies.schedule.replica_check import check_replicas, check_tensor_axis
from hpcdist.training.run.loop import mean_validation_loss
from hpcdist.training.run.saving import CheckpointSaver

STEPS = 12
ZERO3 = {"parallel.strategy": "zero3"}
PLUS = {  # hpZ, qwZ and qgZ: ZeRO++
    **ZERO3,
    "zero.parameters": 2,
    "compression.parameters": "int8",
    "compression.across_nodes": True,
    "communication.compression": "int4",
}


@pytest.fixture
def settings(words):
    return words | recipe_keys(
        "layers=1 hidden=16 heads=2 data.context=8 steps=40 global_batch=12 optimizer.warmup_steps=2 "
        "optimizer.learning_rate=0.01"
    )


TRAININGS = {
    "zero2 by micro-batches": (2, recipe_keys("strategy=zero2 microbatches=3 compression=int4")),
    "zero3, random k": (2, ZERO3 | recipe_keys("compression=randomk compression.density=0.8")),
    "qwZ alone": (3, {**ZERO3, "compression.parameters": "int8"}),
    "qwZ, kept and recomputed": (
        2,
        ZERO3 | recipe_keys("compression.parameters=int8 keep_parameters=true recompute_every_steps=2 microbatches=2"),
    ),
    "ZeRO++": (4, PLUS),
    "ZeRO++ on all levels": (4, {**PLUS, "compression.across_nodes": False, "zero.persistent_below": 1100}),
    "a pipeline": (4, ZERO3 | recipe_keys("pipeline=2 microbatches=2 compression=int8 compression.parameters=int8")),
    "a tensor axis, cut unevenly": (
        4,
        ZERO3 | recipe_keys("tensor=2 compression=int8 compression.parameters=int8 vocabulary=257"),
    ),
    "shared parameters": (2, recipe_keys("strategy=zero1 zero.shared_parameters=true compression=int8")),
    "offloaded": (2, recipe_keys("strategy=zero2 compression=int8 offload_optimizer=file offload_directory=.")),
}


@pytest.mark.parametrize("name", TRAININGS)
@pytest.mark.matrix_except(
    "zero2 by micro-batches", "zero3, random k", "qwZ alone", "ZeRO++", "a pipeline", "a tensor axis, cut unevenly"
)
@pytest.mark.full_except("zero3, random k")
def test_compressed_trainings_follow_the_dense_training(name, settings, tmp_path):
    size, keys = TRAININGS[name]
    if "zero.offload_directory" in keys:
        keys = {**keys, "zero.offload_directory": tmp_path}

    def body(comm, keys):
        trainer = trainer_of(comm, {**settings, **keys})
        parts = trainer.exchange.reducer.sums, trainer.exchange.gatherer.gathers
        assert any(isinstance(part, CompressedSums | CompressedGathers) for part in parts) == (keys is not dense)
        result = losses(trainer, STEPS)
        if trainer.exchange.traits.identical:
            check_replicas(trainer.data_axis, trainer.exchange.parameters, STEPS)
        check_tensor_axis(trainer.context.tensor, trainer.exchange.parameters, STEPS)
        return result, mean_validation_loss(trainer)

    dense = {key: value for key, value in keys.items() if not key.startswith(("compression.", "communication."))}
    (plain, plain_loss), *_ = run_threads(size, lambda comm: body(comm, dense), 2)
    assert plain[-1] < plain[0] - 0.3, "the model learns"
    for result, loss in run_threads(size, lambda comm: body(comm, keys), 2):
        assert result != plain
        np.testing.assert_allclose(result, plain, rtol=0.05)
        np.testing.assert_allclose(loss, plain_loss, rtol=0.05)


@on_threads(4, ranks_per_node=2)
def test_resumed_training_has_the_same_bits(comm, settings, tmp_path):
    keys = {**settings, **PLUS, "precision.mode": "float16", "precision.loss_scale": 0}
    trainer = trainer_of(comm, keys)
    losses(trainer, 3)
    again = trainer_of(comm, keys, CheckpointSaver(trainer, tmp_path / "run").save(3))
    trainer = replace(trainer, first_step=3)
    assert losses(trainer, 6) == losses(again, 6)
    one, other = state(trainer), state(again)
    assert one.keys() == other.keys()
    assert all(values.tobytes() == other[key].tobytes() for key, values in one.items())


REFUSED = [
    (recipe_keys("strategy=zero2 compression=powersgd"), "factors need whole tensors"),
    (recipe_keys("strategy=zero1 compression.parameters=int8"), "would be rounded; choose zero3"),
    (recipe_keys("strategy=allreduce compression.parameters=int8"), "would be rounded; choose zero3"),
    (ZERO3 | recipe_keys("zero.parameters=1 compression.parameters=int8"), "would be rounded; choose zero3"),
    (
        ZERO3 | recipe_keys("compression.parameters=int8 zero.prefetch=1 overlap=thread"),
        "zero.prefetch = 1 is not built",
    ),
    (ZERO3 | recipe_keys("compression.parameters=int8 overlap=thread"), "communication.overlap = "),
    (
        ZERO3
        | recipe_keys("compression.parameters=int8 offload_optimizer=file offload_parameters=file offload_directory=."),
        "zero.offload_parameters = 'file' is not built",
    ),
    (
        ZERO3 | recipe_keys("compression=int8 offload_optimizer=file offload_parameters=file offload_directory=."),
        "zero.offload_parameters = 'file' is not built",
    ),
    (ZERO3 | recipe_keys("compression.parameters=int8 logical_shards=4"), "where the ranks divide weights"),
    (ZERO3 | recipe_keys("compression.parameters=int8 precision.mode=float64"), "precision.mode = 'float64'"),
    (ZERO3 | recipe_keys("compression.parameters=float16 precision.mode=bfloat16"), "16 bits already"),
]


@pytest.mark.parametrize(("keys", "why"), REFUSED)
def test_incompatible_zero_options_are_rejected(keys, why):
    assert_rejected({"data.path": "x", **keys}, why.replace(".", r"\."))
