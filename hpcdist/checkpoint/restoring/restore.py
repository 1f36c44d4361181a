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
from hpcdist.checkpoint.shard import BlockReader, DamagedError
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
    same_box = [entry for entry in entries if (entry.shape, entry.box) == (piece.global_shape, piece.box)]
    entry = next((entry for entry in same_box if entry.flat == flat), None)
    if entry is not None:  # stored as the same piece: one run
        _copy_run(reader, entry, out, (0, 0, out.size))
    elif len(same_box) == len(entries):
        _collect_ranges(directory, piece, entries, out, reader)
    else:
        _collect(directory, piece, entries, out, reader)
    if on_device:
        piece.array[...] = backend.namespace(piece.array).asarray(out)


def _collect_ranges(
    directory: Path, piece: Piece, entries: list[StoredPiece], out: np.ndarray, reader: BlockReader
) -> None:
    # All entries are ranges of the region of the piece, so each has at most one run in the piece.
    begin, reached = piece.flat.start, piece.flat.start
    for entry in sorted(entries, key=lambda entry: entry.flat):
        start, stop = max(entry.flat[0], begin), min(entry.flat[1], piece.flat.stop)
        if start >= stop:
            continue
        if start > reached:
            break
        _copy_run(reader, entry, out, (start - begin, start - entry.flat[0], stop - start))
        reached = max(reached, stop)
    _check_gap(directory, piece, None if reached == piece.flat.stop else reached - begin)


def _collect(directory: Path, piece: Piece, entries: list[StoredPiece], out: np.ndarray, reader: BlockReader) -> None:
    mine = runs(piece.global_shape, piece.box, piece.flat)
    filled = []
    for entry in entries:
        # Copy ``size`` elements from ``at`` of the entry to ``to`` of ``out``; arrays, ascending.
        to, at, size = intersect_runs(mine, entry.runs())
        if to.size == 1:
            _copy_run(reader, entry, out, (int(to[0]), int(at[0]), int(size[0])))
        else:
            per_block = BLOCK_BYTES // dtype_of(entry.dtype).itemsize
            # First and last block of each run; in a set, since short runs share blocks.
            spans = zip(at // per_block, (at + size - 1) // per_block, strict=True)
            blocks = sorted({number for first, last in spans for number in range(int(first), int(last) + 1)})
            for number in blocks:
                reader.read(entry, number, _Runs(out, to, at, size))
        filled.append((to, size))
    _check_gap(directory, piece, first_gap(filled, piece.flat.size))


def _check_gap(directory: Path, piece: Piece, gap: int | None) -> None:
    if gap is not None:
        raise StorageError(
            f"{directory} has only a part of {piece.name}: element {gap} of the requested range is missing; restore "
            "another checkpoint"
        )


def _copy_run(reader: BlockReader, entry: StoredPiece, out: np.ndarray, run: tuple[int, int, int]) -> None:
    to, at, size = run
    per_block = BLOCK_BYTES // dtype_of(entry.dtype).itemsize
    for number in range(at // per_block, -(-(at + size) // per_block)):
        reader.read(entry, number, _Run(out, to, at, size))


@dataclass(frozen=True)
class _Run:
    # Copies stored elements ``at:at+size`` to ``out[to:to+size]``.
    out: np.ndarray
    to: int
    at: int
    size: int

    def memory(self, first: int, count: int) -> np.ndarray | None:
        if first < self.at or first + count > self.at + self.size:
            return None
        start = first + self.to - self.at
        return self.out[start : start + count]

    def take(self, first: int, elements: np.ndarray) -> None:
        start, stop = max(first, self.at), min(first + elements.size, self.at + self.size)
        if start < stop:
            shift = self.to - self.at
            self.out[start + shift : stop + shift] = elements[start - first : stop - first]


@dataclass(frozen=True)
class _Runs:
    # Copies stored elements ``at[i]:at[i]+size[i]`` to ``out[to[i]:to[i]+size[i]]`` for each i.
    out: np.ndarray
    to: np.ndarray
    at: np.ndarray
    size: np.ndarray

    def memory(self, first: int, count: int) -> np.ndarray | None:
        return None

    def take(self, first: int, elements: np.ndarray) -> None:
        last, ends = first + elements.size, self.at + self.size
        # From the first run that ends after ``first`` to the last one that starts before ``last``.
        held = slice(int(np.searchsorted(ends, first, "right")), int(np.searchsorted(self.at, last, "left")))
        starts, stops = np.maximum(self.at[held], first), np.minimum(ends[held], last)
        target_starts = self.to[held] + starts - self.at[held]
        for to_start, start, stop in zip(
            target_starts.tolist(), (starts - first).tolist(), (stops - first).tolist(), strict=True
        ):
            self.out[to_start : to_start + stop - start] = elements[start:stop]


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
    comm: Communicator,
    directory: str | Path,
    pieces: Iterable[Piece],
    optional: Collection[str] = (),
    stored: "StoredEntries | None" = None,
) -> dict[str, Any]:
    """Restore like `restore` on all ranks. If a rank fails, all ranks raise the same StorageError. Collective.

    ``stored``: content of the checkpoint if the caller has read it with `stored_entries`.
    """
    directory = Path(directory)
    stored = stored or stored_entries(comm, directory)
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


def stored_entries(comm: Communicator, directory: Path) -> "StoredEntries":
    """Return the content of the checkpoint in ``directory``. Raises StorageError. Collective."""
    return on_first_rank(comm, lambda: StoredEntries.of(manifest.load(directory)))


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
    stored = StoredEntries.of(manifest.load(directory))
    _restore(directory, stored, pieces, optional)
    return stored.scalars


@dataclass(frozen=True)
class StoredEntries:
    """Content of a checkpoint: its JSON values, and the stored slices of each tensor."""

    scalars: dict[str, Any]
    tensors: dict[tuple[str, str], tuple[tuple[int, ...], str]]  # shape and dtype by kind and name
    packed: dict[tuple[str, str], bytes]  # encoded per tensor: a rank decodes only the tensors it restores

    @classmethod
    def of(cls, stored: Manifest) -> "StoredEntries":
        """Return the content of the checkpoint with the manifest ``stored``."""
        by_tensor: dict[tuple[str, str], list[StoredPiece]] = {}
        for entry in stored.pieces:
            by_tensor.setdefault((entry.kind, entry.tensor), []).append(entry)
        packed = {name: msgspec.msgpack.encode(entries) for name, entries in by_tensor.items()}
        tensors = {name: (tuple(entries[0].shape), entries[0].dtype) for name, entries in by_tensor.items()}
        return cls(stored.scalars, tensors, packed)

    def shapes(self, kind: str) -> dict[str, tuple[tuple[int, ...], str]]:
        """Return {name: (shape, dtype)} of the tensors of the state ``kind``."""
        return {name: about for (of_kind, name), about in self.tensors.items() if of_kind == kind}

    def entries(self, piece: Piece) -> list[StoredPiece]:
        """Return the stored slices of the tensor of ``piece``, or [] if the checkpoint has no such tensor."""
        packed = self.packed.get((piece.kind, piece.tensor))
        return [] if packed is None else msgspec.msgpack.decode(packed, type=list[StoredPiece])


def _restore(directory: Path, stored: StoredEntries, pieces: Iterable[Piece], optional: Collection[str]) -> None:
    absent = set(optional) - {kind for kind, _ in stored.tensors}
    with BlockReader(directory) as reader:
        for piece in pieces:
            if not piece.flat or piece.kind in absent:
                continue  # empty pieces need no data
            fill_piece(directory, piece, stored.entries(piece), reader)
