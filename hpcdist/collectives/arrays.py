"""Collective operations for users, on arrays of any shape: `hpcdist.allreduce` and others.

Arrays must have the same dtype on all ranks. The first call for a dtype measures the algorithms for about a second, and
caches the result. `hpcdist tune` measures in advance. HPCDIST_TUNING=off uses the MPI library's algorithms.
"""

import functools
import operator
import os
import sys
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeVar, overload

import numpy as np

from hpcdist.arrays import backend
from hpcdist.arrays.backend import Array
from hpcdist.arrays.dtypes import fault_in, name_of
from hpcdist.arrays.ranges import Range, consecutive, split
from hpcdist.collectives import autotune, dispatch
from hpcdist.collectives.algorithms import all_to_all as exchange
from hpcdist.collectives.algorithms import broadcast as tree
from hpcdist.collectives.reduction import check_buffer
from hpcdist.collectives.segments import gather_counts
from hpcdist.collectives.sharded import SHARDED, SHARDED_ON_GPUS, Sharding
from hpcdist.comm import checks
from hpcdist.comm.communicator import Communicator
from hpcdist.comm.failure.family import PerCommunicator
from hpcdist.comm.mpi.world import AnyComm, communicator_of, library_of, whole_number
from hpcdist.errors import BufferHandoverError, HpcdistError, UsageError

MEAN: Final = "mean"
OPS: Final = ("sum", MEAN, "max", "min")
MEASURED_BYTES: Final = 4 << 20  # the largest measured size; its algorithm also serves larger buffers
BUDGET_S: Final = autotune.BUDGET_S
_UNORDERED: Final = "hierarchical"  # its shares are not in rank order, as the rows of the result must be

Number = TypeVar("Number", int, float)

# (kind of operation, dtype, type of the array) -> algorithm, or a table by size
_SELECTED: Final = PerCommunicator[tuple[str, np.dtype, type], str]()


@overload
def allreduce(array: Array, op: str = "sum", *, comm: AnyComm = None) -> Array: ...
@overload
def allreduce(array: Number, op: str = "sum", *, comm: AnyComm = None) -> Number: ...
def allreduce(array: Any, op: str = "sum", *, comm: AnyComm = None) -> Any:
    """Reduce ``array`` in place over all ranks, and return the result. Collective over ``comm``.

    ``array``: numpy or cupy array or PyTorch tensor, of equal shape on all ranks, or a number. ``op``: "sum", "mean",
    "max" or "min".
    """
    # 16-bit floats are summed in float32 and rounded once. Python integers must fit in 64 bits; their sum is exact.
    where = communicator_of(comm)
    if isinstance(array, int | float):
        return _reduced_number(where, array, op)
    if isinstance(array, np.generic):
        return allreduce(np.array([array]), op, comm=where)[0]
    scale, view = 1.0, _accept(where, array, "allreduce", op, in_place=True)
    if op == MEAN:
        op, scale = "sum", 1.0 / where.size
    _on_flat(
        view, lambda flat: dispatch.allreduce(where, flat, algorithm_for(where, flat), op, scale=scale), where.size > 1
    )
    return array


def _reduced_number(comm: Communicator, number: int | float, op: str) -> int | float:
    if op not in OPS:
        raise UsageError(f"op = {op!r} is unknown; choose one of {', '.join(OPS)}")
    is_whole = isinstance(number, int)
    is_too_large = is_whole and not -(2**63) <= number < 2**63
    value = np.array([0 if is_too_large else number], np.int64 if is_whole else np.float64)
    rows = gather_counts(comm, np.array([value.view(np.int64)[0], is_whole, is_too_large]))
    if rows[:, 2].any():
        raise UsageError("allreduce got an integer of more than 64 bits on at least one rank; pass floats instead")
    values = [bits if whole else np.int64(bits).view(np.float64).item() for bits, whole, _ in rows.tolist()]
    if op in ("max", "min"):  # Python's max keeps a NaN or loses it by the order
        if all(isinstance(value, int) for value in values):
            return max(values) if op == "max" else min(values)
        return float(np.max(values) if op == "max" else np.min(values))
    with np.errstate(all="ignore"):
        total = functools.reduce(operator.add, values)
    return total / comm.size if op == MEAN else total


def reduce_scatter(array: Array, op: str = "sum", *, comm: AnyComm = None) -> Array:
    """Reduce ``array`` over all ranks. Return this rank's rows of the result. Collective over ``comm``.

    ``array`` has the same shape on all ranks. Its rows are split as by `numpy.array_split`. ``op``: see `allreduce`.
    """
    where = communicator_of(comm)
    array = _accept(where, array, "reduce_scatter", op)
    rows, width = split(array.shape[0], where.size, itemsize=1, align_bytes=1), _row_size(array)
    shares = [Range(part.start * width, part.stop * width) for part in rows]
    buffer = array.reshape(-1).copy()  # the algorithms work in place
    sharding_for(where, buffer).reduce_scatter(where, buffer, shares, "sum" if op == MEAN else op)
    local_rows = buffer[shares[where.rank].slice].copy().reshape(rows[where.rank].size, *array.shape[1:])
    if op == MEAN:
        local_rows /= where.size
    return local_rows


def all_gather(array: Array, *, comm: AnyComm = None) -> Array:
    """Concatenate all ranks' arrays along the first axis, in rank order. Collective over ``comm``."""
    where = communicator_of(comm)
    array = _accept(where, array, "all_gather")
    fingerprint = zlib.crc32(repr((array.shape[1:], name_of(array.dtype))).encode())
    counts, fingerprints = gather_counts(where, np.array([array.shape[0], fingerprint], np.int64)).T
    if len(set(fingerprints.tolist())) > 1:
        raise UsageError(
            "the arrays of all_gather may differ between the ranks only in their number of rows; rank "
            f"{where.rank} has {array.dtype} of shape {array.shape}; use the same dtype and row shape on every rank"
        )
    shares = consecutive((counts * _row_size(array)).tolist())
    result: Array = backend.namespace(array).empty((int(counts.sum()), *array.shape[1:]), array.dtype)
    buffer = result.reshape(-1)
    buffer[shares[where.rank].slice] = array.reshape(-1)
    sharding_for(where, buffer).all_gather(where, buffer, shares)
    return result


def broadcast(array: Array, root: int = 0, *, comm: AnyComm = None) -> Array:
    """Overwrite ``array`` with rank ``root``'s array, and return ``array``. Collective over ``comm``."""
    where, root = communicator_of(comm), whole_number("root", root)
    view = _accept(where, array, "broadcast", in_place=True)
    _on_flat(view, lambda flat: tree.broadcast(where, flat, root), where.rank != root)
    return array


def all_to_all(parts: Sequence[Array], *, comm: AnyComm = None) -> list[Array]:
    """Send ``parts[q]`` to rank q. Return the received arrays in rank order. Collective over ``comm``."""
    where = communicator_of(comm)
    if not hasattr(parts, "__len__") or getattr(parts, "ndim", 1) == 0 or len(parts) != where.size:
        count = len(parts) if getattr(parts, "ndim", 1) and hasattr(parts, "__len__") else "no"
        raise UsageError(f"all_to_all got {count} arrays for {where.size} ranks; give one array for each rank")
    if isinstance(parts, np.ndarray):
        parts = _accept(where, parts, "all_to_all")
    parts = [_accept(where, part, "all_to_all") for part in parts]
    shapes = {(part.shape[1:], part.dtype) for part in parts}
    if len(shapes) > 1:
        raise UsageError(
            "the arrays to send by all_to_all may differ only in their number of rows, but have the row shapes and "
            f"dtypes {sorted(map(str, shapes))}; use the same row shape and dtype for all"
        )
    rows = gather_counts(where, np.array([len(part) for part in parts], np.int64))  # (from, to)
    sizes = rows * _row_size(parts[0])
    sent, received = (consecutive(counts.tolist()) for counts in (sizes[where.rank], sizes[:, where.rank]))
    xp = backend.namespace(parts[0])
    outgoing = xp.concatenate([part.reshape(-1) for part in parts])
    incoming = xp.empty(received[-1].stop, outgoing.dtype)
    exchange.all_to_all(where, outgoing, incoming, sent, received)
    shape = parts[0].shape[1:]
    return [
        incoming[part.slice].reshape(count, *shape)
        for part, count in zip(received, rows[:, where.rank].tolist(), strict=True)
    ]


def _accept(comm: Communicator, array: Any, name: str, op: str = "sum", *, in_place: bool = False) -> Array:
    try:
        if op not in OPS:
            raise UsageError(f"op = {op!r} is unknown; choose one of {', '.join(OPS)}")
        accepted = _accepted(array, name, in_place)
        if op == MEAN and accepted.dtype.kind in "iu":
            raise UsageError(f"the mean of {accepted.dtype} arrays is not an integer; pass arrays of floats")
    except HpcdistError as error:
        checks.announce_refusal(comm, checks.describe_call(name, "array", array, op), error)
        raise
    return accepted


def _accepted(array: Any, name: str, in_place: bool) -> Array:
    kind = type(array).__name__
    if isinstance(array, np.ma.MaskedArray):
        raise UsageError(f"{name} does not accept masked arrays; pass array.filled(value)")
    if in_place:
        if isinstance(array, list | tuple | Mapping):
            raise UsageError(f"{name} works in place, and got a {kind}; pass a numpy array")
        array = backend.as_array(array)
    elif not getattr(array, "ndim", 0) or not hasattr(array, "flags"):
        raise UsageError(f"{name} needs a numpy or cupy array with at least one dimension, got {kind}")
    if isinstance(array, np.ndarray):
        array = np.asarray(array)  # a numpy.matrix would stay 2-D when flattened
    if fault := fault_in(array.dtype):
        raise BufferHandoverError(f"{name} cannot communicate this array: {fault}")
    if in_place and isinstance(array, np.ndarray):
        if not array.flags.writeable:
            raise BufferHandoverError(f"{name} works in place, and the array is read-only; pass array.copy()")
        if _may_overlap(array):
            raise BufferHandoverError(
                f"{name} works in place, and elements of the array share memory (shape {array.shape}, strides "
                f"{array.strides}); pass array.copy()"
            )
    result: Array = array
    return result


def _may_overlap(array: np.ndarray) -> bool:
    extent = array.itemsize
    for stride, count in sorted((abs(stride), count) for stride, count in zip(array.strides, array.shape, strict=True)):
        if count > 1 and stride < extent:
            return array.size > 0
        extent += (count - 1) * stride
    return False


def _row_size(array: Array) -> int:
    return int(np.prod(array.shape[1:], dtype=np.int64))


def _on_flat(array: Array, run: Callable[[Array], object], changes: bool) -> None:
    if array.flags.c_contiguous:
        if getattr(array.flags, "aligned", True):
            run(array.reshape(-1))
            return
        flat = array.copy().reshape(-1)
    else:
        flat = backend.namespace(array).ascontiguousarray(array).reshape(-1)
    run(flat)
    if changes:
        array[...] = flat.reshape(array.shape)


def algorithm_for(comm: Communicator, buffer: Array) -> str:
    """Return the allreduce algorithm for ``buffer``, or a table by size, as text. Collective for each new dtype."""
    return _selected(comm, buffer, autotune.ALLREDUCE_KIND)


def sharding_for(comm: Communicator, buffer: Array) -> Sharding:
    """Return the fastest `Sharding` for ``buffer``. Collective for each new dtype and device."""
    name = _selected(comm, buffer, autotune.SHARDED_KIND)
    return (SHARDED | SHARDED_ON_GPUS)["ring" if name == _UNORDERED else name]


def _selected(comm: Communicator, buffer: Array, kind: str) -> str:
    if comm.size == 1:
        return autotune.NATIVE
    key, selected = (kind, buffer.dtype, type(buffer)), comm.caches[_SELECTED]
    if key not in selected:
        selected[key] = _select(comm, buffer, kind)
    return selected[key]


def _select(comm: Communicator, buffer: Array, kind: str) -> str:
    check_buffer(buffer)
    if comm.broadcast_object(os.environ.get(autotune.TUNING)) == "off":
        return autotune.NATIVE
    dtype = buffer.dtype
    if dtype.kind in "iu":  # integers take the selection of floats of their size
        dtype = np.dtype(np.float64 if dtype.itemsize == 8 else np.float32)
    device = "device" if backend.is_device(buffer) else "host"
    request = autotune.TuningRequest(max_bytes=MEASURED_BYTES, dtype=dtype, kind=kind, buffer=device, budget_s=BUDGET_S)

    def announce() -> None:
        if comm.rank == 0:
            what = "reduce_scatter and all_gather" if kind == autotune.SHARDED_KIND else "allreduce"
            print(f"hpcdist: measuring {what} for {name_of(dtype)}, once for these ranks", file=sys.stderr, flush=True)

    return autotune.select(comm, comm, request, library_of(comm), announce=announce).text
