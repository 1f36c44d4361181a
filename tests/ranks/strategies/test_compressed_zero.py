"""ZeRO with compressed messages over real messages: it matches its definition, ranks agree, and resumes are exact."""

from dataclasses import replace

import numpy as np

from harness.compressed.zero import DefinedExchange, DrivenExchange, compare
from harness.trainings import losses, recipe_keys, state, trainer_of
from hpcdist.strategies.data.config import ZeroConfig
from hpcdist.training.run.saving import CheckpointSaver

SETTINGS = recipe_keys(
    "layers=1 hidden=16 heads=2 data.context=8 steps=40 global_batch=12 optimizer.warmup_steps=2 strategy=zero3 "
    "compression=int4 compression.parameters=int8"
)


def test_rank_sums_match_the_definition_and_weights_agree(comm):
    inner = next(degree for degree in (2, 3, 1) if comm.size % degree == 0)
    blocks = ZeroConfig(parameters=inner, gradients=inner, optimizer=inner)  # several ranks own the same
    for zero, name, microbatches in ((ZeroConfig(), "int8", 2), (blocks, "int4", 1)):
        run = DrivenExchange(comm, 3, zero, name, microbatches=microbatches, parameters="int8" if inner > 1 else "none")
        compare(run, DefinedExchange(run.exchange.traits.degrees, comm.size, name), 2)
        weights = run.computed_with().tobytes()
        assert all(other == weights for other in comm.allgather_object(weights))
        run.exchange.close()


def test_rank_resumed_run_has_the_same_bits(comm, folder):
    keys = {**SETTINGS, "data.path": folder / "text.txt", "precision.mode": "bfloat16"}
    trainer = trainer_of(comm, keys)
    losses(trainer, 2)
    resumed = trainer_of(comm, keys, CheckpointSaver(trainer, folder / "checkpoints").save(2))
    trainer = replace(trainer, first_step=2)
    actual_losses = losses(trainer, 4)
    assert actual_losses == losses(resumed, 4) and actual_losses[-1] < np.log(256)
    one, other = state(trainer), state(resumed)
    assert one.keys() == other.keys() and any(kind.startswith("residual.") for kind, _ in one)
    assert all(values.tobytes() == other[key].tobytes() for key, values in one.items())
    for each in (trainer, resumed):
        each.close()
