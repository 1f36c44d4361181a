"""Deterministic sum in a fixed binary tree over numbered addends, independent of the number of ranks.

Floating point addition is not associative, so an allreduce over ranks gives other bits on another number of ranks.
Here the order belongs to the addends, called logical shards: however they are spread, the same ones give the same
bits.

The tree over shards ``0 .. L-1``: a node of more than one shard splits at the largest power of two below its width,
as the hash trees of RFC 6962 (B. Laurie et al., 2013, section 2.1) do. So every aligned block of 2^k shards is a
node: whoever adds up one shard after the other keeps at most log2(L) partial sums, like the digits of a binary
counter, and a rank whose shards are such a block has one in the end. As in any pairwise sum the rounding error grows
with log2(L), not with L (N. J. Higham, "The accuracy of floating point summation", SIAM J. Sci. Comput. 14 (1993)
783-799).

Each of p ranks, p <= L, holds consecutive shards and adds up the largest nodes among them, k of them. Then the buffer
is cut into p chunks; the owner of a chunk gets it of every node, finishes the tree, and hands the result on:

    (k + 1) (p-1) α + (k + 1) (p-1)/p n β + (k p - 1)/p n γ

k is 1 where L/p is a power of two: then the bytes are those of the ring, 2 (p-1)/p n. Else k <= 2 log2(L/p) + 1.

`FixedTree.reduce_scatter` ends where each owner has its chunk, which the caller may cut as it likes: k (p-1)/p n
bytes. Where d ranks make up the buffer and p/d own each chunk, every rank sends to all owners: k (p-1)/d n bytes.
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
from hpcdist.collectives.half_precision import round_into, widen
from hpcdist.collectives.reduction import check_buffer, check_op, ufunc
from hpcdist.collectives.segments import scratch
from hpcdist.comm import checks
from hpcdist.comm.communicator import Communicator
from hpcdist.errors import HpcdistError, UsageError


def shards_of(shards: int, size: int) -> list[Range]:
    """Return the shards that each of ``size`` ranks holds: consecutive, balanced to one; the first get one more."""
    return split(shards, size, itemsize=1, align_bytes=1)


def halves(node: Range) -> tuple[Range, Range]:
    """Return the two nodes below ``node``, which has more than one shard."""
    assert node.size > 1
    middle = node.start + (1 << ((node.size - 1).bit_length() - 1))  # the largest power of two below its size
    return Range(node.start, middle), Range(middle, node.stop)


def nodes_within(shards: int, part: Range) -> list[Range]:
    """Return the largest nodes of the tree over ``shards`` that lie in ``part``, in order: together they are it."""

    def walk(node: Range) -> list[Range]:
        common = node.intersect(part)
        if common == node or not common:
            return [common] if common else []
        left, right = halves(node)
        return walk(left) + walk(right)

    return walk(Range(0, shards))


def tree_sum(values: Sequence[float]) -> float:
    """Return the sum of one number of each shard in the order of the tree (local)."""

    def total(node: Range) -> float:
        if node.size == 1:
            return float(values[node.start])
        left, right = halves(node)
        return total(left) + total(right)

    return total(Range(0, len(values)))


@dataclass(frozen=True)
class _Partial:
    """The sum of one node; ``kept`` when its memory belongs to the tree."""

    node: Range
    total: Array
    kept: bool


class FixedTree:
    """Reduces one buffer of each of ``shards`` logical shards, in the order of the tree, over the ranks of ``comm``.

    Rank r holds the shards ``shards_of(shards, comm.size)[r]``: it calls `add` with each of them in ascending order,
    then `reduce` or `reduce_scatter`, and may begin again. All buffers are of one size and dtype. 16-bit floats are
    summed, and sent, in float32, and rounded once. Partial sums take as many buffers as the number of own shards has
    binary digits at most, and while they are reduced as many more as a rank brings; the memory is kept. Raises
    UsageError for fewer shards than ranks and for an unknown ``op``.
    """

    def __init__(self, comm: Communicator, shards: int, op: str = "sum") -> None:
        if shards < comm.size:
            raise UsageError(f"{shards} logical shards for {comm.size} ranks: each needs one; give {comm.size} or more")
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
        """Take in the buffer of ``shard``, which may change afterwards (local).

        Without ``copy`` it must stay as it is until `reduce`, and is lost: that saves a copy of the last one.
        """
        check_buffer(addend)
        self._check_turn(shard in self._own and shard == self._next, f"shard {shard} is added")
        wide = accumulation_dtype(addend.dtype)
        self._check_size(addend.size)
        self._next += 1
        partial = _Partial(Range(shard, shard + 1), addend, kept=False)
        # As a binary counter carries: while the last partial sum and this one together are a node, they become one.
        while self._partials and self._is_node(joined := Range(self._partials[-1].node.start, partial.node.stop)):
            left = self._partials.pop()
            ufunc(left.total, self._op)(left.total, _as(wide, partial.total), left.total)
            self._give_back(partial)
            partial = _Partial(joined, left.total, left.kept)
        if partial.total is addend and (copy or addend.dtype != wide):
            partial = _Partial(partial.node, self._take(addend, wide), kept=True)
            widen(addend, partial.total)
        self._partials.append(partial)

    def reduce(self, buffer: Array) -> None:
        """Overwrite ``buffer`` with the result, the same bits on every rank. Collective over the communicator.

        It may be the array that was added last without a copy.
        """
        chunks = split(buffer.size, self._comm.size, buffer.itemsize)
        self._run("allreduce", buffer, chunks, lambda: all_gather(self._comm, buffer, chunks))

    def reduce_scatter(self, buffer: Array, shares: Sequence[Range]) -> None:
        """Overwrite ``buffer[shares[rank]]`` with the result; the rest is undefined. Collective over the communicator.

        ``shares``, one for each rank and the same on all, are any ranges of the buffer. It may be the array that was
        added last without a copy.
        """
        self._run("reduce_scatter", buffer, shares, lambda: None)

    def _run(self, name: str, buffer: Array, shares: Sequence[Range], then: Callable[[], None]) -> None:
        """Finish the own one of ``shares`` of ``buffer``, then do the rest; and begin again."""
        comm = self._comm

        def described() -> checks.CollectiveCall:
            known = f"{self._shards} shards" + (f", {checks.ranges_fingerprint(shares)}" if name != "allreduce" else "")
            return checks.describe_call(name, "fixed_tree", buffer, self._op, known)

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
        own = buffer[shares[comm.rank].slice]
        rows = self._rows(shares)
        total = self._finish(Range(0, self._shards), rows, own if rows[0].dtype == own.dtype else None)
        if total is not own:
            round_into(own, total)
        then()
        for partial in self._partials:
            self._give_back(partial)
        self._partials.clear()
        self._next = self._own.start
        comm.events.end(token)

    def _rows(self, chunks: Sequence[Range]) -> dict[int, Array]:
        """Return the own chunk of each node that some rank brings, by its first shard; any may be overwritten."""
        comm, own = self._comm, chunks[self._comm.rank]
        rows = {partial.node.start: partial.total[own.slice] for partial in self._partials}
        nothing = Range(0, 0)
        for turn in range(max(map(len, self._nodes))):
            brings = [len(nodes) > turn for nodes in self._nodes]
            mine = self._partials[turn if brings[comm.rank] else 0].total
            sends = [chunk if brings[comm.rank] and peer != comm.rank else nothing for peer, chunk in enumerate(chunks)]
            senders = [peer for peer in range(comm.size) if brings[peer] and peer != comm.rank]
            takes = [nothing] * comm.size
            for place, peer in enumerate(senders):
                takes[peer] = Range(own.size * place, own.size * (place + 1))
            received = scratch(f"fixed tree {turn}", own.size * len(senders), mine.dtype, mine)  # (senders * chunk,)
            if comm.size > 1:
                comm.all_to_all(mine, received, sends, takes)
            rows |= {self._nodes[peer][turn].start: received[takes[peer].slice] for peer in senders}
        return rows

    def _finish(self, node: Range, rows: dict[int, Array], out: Array | None) -> Array:
        """Return the result of ``node``, in ``out`` where it is given and something is left to be computed."""
        if node in self._brought:
            return rows[node.start]
        left, right = (self._finish(half, rows, None) for half in halves(node))
        target = left if out is None else out
        ufunc(target, self._op)(left, right, target)
        return target

    def _is_node(self, wanted: Range) -> bool:
        return nodes_within(self._shards, wanted) == [wanted]

    def _take(self, like: Array, dtype: "np.dtype[Any]") -> Array:
        on = "gpu" if backend.is_device(like) else "cpu"
        return self._free.pop() if self._free else segments.count_in_ledger(backend.empty(like.size, dtype, on))

    def _give_back(self, partial: _Partial) -> None:
        if partial.kept:
            self._free.append(partial.total)

    def _check_turn(self, right: bool, what: str) -> None:
        if not right:
            raise UsageError(
                f"{what} when rank {self._comm.rank} has added {self._next - self._own.start} of its shards "
                f"{self._own.start} to {self._own.stop - 1}; add each once, in ascending order, then call reduce"
            )

    def _check_shares(self, shares: Sequence[Range], size: int) -> None:
        if len(shares) != self._comm.size or any(share.stop > size for share in shares):
            raise UsageError(
                f"shares {[(share.start, share.stop) for share in shares]} of {size} elements for {self._comm.size} "
                "ranks; give one range within the buffer for each rank"
            )

    def _check_size(self, size: int) -> None:
        held = [partial.total.size for partial in self._partials] + [array.size for array in self._free]
        if held and held[0] != size:
            raise UsageError(f"a buffer of {size} elements comes to a tree of {held[0]}; make a tree for each size")


def _as(dtype: "np.dtype[Any]", values: Array) -> Array:
    """Return ``values`` in ``dtype``, in scratch memory where they are of another."""
    if values.dtype == dtype:
        return values
    wide = scratch("fixed tree widened", values.size, dtype, values)
    widen(values, wide)
    return wide
