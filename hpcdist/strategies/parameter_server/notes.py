"""The short messages between workers and servers under asp, apart from the values they speak of."""

import time
from collections.abc import Callable, Mapping
from enum import IntEnum
from typing import Final, TypeAlias

import numpy as np

from hpcdist.comm.communicator import Communicator, Message, Request

SHORTEST_S: Final = 2e-5  # a rank that has other duties does not spin: it looks, and sleeps ever longer
LONGEST_S: Final = 1e-3


class Note(IntEnum):
    """What a note says."""

    PUSH = 0  # worker to server: the gradient of ``clock`` is complete; multiply it by ``scale``
    REPLY = 1  # server to worker: it is applied as one of ``updates``, the values follow; ``called``: let us meet
    CALL = 2  # anybody to the first server: let us meet for the ``clock``-th time
    MEET = 3  # worker to server: I push no more before the meeting
    GATHERED = 4  # first server to a worker that serves nothing: all workers have said so
    DROP = 5  # worker to server: what I have pushed is no gradient, take it and forget it


FIELDS: Final = ("note", "clock", "scale", "updates", "called")
Answer: TypeAlias = Callable[[int, Mapping[str, float]], None]  # called with the sender and the fields


class Notes:
    """The notes of one rank: each that arrives goes to the answer for its kind (local)."""

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self.answers: dict[Note, Answer] = {}
        self._sent: list[Request] = []

    def tell(
        self, peer: int, note: Note, clock: int = 0, scale: float = 1.0, updates: int = 0, called: int = 0
    ) -> None:
        """Begin to send a note."""
        self.tidy()
        self._sent.append(self._comm.isend(np.array([note, clock, scale, updates, called], np.float64), peer))

    def tidy(self) -> None:
        """Close what has been sent, so that no deadline is held against it."""
        self._sent = [request for request in self._sent if not request.test()]

    def attend(self) -> None:
        """Answer the notes that have come; wait for none."""
        while (message := self._comm.poll()) is not None:
            self._answer(message)

    def wait(self, *, alone: bool, look: Callable[[], None] = lambda: None) -> None:
        """Wait for a note and answer it.

        A rank that is ``alone`` on its core waits as any receive does: in one operation, that has a deadline. Else it
        leaves the core to others, has no deadline, and calls ``look`` all the while.
        """
        if alone:
            self._answer(self._comm.probe())
            return
        pause = SHORTEST_S
        while (message := self._comm.poll()) is None:
            self.tidy()
            look()
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_S)
        self._answer(message)

    def settle(self) -> None:
        """Return when all notes of this rank have been taken: after a meeting they are, or will be without more."""
        for request in self._sent:
            request.wait()
        self._sent.clear()

    def _answer(self, message: Message) -> None:
        values = np.zeros(len(FIELDS))
        message.recv(values)
        fields = dict(zip(FIELDS, values.tolist(), strict=True))
        self.answers[Note(int(fields["note"]))](message.source, fields)
