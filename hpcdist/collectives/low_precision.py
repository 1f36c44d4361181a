"""16-bit floats through algorithms that send partial sums: widened to float32 once, rounded once.

A ring in 16 bits would round p-1 times: with 4 ranks more than a fifth of its elements differ from the true sum,
rounded. The bytes sent are those of float32; `all_to_all` is the algorithm that keeps 16 bits on the wire.
"""

import numpy as np

from hpcdist.arrays.backend import Array, is_device
from hpcdist.arrays.dtypes import accumulation_dtype, is_16bit_float
from hpcdist.collectives import half
from hpcdist.collectives.reduction import AllreduceFunction
from hpcdist.collectives.workspace import scratch
from hpcdist.comm.communicator import Communicator


def widened_allreduce(
    algorithm: AllreduceFunction, comm: Communicator, buffer: Array, op: str = "sum", *, scale: float = 1.0
) -> None:
    """Reduce the 16-bit ``buffer`` in place by ``algorithm`` on a float32 copy. Collective over ``comm``.

    The result is multiplied by ``scale`` before it is rounded.
    """
    wide = scratch("widened", buffer.size, accumulation_dtype(buffer.dtype), buffer)
    widen(buffer, wide)
    algorithm(comm, wide, op)
    multiply(wide, scale)
    round_into(buffer, wide)


def widen(source: Array, target: Array) -> None:
    """Copy ``source`` into ``target``, which is of the same dtype or of that for sums of it (local)."""
    if is_16bit_float(source.dtype) and not is_device(source):
        half.widen(source, target)
    else:
        target[...] = source


def round_into(target: Array, total: Array) -> None:
    """Round ``total`` to the dtype of ``target``; a sum beyond its range becomes infinite (local)."""
    if is_16bit_float(target.dtype) and not is_device(target):
        half.round_into(target, total)
        return
    with np.errstate(over="ignore"):  # infinity is the message: loss scaling looks for it
        target[...] = total


def multiply(total: Array, scale: float) -> None:
    """Multiply ``total``, of a dtype that is summed as it is, by ``scale`` in its own precision (local)."""
    if scale != 1.0:
        with np.errstate(all="ignore"):  # infinity and NaN are for the caller to find
            total *= total.dtype.type(scale)
