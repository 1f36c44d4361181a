"""Base class of parameter servers without lock-step (asp, ssp, backup workers).

Each worker makes steps of its own, and servers answer it:

  worker   FORWARD BACKWARD PUSH ...   AGREE (with itself)   PULL: say that the gradient is complete, wait for values
  server   takes gradients, updates its part, answers with the new values

A worker posts its receives before it sends a control message, and takes what comes while it waits, so a server that
sends values never waits for a rank that serves it something else: only one that does not run at all (SIGSTOP, a
frozen node) holds up the others, until the deadline names it. A colocated rank serves between its operations only.

`ServerShard` is what a server holds: its part of the parameters, whole tensors, and the optimizer's state of them.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np

from hpcdist import collectives
from hpcdist.arrays import backend
from hpcdist.arrays.piece import Piece
from hpcdist.arrays.ranges import Range
from hpcdist.arrays.store import FlatStore
from hpcdist.collectives.segments import scratch, wait_all
from hpcdist.comm.communicator import Request
from hpcdist.optim import norms
from hpcdist.strategies.core.exchange import Exchange, Handlers, pieces_of
from hpcdist.strategies.core.rank_context import RankContext
from hpcdist.strategies.parameter_server.asynchronous.control_messages import (
    SHORTEST_S,
    ControlChannel,
    ControlFields,
    ControlKind,
    Rendezvous,
)
from hpcdist.strategies.parameter_server.partition import Roles, partition_keys
from hpcdist.strategies.parameter_server.transport import GRADIENT, PARAMETER
from hpcdist.strategies.schedule.operations import Kind, Operation


def per_push_context(context: RankContext, workers: int) -> RankContext:
    """Return ``context`` for servers that update ``workers`` times where a lock-step run would once.

    The schedule of the learning rate is that of the steps of a worker: it goes by updates / workers.
    """
    optimizer = replace(context.optimizer, warmup_steps=context.optimizer.warmup_steps * workers)
    return replace(context, optimizer=optimizer, total_steps=context.total_steps * workers)


class ServerShard:
    """Parameters of ``parts`` on a server, and their updates. Nothing here communicates.

    They lie apart from the copy with which a colocated rank computes, so that a gradient is always one of parameters
    that stood still. ``inbox`` takes the gradient of another rank, or the sum of several. Tensors are whole, so
    layer-wise rates need nobody else's norms.
    """

    def __init__(self, context: RankContext, parts: Sequence[Range]) -> None:
        self.parts = parts
        self.parameters, self.inbox = context.store("parameters", parts), context.store("gradients", parts)
        self.optimizer = context.build_optimizer(parts)
        self.busy_s = 0.0  # spent in updates

    @property
    def updates(self) -> int:
        """Number of updates so far: the version of the values."""
        return self.optimizer.count

    def step(self, gradients: FlatStore, scale: float, factor: float = 1.0) -> None:
        """Update by ``scale * gradients`` at ``factor`` times the rate; the parts of ``gradients`` are overwritten."""
        began = time.perf_counter()
        self.optimizer.begin_step(factor)
        for part in self.parts:
            self.optimizer.direction(part, self.parameters, gradients, scale)
        norms = self.optimizer.partial_norms() if self.optimizer.needs_norms else None
        for part in self.parts:
            self.optimizer.apply(part, self.parameters, gradients, None, norms)
        backend.synchronise(self.parameters.array)  # the time of a GPU counts; the answer would wait for it anyway
        self.busy_s += time.perf_counter() - began

    def stores(self) -> dict[str, FlatStore]:
        """Return the stores that a checkpoint keeps of the shard, by kind."""
        return {"parameters": self.parameters} | {f"optimizer.{n}": s for n, s in self.optimizer.slots.items()}


class AsynchronousServerExchange(Exchange):
    """Base of exchanges without lock-step, for one rank; ``together`` while it is in a rendezvous.

    In a rendezvous `agree` is collective over the world, else local. One is called once the slowest worker's clock is
    ``meet_at`` (0: never). ``clock`` is this worker's, ``clocks`` are those of all workers as of the last rendezvous,
    ``updates`` the number of updates that this rank knows of. A subclass defines what a server does with a push
    (`_on_push`) and with a worker that pushes no more (`_on_left`), and what a checkpoint keeps.
    """

    lock_step = False
    replicas_identical = False
    taken = True  # whether the last gradient of this worker was
    staleness = 0  # of that gradient

    def __init__(self, context: RankContext, roles: Roles, serving: RankContext) -> None:
        """Collective. A server builds its optimizer by the context ``serving``."""
        self.context, self.roles, self.algorithm = context, roles, context.algorithm
        self.rank, self._first = context.world.rank, roles.servers[0]
        self.works = self.rank in roles.workers
        self._values = context.world.dup("values")
        self._channel = ControlChannel(context.world.dup("notes"))
        self._channel.answers |= {
            ControlKind.PUSH: self._on_push,
            ControlKind.REPLY: self._on_reply,
            ControlKind.DROP: self._on_drop,
        }
        self.meetings = Rendezvous(self.rank, roles, self._channel, self._on_left)
        partition = partition_keys(context.layout, len(roles.servers), whole=True)
        self.fullest = partition.fullest
        self._messages = [(part, roles.servers[index]) for part, index in partition.messages(context.layout.units)]
        self._owner_of = dict(self._messages)
        self._parts = {rank: partition.parts(index) for index, rank in enumerate(roles.servers)}
        own = self._parts.get(self.rank)
        self.shard = None if own is None else ServerShard(serving, own)
        self.serves_beside = self.shard is not None
        if self.shard is None or self.works:
            self._stores = context.store("parameters"), context.store("gradients")
        else:
            self._stores = self.shard.parameters, self.shard.inbox
        self._pushed: list[Request] = []
        self._expected: dict[int, list[Request]] = {}  # server -> the values that it will send
        self._pushes = True  # False while a step that was given up is computed again
        self.meet_at, self.together = 0, True
        self.clock, self.updates, self.clocks = 0, 0, [0] * len(roles.workers)
        self.handlers: Handlers = {Kind.PUSH: self.push, Kind.PULL: self.pull, Kind.COLLECT: self.serve}

    @property
    def parameters(self) -> FlatStore:
        """The parameters with which a worker computes; a dedicated server's part."""
        return self._stores[0]

    @property
    def gradients(self) -> FlatStore:
        """The gradients that a worker computes; those that a dedicated server takes."""
        return self._stores[1]

    def plan(self) -> list[Operation]:
        """Return the operations of a worker; a dedicated server has no steps, it waits in `meet`."""
        if not self.works:
            return []
        pushes = [Operation(Kind.PUSH, range=part) for part, _ in self._messages]
        return [*pushes, Operation(Kind.AGREE), Operation(Kind.PULL, range=Range(0, self.context.layout.size))]

    def attended(self, operations: Sequence[Operation]) -> list[Operation]:
        """Return ``operations`` with, on a colocated rank, COLLECT behind each that computes."""
        if self.shard is None:
            return list(operations)
        look = [Operation(Kind.COLLECT)]
        return [each for op in operations for each in [op, *(look if op.kind in (Kind.FORWARD, Kind.BACKWARD) else [])]]

    def push(self, op: Operation) -> None:
        """Begin to send the gradients of a range to its server, which does not look at them before `pull` (local)."""
        server = self._owner_of[op.part]
        if server != self.rank and self._pushes:
            self._pushed.append(self._values.isend(self.gradients.range(op.part), server, GRADIENT))

    def serve(self, op: Operation | None = None) -> None:
        """Serve the requests that have come, without waiting (local)."""
        self._channel.serve()

    def weigh(self, samples: int, batch: int) -> int:
        """Return the number of samples by which the gradient of a step is divided: the own ``samples`` (local).

        ``batch`` are those of all workers together.
        """
        return samples

    def pull(self, op: Operation) -> None:
        """Announce the complete gradient, and wait for the new values; serve others meanwhile (local)."""
        raise NotImplementedError

    def _request(self, kind: ControlKind, what: ControlFields, servers: Sequence[int]) -> None:
        """Send a request of this worker to ``servers``, and wait for the values of all servers.

        What it has pushed is with them then. Others are served meanwhile.
        """
        for server in self.roles.servers:
            # Receives are posted before the request leaves: a server that sends the values never waits for this rank.
            self._expected[server] = [] if server == self.rank else self._take_from(server)
        for server in servers:
            if server != self.rank:
                self._channel.tell(server, kind, what)
        if self.rank in servers:
            self._channel.answers[kind](self.rank, what)
        while self._expected:
            self._channel.wait(alone=self.shard is None)
        wait_all(self._pushed)
        self._pushed.clear()

    @contextmanager
    def unpushed(self) -> Iterator[None]:
        """Withdraw the pushes of a step that is given up, and push nothing inside (local).

        The step can be computed again there: gradients must stay as they are until the servers have them, or they
        would be overwritten on their way, and a second push would be taken for that of the next step. Others are
        served until then.
        """
        for server in self.roles.servers:
            if server != self.rank:
                self._channel.tell(server, ControlKind.DROP)
        while not all(request.test() for request in self._pushed):
            self._channel.serve()
            time.sleep(SHORTEST_S)
        self._pushed.clear()
        self._pushes = False
        try:
            yield
        finally:
            self._pushes = True

    def _take_from(self, server: int) -> list[Request]:
        return [self._values.irecv(self.parameters.range(part), server, PARAMETER) for part in self._parts[server]]

    def _served(self) -> list[Range]:
        """Return the ranges of the messages that come to this server, in their order."""
        return [part for part, server in self._messages if server == self.rank]

    def _discard(self, worker: int) -> None:
        """Receive all that ``worker`` has pushed of a step, and drop it."""
        assert self.shard is not None
        for part in self._served() if worker != self.rank else []:
            own = self.shard.inbox.range(part)
            self._values.recv(scratch("parameter_server.arrived", own.size, own.dtype, own), worker, GRADIENT)

    def _answer(self, worker: int, what: ControlFields) -> None:
        """Send the current values to ``worker``."""
        assert self.shard is not None
        if worker == self.rank:
            for part in self.shard.parts:
                self.parameters.range(part)[...] = self.shard.parameters.range(part)
            self._on_reply(self.rank, what)
            return
        self._channel.tell(worker, ControlKind.REPLY, what)
        for part in self.shard.parts:
            self._values.send(self.shard.parameters.range(part), worker, PARAMETER)
        self._channel.tidy()

    def _on_push(self, worker: int, what: ControlFields) -> None:
        raise NotImplementedError

    def _on_left(self, worker: int) -> None:
        raise NotImplementedError

    def _on_drop(self, worker: int, what: ControlFields) -> None:
        self._discard(worker)

    def _on_reply(self, server: int, what: ControlFields) -> None:
        wait_all(self._expected.pop(server))
        if server == self._first:
            self.updates = what.updates
            self.meetings.called |= what.called
            self._told(what)

    def _told(self, what: ControlFields) -> None:
        """Record the reply of the first server to this worker's step."""

    def meet(self) -> None:
        """Stop to push, and wait until all workers have. Collective over the world; a dedicated server serves here."""
        self.meetings.meet()
        self.together = True

    def leave(self, clocks: Sequence[int], updates: int, calls: int) -> None:
        """Record the results of the rendezvous: clocks of the workers, updates, calls that were sent (local)."""
        self.clocks, self.updates = list(clocks), updates
        self.meetings.settle(calls)

    def plan_rendezvous(self, clock: int) -> None:
        """Let the next rendezvous be called once the slowest worker's clock is ``clock``; 0 for none (local)."""
        self.meet_at = clock

    def part(self) -> None:
        """End the rendezvous: every rank goes on by itself (local)."""
        self.together = False

    def refresh(self) -> None:
        """Send the newest values to all workers. Collective over the world, in a rendezvous."""
        others = [server for server in self.roles.servers if server != self.rank]
        taken = [request for server in others for request in self._take_from(server)] if self.works else []
        if self.shard is not None:
            workers = [worker for worker in self.roles.workers if worker != self.rank]
            taken += [
                self._values.isend(self.shard.parameters.range(part), worker, PARAMETER)
                for worker in workers
                for part in self.shard.parts
            ]
        wait_all(taken)
        if self.works and self.shard is not None:
            for part in self.shard.parts:
                self.parameters.range(part)[...] = self.shard.parameters.range(part)

    def close(self) -> None:
        """Free the communicators of values and control messages. Collective over the world, in a rendezvous."""
        self._values.free()
        self._channel.close()

    def norm_squared(self) -> float:
        """Return the squared norm of the worker's own gradient: a step is agreed with nobody else."""
        return norms.sum_of_squares(self.gradients, self.gradients.parts)

    def agree(self, values: np.ndarray) -> np.ndarray:
        """Sum ``values`` over the world in a rendezvous; in a step they are this rank's alone."""
        if self.together:
            collectives.allreduce(self.context.world, values, self.context.agree_algorithm)
        return values

    def load_initial(self, initial: FlatStore) -> None:
        """Load the initial values."""
        self.parameters.copy_from(initial)
        if self.shard is not None:
            self.shard.parameters.copy_from(initial)

    def pieces(self) -> Sequence[Piece]:
        """Return parameters and optimizer state of the served parts; a dedicated worker saves nothing."""
        return [] if self.shard is None else pieces_of(self.shard.stores(), self.shard.parts)

    def wanted(self) -> Sequence[Piece]:
        """Return all parameters on a worker, and the state of the served parts, to be restored."""
        parameters = pieces_of({"parameters": self.parameters}, self.parameters.parts) if self.works else []
        return [*parameters, *self.pieces()]

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore the clocks."""
        raise NotImplementedError
