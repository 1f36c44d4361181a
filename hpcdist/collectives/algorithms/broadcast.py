"""Broadcast from any root: a binomial tree for small buffers, scatter and all-gather or a chain for large ones.

    binomial            ceil(log2 p) (α + n β)
    scatter_all_gather  2 ceil(log2 p) α + 2 (p-1)/p n β
    chain               (p-2 + n/b) (α + b β)              in segments of b bytes
    native              the MPI library's

R. van de Geijn's scatter and all-gather: M. Barnett, L. Shuler, R. van de Geijn et al., "Interprocessor collective
communication library (InterCom)", SHPCC 1994; the all-gather here is the one of `circulant`. Each sends n (p-1) bytes
in all, counted over the ranks, but scatter_all_gather, which sends more by what it scatters through other ranks.
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

# `broadcast` takes the tree up to here, and always on few ranks: on 3 and 4 of a node scattering was slower at any
# size. Above, the costs decide: 2 (p-1)/p n β against ceil(log2 p) n β.
BINOMIAL_BYTES: Final = 512 << 10
SCATTER_RANKS: Final = 8
SEGMENT_BYTES: Final = 512 << 10  # of the chain; shorter ones were slower through shared memory


BroadcastFunction: TypeAlias = Callable[[Communicator, Array, int], None]  # buffer, root; see `broadcast`


def broadcast(comm: Communicator, buffer: Array, root: int = 0, algorithm: str = "auto") -> None:
    """Overwrite ``buffer`` with that of ``root``. Collective over ``comm``.

    ``buffer`` is 1-D, contiguous, of the same size and dtype on every rank; ``algorithm`` is a name of BROADCAST, or
    "auto": by the size of the buffer and the number of ranks.
    Raises UsageError for an unknown algorithm or a root that does not exist.
    """
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
    # One event over the messages within: a rank that skips the call is then named, whatever the algorithm.
    token = comm.events.begin(comm.name, f"{algorithm}_broadcast", name_of(buffer.dtype), buffer.size, 0, root, 0)
    if comm.checked:
        checks.compare_calls(comm, checks.describe_call("broadcast", algorithm, buffer, extra=f"from rank {root}"))
    function(comm, buffer, root)
    comm.events.end(token)


def binomial_broadcast(comm: Communicator, buffer: Array, root: int = 0) -> None:
    """Send the whole buffer down a binomial tree. Collective over ``comm``."""
    turned = (comm.rank - root) % comm.size  # the root is 0; each other is below the number without its lowest bit
    span = _span(turned, comm.size)
    if turned:
        comm.recv(buffer, (comm.rank - span) % comm.size)
    sends = []
    while span > 1:
        span //= 2
        if turned + span < comm.size:
            sends.append(comm.isend(buffer, (comm.rank + span) % comm.size))
    wait_all(sends)


def scatter_all_gather_broadcast(comm: Communicator, buffer: Array, root: int = 0) -> None:
    """Scatter one chunk for each rank down a binomial tree, then all-gather them. Collective over ``comm``."""
    turned = (comm.rank - root) % comm.size
    chunks = split(buffer.size, comm.size, buffer.itemsize)  # in the order of the turned numbers

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
    """Pass segments from rank to rank, each sent on while the next arrives. Collective over ``comm``."""
    check_segment(segment_bytes)
    turned = (comm.rank - root) % comm.size
    whole = Range(0, buffer.size)
    segments = [buffer[piece.slice] for piece in cut_evenly(whole, buffer.itemsize, segment_bytes)]
    inbox = PostedReceives(comm, (comm.rank - 1) % comm.size, segments if turned else [])
    sends = []
    for segment in segments:
        if turned:
            inbox.take()
        if turned < comm.size - 1:
            sends.append(comm.isend(segment, (comm.rank + 1) % comm.size))
    wait_all(sends)


def native_broadcast(comm: Communicator, buffer: Array, root: int = 0) -> None:
    """Broadcast by MPI_Bcast. Collective over ``comm``."""
    comm.broadcast(buffer, root)


# By name, for `broadcast`, which refuses a buffer or a root that does not fit.
BROADCAST: Final[dict[str, BroadcastFunction]] = {
    "native": native_broadcast,
    "binomial": binomial_broadcast,
    "scatter_all_gather": scatter_all_gather_broadcast,
    "chain": chain_broadcast,
}


def _check(comm: Communicator, buffer: Array, root: int) -> None:
    """Raise before anything is sent, on every rank alike (local)."""
    check_buffer(buffer)
    if not 0 <= root < comm.size:
        raise UsageError(f"root {root} does not exist among {comm.size} ranks; give 0..{comm.size - 1}")


def _span(turned: int, size: int) -> int:
    """Return the size of the binomial subtree of ``turned``, itself included: a power of two, not cut at ``size``."""
    # The lowest set bit: 6 = 0b110 has the subtree 6, 7. The root's is the whole tree.
    return turned & -turned if turned else 1 << (size - 1).bit_length()
