"""The transport protocol of lock-step servers: push and collect gradients, publish and pull parameters.

`ShardTree` sums L logical shards in the tree of `hpcdist.collectives.algorithms.fixed_tree`. Each of w workers pushes
the sums of the k largest tree nodes within its shards. k = 1 if L/w is a power of two, else k <= 2 log2(L/w) + 1. A
worker keeps at most log2(L/w) + 1 partial sums (`PartialSums`).
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

BLOCK_BYTES: Final = 64 << 10  # block size when several buffers are summed: partial sums stay in the cache


class ShardTree:
    """Binary tree that fixes the order in which gradients of micro-batches are summed. Local."""

    def __init__(self, shards: int, workers: int) -> None:
        self.shards = shards
        self.own = shards_of(shards, workers)  # range of each worker
        self.nodes = [nodes_within(shards, shards_here) for shards_here in self.own]  # nodes pushed by each worker
        self.rounds = max(shards_here.size for shards_here in self.own)  # micro-batches of every worker
        self._brought = {node for nodes in self.nodes for node in nodes}

    def total(self, addends: Iterable[Array], target: Array, *, lasting: bool) -> None:
        """Add up the arrays that all workers sent, and store the sum in ``target``. Local.

        ``addends``: the sent arrays, in rank order. The tree fixes the order of the additions.
        """
        # A yielded array is overwritten after the next two arrays are read. ``target`` may be an addend.
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
            if node in self._brought:
                return next(addends)
            left, right = halves(node)
            first = finish(left, level)
            if left in self._brought and right not in self._brought and not lasting:
                partial(level)[...] = first  # copied: it would be overwritten before its addition
                first = partial(level)
            second = finish(right, level + 1)
            out = target if node.size == self.shards else partial(level)
            add(first, second, out)
            return out

        total = finish(Range(0, self.shards), 0)
        if total is not target:
            target[...] = total


class PartialSums:
    """Partial sums of one worker's gradients over the worker's micro-batches, to be sent to servers. Local.

    The order of the additions is fixed.
    """

    def __init__(self, tree: ShardTree, index: int, gradients: FlatStore, slot: Callable[[int], FlatStore]) -> None:
        self._steps, node_slots = _plan(tree, index)  # index: number of the worker
        self._gradients = gradients
        # slot(n) allocates buffer number n, of the size of ``gradients``
        slots = [slot(number) for number in range(slots_of(tree, index))]
        self._lies = [gradients if at is None else slots[at] for at in node_slots]
        self._slots = slots

    def add(self, microbatch: int, part: Range) -> None:
        """Add the gradients of micro-batch number ``microbatch`` in the flat range ``part`` to the partial sums."""
        if microbatch >= len(self._steps):
            return
        depth, joins, stays = self._steps[microbatch]
        values = self._gradients.range(part)
        if not joins and not stays:
            self._slots[depth].range(part)[...] = values
        for level in range(depth - 1, depth - 1 - joins, -1):
            left = self._slots[level].range(part)
            ufunc(left, "sum")(left, values, left)
            values = left

    def of(self, part: Range) -> list[Array]:
        """Return a list of the partial sums to send for the flat range ``part``. Call it after the last `add`."""
        return [store.range(part) for store in self._lies]


def slots_of(tree: ShardTree, index: int) -> int:
    """Return the number of buffers for partial sums that worker number ``index`` needs.

    ``tree`` fixes the order of the additions.
    """
    steps, _ = _plan(tree, index)
    return max((depth + 1 for depth, joins, stays in steps if not joins and not stays), default=0)


def _plan(tree: ShardTree, index: int) -> tuple[list[tuple[int, int, bool]], list[int | None]]:
    # Returns a worker's additions, one per micro-batch, and the buffer number of each sum to push (None: the gradients
    # themselves). An addition is (number of stored sums, number of these sums to add to the new gradients, True if the
    # gradients are pushed unchanged).
    # As carries in binary counting: neighbouring nodes are joined when both are complete, so the stack holds at most
    # one node of each size.
    shards = tree.own[index]
    steps: list[tuple[int, int, bool]] = []
    stack: list[Range] = []
    for shard in range(shards.start, shards.stop):
        depth, joins, node = len(stack), 0, Range(shard, shard + 1)
        while stack and nodes_within(tree.shards, joined := Range(stack[-1].start, node.stop)) == [joined]:
            stack.pop()
            node, joins = joined, joins + 1
        stays = not joins and shard + 1 - shards.start == tree.rounds
        steps.append((depth, joins, stays))
        stack.append(node)
    assert stack == tree.nodes[index]
    node_slots: list[int | None] = list(range(len(stack)))
    if steps and steps[-1][2]:
        node_slots[-1] = None
    return steps, node_slots


GRADIENT: Final = 0  # message tags; messages of a tag have the order of the plan, equal on all ranks
PARAMETER: Final = 1


@dataclass(frozen=True)
class ServerTopology:
    """Workers and servers of the world, and the parameter ranges that each server owns."""

    context: RankContext
    roles: Roles
    comm: Communicator  # carries only gradients and parameters
    shards: int = 0  # number of micro-batches to sum in a fixed order; 0: each worker pushes one sum

    @property
    def rank(self) -> int:
        return self.comm.rank

    @property
    def works(self) -> bool:
        return self.rank in self.roles.workers

    @property
    def serves(self) -> bool:
        return self.rank in self.roles.servers

    @cached_property
    def partition(self) -> KeyPartition:
        return partition_keys(self.context.layout, len(self.roles.servers), within=self.context.parts)

    @cached_property
    def messages(self) -> list[tuple[Range, int]]:
        """List of (parameter range, server) pairs, one for each gradient message, in sending order."""
        messages = self.partition.messages(self.context.ranges)
        return [(part, self.roles.servers[index]) for part, index in messages]

    @cached_property
    def owners(self) -> dict[Range, int]:
        """Mapping from the parameter range of each gradient message to its server."""
        return dict(self.messages)

    @cached_property
    def own(self) -> list[Range]:
        """List of the parameter ranges whose gradients this rank receives as a server, one per message."""
        return [part for part, server in self.messages if server == self.rank]

    def parts(self, server: int) -> list[Range]:
        """Return a list of all parameter ranges that ``server`` owns, in ascending order."""
        return self.partition.parts(self.roles.servers.index(server))

    @cached_property
    def tree(self) -> ShardTree | None:
        """Tree that fixes the order of gradient additions, or None if each worker sends a single sum per range."""
        return ShardTree(self.shards, len(self.roles.workers)) if self.shards else None

    def brings(self, worker: int) -> int:
        """Return the number of gradient arrays that ``worker`` sends for each parameter range."""
        return 1 if self.tree is None else len(self.tree.nodes[self.roles.workers.index(worker)])

    def slots(self, worker: int) -> int:
        """Return the number of buffers for partial sums that ``worker`` needs."""
        if self.tree is None or worker not in self.roles.workers:
            return 0
        return slots_of(self.tree, self.roles.workers.index(worker))

    def partials(self, gradients: FlatStore) -> PartialSums | None:
        """Return the `PartialSums` of this worker's ``gradients``. None if this rank is no worker or `tree` is None."""
        if not self.works:
            return None
        return self.partials_in(self.rank, gradients, lambda slot: self.context.store("communication"))

    def partials_in(self, worker: int, gradients: FlatStore, slot: Callable[[int], FlatStore]) -> PartialSums | None:
        """Return the `PartialSums` of the ``gradients`` of ``worker``, or None if `tree` is None.

        ``slot(n)``: function that returns buffer number n.
        """
        if self.tree is None:
            return None
        return PartialSums(self.tree, self.roles.workers.index(worker), gradients, slot)

    def total(self, addends: Sequence[Array], target: Array) -> None:
        """Write the sum of the workers' arrays ``addends``, in rank order, to ``target``, which may be an addend."""
        if self.tree is None:
            add_in_order(addends, target)
        else:
            self.tree.total(addends, target, lasting=True)


class Transport(Protocol):
    """Interface of parameter-server transports. All operations that a rank started are complete after `settle`."""

    parameters: FlatStore
    gradients: FlatStore  # a worker's gradients, or a dedicated server's sums
    partials: PartialSums | None  # a worker's partial sums to push, with logical shards
    loaded_bytes: int = 0  # bytes read so far from memory written by other ranks of the node; not counted as sent

    def push(self, part: Range) -> None:
        """On a worker, send the gradients of the range ``part``. These gradients must not change until `settle`."""

    def collect(self, part: Range) -> None:
        """On a server, sum all workers' gradients of ``part``, a range of this server, in a fixed order."""

    def expect(self) -> None:
        """Prepare to receive the new parameters of this step. Local."""
        return

    def publish(self, part: Range) -> None:
        """On a server, send the new parameters of ``part``, a range of this server, to the workers."""

    def pull(self, part: Range) -> None:
        """On a worker, receive the new parameters of the range ``part``. These parameters are valid after `settle`."""

    def settle(self) -> None:
        """Wait until all operations that this rank started are complete. Local."""

    def close(self) -> None:
        """Free RMA windows and shared memory, so `parameters` and `gradients` become invalid. Collective."""
        return


def pushed(gradients: FlatStore, partials: PartialSums | None, part: Range) -> list[Array]:
    """Return a list of the arrays that a worker sends for the flat range ``part``.

    They are arrays of ``partials``, or of ``gradients`` if ``partials`` is None.
    """
    return [gradients.range(part)] if partials is None else partials.of(part)


def add_in_order(inputs: Sequence[Array], target: Array) -> None:
    """Add ``inputs`` in list order, and write the sum to ``target``, which may be one of the inputs. Local."""
    if len(inputs) == 1:
        if inputs[0] is not target:
            target[...] = inputs[0]
        return
    add = ufunc(target, "sum")
    longest = BLOCK_BYTES // target.itemsize if len(inputs) > 2 else max(1, target.size)
    for block in cut(Range(0, target.size), longest):
        left = inputs[0][block.slice]
        # Only the last sum may overwrite an input.
        partial = scratch("parameter_server.sum", block.size, target.dtype, target) if len(inputs) > 2 else left
        for right in inputs[1:-1]:
            add(left, right[block.slice], partial)
            left = partial
        add(left, inputs[-1][block.slice], target[block.slice])
