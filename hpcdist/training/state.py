"""What a checkpoint keeps of a run beside the pieces, and what it says of where it comes from."""

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpcdist.checkpoint.restore import restore
from hpcdist.checkpoint.retention import Retention
from hpcdist.checkpoint.save import Plan
from hpcdist.errors import DataError, StorageError
from hpcdist.strategies.decentralised.local_sgd import OUTER
from hpcdist.telemetry.provenance import provenance
from hpcdist.training import partitioning
from hpcdist.training import recipe as recipes

if TYPE_CHECKING:
    from hpcdist.training.trainer import Trainer


def scalars(trainer: "Trainer", steps: int) -> dict[str, Any]:
    """Return what a checkpoint of ``trainer`` after ``steps`` steps keeps beside the pieces (local).

    Random streams are keyed by (seed, step, ...) and batches by the global sample index, so these numbers are all of
    their state.
    """
    kept = {} if trainer.shares is None else {"shares": trainer.shares.state(steps)}
    return {**kept, **partitioning.state(trainer.recipe, trainer.plan)} | {
        "steps": steps,
        "samples": steps * trainer.recipe.run.global_batch,
        "seed": trainer.recipe.run.seed,
        "world": trainer.comm.size,
        "ranks_per_node": list(trainer.selection.ranks_per_node),
        "algorithm": trainer.exchange.algorithm,
        "data": trainer.source.fingerprint,
        "model_inputs": trainer.source.model_inputs(),
        "optimizer": trainer.exchange.state(),
        "loss_scale": trainer.executor.loss_scale.state(),
    }


def plan(trainer: "Trainer", directory: Path, steps: int, kept: Mapping[str, Any]) -> Plan:
    """Return the checkpoint after ``steps`` steps, with what else is ``kept`` beside the scalars (local)."""
    config, numbers = trainer.recipe.checkpoint, scalars(trainer, steps) | dict(kept)
    keep = Retention(config.keep, config.keep_every, config.keep_best)
    return Plan(directory, steps, trainer.comm.size, numbers, about(trainer), keep)


def about(trainer: "Trainer") -> dict[str, Any]:
    """Return topology, recipe and versions, for people and tools: a restore asks for none of it (local)."""
    if trainer.comm.rank:
        return {}  # those of rank 0 count
    axes = ("data", "pipeline", "tensor", "context")
    return {
        "topology": {name: getattr(trainer.grid, name) for name in axes} | {"world": trainer.comm.size},
        "recipe": recipes.flat(trainer.recipe),
        "versions": _versions(),
    }


@functools.cache
def _versions() -> dict[str, str]:
    """Asked once: it starts a process."""
    found = provenance(anonymous=True)
    return {name: value for name, value in found.items() if name.endswith("_version") or name == "git_commit"}


def take_back(trainer: "Trainer", path: Path) -> None:
    """Take back the state in ``path``, written by any number of ranks in any layout. Collective.

    Raises DataError when the data has changed since: the sample order and every loss would be others.
    """
    # A run that took no outer steps so far begins them at rest.
    resumed = restore(path, trainer.exchange.wanted(), optional=(OUTER,))
    lacking = [name for name in ("data", "optimizer", "steps") if name not in resumed]
    if lacking:
        raise StorageError(f"{path} does not say {', '.join(lacking)}: no training of hpcdist has made it")
    if resumed["data"] != trainer.source.fingerprint:
        raise DataError(
            f"{path} was written by a run on other data than {trainer.source.description}; "
            "give back the data it was trained on, or start a new run"
        )
    trainer.exchange.restore(resumed["optimizer"])
    trainer.executor.loss_scale.restore(resumed.get("loss_scale", {}))
    trainer.first_step = int(resumed["steps"])
    if trainer.shares is not None:
        trainer.shares.restore(resumed.get("shares", []))
    trainer.executor.copies.refresh()
