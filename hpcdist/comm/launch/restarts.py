"""Restarts of a job after a failure: their number, the pauses between them, and when to give up.

A start that ends without a new checkpoint is repeated once: a file system may have been away. Two in a row would be
followed by a third of the same kind. The pauses double with every start that brought nothing, and there is none after
one that did. A start that lost a node says nothing of the next one, on other nodes: it counts for neither. Nothing is
started here.
"""

import itertools
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Final, Protocol

from hpcdist.comm.launch.supervisor import LaunchOutcome
from hpcdist.errors import CONFIGURATION, INTERRUPTED, MISSING_CAPABILITY, OK, REQUEUE, USAGE

# Another start would end in the same way, or was not wanted: 75 is for whoever gave the job its time.
FINAL_CODES: Final = (OK, USAGE, MISSING_CAPABILITY, REQUEUE, CONFIGURATION, INTERRUPTED)
FRUITLESS: Final = 2  # starts in a row without a new checkpoint
FIRST_PAUSE_S: Final = 1.0
LONGEST_PAUSE_S: Final = 60.0


class NodePool(Protocol):
    """The nodes of a job, which may die."""

    def died(self) -> Sequence[str]:
        """Look at all nodes; return those that were there the last time, and are no more."""

    def wait(
        self, pause: Callable[[float], signal.Signals | None], say: Callable[[str], None]
    ) -> signal.Signals | None:
        """Wait for other nodes where too few are left, if they may come; return the signal that ended it, if any."""

    def shortage(self) -> str:
        """Return why a start does not fit on those that are left; "" where it does."""


def repeat(
    start: Callable[[int], LaunchOutcome],
    most: int,
    saved: Callable[[], Mapping[str, int]],
    pause: Callable[[float], signal.Signals | None],
    say: Callable[[str], None],
    nodes: NodePool,
) -> int:
    """Call ``start(1)``, and again after failures, ``most`` times at the most; return the exit code of the last one.

    ``saved()`` gives the checkpoints that are there, the most recent first, with something that is another for another
    checkpoint of the same name. ``pause(seconds)`` waits, and returns the signal that ended it, if one did. Where too
    few ``nodes`` are left, the exit code is 75: whoever has others may start the job again.
    """
    fruitless = pauses = 0
    there = saved()
    for number in itertools.count(1):
        began = time.monotonic()
        outcome = start(number)
        lasted_s = time.monotonic() - began
        before, there = there, saved()
        if outcome.code in FINAL_CODES:
            return outcome.code
        progress = bool(there.items() - before.items())
        died = nodes.died() if outcome.asked is None and number <= most else ()
        in_vain = not (progress or died)
        fruitless = 0 if progress else fruitless + in_vain
        ended = f"start {number} of at most {most + 1} ended with exit code {outcome.code} after {lasted_s:.1f} s"
        reason = _why_not_again(outcome, number > most, fruitless)
        if reason:
            say(f"{ended}; {reason}")
            return outcome.code
        pauses += in_vain
        pause_s = min(FIRST_PAUSE_S * 2 ** (pauses - 1), LONGEST_PAUSE_S) if in_vain else 0.0
        origin = next(iter(there), "the beginning")
        new = ", without a new checkpoint" if in_vain else f", having lost {', '.join(died)}" if died else ""
        say(f"{ended}{new}; start {number + 1} follows {f'in {pause_s:g} s' if pause_s else 'at once'}, from {origin}")
        asked = pause(pause_s) or nodes.wait(pause, say)
        if asked is not None:
            say(f"{asked.name}: start {number + 1} is not made")
            return _code_after(asked, outcome.code, bool(there))
        if shortage := nodes.shortage():
            say(f"start {number + 1} is not made: {shortage}")
            return REQUEUE
    raise AssertionError("unreachable: the count is endless")


def _why_not_again(outcome: LaunchOutcome, last: bool, fruitless: int) -> str:
    if outcome.asked is not None:
        return f"not started again after {outcome.asked.name}"
    if fruitless >= FRUITLESS:
        return f"not started again: {fruitless} starts in a row made no new checkpoint, and the next would not either"
    return "not started again: --restarts allows no more" if last else ""


def _code_after(asked: signal.Signals, failed: int, resumable: bool) -> int:
    """Return the exit code when ``asked`` came between two starts, the first of which left with ``failed``."""
    if asked is signal.SIGINT:
        return INTERRUPTED
    return REQUEUE if resumable else failed
