"""Ranks with their states in files make the same run, bit by bit, as with their states in memory."""

from pathlib import Path

import numpy as np
import pytest

from hpcdist.comm.communicator import Communicator
from hpcdist.comm.placement import locate
from hpcdist.comm.start import Session
from hpcdist.errors import StorageError
from hpcdist.training.build.assemble import assemble
from hpcdist.training.build.trainer import Trainer
from hpcdist.training.data import microbatches
from hpcdist.training.recipe import recipe as recipes
from hpcdist.training.run.loop import mean_validation_loss
from hpcdist.training.run.saving import CheckpointSaver

# name -> (its keys, what goes to files)
CASES: dict[str, tuple[dict[str, object], tuple[str, ...]]] = {
    "zero1": ({"parallel.strategy": "zero1"}, ("optimizer",)),
    "zero1, shared": ({"parallel.strategy": "zero1", "zero.shared_parameters": "true"}, ("optimizer",)),
    "zero2": ({"parallel.strategy": "zero2"}, ("optimizer",)),
    "zero3": ({"parallel.strategy": "zero3"}, ("optimizer", "parameters")),
    "zero3, ahead": (
        {"parallel.strategy": "zero3", "zero.prefetch": 1, "communication.overlap": "poll"},
        ("optimizer", "parameters"),
    ),
}


def _abort(code: int) -> None:
    raise SystemExit(code)


def _trainer(comm: Communicator, folder: Path, keys: dict[str, object], resume: Path | None = None) -> Trainer:
    settings = {
        "model.layers": 2,
        "model.hidden": 32,
        "model.heads": 2,
        "model.tied": "true",
        "data.path": folder / "text.txt",
        "data.context": 16,
        "run.steps": 6,
        "run.global_batch": 7,
        "run.validation_samples": 20,
        "optimizer.warmup_steps": 2,
        "optimizer.clip_norm": 0.3,
        "communication.algorithm": "ring",
        "parallel.microbatches": 1 if comm.size == 1 else 2,  # one rank in memory adds them up in another order
        **keys,
    }
    recipe = recipes.load(None, [f"{key}={value}" for key, value in settings.items()], {}).recipe
    return assemble(Session(comm, locate(comm, None), "test", _abort), recipe, resume)


def _away(folder: Path, what: tuple[str, ...]) -> dict[str, object]:
    return {f"zero.offload_{name}": "file" for name in what} | {"zero.offload_directory": folder}


def _losses(trainer: Trainer, last: int) -> list[float]:
    losses = []
    with trainer.batches(last) as batches:
        for step, batch in enumerate(batches, start=trainer.first_step + 1):
            parts = microbatches(batch, trainer.recipe.parallel.microbatches)
            found = trainer.executor.run(trainer.operations, parts, trainer.recipe.run.global_batch, step, np.zeros(2))
            losses.append(found.loss)
    return losses


def _state(trainer: Trainer) -> dict[str, bytes]:
    return {f"{piece.name} {piece.flat.start}": piece.array.copy().tobytes() for piece in trainer.exchange.pieces()}


@pytest.mark.parametrize(
    ("case", "optimizer"),
    [*((name, "adamw") for name in CASES), ("zero2", "lamb"), *(("zero3", name) for name in ("sgd", "lars", "lamb"))],
)
def test_rank_states_in_files_are_those_in_memory(comm: Communicator, folder: Path, case: str, optimizer: str) -> None:
    keys, what = CASES[case][0] | {"optimizer.name": optimizer}, CASES[case][1]
    memory, files = _trainer(comm, folder, keys), _trainer(comm, folder, keys | _away(folder, what))
    assert files.ledger.peak["optimizer"] == 0
    assert _losses(memory, 4) == _losses(files, 4)
    assert _state(memory) == _state(files)
    assert mean_validation_loss(memory) == mean_validation_loss(files)
    saved = CheckpointSaver(files, folder / "checkpoints").save(4)
    for further in ({}, _away(folder, what)):
        assert _state(_trainer(comm, folder, keys | further, saved)) == _state(memory)


def test_rank_a_directory_that_is_missing_is_named(comm: Communicator, folder: Path) -> None:
    missing = folder / "missing"
    keys = {"parallel.strategy": "zero2", "zero.offload_optimizer": "file", "zero.offload_directory": missing}
    with pytest.raises(StorageError, match=f"{missing} cannot be written .* bytes are needed there for the optimizer"):
        _trainer(comm, folder, keys)
