"""Sums over logical shards in their tree, on a parameter server: the same bits whoever computes and whoever serves.

The tree is that of `hpcdist.collectives.fixed_tree`: an order of the addends, the L logical shards of a step, that no
number of ranks changes. Each of w workers adds up the largest nodes among its own shards, k of them, and pushes those;
the server of a range finishes the tree. k is 1 where L/w is a power of two: then as much is pushed as without shards.
Else k <= 2 log2(L/w) + 1.

A worker keeps at most log2(L/w) + 1 partial sums of all parameters beside its gradients, a server as many of one
message as the workers' nodes have levels above them.
"""

from collections.abc import Callable, Iterable, Iterator

from hpcdist.arrays.backend import Array
from hpcdist.arrays.ranges import Range, cut
from hpcdist.arrays.store import FlatStore
from hpcdist.collectives.fixed_tree import halves, nodes_within, shards_of
from hpcdist.collectives.reduction import ufunc
from hpcdist.collectives.workspace import scratch

BLOCK_BYTES = 64 << 10  # of sums whose addends all lie in memory: partial ones stay in the cache


class Tree:
    """The tree over ``shards`` logical shards, which ``workers`` ranks share out among them. Nothing communicates."""

    def __init__(self, shards: int, workers: int) -> None:
        self.shards = shards
        self.own = shards_of(shards, workers)  # of each worker
        self.nodes = [nodes_within(shards, own) for own in self.own]  # that each worker brings, in order
        self.rounds = max(own.size for own in self.own)  # micro-batches of every worker, the last perhaps empty
        self._brought = {node for nodes in self.nodes for node in nodes}

    def total(self, addends: Iterable[Array], target: Array, *, lasting: bool) -> None:
        """Put the sum of all ``addends``, those of `nodes` one worker after the other, into ``target`` (local).

        ``target`` may be one of them. ``lasting``: they stay as they are; else each does until the second after it.
        """
        if not lasting:
            self._total(iter(addends), target, lasting=False)
            return
        whole = list(addends)
        for block in cut(Range(0, target.size), BLOCK_BYTES // target.itemsize):
            self._total((addend[block.slice] for addend in whole), target[block.slice], lasting=True)

    def _total(self, addends: Iterator[Array], target: Array, *, lasting: bool) -> None:
        add = ufunc(target, "sum")

        def partial(level: int) -> Array:
            return scratch(f"parameter_server.tree {level}", target.size, target.dtype, target)

        def finish(node: Range, level: int) -> Array:
            """Return the sum of ``node``: an addend, or the partial sum of ``level``, below which others wait."""
            if node in self._brought:
                return next(addends)
            left, right = halves(node)
            first = finish(left, level)
            if left in self._brought and right not in self._brought and not lasting:
                partial(level)[...] = first  # more than one comes before it is added
                first = partial(level)
            second = finish(right, level + 1)
            out = target if node.size == self.shards else partial(level)
            add(first, second, out)
            return out

        found = finish(Range(0, self.shards), 0)
        if found is not target:
            target[...] = found


class Partials:
    """The partial sums of one worker, ``index``, of the gradients in ``gradients`` (local).

    ``slot`` makes the memory of one of them, numbered from 0. A partial sum of several shards lies in a slot, and so
    does one shard that others follow; the last one, where it is alone, stays in ``gradients``.
    """

    def __init__(self, tree: Tree, index: int, gradients: FlatStore, slot: Callable[[int], FlatStore]) -> None:
        self._steps, found = _plan(tree, index)
        self._gradients = gradients
        slots = [slot(number) for number in range(slots_of(tree, index))]
        self._lies = [gradients if at is None else slots[at] for at in found]
        self._slots = slots

    def add(self, shard: int, part: Range) -> None:
        """Take in the gradients of ``part`` of own shard ``shard``, counted from 0; beyond the last there are none.

        The others may be overwritten afterwards, those of the last must stay until they are with their server.
        """
        if shard >= len(self._steps):
            return
        depth, joins, stays = self._steps[shard]
        values = self._gradients.range(part)
        if not joins and not stays:
            self._slots[depth].range(part)[...] = values
        for level in range(depth - 1, depth - 1 - joins, -1):
            left = self._slots[level].range(part)
            ufunc(left, "sum")(left, values, left)
            values = left

    def of(self, part: Range) -> list[Array]:
        """Return the partial sums of ``part`` once all own shards are in, in order."""
        return [store.range(part) for store in self._lies]


def slots_of(tree: Tree, index: int) -> int:
    """Return how many slots the worker ``index`` needs."""
    steps, _ = _plan(tree, index)
    return max((depth + 1 for depth, joins, stays in steps if not joins and not stays), default=0)


def _plan(tree: Tree, index: int) -> tuple[list[tuple[int, int, bool]], list[int | None]]:
    """Return what is done with each own shard, and in which slot each node ends; None: where gradients are.

    Partial sums are a stack. A shard comes upon ``depth`` of them and is added to the last one, that to the one before
    it, ``joins`` times in all; or it is put on top, unless it ``stays`` where it is.
    """
    own = tree.own[index]
    steps: list[tuple[int, int, bool]] = []
    stack: list[Range] = []
    for shard in range(own.start, own.stop):
        depth, joins, node = len(stack), 0, Range(shard, shard + 1)
        while stack and nodes_within(tree.shards, joined := Range(stack[-1].start, node.stop)) == [joined]:
            stack.pop()
            node, joins = joined, joins + 1
        stays = not joins and shard + 1 - own.start == tree.rounds
        steps.append((depth, joins, stays))
        stack.append(node)
    assert stack == tree.nodes[index]
    places: list[int | None] = list(range(len(stack)))
    if steps and steps[-1][2]:
        places[-1] = None
    return steps, places
