"""Restore a checkpoint on any number of ranks: each rank reads only the stored blocks that its pieces overlap."""

import gc
import sys
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar, cast

import msgspec
import numpy as np

from hpcdist.arrays import backend
from hpcdist.arrays.dtypes import dtype_of, name_of
from hpcdist.arrays.filestore import FileSlice
from hpcdist.arrays.piece import Piece, first_gap, grouped_alike, intersect_runs, runs
from hpcdist.arrays.ranges import Range, cut
from hpcdist.checkpoint import directory as names
from hpcdist.checkpoint import listing, manifest
from hpcdist.checkpoint.manifest import BLOCK_BYTES, Manifest, StoredPiece
from hpcdist.checkpoint.shard import BlockConsumer, BlockReader, DamagedError
from hpcdist.comm.communicator import Communicator
from hpcdist.comm.threads.communicator import solo
from hpcdist.errors import HpcdistError, StorageError


def fill_piece(directory: Path, piece: Piece, entries: list[StoredPiece], reader: BlockReader) -> None:
    """Fill the tensor slice ``piece`` from the stored slices ``entries``. Raises StorageError and `DamagedError`.

    ``directory``: the checkpoint. ``reader``: open reader of the checkpoint's shards.
    """
    _check_entries(directory, piece, entries)
    if isinstance(piece.array, FileSlice):
        _fill_in_blocks(directory, piece, piece.array, entries, reader)
    else:
        _fill_in_memory(directory, piece, entries, reader)


def _check_entries(directory: Path, piece: Piece, entries: list[StoredPiece]) -> None:
    if not entries:
        raise StorageError(
            f"{directory} has no tensor {piece.name}; was the checkpoint saved by another model or optimizer? "
            "--init-from starts a new run from the parameters alone"
        )
    shape, dtype = tuple(piece.global_shape), name_of(piece.array.dtype)
    for entry in entries:
        if entry.dtype != dtype or not grouped_alike(entry.shape, shape):
            raise StorageError(
                f"{directory}: {piece.name} is {entry.dtype}{list(entry.shape)}, expected "
                f"{dtype}{list(shape)}; restore with the recipe of the checkpoint, or start a new run with --init-from"
            )


def _fill_in_blocks(
    directory: Path, piece: Piece, target: FileSlice, entries: list[StoredPiece], reader: BlockReader
) -> None:
    # Each stored block is read once, or up to twice if the sharding changed.
    longest = BLOCK_BYTES // target.dtype.itemsize
    memory = np.empty(min(longest, piece.flat.size), target.dtype)
    for part in cut(Range(0, piece.flat.size), longest):
        block = memory[: part.size]
        _fill_in_memory(directory, replace(piece, flat=part.shift(piece.flat.start), array=block), entries, reader)
        target.write(part, block)


def _fill_in_memory(directory: Path, piece: Piece, entries: list[StoredPiece], reader: BlockReader) -> None:
    on_device = backend.is_device(piece.array)
    out = np.empty(piece.flat.size, piece.array.dtype) if on_device else piece.array
    flat = piece.flat.start, piece.flat.stop
    same = (e for e in entries if (e.shape, e.box, e.flat) == (piece.global_shape, piece.box, flat))
    entry = next(same, None)
    if entry is not None:  # stored as the same piece: one run
        take = _run(out, 0, 0, out.size)
        for number in range(-(-entry.nbytes // BLOCK_BYTES)):
            reader.read(entry, number, take)
    else:
        _collect(directory, piece, entries, out, reader)
    if on_device:
        piece.array[...] = backend.namespace(piece.array).asarray(out)


def _collect(directory: Path, piece: Piece, entries: list[StoredPiece], out: np.ndarray, reader: BlockReader) -> None:
    mine = runs(piece.global_shape, piece.box, piece.flat)
    filled = []
    for entry in entries:
        # Copy ``size`` elements from ``at`` of the entry to ``to`` of ``out``; arrays, ascending.
        to, at, size = intersect_runs(mine, entry.runs())
        _copy(reader, entry, out, (to, at, size))
        filled.append((to, size))
    gap = first_gap(filled, piece.flat.size)
    if gap is not None:
        raise StorageError(
            f"{directory} has only a part of {piece.name}: element {gap} of the requested range is missing; restore "
            "another checkpoint"
        )


def _copy(
    reader: BlockReader, entry: StoredPiece, out: np.ndarray, stretches: tuple[np.ndarray, np.ndarray, np.ndarray]
) -> None:
    to, at, size = stretches
    per_block = BLOCK_BYTES // dtype_of(entry.dtype).itemsize
    # First and last block of each run; in a set, since short runs share blocks.
    spans = zip(at // per_block, (at + size - 1) // per_block, strict=True)
    blocks = sorted({number for first, last in spans for number in range(int(first), int(last) + 1)})
    take = _run(out, int(to[0]), int(at[0]), int(size[0])) if to.size == 1 else _runs(out, to, at, size)
    for number in blocks:
        reader.read(entry, number, take)


def _run(out: np.ndarray, to: int, at: int, size: int) -> BlockConsumer:
    shift, low, high = to - at, at, at + size

    # Copies stored elements ``at:at+size`` to ``out[to:to+size]``.
    def take(first: int, elements: np.ndarray) -> None:
        last = first + elements.size
        if low <= first and last <= high:
            out[first + shift : last + shift] = elements
        elif first < high and low < last:
            start, stop = max(first, low), min(last, high)
            out[start + shift : stop + shift] = elements[start - first : stop - first]

    return take


def _runs(out: np.ndarray, to: np.ndarray, at: np.ndarray, size: np.ndarray) -> BlockConsumer:
    # Copies stored elements ``at[i]:at[i]+size[i]`` to ``out[to[i]:to[i]+size[i]]`` for each i.
    ends = at + size

    def take(first: int, elements: np.ndarray) -> None:
        last = first + elements.size
        # From the first run that ends after ``first`` to the last one that starts before ``last``.
        held = slice(int(np.searchsorted(ends, first, "right")), int(np.searchsorted(at, last, "left")))
        starts, stops = np.maximum(at[held], first), np.minimum(ends[held], last)
        target_starts = to[held] + starts - at[held]
        for to_start, start, stop in zip(
            target_starts.tolist(), (starts - first).tolist(), (stops - first).tolist(), strict=True
        ):
            out[to_start : to_start + stop - start] = elements[start:stop]

    return take


Result = TypeVar("Result")


def newest_complete(run_dir: str | Path, comm: Communicator | None = None, skip: Collection[Path] = ()) -> Path | None:
    """Return the path of the newest complete checkpoint outside ``skip``, or None. Raises StorageError. Collective."""
    comm = comm or solo()
    candidates = comm.broadcast_object(names.candidates(Path(run_dir) / "checkpoints") if comm.rank == 0 else None)
    for _, path in candidates:
        if path in skip:
            continue
        reason = _unusable_reason(path, comm)
        if not reason:
            return Path(path)
        _report_unusable(path, reason, comm)
    return None


def from_newest_intact(
    run_dir: str | Path, comm: Communicator, first: Path | None, take: Callable[[Path | None], Result]
) -> Result:
    """Return ``take(first)`` or, if ``first`` is damaged, ``take`` of the newest undamaged checkpoint. Collective.

    ``take``: function that restores the checkpoint ``path``, or starts anew if ``path`` is None. ``take`` must raise
    `DamagedError` on all ranks or on no rank.
    """
    path, damaged = first, set[Path]()
    while True:
        try:
            return take(path)
        except DamagedError as error:
            if path is None:
                raise
            _report_unusable(path, str(error), comm)
        damaged.add(path)
        gc.collect()  # frees the partly filled state: two may not fit in memory
        path = newest_complete(run_dir, comm, damaged)


def _report_unusable(path: Path, reason: str, comm: Communicator) -> None:
    if comm.rank == 0:
        print(f"hpcdist: checkpoint {path} is skipped: {reason}", file=sys.stderr, flush=True)


def _unusable_reason(path: Path, comm: Communicator) -> str:
    listed = listing.inspect(path) if comm.rank == 0 else None
    verdict: tuple[str, str] = comm.broadcast_object(None if listed is None else (listed.state, listed.reason))
    if verdict[0] == listing.NEWER:
        raise manifest.NewerVersionError(verdict[1])
    return verdict[1]


def restore_together(
    comm: Communicator, directory: str | Path, pieces: Iterable[Piece], optional: Collection[str] = ()
) -> dict[str, Any]:
    """Restore like `restore` on all ranks. If a rank fails, all ranks raise the same StorageError. Collective."""
    directory = Path(directory)
    stored = on_first_rank(comm, lambda: _PackedEntries.of(manifest.load(directory)))
    failed: tuple[type[StorageError], str] | None = None
    try:
        _restore(directory, stored, pieces, optional)
    except StorageError as error:
        failed = DamagedError if isinstance(error, DamagedError) else StorageError, str(error)
    # A rank that failed must also call this collective, or the others would hang.
    failures = comm.allgather_object(failed)
    reasons = [failure for failure in failures if failure is not None]
    if reasons:  # an unsuitable recipe explains more than damage
        kind, reason = next((failure for failure in reasons if failure[0] is StorageError), reasons[0])
        raise kind(reason)
    return stored.scalars


def on_first_rank(comm: Communicator, read: Callable[[], Result]) -> Result:
    """Call ``read`` on rank 0. Return the result or raise the HpcdistError of this call on all ranks. Collective."""
    verdict: Result | HpcdistError | None = None
    if comm.rank == 0:
        try:
            verdict = read()
        except HpcdistError as error:
            verdict = error
    verdict = comm.broadcast_object(verdict)
    if isinstance(verdict, HpcdistError):
        raise verdict
    return cast("Result", verdict)


def restore(directory: str | Path, pieces: Iterable[Piece], optional: Collection[str] = ()) -> dict[str, Any]:
    """Fill the tensor slices ``pieces`` from the checkpoint in ``directory``. Return a dict of JSON scalars. Local.

    ``optional``: tensor kinds that may be missing, such as "optimizer.m". Raises StorageError for damaged, missing or
    different tensors. After an error, the arrays of ``pieces`` are undefined.
    """
    directory = Path(directory)
    stored = _PackedEntries.of(manifest.load(directory))
    _restore(directory, stored, pieces, optional)
    return stored.scalars


@dataclass(frozen=True)
class _PackedEntries:
    scalars: dict[str, Any]
    kinds: frozenset[str]
    packed: dict[tuple[str, str], bytes]  # encoded per tensor: a rank decodes only the tensors it restores

    @classmethod
    def of(cls, stored: Manifest) -> "_PackedEntries":
        by_tensor: dict[tuple[str, str], list[StoredPiece]] = {}
        for entry in stored.pieces:
            by_tensor.setdefault((entry.kind, entry.tensor), []).append(entry)
        packed = {name: msgspec.msgpack.encode(entries) for name, entries in by_tensor.items()}
        return cls(stored.scalars, frozenset(kind for kind, _ in packed), packed)

    def entries(self, piece: Piece) -> list[StoredPiece]:
        packed = self.packed.get((piece.kind, piece.tensor))
        return [] if packed is None else msgspec.msgpack.decode(packed, type=list[StoredPiece])


def _restore(directory: Path, stored: _PackedEntries, pieces: Iterable[Piece], optional: Collection[str]) -> None:
    absent = set(optional) - stored.kinds
    with BlockReader(directory) as reader:
        for piece in pieces:
            if not piece.flat or piece.kind in absent:
                continue  # empty pieces need no data
            fill_piece(directory, piece, stored.entries(piece), reader)
