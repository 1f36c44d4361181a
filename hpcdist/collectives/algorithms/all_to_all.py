"""All-to-all by pairwise exchange or Bruck's algorithm, the others by name, and an allreduce made of an all-to-all.

    pairwise   (p-1) α + (p-1)/p n β                       any sizes, one pair of messages at a time
    bruck      ceil(log2 p) (α + n/2 β) at most            all blocks of one size; n more bytes of scratch
    native     the MPI library's

`hpcdist.collectives.algorithms.hierarchical_all_to_all` has the one for ranks of several nodes.

Pairwise exchange sends each block once. J. Bruck, C.-T. Ho, S. Kipnis et al., "Efficient algorithms for all-to-all
communications in multiport message-passing systems", IEEE Trans. Parallel Distrib. Syst. 8 (1997) 1143-1156, sends a
block once for each bit in the distance it has to go, together with all others that have this bit: for small blocks.

In the allreduce every rank receives one chunk from all others, sums it in rank order, and sends the sum to all.

    2 (p-1) α + 2 (p-1)/p n β + (p-1)/p n γ

The bytes of the ring, but whole addends travel instead of partial sums. So 16-bit floats stay 16 bits on the wire and
are still summed in float32 and rounded once: half the bytes of every other algorithm for them. The price is n bytes
of scratch, and p-1 messages at once in the network. The sum is in rank order, whatever the size of the buffer.
"""

from collections.abc import Callable, Sequence
from typing import Final, TypeAlias

import numpy as np

from hpcdist.arrays.backend import Array
from hpcdist.arrays.dtypes import accumulation_dtype, name_of
from hpcdist.arrays.ranges import Range, split
from hpcdist.collectives.algorithms.hierarchical_all_to_all import gather_sizes, hierarchical_all_to_all
from hpcdist.collectives.algorithms.ring import all_gather
from hpcdist.collectives.half_precision import round_into, widen
from hpcdist.collectives.reduction import check_buffer, ufunc
from hpcdist.collectives.segments import check_ranges, scratch
from hpcdist.comm import checks
from hpcdist.comm.communicator import Communicator
from hpcdist.errors import BufferHandoverError, CommunicationError, HpcdistError, UsageError

# send, receive, ranges to send, ranges to receive; see `all_to_all`
AllToAllFunction: TypeAlias = Callable[[Communicator, Array, Array, Sequence[Range], Sequence[Range]], None]


def all_to_all(
    comm: Communicator,
    send: Array,
    receive: Array,
    send_ranges: Sequence[Range],
    receive_ranges: Sequence[Range],
    algorithm: str = "pairwise",
) -> None:
    """Send ``send[send_ranges[q]]`` to each rank q; its part comes to ``receive[receive_ranges[q]]``. Collective.

    Both buffers are 1-D, contiguous, of one dtype, and apart in memory; outside its ranges ``receive`` stays as it is.
    "bruck" needs blocks of one size on all ranks: no rank can see that of all others, so nothing chooses it by itself.
    Raises UsageError for an unknown algorithm or ranges that do not fit, BufferHandoverError for the buffers.
    """
    function = ALL_TO_ALL.get(algorithm)
    if function is None:
        raise UsageError(f"all-to-all algorithm {algorithm!r} is unknown; choose one of {', '.join(ALL_TO_ALL)}")
    try:
        _check(comm, send, receive, send_ranges, receive_ranges)
        block = _block(send_ranges, receive_ranges) if algorithm == "bruck" else None
    except HpcdistError as error:
        checks.announce_refusal(comm, checks.describe_call("all_to_all", algorithm, send), error)
        raise
    # One event over the messages within: a rank that skips the call is then named, whatever the algorithm.
    token = comm.events.begin(comm.name, f"{algorithm}_all_to_all", name_of(send.dtype), send.size, 0, -1, 0)
    if comm.checked and comm.size > 1:
        count = "any number of" if block is None else f"blocks of {block}"
        checks.compare_calls(comm, checks.CollectiveCall("all_to_all", algorithm, name_of(send.dtype), count))
        _compare_parts(comm, send_ranges, receive_ranges)
    function(comm, send, receive, send_ranges, receive_ranges)
    comm.events.end(token)


def _compare_parts(comm: Communicator, send_ranges: Sequence[Range], receive_ranges: Sequence[Range]) -> None:
    """Raise CommunicationError on every rank unless each expects what the others send. Collective over ``comm``.

    Parts may differ from rank to rank, so two of them are compared, not the calls of all.
    """
    sizes = gather_sizes(comm, send_ranges, receive_ranges)
    sent, expected = sizes[:, 0], sizes[:, 1].T  # both (from, to)
    for source, to in np.argwhere(sent != expected):
        raise CommunicationError(
            f"in an all-to-all of {comm.name} rank {source} sends {sent[source, to]} elements to rank {to}, which "
            f"expects {expected[source, to]}; make the range of the one as long as that of the other"
        )


def pairwise_all_to_all(
    comm: Communicator, send: Array, receive: Array, send_ranges: Sequence[Range], receive_ranges: Sequence[Range]
) -> None:
    """Send to the rank k ahead while receiving from the one k behind, for k = 1 to p-1. Collective over ``comm``."""
    receive[receive_ranges[comm.rank].slice] = send[send_ranges[comm.rank].slice]
    # At every distance the messages are a permutation of the ranks: each sends one and receives one at a time.
    for distance in range(1, comm.size):
        to, source = (comm.rank + distance) % comm.size, (comm.rank - distance) % comm.size
        comm.sendrecv(send[send_ranges[to].slice], to, receive[receive_ranges[source].slice], source)


def bruck_all_to_all(
    comm: Communicator, send: Array, receive: Array, send_ranges: Sequence[Range], receive_ranges: Sequence[Range]
) -> None:
    """Pass blocks on by powers of two, together those whose distance has this bit. Collective over ``comm``."""
    block = _block(send_ranges, receive_ranges)
    # Row i is the block that has i ranks to go. In the step of bit b, all rows whose number has this bit move 2^b ranks
    # ahead, and keep their number: at the end row i has gone i ranks, so it came from the rank i behind.
    rows = scratch("bruck", comm.size * block, send.dtype, send).reshape(comm.size, block)  # (ranks, block)
    # At most half of the numbers have a given bit: that many blocks leave, and as many arrive.
    bundle = scratch("bruck bundle", 2 * -(-comm.size // 2) * block, send.dtype, send)
    for distance in range(comm.size):
        rows[distance] = send[send_ranges[(comm.rank + distance) % comm.size].slice]
    step = 1
    while step < comm.size:
        moving = [distance for distance in range(comm.size) if distance & step]
        half = len(moving) * block
        outgoing, incoming = bundle[:half], bundle[half : 2 * half]
        for place, distance in enumerate(moving):
            outgoing[place * block : (place + 1) * block] = rows[distance]
        comm.sendrecv(outgoing, (comm.rank + step) % comm.size, incoming, (comm.rank - step) % comm.size)
        for place, distance in enumerate(moving):
            rows[distance] = incoming[place * block : (place + 1) * block]
        step *= 2
    for distance in range(comm.size):
        receive[receive_ranges[(comm.rank - distance) % comm.size].slice] = rows[distance]


def _block(send_ranges: Sequence[Range], receive_ranges: Sequence[Range]) -> int:
    """Return the one size of all blocks (local). Raises UsageError where they differ."""
    sizes = {part.size for part in (*send_ranges, *receive_ranges)}
    if len(sizes) > 1:
        raise UsageError(f"bruck needs blocks of one size on all ranks, got {sorted(sizes)}; choose pairwise")
    return sizes.pop()


def native_all_to_all(
    comm: Communicator, send: Array, receive: Array, send_ranges: Sequence[Range], receive_ranges: Sequence[Range]
) -> None:
    """Exchange by MPI_Alltoallv. Collective over ``comm``."""
    comm.all_to_all(send, receive, send_ranges, receive_ranges)


# By name, for `all_to_all`, which refuses buffers and ranges that do not fit.
ALL_TO_ALL: Final[dict[str, AllToAllFunction]] = {
    "native": native_all_to_all,
    "pairwise": pairwise_all_to_all,
    "bruck": bruck_all_to_all,
    "hierarchical": hierarchical_all_to_all,
}


def _check(
    comm: Communicator, send: Array, receive: Array, send_ranges: Sequence[Range], receive_ranges: Sequence[Range]
) -> None:
    """Raise before anything is sent (local)."""
    check_buffer(receive)
    if send.ndim != 1 or not send.flags.c_contiguous or send.dtype != receive.dtype:
        raise BufferHandoverError(
            f"an all-to-all needs 1-D contiguous buffers of one dtype, got {send.dtype} of shape {send.shape} with "
            f"strides {send.strides} to send and {receive.dtype} to receive; copy or convert one of them"
        )
    check_ranges(comm, send, send_ranges)
    check_ranges(comm, receive, receive_ranges)
    own = (send_ranges[comm.rank].size, receive_ranges[comm.rank].size)
    if own[0] != own[1]:
        raise UsageError(f"rank {comm.rank} sends itself {own[0]} elements and receives {own[1]}; make them equal")


def all_to_all_allreduce(comm: Communicator, buffer: Array, op: str = "sum") -> None:
    """Reduce ``buffer``, 16-bit floats included, in place to the same bits on every rank. Collective over ``comm``."""
    chunks = split(buffer.size, comm.size, buffer.itemsize)
    all_to_all_reduce_scatter(comm, buffer, chunks, op)
    all_gather(comm, buffer, chunks)


def all_to_all_reduce_scatter(comm: Communicator, buffer: Array, shares: Sequence[Range], op: str = "sum") -> None:
    """Reduce ``buffer``, 16-bit floats included, to the shares of the ranks, in place. Collective over ``comm``.

    Afterwards ``buffer[shares[rank]]`` is defined. The first half of `all_to_all_allreduce`, for shares of any size.
    """
    check_buffer(buffer)
    ufunc(buffer, op)  # an unknown op is refused before anything is sent
    check_ranges(comm, buffer, shares)
    own = shares[comm.rank]
    rows = [Range(own.size * peer, own.size * (peer + 1)) for peer in range(comm.size)]
    addends = scratch("all to all", own.size * comm.size, buffer.dtype, buffer)  # (ranks * own share,)
    comm.all_to_all(buffer, addends, shares, rows)
    reduce_rows([addends[row.slice] for row in rows], buffer[own.slice], op)


def reduce_rows(rows: list[Array], result: Array, op: str) -> None:
    """Reduce ``rows`` in their order, in the dtype for sums, and round into ``result`` once (local)."""
    wide = accumulation_dtype(result.dtype)
    total = scratch("all to all total", result.size, wide, result)
    combine = ufunc(total, op)
    widen(rows[0], total)
    for row in rows[1:]:
        if row.dtype != wide:
            widened = scratch("all to all addend", row.size, wide, row)
            widen(row, widened)
            row = widened
        combine(total, row, total)
    round_into(result, total)
