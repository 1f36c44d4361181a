"""Step log: the console of rank 0, and side-table rows about single steps.

`ConsoleProgress` shows a bar on a terminal, one line every few seconds in a log. `StepLog` writes what was special
about a step: a change of the loss scale, the verdict of a recomputation, new sample shares.
"""

import os
import sys
import time

from tqdm import tqdm

from hpcdist.comm.launch.exit_file import TERMINAL_COLUMNS
from hpcdist.strategies.schedule.executor import StepResult
from hpcdist.telemetry.metrics import side_tables
from hpcdist.training.build.trainer import Trainer
from hpcdist.training.observe.metrics import RunMetrics


class ConsoleProgress:
    """Console of rank 0; the other ranks are silent.

    ``first`` is the step from which this process goes on, ``every_s`` the seconds between two lines of a log, ``unit``
    the name of what a speed counts. Speeds and the time that is left are those of the steps after the first one of this
    process, which compiles kernels and opens connections: as in the summary of the run.
    """

    def __init__(self, steps: int, first: int, every_s: float, shown: bool, unit: str = "tokens") -> None:
        self._steps, self._first, self._every_s, self._shown, self._unit = steps, first, every_s, shown, unit
        self._begun = self._last = time.monotonic()
        self._warm: tuple[float, int] | None = None  # when the first step was done, and its number
        self._targets = 0  # of the steps after it
        columns = _terminal_columns() if shown else None
        self._bar: tqdm[None] | None = None
        if columns is not None:
            self._bar = tqdm(total=steps, initial=first, unit="step", file=sys.stderr, ncols=columns or None)

    def say(self, text: str) -> None:
        """Print a line without breaking the bar."""
        if not self._shown:
            return
        if self._bar is not None:
            self._bar.write(text, file=sys.stderr)
        else:
            print(text, file=sys.stderr, flush=True)

    def step(self, done: int, loss: float, targets: int, communication: float) -> None:
        """Report that ``done`` steps are complete; ``targets`` were predicted in the last, by all ranks together.

        Those whose gradient came too late are none of them. ``communication`` is the share of its time that the last
        step spent in messages.
        """
        if not self._shown:
            return
        now = time.monotonic()
        figures = [f"loss {loss:.4f}"]
        if self._warm is None:
            self._warm = now, done
        else:
            self._targets += targets
            figures.append(f"{self._targets / max(now - self._warm[0], 1e-9):,.0f} {self._unit}/s")
        figures.append(f"comm {communication:.0%}")
        if self._bar is not None:
            self._bar.set_postfix_str(", ".join(figures), refresh=False)
            self._bar.update(1)
        elif done == self._warm[1] or now - self._last >= self._every_s or done == self._steps:
            self._last = now
            print(
                "  ".join([f"step {done}/{self._steps}", *figures, self._left(done, now)]), file=sys.stderr, flush=True
            )

    def _left(self, done: int, now: float) -> str:
        """Return how long the steps that are left will take; after the first step, what that took."""
        assert self._warm is not None
        warm_s, warm = self._warm
        if done == warm:
            return f"first step {now - self._begun:.1f} s, with compiling"
        return f"ETA {(self._steps - done) * (now - warm_s) / (done - warm):.0f} s"

    def close(self) -> None:
        """Leave the terminal as it was."""
        if self._bar is not None:
            self._bar.close()


def _terminal_columns() -> int | None:
    """Return the width of the terminal that stderr goes to, directly or by the launcher; 0: look it up; else None."""
    if sys.stderr.isatty():
        return 0
    columns = os.environ.get(TERMINAL_COLUMNS, "")
    return int(columns) if columns.isascii() and columns.isdecimal() and int(columns) > 0 else None


class StepLog:
    """Writes into ``metrics`` and tells a person by ``progress``; rank 0 does, the others have nothing to do."""

    def __init__(self, trainer: Trainer, metrics: RunMetrics, progress: ConsoleProgress) -> None:
        self._trainer, self._metrics, self._progress = trainer, metrics, progress
        self._loss_scale = 1.0  # of the last row about it
        self._has_suspected = False

    def stepped(self, step: int, found: StepResult) -> None:
        """Write down what was special about ``step``, where something was."""
        self._scale(step, found)
        self._recomputed(step, found)

    def _scale(self, step: int, found: StepResult) -> None:
        """Write what happened to the scale of the loss, where something did."""
        if found.skipped:
            self._progress.say(f"step {step}: skipped, its gradient overflows at the loss scale {found.loss_scale:g}")
        if found.skipped or found.loss_scale != self._loss_scale:
            self._metrics.scaled(step, found.loss_scale, found.skipped)
            self._loss_scale = found.loss_scale

    def _recomputed(self, step: int, found: StepResult) -> None:
        """Write what a second computation of the step found, where there was one."""
        if (again := found.recomputed) is None:
            return
        if again.fault:
            self._progress.say(again.fault)
        elif again.suspicion and not self._has_suspected:
            self._progress.say(f"step {step}: {again.suspicion}; computed again, it has the same bits: it is the data")
            self._has_suspected = True  # once is enough: the others are in the metrics
        row = bool(again.suspicion), not again.fault, again.ranks[0] if again.ranks else -1
        self._metrics.include(lambda file, session: side_tables.append_recomputed(file, session, step, *row))

    def shares(self, done: int, first: int) -> None:
        """Write the shares of the steps after ``done``, of those that are known from the ``first`` on."""
        if self._trainer.shares is not None:
            for batch, samples in self._trainer.shares.state(done)[first:]:
                self._metrics.shared(batch + 1, samples)
