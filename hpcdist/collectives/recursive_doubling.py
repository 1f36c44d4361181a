"""Recursive doubling: in step k every rank exchanges its whole partial sum with the rank that differs in bit k.

    log2(p) (α + n β + n γ)    for p a power of two; see `power_of_two` for the rest

The fewest steps of all, so the one for small buffers. R. Thakur, R. Rabenseifner, W. Gropp, "Optimization of collective
communication operations in MPICH", Int. J. High Perform. Comput. Appl. 19 (2005) 49-66.

Both ranks of a pair compute the same sum. They get the same bits because both take the operand of the lower half first.
"""

from hpcdist.arrays.backend import Array
from hpcdist.collectives.power_of_two import Hypercube, fold, unfold
from hpcdist.collectives.reduction import Combine, combiner
from hpcdist.collectives.workspace import scratch
from hpcdist.comm.communicator import Communicator


def recursive_doubling_allreduce(comm: Communicator, buffer: Array, op: str = "sum") -> None:
    """Reduce ``buffer`` in place to the same bits on every rank. Collective over ``comm``."""
    combine = combiner(buffer, op)
    cube = fold(comm, buffer, combine)
    if cube.rank is not None:
        _double(comm, cube, cube.rank, buffer, combine)
    unfold(comm, cube, buffer)


def _double(comm: Communicator, cube: Hypercube, rank: int, buffer: Array, combine: Combine) -> None:
    received = scratch("recursive doubling", buffer.size, buffer.dtype, buffer)
    distance = 1
    while distance < cube.size:
        partner = rank ^ distance
        comm.sendrecv(buffer, cube.outer(partner), received, cube.outer(partner))
        if partner < rank:
            combine(received, buffer, buffer)
        else:
            combine(buffer, received, buffer)
        distance *= 2
