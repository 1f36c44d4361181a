"""What a checkpoint keeps of a run beside the pieces, and what it says of where it comes from."""

import functools
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from hpcdist.checkpoint.directory import Retention
from hpcdist.checkpoint.saving.two_phase import SavePlan
from hpcdist.errors import ConfigurationError, DataError, StorageError
from hpcdist.strategies.compressed.onebit import FROZEN, OneBitExchange
from hpcdist.strategies.delayed import DelayedExchange
from hpcdist.telemetry.provenance import provenance
from hpcdist.training import partitioning
from hpcdist.training import recipe as recipes
from hpcdist.training.data import FEISTEL, RULES
from hpcdist.training.origin import Origin

if TYPE_CHECKING:
    from hpcdist.training.trainer import Trainer


NEEDED: Final = {"data": str, "optimizer": Mapping, "steps": int}  # among the scalars


def scalars(trainer: "Trainer", steps: int) -> dict[str, Any]:
    """Return what a checkpoint of ``trainer`` after ``steps`` steps keeps beside the pieces (local).

    Random streams are keyed by (seed, step, ...) and batches by the global sample index, so these numbers are all of
    their state.
    """
    kept: dict[str, Any] = {} if trainer.shares is None else {"shares": trainer.shares.state(steps)}
    if trainer.noise is not None:
        kept["noise_scale"] = trainer.noise.smoothed.state()
    return {**kept, **partitioning.state(trainer.recipe, trainer.plan)} | {
        "steps": steps,
        "samples": trainer.recipe.run.batches.samples_before(steps),
        "seed": trainer.recipe.run.seed,
        "sample_order": trainer.sample_order,
        "world": trainer.comm.size,
        "ranks_per_node": list(trainer.selection.ranks_per_node),
        "algorithm": trainer.exchange.algorithm,
        "compression": trainer.compression.name,
        "data": trainer.source.fingerprint,
        "data_digest": trainer.source.digest,
        "model_inputs": trainer.source.model_inputs(),
        "optimizer": trainer.exchange.state(),
        "loss_scale": trainer.executor.loss_scale.state(),
    }


def plan(trainer: "Trainer", directory: Path, steps: int, kept: Mapping[str, Any]) -> SavePlan:
    """Return the checkpoint after ``steps`` steps, with what else is ``kept`` beside the scalars (local)."""
    config, numbers = trainer.recipe.checkpoint, scalars(trainer, steps) | dict(kept)
    keep = Retention(config.keep, config.keep_every, config.keep_best)
    return SavePlan(directory, steps, trainer.comm.size, numbers, about(trainer), keep)


def about(trainer: "Trainer") -> dict[str, Any]:
    """Return topology, recipe, versions and tied names, for people and tools: a restore asks for none of it (local)."""
    if trainer.comm.rank:
        return {}  # those of rank 0 count
    axes = ("data", "pipeline", "tensor", "context")
    tied = {name: key for stage in trainer.model.stages for name, key in stage.tied.items()}
    return {
        "tied": tied,
        "topology": {name: getattr(trainer.grid, name) for name in axes} | {"world": trainer.comm.size},
        "recipe": recipes.flat(trainer.recipe),
        "versions": _versions(),
    } | ({"factory": trainer.factory_seal} if trainer.factory_seal else {})


@functools.cache
def _versions() -> dict[str, str]:
    """Asked once: it starts a process."""
    found = provenance(anonymous=True)
    return {name: value for name, value in found.items() if name.endswith("_version") or name == "git_commit"}


def take_back(trainer: "Trainer", origin: Origin) -> None:
    """Take back the state of ``origin``, made by any number of ranks in any layout. Collective.

    Raises DataError when the data has changed since: the sample order and every loss would be others, and
    ConfigurationError when a gradient is pending that this run would never apply, or the variance is one that it would
    misread.
    """
    resumed = origin.scalars
    known = resumed.get("optimizer")
    optional = trainer.exchange.foresee(known if isinstance(known, Mapping) else {})
    origin.fill(trainer.comm, trainer.exchange.wanted(), optional)
    lacking = [name for name, kind in NEEDED.items() if not isinstance(resumed.get(name), kind)]
    if not lacking and "count" not in resumed["optimizer"]:
        lacking = ["how many updates the optimizer has made"]
    if lacking:
        raise StorageError(f"{origin} does not say {', '.join(lacking)}: no training of hpcdist has made it")
    if not trainer.source.made(resumed):
        raise DataError(
            f"{origin} was written by a run on other data than {trainer.source.description}; "
            "give back the data it was trained on, or start a new run"
        )
    if not trainer.source.digest and isinstance(known_digest := resumed.get("data_digest"), str):
        trainer.source = replace(trainer.source, digest=known_digest)  # a later resume may compare it
    order = resumed.get("sample_order", FEISTEL)
    if order not in RULES:
        raise StorageError(
            f"{origin} takes samples by the rule {order!r}, of which this hpcdist knows {RULES}; update it"
        )
    if resumed["optimizer"].get("pending") and not isinstance(trainer.exchange, DelayedExchange):
        raise ConfigurationError(
            f"{origin} has a gradient that is still to be applied, since it was written with communication.delayed = "
            "true; go on with that, to the end of the run at the least"
        )
    if resumed["optimizer"].get(FROZEN) and not isinstance(trainer.exchange, OneBitExchange):
        raise ConfigurationError(
            f"{origin} has the frozen variance of 1-bit Adam, which other optimizers would take for one that grows; go "
            "on with communication.compression = 'onebit' (after a step on one data rank it is that of AdamW again), "
            "or take its parameters alone, with --init-from"
        )
    trainer.exchange.restore(resumed["optimizer"])
    trainer.executor.loss_scale.restore(resumed.get("loss_scale", {}))
    trainer.first_step, trainer.sample_order = resumed["steps"], order
    if trainer.shares is not None:
        trainer.shares.restore(resumed.get("shares", []))
    if trainer.noise is not None:
        trainer.noise.smoothed.restore(resumed.get("noise_scale", {}))
    trainer.executor.copies.refresh()
