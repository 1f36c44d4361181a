"""Rabenseifner's algorithm: reduce-scatter by recursive halving, then all-gather by recursive doubling.

    2 log2(p) α + 2 (p-1)/p n β + (p-1)/p n γ    for p a power of two; see `power_of_two` for the rest

The bytes of the ring in the steps of a tree: for medium and large buffers on many ranks. R. Rabenseifner, "Optimization
of collective reduction operations", ICCS 2004, LNCS 3036; R. Thakur, R. Rabenseifner, W. Gropp, "Optimization of
collective communication operations in MPICH", Int. J. High Perform. Comput. Appl. 19 (2005) 49-66.

Every element is summed in one place only and its bits are handed on, so all ranks end with the same bits.
"""

from collections.abc import Sequence

from hpcdist.arrays.backend import Array
from hpcdist.arrays.ranges import Range, split
from hpcdist.collectives.power_of_two import Hypercube, fold, unfold
from hpcdist.collectives.reduction import Combine, combiner
from hpcdist.collectives.workspace import scratch
from hpcdist.comm.communicator import Communicator


def rabenseifner_allreduce(comm: Communicator, buffer: Array, op: str = "sum") -> None:
    """Reduce ``buffer`` in place to the same bits on every rank. Collective over ``comm``."""
    combine = combiner(buffer, op)
    cube = fold(comm, buffer, combine)
    if cube.rank is not None:
        chunks = split(buffer.size, cube.size, buffer.itemsize)
        _reduce_scatter(comm, cube, cube.rank, buffer, chunks, combine)
        _all_gather(comm, cube, cube.rank, buffer, chunks)
    unfold(comm, cube, buffer)


def _window(chunks: Sequence[Range], rank: int, width: int) -> slice:
    """Return the elements of the ``width`` chunks (a power of two, aligned to it) that chunk ``rank`` is among."""
    first = rank & -width
    return slice(chunks[first].start, chunks[first + width - 1].stop)


def _reduce_scatter(
    comm: Communicator, cube: Hypercube, rank: int, buffer: Array, chunks: Sequence[Range], combine: Combine
) -> None:
    """Halve the window of chunks until only the own one is left: keep one half of it, give the other away."""
    arrival = scratch("recursive halving", _longest_half(chunks), buffer.dtype, buffer)
    width = cube.size // 2
    while width:
        partner = rank ^ width
        kept, given = buffer[_window(chunks, rank, width)], buffer[_window(chunks, partner, width)]
        received = arrival[: kept.size]
        comm.sendrecv(given, cube.outer(partner), received, cube.outer(partner))
        combine(received, kept, kept)
        width //= 2


def _longest_half(chunks: Sequence[Range]) -> int:
    half = chunks[len(chunks) // 2].start
    return max(half, chunks[-1].stop - half)


def _all_gather(comm: Communicator, cube: Hypercube, rank: int, buffer: Array, chunks: Sequence[Range]) -> None:
    """Double the window of finished chunks by exchanging it with the partner's."""
    width = 1
    while width < cube.size:
        partner = rank ^ width
        own, theirs = buffer[_window(chunks, rank, width)], buffer[_window(chunks, partner, width)]
        comm.sendrecv(own, cube.outer(partner), theirs, cube.outer(partner))
        width *= 2
