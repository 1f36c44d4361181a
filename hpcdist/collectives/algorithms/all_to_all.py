"""All-to-all algorithms by name, and an allreduce built from an all-to-all.

    pairwise      (p-1) α + (p-1)/p n β                       any sizes, one pair of messages at a time
    bruck         at most ceil(log2 p) (α + n/2 β)            equal block sizes; n more bytes of scratch
    native        MPI library
    hierarchical  one message each way between two nodes
    allreduce     2 (p-1) α + 2 (p-1)/p n β + (p-1)/p n γ

In the allreduce, every rank sums one chunk of all ranks in rank order, and sends the sum to all.

In the hierarchical algorithm, each pair of nodes has a gateway rank on each node (the local ranks take turns). It sends
all parts of its node for the other node. On N nodes of m ranks, a rank sends (N-1)/m messages of about m n/N bytes
between nodes, instead of p - m messages of n/p bytes. Inside the node there are two exchanges of (N-1)/N n bytes, and
one of n/N.

Bruck's algorithm: J. Bruck et al., IEEE Trans. Parallel Distrib. Syst. 8 (1997) 1143-1156.
"""

from collections.abc import Callable, Sequence
from typing import Final, TypeAlias

import numpy as np

from hpcdist.arrays.backend import Array
from hpcdist.arrays.dtypes import accumulation_dtype, name_of
from hpcdist.arrays.ranges import Range, consecutive, split
from hpcdist.collectives.algorithms.ring import all_gather
from hpcdist.collectives.reduction import check_buffer, round_into, ufunc, widen
from hpcdist.collectives.segments import check_ranges, gather_counts, scratch, wait_all
from hpcdist.comm import checks
from hpcdist.comm.communicator import Communicator, Nodes
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
    """Send ``send[send_ranges[q]]`` to each rank q; receive from q into ``receive[receive_ranges[q]]``. Collective.

    ``algorithm``: "native", "pairwise", "bruck" or "hierarchical". For "bruck", all ranges on all ranks must have the
    same size. ``send`` and ``receive`` have the same dtype, and do not overlap.
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
    # One event for the whole call, so that the watchdog can name a rank that skips the call.
    token = comm.events.begin(comm.name, f"{algorithm}_all_to_all", name_of(send.dtype), send.size, 0, -1, 0)
    if comm.checked and comm.size > 1:
        count = "any number of" if block is None else f"blocks of {block}"
        checks.compare_calls(comm, checks.CollectiveCall("all_to_all", algorithm, name_of(send.dtype), count))
        _compare_parts(comm, send_ranges, receive_ranges)
    function(comm, send, receive, send_ranges, receive_ranges)
    comm.events.end(token)


def _compare_parts(comm: Communicator, send_ranges: Sequence[Range], receive_ranges: Sequence[Range]) -> None:
    sizes = gather_sizes(comm, send_ranges, receive_ranges)
    sent, expected = sizes[:, 0], sizes[:, 1].T  # both (from, to)
    for source, to in np.argwhere(sent != expected):
        raise CommunicationError(
            f"in an all-to-all over {comm.name}, rank {source} sends {sent[source, to]} elements to rank {to}, which "
            f"expects {expected[source, to]}; make the sender's and the receiver's range equally long"
        )


def pairwise_all_to_all(
    comm: Communicator, send: Array, receive: Array, send_ranges: Sequence[Range], receive_ranges: Sequence[Range]
) -> None:
    """Execute `all_to_all` in p - 1 steps of one send and one receive. Collective over ``comm`` of p ranks."""
    # In step k, rank r sends to rank (r + k) mod p and receives from rank (r - k) mod p.
    receive[receive_ranges[comm.rank].slice] = send[send_ranges[comm.rank].slice]
    for distance in range(1, comm.size):
        to, source = (comm.rank + distance) % comm.size, (comm.rank - distance) % comm.size
        comm.sendrecv(send[send_ranges[to].slice], to, receive[receive_ranges[source].slice], source)


def bruck_all_to_all(
    comm: Communicator, send: Array, receive: Array, send_ranges: Sequence[Range], receive_ranges: Sequence[Range]
) -> None:
    """Execute `all_to_all` by Bruck's algorithm in ceil(log2 p) steps. Collective over ``comm`` of p ranks."""
    # In step b, rank r sends to rank (r + 2^b) mod p all data whose distance to its receiver has bit b set.
    block = _block(send_ranges, receive_ranges)
    # Row i is the block with i ranks to go. In step b, rows with bit b in their number move 2^b ranks ahead and keep
    # their number: in the end row i has moved i ranks, so row i comes from the rank i before.
    rows = scratch("bruck", comm.size * block, send.dtype, send).reshape(comm.size, block)  # (ranks, block)
    # At most half of the numbers have a given bit: so many blocks leave and arrive in a step.
    bundle = scratch("bruck bundle", 2 * -(-comm.size // 2) * block, send.dtype, send)
    for distance in range(comm.size):
        rows[distance] = send[send_ranges[(comm.rank + distance) % comm.size].slice]
    step = 1
    while step < comm.size:
        moving = [distance for distance in range(comm.size) if distance & step]
        half = len(moving) * block
        outgoing, incoming = bundle[:half], bundle[half : 2 * half]
        for slot, distance in enumerate(moving):
            outgoing[slot * block : (slot + 1) * block] = rows[distance]
        comm.sendrecv(outgoing, (comm.rank + step) % comm.size, incoming, (comm.rank - step) % comm.size)
        for slot, distance in enumerate(moving):
            rows[distance] = incoming[slot * block : (slot + 1) * block]
        step *= 2
    for distance in range(comm.size):
        receive[receive_ranges[(comm.rank - distance) % comm.size].slice] = rows[distance]


def _block(send_ranges: Sequence[Range], receive_ranges: Sequence[Range]) -> int:
    sizes = {part.size for part in (*send_ranges, *receive_ranges)}
    if len(sizes) > 1:
        raise UsageError(f"bruck needs ranges of equal size, got the sizes {sorted(sizes)}; use pairwise instead")
    return sizes.pop()


_GATEWAY_TAG: Final = 11
_Parts: TypeAlias = list[list[Array]]  # one list per rank of a node


def hierarchical_all_to_all(
    comm: Communicator, send: Array, receive: Array, send_ranges: Sequence[Range], receive_ranges: Sequence[Range]
) -> None:
    """Execute `all_to_all` with one message in each direction between every two nodes. Collective over ``comm``."""
    nodes = comm.nodes()
    here = nodes.members[nodes.index]
    own_ranges = [send_ranges[rank] for rank in here], [receive_ranges[rank] for rank in here]
    nodes.intra.all_to_all(send, receive, *own_ranges)
    if nodes.count == 1:
        return
    others = [node for node in range(nodes.count) if node != nodes.index]
    peers = [[node for node in others if node % len(here) == local_rank] for local_rank in range(len(here))]
    mine = peers[nodes.intra.rank]  # the nodes for which this rank is the gateway
    sizes = gather_sizes(nodes.intra, send_ranges, receive_ranges)
    # Inside the node: send the parts for other nodes to their gateways.
    out = [[send[send_ranges[rank].slice] for node in group for rank in nodes.members[node]] for group in peers]
    targets = [rank for node in mine for rank in nodes.members[node]]
    brought = _exchange(nodes.intra, "brought", out, [[int(row[0, rank]) for rank in targets] for row in sizes], send)
    arrived = _between(comm, nodes, mine, brought, sizes, send)
    # Inside the node: send the received parts from the gateways to their receivers.
    sources = [[rank for node in group for rank in nodes.members[node]] for group in peers]
    expected = [[receive_ranges[rank].size for rank in group] for group in sources]
    handed = _exchange(nodes.intra, "handed", arrived, expected, send)
    for ranks, parts in zip(sources, handed, strict=True):
        for rank, part in zip(ranks, parts, strict=True):
            receive[receive_ranges[rank].slice] = part


def _between(
    comm: Communicator, nodes: Nodes, mine: list[int], brought: _Parts, sizes: np.ndarray, like: Array
) -> _Parts:
    # This rank is the gateway of its node to the nodes ``mine``. ``brought[i]``: arrays from local rank i, one per rank
    # of these nodes. ``like``: array of the same dtype and device. Returns the received arrays of each local rank.
    arrived: _Parts = [[] for _ in brought]
    requests, first, opened = [], 0, []
    for node in mine:
        theirs = nodes.members[node]
        peer = theirs[nodes.index % len(theirs)]
        leaving = [parts[first + index] for index in range(len(theirs)) for parts in brought]
        first += len(theirs)
        out = scratch(f"to node {node}", sum(part.size for part in leaving), like.dtype, like)
        _views(out, [part.size for part in leaving], leaving)
        lengths = [int(row[1, rank]) for row in sizes for rank in theirs]
        into = scratch(f"from node {node}", sum(lengths), like.dtype, like)
        requests += [comm.irecv(into, peer, _GATEWAY_TAG), comm.isend(out, peer, _GATEWAY_TAG)]
        opened.append((len(theirs), _views(into, lengths)))
    wait_all(requests)
    for count, parts in opened:
        for index, incoming in enumerate(arrived):
            incoming += parts[index * count : (index + 1) * count]
    return arrived


def gather_sizes(comm: Communicator, send_ranges: Sequence[Range], receive_ranges: Sequence[Range]) -> np.ndarray:
    """Return all message sizes in elements as an array (rank, 0 for sent or 1 for received, peer). Collective."""
    local_sizes = [[part.size for part in ranges] for ranges in (send_ranges, receive_ranges)]
    return gather_counts(comm, np.array(local_sizes, np.int64))


def _exchange(intra: Communicator, name: str, parts: _Parts, expected: list[list[int]], like: Array) -> _Parts:
    # ``expected[i]``: sizes of the arrays from local rank i.
    flat, lengths = [part for row in parts for part in row], [size for row in expected for size in row]
    send = scratch(f"{name} out", sum(part.size for part in flat), like.dtype, like)
    _views(send, [part.size for part in flat], flat)
    receive = scratch(f"{name} in", sum(lengths), like.dtype, like)
    sent = consecutive(sum(part.size for part in row) for row in parts)
    intra.all_to_all(send, receive, sent, consecutive(map(sum, expected)))
    views = iter(_views(receive, lengths))
    return [[next(views) for _ in row] for row in expected]


def _views(buffer: Array, sizes: Sequence[int], values: Sequence[Array] = ()) -> list[Array]:
    views: list[Array] = [buffer[part.slice] for part in consecutive(sizes)]
    for view, value in zip(views, values, strict=False):
        view[...] = value
    return views


# Call these by `all_to_all`, which checks buffers and ranges.
ALL_TO_ALL: Final[dict[str, AllToAllFunction]] = {
    "native": Communicator.all_to_all,
    "pairwise": pairwise_all_to_all,
    "bruck": bruck_all_to_all,
    "hierarchical": hierarchical_all_to_all,
}


def _check(
    comm: Communicator, send: Array, receive: Array, send_ranges: Sequence[Range], receive_ranges: Sequence[Range]
) -> None:
    check_buffer(receive)
    if send.ndim != 1 or not send.flags.c_contiguous or send.dtype != receive.dtype:
        raise BufferHandoverError(
            f"an all-to-all needs 1-D contiguous buffers of equal dtype, got a send buffer of {send.dtype}, shape "
            f"{send.shape}, strides {send.strides}, and a receive buffer of {receive.dtype}; copy or convert a buffer"
        )
    check_ranges(comm, send, send_ranges)
    check_ranges(comm, receive, receive_ranges)
    sizes = (send_ranges[comm.rank].size, receive_ranges[comm.rank].size)
    if sizes[0] != sizes[1]:
        raise UsageError(f"rank {comm.rank} sends itself {sizes[0]} elements, but receives {sizes[1]}; use equal sizes")


def all_to_all_allreduce(comm: Communicator, buffer: Array, op: str = "sum") -> None:
    """Reduce ``buffer`` in place by an all-to-all and an all-gather, with equal bits on every rank. Collective."""
    chunks = split(buffer.size, comm.size, buffer.itemsize)
    all_to_all_reduce_scatter(comm, buffer, chunks, op)
    all_gather(comm, buffer, chunks)


def all_to_all_reduce_scatter(comm: Communicator, buffer: Array, shares: Sequence[Range], op: str = "sum") -> None:
    """Reduce ``buffer`` in place by an all-to-all. Rank r gets only the result ``buffer[shares[r]]``. Collective."""
    check_buffer(buffer)
    ufunc(buffer, op)  # rejects an unknown op before anything is sent
    check_ranges(comm, buffer, shares)
    share = shares[comm.rank]
    rows = [Range(share.size * peer, share.size * (peer + 1)) for peer in range(comm.size)]
    addends = scratch("all to all", share.size * comm.size, buffer.dtype, buffer)  # (ranks * size of the share,)
    comm.all_to_all(buffer, addends, shares, rows)
    reduce_rows([addends[row.slice] for row in rows], buffer[share.slice], op)


def reduce_rows(rows: list[Array], result: Array, op: str) -> None:
    """Reduce ``rows``, the arrays of all ranks, in rank order, and write the result to ``result``. Local.

    ``op``: "sum", "max" or "min". 16-bit floats are accumulated in float32, and only the result is rounded.
    """
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
