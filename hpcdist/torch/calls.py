"""Collective operations on `Buffer` objects, by the algorithms of `hpcdist.collectives`.

All functions are collective over ``comm``; sizes are equal on all ranks unless stated otherwise.

Sums, maxima and minima use `hpcdist.collectives.dispatch`. For products and bit operations, each rank reduces its chunk
in rank order. Their cost for n bytes on p ranks is

    2 (p-1) α + 2 (p-1)/p n β + (p-1)/p n γ
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Any, Final

import numpy as np
import torch
from torch.distributed import ReduceOp

from hpcdist.arrays.backend import Array, namespace
from hpcdist.arrays.dtypes import accumulation_dtype
from hpcdist.arrays.ranges import Range, split
from hpcdist.collectives import dispatch
from hpcdist.collectives.algorithms import all_to_all as exchange
from hpcdist.collectives.algorithms import broadcast as tree
from hpcdist.collectives.algorithms import ring
from hpcdist.collectives.arrays import algorithm_for, sharding_for
from hpcdist.collectives.autotune import NATIVE
from hpcdist.collectives.segments import scratch, wait_all
from hpcdist.comm.checks import is_plain
from hpcdist.comm.communicator import ANY, Communicator
from hpcdist.errors import DeadlineError, UsageError
from hpcdist.torch.buffers import Buffer
from hpcdist.torch.work import LOOK_S

RedOp: Any = ReduceOp.RedOpType  # PyTorch's type stubs lack its members
_NATIVE: Final = {RedOp.SUM: "sum", RedOp.AVG: "sum", RedOp.MAX: "max", RedOp.MIN: "min", RedOp.PREMUL_SUM: "sum"}
_UFUNCS: Final = {
    RedOp.PRODUCT: "multiply",
    RedOp.BAND: "bitwise_and",
    RedOp.BOR: "bitwise_or",
    RedOp.BXOR: "bitwise_xor",
}
_ON_BOOLS: Final = {  # on bool tensors, as bytes 0 and 1
    RedOp.SUM: RedOp.MAX, RedOp.BOR: RedOp.MAX, RedOp.PRODUCT: RedOp.MIN, RedOp.BAND: RedOp.MIN,
}  # fmt: skip


@dataclass(frozen=True)
class Reduction:
    """Reduction operation of hpcdist that implements a ReduceOp of PyTorch for one dtype."""

    op: str  # hpcdist's name, or "" to use the numpy ufunc ``function``
    function: str
    average: bool  # divide the sum by the number of ranks
    factor: Any = None  # multiply each rank's values by this factor first


def reduction_of(op: Any, tensor: torch.Tensor) -> Reduction:
    """Convert PyTorch's ReduceOp ``op`` to a `Reduction`. Raises UsageError if the dtype of ``tensor`` lacks ``op``."""
    kind, factor = op.__getstate__()
    key = int(kind), tensor.dtype  # hashing a member of a C++ enumeration is slow
    reduction = _reductions.get(key)
    if reduction is None:
        reduction = _reductions[key] = _reduction(kind, tensor.dtype)
    return reduction if factor is None else replace(reduction, factor=factor)


_reductions: Final[dict[tuple[int, torch.dtype], Reduction]] = {}


def _reduction(kind: Any, dtype: torch.dtype) -> Reduction:
    if dtype is torch.bool:
        kind = _ON_BOOLS.get(kind, kind)
        if kind not in (RedOp.MAX, RedOp.MIN, RedOp.BXOR):
            raise UsageError(f"{_name(kind)} is not defined for bool tensors; use BOR, BAND, BXOR, MAX or MIN")
    elif dtype.itemsize == 1 and dtype.is_floating_point:
        raise UsageError(f"{dtype} tensors have too few bits for reductions; pass tensor.float()")
    if dtype.is_complex and kind not in (RedOp.SUM, RedOp.AVG, RedOp.PREMUL_SUM):
        raise UsageError(f"{_name(kind)} is not defined for complex tensors; use SUM or AVG")
    if kind in (RedOp.BAND, RedOp.BOR, RedOp.BXOR) and (dtype.is_floating_point or dtype.is_complex):
        raise UsageError(f"{_name(kind)} is not defined for {dtype} tensors; use a tensor of integers")
    if kind not in _NATIVE and kind not in _UFUNCS:
        raise UsageError(f"the reduction {_name(kind)} is unknown; use SUM, AVG, MAX, MIN, PRODUCT, BAND, BOR or BXOR")
    return Reduction(_NATIVE.get(kind, ""), _UFUNCS.get(kind, ""), kind == RedOp.AVG)


def _name(kind: Any) -> str:
    return str(kind).removeprefix("RedOpType.")


def _allreduce_ufunc(comm: Communicator, buffer: Array, function: str) -> None:
    if comm.size > 1:
        chunks = split(buffer.size, comm.size, buffer.itemsize)
        reduce_chunk(comm, buffer, chunks, function, buffer[chunks[comm.rank].slice])
        ring.all_gather(comm, buffer, chunks)


def premultiply(buffer: Array, how: Reduction) -> None:
    """If the reduction ``how`` is PREMUL_SUM, multiply ``buffer`` in place by the factor ``how.factor``. Local."""
    if how.factor is not None:
        factor = how.factor
        if isinstance(factor, torch.Tensor):
            factor = factor.detach().cpu().numpy().reshape(-1)
            if factor.size not in (1, buffer.size):
                raise UsageError(
                    f"the factor of PREMUL_SUM has {factor.size} elements, but the tensor has {buffer.size}; the "
                    "factor must have one element, or as many elements as the tensor"
                )
            factor = namespace(buffer).asarray(factor)
        buffer[...] = (buffer * factor).astype(buffer.dtype)


def divide_integers(buffer: Array, how: Reduction, ranks: int) -> None:
    """If the reduction ``how`` is AVG, divide integer sums in ``buffer`` by ``ranks``, rounding toward zero. Local."""
    if how.average and buffer.dtype.kind in "iu":
        xp = namespace(buffer)
        whole = xp.abs(buffer) // ranks if buffer.dtype.kind == "i" else buffer // ranks
        buffer[...] = xp.sign(buffer) * whole if buffer.dtype.kind == "i" else whole


def reduce_chunk(comm: Communicator, buffer: Array, chunks: list[Range], function: str, result: Array) -> None:
    """Reduce ``buffer`` by ``function``. Store the range ``chunks[r]`` in ``result`` on each rank r. Collective."""
    chunk = chunks[comm.rank]
    rows = scratch("torch reduction", comm.size * chunk.size, buffer.dtype, buffer)
    received = [Range(rank * chunk.size, (rank + 1) * chunk.size) for rank in range(comm.size)]
    exchange.all_to_all(comm, buffer, rows, chunks, received)
    combine: Callable[..., Any] = getattr(namespace(buffer), function)
    with np.errstate(all="ignore"):  # the caller checks for infinity and NaN
        total = rows[: chunk.size].astype(accumulation_dtype(buffer.dtype))
        for part in received[1:]:
            combine(total, rows[part.slice], out=total)
        result[...] = total.astype(buffer.dtype)


SMALL_BYTES: Final = 4096
ARRIVED, LEAVE = 1, 2  # tags of the monitored barrier


def allreduce(comm: Communicator, buffer: Buffer, how: Reduction, algorithm: str) -> None:
    """Allreduce ``buffer`` in place with the reduction ``how``. ``algorithm``: a name, or "auto". Collective."""
    _allreduce(comm, buffer.array, how, algorithm)
    buffer.finish()


def _allreduce(comm: Communicator, array: Array, how: Reduction, algorithm: str) -> None:
    if array.size:
        if how.factor is not None:
            premultiply(array, how)
        if how.op:
            scale = 1.0 / comm.size if how.average and array.dtype.kind not in "iu" else 1.0
            chosen = algorithm_for(comm, array) if algorithm == "auto" else algorithm
            if scale == 1.0 < comm.size and _is_small_native(chosen, array.nbytes) and is_plain(array):
                comm.allreduce(array, how.op, record=False)  # recorded as PyTorch's operation; `dispatch` is slow
            else:
                dispatch.allreduce(comm, array, chosen, how.op, scale=scale)
        else:
            _allreduce_ufunc(comm, array, how.function)
        divide_integers(array, how, comm.size)


@lru_cache
def _is_small_native(algorithm: str, nbytes: int) -> bool:
    return nbytes <= SMALL_BYTES and dispatch.parse_algorithm(algorithm).at(nbytes) == NATIVE


def broadcast(comm: Communicator, buffer: Buffer, root: int) -> None:
    """Overwrite ``buffer`` on every rank with the content of ``buffer`` on rank ``root``. Collective."""
    if buffer.array.size:
        tree.broadcast(comm, buffer.array, root)
    if comm.rank != root:
        buffer.finish()


def reduce(comm: Communicator, buffer: Buffer, how: Reduction, root: int, algorithm: str) -> None:
    """Reduce ``buffer`` of all ranks with the reduction ``how`` into ``buffer`` on rank ``root``. Collective."""
    if comm.rank == root:
        allreduce(comm, buffer, how, algorithm)
    elif buffer.array.size:
        copy = scratch("torch reduce", buffer.array.size, buffer.array.dtype, buffer.array)
        copy[...] = buffer.array
        _allreduce(comm, copy, how, algorithm)


def all_gather(comm: Communicator, output: Buffer, source: Buffer) -> None:
    """All-gather ``source``, which has the same size on all ranks, into ``output`` in rank order. Collective."""
    shares = ranges([source.array.size] * comm.size)
    _all_gather(comm, output.array, source.array, shares)
    output.finish()


def _all_gather(comm: Communicator, output: Array, source: Array, shares: Sequence[Range]) -> None:
    output[shares[comm.rank].slice] = source  # may be the same memory
    if output.size and comm.size > 1:
        sharding_for(comm, output).all_gather(comm, output, shares)


def all_gather_list(comm: Communicator, outputs: Sequence[Buffer], source: Buffer) -> None:
    """All-gather: ``outputs[r]`` receives ``source`` of rank r. The sources may have different sizes. Collective."""
    shares = ranges([output.array.size for output in outputs])
    gathered = scratch("torch gathered", shares[-1].stop, source.array.dtype, source.array)
    _all_gather(comm, gathered, source.array, shares)
    for output, share in zip(outputs, shares, strict=True):
        output.array[...] = gathered[share.slice]
        output.finish()


def reduce_scatter(comm: Communicator, output: Buffer, source: Buffer, how: Reduction) -> None:
    """Reduce ``source`` over all ranks. ``output`` on rank r receives the r-th of equal result chunks. Collective."""
    addend = source.array
    if how.factor is not None:
        addend = scratch("torch addend", source.array.size, source.array.dtype, source.array)
        addend[...] = source.array
    _reduce_scatter(comm, output, addend, ranges([output.array.size] * comm.size), how)


def reduce_scatter_list(comm: Communicator, output: Buffer, parts: Sequence[Buffer], how: Reduction) -> None:
    """Reduce each array ``parts[r]`` over all ranks with ``how``, and store it in ``output`` on rank r. Collective."""
    shares = ranges([part.array.size for part in parts])
    addend = scratch("torch addend", shares[-1].stop, output.array.dtype, output.array)
    for part, share in zip(parts, shares, strict=True):
        addend[share.slice] = part.array
    _reduce_scatter(comm, output, addend, shares, how)


def _reduce_scatter(comm: Communicator, output: Buffer, addend: Array, shares: list[Range], how: Reduction) -> None:
    if addend.size:
        premultiply(addend, how)
        result = output.array
        if how.op:
            sharding_for(comm, addend).reduce_scatter(comm, addend, shares, how.op, result)
        else:
            reduce_chunk(comm, addend, shares, how.function, result)
        if how.average and result.dtype.kind not in "iu":
            result /= comm.size
        divide_integers(result, how, comm.size)
    output.finish()


def all_to_all(comm: Communicator, source: Buffer, target: Buffer, sent: list[Range], received: list[Range]) -> None:
    """Send the range ``sent[r]`` of ``source`` to rank r. Receive from rank r into ``received[r]`` of ``target``."""
    exchange.all_to_all(comm, source.array, target.array, sent, received)
    target.finish()


def all_to_all_list(comm: Communicator, sources: Sequence[Buffer], targets: Sequence[Buffer]) -> None:
    """Send ``sources[r]`` to each rank r, and receive into ``targets[r]`` from rank r. Sizes may differ. Collective."""
    sent = ranges([source.array.size for source in sources])
    received = ranges([target.array.size for target in targets])
    like = sources[0].array
    outgoing = scratch("torch outgoing", sent[-1].stop, like.dtype, like)
    incoming = scratch("torch incoming", received[-1].stop, like.dtype, like)
    for source, part in zip(sources, sent, strict=True):
        outgoing[part.slice] = source.array
    exchange.all_to_all(comm, outgoing, incoming, sent, received)
    for target, part in zip(targets, received, strict=True):
        target.array[...] = incoming[part.slice]
        target.finish()


def gather(comm: Communicator, outputs: Sequence[Buffer], source: Buffer, root: int) -> None:
    """Gather: ``outputs[r]`` on rank ``root`` receives ``source`` of rank r. Other ranks pass []. Collective."""
    token = comm.events.begin(comm.name, "gather", str(source.array.dtype), source.array.size, 0, root, 0)
    if comm.rank == root:
        others = [rank for rank in range(comm.size) if rank != root]
        wait_all([comm.irecv(outputs[rank].array, rank) for rank in others])
        outputs[root].array[...] = source.array
        for output in outputs:
            output.finish()
    else:
        comm.send(source.array, root)
    comm.events.end(token)


def scatter(comm: Communicator, output: Buffer, parts: Sequence[Buffer], root: int) -> None:
    """Scatter: ``output`` on rank r receives ``parts[r]`` of rank ``root``. Other ranks pass []. Collective."""
    token = comm.events.begin(comm.name, "scatter", str(output.array.dtype), output.array.size, 0, root, 0)
    if comm.rank == root:
        others = [rank for rank in range(comm.size) if rank != root]
        requests = [comm.isend(parts[rank].array, rank) for rank in others]
        output.array[...] = parts[root].array
        wait_all(requests)
    else:
        comm.recv(output.array, root)
    output.finish()
    comm.events.end(token)


def monitored_barrier(comm: Communicator, limit_s: float, name_all: bool) -> None:
    """Wait until all ranks have called this function. Collective. Raises DeadlineError after ``limit_s`` seconds.

    The error on rank 0 names one missing rank, or all missing ranks if ``name_all`` is True.
    """
    limit, token = time.monotonic() + limit_s, np.zeros(1, np.uint8)
    if comm.rank:
        comm.send(token, 0, ARRIVED)
        request = comm.irecv(token, 0, LEAVE)
        while not request.test():
            if time.monotonic() > limit:
                raise DeadlineError(
                    f"monitored_barrier of {comm.name}: rank 0 did not report within {limit_s:g} s that all ranks have "
                    "called it; see the error of rank 0, which names a missing rank, unless rank 0 itself has stopped"
                )
            time.sleep(LOOK_S)
        return
    missing = set(range(1, comm.size))
    while missing and time.monotonic() <= limit:
        message = comm.poll(ANY, ARRIVED)
        if message is None:
            time.sleep(LOOK_S)
        else:
            message.recv(token)
            missing.discard(message.source)
    if missing:
        named = sorted(missing) if name_all else [min(missing)]
        ranks = f"rank{'s' * (len(named) > 1)} {', '.join(map(str, named))}"
        raise DeadlineError(f"monitored_barrier of {comm.name}: {ranks} did not call it within {limit_s:g} s")
    wait_all([comm.isend(token, rank, LEAVE) for rank in range(1, comm.size)])


def ranges(sizes: Sequence[int]) -> list[Range]:
    """Return a list of adjacent index ranges with the lengths ``sizes``. The first range starts at 0. Local."""
    return [Range(start, stop) for start, stop in pairwise(accumulate(sizes, initial=0))]


def row_ranges(tensor: torch.Tensor, sizes: Sequence[int] | None, ranks: int, which: str) -> list[Range]:
    """Return a list with one range of elements of ``tensor`` for each of ``ranks`` ranks.

    ``sizes``: rows of each rank, or None to split evenly. ``which``: "input" or "output", for error messages.
    """
    rows = tensor.shape[0] if tensor.dim() else 1
    if not sizes:
        if rows % ranks:
            raise UsageError(
                f"the {which} of all_to_all_single has {rows} rows, which cannot be split evenly for {ranks} ranks; "
                f"pass {which}_split_sizes"
            )
        sizes = [rows // ranks] * ranks
    if len(sizes) != ranks or sum(sizes) != rows or min(sizes) < 0:
        raise UsageError(
            f"{which}_split_sizes of all_to_all_single are {list(sizes)}; expected {ranks} sizes with the sum {rows}"
        )
    width = tensor.numel() // rows if rows else 0
    if tensor.is_complex():
        width *= 2
    return ranges([size * width for size in sizes])


def check_pair(name: str, output: torch.Tensor, source: torch.Tensor, expected: int = 0, actual: int = 0) -> None:
    """Raise UsageError unless ``output`` and ``source`` have the same dtype, and ``expected`` equals ``actual``.

    ``expected``, ``actual``: element counts. ``name``: name of the collective in the error message.
    """
    if output.dtype != source.dtype:
        raise UsageError(f"the output of {name} is {output.dtype}, but the input is {source.dtype}; use the same dtype")
    if expected != actual:
        raise UsageError(
            f"the output of {name} has {output.numel()} elements, and the input has {source.numel()} elements; the "
            "larger tensor must have the size of the smaller tensor times the number of ranks"
        )


def check_count(tensors: Sequence[Any], size: int, name: str) -> None:
    """Raise UsageError unless ``tensors``, the argument of the collective ``name``, has one tensor per rank."""
    if len(tensors) != size:
        raise UsageError(f"{name} got a list of {len(tensors)} tensors for {size} ranks; pass one tensor per rank")


# Callers may pass a root or a reduction instead of an options object.


def root_of(options: Any) -> int:
    """Return the root rank in PyTorch's ``options``."""
    root: int = options if isinstance(options, int) else getattr(options, "rootRank", 0)
    return root


def op_of(options: Any) -> Any:
    """Return the ReduceOp in PyTorch's ``options``. None means a sum."""
    try:
        return options.reduceOp
    except AttributeError:
        if isinstance(options, ReduceOp):
            return options
        return ReduceOp(ReduceOp.SUM if options is None else options)


def is_asynchronous(options: Any) -> bool:
    """Return True if PyTorch's ``options`` do not ask for a blocking operation."""
    return bool(getattr(options, "asyncOp", True))
