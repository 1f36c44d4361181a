"""Signals around what must be undone: held back while it is done or undone, an exception in between.

Python runs handlers in the main thread only; elsewhere nothing is changed here, and what is to be undone is left to the
end of the process.
"""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

# What ends a process that does not answer: SIGINT raises KeyboardInterrupt already.
DEADLY: Final = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)


class Ended(BaseException):
    """A signal came that would have ended the process on the spot."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


def _raise(number: int, frame: object) -> None:
    raise Ended(number)


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


@contextmanager
def deferred() -> Iterator[None]:
    """Answer signals that come inside at the end of it, as they would have been answered (local)."""
    if not _in_main_thread():
        yield
        return
    came: list[int] = []
    handlers: dict[signal.Signals, Any] = {}
    try:
        for watched in (signal.SIGINT, *DEADLY):
            handler = signal.getsignal(watched)
            if handler not in (None, signal.SIG_IGN):  # None: it is not Python's
                handlers[watched] = handler
                signal.signal(watched, lambda number, frame: came.append(number))
        yield
    finally:
        for watched, handler in handlers.items():
            signal.signal(watched, handler)
        for number in dict.fromkeys(came):
            signal.raise_signal(number)


@contextmanager
def answered(last: Callable[[], None]) -> Iterator[None]:
    """Make exceptions of the signals that would end this process without a word; it ends by them all the same.

    ``last`` is called before it does: what is undone by then may be undone once more.
    """
    mine = [number for number in DEADLY if _in_main_thread() and signal.getsignal(number) is signal.SIG_DFL]
    ended: Ended | None = None
    try:
        for number in mine:
            signal.signal(number, _raise)
        yield
    except Ended as error:
        ended = error
        for number in mine:
            signal.signal(number, signal.SIG_IGN)
        last()
    finally:
        for number in mine:
            signal.signal(number, signal.SIG_DFL)
    if ended is not None:
        os.kill(os.getpid(), ended.number)
