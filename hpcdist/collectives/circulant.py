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

Blocks h..s-1 are neighbours in the buffer but for one wrap at its end: up to two messages a round. Small buffers are
turned instead, so that the own block is first: a copy is then cheaper than a message.

Each element is summed in one place and its bits are handed on, so all ranks end with the same bits.
"""

from collections.abc import Sequence
from typing import Final

from hpcdist.arrays.backend import Array
from hpcdist.arrays.ranges import Range, split
from hpcdist.collectives.pieces import Inbox, check_ranges, check_segment, cut_evenly, join, slots, wait_all
from hpcdist.collectives.reduction import Combine, check_buffer, combiner
from hpcdist.collectives.workspace import scratch
from hpcdist.comm.communicator import Communicator

TURNED_BYTES: Final = 64 << 10  # up to here a buffer is turned; found by measurement
SEGMENT_BYTES: Final = 512 << 10  # what arrives is summed in pieces of this, while the rest arrives; measured


def circulant_allreduce(
    comm: Communicator, buffer: Array, op: str = "sum", *, segment_bytes: int = SEGMENT_BYTES
) -> None:
    """Reduce ``buffer`` in place to the same bits on every rank. Collective over ``comm``."""
    combine = combiner(buffer, op)
    check_segment(segment_bytes)
    ranges = split(buffer.size, comm.size, buffer.itemsize)
    work, blocks, turned = _arranged(comm, buffer, ranges)
    for block, part in turned:
        work[block.slice] = buffer[part.slice]
    _reduce(comm, work, blocks, combine, segment_bytes)
    _gather(comm, work, blocks)
    for block, part in turned:
        buffer[part.slice] = work[block.slice]


def reduce_scatter(
    comm: Communicator,
    buffer: Array,
    ranges: Sequence[Range],
    op: str = "sum",
    *,
    segment_bytes: int = SEGMENT_BYTES,
) -> None:
    """Reduce in place: afterwards ``buffer[ranges[rank]]`` is the result, the rest undefined. Collective over ``comm``.

    ``ranges`` are one for each rank, the same on every rank; any may be empty.
    """
    combine = combiner(buffer, op)
    check_ranges(comm, buffer, ranges)
    check_segment(segment_bytes)
    work, blocks, turned = _arranged(comm, buffer, ranges)
    for block, part in turned:
        work[block.slice] = buffer[part.slice]
    _reduce(comm, work, blocks, combine, segment_bytes)
    if turned:
        buffer[ranges[comm.rank].slice] = work[blocks[0].slice]


def all_gather(comm: Communicator, buffer: Array, ranges: Sequence[Range]) -> None:
    """Give ``buffer[ranges[rank]]`` to all and fill the other ranges, in place. Collective over ``comm``.

    ``ranges`` are one for each rank, the same on every rank; any may be empty. Any dtype: nothing is computed.
    """
    check_buffer(buffer)
    check_ranges(comm, buffer, ranges)
    work, blocks, turned = _arranged(comm, buffer, ranges)
    if turned:
        work[blocks[0].slice] = buffer[ranges[comm.rank].slice]
    _gather(comm, work, blocks)
    for block, part in turned:
        buffer[part.slice] = work[block.slice]


_Turned = list[tuple[Range, Range]]


def _arranged(comm: Communicator, buffer: Array, ranges: Sequence[Range]) -> tuple[Array, list[Range], _Turned]:
    """Return where to work, the blocks there counted from the own, and for a turned copy (there, in ``buffer``) pairs.

    A pair joins neighbours: two of them for ranges that tile the buffer in the order of the ranks.
    """
    parts = [ranges[(comm.rank + index) % comm.size] for index in range(comm.size)]
    total = sum(part.size for part in parts)
    if comm.size == 1 or total * buffer.itemsize > TURNED_BYTES:
        return buffer, parts, []
    blocks = list(_end_to_end(parts))
    runs = join(parts)
    return (
        scratch("circulant turned", total, buffer.dtype, buffer),
        blocks,
        list(zip(_end_to_end(runs), runs, strict=True)),
    )


def _end_to_end(parts: Sequence[Range]) -> list[Range]:
    """Return ranges as long as ``parts``, one after the other from 0 on."""
    placed, stop = [], 0
    for part in parts:
        placed.append(Range(stop, stop + part.size))
        stop += part.size
    return placed


def _rounds(size: int) -> list[tuple[int, int]]:
    """Return (partial sums before, after) of every round: size, ceil(size / 2), ... 1."""
    rounds = []
    while size > 1:
        rounds.append((size, -(-size // 2)))
        size = rounds[-1][1]
    return rounds


def _reduce(comm: Communicator, work: Array, blocks: Sequence[Range], combine: Combine, segment_bytes: int) -> None:
    """Halve the partial sums until only the own block is left."""
    for before, after in _rounds(comm.size):
        to, source = (comm.rank + after) % comm.size, (comm.rank - after) % comm.size
        given = [piece for run in join(blocks[after:before]) for piece in cut_evenly(run, work.itemsize, segment_bytes)]
        kept = [
            piece for run in join(blocks[: before - after]) for piece in cut_evenly(run, work.itemsize, segment_bytes)
        ]
        arrivals = slots("circulant", kept, work.dtype, work)
        if len(given) == len(kept) == 1:
            comm.sendrecv(work[given[0].slice], to, arrivals[0], source)
            combine(arrivals[0], work[kept[0].slice], work[kept[0].slice])
            continue
        inbox = Inbox(comm, source, arrivals)
        sends = [comm.isend(work[piece.slice], to) for piece in given]
        for piece in kept:
            combine(inbox.take(), work[piece.slice], work[piece.slice])
        wait_all(sends)


def _gather(comm: Communicator, work: Array, blocks: Sequence[Range]) -> None:
    """Double the finished blocks, from the own one on, until all are there."""
    for before, after in reversed(_rounds(comm.size)):
        to, source = (comm.rank - after) % comm.size, (comm.rank + after) % comm.size
        given, missing = join(blocks[: before - after]), join(blocks[after:before])
        if len(given) == len(missing) == 1:
            comm.sendrecv(work[given[0].slice], to, work[missing[0].slice], source)
            continue
        requests = [comm.irecv(work[run.slice], source) for run in missing]
        requests += [comm.isend(work[run.slice], to) for run in given]
        wait_all(requests)
