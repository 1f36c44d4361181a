"""Instrumentation of a training loop on one rank.

A power sensor may measure 25 ms of every 100 ms. If the step time is a multiple of 100 ms, it always sees the same
part of a step. `StepShifter` therefore delays steps (Yang, Adamek and Armour, arXiv:2312.02741).
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
from hpcdist.energy.part_time_sensor import PowerSensor, SensorShift
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
}  # RGB by phase, the same in every chart


class NvtxRanges:
    """Factory of NVTX profiler ranges on this rank. Raises MissingCapabilityError without the package nvtx."""

    def __init__(self) -> None:
        try:
            import nvtx
        except ImportError as error:
            raise MissingCapabilityError(
                f"telemetry.nvtx needs the package nvtx: pip install 'hpcdist[trace]', or set telemetry.nvtx = false "
                f"({error})"
            ) from error
        self._annotate: Any = nvtx.annotate
        # A profiler keeps every text, so the texts contain no step numbers.
        self._known: dict[tuple[str, str, int, int], AbstractContextManager[object, bool | None]] = {}

    def __call__(
        self, phase: str, name: str, microbatch: int = -1, unit: int = -1
    ) -> AbstractContextManager[object, bool | None]:
        """Return a context manager for a profiler range, whose text is a result of `label`.

        ``phase``: phase of the step, which selects the colour of the range.
        """
        annotation = self._known.get((phase, name, microbatch, unit))
        if annotation is None:
            annotation = self._annotate(
                label(name, microbatch, unit), color=COLORS[phase], domain=DOMAIN, category=phase
            )
            self._known[phase, name, microbatch, unit] = annotation
        return annotation


def label(name: str, microbatch: int = -1, unit: int = -1) -> str:
    """Return the text of a profiler range, such as "FORWARD microbatch 0 unit 3".

    A ``microbatch`` or ``unit`` (number of a model layer) of -1 is left out of the text.
    """
    numbers = (("microbatch", microbatch), ("unit", unit))
    return " ".join([name, *(f"{of} {number}" for of, number in numbers if number >= 0)])


class ConsoleProgress:
    """Console output of a training on rank 0: a progress bar or log lines."""

    # ``steps``: number of the last step. ``first``: steps completed before this process started. ``every_s``: seconds
    # between log lines. ``shown``: True on rank 0. Speed and time to the end exclude this process's first step.
    def __init__(self, steps: int, first: int, every_s: float, shown: bool, unit: str = "tokens") -> None:
        self._steps, self._first, self._every_s, self._shown, self._unit = steps, first, every_s, shown, unit
        self._begun = self._last = time.monotonic()
        self._warm: tuple[float, int] | None = None  # end time and number of the first step
        self._targets = 0  # targets of the steps after the first
        self._communication_s = self._steps_s = 0.0  # since the last line
        columns = _terminal_columns() if shown else None
        self._bar: tqdm[None] | None = None
        if columns is not None:
            self._bar = tqdm(total=steps, initial=first, unit="step", file=sys.stderr, ncols=columns or None)

    def say(self, text: str) -> None:
        """Print ``text`` as a line, above the progress bar if a bar is shown."""
        if not self._shown:
            return
        if self._bar is not None:
            self._bar.write(text, file=sys.stderr)
        else:
            print(text, file=sys.stderr, flush=True)

    def step(self, done: int, loss: float, targets: int, communication_s: float, step_s: float) -> None:
        """Show the loss and speed after step number ``done``. ``communication_s``: communication time of the step.

        ``targets``: number of targets in the loss over all ranks, without targets of dropped gradients. ``step_s``:
        seconds of the whole step.
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
        assert self._warm is not None
        warm_s, warm = self._warm
        if done == warm:
            return f"first step {now - self._begun:.1f} s, with compiling"
        return f"ETA {(self._steps - done) * (now - warm_s) / (done - warm):.0f} s"

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()


def _terminal_columns() -> int | None:
    if sys.stderr.isatty():
        return 0
    columns = os.environ.get(TERMINAL_COLUMNS, "")
    return int(columns) if columns.isascii() and columns.isdecimal() and int(columns) > 0 else None


class StepLog:
    """Logger of skipped and recomputed steps. On rank 0, writes to ``metrics`` and to the console."""

    def __init__(self, trainer: Trainer, metrics: RunMetrics, progress: ConsoleProgress) -> None:
        self._trainer, self._metrics, self._progress = trainer, metrics, progress
        self._loss_scale = 1.0  # last logged loss scale
        self._has_suspected = False

    def stepped(self, step: int, result: StepResult) -> None:
        """Log ``step`` if ``result`` shows that the step was skipped or recomputed, or that the loss scale changed."""
        if result.skipped:
            self._progress.say(f"step {step}: skipped, its gradient overflows at the loss scale {result.loss_scale:g}")
        if result.skipped or result.loss_scale != self._loss_scale:
            scale, skipped = result.loss_scale, result.skipped
            self._metrics.put(side_tables.LOSS_SCALE, step=step, scale=scale, skipped=skipped)
            self._loss_scale = result.loss_scale
        self._recomputed(step, result)

    def _recomputed(self, step: int, result: StepResult) -> None:
        if (verdict := result.recomputed) is None:
            return
        if verdict.fault:
            self._progress.say(verdict.fault)
        elif verdict.suspicion and not self._has_suspected:
            reason = verdict.suspicion
            self._progress.say(f"step {step}: {reason}; the recomputation gave the same bits: the data is unusual")
            self._has_suspected = True  # print once: the metrics have all
        self._metrics.put(
            side_tables.RECOMPUTED,
            step=step,
            suspicious=bool(verdict.suspicion),
            same=not verdict.fault,
            rank=verdict.ranks[0] if verdict.ranks else -1,
        )

    def shares(self, done: int, *, only_last: bool) -> None:
        """Write the planned numbers of samples per replica, for steps after ``done``, to the metrics file."""
        if self._trainer.shares is not None:
            for batch, samples in self._trainer.shares.state(done)[-1 if only_last else 0 :]:
                self._metrics.put(side_tables.SHARES, first_step=batch + 1, samples=[samples])


SHIFTED_STEPS: Final = 64  # steps of one cycle of delays, whose sum is less than one sensor update
SHIFT_SPAN: Final = "shift"


class StepShifter:
    """Delay before each step, so that a power sensor measures all phases of a step equally often. Local."""

    # ``sensor()``: None if all sensors measure continuously. Delaying one rank is enough: other ranks wait for it.
    def __init__(self, sensor: Callable[[], PowerSensor | None], spans: SpanSink) -> None:
        self._sensor, self._spans = sensor, spans
        self._shift: SensorShift | None = None
        self._left = 0

    def wait(self, step: int) -> None:
        """Sleep before ``step``, so that the power sensor does not measure the same phases as in the step before."""
        if not self._left:
            sensor = self._sensor()  # its interval may be estimated better by now
            self._shift = None if sensor is None else SensorShift(sensor, SHIFTED_STEPS)
            self._left = SHIFTED_STEPS
        self._left -= 1
        if self._shift is None:
            return
        start = now_ns()
        pause_s = self._shift.pause_s(start)
        if pause_s > 0:
            time.sleep(pause_s)
            self._spans.add("other", SHIFT_SPAN, step, start, now_ns())


WAIT_SPAN: Final = "wait for data"
Batch = TypeVar("Batch")


class Instrumentation:
    """Recorder of time spans, profiler ranges and energy windows in one rank's training loop. Local."""

    def __init__(self, trainer: Trainer, spans: SpanSink, energy: EnergyRecorder) -> None:
        self.spans, self.energy = spans, energy
        self.step = trainer.first_step
        self.waited_s = 0.0  # wait for the data of the current step
        self.ranges = trainer.ranges
        # One rank is enough: the others wait for it in the step.
        shifts = trainer.recipe.energy.shift and trainer.comm.rank == 0
        self._shifting = StepShifter(energy.part_time_sensor, spans) if shifts else None

    @contextmanager
    def phase(self, phase: str, name: str) -> Iterator[None]:
        """Record the time and energy of the body of a ``with`` statement. All ranks should enter the body together.

        ``phase``: type of activity, such as "validation". ``name``: label of the time span in traces.
        """
        start = now_ns()
        with self.energy.monitor.window(phase), self.ranges(phase, name):
            yield
        self.spans.add(phase, name, self.step, start, now_ns())

    def awaited(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Yield the items of the iterator ``batches``, and record the time that this rank waits for each item."""
        waiting = iter(batches)
        while True:
            start = now_ns()
            with self.ranges("data", WAIT_SPAN):
                batch = next(waiting, None)
            self.waited(start)
            if batch is None:
                return
            if self._shifting is not None:
                self._shifting.wait(self.step + 1)
            yield batch

    def waited(self, begun_ns: int) -> None:
        """Record that this rank waited for data from ``begun_ns`` (monotonic clock, nanoseconds) to now."""
        end = now_ns()
        self.waited_s = (end - begun_ns) / 1e9
        self.spans.add("data", WAIT_SPAN, self.step + 1, begun_ns, end)

    def stepped(self, step: int, begin_s: float, end_s: float) -> None:
        """Record that ``step`` lasted from ``begin_s`` to ``end_s``, both times of `time.perf_counter`."""
        self.step = step
        # Both clocks are the monotonic clock of the system.
        self.spans.add("step", "step", step, round(begin_s * 1e9), round(end_s * 1e9))
