"""The lock-step parameter server ("bsp"): all workers make every step together, like one process.

    worker   FORWARD BACKWARD PUSH ...           AGREE                                       PULL ...
    server                        COLLECT ...    AGREE  DIRECTION (NORMS) APPLY  PUBLISH ...

A gradient is pushed as soon as the backward pass has completed it. A server adds the pushed gradients in the order of
the workers' ranks, whatever arrives first. So a step has the same bits in every run, for any number of servers, both
placements and all transports. The norm for clipping is an exception: partial sums depend on the cut.

With logical shards (`hpcdist.strategies.core.logical_shards`), a step has the bits of an allreduce with equally many
shards, on any number of workers and servers. A worker adds the gradients of each shard to partial sums (ADD), and
pushes the partial sums after the last shard. Servers complete the tree (`transport.ShardTree`). A worker pushes k Psi,
with k = 1 if the number of shards of the worker is a power of two.

The transport sends gradients and parameters: `messages`, `shared_memory` or `rma`. Values that all ranks agree on are
sent by the MPI library if ``communication.algorithm`` is native, otherwise by counted messages.

With Psi bytes of parameters, a dedicated worker pushes Psi and pulls Psi per step. A colocated rank keeps the
parameters that it owns: if all p ranks serve, each sends 2 Psi (p-1)/p.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np

from hpcdist.comm.communicator import Communicator
from hpcdist.errors import ConfigurationError
from hpcdist.strategies.compressed.config import SUMMED
from hpcdist.strategies.compressed.reduction import GradientCoder
from hpcdist.strategies.compressed.registry import Compression, compressor
from hpcdist.strategies.core.exchange import Traits
from hpcdist.strategies.core.logical_shards import ALGORITHM, LogicalShards
from hpcdist.strategies.core.operations import Kind, Operation
from hpcdist.strategies.core.rank_context import RankContext
from hpcdist.strategies.core.sharded_update import ShardedUpdate
from hpcdist.strategies.data.exchange import DataExchange
from hpcdist.strategies.data.gatherers import Gatherer
from hpcdist.strategies.data.reducers import Reducer
from hpcdist.strategies.data.residuals import Feedback, Residuals
from hpcdist.strategies.parameter_server.compressed import PayloadTransport
from hpcdist.strategies.parameter_server.messages import MessageTransport, RmaTransport
from hpcdist.strategies.parameter_server.partition import Roles
from hpcdist.strategies.parameter_server.shared_memory import SharedMemoryTransport
from hpcdist.strategies.parameter_server.transport import ServerTopology, Transport

TRANSPORTS: Final[dict[str, Callable[[ServerTopology], Transport]]] = {
    "messages": MessageTransport,
    "shared": SharedMemoryTransport,
    "rma": RmaTransport,
}


class Push(Reducer):
    """Gradient reduction by servers. Workers send gradients, and servers sum the gradients."""

    # With ``shards``, a worker sums the gradients of its micro-batches (ADD) before it sends the sums.

    def __init__(
        self, update: ShardedUpdate, topology: ServerTopology, transport: Transport, shards: LogicalShards | None
    ) -> None:
        super().__init__(update)
        self.topology, self.transport, self._shards = topology, transport, shards
        self._layers = sorted(topology.context.ranges.values(), reverse=True)
        self._messages = {part: [part] for part, _ in topology.messages}
        for layer in self._layers if shards is not None else ():
            self._messages[layer] = [part for part, _ in topology.messages if part.intersect(layer)]
        self.handlers = {Kind.ADD: self.add, Kind.PUSH: self.push, Kind.COLLECT: self.collect}

    def plan(self) -> list[Operation]:
        pushes: list[Operation] = []
        if self.topology.works and self._shards is None:
            pushes = [Operation(Kind.PUSH, range=part) for part, _ in self.topology.messages]
        elif self.topology.works:
            pushes = [Operation(kind, range=layer) for kind in (Kind.ADD, Kind.PUSH) for layer in self._layers]
        return [*pushes, *(Operation(Kind.COLLECT, range=part) for part in self.topology.own)]

    def add(self, op: Operation) -> None:
        """Add the gradients of one micro-batch in ``op.range`` to this worker's partial sums. Local."""
        assert self.transport.partials is not None
        self.transport.partials.add(op.microbatch, op.part)

    def push(self, op: Operation) -> None:
        """Start to send the gradients in ``op.range`` to the servers that own this range."""
        if self._shards is not None:
            self.add(op)
        for part in self._messages[op.part]:
            self.transport.push(part)

    def collect(self, op: Operation) -> None:
        """Receive the gradients of all workers in ``op.range``, which this server owns, and sum them in rank order."""
        self.transport.collect(op.part)


class CodedPush(Push):
    """Gradient reduction by servers that receive compressed gradients."""

    def __init__(
        self, update: ShardedUpdate, topology: ServerTopology, transport: Transport, compression: Compression
    ) -> None:
        super().__init__(update, topology, transport, None)
        assert isinstance(transport, PayloadTransport)
        context, config = topology.context, compression.config
        self._payloads, self._coder, self._warmup_steps = transport, transport.coder, config.warmup_steps
        encoders, encodes = transport.speakers, transport.speaks
        encoder = encoders.index(topology.rank) if encodes else 0
        if compression.name not in SUMMED:  # SUMMED compressors draw equal indices on all ranks
            self._coder.rank = encoder
        if config.error_feedback:
            can_roll_back = context.working is not None  # else a gradient that is not finite ends the run
            parts = context.parts if encodes else ()
            residuals = Residuals(context, encoder, len(encoders), parts, can_roll_back=can_roll_back)
            self.feedback = Feedback(residuals)
            self._coder.feedback = residuals.feedback

    @property
    def is_compressing(self) -> bool:
        """True if gradients are compressed, which starts after the warm-up."""
        return self.update.optimizer.count >= self._warmup_steps

    def begin(self, operations: Sequence[Operation]) -> None:
        super().begin(operations)
        self._coder.step = self.update.optimizer.count
        self._payloads.begin(compresses=self.is_compressing)

    def push(self, op: Operation) -> None:
        self.feedback.is_open = True
        self._payloads.loss_scale = self.update.loss_scale
        super().push(op)

    def collect(self, op: Operation) -> None:
        self._payloads.loss_scale = self.update.loss_scale
        super().collect(op)

    def begin_update(self, scale: float, correction: float) -> float:
        if self._payloads.compresses:
            self._payloads.owes = False
        return super().begin_update(scale, correction)

    def restored(self, state: Mapping[str, Any]) -> None:
        super().restored(state)
        self._payloads.owes = True


class Pull(Gatherer):
    """Gatherer of updated parameters. Servers send the parameters, and workers receive the parameters."""

    def __init__(self, update: ShardedUpdate, topology: ServerTopology, transport: Transport) -> None:
        super().__init__(update)
        self.topology, self.transport = topology, transport
        self._last = next(reversed(self.plan()), None)
        self.handlers = {Kind.PUBLISH: self.publish, Kind.PULL: self.pull}

    def plan(self) -> list[Operation]:
        pulled = [part for part, _ in self.topology.messages] if self.topology.works else []
        return [
            *(Operation(Kind.PUBLISH, range=part) for part in self.topology.own),
            *(Operation(Kind.PULL, range=part) for part in pulled),
        ]

    def publish(self, op: Operation) -> None:
        """Start to send the updated parameters in ``op.range``, which this server owns, to the workers."""
        self.transport.publish(op.part)
        self._settle(op)

    def pull(self, op: Operation) -> None:
        """Receive the updated parameters in ``op.range`` from the server that owns this range."""
        self.transport.pull(op.part)
        self._settle(op)

    def spread(self) -> None:
        super().spread()
        if self._last is None:
            self.transport.settle()

    def _settle(self, op: Operation) -> None:
        if op == self._last:
            self.transport.settle()


class LockStepExchange(DataExchange):
    """Synchronous parameter-server strategy. Construction is collective over the world."""

    # Each pipeline stage and tensor-parallel rank has separate servers.

    def __init__(
        self,
        context: RankContext,
        roles: Roles,
        servers: Communicator | None,  # communicator of the servers, freed by `close`; None on other ranks
        *,
        transport: str = "messages",
        shards: LogicalShards | None = None,
        compression: Compression | None = None,  # compressor of pushed gradients; excludes ``shards``
    ) -> None:
        if transport != "messages" and context.algorithm == "hierarchical":
            raise ConfigurationError(
                f"parameter_server.transport = {transport!r} cannot be used with communication.algorithm = "
                "'hierarchical', in which one worker per node sends the messages of all workers of this node; choose "
                "another communication.algorithm, or set parameter_server.transport = 'messages'"
            )
        self._servers = servers
        comm = context.members.dup("parameters")
        self.topology = topology = ServerTopology(context, roles, comm, 0 if shards is None else shards.count)
        self.transport = TRANSPORTS[transport](topology) if compression is None else _payloads(topology, compression)
        parts = topology.parts(topology.rank) if topology.serves else []
        update = ShardedUpdate(
            self.transport.parameters,
            self.transport.gradients,
            context.build_optimizer(parts),
            parts,
            servers,
            context.agree_algorithm,
            exactly=shards is not None,
            tensor=context.tensor,
        )
        algorithm = context.algorithm if shards is None else ALGORITHM
        sums = "" if shards is None else f"{shards.count} logical shards, arithmetic {shards.arithmetic}"
        traits = Traits(algorithm=algorithm, identical=topology.works, accumulates=shards is None, sums=sums)
        gatherer = Pull(update, topology, self.transport)
        exchanged = update, topology, self.transport
        reducer = Push(*exchanged, shards) if compression is None else CodedPush(*exchanged, compression)
        super().__init__(context, traits, update, reducer, gatherer, update.counted, shards=shards)

    @property
    def loaded_bytes(self) -> int:
        return self.transport.loaded_bytes

    def plan(self) -> list[Operation]:
        update = self.update.plan() if self.topology.serves else []
        return [*self.reducer.plan(), Operation(Kind.AGREE), *update, *self.gatherer.plan()]

    def agree(self, values: np.ndarray) -> np.ndarray:
        self.transport.settle()  # this rank's pushes have arrived
        return super().agree(values)

    def begin_update(self, scale: float) -> None:
        super().begin_update(scale)
        if self.topology.works:
            self.transport.expect()

    def close(self) -> None:
        self.transport.close()
        self.topology.comm.free()
        if self._servers is not None:
            self._servers.free()


def _payloads(topology: ServerTopology, compression: Compression) -> PayloadTransport:
    encoder = compressor(compression.name, compression.config)
    coder = GradientCoder(topology.context.layout, encoder, compression.seed, 0)
    return PayloadTransport(topology, coder, compresses=compression.config.warmup_steps == 0)
