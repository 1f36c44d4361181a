"""Initial parameters out of a checkpoint: a new run that begins with what another one has learnt, in any layout.

Nothing else is taken: the optimizer, the clock and the order of the samples are those of a new run, and its data may be
others. Parameters of another floating-point type are rounded to that of the run.
"""

import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np

from hpcdist.arrays import backend
from hpcdist.arrays.dtypes import FLOATS, dtype_of, name_of
from hpcdist.arrays.filestore import FileSlice
from hpcdist.arrays.layout import Layout
from hpcdist.arrays.piece import Piece
from hpcdist.arrays.ranges import Range
from hpcdist.checkpoint import listing
from hpcdist.checkpoint.format.block_reader import BlockReader, DamagedError
from hpcdist.checkpoint.format.manifest import BLOCK_BYTES, Manifest
from hpcdist.checkpoint.listing import PARAMETERS
from hpcdist.checkpoint.restoring.restore import on_first_rank, restore_together
from hpcdist.comm.communicator import Communicator
from hpcdist.errors import StorageError

if TYPE_CHECKING:
    from hpcdist.training.trainer import Trainer

ALIEN: Final = "is no tensor of the recipe's model"


def take(trainer: "Trainer", source: Path, *, partial: bool) -> dict[str, str]:
    """Replace the initial parameters of ``trainer`` by those in ``source``: a checkpoint, or a run with its newest.

    Return the tensors that keep their initial values, each with the reason: with ``partial``, those that are missing
    there, damaged, or of another shape; without it none are, and StorageError names the first. Collective over the
    world; all ranks return and raise the same.
    """
    path = on_first_rank(trainer.comm, lambda: listing.select(source))
    stored = on_first_rank(trainer.comm, lambda: listing.load_parameters(path))
    found = {one.name: one.dtype for one in listing.stored_tensors(stored, {PARAMETERS})}
    left = _misfits(trainer.model.layout, stored)
    if left and not partial:
        raise StorageError(
            f"{path}: {next(iter(left.values()))}; give [model] of the run that saved it, or add --allow-partial: what "
            "does not fit then keeps its initial values"
        )
    if partial:
        left |= _damaged(trainer.comm, path, stored)
    wanted = [piece for piece in trainer.exchange.wanted() if piece.kind == PARAMETERS and piece.tensor not in left]
    same = [piece for piece in wanted if name_of(piece.array.dtype) == found[piece.tensor]]
    other = [(piece, found[piece.tensor]) for piece in wanted if name_of(piece.array.dtype) != found[piece.tensor]]
    try:
        restore_together(trainer.comm, path, same)
        _restore_rounded(trainer.comm, path, other)
    except DamagedError as error:
        raise StorageError(f"{path.parent}: {error}; name another, or add --allow-partial to draw it") from error
    trainer.exchange.restore(trainer.exchange.state())  # working copies, and whatever else follows from parameters
    trainer.executor.copies.refresh()
    if trainer.comm.rank == 0:
        _tell(path, stored, left, len(trainer.model.layout.segments))
    return left


def _misfits(layout: Layout, stored: Manifest) -> dict[str, str]:
    """Return the tensors of the model that ``stored`` has not, and those that the model has not, with the reason."""
    found = {one.name: one for one in listing.stored_tensors(stored, {PARAMETERS})}
    left = {}
    for segment in layout.segments:
        one, name, shape = found.pop(segment.key, None), segment.key, segment.spec.whole or segment.spec.shape
        if one is None:
            left[name] = f"{name} is missing, {list(shape)} in the recipe's model"
        elif one.shape != tuple(shape):
            left[name] = f"{name} has the shape {list(one.shape)}, in the recipe's model {list(shape)}"
        elif one.dtype not in FLOATS:
            left[name] = f"{name} is {one.dtype}, in the recipe's model a floating-point number"
    return left | {name: f"{name} {ALIEN}" for name in found}


def _damaged(comm: Communicator, path: Path, stored: Manifest) -> dict[str, str]:
    """Return the parameters that cannot be read, with the reason. Collective: the ranks share the reading."""
    own: dict[str, str] = {}
    with BlockReader(path) as reader:
        for entry in stored.pieces[comm.rank :: comm.size]:
            for block in range(-(-entry.nbytes // BLOCK_BYTES)):
                try:
                    reader.read(entry, block)
                except StorageError as error:
                    own.setdefault(entry.tensor, str(error))
    return {name: reason for one in comm.allgather_object(own) for name, reason in one.items()}


def _restore_rounded(comm: Communicator, path: Path, wanted: list[tuple[Piece, str]]) -> None:
    """Fill pieces of which another type is stored; they pass through memory of the host. Collective."""
    read = [replace(piece, array=np.empty(piece.flat.size, dtype_of(dtype))) for piece, dtype in wanted]
    restore_together(comm, path, read)
    for (piece, _), held in zip(wanted, read, strict=True):
        values = held.array.astype(piece.array.dtype)
        if isinstance(piece.array, FileSlice):
            piece.array.write(Range(0, values.size), values)
        elif values.size:
            piece.array[...] = backend.namespace(piece.array).asarray(values)


def _tell(path: Path, stored: Manifest, left: dict[str, str], tensors: int) -> None:
    fresh = 0
    for reason in left.values():
        alien = reason.endswith(ALIEN)
        fresh += not alien
        print(f"hpcdist: {reason}: {'left out' if alien else 'drawn'}", file=sys.stderr)
    print(
        f"hpcdist: {tensors - fresh} of {tensors} tensors begin with the parameters of {path}, after {stored.step} "
        "steps",
        file=sys.stderr,
        flush=True,
    )
