"""The short messages between workers and servers that are not in lock-step, apart from the values they speak of."""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import astuple, dataclass, fields
from enum import IntEnum
from typing import Final, TypeAlias

import numpy as np

from hpcdist.comm.communicator import Communicator, Message, Request

SHORTEST_S: Final = 2e-5  # a rank that has other duties does not spin: it looks, and sleeps ever longer
LONGEST_S: Final = 1e-3


class Note(IntEnum):
    """What a note says."""

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
class Fields:
    """What a note says it of. ``workers`` stand behind the other fields, as many as there are."""

    clock: int = 0
    scale: float = 1.0
    updates: int = 0
    called: bool = False
    samples: int = 0  # PUSH: of the gradient
    divisor: int = 1  # PUSH: the samples by which it is divided
    staleness: int = 0  # REPLY: of the gradient that was applied
    dropped: bool = False  # REPLY, TURN: the gradient was not taken
    workers: tuple[int, ...] = ()


ALONE: Final = len(fields(Fields))  # numbers of a note of no workers, with its kind
Answer: TypeAlias = Callable[[int, Fields], None]  # called with the sender
Letter: TypeAlias = tuple[Note, int, Fields]  # with the sender


class Notes:
    """The notes of one rank: each that arrives goes to the answer for its kind (local)."""

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self.answers: dict[Note, Answer] = {}
        self._sent: list[Request] = []
        self._held: deque[Letter] = deque()  # those that came while another kind was waited for

    def tell(self, peer: int, note: Note, what: Fields = Fields()) -> None:
        """Begin to send a note."""
        self.tidy()
        *single, workers = astuple(what)
        self._sent.append(self._comm.isend(np.array([note, *single, *workers], np.float64), peer))

    def tidy(self) -> None:
        """Close what has been sent, so that no deadline is held against it."""
        self._sent = [request for request in self._sent if not request.test()]

    def attend(self) -> None:
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

    def take(self, wanted: Note) -> None:
        """Wait for a note of the kind ``wanted`` and answer it; what else comes is answered later, in its order."""
        while (letter := _read(self._comm.probe()))[0] is not wanted:
            self._held.append(letter)
        self._answer(letter)

    def settle(self) -> None:
        """Return when all notes of this rank have been taken: after a meeting they are, or will be without more."""
        for request in self._sent:
            request.wait()
        self._sent.clear()

    def _next(self) -> Letter | None:
        """Return the next note, None where none has come."""
        if self._held:
            return self._held.popleft()
        message = self._comm.poll()
        return None if message is None else _read(message)

    def _answer(self, letter: Letter) -> None:
        note, sender, what = letter
        self.answers[note](sender, what)


def _read(message: Message) -> Letter:
    values = np.zeros(message.nbytes // np.dtype(np.float64).itemsize)
    message.recv(values)
    note, clock, scale, updates, called, samples, divisor, staleness, dropped = values[:ALONE].tolist()
    what = Fields(
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
    return Note(int(note)), message.source, what
