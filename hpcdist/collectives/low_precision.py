"""16-bit floats through algorithms that send partial sums: widened to float32 once, rounded once.

A ring in 16 bits would round p-1 times: with 4 ranks more than a fifth of its elements differ from the true sum,
rounded. The bytes sent are those of float32; `all_to_all` is the algorithm that keeps 16 bits on the wire.
"""

import numpy as np

from hpcdist.arrays.backend import Array
from hpcdist.arrays.dtypes import accumulation_dtype
from hpcdist.collectives.reduction import AllreduceFunction
from hpcdist.collectives.workspace import scratch
from hpcdist.comm.communicator import Communicator


def widened_allreduce(algorithm: AllreduceFunction, comm: Communicator, buffer: Array, op: str = "sum") -> None:
    """Reduce the 16-bit ``buffer`` in place by ``algorithm`` on a float32 copy. Collective over ``comm``."""
    wide = scratch("widened", buffer.size, accumulation_dtype(buffer.dtype), buffer)
    wide[...] = buffer
    algorithm(comm, wide, op)
    round_into(buffer, wide)


def round_into(target: Array, total: Array) -> None:
    """Round ``total`` to the dtype of ``target``; a sum beyond its range becomes infinite (local)."""
    with np.errstate(over="ignore"):  # infinity is the message: loss scaling looks for it
        target[...] = total
