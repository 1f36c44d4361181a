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
from typing import Any, Final, TypeAlias

import numpy as np

from hpcdist.collectives.segments import wait_all
from hpcdist.comm.communicator import Communicator, Message, Request
from hpcdist.strategies.parameter_server.partition import Roles

SHORTEST_S: Final = 2e-5  # a rank that has other duties does not spin: it looks, and sleeps ever longer
LONGEST_S: Final = 1e-3


class ControlKind(IntEnum):
    """Kind of a control message."""

    PUSH = 0  # worker to server: the gradient for the update to ``clock`` is complete; multiply it by ``scale``
    REPLY = 1  # server to worker: go on at ``clock``; the values of update ``updates`` follow. ``called``: a rendezvous
    CALL = 2  # any rank to the first server: calls rendezvous number ``clock``
    MEET = 3  # worker to server: no push will follow before the rendezvous
    GATHERED = 4  # first server to a worker that serves nothing: all workers have sent MEET
    DROP = 5  # worker to server: the last pushes belong to no step; receive and drop them
    READ = 6  # worker to server: without a push, asks for the values for the iteration of ``clock``
    TURN = 7  # first server to the others: carry out a decision about the gradients of ``workers``
    NORM = 8  # server to server: ``scale`` is the squared norm of the sender's part of the sum for ``clock``


@dataclass(frozen=True, slots=True)
class ControlFields:
    """Fields of a control message. ``workers`` come behind the other fields, as many as there are."""

    clock: int = 0
    scale: float = 1.0
    updates: int = 0
    called: bool = False
    samples: int = 0  # PUSH: of the gradient
    divisor: int = 1  # PUSH: the samples by which it is divided
    staleness: int = 0  # REPLY: of the gradient that was applied
    dropped: bool = False  # REPLY, TURN: the gradient was not taken
    workers: tuple[int, ...] = ()


# Types of all fields but ``workers``, by name.
SINGLE: Final[dict[str, Any]] = {item.name: type(item.default) for item in fields(ControlFields)[:-1]}
ControlHandler: TypeAlias = Callable[[int, ControlFields], None]  # called with the sender
ControlMessage: TypeAlias = tuple[ControlKind, int, ControlFields]  # with the sender


class ControlChannel:
    """Control messages of one rank: each that arrives goes to the handler of its kind (local)."""

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self.answers: dict[ControlKind, ControlHandler] = {}
        self._sent: list[Request] = []
        self._held: deque[ControlMessage] = deque()  # those that came while another kind was waited for

    def tell(self, peer: int, kind: ControlKind, what: ControlFields = ControlFields()) -> None:
        """Begin to send a control message."""
        self.tidy()
        *single, workers = astuple(what)
        self._sent.append(self._comm.isend(np.array([kind, *single, *workers], np.float64), peer))

    def tidy(self) -> None:
        """Complete the sends that are through, so that no deadline is held against them."""
        self._sent = [request for request in self._sent if not request.test()]

    def serve(self) -> None:
        """Handle the messages that have come, without waiting."""
        while (message := self._next()) is not None:
            self._answer(message)

    def wait(self, *, alone: bool, look: Callable[[], None] = lambda: None) -> None:
        """Wait for a message and handle it.

        A rank that is ``alone`` (it neither computes nor serves beside) waits in one receive, which has a deadline.
        Else it polls, leaves the core to others in between, has no deadline, and calls ``look`` each time.
        """
        if alone:
            self._answer(self._held.popleft() if self._held else _read(self._comm.probe()))
            return
        pause = SHORTEST_S
        while (message := self._next()) is None:
            self.tidy()
            look()
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_S)
        self._answer(message)

    def take(self, wanted: ControlKind) -> None:
        """Wait for a message of the kind ``wanted`` and handle it; others are handled later, in their order."""
        while (message := _read(self._comm.probe()))[0] is not wanted:
            self._held.append(message)
        self._answer(message)

    def settle(self) -> None:
        """Wait until all messages of this rank are received: after a rendezvous they are, or will be."""
        wait_all(self._sent)
        self._sent.clear()

    def close(self) -> None:
        """Free the communicator. Collective over it, in a rendezvous."""
        self.settle()
        self._comm.free()

    def _next(self) -> ControlMessage | None:
        """Return the next message, None where none has come."""
        if self._held:
            return self._held.popleft()
        message = self._comm.poll()
        return None if message is None else _read(message)

    def _answer(self, message: ControlMessage) -> None:
        kind, sender, what = message
        self.answers[kind](sender, what)


def _read(message: Message) -> ControlMessage:
    values = np.zeros(message.nbytes // np.dtype(np.float64).itemsize)
    message.recv(values)
    kind, *numbers = values.tolist()
    single = {name: make(number) for (name, make), number in zip(SINGLE.items(), numbers, strict=False)}
    what = ControlFields(**single, workers=tuple(map(int, numbers[len(SINGLE) :])))
    return ControlKind(int(kind)), message.source, what


LOOK_S: Final = 0.5  # a rank that waits in a rendezvous asks so often whether it has to call the others


class Rendezvous:
    """Rendezvous of one rank: ``called`` says that it was called to one.

    ``due`` of the first server travels with the values that it sends (`REPLY`). A server calls ``left`` with each
    worker that pushes no more.
    """

    def __init__(
        self, rank: int, roles: Roles, channel: ControlChannel, left: Callable[[int], None] = lambda worker: None
    ) -> None:
        self._rank, self._roles, self._channel = rank, roles, channel
        self._first, self._serves, self._works = roles.servers[0], rank in roles.servers, rank in roles.workers
        channel.answers |= {
            ControlKind.CALL: self._on_call,
            ControlKind.MEET: self._on_meet,
            ControlKind.GATHERED: self._on_gathered,
        }
        self._wants: Callable[[], bool] = lambda: False
        self._meanwhile: Callable[[], None] = lambda: None
        self._left = left
        self.called = self.due = False
        self.calls = 0  # sent by this rank, since the start
        self._held = 0  # rendezvous that are over
        self._taken: Counter[int] = Counter()  # calls received, by the number of the rendezvous that they are for
        self._here: set[int] = set()  # workers that push no more
        self._gathered = self._has_called = False
        self._looked = 0.0

    def ask(self, wants: Callable[[], bool], meanwhile: Callable[[], None] = lambda: None) -> None:
        """Call a rendezvous from now on where ``wants`` returns true (local).

        ``meanwhile`` is called every `LOOK_S` on a rank that waits for the others.
        """
        self._wants, self._meanwhile = wants, meanwhile

    def consider(self) -> None:
        """Call a rendezvous if this rank wants one (local)."""
        if self._wants():
            self.call()

    def call(self) -> None:
        """Call a rendezvous (local)."""
        if self._rank == self._first:
            self.due = True
        elif not self._has_called:
            self._has_called = True
            self.calls += 1
            self._channel.tell(self._first, ControlKind.CALL, ControlFields(clock=self._held))

    def meet(self) -> None:
        """Wait until every worker has come here; serve until then. Collective over the world."""
        if self._works:
            for server in self._roles.servers:
                if server != self._rank:
                    self._channel.tell(server, ControlKind.MEET)
            self._come(self._rank)
        self._looked = time.monotonic()
        while not self._all_here():
            self._channel.wait(alone=not self._works, look=self._look)
        if self._rank == self._first:
            for worker in self._roles.workers:
                if worker not in self._roles.servers:
                    self._channel.tell(worker, ControlKind.GATHERED)
        self._here.clear()
        self.called = self.due = self._gathered = self._has_called = False
        self._held += 1

    def settle(self, calls: int) -> None:
        """Receive the rest of the ``calls`` of all ranks before `meet`; none is under way afterwards (local).

        All ranks must have been in a collective since `meet`. Others may be in their next steps already: their messages
        are handled when this rank is there too.
        """
        while self._rank == self._first and self._taken_before() < calls:
            self._channel.take(ControlKind.CALL)
        self._channel.settle()

    def _taken_before(self) -> int:
        """Return the number of calls for rendezvous that are over."""
        return sum(count for held, count in self._taken.items() if held < self._held)

    def _all_here(self) -> bool:
        return len(self._here) == len(self._roles.workers) if self._serves else self._gathered

    def _look(self) -> None:
        if time.monotonic() - self._looked >= LOOK_S:
            self._looked = time.monotonic()
            self.consider()
            self._meanwhile()

    def _come(self, worker: int) -> None:
        self._here.add(worker)
        if self._serves:
            self._left(worker)

    def _on_call(self, rank: int, fields: ControlFields) -> None:
        self._taken[fields.clock] += 1
        self.due |= fields.clock == self._held  # else it came late, for a rendezvous that is over

    def _on_meet(self, worker: int, fields: ControlFields) -> None:
        self._come(worker)

    def _on_gathered(self, server: int, fields: ControlFields) -> None:
        self._gathered = True
