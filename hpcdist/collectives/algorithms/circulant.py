"""Circulant reduce-scatter, all-gather and allreduce: the bytes of the ring in the steps of a tree, for any p.

J. L. Träff, "Optimal, Non-pipelined Reduce-scatter and Allreduce Algorithms", arXiv:2410.14234 (2024). With equal
blocks, and no power of two needed anywhere:

    reduce_scatter        ceil(log2 p) α + (p-1)/p n β + (p-1)/p n γ
    all_gather            ceil(log2 p) α + (p-1)/p n β
    circulant_allreduce 2 ceil(log2 p) α + 2 (p-1)/p n β + (p-1)/p n γ

Rank r counts the blocks from its own: i stands for block (r + i) mod p. It begins with s = p partial sums, and in
every round halves them: with h = ceil(s / 2) it gives the sums h..s-1 to rank r + h, to which they are 0..s-h-1, and
adds what rank r - h gives it. The all-gather is the way back. A reduce-scatter sends everything but the own block; an
all-gather receives everything but the own block.

Blocks h..s-1 are neighbours in the buffer but for one wrap at its end: up to two messages a round, both on their way
at once. To turn the buffer first, so that there is no wrap, was not faster from 4 KiB on.

Each element is summed in one place and its bits are handed on, so all ranks end with the same bits.
"""

from collections.abc import Sequence
from typing import Final

from hpcdist.arrays.backend import Array
from hpcdist.arrays.ranges import Range, split
from hpcdist.collectives.reduction import Combine, check_buffer, combiner
from hpcdist.collectives.segments import PostedReceives, check_ranges, check_segment, cut_evenly, join, slots, wait_all
from hpcdist.comm.communicator import Communicator

# What arrives is summed in pieces of this while the rest arrives, in scratch of two of them. Through shared memory
# shorter ones are slower: there the rank that sums is the one that moves the bytes.
SEGMENT_BYTES: Final = 4 << 20


def circulant_allreduce(
    comm: Communicator, buffer: Array, op: str = "sum", *, segment_bytes: int = SEGMENT_BYTES
) -> None:
    """Reduce ``buffer`` in place to the same bits on every rank. Collective over ``comm``."""
    combine = combiner(buffer, op)
    check_segment(segment_bytes)
    blocks = _from_own(comm, split(buffer.size, comm.size, buffer.itemsize))
    _reduce(comm, buffer, blocks, combine, segment_bytes)
    _gather(comm, buffer, blocks)


def reduce_scatter(
    comm: Communicator, buffer: Array, ranges: Sequence[Range], op: str = "sum", *, segment_bytes: int = SEGMENT_BYTES
) -> None:
    """Reduce in place: afterwards ``buffer[ranges[rank]]`` is the result, the rest undefined. Collective over ``comm``.

    ``ranges`` are one for each rank, the same on every rank; any may be empty.
    """
    combine = combiner(buffer, op)
    check_ranges(comm, buffer, ranges)
    check_segment(segment_bytes)
    _reduce(comm, buffer, _from_own(comm, ranges), combine, segment_bytes)


def all_gather(comm: Communicator, buffer: Array, ranges: Sequence[Range]) -> None:
    """Give ``buffer[ranges[rank]]`` to all and fill the other ranges, in place. Collective over ``comm``.

    ``ranges`` are one for each rank, the same on every rank; any may be empty. Any dtype: nothing is computed.
    """
    check_buffer(buffer)
    check_ranges(comm, buffer, ranges)
    _gather(comm, buffer, _from_own(comm, ranges))


def _from_own(comm: Communicator, ranges: Sequence[Range]) -> list[Range]:
    """Return the ranges of all ranks, counted from the own one on."""
    return [ranges[(comm.rank + index) % comm.size] for index in range(comm.size)]


def _rounds(size: int) -> list[tuple[int, int]]:
    """Return (partial sums before, after) of every round: size, ceil(size / 2), ... 1."""
    rounds = []
    while size > 1:
        rounds.append((size, -(-size // 2)))
        size = rounds[-1][1]
    return rounds


def _reduce(comm: Communicator, buffer: Array, blocks: Sequence[Range], combine: Combine, segment_bytes: int) -> None:
    """Halve the partial sums until only the own block is left."""
    # Sums after..before-1 leave; the rank `after` behind sends as many, for which this rank is `after` ahead: to it
    # they are sums 0..before-after-1. So a rank's outgoing runs are the receiver's targets, and both cut them alike.
    for before, after in _rounds(comm.size):
        to, source = (comm.rank + after) % comm.size, (comm.rank - after) % comm.size
        outgoing = [
            piece for run in join(blocks[after:before]) for piece in cut_evenly(run, buffer.itemsize, segment_bytes)
        ]
        targets = [
            piece for run in join(blocks[: before - after]) for piece in cut_evenly(run, buffer.itemsize, segment_bytes)
        ]
        arrivals = slots("circulant", targets, buffer.dtype, buffer)
        if len(outgoing) == len(targets) == 1:  # no wrap at the end of the buffer, and no pipeline
            comm.sendrecv(buffer[outgoing[0].slice], to, arrivals[0], source)
            combine(arrivals[0], buffer[targets[0].slice], buffer[targets[0].slice])
            continue
        inbox = PostedReceives(comm, source, arrivals)
        sends = [comm.isend(buffer[piece.slice], to) for piece in outgoing]
        for piece in targets:
            combine(inbox.take(), buffer[piece.slice], buffer[piece.slice])
        wait_all(sends)


def _gather(comm: Communicator, buffer: Array, blocks: Sequence[Range]) -> None:
    """Double the finished blocks, from the own one on, until all are there."""
    for before, after in reversed(_rounds(comm.size)):
        to, source = (comm.rank - after) % comm.size, (comm.rank + after) % comm.size
        outgoing, missing = join(blocks[: before - after]), join(blocks[after:before])
        if len(outgoing) == len(missing) == 1:
            comm.sendrecv(buffer[outgoing[0].slice], to, buffer[missing[0].slice], source)
            continue
        requests = [comm.irecv(buffer[run.slice], source) for run in missing]
        requests += [comm.isend(buffer[run.slice], to) for run in outgoing]
        wait_all(requests)
