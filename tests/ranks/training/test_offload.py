"""Ranks with their states in files make the same run, bit by bit, as ranks with their states in memory."""

import pytest

from harness.trainings import losses, recipe_keys, small_trainer
from hpcdist.errors import StorageError
from hpcdist.training.run.loop import mean_validation_loss
from hpcdist.training.run.saving import CheckpointSaver

# name -> (its keys, what goes to files)
CASES = {
    "zero1": ({"parallel.strategy": "zero1"}, ("optimizer",)),
    "zero1, shared": (recipe_keys("strategy=zero1 zero.shared_parameters=true"), ("optimizer",)),
    "zero2": ({"parallel.strategy": "zero2"}, ("optimizer",)),
    "zero3": ({"parallel.strategy": "zero3"}, ("optimizer", "parameters")),
    "zero3, ahead": (recipe_keys("strategy=zero3 zero.prefetch=1 overlap=poll"), ("optimizer", "parameters")),
}


KEYS = recipe_keys(
    "layers=2 hidden=32 tied=true data.context=16 global_batch=7 validation_samples=20 optimizer.clip_norm=0.3 "
    "algorithm=ring"
)


def _trainer(comm, folder, keys, resume=None):
    parts = 1 if comm.size == 1 else 2  # one rank in memory adds them up in another order
    return small_trainer(comm, folder, {"parallel.microbatches": parts, **keys}, resume, **KEYS)


def _offload_keys(folder, what):
    return {f"zero.offload_{name}": "file" for name in what} | {"zero.offload_directory": folder}


def _state(trainer):
    return {f"{piece.name} {piece.flat.start}": piece.array.copy().tobytes() for piece in trainer.exchange.pieces()}


@pytest.mark.parametrize(
    ("case", "optimizer"),
    [*((name, "adamw") for name in CASES), ("zero2", "lamb"), *(("zero3", name) for name in ("sgd", "lars", "lamb"))],
)
def test_rank_states_in_files_equal_states_in_memory(comm, folder, case, optimizer):
    keys, what = CASES[case][0] | {"optimizer.name": optimizer}, CASES[case][1]
    memory, files = _trainer(comm, folder, keys), _trainer(comm, folder, keys | _offload_keys(folder, what))
    assert files.ledger.peak["optimizer"] == 0
    assert losses(memory, 4) == losses(files, 4)
    assert _state(memory) == _state(files)
    assert mean_validation_loss(memory) == mean_validation_loss(files)
    saved = CheckpointSaver(files, folder / "checkpoints").save(4)
    for further in ({}, _offload_keys(folder, what)):
        assert _state(_trainer(comm, folder, keys | further, saved)) == _state(memory)


def test_rank_missing_offload_directory_is_named(comm, folder):
    missing = folder / "missing"
    keys = {"parallel.strategy": "zero2", "zero.offload_optimizer": "file", "zero.offload_directory": missing}
    with pytest.raises(StorageError, match=f"{missing} cannot be written.* free bytes for the optimizer"):
        _trainer(comm, folder, keys)
