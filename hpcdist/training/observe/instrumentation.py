"""Instrumentation of a loop on one rank: spans, profiler ranges, energy windows, and sensor shift.

Without a profiler a range costs less than a microsecond.

`StepShifter`: a power sensor that measures 25 ms of every 100 ms sees the same part of each step where steps take a
multiple of 100 ms, and its counter is then wrong by as much as that part is unlike the others. Yang, Adamek and
Armour (arXiv 2312.02741) shift the repetitions of a measurement; in a training, whose ranks step together, one of
them waits.
"""

import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Final, TypeVar

from tqdm import tqdm

from hpcdist.comm.launch.exit_file import TERMINAL_COLUMNS
from hpcdist.comm.record.spans import SpanSink, now_ns
from hpcdist.energy.accounts.part_time_sensor import PowerSensor, SensorShift
from hpcdist.errors import MissingCapabilityError
from hpcdist.strategies.schedule.executor import StepResult
from hpcdist.telemetry.metrics import side_tables
from hpcdist.training.build.trainer import Trainer
from hpcdist.training.observe.energy import EnergyRecorder
from hpcdist.training.observe.metrics import RunMetrics

DOMAIN: Final = "hpcdist"
COLORS: Final = {
    "compute": 0x4E79A7,
    "communication": 0xF28E2B,
    "update": 0x59A14F,
    "data": 0xEDC948,
    "checkpoint": 0xB07AA1,
    "validation": 0x76B7B2,
    "other": 0xBAB0AC,
    "step": 0x9C755F,
}  # RGB by phase; the same ones in every picture of a step


class NvtxRanges:
    """Ranges of one rank: pushed and popped on the thread that enters them, in a domain of their own.

    Raises MissingCapabilityError where the package is absent.
    """

    def __init__(self) -> None:
        try:
            import nvtx
        except ImportError as error:
            raise MissingCapabilityError(
                f"telemetry.nvtx needs the package nvtx: pip install 'hpcdist[trace]', or set telemetry.nvtx = false "
                f"({error})"
            ) from error
        self._annotate: Any = nvtx.annotate
        # A tool keeps every text for ever. There are as many as different operations in a step: no step is in them.
        self._known: dict[tuple[str, str, int, int], AbstractContextManager[object, bool | None]] = {}

    def __call__(
        self, phase: str, name: str, microbatch: int = -1, unit: int = -1
    ) -> AbstractContextManager[object, bool | None]:
        """Return the range of what is called ``name``, coloured by its ``phase`` (local)."""
        annotation = self._known.get((phase, name, microbatch, unit))
        if annotation is None:
            annotation = self._annotate(
                label(name, microbatch, unit), color=COLORS[phase], domain=DOMAIN, category=phase
            )
            self._known[phase, name, microbatch, unit] = annotation
        return annotation


def label(name: str, microbatch: int = -1, unit: int = -1) -> str:
    """Return the text of a range: "FORWARD microbatch 0 unit 3"; without the numbers that are -1."""
    numbers = (("microbatch", microbatch), ("unit", unit))
    return " ".join([name, *(f"{of} {number}" for of, number in numbers if number >= 0)])


class ConsoleProgress:
    """Console of rank 0; the other ranks are silent.

    ``first`` is the step from which this process goes on, ``every_s`` the seconds between two lines of a log, ``unit``
    the name of what a speed counts. Speeds and the time that is left are those of the steps after the first one of this
    process, which compiles kernels and opens connections: as in the summary of the run. The share of communication is
    the mean since the last line, or for a bar, since the last ``every_s`` seconds have passed.
    """

    def __init__(self, steps: int, first: int, every_s: float, shown: bool, unit: str = "tokens") -> None:
        self._steps, self._first, self._every_s, self._shown, self._unit = steps, first, every_s, shown, unit
        self._begun = self._last = time.monotonic()
        self._warm: tuple[float, int] | None = None  # when the first step was done, and its number
        self._targets = 0  # of the steps after it
        self._communication_s = self._steps_s = 0.0  # since the last line
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

    def step(self, done: int, loss: float, targets: int, communication_s: float, step_s: float) -> None:
        """Report that ``done`` steps are complete; all ranks together predicted ``targets`` in the last step.

        Targets whose gradient came too late do not count. The last step took ``step_s`` seconds, of which this rank
        spent ``communication_s`` in messages.
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
        self._communication_s += communication_s
        self._steps_s += step_s
        figures.append(f"comm {self._communication_s / self._steps_s:.0%}")
        if self._bar is not None:
            self._bar.set_postfix_str(", ".join(figures), refresh=False)
            self._bar.update(1)
        if done == self._warm[1] or now - self._last >= self._every_s or done == self._steps:
            self._last, self._communication_s, self._steps_s = now, 0.0, 0.0
            if self._bar is None:
                line = "  ".join([f"step {done}/{self._steps}", *figures, self._left(done, now)])
                print(line, file=sys.stderr, flush=True)

    def _left(self, done: int, now: float) -> str:
        """Return the estimated time of the steps that are left; after the first step, the seconds that it took."""
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
    """Return the width of the terminal behind stderr, directly or by the launcher; 0 unknown; None without one."""
    if sys.stderr.isatty():
        return 0
    columns = os.environ.get(TERMINAL_COLUMNS, "")
    return int(columns) if columns.isascii() and columns.isdecimal() and int(columns) > 0 else None


class StepLog:
    """Log of special steps, in ``metrics`` and on the console of ``progress`` (rank 0 alone writes)."""

    def __init__(self, trainer: Trainer, metrics: RunMetrics, progress: ConsoleProgress) -> None:
        self._trainer, self._metrics, self._progress = trainer, metrics, progress
        self._loss_scale = 1.0  # of the last row about it
        self._has_suspected = False

    def stepped(self, step: int, result: StepResult) -> None:
        """Log a skipped step, a loss scale other than that of the last row, and a second computation of ``step``."""
        if result.skipped:
            self._progress.say(f"step {step}: skipped, its gradient overflows at the loss scale {result.loss_scale:g}")
        if result.skipped or result.loss_scale != self._loss_scale:
            scale, skipped = result.loss_scale, result.skipped
            self._metrics.put(side_tables.LOSS_SCALE, step=step, scale=scale, skipped=skipped)
            self._loss_scale = result.loss_scale
        self._recomputed(step, result)

    def _recomputed(self, step: int, result: StepResult) -> None:
        """Log the verdict of a second computation of the step, where there was one."""
        if (verdict := result.recomputed) is None:
            return
        if verdict.fault:
            self._progress.say(verdict.fault)
        elif verdict.suspicion and not self._has_suspected:
            why = verdict.suspicion
            self._progress.say(f"step {step}: {why}; computed again, it has the same bits: it is the data")
            self._has_suspected = True  # once is enough: the others are in the metrics
        self._metrics.put(
            side_tables.RECOMPUTED,
            step=step,
            suspicious=bool(verdict.suspicion),
            same=not verdict.fault,
            rank=verdict.ranks[0] if verdict.ranks else -1,
        )

    def shares(self, done: int, first: int) -> None:
        """Write the shares of the steps after ``done``: the known ones from index ``first`` on."""
        if self._trainer.shares is not None:
            for batch, samples in self._trainer.shares.state(done)[first:]:
                self._metrics.put(side_tables.SHARES, first_step=batch + 1, samples=[samples])


SHIFTED_STEPS: Final = 64  # all positions are seen equally often in them; together they wait less than one update
SHIFT_SPAN: Final = "shift"  # of the spans


class StepShifter:
    """Delay of the steps of this rank, for which the others wait in the step (local).

    ``sensor`` returns the part-time power sensor, None while all sensors measure all of the time.
    """

    def __init__(self, sensor: Callable[[], PowerSensor | None], spans: SpanSink) -> None:
        self._sensor, self._spans = sensor, spans
        self._shift: SensorShift | None = None
        self._left = 0

    def wait(self, step: int) -> None:
        """Wait until ``step`` should begin."""
        if not self._left:
            sensor = self._sensor()  # its interval may be known better by now
            self._shift = None if sensor is None else SensorShift(sensor, SHIFTED_STEPS)
            self._left = SHIFTED_STEPS
        self._left -= 1
        if self._shift is None:
            return
        begun = now_ns()
        pause_s = self._shift.pause_s(begun)
        if pause_s > 0:
            time.sleep(pause_s)
            self._spans.add("other", SHIFT_SPAN, step, begun, now_ns())


WAIT_SPAN: Final = "wait for data"
Batch = TypeVar("Batch")


class Instrumentation:
    """Spans, ranges and energy windows of the loop of a rank, whose step is ``step``, or was last. Local."""

    def __init__(self, trainer: Trainer, spans: SpanSink, energy: EnergyRecorder) -> None:
        self.spans, self.energy = spans, energy
        self.step = trainer.first_step
        self.waited_s = 0.0  # for the data of the step that is being made, or was last
        self.ranges = trainer.ranges
        # One rank is enough: the others wait for it in the step.
        shifts = trainer.recipe.energy.shift and trainer.comm.rank == 0
        self._shifting = StepShifter(energy.part_time_sensor, spans) if shifts else None

    @contextmanager
    def phase(self, phase: str, name: str) -> Iterator[None]:
        """Count the time and energy inside in ``phase`` (every rank should call)."""
        begun = now_ns()
        with self.energy.monitor.window(phase), self.ranges(phase, name):
            yield
        self.spans.add(phase, name, self.step, begun, now_ns())

    def awaited(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Yield ``batches``, and record how long this rank waited for each."""
        waiting = iter(batches)
        while True:
            begun = now_ns()
            with self.ranges("data", WAIT_SPAN):
                batch = next(waiting, None)
            self.waited(begun)
            if batch is None:
                return
            if self._shifting is not None:
                self._shifting.wait(self.step + 1)
            yield batch

    def waited(self, begun_ns: int) -> None:
        """Record that this rank has waited for the data of the coming step since ``begun_ns``."""
        end = now_ns()
        self.waited_s = (end - begun_ns) / 1e9
        self.spans.add("data", WAIT_SPAN, self.step + 1, begun_ns, end)

    def stepped(self, step: int, begin_s: float, end_s: float) -> None:
        """Record that ``step`` is done, which lasted from ``begin_s`` to ``end_s`` of `time.perf_counter`."""
        self.step = step
        # That clock is the one of spans: both are the system's monotonic one.
        self.spans.add("step", "step", step, round(begin_s * 1e9), round(end_s * 1e9))
