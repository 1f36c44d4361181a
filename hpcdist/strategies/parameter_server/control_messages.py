"""Control messages between workers and servers without lock-step, and their rendezvous.

A `Rendezvous` stops all ranks between steps, for a checkpoint or to stop the run. Afterwards no push is in flight, and
all servers have applied the same pushes.
"""

import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import astuple, dataclass, fields
from enum import IntEnum
from typing import Any, Final, TypeAlias

import numpy as np

from hpcdist.collectives.segments import wait_all
from hpcdist.comm.communicator import Communicator
from hpcdist.comm.transport import Message, Request
from hpcdist.strategies.parameter_server.partition import Roles

SHORTEST_S: Final = 2e-5  # a polling rank with other duties sleeps between polls, ever longer
LONGEST_S: Final = 1e-3


class ControlKind(IntEnum):
    """Type of a control message between workers and servers."""

    PUSH = 0  # worker to server: the gradient for the update to ``clock`` is complete; multiply it by ``scale``
    REPLY = 1  # server to worker: continue at ``clock``; values of update ``updates`` follow. ``called``: a rendezvous
    CALL = 2  # any rank to the first server: call rendezvous number ``clock``
    MEET = 3  # worker to server: no more pushes before the rendezvous
    GATHERED = 4  # first server to a dedicated worker: all workers have sent MEET
    DROP = 5  # worker to server: receive and drop the last pushes, which belong to no step
    READ = 6  # worker to server: request the values for the iteration of ``clock``, without a push
    TURN = 7  # first server to the other servers: apply a decision about the gradients of ``workers``
    NORM = 8  # server to server: ``scale`` is the squared norm of the sender's part of the sum for ``clock``


@dataclass(frozen=True, slots=True)
class ControlFields:
    """Content of a control message between workers and servers. Each message type uses some fields."""

    clock: int = 0
    scale: float = 1.0
    updates: int = 0
    called: bool = False
    samples: int = 0  # PUSH: number of samples of the gradient
    divisor: int = 1  # PUSH: number of samples that divides it
    staleness: int = 0  # REPLY: staleness of the applied gradient
    dropped: bool = False  # REPLY, TURN: the gradient was not applied
    workers: tuple[int, ...] = ()


# Type of each field except ``workers``, by name.
SINGLE: Final[dict[str, Any]] = {item.name: type(item.default) for item in fields(ControlFields)[:-1]}
ControlHandler: TypeAlias = Callable[[int, ControlFields], None]  # called with the sender
ControlMessage: TypeAlias = tuple[ControlKind, int, ControlFields]  # with the sender


class ControlChannel:
    """Sender and receiver of one rank's control messages. Local."""

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self.answers: dict[ControlKind, ControlHandler] = {}
        self._sent: list[Request] = []
        self._held: deque[ControlMessage] = deque()  # arrived while waiting for another kind

    def tell(self, peer: int, kind: ControlKind, what: ControlFields = ControlFields()) -> None:
        """Start to send a control message of type ``kind`` with the fields ``what`` to rank ``peer``."""
        self.tidy()
        *single, workers = astuple(what)
        self._sent.append(self._comm.isend(np.array([kind, *single, *workers], np.float64), peer))

    def tidy(self) -> None:
        """Remove completed sends from this rank's list of outstanding send requests."""
        self._sent = [request for request in self._sent if not request.test()]

    def serve(self) -> None:
        """Handle the control messages that have arrived, without waiting for further messages."""
        while (message := self._next()) is not None:
            self._answer(message)

    def wait(self, *, alone: bool, look: Callable[[], None] = lambda: None) -> None:
        """Wait for a control message and handle it."""
        if alone:  # in one blocking receive, with the usual timeout; else in a loop that calls ``look``
            self._answer(self._held.popleft() if self._held else _read(self._comm.probe()))
            return
        pause = SHORTEST_S
        while (message := self._next()) is None:
            self.tidy()
            look()
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_S)
        self._answer(message)

    def take(self, kind: ControlKind) -> None:
        """Wait for a control message of type ``kind`` and handle it. Other messages are handled later."""
        while (message := _read(self._comm.probe()))[0] is not kind:
            self._held.append(message)
        self._answer(message)

    def settle(self) -> None:
        """Wait until all control messages that this rank sent have been received."""
        wait_all(self._sent)
        self._sent.clear()

    def close(self) -> None:
        """Free the communicator while all workers are paused. Collective over the world."""
        self.settle()
        self._comm.free()

    def _next(self) -> ControlMessage | None:
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


LOOK_S: Final = 0.5  # interval at which a waiting rank checks whether to call the rendezvous


class Rendezvous:
    """Pause of all workers between steps, in which the world can run collectives."""

    # `called` is True on a worker that must pause and call `meet`. `due` is True on the first server while it asks
    # workers to pause. A server calls ``left(worker)`` when ``worker`` pauses.

    def __init__(
        self, rank: int, roles: Roles, channel: ControlChannel, left: Callable[[int], None] = lambda worker: None
    ) -> None:
        self._rank, self._roles, self._channel = rank, roles, channel
        self._first, self._serves, self._works = roles.servers[0], rank in roles.servers, rank in roles.workers
        channel.answers |= {
            ControlKind.CALL: self._on_call,
            ControlKind.MEET: lambda worker, fields: self._come(worker),
            ControlKind.GATHERED: self._on_gathered,
        }
        self._wants: Callable[[], bool] = lambda: False
        self._meanwhile: Callable[[], None] = lambda: None
        self._left = left
        self.called = self.due = False
        self.calls = 0  # sent by this rank since the start
        self._held = 0  # number of completed rendezvous
        self._taken: Counter[int] = Counter()  # calls received, by rendezvous number
        self._here: set[int] = set()  # workers that have stopped pushing
        self._gathered = self._has_called = False
        self._looked = 0.0

    def ask(self, wants: Callable[[], bool], meanwhile: Callable[[], None] = lambda: None) -> None:
        """Set the function ``wants``, which returns True to request a pause of all workers. Local.

        ``meanwhile``: function that is called repeatedly during the wait for the pause.
        """
        self._wants, self._meanwhile = wants, meanwhile

    def consider(self) -> None:
        """Request a pause of all workers if the function that was passed to `ask` as ``wants`` returns True. Local."""
        if self._wants():
            self.call()

    def call(self) -> None:
        if self._rank == self._first:
            self.due = True
        elif not self._has_called:
            self._has_called = True
            self.calls += 1
            self._channel.tell(self._first, ControlKind.CALL, ControlFields(clock=self._held))

    def meet(self) -> None:
        """Wait until every worker has paused, and handle control messages until then. Collective over the world."""
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

    def settle(self, pause_requests: int) -> None:
        """During a pause, wait until all control messages have been received. Local.

        ``pause_requests``: number of pause requests that all ranks have sent. The first server waits for all of them.
        """
        while self._rank == self._first and sum(self._taken[held] for held in range(self._held)) < pause_requests:
            self._channel.take(ControlKind.CALL)
        self._channel.settle()

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
        self.due |= fields.clock == self._held  # a late call is for a completed rendezvous

    def _on_gathered(self, server: int, fields: ControlFields) -> None:
        self._gathered = True
