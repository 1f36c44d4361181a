"""How gradients come to servers in lock-step, and parameters to workers: the seam between the steps and the bytes."""

from collections.abc import Iterator, Sequence
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
from hpcdist.strategies.seat import Seat

GRADIENT: Final = 0  # tags; messages of one tag stay in the order of the plan, which all ranks share
PARAMETER: Final = 1
SUM: Final = 2  # from a server to its mirror

BLOCK_BYTES: Final = 64 << 10  # of a sum of several buffers: it stays in the cache until the last one is added


@dataclass(frozen=True)
class Site:
    """Who works, who serves what, and which of them this rank is. ``comm`` is for gradients and parameters alone."""

    seat: Seat
    roles: Roles
    comm: Communicator

    @property
    def rank(self) -> int:
        """This rank of the world."""
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
        return partition(self.seat.layout, len(self.roles.servers))

    @cached_property
    def messages(self) -> list[tuple[Range, int]]:
        """Each range that travels as one, and the rank that owns it, as backward completes them."""
        found = self.partition.messages(self.seat.layout.units)
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


class Transport(Protocol):
    """What carries a step: between `push` and `collect`, and between `publish` and `pull`, the bytes have moved.

    A rank calls these in the order of the plan, and `settle` before it lets others go on: after `agree` nobody reads
    gradients of this step any more, and after the last operation nobody reads parameters of the one before.
    """

    parameters: FlatStore
    gradients: FlatStore  # of a worker; a dedicated server sums here
    loaded_bytes: int  # read so far out of memory that other ranks of the node have written; never part of bytes sent

    def push(self, part: Range) -> None:
        """Give the gradients of ``part`` to its server; they must stay until `settle` (a worker)."""
        ...

    def collect(self, part: Range) -> None:
        """Sum the gradients of an own range over the workers, in rank order, into ``gradients`` (a server)."""
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
