"""Reductions with PyTorch's operations.

Sums, maxima and minima use `hpcdist.collectives.dispatch`. For products and bit operations, each rank reduces its chunk
in rank order. Their cost for n bytes on p ranks is

    2 (p-1) α + 2 (p-1)/p n β + (p-1)/p n γ
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Final

import numpy as np
import torch
from torch.distributed import ReduceOp

from hpcdist.arrays.backend import Array, namespace
from hpcdist.arrays.dtypes import accumulation_dtype
from hpcdist.arrays.ranges import Range, split
from hpcdist.collectives.algorithms import all_to_all as exchange
from hpcdist.collectives.algorithms import ring
from hpcdist.collectives.segments import scratch
from hpcdist.comm.communicator import Communicator
from hpcdist.errors import UsageError

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
    """A PyTorch reduction (ReduceOp) for tensors of one dtype, expressed by hpcdist's reductions."""

    op: str  # hpcdist's name, or "" to use the numpy ufunc ``function``
    function: str
    average: bool  # divide the sum by the number of ranks
    factor: Any = None  # multiply each rank's values by this factor first


def reduction_of(op: Any, tensor: torch.Tensor) -> Reduction:
    """Convert PyTorch's ReduceOp ``op``. Raises UsageError if ``op`` is undefined for the dtype of ``tensor``."""
    kind, factor = op.__getstate__()
    reduction = _reduction(kind, tensor.dtype)
    return reduction if factor is None else replace(reduction, factor=factor)


@lru_cache(maxsize=256)  # comparing members of a C++ enumeration is slow
def _reduction(kind: Any, dtype: torch.dtype) -> Reduction:
    if dtype is torch.bool:
        kind = _ON_BOOLS.get(kind, kind)
        if kind not in (RedOp.MAX, RedOp.MIN, RedOp.BXOR):
            raise UsageError(f"{_name(kind)} is not defined for bool tensors; use BOR, BAND, BXOR, MAX or MIN")
    elif dtype.itemsize == 1 and dtype.is_floating_point:
        raise UsageError(f"{dtype} tensors cannot be reduced (too few bits); use tensor.float(), or do not reduce")
    if dtype.is_complex and kind not in (RedOp.SUM, RedOp.AVG, RedOp.PREMUL_SUM):
        raise UsageError(f"{_name(kind)} is not defined for complex tensors; use SUM or AVG")
    if kind in (RedOp.BAND, RedOp.BOR, RedOp.BXOR) and (dtype.is_floating_point or dtype.is_complex):
        raise UsageError(f"{_name(kind)} is not defined for {dtype} tensors; use a tensor of integers")
    if kind not in _NATIVE and kind not in _UFUNCS:
        raise UsageError(f"the reduction {_name(kind)} is unknown; use SUM, AVG, MAX, MIN, PRODUCT, BAND, BOR or BXOR")
    return Reduction(_NATIVE.get(kind, ""), _UFUNCS.get(kind, ""), kind == RedOp.AVG)


def _name(kind: Any) -> str:
    return str(kind).removeprefix("RedOpType.")


def allreduce(comm: Communicator, buffer: Array, function: str) -> None:
    """Allreduce ``buffer`` in place with the numpy ufunc named ``function``. Collective over ``comm``."""
    if comm.size > 1:
        chunks = split(buffer.size, comm.size, buffer.itemsize)
        reduce_chunk(comm, buffer, chunks, function, buffer[chunks[comm.rank].slice])
        ring.all_gather(comm, buffer, chunks)


def premultiply(buffer: Array, how: Reduction) -> None:
    """If the reduction ``how`` is PREMUL_SUM, multiply ``buffer`` in place by its factor. Local."""
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
    """Reduce-scatter: ``result`` on rank r receives range ``chunks[r]`` of the reduced ``buffer``. Collective.

    ``function`` names a numpy ufunc. ``result`` may overlap ``buffer``.
    """
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
