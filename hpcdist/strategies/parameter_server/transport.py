"""The transport protocol of lock-step servers: push and collect gradients, publish and pull parameters.

`ServerTopology` has the workers, the servers with their parts, and the place of this rank. Sums are deterministic: the
same bits in any order of arrival and, over logical shards, on any number of workers and servers.

The tree of `ShardTree` is that of `hpcdist.collectives.algorithms.fixed_tree`: an order of the addends, the L logical
shards of a step, that no number of ranks changes. Each of w workers adds up the largest nodes among its own shards, k
of them, and pushes those; the server of a range finishes the tree. k is 1 where L/w is a power of two: then as much
is pushed as without shards. Else k <= 2 log2(L/w) + 1. A worker keeps at most log2(L/w) + 1 partial sums of all
parameters beside its gradients (`PartialSums`), a server as many of one message as the workers' nodes have levels
above them.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final, Protocol

from hpcdist.arrays.backend import Array
from hpcdist.arrays.ranges import Range, cut
from hpcdist.arrays.store import FlatStore
from hpcdist.collectives.algorithms.fixed_tree import halves, nodes_within, shards_of
from hpcdist.collectives.reduction import ufunc
from hpcdist.collectives.segments import scratch
from hpcdist.comm.communicator import Communicator
from hpcdist.strategies.core.rank_context import RankContext
from hpcdist.strategies.parameter_server.partition import KeyPartition, Roles, partition_keys

BLOCK_BYTES: Final = 64 << 10  # of a sum of several buffers: partial sums stay in the cache


class ShardTree:
    """Fixed tree of sums over ``shards`` logical shards on so many ``workers``. Nothing communicates."""

    def __init__(self, shards: int, workers: int) -> None:
        self.shards = shards
        self.own = shards_of(shards, workers)  # of each worker
        self.nodes = [nodes_within(shards, own) for own in self.own]  # that each worker brings, in order
        self.rounds = max(own.size for own in self.own)  # micro-batches of every worker, the last perhaps empty
        self._brought = {node for nodes in self.nodes for node in nodes}

    def total(self, addends: Iterable[Array], target: Array, *, lasting: bool) -> None:
        """Write the sum of all ``addends``, those of `nodes` one worker after the other, to ``target`` (local).

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

        total = finish(Range(0, self.shards), 0)
        if total is not target:
            target[...] = total


class PartialSums:
    """Partial sums of the worker ``index`` over the gradients of its own logical shards (local).

    ``slot`` makes the memory of one of them, numbered from 0. A partial sum of several shards lies in a slot, and so
    does one shard that others follow; the last one, where it is alone, stays in ``gradients``.
    """

    def __init__(self, tree: ShardTree, index: int, gradients: FlatStore, slot: Callable[[int], FlatStore]) -> None:
        self._steps, places = _plan(tree, index)
        self._gradients = gradients
        slots = [slot(number) for number in range(slots_of(tree, index))]
        self._lies = [gradients if at is None else slots[at] for at in places]
        self._slots = slots

    def add(self, shard: int, part: Range) -> None:
        """Add the gradients of ``part`` of own shard ``shard``, counted from 0; beyond the last, do nothing.

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


def slots_of(tree: ShardTree, index: int) -> int:
    """Return the number of slots that the worker ``index`` needs."""
    steps, _ = _plan(tree, index)
    return max((depth + 1 for depth, joins, stays in steps if not joins and not stays), default=0)


def _plan(tree: ShardTree, index: int) -> tuple[list[tuple[int, int, bool]], list[int | None]]:
    """Return the stack operation of each own shard, and the slot of each node; None: where gradients are.

    Partial sums are a stack. A shard comes upon ``depth`` of them and is added to the last one, that to the one before
    it, ``joins`` times in all; or it is put on top, unless it ``stays`` where it is.
    """
    # As carries in binary counting: two neighbouring nodes of the tree are joined as soon as both are complete, so the
    # stack holds at most one node of each size.
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


GRADIENT: Final = 0  # tags; messages of one tag stay in the order of the plan, which all ranks share
PARAMETER: Final = 1


@dataclass(frozen=True)
class ServerTopology:
    """Workers, servers and their parts; ``comm`` carries gradients and parameters alone.

    ``shards`` logical shards are summed in their fixed tree; 0: gradients are, in the order of the workers.
    """

    context: RankContext
    roles: Roles
    comm: Communicator
    shards: int = 0

    @property
    def rank(self) -> int:
        """Number of this rank among the members."""
        return self.comm.rank

    @property
    def works(self) -> bool:
        """Whether this rank computes."""
        return self.rank in self.roles.workers

    @property
    def serves(self) -> bool:
        """Whether this rank owns parameters."""
        return self.rank in self.roles.servers

    @cached_property
    def partition(self) -> KeyPartition:
        """The owner of each part."""
        return partition_keys(self.context.layout, len(self.roles.servers), within=self.context.parts)

    @cached_property
    def messages(self) -> list[tuple[Range, int]]:
        """Ranges that travel as one message each, with the rank that owns them, as backward completes them."""
        messages = self.partition.messages(self.context.ranges)
        return [(part, self.roles.servers[index]) for part, index in messages]

    @cached_property
    def owners(self) -> dict[Range, int]:
        """Rank that owns a range, by range."""
        return dict(self.messages)

    @cached_property
    def own(self) -> list[Range]:
        """Ranges of `messages` that this rank serves."""
        return [part for part, server in self.messages if server == self.rank]

    def parts(self, server: int) -> list[Range]:
        """Return all ranges that the rank ``server`` owns, ascending."""
        return self.partition.parts(self.roles.servers.index(server))

    @cached_property
    def tree(self) -> ShardTree | None:
        """Tree of the sums, where they follow logical shards."""
        return ShardTree(self.shards, len(self.roles.workers)) if self.shards else None

    def brings(self, worker: int) -> int:
        """Return the number of addends of the rank ``worker`` for every range: its gradients, or partial sums."""
        return 1 if self.tree is None else len(self.tree.nodes[self.roles.workers.index(worker)])

    def slots(self, worker: int) -> int:
        """Return the number of partial sums that the rank ``worker`` keeps beside its gradients."""
        if self.tree is None or worker not in self.roles.workers:
            return 0
        return slots_of(self.tree, self.roles.workers.index(worker))

    def partials(self, gradients: FlatStore) -> PartialSums | None:
        """Return the partial sums of this rank, which keeps them in memory of its own; None where there are none."""
        if not self.works:
            return None
        return self.partials_in(self.rank, gradients, lambda slot: self.context.store("communication"))

    def partials_in(self, worker: int, gradients: FlatStore, slot: Callable[[int], FlatStore]) -> PartialSums | None:
        """Return the partial sums of the rank ``worker``; ``slot`` gives the memory of each."""
        if self.tree is None:
            return None
        return PartialSums(self.tree, self.roles.workers.index(worker), gradients, slot)

    def total(self, addends: Sequence[Array], target: Array) -> None:
        """Write the sum of the workers' ``addends`` to ``target``, which may be one of them."""
        if self.tree is None:
            add_in_order(addends, target)
        else:
            self.tree.total(addends, target, lasting=True)


class Transport(Protocol):
    """Base of transports of gradients from workers to servers (push, collect), and of parameters back (publish, pull).

    A rank calls these in the order of the plan, and `settle` before it lets others go on: after `agree` nobody reads
    gradients of this step any more, and after the last operation nobody reads parameters of the one before. What a
    subclass leaves out does nothing.
    """

    parameters: FlatStore
    gradients: FlatStore  # of a worker; a dedicated server sums here
    partials: PartialSums | None  # of a worker, where sums follow logical shards: what it pushes then
    loaded_bytes: int = 0  # read so far out of memory that other ranks of the node wrote; never part of bytes sent

    def push(self, part: Range) -> None:
        """Send the gradients of ``part``, or their partial sums, to its server; they stay until `settle` (a worker)."""

    def collect(self, part: Range) -> None:
        """Sum the pushes of an own range, in rank order or in the tree, into ``gradients`` (a server)."""

    def expect(self) -> None:
        """Prepare for the new parameters of this step (local)."""
        return

    def publish(self, part: Range) -> None:
        """Send the new values of an own range to the workers (a server)."""

    def pull(self, part: Range) -> None:
        """Receive the new values of ``part`` in ``parameters``; they are there after `settle` (a worker)."""

    def settle(self) -> None:
        """Wait until nothing that this rank began is under way any more (local)."""

    def close(self) -> None:
        """Free windows and shared memory; the stores must not be used afterwards. Collective."""
        return


def pushed(gradients: FlatStore, partials: PartialSums | None, part: Range) -> list[Array]:
    """Return the arrays of ``part`` that a worker pushes (local)."""
    return [gradients.range(part)] if partials is None else partials.of(part)


def add_in_order(inputs: Sequence[Array], target: Array) -> None:
    """Write ``inputs[0] + inputs[1] + ...``, added in that order, to ``target``, which may be one of them (local)."""
    if len(inputs) == 1:
        if inputs[0] is not target:
            target[...] = inputs[0]
        return
    add = ufunc(target, "sum")
    longest = BLOCK_BYTES // target.itemsize if len(inputs) > 2 else max(1, target.size)
    for block in cut(Range(0, target.size), longest):
        left = inputs[0][block.slice]
        # What is one of the inputs may be overwritten by the last sum only.
        partial = scratch("parameter_server.sum", block.size, target.dtype, target) if len(inputs) > 2 else left
        for right in inputs[1:-1]:
            add(left, right[block.slice], partial)
            left = partial
        add(left, inputs[-1][block.slice], target[block.slice])
