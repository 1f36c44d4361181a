"""Control messages between workers and servers that are not in lock-step, and their rendezvous.

`ControlChannel` sends and receives the short messages (push complete, reply, call, meet, turn ...), apart from the
values they speak of, and hands each to the handler of its kind.

`Rendezvous` is how such ranks come together, for a checkpoint or to stop. Anybody calls (`call`); the first server
tells every worker with its next values; a worker that knows it, or that has done all its steps, tells every server
that it pushes no more (`meet`), and from then on nobody waits for its clock. A server has a rendezvous when all
workers have told it, so then nothing is under way and all servers have applied the same pushes. A worker that only
computes waits until the first server says that all are there: it enters no collective before, so however long the
others need, no deadline of its own passes and nobody waits for it.
"""

import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import astuple, dataclass, fields
from enum import IntEnum
from typing import Final, TypeAlias

import numpy as np

from hpcdist.comm.communicator import Communicator, Message, Request
from hpcdist.strategies.parameter_server.partition import Roles

SHORTEST_S: Final = 2e-5  # a rank that has other duties does not spin: it looks, and sleeps ever longer
LONGEST_S: Final = 1e-3


class ControlKind(IntEnum):
    """Kind of a control message."""

    PUSH = 0  # worker to server: the gradient for the update to ``clock`` is complete; multiply it by ``scale``
    REPLY = 1  # server to worker: go on at ``clock``; the values follow, after ``updates``. ``called``: let us meet
    CALL = 2  # anybody to the first server: let us meet for the ``clock``-th time
    MEET = 3  # worker to server: I push no more before the meeting
    GATHERED = 4  # first server to a worker that serves nothing: all workers have said so
    DROP = 5  # worker to server: what I have pushed is no gradient, take it and forget it
    READ = 6  # worker to server: I have pushed nothing, but want the values for the iteration of ``clock``
    TURN = 7  # first server to the others: carry out this `Turn`, of ``workers``
    NORM = 8  # server to server: ``scale`` is the squared norm of my part of the sum for ``clock``


@dataclass(frozen=True, slots=True)
class ControlFields:
    """Fields of a control message. ``workers`` stand behind the other fields, as many as there are."""

    clock: int = 0
    scale: float = 1.0
    updates: int = 0
    called: bool = False
    samples: int = 0  # PUSH: of the gradient
    divisor: int = 1  # PUSH: the samples by which it is divided
    staleness: int = 0  # REPLY: of the gradient that was applied
    dropped: bool = False  # REPLY, TURN: the gradient was not taken
    workers: tuple[int, ...] = ()


ALONE: Final = len(fields(ControlFields))  # numbers of a note of no workers, with its kind
ControlHandler: TypeAlias = Callable[[int, ControlFields], None]  # called with the sender
ControlMessage: TypeAlias = tuple[ControlKind, int, ControlFields]  # with the sender


class ControlChannel:
    """The notes of one rank: each that arrives goes to the answer for its kind (local)."""

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self.answers: dict[ControlKind, ControlHandler] = {}
        self._sent: list[Request] = []
        self._held: deque[ControlMessage] = deque()  # those that came while another kind was waited for

    def tell(self, peer: int, note: ControlKind, what: ControlFields = ControlFields()) -> None:
        """Begin to send a note."""
        self.tidy()
        *single, workers = astuple(what)
        self._sent.append(self._comm.isend(np.array([note, *single, *workers], np.float64), peer))

    def tidy(self) -> None:
        """Close what has been sent, so that no deadline is held against it."""
        self._sent = [request for request in self._sent if not request.test()]

    def serve(self) -> None:
        """Answer the notes that have come; wait for none."""
        while (letter := self._next()) is not None:
            self._answer(letter)

    def wait(self, *, alone: bool, look: Callable[[], None] = lambda: None) -> None:
        """Wait for a note and answer it.

        A rank that is ``alone`` on its core waits as any receive does: in one operation, that has a deadline. Else it
        leaves the core to others, has no deadline, and calls ``look`` all the while.
        """
        if alone:
            self._answer(self._held.popleft() if self._held else _read(self._comm.probe()))
            return
        pause = SHORTEST_S
        while (letter := self._next()) is None:
            self.tidy()
            look()
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_S)
        self._answer(letter)

    def take(self, wanted: ControlKind) -> None:
        """Wait for a note of the kind ``wanted`` and answer it; what else comes is answered later, in its order."""
        while (letter := _read(self._comm.probe()))[0] is not wanted:
            self._held.append(letter)
        self._answer(letter)

    def settle(self) -> None:
        """Return when all notes of this rank have been taken: after a meeting they are, or will be without more."""
        for request in self._sent:
            request.wait()
        self._sent.clear()

    def _next(self) -> ControlMessage | None:
        """Return the next note, None where none has come."""
        if self._held:
            return self._held.popleft()
        message = self._comm.poll()
        return None if message is None else _read(message)

    def _answer(self, letter: ControlMessage) -> None:
        note, sender, what = letter
        self.answers[note](sender, what)


def _read(message: Message) -> ControlMessage:
    values = np.zeros(message.nbytes // np.dtype(np.float64).itemsize)
    message.recv(values)
    note, clock, scale, updates, called, samples, divisor, staleness, dropped = values[:ALONE].tolist()
    what = ControlFields(
        clock=int(clock),
        scale=scale,
        updates=int(updates),
        called=bool(called),
        samples=int(samples),
        divisor=int(divisor),
        staleness=int(staleness),
        dropped=bool(dropped),
        workers=tuple(int(worker) for worker in values[ALONE:]),
    )
    return ControlKind(int(note)), message.source, what


LOOK_S: Final = 0.5  # how often a rank that waits for a meeting asks whether it wants the others to come earlier


class Rendezvous:
    """The meetings of one rank. ``wants`` tells whether it wishes for one, ``called`` that it was told to come to one.

    ``due``, on the first server, is what it tells with the values that it gives. ``meanwhile`` is called every now and
    then on a worker that waits for the others to come, ``left`` on a server with each worker that pushes no more.
    """

    def __init__(self, rank: int, roles: Roles, notes: ControlChannel) -> None:
        self._rank, self._roles, self._notes = rank, roles, notes
        self._first, self._serves, self._works = roles.servers[0], rank in roles.servers, rank in roles.workers
        notes.answers |= {
            ControlKind.CALL: self._on_call,
            ControlKind.MEET: self._on_meet,
            ControlKind.GATHERED: self._on_gathered,
        }
        self.wants: Callable[[], bool] = lambda: False
        self.meanwhile: Callable[[], None] = lambda: None
        self.left: Callable[[int], None] = lambda worker: None
        self.called = self.due = False
        self.calls = 0  # that this rank has sent, since the start
        self._held = 0  # meetings
        self._taken: Counter[int] = Counter()  # calls received, by the meetings that their sender had held
        self._here: set[int] = set()  # workers that push no more
        self._gathered = self._has_called = False
        self._looked = 0.0

    def consider(self) -> None:
        """Call a meeting when this rank wishes for one (local)."""
        if self.wants():
            self.call()

    def call(self) -> None:
        """Call a meeting (local)."""
        if self._rank == self._first:
            self.due = True
        elif not self._has_called:
            self._has_called = True
            self.calls += 1
            self._notes.tell(self._first, ControlKind.CALL, ControlFields(clock=self._held))

    def meet(self) -> None:
        """Return when every worker has come here; serve until then. Collective over the world."""
        if self._works:
            for server in self._roles.servers:
                if server != self._rank:
                    self._notes.tell(server, ControlKind.MEET)
            self._come(self._rank)
        self._looked = time.monotonic()
        while not self._all_here():
            self._notes.wait(alone=not self._works, look=self._look)
        if self._rank == self._first:
            for worker in self._roles.workers:
                if worker not in self._roles.servers:
                    self._notes.tell(worker, ControlKind.GATHERED)
        self._here.clear()
        self.called = self.due = self._gathered = self._has_called = False
        self._held += 1

    def settle(self, calls: int) -> None:
        """Take what is left of the ``calls`` of all ranks before `meet`; none of them is under way afterwards (local).

        All ranks must have been in a collective since `meet`. Others may have parted already: what they say now belongs
        to their next steps, and is answered when this rank has parted too.
        """
        while self._rank == self._first and self._taken_before() < calls:
            self._notes.take(ControlKind.CALL)
        self._notes.settle()

    def _taken_before(self) -> int:
        """Return how many calls came for meetings that have been."""
        return sum(count for held, count in self._taken.items() if held < self._held)

    def _all_here(self) -> bool:
        return len(self._here) == len(self._roles.workers) if self._serves else self._gathered

    def _look(self) -> None:
        if time.monotonic() - self._looked >= LOOK_S:
            self._looked = time.monotonic()
            self.consider()
            self.meanwhile()

    def _come(self, worker: int) -> None:
        self._here.add(worker)
        if self._serves:
            self.left(worker)

    def _on_call(self, rank: int, fields: ControlFields) -> None:
        self._taken[fields.clock] += 1
        self.due |= fields.clock == self._held  # else it was for a meeting that has been

    def _on_meet(self, worker: int, fields: ControlFields) -> None:
        self._come(worker)

    def _on_gathered(self, server: int, fields: ControlFields) -> None:
        self._gathered = True
