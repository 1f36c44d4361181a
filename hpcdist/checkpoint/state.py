"""Checkpoints of any program: `save` and `load` named arrays, whole or sharded, and small JSON values."""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np

from hpcdist.arrays import backend
from hpcdist.arrays.backend import Array
from hpcdist.arrays.dtypes import dtype_of, fault_in, name_of
from hpcdist.arrays.piece import Box, Piece, whole_box
from hpcdist.arrays.ranges import ALIGN_BYTES, Range
from hpcdist.checkpoint import directory as names
from hpcdist.checkpoint import two_phase
from hpcdist.checkpoint.background import BackgroundCheckpoints
from hpcdist.checkpoint.listing import STATE
from hpcdist.checkpoint.lock import RunLock
from hpcdist.checkpoint.restoring.restore import (
    from_newest_intact,
    newest_complete,
    on_first_rank,
    restore_together,
    stored_entries,
)
from hpcdist.checkpoint.two_phase import SavePlan
from hpcdist.comm.communicator import Communicator
from hpcdist.comm.failure.exits import at_exit
from hpcdist.comm.failure.family import PerCommunicator
from hpcdist.comm.mpi.world import AnyComm, communicator_of, whole_number
from hpcdist.errors import BufferHandoverError, StorageError, UsageError

FOLDER: Final = "checkpoints"


@dataclass(frozen=True)
class Sharded:
    """This rank's part of a distributed array or tensor. Raises UsageError.

    Without ``start``, the parts are rows in rank order.
    """

    array: Any  # numpy or cupy array, or tensor of PyTorch
    start: tuple[int, ...] | None = None  # index of the part's first element in the whole array
    shape: tuple[int, ...] | None = None  # of the whole array

    def __post_init__(self) -> None:
        if (self.start is None) != (self.shape is None):
            raise UsageError("Sharded needs both start and shape, or neither if the parts are rows in rank order")
        if not getattr(self.array, "ndim", 0):
            raise UsageError(
                f"Sharded needs an array with at least one dimension, got a {type(self.array).__name__} without "
                "dimensions; for a single value, pass an array of shape (1,)"
            )
        if self.start is not None and self.shape is not None:
            for name in ("start", "shape"):
                object.__setattr__(self, name, _whole_numbers(name, getattr(self, name)))
            ends = [begin + size for begin, size in zip(self.start, self.array.shape, strict=False)]
            fits = len(self.start) == len(self.shape) == self.array.ndim
            if not fits or min(self.start) < 0 or any(end > size for end, size in zip(ends, self.shape, strict=True)):
                raise UsageError(
                    f"the part of shape {self.array.shape} at {self.start} is not inside the array shape {self.shape}; "
                    "correct start or shape"
                )


def _whole_numbers(name: str, values: Any) -> tuple[int, ...]:
    try:
        values = tuple(values)
    except TypeError:
        raise UsageError(f"{name} = {values!r}; expected one whole number for each dimension") from None
    return tuple(whole_number(f"{name}[{axis}]", value) for axis, value in enumerate(values))


State: TypeAlias = Mapping[str, "Array | Sharded | Any"]


def save(
    directory: str | Path,
    state: State,
    *,
    step: int | None = None,
    keep: int = 2,
    background: bool = False,
    comm: AnyComm = None,
) -> Path:
    """Save ``state`` as a checkpoint in ``directory``. Return the checkpoint's path. Collective over ``comm``.

    ``state``: dict with equal names on all ranks. A value is an array (numpy, cupy, or a PyTorch tensor) that all ranks
    hold alike, a `Sharded` array, or a JSON value of rank 0. ``step``: None means the newest step + 1. ``background``:
    copy the state and return, while a thread writes it; call `finish_saves` before the program ends. Raises UsageError,
    or StorageError on all ranks.
    """
    where = communicator_of(comm)
    held = [_piece(where, name, value)[0] for name, value in state.items() if is_array(value)]
    values = {name: value for name, value in state.items() if not is_array(value)}
    whole = [piece for piece in held if not isinstance(state[piece.tensor], Sharded)]
    pieces = [piece for piece in held if isinstance(state[piece.tensor], Sharded)]
    pieces += parts_to_save(whole, where.size, where.rank)
    return save_pieces(directory, pieces, values, step=step, keep=keep, comm=where, background=background)


def parts_to_save(pieces: Sequence[Piece], count: int, index: int) -> list[Piece]:
    """Return the parts of ``pieces`` that a rank saves, if ``count`` ranks hold the same pieces. Local.

    ``index``: number of this rank among these ranks. The sequence of all pieces is divided into equal numbers of bytes,
    so that most pieces are saved by one rank, and a checkpoint has few parts.
    """
    total = sum(piece.array.nbytes for piece in pieces)
    begin, end = (total * number // count for number in (index, index + 1))
    parts, start = [], 0
    for piece in sorted(pieces, key=lambda piece: piece.tensor):  # the same order on all ranks
        size, itemsize = piece.array.size, piece.array.dtype.itemsize
        low, high = (_element(at - start, size, itemsize) for at in (begin, end))
        start += size * itemsize
        if low < high or (not size and index == 0):  # some rank must save an empty array
            held = Range(low, high)
            parts.append(replace(piece, flat=held.shift(piece.flat.start), array=piece.array[held.slice]))
    return parts


def _element(offset: int, size: int, itemsize: int) -> int:
    # The first element of an aligned block that contains byte ``offset`` of an array, limited to 0 and ``size``.
    if offset >= size * itemsize:
        return size
    block = max(1, ALIGN_BYTES // itemsize)
    return max(0, offset // itemsize // block * block)


def save_pieces(
    directory: str | Path,
    pieces: list[Piece],
    values: dict[str, Any],
    *,
    step: int | None,
    keep: int,
    comm: Communicator,
    background: bool = False,
) -> Path:
    """Save ``pieces`` (tensor slices of this rank) and the JSON ``values`` of rank 0 as a checkpoint. Collective.

    ``background``: copy the state, and return before it is written. `finish_saves` completes the checkpoint.
    """
    # Until this program ends, no other job can save in ``directory``.
    keep, step = whole_number("keep", keep), None if step is None else whole_number("step", step)
    if keep < 1:
        raise UsageError(f"keep = {keep}; expected at least 1 checkpoint to keep")
    folder = Path(directory) / FOLDER
    finish_saves(comm)

    def begin() -> int:
        _lock(Path(directory))
        return max((step for step, _ in names.candidates(folder)), default=0) + 1 if step is None else step

    number = on_first_rank(comm, begin)
    _check_values(values)
    values = json.loads(json.dumps(values))  # the program may change its objects while a thread writes
    if not background:
        return two_phase.save(folder, number, pieces, values, comm, keep)
    savers = comm.caches[_SAVERS]
    if folder not in savers:
        savers[folder] = BackgroundCheckpoints(comm)
    plan = SavePlan(folder, number, comm.size, values, {}, keep)
    savers[folder].begin(plan, pieces, "rank")
    _busy.append(savers[folder])
    return plan.final


_SAVERS: Final = PerCommunicator[Path, BackgroundCheckpoints]()
_busy: Final[list[BackgroundCheckpoints]] = []  # with a checkpoint in progress, equal on all ranks


def finish_saves(comm: AnyComm = None) -> None:
    """Wait until the checkpoint that a background `save` began is complete. Collective over the ranks of the save.

    Without such a checkpoint, it has no effect. Raises StorageError on all ranks if a rank could not write, and
    UsageError if the save is not over ``comm``.
    """
    if _busy and comm is not None and _busy[-1].comm is not communicator_of(comm):
        raise UsageError("a background save over other ranks is in progress; call finish_saves() on its ranks first")
    while _busy:
        _busy.pop().finish()


def is_saving(comm: Communicator) -> bool:
    """Return True if a background save over ``comm`` is in progress. Local."""
    return bool(_busy) and _busy[-1].comm is comm


def background_flags() -> np.ndarray:
    """Return two flags, 0.0 or 1.0: this rank's background save is still writing; it has failed. Local."""
    return _busy[-1].numbers() if _busy else np.zeros(2)


def advance_saves(sums: np.ndarray) -> None:
    """Commit the checkpoint of a background save once all ranks have written it. Collective if it is in progress.

    ``sums``: sums over all ranks of `background_flags`. Raises StorageError on all ranks if a rank could not write.
    """
    if _busy:
        _busy[-1].settle(sums)
        if not _busy[-1].is_busy:
            _busy.pop()


def load(directory: str | Path, state: State | None = None, *, comm: AnyComm = None) -> dict[str, Any] | None:
    """Return {name: array or JSON value} of the newest intact checkpoint, or None. Collective over ``comm``.

    ``state``: {name: array, tensor or `Sharded` to fill in place}. If ``state`` is None, every rank gets all arrays in
    full. Raises StorageError if an array is missing or has another shape or dtype.
    """
    where = communicator_of(comm)
    finish_saves(where)

    def take(path: Path | None) -> dict[str, Any] | None:
        return None if path is None else _load(where, path, state)

    return from_newest_intact(directory, where, newest_complete(directory, where), take)


def is_array(value: object) -> bool:
    """Return True if ``value`` is saved as an array, False if it is saved as JSON. Local."""
    return isinstance(value, Sharded | np.ndarray | np.generic) or _is_tensor(value) or backend.is_device(value)


def _check_values(values: Mapping[str, Any]) -> None:
    for name, value in values.items():
        try:
            json.dumps(value)
        except (TypeError, ValueError) as error:
            raise UsageError(
                f"{name} is a {type(value).__name__}, neither an array nor a JSON value ({error}); convert the value"
            ) from error


_locks: Final[dict[Path, RunLock]] = {}  # the locks of this process, held until it exits


def _lock(directory: Path) -> None:
    resolved = directory.resolve()
    if resolved in _locks:
        return
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StorageError(f"{directory} cannot be created: {error.strerror}; choose another directory") from error
    lock = RunLock()
    lock.take(directory, otherwise="save in another directory")
    at_exit(lock.release)
    _locks[resolved] = lock


def _load(comm: Communicator, path: Path, state: State | None) -> dict[str, Any]:
    entries = stored_entries(comm, path)
    stored = entries.shapes(STATE)
    if state is None:
        state = {name: np.empty(shape, dtype_of(dtype)) for name, (shape, dtype) in stored.items()}
    pieces, results, copies = [], dict[str, Any](), []
    for name, value in state.items():
        if not is_array(value):
            continue
        piece, copied = _piece(comm, name, value)
        check_stored(path, piece, stored.get(name))
        pieces.append(piece)
        results[name] = value.array if isinstance(value, Sharded) else value
        if copied:
            copies.append((results[name], piece.array))
    scalars = restore_together(comm, path, pieces, stored=entries)
    for target, filled in copies:
        _fill(target, filled)
    return scalars | results


def check_stored(path: Path, piece: Piece, stored: tuple[tuple[int, ...], str] | None) -> None:
    """Raise StorageError unless the checkpoint array has the shape and dtype of the array ``piece`` to fill.

    ``stored``: (shape, dtype) of the array in the checkpoint ``path``, or None if there is no such array.
    """
    if stored is None:
        raise StorageError(f"{path} has no array named {piece.tensor!r}; request only arrays that were saved")
    shape, dtype = stored
    if (tuple(shape), dtype) != (piece.global_shape, name_of(piece.array.dtype)):
        raise StorageError(
            f"{path}: {piece.tensor} is {dtype}{list(shape)}, but the array to fill is "
            f"{name_of(piece.array.dtype)}{list(piece.global_shape)}; dtype and shape must be equal"
        )


def _piece(comm: Communicator, name: str, value: Any) -> tuple[Piece, bool]:
    # The piece, and True if its array is a copy.
    array = value.array if isinstance(value, Sharded) else value
    if _is_tensor(array):
        flat, copied = _memory(name, array)
        box, shape = _placed(comm, value) if isinstance(value, Sharded) else (whole_box(array.shape), array.shape)
        return Piece(STATE, name, tuple(shape), box, Range(0, flat.size), flat), copied
    if isinstance(array, np.ma.MaskedArray):
        raise UsageError(f"{name} is a masked array, which would lose its mask; save array.filled(value)")
    if fault := fault_in(array.dtype):
        raise UsageError(f"the array {name!r} cannot be used: {fault}")
    copied = not array.flags.c_contiguous
    flat = backend.namespace(array).ascontiguousarray(array).reshape(-1)
    box, shape = _placed(comm, value) if isinstance(value, Sharded) else (whole_box(array.shape), array.shape)
    return Piece(STATE, name, shape, box, Range(0, flat.size), flat), copied


def _is_tensor(value: object) -> bool:
    torch = sys.modules.get("torch")  # a program with tensors has imported PyTorch
    return torch is not None and isinstance(value, torch.Tensor)


def _memory(name: str, tensor: Any) -> tuple[Array, bool]:
    # A 1-D array over the memory of ``tensor`` or of a contiguous copy, and True for a copy.
    from hpcdist.adapters.torch.arrays import check_memory, contiguous, flat_array

    if hasattr(tensor, "placements"):
        raise UsageError(f"{name} is a DTensor; use hpcdist.torch.save and load, which know its shards")
    try:
        check_memory(tensor)
        memory = contiguous(tensor)
        flat = flat_array(memory)
    except BufferHandoverError as error:
        raise UsageError(f"the tensor {name!r} cannot be used: {error}") from error
    if name_of(flat.dtype) != str(tensor.dtype).removeprefix("torch."):
        raise UsageError(
            f"the tensor {name!r} is of {tensor.dtype}, which checkpoints of arrays do not have; pass a view: "
            "tensor.view(torch.uint8), or torch.view_as_real(tensor) of a complex tensor; or use hpcdist.torch.save"
        )
    return flat, memory is not tensor


def _fill(target: Any, flat: Array) -> None:
    # Copy the elements of ``flat`` to an array or tensor that is not contiguous.
    if _is_tensor(target):
        from hpcdist.adapters.torch.arrays import tensor_of

        as_bytes = tensor_of(flat.view(np.uint8))
        target.detach().copy_(as_bytes.view(target.dtype).reshape(target.shape))
    else:
        target[...] = flat.reshape(target.shape)


def _placed(comm: Communicator, part: Sharded) -> tuple[Box, tuple[int, ...]]:
    start, shape = part.start, part.shape
    if start is None or shape is None:
        rows = comm.allgather_object(part.array.shape[0])
        start = sum(rows[: comm.rank]), *(0 for _ in part.array.shape[1:])
        shape = sum(rows), *part.array.shape[1:]
    ends = (begin + size for begin, size in zip(start, part.array.shape, strict=True))
    return tuple(zip(start, ends, strict=True)), tuple(shape)
