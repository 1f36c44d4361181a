"""What a rank that is a thread holds of messages under way, and of memory that the ranks share."""

import time
from collections.abc import Callable

import numpy as np

from hpcdist.arrays.backend import Array
from hpcdist.comm.handover import Handover
from hpcdist.comm.mailbox import Letter, Posted
from hpcdist.comm.thread_deaths import Fate
from hpcdist.errors import CommunicationError, DeadlineError


class Done:
    """A request that was complete when it was made: sends copy."""

    def wait(self) -> None:
        """Return at once."""

    def test(self) -> bool:
        """Return True."""
        return True


class Receive:
    """A receive under way; ``arrived`` waits for its letter."""

    def __init__(self, posted: Posted, message: Array, arrived: Callable[[Posted], Letter], fate: Fate) -> None:
        self._posted, self._message, self._arrived, self._fate = posted, message, arrived, fate

    def wait(self) -> None:
        """Return when the letter is in the message."""
        deliver(self._arrived(self._posted), self._message)

    def test(self) -> bool:
        """Whether the letter has come; then it is in the message."""
        if self._posted.letter is None:
            self._fate.look_for_deaths(self._posted.peer, "a receive")
            return False
        deliver(self._posted.letter, self._message)
        return True


class Probed:
    """A letter that was taken out of the matching."""

    def __init__(self, letter: Letter, handover: Handover) -> None:
        self._letter, self._handover = letter, handover
        self.source, self.tag, self.nbytes = letter.source, letter.tag, letter.payload.nbytes

    def recv(self, buffer: Array) -> None:
        """Copy the letter into ``buffer``."""
        message, finish = self._handover.incoming(buffer)
        deliver(self._letter, message)
        if finish is not None:
            finish()


class Block:
    """Memory that all threads see."""

    is_shared = True

    def __init__(self, views: list[np.ndarray], fate: Fate, deadline_s: float) -> None:
        self.views, self._fate, self._deadline_s = views, fate, deadline_s

    def progress(self) -> None:
        """Raise where another rank failed or died."""
        self._fate.look(None, "shared memory")

    def check_alive(self, since: float) -> None:
        """Raise where another rank failed or died, or this one has waited too long."""
        self.progress()
        if time.monotonic() - since > self._deadline_s:
            raise DeadlineError(f"rank {self._fate.rank}: nobody came to shared memory within {self._deadline_s} s")

    def close(self) -> None:
        """Drop the views."""
        self.views = []


def deliver(letter: Letter, message: Array) -> None:
    """Copy ``letter`` into ``message``, which must have its size."""
    if letter.payload.nbytes != message.nbytes:
        raise CommunicationError(
            f"a message of {letter.payload.nbytes} bytes from rank {letter.source} (tag {letter.tag}) met a buffer "
            f"of {message.nbytes} bytes"
        )
    message.view(np.uint8)[...] = letter.payload
