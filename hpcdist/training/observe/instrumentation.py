"""Instrumentation of a loop on one rank: spans, profiler ranges, energy windows, and sensor shift.

The loop reports when it waits, steps, saves and validates.

`StepShifter`: a power sensor that looks 25 ms of every 100 ms sees the same part of each step where steps take a
multiple of 100 ms, and its counter is then wrong by as much as that part is unlike the others. Yang, Adamek and
Armour (arXiv 2312.02741) shift the repetitions of a measurement; in a training, whose ranks step together, one of
them waits.
"""

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Final, TypeVar

from hpcdist.comm.record.spans import SpanSink, now_ns
from hpcdist.energy.accounts.part_time_sensor import PowerSensor, SensorShift
from hpcdist.strategies.schedule.observers import NO_RANGES, ProfilerRanges
from hpcdist.telemetry.config import TelemetryConfig
from hpcdist.training.build.trainer import Trainer
from hpcdist.training.observe.energy import EnergyRecorder

SHIFTED_STEPS: Final = (
    64  # in so many, all positions are seen equally often; they wait for less than one update together
)
SHIFT_SPAN: Final = "shift"  # of the spans


class StepShifter:
    """Waits before steps of this rank, of which others know nothing but that it comes later (local).

    ``sensor`` returns the sensor in question, None while there is none that looks part of the time.
    """

    def __init__(self, sensor: Callable[[], PowerSensor | None], spans: SpanSink) -> None:
        self._sensor, self._spans = sensor, spans
        self._shift: SensorShift | None = None
        self._left = 0

    def wait(self, step: int) -> None:
        """Wait until ``step`` should begin."""
        if not self._left:
            sensor = self._sensor()  # its pace may be known better by now
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
    """Told by a loop what this rank does. ``step`` is the one that is being made, or was last. All of it is local."""

    def __init__(self, trainer: Trainer, spans: SpanSink, energy: EnergyRecorder) -> None:
        self.spans, self.energy = spans, energy
        self.step = trainer.first_step
        self.waited_s = 0.0  # for the data of the step that is being made, or was last
        self.ranges = _ranges(trainer.recipe.telemetry)
        # One rank is enough: the others wait for it in the step.
        shifts = trainer.recipe.energy.shift and trainer.comm.rank == 0
        self._shifting = StepShifter(energy.part_time_sensor, spans) if shifts else None
        trainer.executor.spans = spans
        if self.ranges is not NO_RANGES:
            trainer.executor.annotate(self.ranges)

    @contextmanager
    def phase(self, phase: str, name: str) -> Iterator[None]:
        """Give the time and energy inside to ``phase`` (every rank should call)."""
        begun = now_ns()
        with self.energy.window(phase), self.ranges(phase, name):
            yield
        self.spans.add(phase, name, self.step, begun, now_ns())

    def awaited(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Yield ``batches``, and note how long each was waited for."""
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
        """Note that the data of the coming step is there, for which this rank has waited since ``begun_ns``."""
        end = now_ns()
        self.waited_s = (end - begun_ns) / 1e9
        self.spans.add("data", WAIT_SPAN, self.step + 1, begun_ns, end)

    @contextmanager
    def aside(self, name: str) -> Iterator[None]:
        """Note what takes time between the operations of steps, and is none of the other phases."""
        begun = now_ns()
        yield
        self.spans.add("other", name, self.step, begun, now_ns())

    def stepped(self, step: int, begin_s: float, end_s: float) -> None:
        """Note that ``step`` is done, which lasted from ``begin_s`` to ``end_s`` of `time.perf_counter`."""
        self.step = step
        # That clock is the one of spans: both are the system's monotonic one.
        self.spans.add("step", "step", step, round(begin_s * 1e9), round(end_s * 1e9))


def _ranges(config: TelemetryConfig) -> ProfilerRanges:
    """Return the ranges of a profiler where the recipe wants them; MissingCapabilityError without its package."""
    if not config.nvtx:
        return NO_RANGES
    from hpcdist.telemetry.nvtx import NvtxRanges

    return NvtxRanges()
