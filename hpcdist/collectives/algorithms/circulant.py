"""Circulant reduce-scatter, all-gather and allreduce: the traffic of the ring in log2(p) steps, for any p.

J. L. Träff, arXiv:2410.14234 (2024). With equal blocks:

    reduce_scatter        ceil(log2 p) α + (p-1)/p n β + (p-1)/p n γ
    all_gather            ceil(log2 p) α + (p-1)/p n β
    circulant_allreduce 2 ceil(log2 p) α + 2 (p-1)/p n β + (p-1)/p n γ

Rank r numbers the blocks from its own block: its number i is block (r + i) mod p. It begins with s = p partial sums.
In every round, with h = ceil(s / 2), it sends sums h..s-1 to rank r + h, which numbers them 0..s-h-1. It adds the sums
from rank r - h to its sums, and keeps h sums.
"""

from collections.abc import Sequence
from typing import Final

from hpcdist.arrays.backend import Array
from hpcdist.arrays.ranges import Range, split
from hpcdist.collectives.reduction import Combine, check_buffer, combiner
from hpcdist.collectives.segments import PostedReceives, check_ranges, check_segment, cut_evenly, join, slots, wait_all
from hpcdist.comm.communicator import Communicator

# Received data is summed in pieces of this size while the rest arrives, with scratch for two pieces. Shorter pieces are
# slower through shared memory, where the summing rank also copies the bytes.
SEGMENT_BYTES: Final = 4 << 20


def circulant_allreduce(
    comm: Communicator, buffer: Array, op: str = "sum", *, segment_bytes: int = SEGMENT_BYTES
) -> None:
    """Reduce ``buffer`` in place by the circulant algorithm, with equal bits on every rank. Collective."""
    combine = combiner(buffer, op)
    check_segment(segment_bytes)
    blocks = _from_own(comm, split(buffer.size, comm.size, buffer.itemsize))
    _reduce(comm, buffer, blocks, combine, segment_bytes)
    _gather(comm, buffer, blocks)


def reduce_scatter(
    comm: Communicator, buffer: Array, ranges: Sequence[Range], op: str = "sum", *, segment_bytes: int = SEGMENT_BYTES
) -> None:
    """Reduce ``buffer`` by the circulant algorithm. Rank r gets only the result ``buffer[ranges[r]]``. Collective."""
    combine = combiner(buffer, op)
    check_ranges(comm, buffer, ranges)
    check_segment(segment_bytes)
    _reduce(comm, buffer, _from_own(comm, ranges), combine, segment_bytes)


def all_gather(comm: Communicator, buffer: Array, ranges: Sequence[Range]) -> None:
    """All-gather ``buffer`` by the circulant algorithm. Rank r contributes ``buffer[ranges[r]]``. Collective."""
    check_buffer(buffer)
    check_ranges(comm, buffer, ranges)
    _gather(comm, buffer, _from_own(comm, ranges))


def _from_own(comm: Communicator, ranges: Sequence[Range]) -> list[Range]:
    return [ranges[(comm.rank + index) % comm.size] for index in range(comm.size)]


def _rounds(size: int) -> list[tuple[int, int]]:
    rounds = []  # numbers of partial sums (before, after) each round
    while size > 1:
        rounds.append((size, -(-size // 2)))
        size = rounds[-1][1]
    return rounds


def _reduce(comm: Communicator, buffer: Array, blocks: Sequence[Range], combine: Combine, segment_bytes: int) -> None:
    # Sums after..before-1 leave. The sender, `after` ranks before, sends as many; they are sums 0..before-after-1 here.
    # So the sender's outgoing runs are the receiver's targets, and both split them into equal pieces.
    for before, after in _rounds(comm.size):
        to, source = (comm.rank + after) % comm.size, (comm.rank - after) % comm.size
        outgoing = [
            piece for run in join(blocks[after:before]) for piece in cut_evenly(run, buffer.itemsize, segment_bytes)
        ]
        targets = [
            piece for run in join(blocks[: before - after]) for piece in cut_evenly(run, buffer.itemsize, segment_bytes)
        ]
        arrivals = slots("circulant", targets, buffer.dtype, buffer)
        if len(outgoing) == len(targets) == 1:  # neither a wrap at the end of the buffer nor a pipeline
            comm.sendrecv(buffer[outgoing[0].slice], to, arrivals[0], source)
            combine(arrivals[0], buffer[targets[0].slice], buffer[targets[0].slice])
            continue
        inbox = PostedReceives(comm, source, arrivals)
        sends = [comm.isend(buffer[piece.slice], to) for piece in outgoing]
        for piece in targets:
            combine(inbox.take(), buffer[piece.slice], buffer[piece.slice])
        wait_all(sends)


def _gather(comm: Communicator, buffer: Array, blocks: Sequence[Range]) -> None:
    for before, after in reversed(_rounds(comm.size)):
        to, source = (comm.rank - after) % comm.size, (comm.rank + after) % comm.size
        outgoing, missing = join(blocks[: before - after]), join(blocks[after:before])
        if len(outgoing) == len(missing) == 1:
            comm.sendrecv(buffer[outgoing[0].slice], to, buffer[missing[0].slice], source)
            continue
        requests = [comm.irecv(buffer[run.slice], source) for run in missing]
        requests += [comm.isend(buffer[run.slice], to) for run in outgoing]
        wait_all(requests)
