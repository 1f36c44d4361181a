"""What looks on while a loop runs, and changes nothing: windows of energy, spans of a rank, ranges for a profiler."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Final, TypeVar

from hpcdist.comm.record.spans import SpanSink, now_ns
from hpcdist.strategies.schedule.observers import NO_RANGES, ProfilerRanges
from hpcdist.telemetry.config import TelemetryConfig
from hpcdist.training.energy import Energy
from hpcdist.training.shifting import Shifting
from hpcdist.training.trainer import Trainer

WAIT: Final = "wait for data"
Batch = TypeVar("Batch")


class Onlookers:
    """Told by a loop what this rank does. ``step`` is the one that is being made, or was last. All of it is local."""

    def __init__(self, trainer: Trainer, spans: SpanSink, energy: Energy) -> None:
        self.spans, self.energy = spans, energy
        self.step = trainer.first_step
        self.waited_s = 0.0  # for the data of the step that is being made, or was last
        self.ranges = _ranges(trainer.recipe.telemetry)
        # One rank is enough: the others wait for it in the step.
        shifts = trainer.recipe.energy.shift and trainer.comm.rank == 0
        self._shifting = Shifting(energy.part_time_sensor, spans) if shifts else None
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
            with self.ranges("data", WAIT):
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
        self.spans.add("data", WAIT, self.step + 1, begun_ns, end)

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
