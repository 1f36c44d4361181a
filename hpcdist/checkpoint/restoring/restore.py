"""Restore on any number of ranks: each wanted piece is intersected with what is stored, and only that is read.

Each rank fills its arrays from the stored pieces of the same tensor, whatever cuts both were made in. Arrays in
memory are filled directly; files and GPUs in blocks. `from_newest_intact` falls back to the checkpoint before where
bytes of the newest are damaged; all ranks take the same one.
"""

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
from hpcdist.checkpoint import listing
from hpcdist.checkpoint.format import manifest
from hpcdist.checkpoint.format.manifest import BLOCK_BYTES, Manifest, StoredPiece
from hpcdist.checkpoint.format.shard import BlockConsumer, BlockReader, DamagedError
from hpcdist.comm.communicator import Communicator
from hpcdist.comm.threads.communicator import solo
from hpcdist.errors import HpcdistError, StorageError


def fill_piece(directory: Path, piece: Piece, entries: list[StoredPiece], reader: BlockReader) -> None:
    """Fill the array of ``piece`` from ``entries``, which are all that the checkpoint ``directory`` has of its tensor.

    Raises StorageError where they are of another shape or dtype, or do not cover it, and `DamagedError`.
    """
    _check_entries(directory, piece, entries)
    if isinstance(piece.array, FileSlice):
        _fill_in_blocks(directory, piece, piece.array, entries, reader)
    else:
        _fill_in_memory(directory, piece, entries, reader)


def _check_entries(directory: Path, piece: Piece, entries: list[StoredPiece]) -> None:
    """Raise StorageError where nothing is stored, or with another dtype or shape than is wanted."""
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


def _fill_in_blocks(
    directory: Path, piece: Piece, target: FileSlice, entries: list[StoredPiece], reader: BlockReader
) -> None:
    """Fill a file, block by block. A stored block is read once where it was saved in these cuts, else at most twice."""
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
    if entry is not None:  # saved in these cuts, so one run of elements is all of it
        take = _run(out, 0, 0, out.size)
        for number in range(-(-entry.nbytes // BLOCK_BYTES)):
            reader.read(entry, number, take)
    else:
        _collect(directory, piece, entries, out, reader)
    if on_device:
        piece.array[...] = backend.namespace(piece.array).asarray(out)


def _collect(directory: Path, piece: Piece, entries: list[StoredPiece], out: np.ndarray, reader: BlockReader) -> None:
    """Fill ``out`` with what ``entries`` hold of ``piece``."""
    mine = runs(piece.global_shape, piece.box, piece.flat)
    filled = []
    for entry in entries:
        # ``size`` elements from ``at`` of the entry belong at ``to`` of ``out``: arrays, ascending in both.
        to, at, size = intersect_runs(mine, entry.runs())
        _copy(reader, entry, out, (to, at, size))
        filled.append((to, size))
    gap = first_gap(filled, piece.flat.size)
    if gap is not None:
        raise StorageError(f"{directory} has only a part of {piece.name}: element {gap} of the wanted piece is missing")


def _copy(
    reader: BlockReader, entry: StoredPiece, out: np.ndarray, stretches: tuple[np.ndarray, np.ndarray, np.ndarray]
) -> None:
    """Copy ``size`` elements from ``at`` in the entry to ``to`` in ``out``, reading each block that holds some once."""
    to, at, size = stretches
    per_block = BLOCK_BYTES // dtype_of(entry.dtype).itemsize
    # First and last block of each stretch; a set, since short stretches share blocks.
    spans = zip(at // per_block, (at + size - 1) // per_block, strict=True)
    needed = sorted({number for first, last in spans for number in range(int(first), int(last) + 1)})
    take = _run(out, int(to[0]), int(at[0]), int(size[0])) if to.size == 1 else _runs(out, to, at, size)
    for number in needed:
        reader.read(entry, number, take)


def _run(out: np.ndarray, to: int, at: int, size: int) -> BlockConsumer:
    """Return the consumer of blocks that puts ``size`` elements from ``at`` of an entry to ``to`` of ``out``.

    It gets parts of an entry, elements ``first`` and so on, and copies what of them lies in the stretch.
    """
    shift, low, high = to - at, at, at + size

    def take(first: int, elements: np.ndarray) -> None:
        last = first + elements.size
        if low <= first and last <= high:
            out[first + shift : last + shift] = elements
        elif first < high and low < last:
            start, stop = max(first, low), min(last, high)
            out[start + shift : stop + shift] = elements[start - first : stop - first]

    return take


def _runs(out: np.ndarray, to: np.ndarray, at: np.ndarray, size: np.ndarray) -> BlockConsumer:
    """Return the consumer of blocks that does as `_run` for many stretches, ordered by ``at`` and disjoint."""
    ends = at + size

    def take(first: int, elements: np.ndarray) -> None:
        last = first + elements.size
        # From the first stretch that ends behind ``first`` up to the first one that begins at ``last`` or later.
        held = slice(int(np.searchsorted(ends, first, "right")), int(np.searchsorted(at, last, "left")))
        starts, stops = np.maximum(at[held], first), np.minimum(ends[held], last)
        places = to[held] + starts - at[held]
        for place, start, stop in zip(
            places.tolist(), (starts - first).tolist(), (stops - first).tolist(), strict=True
        ):
            out[place : place + stop - start] = elements[start:stop]

    return take


Result = TypeVar("Result")


def newest_complete(run_dir: str | Path, comm: Communicator | None = None, but: Collection[Path] = ()) -> Path | None:
    """Return the newest of ``run_dir/checkpoints`` whose manifest is valid and whose files have their sizes, or None.

    Those in ``but`` do not count, and no shard is read. What is skipped is reported on stderr with the reason.
    Collective over ``comm`` (None: this process alone). Raises StorageError where a later version of hpcdist wrote one:
    a run that went on from an earlier one would replace it.
    """
    comm = comm or solo()
    candidates = comm.broadcast_object(names.candidates(Path(run_dir) / "checkpoints") if comm.rank == 0 else None)
    for _, path in candidates:
        if path in but:
            continue
        reason = _unusable_reason(path, comm)
        if not reason:
            return Path(path)
        _report_unusable(path, reason, comm)
    return None


def from_newest_intact(
    run_dir: str | Path, comm: Communicator, first: Path | None, take: Callable[[Path | None], Result]
) -> Result:
    """Return ``take(first)``; where its bytes are damaged, ``take`` of the checkpoint before, and so on. Collective.

    ``take`` raises `DamagedError` on all ranks or on none, as `restore_together` does; what it has begun to fill is
    then worth nothing. It gets None when no checkpoint is left.
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
        gc.collect()  # what it began to fill: a second state may not fit beside it
        path = newest_complete(run_dir, comm, damaged)


def _report_unusable(path: Path, reason: str, comm: Communicator) -> None:
    if comm.rank == 0:
        print(f"hpcdist: checkpoint {path} is skipped: {reason}", file=sys.stderr, flush=True)


def _unusable_reason(path: Path, comm: Communicator) -> str:
    """Return why the checkpoint at ``path`` cannot be used, "" when it can; the same on all ranks."""
    listed = listing.inspect(path) if comm.rank == 0 else None
    told: tuple[str, str] = comm.broadcast_object(None if listed is None else (listed.state, listed.reason))
    if told[0] == listing.NEWER:
        raise manifest.NewerVersionError(told[1])
    return told[1]


def restore_together(
    comm: Communicator, directory: str | Path, wanted: Iterable[Piece], optional: Collection[str] = ()
) -> dict[str, Any]:
    """Restore as `restore` does, on all ranks of ``comm``; rank 0 reads the manifest. Collective.

    Raises StorageError on all ranks when one of them cannot; `DamagedError` where another checkpoint may be whole.
    """
    directory = Path(directory)
    stored = on_first_rank(comm, lambda: _PackedEntries.of(manifest.load(directory)))
    failed: tuple[type[StorageError], str] | None = None
    try:
        _restore(directory, stored, wanted, optional)
    except StorageError as error:
        failed = DamagedError if isinstance(error, DamagedError) else StorageError, str(error)
    # A rank that failed comes here too: one that raised at once would leave the others in this collective.
    failures = comm.allgather_object(failed)
    reasons = [failure for failure in failures if failure is not None]
    if reasons:  # a recipe that does not fit the checkpoint explains more than damage does
        kind, reason = next((failure for failure in reasons if failure[0] is StorageError), reasons[0])
        raise kind(reason)
    return stored.scalars


def on_first_rank(comm: Communicator, read: Callable[[], Result]) -> Result:
    """Return on all ranks what ``read`` returns on rank 0; raise on all the HpcdistError that it raises. Collective."""
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


def restore(directory: str | Path, wanted: Iterable[Piece], optional: Collection[str] = ()) -> dict[str, Any]:
    """Fill the arrays of ``wanted`` from the checkpoint ``directory`` (``.../step-N``) and return its scalars (local).

    The pieces may be cut in any way, whatever wrote them. Those of a kind in ``optional`` stay as they are where the
    checkpoint has nothing of that kind. Raises StorageError, naming file and tensor, when bytes are damaged or missing
    or a tensor has another shape or dtype; the arrays are then undefined.
    """
    directory = Path(directory)
    stored = _PackedEntries.of(manifest.load(directory))
    _restore(directory, stored, wanted, optional)
    return stored.scalars


@dataclass(frozen=True)
class _PackedEntries:
    """Part of a manifest that a restore needs, packed by tensor: a rank decodes only the tensors that it wants."""

    scalars: dict[str, Any]
    kinds: frozenset[str]
    packed: dict[tuple[str, str], bytes]

    @classmethod
    def of(cls, stored: Manifest) -> "_PackedEntries":
        """Return the packed entries of the manifest ``stored``."""
        by_tensor: dict[tuple[str, str], list[StoredPiece]] = {}
        for entry in stored.pieces:
            by_tensor.setdefault((entry.kind, entry.tensor), []).append(entry)
        packed = {name: msgspec.msgpack.encode(entries) for name, entries in by_tensor.items()}
        return cls(stored.scalars, frozenset(kind for kind, _ in packed), packed)

    def entries(self, piece: Piece) -> list[StoredPiece]:
        """Return all that is stored of the tensor of ``piece``."""
        packed = self.packed.get((piece.kind, piece.tensor))
        return [] if packed is None else msgspec.msgpack.decode(packed, type=list[StoredPiece])


def _restore(directory: Path, stored: _PackedEntries, wanted: Iterable[Piece], optional: Collection[str]) -> None:
    absent = set(optional) - stored.kinds
    with BlockReader(directory) as reader:
        for piece in wanted:
            if not piece.flat or piece.kind in absent:
                continue  # pieces without elements need nothing
            fill_piece(directory, piece, stored.entries(piece), reader)
