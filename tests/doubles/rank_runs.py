"""Trainings on a few ranks that are compared with one process: the same text, the same small model."""

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hpcdist.arrays.piece import Piece, runs
from hpcdist.comm.communicator import Communicator
from hpcdist.comm.placement import locate
from hpcdist.comm.start import Session
from hpcdist.comm.threads.communicator import solo
from hpcdist.training.build.assemble import assemble
from hpcdist.training.build.trainer import Trainer
from hpcdist.training.recipe import recipe as recipes
from hpcdist.training.run.loop import mean_validation_loss

NOISE = "kv.bias"  # of "qkv" too: its part for the keys has a true gradient of zero: under Adam it follows the rounding
LAYOUT = ("parallel.", "communication.", "zero.", "parameter_server.")  # keys that must not change a run

_references: dict[tuple[object, ...], "Reference"] = {}  # every test trains on the same text, so they may share them


@dataclass(frozen=True)
class Reference:
    """The same run in one process, without any layout."""

    losses: list[float]
    state: dict[tuple[str, str], np.ndarray]
    validation: float


def abort(code: int) -> None:
    """End a run as fail-fast would."""
    raise SystemExit(code)


def trainer_of(comm: Communicator, keys: dict[str, object], resume: Path | None = None) -> Trainer:
    """Return the trainer of a recipe of ``keys``. Collective."""
    recipe = recipes.load(None, [f"{key}={value}" for key, value in keys.items()], {}).recipe
    return assemble(Session(comm, locate(comm, None), "test", abort), recipe, resume)


def alone(keys: dict[str, object], steps: int) -> Reference:
    """Return the run of ``keys`` in one process, whatever layout they ask for (local)."""
    kept = {key: value for key, value in keys.items() if not key.startswith(LAYOUT)}
    name = (steps, *sorted((key, str(value)) for key, value in kept.items()))
    if name not in _references:
        trainer = trainer_of(solo(), kept)
        _references[name] = Reference(losses(trainer, steps), state(trainer), mean_validation_loss(trainer))
    return _references[name]


def losses(trainer: Trainer, last: int) -> list[float]:
    """Run the steps up to ``last``; return their losses. Collective."""
    found = []
    with trainer.batches(last) as batches:
        for step, batch in enumerate(batches, start=trainer.first_step + 1):
            found.append(trainer.step(step, trainer.cut(trainer.place(batch)), np.zeros(2)).loss)
    return found


def state(trainer: Trainer) -> dict[tuple[str, str], np.ndarray]:
    """Return all parameters and optimizer state by (kind, tensor), flat, from what the ranks save. Collective."""
    found: dict[tuple[str, str], np.ndarray] = {}
    for pieces in trainer.comm.allgather_object([*map(_host, trainer.exchange.pieces())]):
        for kind, tensor, shape, where, values in pieces:
            whole = found.setdefault((kind, tensor), np.full(math.prod(shape), np.nan, values.dtype))
            for start, local, size in zip(where.start, where.local, where.size, strict=True):
                assert np.isnan(whole[start : start + size]).all(), f"{tensor} is saved twice"
                whole[start : start + size] = values[local : local + size]
    assert not any(np.isnan(values).any() for values in found.values()), "something is not saved"
    return found


def _host(piece: Piece) -> tuple[object, ...]:
    where = runs(piece.global_shape, piece.box, piece.flat)
    return piece.kind, piece.tensor, piece.global_shape, where, piece.array.copy()


def difference(trainer: Trainer, theirs: dict[tuple[str, str], np.ndarray]) -> float:
    """Return the norm of the difference of two models over the norm of the second. Collective."""
    mine = state(trainer)
    weights = [key for key in theirs if key[0] == "parameters" and not key[1].endswith(NOISE)]
    differences = [np.linalg.norm(mine[key].astype(np.float64) - theirs[key]) for key in weights]
    return float(np.linalg.norm(differences) / np.linalg.norm([np.linalg.norm(theirs[key]) for key in weights]))
