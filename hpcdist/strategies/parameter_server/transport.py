"""How gradients come to servers in lock-step, and parameters to workers: the seam between the steps and the bytes."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final, Protocol

import numpy as np

from hpcdist.arrays.backend import Array
from hpcdist.arrays.ranges import Range, cut
from hpcdist.arrays.store import FlatStore
from hpcdist.collectives.reduction import ufunc
from hpcdist.collectives.workspace import scratch
from hpcdist.comm.communicator import Communicator
from hpcdist.strategies.parameter_server.keys import Partition, partition
from hpcdist.strategies.parameter_server.roles import Roles
from hpcdist.strategies.parameter_server.tree import Partials, Tree, slots_of
from hpcdist.strategies.seat import Seat

GRADIENT: Final = 0  # tags; messages of one tag stay in the order of the plan, which all ranks share
PARAMETER: Final = 1
SUM: Final = 2  # from a server to its mirror

BLOCK_BYTES: Final = 64 << 10  # of a sum of several buffers: it stays in the cache until the last one is added


@dataclass(frozen=True)
class Site:
    """Who works, who serves what, and which of them this rank is. ``comm`` is for gradients and parameters alone.

    ``shards`` logical shards are summed in their fixed tree; 0: gradients are, in the order of the workers.
    """

    seat: Seat
    roles: Roles
    comm: Communicator
    shards: int = 0

    @property
    def rank(self) -> int:
        """This rank of those who work and serve."""
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
    def partition(self) -> Partition:
        """Which server owns what."""
        return partition(self.seat.layout, len(self.roles.servers), within=self.seat.parts)

    @cached_property
    def messages(self) -> list[tuple[Range, int]]:
        """Each range that travels as one, and the rank that owns it, as backward completes them."""
        found = self.partition.messages(self.seat.ranges)
        return [(part, self.roles.servers[index]) for part, index in found]

    @cached_property
    def owners(self) -> dict[Range, int]:
        """The rank that owns a range, by range."""
        return dict(self.messages)

    @cached_property
    def own(self) -> list[Range]:
        """What of `messages` this rank serves."""
        return [part for part, server in self.messages if server == self.rank]

    def parts(self, server: int) -> list[Range]:
        """Return all that the rank ``server`` owns, ascending."""
        return self.partition.parts(self.roles.servers.index(server))

    @cached_property
    def tree(self) -> Tree | None:
        """The order of the sums, where it is that of logical shards."""
        return Tree(self.shards, len(self.roles.workers)) if self.shards else None

    def brings(self, worker: int) -> int:
        """Return how many addends the rank ``worker`` brings of every range: its gradients, or partial sums."""
        return 1 if self.tree is None else len(self.tree.nodes[self.roles.workers.index(worker)])

    def slots(self, worker: int) -> int:
        """Return how many partial sums of all parameters the rank ``worker`` keeps beside its gradients."""
        if self.tree is None or worker not in self.roles.workers:
            return 0
        return slots_of(self.tree, self.roles.workers.index(worker))

    def partials(self, gradients: FlatStore) -> Partials | None:
        """Return the partial sums of this rank, which keeps them in memory of its own; None where there are none."""
        if not self.works:
            return None
        return self.partials_in(self.rank, gradients, lambda slot: self.seat.store("communication"))

    def partials_in(self, worker: int, gradients: FlatStore, slot: Callable[[int], FlatStore]) -> Partials | None:
        """Return the partial sums of the rank ``worker``; ``slot`` gives the memory of each."""
        if self.tree is None:
            return None
        return Partials(self.tree, self.roles.workers.index(worker), gradients, slot)

    def total(self, addends: Sequence[Array], target: Array) -> None:
        """Put the sum of what all workers bring, one after the other, into ``target``, which may be one of them."""
        if self.tree is None:
            add_in_order(addends, target)
        else:
            self.tree.total(addends, target, lasting=True)


class Transport(Protocol):
    """What carries a step: between `push` and `collect`, and between `publish` and `pull`, the bytes have moved.

    A rank calls these in the order of the plan, and `settle` before it lets others go on: after `agree` nobody reads
    gradients of this step any more, and after the last operation nobody reads parameters of the one before.
    """

    parameters: FlatStore
    gradients: FlatStore  # of a worker; a dedicated server sums here
    partials: Partials | None  # of a worker, where sums follow logical shards: what it pushes then
    loaded_bytes: int  # read so far out of memory that other ranks of the node have written; never part of bytes sent

    def push(self, part: Range) -> None:
        """Give the gradients of ``part``, or their partial sums, to its server; they stay until `settle` (a worker)."""
        ...

    def collect(self, part: Range) -> None:
        """Sum what the workers pushed of an own range, in rank order or in the tree, into ``gradients`` (a server)."""
        ...

    def expect(self) -> None:
        """Take note that new parameters will come in this step (local)."""
        ...

    def publish(self, part: Range) -> None:
        """Give the new values of an own range to the workers (a server)."""
        ...

    def pull(self, part: Range) -> None:
        """Return when the new values of ``part`` are in ``parameters``, or will be after `settle` (a worker)."""
        ...

    def settle(self) -> None:
        """Return when nothing that this rank began is under way any more (local)."""
        ...

    def close(self) -> None:
        """Give back what only the library can free; the stores must not be used afterwards. Collective."""
        ...


def pushed(gradients: FlatStore, partials: Partials | None, part: Range) -> list[Array]:
    """Return what a worker pushes of ``part`` (local)."""
    return [gradients.range(part)] if partials is None else partials.of(part)


def add_in_order(inputs: Sequence[Array], target: Array) -> None:
    """Put ``inputs[0] + inputs[1] + ...``, added in that order, into ``target``, which may be one of them (local)."""
    if len(inputs) == 1:
        if inputs[0] is not target:
            target[...] = inputs[0]
        return
    add = ufunc(target, "sum")
    for block in _blocks(target, len(inputs)):
        left = inputs[0][block.slice]
        # What is one of the inputs may be overwritten by the last sum only.
        partial = scratch("parameter_server.sum", block.size, target.dtype, target) if len(inputs) > 2 else left
        for right in inputs[1:-1]:
            add(left, right[block.slice], partial)
            left = partial
        add(left, inputs[-1][block.slice], target[block.slice])


def _blocks(target: Array, inputs: int) -> Iterator[Range]:
    whole = Range(0, target.size)
    if inputs == 2:
        return iter([whole])
    return cut(whole, BLOCK_BYTES // np.dtype(target.dtype).itemsize)
