"""Base class of parameter servers without lock-step (asp, ssp, backup workers).

  worker   FORWARD BACKWARD PUSH ...   AGREE (alone)   PULL: announce the complete gradient, wait for new values
  server   receives gradients, updates its shard, sends the new values

Sends cannot deadlock: workers post receives early, and serve requests while they wait.
"""

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np

from hpcdist import collectives
from hpcdist.arrays import backend
from hpcdist.arrays.backend import Array
from hpcdist.arrays.piece import Piece
from hpcdist.arrays.ranges import Range
from hpcdist.arrays.store import FlatStore
from hpcdist.collectives.segments import scratch, wait_all
from hpcdist.comm.transport import Request
from hpcdist.optim import norms
from hpcdist.strategies.core.exchange import Exchange, Handlers, Traits, pieces_of
from hpcdist.strategies.core.operations import Kind, Operation
from hpcdist.strategies.core.rank_context import RankContext
from hpcdist.strategies.parameter_server.control_messages import (
    SHORTEST_S,
    ControlChannel,
    ControlFields,
    ControlKind,
    Rendezvous,
)
from hpcdist.strategies.parameter_server.partition import Roles, partition_keys
from hpcdist.strategies.parameter_server.transport import GRADIENT, PARAMETER


def per_push_context(context: RankContext, workers: int) -> RankContext:
    """Return a copy of ``context`` with ``workers`` times as many training steps and warm-up steps.

    Servers update after each push, so the copy counts server updates and not training steps.
    """
    optimizer = replace(context.optimizer, warmup_steps=context.optimizer.warmup_steps * workers)
    return replace(context, optimizer=optimizer, total_steps=context.total_steps * workers)


class ServerShard:
    """Parameters that a server owns, and their optimizer. Local."""

    def __init__(self, context: RankContext, parts: Sequence[Range]) -> None:
        self.parts = parts
        # ``inbox``: memory for received gradients.
        self.parameters, self.inbox = context.store("parameters", parts), context.store("gradients", parts)
        self.optimizer = context.build_optimizer(parts)
        self.busy_s = 0.0  # time spent in updates

    @property
    def updates(self) -> int:
        """Number of updates made, which is the version number of the parameters."""
        return self.optimizer.count

    def step(self, gradients: FlatStore, scale: float, factor: float = 1.0) -> None:
        """Update the parameters with ``scale`` times ``gradients``. Overwrites ``gradients``.

        ``factor``: multiplier of the learning rate.
        """
        start_s = time.perf_counter()
        self.optimizer.begin_step(factor)
        for part in self.parts:
            self.optimizer.direction(part, self.parameters, gradients, scale)
        norms = self.optimizer.partial_norms() if self.optimizer.needs_norms else None
        for part in self.parts:
            self.optimizer.apply(part, self.parameters, gradients, None, norms)
        backend.synchronise(self.parameters.array)  # include GPU time; the answer would wait for it anyway
        self.busy_s += time.perf_counter() - start_s

    def stores(self) -> dict[str, FlatStore]:
        """Return a dict {kind of saved state, such as "parameters": store}."""
        return {"parameters": self.parameters} | {f"optimizer.{n}": s for n, s in self.optimizer.slots.items()}


class AsynchronousServerExchange(Exchange):
    """Base class of parameter-server strategies whose workers make steps independently."""

    # In a rendezvous, such as for a checkpoint, all workers stop between steps. `together` is then True. `clocks` holds
    # each worker's step count at the last rendezvous.

    drops_late = False
    corrects = True
    taken = True  # whether the last gradient of this worker was applied
    staleness = 0  # staleness of that gradient

    def __init__(self, context: RankContext, roles: Roles, serving: RankContext) -> None:
        self.context, self.roles = context, roles
        self.rank, self._first = context.world.rank, roles.servers[0]
        self.works = self.rank in roles.workers
        self._values = context.world.dup("values")
        self._channel = ControlChannel(context.world.dup("notes"))
        self._channel.answers |= {
            ControlKind.PUSH: self._on_push,
            ControlKind.REPLY: self._on_reply,
            ControlKind.DROP: lambda worker, what: self._discard(worker),
        }
        self.meetings = Rendezvous(self.rank, roles, self._channel, self._on_left)
        partition = partition_keys(context.layout, len(roles.servers), whole=True)
        self._messages = [(part, roles.servers[index]) for part, index in partition.messages(context.layout.units)]
        self._owner_of = dict(self._messages)
        self._parts = {rank: partition.parts(index) for index, rank in enumerate(roles.servers)}
        served = self._parts.get(self.rank)
        self.shard = None if served is None else ServerShard(serving, served)
        self.traits = Traits(
            algorithm=context.algorithm,
            lock_step=False,
            serves=self.shard is not None,
            fullest=partition.fullest,
            drops_late=self.drops_late,
            corrects=self.corrects,
        )
        if self.shard is None or self.works:
            self._stores = context.store("parameters"), context.store("gradients")
        else:
            self._stores = self.shard.parameters, self.shard.inbox
        self._pushed: list[Request] = []
        self._expected: dict[int, list[Request]] = {}  # server -> receives of its values
        self._pushes = True  # False while a failed step is recomputed
        self.meet_at, self.together = 0, True
        self.clock, self.updates, self.clocks = 0, 0, [0] * len(roles.workers)
        self.handlers: Handlers = {Kind.PUSH: self.push, Kind.PULL: self.pull, Kind.COLLECT: self.serve}

    @property
    def parameters(self) -> FlatStore:
        """Store of the parameters that a worker computes with, or that a dedicated server owns."""
        return self._stores[0]

    @property
    def gradients(self) -> FlatStore:
        """Store of the gradients that a worker computes, or that a dedicated server receives."""
        return self._stores[1]

    def plan(self) -> list[Operation]:
        if not self.works:
            return []
        pushes = [Operation(Kind.PUSH, range=part) for part, _ in self._messages]
        return [*pushes, Operation(Kind.AGREE), Operation(Kind.PULL, range=Range(0, self.context.layout.size))]

    def attended(self, operations: Sequence[Operation]) -> list[Operation]:
        """Return a list of ``operations``. On a server, add a `serve` after each forward and backward pass."""
        if self.shard is None:
            return list(operations)
        look = [Operation(Kind.COLLECT)]
        return [step for op in operations for step in [op, *(look if op.kind in (Kind.FORWARD, Kind.BACKWARD) else [])]]

    def push(self, op: Operation) -> None:
        """Start to send the gradients of ``op.range`` to the server of this range. Local."""
        server = self._owner_of[op.part]
        if server != self.rank and self._pushes:
            self._pushed.append(self._values.isend(self.gradients.range(op.part), server, GRADIENT))

    def serve(self, op: Operation | None = None) -> None:
        """Handle the requests that have arrived from other ranks, without waiting for further requests. Local."""
        self._channel.serve()

    def weigh(self, samples: int, global_samples: int) -> int:
        """Return the number of samples by which this worker divides its summed gradient. Local.

        ``samples``: number of samples of this worker. ``global_samples``: number of samples of all workers in a step.
        """
        return samples

    def pull(self, op: Operation) -> None:
        """Tell the servers that all gradients of this step were sent. Then receive the new parameters.

        ``op.range`` covers all parameters.
        """
        raise NotImplementedError

    def _request(self, kind: ControlKind, what: ControlFields, servers: Sequence[int]) -> None:
        for server in self.roles.servers:
            # Receives are posted before the request is sent, so a server's send of values never waits.
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
        """Return a context manager in which this rank sends no gradients, to repeat a failed step. Local."""
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
        return [part for part, server in self._messages if server == self.rank]

    def _discard(self, worker: int) -> None:
        assert self.shard is not None
        for part in self._served() if worker != self.rank else []:
            target = self.shard.inbox.range(part)
            self._values.recv(scratch("parameter_server.arrived", target.size, target.dtype, target), worker, GRADIENT)

    def _answer(self, worker: int, what: ControlFields) -> None:
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

    def _on_reply(self, server: int, what: ControlFields) -> None:
        wait_all(self._expected.pop(server))
        if server == self._first:
            self.updates = what.updates
            self.meetings.called |= what.called
            self._told(what)

    def _told(self, what: ControlFields) -> None:
        """Handle ``what``, the first server's reply to this worker. By default, do nothing."""

    def meet(self) -> None:
        """Pause training: wait until all workers have stopped between steps. Collective over the world."""
        self.meetings.meet()
        self.together = True

    def leave(self, clocks: Sequence[int], updates: int, pause_requests: int) -> None:
        """Record the training progress during a pause. ``clocks``: step count of each worker. Local.

        ``updates``: number of server updates. ``pause_requests``: number of control messages that requested pauses.
        """
        self.clocks, self.updates = list(clocks), updates
        self.meetings.settle(pause_requests)

    def plan_rendezvous(self, clock: int) -> None:
        """Plan a pause for the moment when every worker has completed ``clock`` steps. 0 cancels the plan. Local."""
        self.meet_at = clock

    def resume(self) -> None:
        """Resume training on this rank after the pause that `meet` began. Local."""
        self.together = False

    def refresh(self) -> None:
        """During a pause, send the newest parameters from the servers to all workers. Collective over the world."""
        others = [server for server in self.roles.servers if server != self.rank]
        requests = [request for server in others for request in self._take_from(server)] if self.works else []
        if self.shard is not None:
            workers = [worker for worker in self.roles.workers if worker != self.rank]
            requests += [
                self._values.isend(self.shard.parameters.range(part), worker, PARAMETER)
                for worker in workers
                for part in self.shard.parts
            ]
        wait_all(requests)
        if self.works and self.shard is not None:
            for part in self.shard.parts:
                self.parameters.range(part)[...] = self.shard.parameters.range(part)

    def close(self) -> None:
        self._values.free()
        self._channel.close()

    def norm_squared(self) -> float:
        return norms.sum_of_squares(self.gradients, self.gradients.parts)

    def agree(self, values: np.ndarray) -> np.ndarray:
        """Return ``values``. During a pause, sum ``values`` over the world first, which is collective."""
        if self.together:
            collectives.allreduce(self.context.world, values, self.context.agree_algorithm)
        return values

    def applied_gradients(self) -> Iterable[Array]:
        return ()

    def load_initial(self, initial: FlatStore) -> None:
        self.parameters.copy_from(initial)
        if self.shard is not None:
            self.shard.parameters.copy_from(initial)

    def pieces(self) -> Sequence[Piece]:
        return [] if self.shard is None else pieces_of(self.shard.stores(), self.shard.parts)

    def wanted(self) -> Sequence[Piece]:
        parameters = pieces_of({"parameters": self.parameters}, self.parameters.parts) if self.works else []
        return [*parameters, *self.pieces()]

    def restore(self, state: Mapping[str, Any]) -> None:
        raise NotImplementedError
