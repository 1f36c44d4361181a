"""Filling a piece from what is stored of its tensor, whatever cuts both were made in (local)."""

from dataclasses import replace
from pathlib import Path

import numpy as np

from hpcdist.arrays import backend
from hpcdist.arrays.dtypes import dtype_of, name_of
from hpcdist.arrays.filestore import Stretch
from hpcdist.arrays.piece import Piece, common, first_gap, grouped_alike, runs
from hpcdist.arrays.ranges import Range, cut
from hpcdist.checkpoint.blocks import BlockReader, Take
from hpcdist.checkpoint.manifest import BLOCK_BYTES, Entry
from hpcdist.errors import StorageError


def fill(directory: Path, piece: Piece, entries: list[Entry], reader: BlockReader) -> None:
    """Fill the array of ``piece`` from ``entries``, which are all that the checkpoint ``directory`` has of its tensor.

    Raises StorageError where they are of another shape or dtype, or do not cover it, and `DamagedError`.
    """
    _check(directory, piece, entries)
    if isinstance(piece.array, Stretch):
        _fill_in_blocks(directory, piece, piece.array, entries, reader)
    else:
        _fill(directory, piece, entries, reader)


def _check(directory: Path, piece: Piece, entries: list[Entry]) -> None:
    """Raise StorageError when what is stored is not what is wanted."""
    if not entries:
        raise StorageError(
            f"{directory} has no {piece.name}; was it saved by another model or optimizer? With --init-from a new run "
            "takes the parameters alone"
        )
    shape, dtype = tuple(piece.global_shape), name_of(piece.array.dtype)
    for entry in entries:
        if entry.dtype != dtype or not grouped_alike(entry.shape, shape):
            raise StorageError(
                f"{directory}: {piece.name} is {entry.dtype}{list(entry.shape)}, expected "
                f"{dtype}{list(shape)}; restore with the recipe that saved it, or begin a new run with --init-from"
            )


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
    flat = piece.flat.start, piece.flat.stop
    same = (e for e in entries if (e.shape, e.box, e.flat) == (piece.global_shape, piece.box, flat))
    entry = next(same, None)
    if entry is not None:  # saved in these cuts
        take = _run(out, 0, 0, out.size)
        for number in range(-(-entry.nbytes // BLOCK_BYTES)):
            reader.read(entry, number, take)
    else:
        _collect(directory, piece, entries, out, reader)
    if on_device:
        piece.array[...] = backend.namespace(piece.array).asarray(out)


def _collect(directory: Path, piece: Piece, entries: list[Entry], out: np.ndarray, reader: BlockReader) -> None:
    """Fill ``out`` with what ``entries`` hold of ``piece``."""
    mine = runs(piece.global_shape, piece.box, piece.flat)
    filled = []
    for entry in entries:
        to, at, size = common(mine, entry.runs())
        _copy(reader, entry, out, (to, at, size))
        filled.append((to, size))
    gap = first_gap(filled, piece.flat.size)
    if gap is not None:
        raise StorageError(f"{directory} has only a part of {piece.name}: element {gap} of the wanted piece is missing")


def _copy(
    reader: BlockReader, entry: Entry, out: np.ndarray, stretches: tuple[np.ndarray, np.ndarray, np.ndarray]
) -> None:
    """Copy ``size`` elements from ``at`` in the entry to ``to`` in ``out``, reading each block that holds some once."""
    to, at, size = stretches
    per_block = BLOCK_BYTES // dtype_of(entry.dtype).itemsize
    spans = zip(at // per_block, (at + size - 1) // per_block, strict=True)
    needed = sorted({number for first, last in spans for number in range(int(first), int(last) + 1)})
    take = _run(out, int(to[0]), int(at[0]), int(size[0])) if to.size == 1 else _runs(out, to, at, size)
    for number in needed:
        reader.read(entry, number, take)


def _run(out: np.ndarray, to: int, at: int, size: int) -> Take:
    """Return what puts ``size`` elements from ``at`` in an entry to ``to`` in ``out``."""
    shift, low, high = to - at, at, at + size

    def take(first: int, elements: np.ndarray) -> None:
        last = first + elements.size
        if low <= first and last <= high:
            out[first + shift : last + shift] = elements
        elif first < high and low < last:
            start, stop = max(first, low), min(last, high)
            out[start + shift : stop + shift] = elements[start - first : stop - first]

    return take


def _runs(out: np.ndarray, to: np.ndarray, at: np.ndarray, size: np.ndarray) -> Take:
    """Return what does as `_run` for many runs, ordered by ``at``."""
    ends = at + size

    def take(first: int, elements: np.ndarray) -> None:
        last = first + elements.size
        held = slice(int(np.searchsorted(ends, first, "right")), int(np.searchsorted(at, last, "left")))
        starts, stops = np.maximum(at[held], first), np.minimum(ends[held], last)
        places = to[held] + starts - at[held]
        for place, start, stop in zip(
            places.tolist(), (starts - first).tolist(), (stops - first).tolist(), strict=True
        ):
            out[place : place + stop - start] = elements[start:stop]

    return take
