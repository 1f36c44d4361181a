"""State of a run in checkpoints: scalars, restore, and initial parameters.

Random streams are keyed by (seed, step, ...) and batches by the global sample index, so their state is a few scalars. A
mixture of experts can start from a dense model: each expert copies the dense feed-forward, and the router is random
(sparse upcycling, arXiv:2212.05055).
"""

import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np

from hpcdist.arrays import backend
from hpcdist.arrays.dtypes import FLOATS, dtype_of
from hpcdist.arrays.layout import Layout
from hpcdist.arrays.piece import Piece
from hpcdist.checkpoint import listing
from hpcdist.checkpoint.convert import families
from hpcdist.checkpoint.convert.adapters import PeftDirectory, is_adapter
from hpcdist.checkpoint.convert.huggingface import HuggingFaceDirectory
from hpcdist.checkpoint.directory import Retention
from hpcdist.checkpoint.listing import PARAMETERS, STATISTICS, StoredTensor
from hpcdist.checkpoint.manifest import BLOCK_BYTES, Manifest
from hpcdist.checkpoint.restoring.restore import on_first_rank, restore_together
from hpcdist.checkpoint.shard import BlockReader, DamagedError
from hpcdist.checkpoint.two_phase import SavePlan
from hpcdist.comm.communicator import Communicator
from hpcdist.errors import ConfigurationError, DataError, HpcdistError, StorageError
from hpcdist.strategies.data.onebit import FROZEN
from hpcdist.telemetry.provenance import provenance
from hpcdist.training.build import pipeline
from hpcdist.training.build.model import round_frozen
from hpcdist.training.build.state_source import StateSource, restore_converted, scalars_of
from hpcdist.training.build.trainer import Trainer
from hpcdist.training.data import FEISTEL, RULES
from hpcdist.training.recipe import recipe as recipes

REQUIRED_SCALARS: Final = {"data": str, "optimizer": Mapping, "steps": int}


def scalars(trainer: Trainer, steps: int) -> dict[str, Any]:
    """Return a dict of the scalars, such as the seed, for a checkpoint after ``steps`` training steps. Local."""
    numbers: dict[str, Any] = {} if trainer.shares is None else {"shares": trainer.shares.state(steps)}
    if trainer.noise is not None:
        numbers["noise_scale"] = trainer.noise.smoothed.state()
    if (experts := trainer.model.operations.experts) is not None:
        numbers |= experts.state.state()
    return {**numbers, **pipeline.partition_scalars(trainer.recipe, trainer.plan)} | {
        "steps": steps,
        "samples": trainer.recipe.run.batches.samples_before(steps),
        "seed": trainer.recipe.run.seed,
        "sample_order": trainer.sample_order,
        "world": trainer.comm.size,
        "ranks_per_node": list(trainer.selection.ranks_per_node),
        "algorithm": trainer.exchange.traits.algorithm,
        "compression": trainer.compression.name,
        "data": trainer.source.fingerprint,
        "data_digest": trainer.source.digest,
        "model_inputs": trainer.source.inputs,
        "optimizer": trainer.exchange.state(),
        "loss_scale": trainer.executor.loss_scale.state(),
    }


def save_plan(trainer: Trainer, directory: Path, steps: int, more: Mapping[str, Any]) -> SavePlan:
    """Return the `SavePlan` of a checkpoint after ``steps`` steps: its path, scalars, metadata and retention. Local.

    ``directory``: directory of all checkpoints of the run. ``more``: additional scalars for this checkpoint.
    """
    config, numbers = trainer.recipe.checkpoint, scalars(trainer, steps) | dict(more)
    keep = Retention(config.keep, config.keep_every, config.keep_best)
    return SavePlan(directory, steps, trainer.comm.size, numbers, checkpoint_metadata(trainer), keep)


def checkpoint_metadata(trainer: Trainer) -> dict[str, Any]:
    """Return a dict of checkpoint metadata, such as recipe and software versions. Ranks above 0 return {}. Local."""
    if trainer.comm.rank:
        return {}
    axes = ("data", "pipeline", "tensor", "context", "expert")
    tied = {name: key for stage in trainer.model.stages for name, key in stage.tied.items()}
    return {
        "tied": tied,
        "topology": {name: getattr(trainer.grid, name) for name in axes} | {"world": trainer.comm.size},
        "recipe": msgspec.to_builtins(recipes.flat(trainer.recipe)),
        "versions": _versions(),
    } | ({"factory": trainer.factory_seal} if trainer.factory_seal else {})


@functools.cache
def _versions() -> dict[str, str]:
    facts = provenance(anonymous=True)
    return {name: value for name, value in facts.items() if name.endswith("_version") or name == "git_commit"}


def restore_state(trainer: Trainer, origin: StateSource) -> Trainer:
    """Return a copy of ``trainer`` with the state of the checkpoint ``origin``. Collective.

    Raises DataError if the training data has changed since ``origin`` was written.
    """
    resumed = origin.scalars
    optimizer_state = resumed.get("optimizer")
    optional = trainer.exchange.prepare_restore(optimizer_state if isinstance(optimizer_state, Mapping) else {})
    origin.fill(trainer.comm, trainer.wanted(), {*optional, STATISTICS})
    lacking = [name for name, kind in REQUIRED_SCALARS.items() if not isinstance(resumed.get(name), kind)]
    if not lacking and "count" not in resumed["optimizer"]:
        lacking = ["the number of optimizer updates"]
    if lacking:
        raise StorageError(
            f"{origin} lacks {', '.join(lacking)}, so {origin} is not a checkpoint of hpcdist; use another checkpoint"
        )
    if not trainer.source.matches(resumed):
        raise DataError(
            f"{origin} was written by a run on other data than {trainer.source.description}; "
            "provide the data of that run, or start a new run"
        )
    source = trainer.source
    if not source.digest and isinstance(known_digest := resumed.get("data_digest"), str):
        source = replace(source, digest=known_digest)  # a later resume may compare the digest
    order = resumed.get("sample_order", FEISTEL)
    if order not in RULES:
        raise StorageError(
            f"{origin} orders the training samples by the rule {order!r}, but this version of hpcdist supports only "
            f"the rules {RULES}; update hpcdist"
        )
    if resumed["optimizer"].get("pending") and "pending" not in trainer.exchange.traits.restores:
        raise ConfigurationError(
            f"{origin} has a pending gradient, because it was written with communication.delayed = true; resume with "
            "communication.delayed = true and finish the run: its last checkpoint has no pending gradient"
        )
    if resumed["optimizer"].get(FROZEN) and FROZEN not in trainer.exchange.traits.restores:
        raise ConfigurationError(
            f"{origin} has the frozen variance of 1-bit Adam, which other optimizers would continue to update; resume "
            "with communication.compression = 'onebit', or load only its parameters with --init-from. To continue "
            "with AdamW, first train and save at least one step with 'onebit' on one data rank"
        )
    trainer.exchange.restore(resumed["optimizer"])
    trainer.executor.loss_scale.restore(resumed.get("loss_scale", {}))
    if trainer.shares is not None:
        trainer.shares.restore(resumed.get("shares", []))
    if trainer.noise is not None:
        trainer.noise.smoothed.restore(resumed.get("noise_scale", {}))
    if (experts := trainer.model.operations.experts) is not None:
        experts.state.restore(resumed)
    round_frozen(trainer.context)
    trainer.executor.copies.refresh()
    return replace(trainer, source=source, first_step=resumed["steps"], sample_order=order)


ROUTER: Final = "router.weight"
NOT_IN_MODEL: Final = "is not a tensor of the recipe's model"


def load_initial(trainer: Trainer, source: Path, *, partial: bool) -> dict[str, str]:
    """Load the parameters in the checkpoint ``source``, without optimizer state. Collective over the world.

    ``source``: checkpoint, run directory, Hugging Face directory, or GGUF file. Return {name of a tensor that was
    not loaded: reason}.
    """
    if on_first_rank(trainer.comm, lambda: families.is_source(source)):
        return _load_directory(trainer, source, partial)
    path = on_first_rank(trainer.comm, lambda: listing.select(source))
    stored = on_first_rank(trainer.comm, lambda: listing.load_parameters(path))
    tensors = {tensor.name: tensor for tensor in listing.stored_tensors(stored, {PARAMETERS})}
    dtypes = {name: tensor.dtype for name, tensor in tensors.items()}
    layout = trainer.model.whole_layout
    sources = _dense_sources(layout, {name: tensor.shape for name, tensor in tensors.items()})
    skipped = _without_upcycled(_mismatched_tensors(layout, tensors), sources)
    adapters = {segment.key for segment in layout.segments if is_adapter(segment.key)} - {*tensors}
    missing = [reason for name, reason in skipped.items() if name not in adapters]
    if missing and not partial:
        raise StorageError(
            f"{path} does not fit the recipe's model: {missing[0]}; use the [model] section of the "
            "run that wrote this checkpoint, or add --allow-partial to load only the tensors that match"
        )
    if partial:
        skipped |= _damaged_tensors(trainer.comm, path, stored)
    requested_pieces = [piece for piece in trainer.wanted() if piece.kind == PARAMETERS and piece.tensor not in skipped]
    try:
        restore_converted(trainer.comm, path, [one for one in requested_pieces if one.tensor in dtypes], dtypes)
        if sources:
            stacks = [piece for piece in requested_pieces if piece.tensor in sources]
            _fill_stacks(trainer.comm, path, stacks, sources, dtypes)
    except DamagedError as error:
        raise StorageError(
            f"a checkpoint in {path.parent} is damaged: {error}; choose another checkpoint, or add --allow-partial to "
            "draw new initial values for the damaged tensor"
        ) from error
    trainer.exchange.restore(trainer.exchange.state())  # refresh working copies and other derived state
    trainer.executor.copies.refresh()
    if (experts := trainer.model.operations.experts) is not None:
        experts.state.restore(on_first_rank(trainer.comm, lambda: scalars_of(path, stored)))
    if trainer.comm.rank == 0:
        _report_initial(path, stored, skipped, len(layout.segments))
    return skipped


def load_adapters(trainer: Trainer, source: Path) -> None:
    """Load the adapters in ``source``, a directory of PEFT. Collective over the world."""
    recipe, comm = trainer.recipe, trainer.comm
    pieces = [piece for piece in trainer.wanted() if piece.kind == PARAMETERS and is_adapter(piece.tensor)]

    def fill(pieces: Sequence[Piece]) -> None:
        family = families.config_of(recipe.model, recipe.data.context, "")["model_type"]
        with PeftDirectory(source, family, recipe.model, recipe.data.context, recipe.lora) as directory:
            directory.fill(pieces)

    on_first_rank(comm, lambda: fill([]))
    _fill_together(comm, lambda: fill(pieces))
    trainer.exchange.restore(trainer.exchange.state())  # refresh working copies and other derived state
    trainer.executor.copies.refresh()


def _fill_together(comm: Communicator, fill: Callable[[], None]) -> None:
    failed = ""
    try:
        fill()
    except HpcdistError as error:
        failed = str(error)
    if failures := [text for text in comm.allgather_object(failed) if text]:
        raise StorageError(failures[0])


def _load_directory(trainer: Trainer, source: Path, partial: bool) -> dict[str, str]:
    # Each rank reads the elements that it keeps.
    if partial:
        raise ConfigurationError(f"run.allow_partial is not supported with the Hugging Face directory {source}")
    comm, layout = trainer.comm, trainer.model.whole_layout
    pieces = [piece for piece in trainer.wanted() if piece.kind == PARAMETERS and not is_adapter(piece.tensor)]

    def fill(pieces: Sequence[Piece], whole: bool) -> None:
        with HuggingFaceDirectory(source, whole=whole) as directory:
            directory.check_model(trainer.recipe.model)
            names = {segment.key: tuple(segment.spec.whole or segment.spec.shape) for segment in layout.segments}
            for name, mapped in directory.mapped.items():
                if names.get(name) != mapped.shape:
                    raise ConfigurationError(
                        f"{name} has the shape {list(mapped.shape)} in {source}, but {list(names.get(name, ()))} in "
                        f"the recipe's model; set data.context to {families.context_of(directory.config)}"
                    )
            directory.fill(pieces)

    on_first_rank(comm, lambda: fill([], True))
    _fill_together(comm, lambda: fill(pieces, False))
    trainer.exchange.restore(trainer.exchange.state())  # refresh working copies and other derived state
    trainer.executor.copies.refresh()
    if comm.rank == 0:
        print(f"hpcdist: all tensors start with the parameters of {source}", file=sys.stderr, flush=True)
    return {}


def _dense_sources(layout: Layout, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, str]:
    # A tensor that is stored dense is copied to each expert. Returns {expert tensor: dense tensor}.
    sources = {}
    for segment in layout.segments:
        spec, dense = segment.spec, segment.key.replace(".experts.", ".")
        shape = (spec.whole or spec.shape)[1:]
        if spec.expert and segment.key not in shapes and shapes.get(dense) == shape:
            sources[segment.key] = dense
    return sources


def _without_upcycled(reasons: Mapping[str, str], sources: Mapping[str, str]) -> dict[str, str]:
    routers = {f"{name.partition('.')[0]}.{ROUTER}" for name in sources}
    return {name: reason for name, reason in reasons.items() if name not in {*sources, *sources.values(), *routers}}


def _fill_stacks(
    comm: Communicator, path: Path, pieces: Sequence[Piece], sources: Mapping[str, str], dtypes: Mapping[str, str]
) -> None:
    names = sorted({sources[piece.tensor] for piece in pieces})
    shapes = {sources[piece.tensor]: piece.global_shape[1:] for piece in pieces}
    dense = {name: np.empty(shapes[name], dtype_of(dtypes[name])) for name in names}
    restore_together(comm, path, [Piece.whole(PARAMETERS, name, dense[name]) for name in names])
    for piece in pieces:
        stack = np.broadcast_to(dense[sources[piece.tensor]], piece.global_shape)
        values = stack[tuple(slice(start, stop) for start, stop in piece.box)].reshape(-1)[piece.flat.slice]
        piece.array[...] = backend.namespace(piece.array).asarray(values.astype(piece.array.dtype))


def _mismatched_tensors(layout: Layout, stored: Mapping[str, StoredTensor]) -> dict[str, str]:
    left, reasons = dict(stored), {}
    for segment in layout.segments:
        name, shape = segment.key, segment.spec.whole or segment.spec.shape
        tensor = left.pop(name, None)
        if tensor is None:
            reasons[name] = f"{name} is missing; the recipe's model has it with shape {list(shape)}"
        elif tensor.shape != tuple(shape):
            reasons[name] = f"{name} has the shape {list(tensor.shape)}, but {list(shape)} in the recipe's model"
        elif tensor.dtype not in FLOATS:
            reasons[name] = f"{name} has dtype {tensor.dtype}, but a floating-point dtype in the recipe's model"
    return reasons | {name: f"{name} {NOT_IN_MODEL}" for name in left}


def _damaged_tensors(comm: Communicator, path: Path, stored: Manifest) -> dict[str, str]:
    damaged: dict[str, str] = {}
    with BlockReader(path) as reader:
        for entry in stored.pieces[comm.rank :: comm.size]:
            for block in range(-(-entry.nbytes // BLOCK_BYTES)):
                try:
                    reader.read(entry, block)
                except StorageError as error:
                    damaged.setdefault(entry.tensor, str(error))
    return {name: reason for reasons in comm.allgather_object(damaged) for name, reason in reasons.items()}


def _report_initial(path: Path, stored: Manifest, left: dict[str, str], tensors: int) -> None:
    fresh = 0
    for reason in left.values():
        alien = reason.endswith(NOT_IN_MODEL)
        fresh += not alien
        print(f"hpcdist: {reason}: {'left out' if alien else 'drawn'}", file=sys.stderr)
    print(
        f"hpcdist: {tensors - fresh} of {tensors} tensors start with the parameters of {path}, after {stored.step} "
        "steps",
        file=sys.stderr,
        flush=True,
    )
