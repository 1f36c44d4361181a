"""The lock-step parameter server ("bsp"): all workers take every step together, as one process would.

    worker   FORWARD BACKWARD PUSH ...           AGREE                                       PULL ...
    server                        COLLECT ...    AGREE  DIRECTION (NORMS) APPLY  PUBLISH ...

A gradient is pushed as soon as backward has completed it. A server adds what the workers push in the order of their
ranks, whatever the order of arrival, so a step has the same bits in every repetition, for any number of servers, both
placements and all transports (but for the norm by which gradients are clipped, whose partial sums follow the cut).

With logical shards (`hpcdist.strategies.core.logical_shards`) a step has the bits of allreduce with as many shards,
on any number of workers and servers. A worker takes the gradients of a shard into its partial sums (ADD), and pushes
those with the last one; servers finish the tree (`transport.ShardTree`). It pushes k Psi, k = 1 where its number of
shards is a power of two.

How gradients and parameters travel is the transport's: `messages`, `shared_memory` or `rma`. The numbers that all
ranks agree on travel by the MPI library where ``communication.algorithm`` is native, else by counted messages.

With Psi bytes of parameters and p ranks, a dedicated worker pushes Psi and pulls Psi a step: it sends Psi, and its
servers send Psi to it. A colocated rank keeps what it owns: where all p ranks serve, each sends 2 Psi (p-1)/p.
"""

from collections.abc import Callable
from typing import Final

import numpy as np

from hpcdist.comm.communicator import Communicator
from hpcdist.errors import ConfigurationError
from hpcdist.strategies.core.exchange import Handlers
from hpcdist.strategies.core.logical_shards import LogicalShards
from hpcdist.strategies.core.rank_context import RankContext
from hpcdist.strategies.core.sharded_update import ShardedUpdate, ShardedUpdateExchange
from hpcdist.strategies.parameter_server.messages import MessageTransport
from hpcdist.strategies.parameter_server.partition import Roles
from hpcdist.strategies.parameter_server.rma import RmaTransport
from hpcdist.strategies.parameter_server.shared_memory import SharedMemoryTransport
from hpcdist.strategies.parameter_server.transport import ServerTopology, Transport
from hpcdist.strategies.schedule.operations import Kind, Operation

TRANSPORTS: Final[dict[str, Callable[[ServerTopology], Transport]]] = {
    "messages": MessageTransport,
    "shared": SharedMemoryTransport,
    "rma": RmaTransport,
}


class LockStepExchange(ShardedUpdateExchange):
    """Parameter server in lock-step: push, sum in rank order, update, pull. Collective over the world.

    Workers and servers are `RankContext.members`: with a pipeline or tensor axis each place on it has servers of its
    own, and what is called a rank here is one of those. ``servers`` joins the ranks that serve; None on the others.
    ``carry`` makes a transport in the place of the one that is named.
    """

    def __init__(
        self,
        context: RankContext,
        roles: Roles,
        servers: Communicator | None,
        *,
        transport: str = "messages",
        carry: Callable[[ServerTopology], Transport] | None = None,
        shards: LogicalShards | None = None,
    ) -> None:
        super().__init__(context, shards)
        self._servers, self.accumulates = servers, shards is None
        if transport != "messages" and context.algorithm == "hierarchical":
            raise ConfigurationError(
                f"parameter_server.transport = {transport!r} with communication.algorithm = 'hierarchical', where one "
                "worker of a node speaks for all by messages; choose another algorithm, or transport = 'messages'"
            )
        self.topology = ServerTopology(
            context, roles, context.members.dup("parameters"), 0 if shards is None else shards.count
        )
        self.works, self.serves = self.topology.works, self.topology.serves
        self.replicas_identical = self.works
        self.transport = (carry or TRANSPORTS[transport])(self.topology)
        stores = self.transport.parameters, self.transport.gradients
        parts = self.topology.parts(self.topology.rank) if self.serves else []
        self.sharded_update = ShardedUpdate(
            *(*stores, context.build_optimizer(parts), parts, servers, context.agree_algorithm),
            exactly=shards is not None,
            tensor=context.tensor,
        )
        self._within = {part: [part] for part, _ in self.topology.messages}
        for layer in context.ranges.values() if shards is not None else ():
            self._within[layer] = [part for part, _ in self.topology.messages if part.intersect(layer)]
        self._last = self.plan()[-1]
        self.handlers: Handlers = {
            Kind.ADD: self.add,
            Kind.PUSH: self.push,
            Kind.COLLECT: self.collect,
            Kind.PUBLISH: self.publish,
            Kind.PULL: self.pull,
            **self.sharded_update.handlers,
        }

    @property
    def loaded_bytes(self) -> int:
        """Bytes read so far from memory that others of the node wrote; not part of the sent ones (local)."""
        return self.transport.loaded_bytes

    def plan(self) -> list[Operation]:
        """Return the operations of this rank as a worker, as a server, or as both."""
        ranges = [part for part, _ in self.topology.messages] if self.works else []
        own = self.topology.own
        return [
            *(self._pushes() if self.works else []),
            *(Operation(Kind.COLLECT, range=part) for part in own),
            Operation(Kind.AGREE),
            *(self.sharded_update.plan() if self.serves else []),
            *(Operation(Kind.PUBLISH, range=part) for part in own),
            *(Operation(Kind.PULL, range=part) for part in ranges),
        ]

    def _pushes(self) -> list[Operation]:
        """Return PUSH of each message; with logical shards ADD and PUSH of whole layers."""
        if self.shards is None:
            return [Operation(Kind.PUSH, range=part) for part, _ in self.topology.messages]
        layers = sorted(self.context.ranges.values(), reverse=True)
        return [Operation(kind, range=layer) for kind in (Kind.ADD, Kind.PUSH) for layer in layers]

    def add(self, op: Operation) -> None:
        """Add the gradients of a logical shard to the partial sums, before the next one overwrites them (local)."""
        assert self.transport.partials is not None
        self.transport.partials.add(op.microbatch, op.part)

    def push(self, op: Operation) -> None:
        """Begin to send the gradients of a range to their server; they must stay until `agree`."""
        if self.shards is not None:
            self.add(op)
        for part in self._within[op.part]:
            self.transport.push(part)

    def collect(self, op: Operation) -> None:
        """Sum the gradients of an own range over the workers, the first one's first."""
        self.transport.collect(op.part)

    def publish(self, op: Operation) -> None:
        """Begin to send the new values of an own range to the workers."""
        self.transport.publish(op.part)
        self._settle(op)

    def pull(self, op: Operation) -> None:
        """Receive the new values of a range from its server."""
        self.transport.pull(op.part)
        self._settle(op)

    def _settle(self, op: Operation) -> None:
        """Wait for all that is under way, after the last operation of a step."""
        if op == self._last:
            self.transport.settle()

    def agree(self, values: np.ndarray) -> np.ndarray:
        """Sum ``values`` over the world, in place; the pushes of this rank have arrived then. Collective."""
        self.transport.settle()
        return super().agree(values)

    def begin_update(self, scale: float) -> None:
        """Begin the update of the step."""
        super().begin_update(scale)
        if self.works:
            self.transport.expect()

    def spread(self) -> None:
        """Send the parameters of the servers to all workers. Collective over the members."""
        for part in self.topology.own:
            self.transport.publish(part)
        for part, _ in self.topology.messages if self.works else ():
            self.transport.pull(part)
        self.transport.settle()

    def close(self) -> None:
        """Free memory of the transport, and communicators; no step can be made afterwards. Collective over the world.

        The communicator ``servers`` is among them.
        """
        self.transport.close()
        self.topology.comm.free()
        if self._servers is not None:
            self._servers.free()
