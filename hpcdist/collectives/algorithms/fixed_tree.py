"""Deterministic sum in a fixed binary tree over numbered addends, independent of the number of ranks.

The addends are the logical shards ``0 .. L-1``. A tree node is a range of shards, and splits at the largest power of
two below its size (RFC 6962, section 2.1). The rounding error grows with log2(L) (N. J. Higham, SIAM J. Sci. Comput. 14
(1993) 783-799).

Each of p ranks, p <= L, holds consecutive shards and sums the largest nodes among them, at most k nodes. Each rank then
receives 1/p of every node's sum, finishes the tree, and sends the result to all ranks. The time for n bytes is

    (k + 1) (p-1) α + (k + 1) (p-1)/p n β + (k p - 1)/p n γ

k is 1 if L/p is a power of two, else k <= 2 log2(L/p) + 1. `FixedTree.reduce_scatter` sends k (p-1)/p n bytes, or k
(p-1)/d n bytes if p/d ranks own each of d ranges.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hpcdist.arrays import backend
from hpcdist.arrays.backend import Array
from hpcdist.arrays.dtypes import accumulation_dtype, name_of
from hpcdist.arrays.ranges import Range, split
from hpcdist.collectives import segments
from hpcdist.collectives.algorithms.ring import all_gather
from hpcdist.collectives.reduction import check_buffer, check_op, round_into, ufunc, widen
from hpcdist.collectives.segments import scratch
from hpcdist.comm import checks
from hpcdist.comm.communicator import Communicator
from hpcdist.errors import HpcdistError, UsageError


def shards_of(shards: int, size: int) -> list[Range]:
    """Split ``shards`` logical shards (numbered input buffers) among ``size`` ranks. Return one range per rank."""
    return split(shards, size, itemsize=1, align_bytes=1)


def halves(node: Range) -> tuple[Range, Range]:
    """Return (left child, right child) of the tree node ``node``. A tree node is a range of logical shards."""
    assert node.size > 1
    middle = node.start + (1 << ((node.size - 1).bit_length() - 1))  # split at the largest power of two below the size
    return Range(node.start, middle), Range(middle, node.stop)


def nodes_within(shards: int, part: Range) -> list[Range]:
    """Return the shortest list of tree nodes that cover exactly the range ``part`` of ``shards`` logical shards."""

    def walk(node: Range) -> list[Range]:
        common = node.intersect(part)
        if common == node or not common:
            return [common] if common else []
        left, right = halves(node)
        return walk(left) + walk(right)

    return walk(Range(0, shards))


def tree_sum(values: Sequence[float]) -> float:
    """Return the sum of ``values``, one number per logical shard, added in the same order as by `FixedTree`. Local."""

    def total(node: Range) -> float:
        if node.size == 1:
            return float(values[node.start])
        left, right = halves(node)
        return total(left) + total(right)

    return total(Range(0, len(values)))


@dataclass(frozen=True)
class _Partial:
    node: Range
    total: Array
    kept: bool


class FixedTree:
    """Reduction of numbered buffers (logical shards) over ``comm``, in the same order for any number of ranks."""

    # At least as many buffers as ranks, all of equal size and dtype. 16-bit floats are summed and sent in float32.
    def __init__(self, comm: Communicator, shards: int, op: str = "sum") -> None:
        if shards < comm.size:
            raise UsageError(f"{shards} logical shards are too few for {comm.size} ranks; use at least {comm.size}")
        check_op(op)
        self._comm, self._op, self._shards = comm, op, shards
        parts = shards_of(shards, comm.size)
        self._own = parts[comm.rank]
        self._nodes = [nodes_within(shards, part) for part in parts]  # of each rank
        self._brought = {node for nodes in self._nodes for node in nodes}
        self._next = self._own.start
        self._partials: list[_Partial] = []  # of adjacent nodes, in order
        self._free: list[Array] = []

    def add(self, shard: int, addend: Array, *, copy: bool = True) -> None:
        """Add ``addend`` as logical shard number ``shard``. Each rank adds its shards in ascending order. Local."""
        check_buffer(addend)
        self._check_turn(shard in self._own and shard == self._next, f"shard {shard} is added")
        wide = accumulation_dtype(addend.dtype)
        self._check_size(addend.size)
        self._next += 1
        partial = _Partial(Range(shard, shard + 1), addend, kept=False)
        # Carry as in a binary counter: merge the last two partial sums while they form a node.
        while self._partials:
            joined = Range(self._partials[-1].node.start, partial.node.stop)
            if nodes_within(self._shards, joined) != [joined]:
                break
            left = self._partials.pop()
            ufunc(left.total, self._op)(left.total, _as(wide, partial.total), left.total)
            self._give_back(partial)
            partial = _Partial(joined, left.total, left.kept)
        # `copy` False: the caller does not change `addend` until `reduce`, which may overwrite it.
        if partial.total is addend and (copy or addend.dtype != wide):
            partial = _Partial(partial.node, self._take(addend, wide), kept=True)
            widen(addend, partial.total)
        self._partials.append(partial)

    def reduce(self, buffer: Array) -> None:
        """Reduce all ranks' added arrays. Write the result to ``buffer``, e.g. the last added array. Collective."""
        chunks = split(buffer.size, self._comm.size, buffer.itemsize)
        self._run("allreduce", buffer, chunks, lambda: all_gather(self._comm, buffer, chunks))

    def reduce_scatter(self, buffer: Array, shares: Sequence[Range]) -> None:
        """Reduce all ranks' added arrays. Rank r gets only the result ``buffer[shares[r]]``. Collective."""
        self._run("reduce_scatter", buffer, shares, lambda: None)

    def _run(self, name: str, buffer: Array, shares: Sequence[Range], then: Callable[[], None]) -> None:
        comm = self._comm

        def described() -> checks.CollectiveCall:
            extra = f"{self._shards} shards" + (f", {checks.ranges_fingerprint(shares)}" if name != "allreduce" else "")
            return checks.describe_call(name, "fixed_tree", buffer, self._op, extra)

        try:
            check_buffer(buffer)
            self._check_turn(self._next == self._own.stop, "reduce is called")
            self._check_size(buffer.size)
            self._check_shares(shares, buffer.size)
        except HpcdistError as error:
            checks.announce_refusal(comm, described(), error)
            raise
        if comm.checked:
            checks.compare_calls(comm, described())
        op = "fixed_tree_reduce" if name == "allreduce" else f"fixed_tree_{name}"
        token = comm.events.begin(comm.name, op, name_of(buffer.dtype), buffer.size, 0, -1, 0)
        share = buffer[shares[comm.rank].slice]
        rows = self._rows(shares)
        total = self._finish(Range(0, self._shards), rows, share if rows[0].dtype == share.dtype else None)
        if total is not share:
            round_into(share, total)
        then()
        for partial in self._partials:
            self._give_back(partial)
        self._partials.clear()
        self._next = self._own.start
        comm.events.end(token)

    def _rows(self, chunks: Sequence[Range]) -> dict[int, Array]:
        # Returns {first shard of a partial sum: its elements ``chunks[rank]``}.
        comm, share = self._comm, chunks[self._comm.rank]
        rows = {partial.node.start: partial.total[share.slice] for partial in self._partials}
        nothing = Range(0, 0)
        for turn in range(max(map(len, self._nodes))):
            brings = [len(nodes) > turn for nodes in self._nodes]
            mine = self._partials[turn if brings[comm.rank] else 0].total
            sends = [chunk if brings[comm.rank] and peer != comm.rank else nothing for peer, chunk in enumerate(chunks)]
            senders = [peer for peer in range(comm.size) if brings[peer] and peer != comm.rank]
            takes = [nothing] * comm.size
            for index, peer in enumerate(senders):
                takes[peer] = Range(share.size * index, share.size * (index + 1))
            received = scratch(f"fixed tree {turn}", share.size * len(senders), mine.dtype, mine)  # (senders * chunk,)
            if comm.size > 1:
                comm.all_to_all(mine, received, sends, takes)
            rows |= {self._nodes[peer][turn].start: received[takes[peer].slice] for peer in senders}
        return rows

    def _finish(self, node: Range, rows: dict[int, Array], out: Array | None) -> Array:
        if node in self._brought:
            return rows[node.start]
        left, right = (self._finish(half, rows, None) for half in halves(node))
        target = left if out is None else out
        ufunc(target, self._op)(left, right, target)
        return target

    def _take(self, like: Array, dtype: "np.dtype[Any]") -> Array:
        on = "gpu" if backend.is_device(like) else "cpu"
        return self._free.pop() if self._free else segments.count_in_ledger(backend.empty(like.size, dtype, on))

    def _give_back(self, partial: _Partial) -> None:
        if partial.kept:
            self._free.append(partial.total)

    def _check_turn(self, right: bool, wrong_call: str) -> None:
        if not right:
            raise UsageError(
                f"wrong call: {wrong_call} when rank {self._comm.rank} has added {self._next - self._own.start} of its "
                f"shards {self._own.start} to {self._own.stop - 1}; add each shard once in ascending order, then reduce"
            )

    def _check_shares(self, shares: Sequence[Range], size: int) -> None:
        if len(shares) != self._comm.size or any(share.stop > size for share in shares):
            raise UsageError(
                f"the shares {[(share.start, share.stop) for share in shares]} do not fit a buffer of {size} elements "
                f"on {self._comm.size} ranks; pass one range within the buffer for each rank"
            )

    def _check_size(self, size: int) -> None:
        held = [partial.total.size for partial in self._partials] + [array.size for array in self._free]
        if held and held[0] != size:
            raise UsageError(
                f"got a buffer of {size} elements, but this FixedTree sums buffers of {held[0]} elements; make a "
                "FixedTree for each buffer size"
            )


def _as(dtype: "np.dtype[Any]", values: Array) -> Array:
    if values.dtype == dtype:
        return values
    wide = scratch("fixed tree widened", values.size, dtype, values)
    widen(values, wide)
    return wide
