"""Broadcast from any root: a binomial tree for small buffers, scatter and all-gather or a chain for large buffers.

    binomial            ceil(log2 p) (α + n β)
    scatter_all_gather  2 ceil(log2 p) α + 2 (p-1)/p n β
    chain               (p-2 + n/b) (α + b β)              in segments of b bytes
    native              MPI library

Scatter and all-gather: M. Barnett et al., "Interprocessor collective communication library (InterCom)", SHPCC 1994.
"""

from collections.abc import Callable
from typing import Final, TypeAlias

from hpcdist.arrays.backend import Array
from hpcdist.arrays.dtypes import name_of
from hpcdist.arrays.ranges import Range, split
from hpcdist.collectives.algorithms.circulant import all_gather
from hpcdist.collectives.reduction import check_buffer
from hpcdist.collectives.segments import PostedReceives, check_segment, cut_evenly, wait_all
from hpcdist.comm import checks
from hpcdist.comm.communicator import Communicator
from hpcdist.errors import HpcdistError, UsageError

# `broadcast` uses the tree up to this size, and always on few ranks: on 3 and 4 ranks of a node, scattering was slower
# at any size. Above, the costs decide: 2 (p-1)/p n β against ceil(log2 p) n β.
BINOMIAL_BYTES: Final = 512 << 10
SCATTER_RANKS: Final = 8
SEGMENT_BYTES: Final = 512 << 10  # of the chain; shorter segments were slower through shared memory


BroadcastFunction: TypeAlias = Callable[[Communicator, Array, int], None]  # buffer, root; see `broadcast`


def broadcast(comm: Communicator, buffer: Array, root: int = 0, algorithm: str = "auto") -> None:
    """Overwrite ``buffer`` with the buffer of rank ``root``. Raises UsageError for an unknown algorithm. Collective."""
    if algorithm == "auto":
        small = buffer.nbytes <= BINOMIAL_BYTES or comm.size < SCATTER_RANKS
        algorithm = "binomial" if small else "scatter_all_gather"
    function = BROADCAST.get(algorithm)
    if function is None:
        raise UsageError(f"broadcast algorithm {algorithm!r} is unknown; choose auto or one of {', '.join(BROADCAST)}")
    try:
        _check(comm, buffer, root)
    except HpcdistError as error:
        checks.announce_refusal(comm, checks.describe_call("broadcast", algorithm, buffer), error)
        raise
    if comm.size == 1:
        return
    # One event for the whole call, so that the watchdog can name a rank that skips the call.
    token = comm.events.begin(comm.name, f"{algorithm}_broadcast", name_of(buffer.dtype), buffer.size, 0, root, 0)
    if comm.checked:
        checks.compare_calls(comm, checks.describe_call("broadcast", algorithm, buffer, extra=f"from rank {root}"))
    function(comm, buffer, root)
    comm.events.end(token)


def binomial_broadcast(comm: Communicator, buffer: Array, root: int = 0) -> None:
    """Broadcast the buffer of rank ``root`` along a binomial tree of ranks. Collective over ``comm``."""
    relative_rank = (comm.rank - root) % comm.size  # root: 0; the parent is this number without its lowest set bit
    span = _span(relative_rank, comm.size)
    if relative_rank:
        comm.recv(buffer, (comm.rank - span) % comm.size)
    sends = []
    while span > 1:
        span //= 2
        if relative_rank + span < comm.size:
            sends.append(comm.isend(buffer, (comm.rank + span) % comm.size))
    wait_all(sends)


def scatter_all_gather_broadcast(comm: Communicator, buffer: Array, root: int = 0) -> None:
    """Broadcast: scatter one chunk of rank ``root``'s buffer to each rank, then all-gather the chunks. Collective."""
    turned = (comm.rank - root) % comm.size
    chunks = split(buffer.size, comm.size, buffer.itemsize)  # in the order of the numbers relative to the root

    def below(first: int, span: int) -> Array:
        return buffer[chunks[first].start : chunks[min(first + span, comm.size) - 1].stop]

    span = _span(turned, comm.size)
    if turned:
        comm.recv(below(turned, span), (comm.rank - span) % comm.size)
    sends = []
    while span > 1:
        span //= 2
        if turned + span < comm.size:
            sends.append(comm.isend(below(turned + span, span), (comm.rank + span) % comm.size))
    wait_all(sends)
    all_gather(comm, buffer, [chunks[(rank - root) % comm.size] for rank in range(comm.size)])


def chain_broadcast(comm: Communicator, buffer: Array, root: int = 0, *, segment_bytes: int = SEGMENT_BYTES) -> None:
    """Broadcast the buffer of rank ``root`` along a chain: each rank forwards segments to the next rank. Collective."""
    check_segment(segment_bytes)
    relative_rank = (comm.rank - root) % comm.size
    whole = Range(0, buffer.size)
    segments = [buffer[piece.slice] for piece in cut_evenly(whole, buffer.itemsize, segment_bytes)]
    inbox = PostedReceives(comm, (comm.rank - 1) % comm.size, segments if relative_rank else [])
    sends = []
    for segment in segments:
        if relative_rank:
            inbox.take()
        if relative_rank < comm.size - 1:
            sends.append(comm.isend(segment, (comm.rank + 1) % comm.size))
    wait_all(sends)


# Call these by `broadcast`, which checks buffer and root.
BROADCAST: Final[dict[str, BroadcastFunction]] = {
    "native": Communicator.broadcast,
    "binomial": binomial_broadcast,
    "scatter_all_gather": scatter_all_gather_broadcast,
    "chain": chain_broadcast,
}


def _check(comm: Communicator, buffer: Array, root: int) -> None:
    check_buffer(buffer)
    if not 0 <= root < comm.size:
        raise UsageError(f"root {root} does not exist among {comm.size} ranks; choose a rank of 0 to {comm.size - 1}")


def _span(relative_rank: int, size: int) -> int:
    # The lowest set bit: 6 = 0b110 has the subtree 6, 7. The root has the whole tree.
    return relative_rank & -relative_rank if relative_rank else 1 << (size - 1).bit_length()
