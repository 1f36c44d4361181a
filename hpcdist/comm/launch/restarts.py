"""Restarts of a job after a failure: their number, the pauses between them, and when to give up.

Two starts in a row without a new checkpoint end the job. Each start without a new checkpoint doubles the pause. A start
that lost a node counts for neither rule.
"""

import itertools
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Final, Protocol

from hpcdist.comm.launch.supervisor import LaunchOutcome
from hpcdist.comm.record.run_journal import FRUITLESS
from hpcdist.errors import CONFIGURATION, INTERRUPTED, MISSING_CAPABILITY, OK, REQUEUE, USAGE

# Exit codes without a further start: it would end in the same way, or 75 leaves the start to the scheduler.
FINAL_CODES: Final = (OK, USAGE, MISSING_CAPABILITY, REQUEUE, CONFIGURATION, INTERRUPTED)
FIRST_PAUSE_S: Final = 1.0
LONGEST_PAUSE_S: Final = 60.0


class NodePool(Protocol):
    """Interface that finds failed nodes of a job, and waits for replacement nodes."""

    def died(self) -> Sequence[str]:
        """Return the names of the nodes that have failed since the last call."""

    def wait(
        self, pause: Callable[[float], signal.Signals | None], say: Callable[[str], None]
    ) -> signal.Signals | None:
        """Wait until the job has enough nodes. Return the stop signal that ended the wait, or None.

        ``pause(seconds)``: function that waits. ``say(text)``: function that prints progress.
        """

    def shortage(self) -> str:
        """Return the reason why too few nodes are left to start the job again, or "" if enough are left."""


def repeat(
    start: Callable[[int], LaunchOutcome],
    max_restarts: int,
    checkpoints: Callable[[], Mapping[str, int]],
    pause: Callable[[float], signal.Signals | None],
    say: Callable[[str], None],
    give_up: Callable[[str], None],
    nodes: NodePool,
) -> int:
    """Run a job by ``start(number)``, and restart it up to ``max_restarts`` times after failures. Return the exit code.

    ``checkpoints()`` returns the checkpoints, newest first. ``say`` and ``give_up`` print a text.
    """
    # No restart after two starts in a row without a new checkpoint. The exit code is 75 if too few nodes are left.
    # `pause` returns the stop signal that ended the wait, or None.
    fruitless = pauses = 0
    there = checkpoints()
    for number in itertools.count(1):
        began = time.monotonic()
        outcome = start(number)
        lasted_s = time.monotonic() - began
        before, there = there, checkpoints()
        if outcome.code in FINAL_CODES:
            return outcome.code
        progress = bool(there.items() - before.items())
        died = nodes.died() if outcome.stop_signal is None and number <= max_restarts else ()
        in_vain = not (progress or died)
        fruitless = 0 if progress else fruitless + in_vain
        ended = (
            f"start {number} of at most {max_restarts + 1} ended with exit code {outcome.code} after {lasted_s:.1f} s"
        )
        reason = _why_not_again(outcome, number > max_restarts, fruitless)
        if reason:
            give_up(f"{ended}; {reason}")
            return outcome.code
        pauses += in_vain
        pause_s = min(FIRST_PAUSE_S * 2 ** (pauses - 1), LONGEST_PAUSE_S) if in_vain else 0.0
        origin = next(iter(there), "the beginning")
        new = ", without a new checkpoint" if in_vain else f", having lost {', '.join(died)}" if died else ""
        say(f"{ended}{new}; start {number + 1} follows {f'in {pause_s:g} s' if pause_s else 'at once'}, from {origin}")
        stop_signal = pause(pause_s) or nodes.wait(pause, say)
        if stop_signal is not None:
            give_up(f"{stop_signal.name}: start {number + 1} is cancelled")
            return _code_after(stop_signal, outcome.code, bool(there))
        if shortage := nodes.shortage():
            give_up(f"start {number + 1} is cancelled: {shortage}")
            return REQUEUE
    raise AssertionError("unreachable: itertools.count does not end")


def _why_not_again(outcome: LaunchOutcome, last: bool, fruitless: int) -> str:
    if outcome.stop_signal is not None:
        return f"not started again after {outcome.stop_signal.name}"
    if fruitless >= FRUITLESS:
        return f"not started again: {fruitless} starts in a row made no new checkpoint, and the next would not either"
    return "not started again: --restarts allows no more" if last else ""


def _code_after(stop_signal: signal.Signals, failed: int, resumable: bool) -> int:
    if stop_signal is signal.SIGINT:
        return INTERRUPTED
    return REQUEUE if resumable else failed
