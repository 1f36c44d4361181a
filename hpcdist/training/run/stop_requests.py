"""Stop requests: signals, a stop file and the clock set flags that all ranks agree on at a step boundary.

Handlers neither communicate nor write files. While there is nothing to save, a signal ends the process at once. The
file ``grow`` asks for further ranks in the same way. REQUEUE lets the scheduler start the job again; INTERRUPT
(Ctrl-C) wins over it.
"""

import math
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import IntEnum
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np

from hpcdist import errors
from hpcdist.comm.launch.exit_file import STOP_CODES, ImmediateExit
from hpcdist.reporting import regular

STOP_FILE = "stop"
GROW_FILE = "grow"


class StopReason(IntEnum):
    """Why a rank wants to stop; the index of its count in the numbers that a step agrees on."""

    REQUEUE = (
        0  # SIGTERM, SIGHUP, SIGUSR1, the stop file, the job's time: save, and let the scheduler start the job again
    )
    INTERRUPT = 1  # Ctrl-C: save and leave


EXIT_CODES = {StopReason.REQUEUE: errors.REQUEUE, StopReason.INTERRUPT: errors.INTERRUPTED}


def _never() -> bool:
    return False


class StopRequests:
    """Listens on this rank. Signals only set a flag: a handler must neither communicate nor write files.

    While there is nothing to save, which a rank says by `starts`, a signal ends the process at once instead. ``ends``
    is when the job is over, in seconds since 1970.
    """

    def __init__(self, stop_file: Path | None = None, ends: float = math.inf) -> None:
        self.stop_file = stop_file  # looked at by one rank only, once the run directory is known
        self.ends = ends
        self.time_up: Callable[[], bool] = _never  # asked by one rank only, once it knows what steps and saves take
        self._wanted = np.zeros(len(StopReason))
        self._before: dict[signal.Signals, Any] = {}
        self._at_once = ImmediateExit()
        self.grow_file: Path | None = None  # looked at by one rank only, where the job can take in more

    def listen(self) -> None:
        """Install the handlers (main thread only)."""
        for number in STOP_CODES:
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:  # nohup
                self._before[number] = signal.signal(number, self._on_signal)

    def starts(self, *lets_go: Callable[[], object]) -> None:
        """From here on a signal ends this process, until `begun`; ``lets_go`` are called then (main thread only)."""
        for action in lets_go:
            self._at_once.before(action)
        self._at_once.switch(True)

    def let_go(self, action: Callable[[], object]) -> None:
        """Call ``action``, too, where a signal ends this process at once (local)."""
        self._at_once.before(action)

    def begun(self) -> None:
        """From here on a signal is a wish, granted at the end of a step: there is something to save (local)."""
        if self._at_once.on:
            self._at_once.switch(False)

    @contextmanager
    def all_saved(self) -> Iterator[None]:
        """Within, a signal ends this process at once, where `starts` was called before: all is saved (local)."""
        self._at_once.switch(self._at_once.started)
        try:
            yield
        finally:
            self._at_once.switch(False)

    def ignore(self) -> None:
        """Give the signals back to those who had them before `listen` (main thread only)."""
        self._at_once.close()
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        wish = StopReason.INTERRUPT if number == signal.SIGINT else StopReason.REQUEUE
        if wish is StopReason.INTERRUPT and self._wanted[wish]:
            raise KeyboardInterrupt  # asked twice: do not wait for the end of the step
        self._wanted[wish] = 1.0

    def current(self) -> np.ndarray:
        """Return this rank's wishes as numbers to be summed over the ranks."""
        if self.time_up() or (self.stop_file is not None and self.stop_file.exists()):
            self._wanted[StopReason.REQUEUE] = 1.0
        return self._wanted

    def ranks(self) -> float:
        """Return how many further ranks shall train, by the file that `hpcdist grow` writes; 0 for none (local)."""
        if self.grow_file is None or not self.grow_file.exists():
            return 0.0
        try:
            return float(max(0, int(regular.text(self.grow_file, 64))))
        except (OSError, ValueError, OverflowError):
            return 0.0  # not ours, or gone

    def grown(self) -> None:
        """Remove the file: the wish is granted, or cannot be (local)."""
        if self.grow_file is not None:
            self.grow_file.unlink(missing_ok=True)

    def answered(self) -> None:
        """Remove the stop file: the wish is granted, and the next start must not meet it."""
        if self.stop_file is not None:
            self.stop_file.unlink(missing_ok=True)


def agreed_reason(counts: np.ndarray) -> StopReason | None:
    """Return what the job does, given the wishes of all ranks: an interrupt wins over a requeue."""
    if counts[StopReason.INTERRUPT] > 0:
        return StopReason.INTERRUPT
    return StopReason.REQUEUE if counts[StopReason.REQUEUE] > 0 else None
