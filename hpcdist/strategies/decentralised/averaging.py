"""The mean of the replicas' values, and how far from it they are.

With n bytes on p ranks a mean is one allreduce: 2 n (p-1)/p sent by each on the ring. Values are multiplied by whole
numbers, summed, and divided by a whole number: a factor of 1/p, rounded, would shrink or stretch the model a little at
every averaging.
"""

from collections.abc import Iterable

import numpy as np

from hpcdist import collectives
from hpcdist.arrays.backend import namespace
from hpcdist.arrays.ranges import Range
from hpcdist.arrays.store import FlatStore
from hpcdist.collectives.workspace import scratch
from hpcdist.comm.communicator import Communicator
from hpcdist.optim import kernels


def average(
    comm: Communicator,
    store: FlatStore,
    ranges: Iterable[Range],
    algorithm: str,
    *,
    weight: int = 1,
    total: int,
    replace: bool = True,
) -> np.ndarray:  # (2,)
    """Return the sums of squares of this rank's values less the mean, and of the mean. Collective over ``comm``.

    The mean counts the values of each rank ``weight`` times; ``total`` is the sum of the weights. With ``replace`` the
    values of ``store`` are the mean afterwards, the same bits on every rank. Waits for a GPU.
    """
    found = np.zeros(2)
    for part in ranges:
        own = store.range(part)
        mean = scratch("decentralised.mean", own.size, own.dtype, own)
        if weight == 1:
            mean[...] = own
        else:
            namespace(own).multiply(own, own.dtype.type(weight), out=mean)
        collectives.allreduce(comm, mean, algorithm)
        mean /= mean.dtype.type(total)
        apart = own if replace else mean
        found[1] += float(kernels.sum_of_squares(mean))
        namespace(own).subtract(own, mean, out=apart)
        found[0] += float(kernels.sum_of_squares(apart))
        if replace:
            own[...] = mean
    return found
