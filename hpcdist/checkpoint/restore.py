"""Restoring on any number of ranks: what is wanted is intersected with what is stored, and only that is read."""

import gc
import sys
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

import msgspec

from hpcdist.arrays.piece import Piece
from hpcdist.checkpoint import blocks, catalogue, manifest
from hpcdist.checkpoint import directory as names
from hpcdist.checkpoint.blocks import BlockReader, DamagedError
from hpcdist.checkpoint.filling import fill
from hpcdist.checkpoint.manifest import Entry, Manifest
from hpcdist.comm.communicator import Communicator
from hpcdist.comm.solo import solo
from hpcdist.errors import HpcdistError, StorageError

Result = TypeVar("Result")


def newest(run_dir: str | Path, comm: Communicator | None = None) -> Path | None:
    """Return the newest valid checkpoint under ``run_dir/checkpoints``; None when there is none.

    Every block of it has been verified; where it is going to be restored, `from_newest` reads it once, not twice. What
    was skipped is told on stderr with the reason. Collective over ``comm``, whose ranks divide the reading; without
    one, this process reads all of it.
    """
    return _newest(run_dir, comm or solo(), verified=True)


def newest_complete(run_dir: str | Path, comm: Communicator | None = None, but: Collection[Path] = ()) -> Path | None:
    """Return the newest checkpoint whose manifest is valid and whose files have their sizes, apart from ``but``.

    No shard is read. Told and collective as `newest`. Raises StorageError where a later version of hpcdist wrote one:
    whoever went on from an earlier one would replace it.
    """
    return _newest(run_dir, comm or solo(), verified=False, but=but)


def from_newest(
    run_dir: str | Path, comm: Communicator, first: Path | None, take: Callable[[Path | None], Result]
) -> Result:
    """Return ``take(first)``, or of the checkpoint before where the bytes of that are damaged, and so on. Collective.

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
            _tell(path, str(error), comm)
        damaged.add(path)
        gc.collect()  # what it began to fill: a second state may not fit beside it
        path = newest_complete(run_dir, comm, damaged)


def _newest(run_dir: str | Path, comm: Communicator, verified: bool, but: Collection[Path] = ()) -> Path | None:
    found = comm.broadcast_object(names.candidates(Path(run_dir) / "checkpoints") if comm.rank == 0 else None)
    for _, path in found:
        if path in but:
            continue
        reason = _why_not(path, comm, verified)
        if not reason:
            return Path(path)
        _tell(path, reason, comm)
    return None


def _tell(path: Path, reason: str, comm: Communicator) -> None:
    if comm.rank == 0:
        print(f"hpcdist: checkpoint {path} is skipped: {reason}", file=sys.stderr, flush=True)


def _why_not(path: Path, comm: Communicator, verified: bool) -> str:
    """Return why the checkpoint at ``path`` cannot be used, "" when it can; the same on all ranks."""
    found = catalogue.look(path) if comm.rank == 0 else None
    state, reason = comm.broadcast_object(None if found is None else (found.state, found.reason))
    if state == catalogue.NEWER:
        raise manifest.NewerError(reason)
    if reason or not verified:
        return reason
    reasons: list[str] = comm.allgather_object(
        blocks.problem(path, comm.broadcast_object(found and found.manifest), comm.rank, comm.size)
    )
    return next((reason for reason in reasons if reason), "")


def restore_together(
    comm: Communicator, directory: str | Path, wanted: Iterable[Piece], optional: Collection[str] = ()
) -> dict[str, Any]:
    """Restore as `restore` does, on all ranks of ``comm``; rank 0 reads the manifest. Collective.

    Raises StorageError on all ranks when one of them cannot; `DamagedError` where another checkpoint may be whole.
    """
    directory = Path(directory)
    stored = on_first(comm, lambda: _Packed.of(manifest.load(directory)))
    failed: tuple[type[StorageError], str] | None = None
    try:
        _restore(directory, stored, wanted, optional)
    except StorageError as error:
        failed = DamagedError if isinstance(error, DamagedError) else StorageError, str(error)
    found = comm.allgather_object(failed)
    reasons = [one for one in found if one is not None]
    if reasons:  # that the recipe is another one than the saved says more than damage
        kind, reason = next((one for one in reasons if one[0] is StorageError), reasons[0])
        raise kind(reason)
    return stored.scalars


def on_first(comm: Communicator, read: Callable[[], Result]) -> Result:
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
    stored = _Packed.of(manifest.load(directory))
    _restore(directory, stored, wanted, optional)
    return stored.scalars


@dataclass(frozen=True)
class _Packed:
    """What a restore needs of a manifest. A rank unpacks the entries of the tensors that it wants, and no others."""

    scalars: dict[str, Any]
    kinds: frozenset[str]
    packed: dict[tuple[str, str], bytes]

    @classmethod
    def of(cls, stored: Manifest) -> "_Packed":
        """Return what of ``stored`` is needed."""
        by_tensor: dict[tuple[str, str], list[Entry]] = {}
        for entry in stored.pieces:
            by_tensor.setdefault((entry.kind, entry.tensor), []).append(entry)
        packed = {name: msgspec.msgpack.encode(entries) for name, entries in by_tensor.items()}
        return cls(stored.scalars, frozenset(kind for kind, _ in packed), packed)

    def entries(self, piece: Piece) -> list[Entry]:
        """Return all that is stored of the tensor of ``piece``."""
        packed = self.packed.get((piece.kind, piece.tensor))
        return [] if packed is None else msgspec.msgpack.decode(packed, type=list[Entry])


def _restore(directory: Path, stored: _Packed, wanted: Iterable[Piece], optional: Collection[str]) -> None:
    absent = set(optional) - stored.kinds
    with BlockReader(directory) as reader:
        for piece in wanted:
            if not piece.flat or piece.kind in absent:
                continue  # nobody saved what has no elements
            fill(directory, piece, stored.entries(piece), reader)
