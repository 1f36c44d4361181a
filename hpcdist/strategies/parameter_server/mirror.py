"""Server mirror: a second server for every range, which takes the same steps.

So what one server knows is never lost with it.

Server i is mirrored by server i + k, the smallest k with which the two are on different nodes, as far as there are
any. As soon as a server has summed the gradients of a range, it sends the sum to its mirror, which updates parameters
and optimizer state of its own with the same numbers: the factor of clipping is agreed on by all ranks, and the norms
of layer-wise rates by all servers. So the two agree bit for bit after every step.

With Psi bytes of parameters on s servers, each sends Psi/s more a step, keeps Psi/s more of parameters and of
gradients, and twice its optimizer state (AdamW: 4 Psi/s more in all), and takes the time of a second update of that
size, which the workers do not wait for.

`recover` gives a server back what it has lost, and what it has mirrored, from those that have it. That needs its
process: an MPI library without fault tolerance ends the job with the first process that dies, and then only a
checkpoint helps. So what this covers is lost or damaged memory of a server (a store that a check finds wrong), or a
process that somebody has put in the place of a dead one, in a communicator of the same ranks. If a server and its
mirror are lost at once, so is the state of one of them. Where ranks share memory, what a server rebuilds is its own
ranges of the node's one copy: a node whose memory is lost has lost those of all its servers.
"""

from collections.abc import Iterator, Sequence
from typing import Final

from hpcdist.arrays.backend import Array
from hpcdist.arrays.ranges import Range
from hpcdist.collectives.segments import wait_all
from hpcdist.comm.communicator import Communicator, Request
from hpcdist.strategies.core.sharded_update import ShardedUpdate
from hpcdist.strategies.parameter_server.transport import SUM, ServerTopology
from hpcdist.strategies.schedule.operations import Kind, Operation

STATE: Final = SUM + 1  # tag


class Mirror(ShardedUpdate):
    """Copy of another server's part, which is updated as that is; ``own_update`` is that of the own part.

    Construction is collective over ``servers``.
    """

    def __init__(self, topology: ServerTopology, servers: Communicator, own_update: ShardedUpdate) -> None:
        context, ranks = topology.context, topology.roles.servers
        self.topology, self.own_update, self._servers = topology, own_update, servers
        members = servers.nodes().members
        by = shift([node for rank in range(servers.size) for node, ranks in enumerate(members) if rank in ranks])
        index = servers.rank
        self.at = ranks[(index + by) % servers.size]  # where this rank is mirrored
        self.of = ranks[(index - by) % servers.size]  # whom this rank mirrors
        parts = topology.parts(self.of)
        stores = context.store("parameters", parts), context.store("gradients", parts)
        super().__init__(*stores, context.build_optimizer(parts), parts, None, context.agree_algorithm)
        self._messages = [part for part, server in topology.messages if server == self.of]
        self._sent: list[Request] = []
        self._coming: dict[Range, Request] = {}
        self.handlers = {Kind.MIRROR: self.follow}

    def plan(self) -> list[Operation]:
        """Return MIRROR of each range that this rank mirrors."""
        return [Operation(Kind.MIRROR, range=part) for part in self._messages]

    def forward(self, part: Range) -> None:
        """Begin to send the sum of an own range to the mirror; it must stay until `settle`."""
        if part == self.topology.own[0]:
            self._listen()
        self._sent.append(self.topology.comm.isend(self.own_update.gradients.range(part), self.at, SUM))

    def _listen(self) -> None:
        """Post the receives of a step. Those of an abandoned step have come: all ranks had agreed on it."""
        wait_all(self._coming.values())
        self._coming = {
            part: self.topology.comm.irecv(self.gradients.range(part), self.of, SUM) for part in self._messages
        }

    def settle(self) -> None:
        """Wait for the sends."""
        wait_all(self._sent)
        self._sent.clear()

    def follow(self, op: Operation) -> None:
        """Make the update of the mirrored server (local, once its sum is there)."""
        assert op.range is not None
        self._coming.pop(op.range).wait()
        self._norms = self.own_update._norms  # summed over all servers: those of whole tensors
        self.direction(op)
        self.apply(op)

    def recover(self, lost: int) -> None:
        """Send the rank ``lost`` its state, and that which it mirrors. Collective over the servers, between steps."""
        places = self._servers.allgather_object((self.topology.rank, self.at, self.of))
        holder, mirrored = next((at, of) for rank, at, of in places if rank == lost)
        root = next(index for index, (rank, _, _) in enumerate(places) if rank == holder)
        clock = self._servers.broadcast_object(self.optimizer.state(), root)
        if self.topology.rank == holder:
            for array in _state_of(self):
                self.topology.comm.send(array, lost, STATE)
        if self.topology.rank == mirrored:
            for array in _state_of(self.own_update):
                self.topology.comm.send(array, lost, STATE)
        if self.topology.rank == lost:
            for update, source in ((self.own_update, holder), (self, mirrored)):
                for array in _state_of(update):
                    self.topology.comm.recv(array, source, STATE)
                update.optimizer.restore(clock)


def _state_of(update: ShardedUpdate) -> Iterator[Array]:
    """Yield parameters and optimizer state, part by part."""
    for part in update.parts:
        yield update.parameters.range(part)
        for _, store in sorted(update.slots().items()):
            yield store.range(part)


def shift(nodes: Sequence[int]) -> int:
    """Return the distance of every server to its mirror, given the node of each server.

    Of the shifts with the fewest pairs on one node it is the smallest.
    """
    size = len(nodes)

    def together(by: int) -> int:
        return sum(nodes[index] == nodes[(index + by) % size] for index in range(size))

    return min(range(1, size), key=together)
