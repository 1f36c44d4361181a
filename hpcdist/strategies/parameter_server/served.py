"""What exchanges share in which each worker makes steps of its own, and servers answer it: asp, ssp, backup workers.

    worker   FORWARD BACKWARD PUSH ...   AGREE (with itself)   PULL: say that the gradient is complete, wait for values
    server   takes gradients, updates its part, answers with the new values

A worker posts its receives before it says a word, and takes what comes while it waits, so a server that sends values
never waits for a rank that serves it something else: only one that does not run at all (SIGSTOP, a frozen node) holds
up the others, until the deadline names it. A colocated rank serves between its operations only.
"""

import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

import numpy as np

from hpcdist import collectives
from hpcdist.arrays.piece import Piece
from hpcdist.arrays.ranges import Range
from hpcdist.arrays.store import FlatStore
from hpcdist.collectives.workspace import scratch
from hpcdist.comm.communicator import Request
from hpcdist.optim import clip
from hpcdist.strategies.exchange import Handlers, pieces_of
from hpcdist.strategies.overlap import Overlap
from hpcdist.strategies.parameter_server.keys import partition
from hpcdist.strategies.parameter_server.meetings import Meetings
from hpcdist.strategies.parameter_server.notes import SHORTEST_S, Fields, Note, Notes
from hpcdist.strategies.parameter_server.roles import Roles
from hpcdist.strategies.parameter_server.shard import Shard
from hpcdist.strategies.schedule.operations import Kind, Operation
from hpcdist.strategies.seat import Seat
from hpcdist.strategies.zero_config import Degrees

GRADIENT: Final = 0  # tags of the values
PARAMETER: Final = 1


class ServedExchange:
    """One rank of them. ``together``: it is in a meeting; then `agree` is collective over the world, else local.

    A meeting is called once the slowest worker's clock is ``meet_at`` (0: never). ``clock`` is this worker's,
    ``clocks`` are those of all as of the last meeting, ``updates`` what this rank knows of. A subclass says what a
    server does with a push (`_on_push`) and with a worker that pushes no more (`_on_left`), and what a rank keeps of it
    for a checkpoint.
    """

    lock_step = False
    replicas_identical = False
    accumulates = True
    degrees: Degrees | None = None
    gathers: Mapping[int, Sequence[int]] = {}
    keeps_parameters = False
    alternates = False
    ahead = 0
    overlap: Overlap | None = None
    taken = True  # whether the last gradient of this worker was
    staleness = 0  # of that gradient

    def __init__(self, seat: Seat, roles: Roles, serving: Seat) -> None:
        """Collective. ``serving`` is the seat by which a server builds its optimizer."""
        self.seat, self.roles, self.algorithm = seat, roles, seat.algorithm
        self.rank, self._first = seat.world.rank, roles.servers[0]
        self.works = self.rank in roles.workers
        self._values = seat.world.dup("values")
        self._notes = Notes(seat.world.dup("notes"))
        self._notes.answers |= {Note.PUSH: self._on_push, Note.REPLY: self._on_reply, Note.DROP: self._on_drop}
        self.meetings = Meetings(self.rank, roles, self._notes)
        self.meetings.left = self._on_left
        found = partition(seat.layout, len(roles.servers), whole=True)
        self.fullest = found.fullest
        self._messages = [(part, roles.servers[index]) for part, index in found.messages(seat.layout.units)]
        self._owner_of = dict(self._messages)
        self._parts = {rank: found.parts(index) for index, rank in enumerate(roles.servers)}
        own = self._parts.get(self.rank)
        self.shard = None if own is None else Shard(serving, own)
        self.parameters = seat.store("parameters") if self.shard is None or self.works else self.shard.parameters
        self.gradients = seat.store("gradients") if self.shard is None or self.works else self.shard.inbox
        self._pushed: list[Request] = []
        self._expected: dict[int, list[Request]] = {}  # server -> the values that it will send
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

    def attend(self, op: Operation | None = None) -> None:
        """Serve what has come; wait for nothing (local)."""
        self._notes.attend()

    def weigh(self, samples: int, batch: int) -> int:
        """Return by how many samples the gradient of a step is divided, of which this worker has ``samples`` (local).

        ``batch`` are those of all workers together.
        """
        return samples

    def pull(self, op: Operation) -> None:
        """Say that this worker's gradient is complete, and take the new values; serve others meanwhile (local)."""
        raise NotImplementedError

    def _request(self, note: Note, what: Fields, told: Sequence[int]) -> None:
        """Tell the servers ``told`` what this worker wants, and return when all servers have given their values.

        What it has pushed is with them then. Others are served meanwhile.
        """
        for server in self.roles.servers:
            # Posted before the server can send them: a server never waits for a rank that serves it something else.
            self._expected[server] = [] if server == self.rank else self._take_from(server)
        for server in told:
            if server != self.rank:
                self._notes.tell(server, note, what)
        if self.rank in told:
            self._notes.answers[note](self.rank, what)
        while self._expected:
            self._notes.wait(alone=self.shard is None)
        for request in self._pushed:
            request.wait()
        self._pushed.clear()

    @contextmanager
    def unpushed(self) -> Iterator[None]:
        """Take back what was pushed of a step that is given up, and push nothing inside (local).

        The step can be computed again there: gradients must stay as they are until the servers have them, or they
        would be overwritten on their way, and a second push would be taken for that of the next step. Others are
        served until then.
        """
        for server in self.roles.servers:
            if server != self.rank:
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

    def _served(self) -> list[Range]:
        """Return the ranges of the messages that come to this server, in their order."""
        return [part for part, server in self._messages if server == self.rank]

    def _discard(self, worker: int) -> None:
        """Take all that ``worker`` has pushed of a step, and forget it."""
        assert self.shard is not None
        for part in self._served() if worker != self.rank else []:
            own = self.shard.inbox.range(part)
            self._values.recv(scratch("parameter_server.arrived", own.size, own.dtype, own), worker, GRADIENT)

    def _answer(self, worker: int, what: Fields) -> None:
        """Give ``worker`` the values as they are now."""
        assert self.shard is not None
        if worker == self.rank:
            for part in self.shard.parts:
                self.parameters.range(part)[...] = self.shard.parameters.range(part)
            self._on_reply(self.rank, what)
            return
        self._notes.tell(worker, Note.REPLY, what)
        for part in self.shard.parts:
            self._values.send(self.shard.parameters.range(part), worker, PARAMETER)
        self._notes.tidy()

    def _on_push(self, worker: int, what: Fields) -> None:
        raise NotImplementedError

    def _on_left(self, worker: int) -> None:
        raise NotImplementedError

    def _on_drop(self, worker: int, what: Fields) -> None:
        self._discard(worker)

    def _on_reply(self, server: int, what: Fields) -> None:
        for request in self._expected.pop(server):
            request.wait()
        if server == self._first:
            self.updates = what.updates
            self.meetings.called |= what.called
            self._told(what)

    def _told(self, what: Fields) -> None:
        """Take note of what the first server says of this worker's step."""

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
        others = [server for server in self.roles.servers if server != self.rank]
        taken = [request for server in others for request in self._take_from(server)] if self.works else []
        if self.shard is not None:
            workers = [worker for worker in self.roles.workers if worker != self.rank]
            taken += [
                self._values.isend(self.shard.parameters.range(part), worker, PARAMETER)
                for worker in workers
                for part in self.shard.parts
            ]
        for request in taken:
            request.wait()
        if self.works and self.shard is not None:
            for part in self.shard.parts:
                self.parameters.range(part)[...] = self.shard.parameters.range(part)

    def begin(self, operations: Sequence[Operation]) -> None:
        """Nothing has to be known of a list before it runs (local)."""

    def count_samples(self, own: int, samples: int) -> None:
        """Sums over the replicas need no weights (local)."""

    def scaled_by(self, loss_scale: float) -> None:
        """Sums of scaled gradients are scaled sums (local)."""

    def flush(self) -> bool:
        """Nothing is left to be done between steps, nor at the end (local)."""
        return False

    finish = flush

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

    def take(self, initial: FlatStore) -> None:
        """Take over the initial values."""
        self.parameters.copy_from(initial)
        if self.shard is not None:
            self.shard.parameters.copy_from(initial)

    def pieces(self) -> Sequence[Piece]:
        """Return what this rank serves, parameters and optimizer state; a dedicated worker saves nothing."""
        return [] if self.shard is None else pieces_of(self.shard.stores(), self.shard.parts)

    def foresee(self, state: Mapping[str, Any]) -> Collection[str]:
        """Return nothing: every piece has to be there (local)."""
        return ()

    def wanted(self) -> Sequence[Piece]:
        """Return what this rank keeps: all parameters on a worker, and the state of what it serves."""
        kept = pieces_of({"parameters": self.parameters}, self.parameters.parts) if self.works else []
        return [*kept, *self.pieces()]

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take back the clocks."""
        raise NotImplementedError
