"""A parameter server without lock-step ("asp"): no worker waits for another.

    worker   FORWARD BACKWARD PUSH ...   AGREE (with itself)   PULL: say that the gradient is complete, wait for values
    server   for each push that comes: one update of its part, then the new values back to that worker

- What is pushed is the mean gradient over the worker's *own* samples, clipped by its own norm, never divided by the
  number of workers. Moments and weight decay live on the servers alone.
- A pull waits for the update of the worker's own push, so it has all of its own pushes (read-my-writes) and those of
  others that the server applied before. Nothing bounds how old a gradient is, and no rate is lowered for its age.
- Servers do not wait for each other: parts of one pull, even of one tensor that is cut over servers, may hold different
  sets of pushes.
- With W workers a run of N steps is N pushes of each, on 1/W of the global batch, so N W updates at each server. The
  learning rate of update u is that of step u / W of N.
- A push carries (worker, clock): one that comes twice is answered but not applied again.

A restored state is bit-equal; what follows is not reproducible. All ranks come together only in a meeting (`meet`).
The deadline of communications holds here too: a dedicated server that waits longer than it for any push ends the job.
A server sends new values before it takes the next push, and a worker takes them as soon as it has pushed: only one that
does not run at all (SIGSTOP, a frozen node) holds up the others, until the deadline names it.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

import numpy as np

from hpcdist import collectives
from hpcdist.arrays.piece import Piece
from hpcdist.arrays.ranges import Range
from hpcdist.arrays.store import FlatStore
from hpcdist.comm.communicator import Request
from hpcdist.optim import clip, rates
from hpcdist.strategies.exchange import Handlers, pieces_of
from hpcdist.strategies.overlap import Overlap
from hpcdist.strategies.parameter_server.keys import partition
from hpcdist.strategies.parameter_server.meetings import Meetings
from hpcdist.strategies.parameter_server.notes import SHORTEST_S, Note, Notes
from hpcdist.strategies.parameter_server.roles import Roles
from hpcdist.strategies.parameter_server.shard import Shard, per_update
from hpcdist.strategies.schedule.operations import Kind, Operation
from hpcdist.strategies.seat import Seat

GRADIENT: Final = 0  # tags of the values
PARAMETER: Final = 1


class AsynchronousExchange:
    """One rank under asp. ``together``: it is in a meeting; then `agree` is collective over the world, else local.

    A meeting is called once the slowest worker's clock is ``meet_at`` (0: never). ``clocks`` are those of the workers
    as of the last meeting; ``updates`` what this rank knows of.
    """

    lock_step = False
    replicas_identical = False
    accumulates = True
    gathers = False
    overlap: Overlap | None = None

    def __init__(self, seat: Seat, roles: Roles) -> None:
        self.seat, self.roles, self.algorithm = seat, roles, seat.algorithm
        self.rank, self._first = seat.world.rank, roles.servers[0]
        self.works = self.rank in roles.workers
        self._values = seat.world.dup("values")
        self._notes = Notes(seat.world.dup("notes"))
        self._notes.answers |= {Note.PUSH: self._on_push, Note.REPLY: self._on_reply, Note.DROP: self._on_drop}
        self.meetings = Meetings(self.rank, roles, self._notes)
        found = partition(seat.layout, len(roles.servers))
        self._messages = [(part, roles.servers[index]) for part, index in found.messages(seat.layout.units)]
        self._owner_of = dict(self._messages)
        self._parts = {rank: found.parts(index) for index, rank in enumerate(roles.servers)}
        own = self._parts.get(self.rank)
        self.shard = None if own is None else Shard(seat, own, roles.workers)
        self._others = [server for server in roles.servers if server != self.rank]
        self.parameters = seat.store("parameters") if self.shard is None or self.works else self.shard.parameters
        self.gradients = seat.store("gradients") if self.shard is None or self.works else self.shard.inbox
        self._pushed: list[Request] = []
        self._expected: dict[int, list[Request]] = {}  # server -> the values that it will send
        self._scale = 1.0
        self._pushes = True
        self.meet_at, self.together = 0, True
        self.clock, self.updates, self.clocks = 0, 0, [0] * len(roles.workers)
        self.carries_out: Handlers = {Kind.PUSH: self.push, Kind.PULL: self.pull, Kind.COLLECT: self.attend}

    def plan(self) -> list[Operation]:
        """Return what a worker does; a dedicated server has no steps, it waits in `meet`."""
        if not self.works:
            return []
        pushes = [Operation(Kind.PUSH, range=part) for part, _ in self._messages]
        return [*pushes, Operation(Kind.AGREE), Operation(Kind.PULL, range=Range(0, self.seat.layout.size))]

    def attended(self, operations: Sequence[Operation]) -> list[Operation]:
        """Return ``operations`` with, on a colocated rank, a look at what has come behind each that computes."""
        if self.shard is None:
            return list(operations)
        look = [Operation(Kind.COLLECT)]
        return [each for op in operations for each in [op, *(look if op.kind in (Kind.FORWARD, Kind.BACKWARD) else [])]]

    def push(self, op: Operation) -> None:
        """Begin to send the gradients of a range to its server, which does not look at them before `pull` (local)."""
        assert op.range is not None
        server = self._owner_of[op.range]
        if server != self.rank and self._pushes:
            self._pushed.append(self._values.isend(self.gradients.range(op.range), server, GRADIENT))

    def attend(self, op: Operation) -> None:
        """Serve what has come; wait for nothing (local)."""
        self._notes.attend()

    def pull(self, op: Operation) -> None:
        """Have every server apply this rank's gradient, and take the new values; serve others meanwhile (local)."""
        self.meetings.consider()
        self.clock += 1
        for server in self._others:
            # Posted before the server can send them: a server never waits for a rank that serves it something else.
            self._expected[server] = self._take_from(server)
            self._notes.tell(server, Note.PUSH, self.clock, self._scale)
        if self.shard is not None:
            self.shard.update(self.rank, self.clock, self._scale, self.gradients)
            self._updated()
        while self._expected:
            self._notes.wait(alone=self.shard is None)
        for request in self._pushed:
            request.wait()
        self._pushed.clear()
        self._copy_own()

    @contextmanager
    def unpushed(self) -> Iterator[None]:
        """Take back what was pushed of a step that is given up, and push nothing inside (local).

        The step can be computed again there: gradients must stay as they are until the servers have them, or they
        would be overwritten on their way, and a second push would be taken for that of the next step. Others are
        served until then.
        """
        for server in self._others:
            self._notes.tell(server, Note.DROP)
        while not all(request.test() for request in self._pushed):
            self._notes.attend()
            time.sleep(SHORTEST_S)
        self._pushed.clear()
        self._pushes = False
        try:
            yield
        finally:
            self._pushes = True

    def _take_from(self, server: int) -> list[Request]:
        return [self._values.irecv(self.parameters.range(part), server, PARAMETER) for part in self._parts[server]]

    def _copy_own(self) -> None:
        if self.shard is not None:
            for part in self.shard.parts:
                self.parameters.range(part)[...] = self.shard.parameters.range(part)

    def _collect(self, worker: int) -> Shard:
        """Take all that ``worker`` has pushed of a step; return the shard, in whose inbox it is."""
        assert self.shard is not None
        for part, server in self._messages:
            if server == self.rank:
                self._values.recv(self.shard.inbox.range(part), worker, GRADIENT)
        return self.shard

    def _on_drop(self, worker: int, fields: Mapping[str, float]) -> None:
        self._collect(worker)

    def _on_push(self, worker: int, fields: Mapping[str, float]) -> None:
        shard = self._collect(worker)
        shard.update(worker, int(fields["clock"]), fields["scale"], shard.inbox)
        self._updated()
        called = int(self.meetings.called)
        self._notes.tell(worker, Note.REPLY, int(fields["clock"]), updates=shard.updates, called=called)
        for part in shard.parts:
            self._values.send(shard.parameters.range(part), worker, PARAMETER)
        self._notes.tidy()

    def _updated(self) -> None:
        """Look after an update whether a meeting is due."""
        assert self.shard is not None
        if self.rank == self._first:
            self.updates = self.shard.updates
            self.meetings.called |= 0 < self.meet_at <= min(self.shard.clocks.values())
        self.meetings.consider()

    def _on_reply(self, server: int, fields: Mapping[str, float]) -> None:
        for request in self._expected.pop(server):
            request.wait()
        if server == self._first:
            self.updates = int(fields["updates"])
            self.meetings.called |= bool(fields["called"])

    def meet(self) -> None:
        """Push no more, and return when no worker does. Collective over the world; a dedicated server serves here."""
        self.meetings.meet()
        self.together = True

    def adjourn(self, clocks: Sequence[int], updates: int, calls: int) -> None:
        """Take note of what the meeting found out: clocks of the workers, updates, calls that were sent (local)."""
        self.clocks, self.updates = list(clocks), updates
        self.meetings.settle(calls)

    def part(self) -> None:
        """End the meeting: every rank goes on by itself (local)."""
        self.together = False

    def refresh(self) -> None:
        """Bring the newest values to all workers. Collective over the world, in a meeting."""
        taken = [request for server in self._others for request in self._take_from(server)] if self.works else []
        if self.shard is not None:
            others = [worker for worker in self.roles.workers if worker != self.rank]
            taken += [
                self._values.isend(self.shard.parameters.range(part), worker, PARAMETER)
                for worker in others
                for part in self.shard.parts
            ]
        for request in taken:
            request.wait()
        if self.works:
            self._copy_own()

    @property
    def learning_rate(self) -> float:
        """Rate of the last update that this rank knows of (local)."""
        seat = per_update(self.seat, len(self.roles.workers))
        return rates.learning_rate(seat.optimizer, max(1, self.updates), seat.total_steps)

    def parameters_at(self, layer: int) -> FlatStore:
        """Return the one store of parameters."""
        return self.parameters

    def gradients_at(self, layer: int) -> FlatStore:
        """Return the one store of gradients."""
        return self.gradients

    def norm_squared(self) -> float:
        """Return the squared norm of the worker's own gradient: a step is agreed with nobody else."""
        return clip.sum_of_squares(self.gradients, self.gradients.parts)

    def agree(self, values: np.ndarray) -> np.ndarray:
        """Sum ``values`` over those who are together: the world in a meeting, this rank alone in a step."""
        if self.together:
            collectives.allreduce(self.seat.world, values, self.seat.agree_algorithm)
        return values

    def agree_losses(self, losses: Sequence[float], values: np.ndarray) -> tuple[float, np.ndarray]:
        """Sum ``losses`` and ``values`` as `agree` does."""
        sums = self.agree(np.concatenate([[sum(losses)], values]))
        return float(sums[0]), sums[1:]

    def begin_update(self, scale: float) -> None:
        """Remember by what the servers shall multiply this rank's gradient."""
        self._scale = scale

    def take(self, initial: FlatStore) -> None:
        """Take over the initial values."""
        self.parameters.copy_from(initial)
        if self.shard is not None:
            self.shard.parameters.copy_from(initial)

    def pieces(self) -> Sequence[Piece]:
        """Return what this rank serves, parameters and optimizer state; a dedicated worker saves nothing."""
        return [] if self.shard is None else pieces_of(self.shard.stores(), self.shard.parts)

    def wanted(self) -> Sequence[Piece]:
        """Return what this rank keeps: all parameters on a worker, and the state of what it serves."""
        kept = pieces_of({"parameters": self.parameters}, self.parameters.parts) if self.works else []
        return [*kept, *self.pieces()]

    def state(self) -> dict[str, Any]:
        """Return the clocks and the number of updates, as of the last meeting; ``count`` for other architectures."""
        return {"count": min(self.clocks), "clocks": self.clocks, "updates": self.updates}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take back the clocks; with another number of workers all go on from the slowest of them."""
        count, workers = int(state["count"]), len(self.roles.workers)
        if len(state.get("clocks", ())) == workers:
            self.clocks, self.updates = [int(clock) for clock in state["clocks"]], int(state["updates"])
        else:
            self.clocks, self.updates = [count] * workers, count * workers
        if self.works:
            self.clock = self.clocks[self.roles.workers.index(self.rank)]
        if self.shard is not None:
            self.shard.clocks = dict(zip(self.roles.workers, self.clocks, strict=True))
            self.shard.optimizer.restore({"count": self.updates})
