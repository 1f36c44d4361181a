"""Restoring on any number of ranks: what is wanted is intersected with what is stored, and only that is read."""

import math
import sys
from collections.abc import Collection, Iterable
from dataclasses import replace
from itertools import accumulate
from operator import mul
from pathlib import Path
from typing import Any

import numpy as np

from hpcdist.arrays import backend
from hpcdist.arrays.dtypes import dtype_of, name_of
from hpcdist.arrays.filestore import Stretch
from hpcdist.arrays.piece import Piece, common, first_gap, runs
from hpcdist.arrays.ranges import Range, cut
from hpcdist.checkpoint import blocks, manifest
from hpcdist.checkpoint import directory as names
from hpcdist.checkpoint.blocks import BlockReader
from hpcdist.checkpoint.manifest import BLOCK_BYTES, Entry
from hpcdist.comm.communicator import Communicator
from hpcdist.comm.solo import solo
from hpcdist.errors import StorageError


def newest(run_dir: str | Path, comm: Communicator | None = None) -> Path | None:
    """Return the newest valid checkpoint under ``run_dir/checkpoints``; None when there is none.

    Every block of it has been verified. What was skipped is told on stderr with the reason. Collective over ``comm``,
    whose ranks divide the reading; without one, this process reads all of it.
    """
    comm = comm or solo()
    found = comm.broadcast_object(names.candidates(Path(run_dir) / "checkpoints") if comm.rank == 0 else None)
    for step, path in found:
        reason = _why_not(path, step, comm)
        if not reason:
            return Path(path)
        if comm.rank == 0:
            print(f"hpcdist: checkpoint {path} is skipped: {reason}", file=sys.stderr, flush=True)
    return None


def _why_not(path: Path, step: int, comm: Communicator) -> str:
    """Return why the checkpoint at ``path`` cannot be used, "" when it can; the same on all ranks."""
    if path.suffix == ".tmp":
        return "it was not finished"
    loaded: manifest.Manifest | str = ""
    if comm.rank == 0:
        try:
            loaded = manifest.load(path)
            if loaded.step != step:
                loaded = f"its manifest is of step {loaded.step}"
        except StorageError as error:
            loaded = str(error)
    loaded = comm.broadcast_object(loaded)
    if isinstance(loaded, str):
        return loaded
    reasons: list[str] = comm.allgather_object(blocks.problem(path, loaded, comm.rank, comm.size))
    return next((reason for reason in reasons if reason), "")


def restore(directory: str | Path, wanted: Iterable[Piece], optional: Collection[str] = ()) -> dict[str, Any]:
    """Fill the arrays of ``wanted`` from the checkpoint ``directory`` (``.../step-N``) and return its scalars (local).

    The pieces may be cut in any way, whatever wrote them. Those of a kind in ``optional`` stay as they are where the
    checkpoint has nothing of that kind. Raises StorageError, naming file and tensor, when bytes are damaged or missing
    or a tensor has another shape or dtype; the arrays are then undefined.
    """
    directory = Path(directory)
    stored = manifest.load(directory)
    by_tensor: dict[tuple[str, str], list[Entry]] = {}
    for entry in stored.pieces:
        by_tensor.setdefault((entry.kind, entry.tensor), []).append(entry)
    absent = set(optional) - {entry.kind for entry in stored.pieces}
    with BlockReader(directory) as reader:
        for piece in wanted:
            if not piece.flat or piece.kind in absent:
                continue  # nobody saved what has no elements
            entries = by_tensor.get((piece.kind, piece.tensor), [])
            _check(directory, piece, entries)
            if isinstance(piece.array, Stretch):
                _fill_in_blocks(directory, piece, piece.array, entries, reader)
            else:
                _fill(directory, piece, entries, reader)
    return stored.scalars


def _check(directory: Path, piece: Piece, entries: list[Entry]) -> None:
    """Raise StorageError when what is stored is not what is wanted."""
    if not entries:
        raise StorageError(f"{directory} has no {piece.name}; was it saved by another model or optimizer?")
    shape, dtype = tuple(piece.global_shape), name_of(piece.array.dtype)
    for entry in entries:
        if entry.dtype != dtype or not _grouped_alike(entry.shape, shape):
            raise StorageError(
                f"{directory}: {piece.name} is {entry.dtype}{list(entry.shape)}, expected "
                f"{dtype}{list(shape)}; restore with the recipe that saved it"
            )


def _grouped_alike(one: tuple[int, ...], other: tuple[int, ...]) -> bool:
    """Whether one shape is the other with neighbouring dims joined: (3, 4, 5) and (12, 5) have the same elements."""
    ends, others = (set(accumulate(shape, mul)) for shape in (one, other))
    return math.prod(one) == math.prod(other) and (ends <= others or others <= ends)


def _fill_in_blocks(directory: Path, piece: Piece, target: Stretch, entries: list[Entry], reader: BlockReader) -> None:
    """Fill what is not in memory. A stored block is read once where it was saved in these cuts, else twice at most."""
    longest = BLOCK_BYTES // target.dtype.itemsize
    memory = np.empty(min(longest, piece.flat.size), target.dtype)
    for part in cut(Range(0, piece.flat.size), longest):
        block = memory[: part.size]
        _fill(directory, replace(piece, flat=part.shift(piece.flat.start), array=block), entries, reader)
        target.write(part, block)


def _fill(directory: Path, piece: Piece, entries: list[Entry], reader: BlockReader) -> None:
    on_device = backend.is_device(piece.array)
    out = np.empty(piece.flat.size, piece.array.dtype) if on_device else piece.array
    mine = runs(piece.global_shape, piece.box, piece.flat)
    filled = []
    for entry in entries:
        to, at, size = common(mine, entry.runs())
        _copy(reader, entry, out, (to, at, size))
        filled.append((to, size))
    gap = first_gap(filled, piece.flat.size)
    if gap is not None:
        raise StorageError(f"{directory} has only a part of {piece.name}: element {gap} of the wanted piece is missing")
    if on_device:
        piece.array[...] = backend.namespace(piece.array).asarray(out)


def _copy(
    reader: BlockReader, entry: Entry, out: np.ndarray, stretches: tuple[np.ndarray, np.ndarray, np.ndarray]
) -> None:
    """Copy ``size`` elements from ``at`` in the entry to ``to`` in ``out``, reading each block that holds some once."""
    to, at, size = stretches
    per_block = BLOCK_BYTES // dtype_of(entry.dtype).itemsize
    spans = zip(at // per_block, (at + size - 1) // per_block, strict=True)
    needed = sorted({number for first, last in spans for number in range(int(first), int(last) + 1)})
    for number in needed:
        low = number * per_block
        high = min(low + per_block, entry.flat[1] - entry.flat[0])
        held = range(int(np.searchsorted(at + size, low, "right")), int(np.searchsorted(at, high, "left")))
        k = held[0]
        if at[k] <= low and high <= at[k] + size[k]:  # all of the block, one behind the other: no copy
            place = int(to[k]) + low - int(at[k])
            reader.read(entry, number, out[place : place + high - low])
            continue
        data = reader.read(entry, number)
        for k in held:
            start, stop = max(int(at[k]), low), min(int(at[k] + size[k]), high)
            place = int(to[k]) + start - int(at[k])
            out[place : place + stop - start] = data[start - low : stop - low]
