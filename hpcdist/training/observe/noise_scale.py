"""Gradient noise scale of a run, measured in its steps (formulas: `hpcdist.optim`).

The small batches are what each replica has of a step: the squared norm of its own gradient is taken before the
exchange overwrites it, that of the global batch is known from clipping. Where gradients are exchanged after each
micro-batch (zero2, zero3, logical shards), each micro-batch of each replica is a small batch. A replica that is
alone, and adds up its micro-batches, takes the first of them. In a pipeline, and on a tensor axis, every rank has a
part of each norm.

Costs, in the steps that are measured: one pass over the own gradients, and two numbers in a message that is sent
anyway. Of 16-bit gradients it is the norm of the rounded ones.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np

from hpcdist.arrays.ranges import Range
from hpcdist.errors import ConfigurationError
from hpcdist.optim import norms
from hpcdist.optim.rates import SmoothedNoise, estimate_noise
from hpcdist.strategies.schedule.executor import Executor, StepResult
from hpcdist.strategies.schedule.operations import Kind, Operation
from hpcdist.strategies.tensor.axis import counted
from hpcdist.telemetry.metrics import side_tables

COMPLETING_PASSES: Final = (Kind.BACKWARD, Kind.BACKWARD_WEIGHT)  # a micro-batch's gradients of a unit are complete
WRITING_PASSES: Final = (*COMPLETING_PASSES, Kind.BACKWARD_INPUT)
WHY_UNKNOWN: Final = (
    "the true gradient is smaller than the error of its estimate; measure longer or more often "
    "(run.noise_scale_every_steps), or over more samples a step"
)


def attach_noise_meter(executor: Executor, operations: Sequence[Operation], every_steps: int) -> "NoiseMeter | None":
    """Let ``executor``, which runs ``operations``, measure the noise of each so many steps; None for 0.

    Collective over the world. Raises ConfigurationError, on all ranks, where no small batch's gradient is to be seen.
    """
    if not every_steps:
        return None
    found = NoiseMeter(executor, every_steps)
    refusals = executor.seat.world.allgather_object(_mixed_microbatches(operations) if found.looks_at_first else "")
    if any(refusals):
        raise ConfigurationError(next(filter(None, refusals)))
    executor.meter = found
    return found


def _mixed_microbatches(operations: Sequence[Operation]) -> str:
    """Return why not, unless each unit's gradients of micro-batch 0 are complete before another writes to them."""
    complete: set[int] = set()
    for op in operations:
        if op.kind in WRITING_PASSES and op.unit not in complete:
            if op.microbatch:
                return (
                    f"run.noise_scale_every_steps with one data rank: its schedule computes {op} before the gradients "
                    "of micro-batch 0 are complete, whose norm would be the small batch's; choose another "
                    "parallel.schedule, more data ranks, or run.noise_scale_every_steps = 0"
                )
            if op.kind in COMPLETING_PASSES:
                complete.add(op.unit)
    return ""


class NoiseMeter:
    """Meter for `Executor.meter`, and the means over the steps. All of it is local."""

    def __init__(self, executor: Executor, every_steps: int) -> None:
        self._executor, self._seat, self._exchange = executor, executor.seat, executor.exchange
        self._every_steps = every_steps
        seat = self._seat
        self.looks_at_first = seat.computes and seat.data.size == 1 and self._exchange.accumulates
        self._speaks = seat.computes and seat.pipeline.rank == 0 and seat.tensor.rank == 0  # for its replica
        self._squared = 0.0
        self.smoothed = SmoothedNoise()
        self._rows: list[tuple[float, ...]] = []

    def went_back(self, op: Operation) -> None:
        """Look at the gradients of a unit when the first micro-batch has gone back, where there is nothing else."""
        sizes = self._executor.sizes
        if self.looks_at_first and op.kind in COMPLETING_PASSES and op.microbatch == 0 and self._is_due() and sizes[0]:
            self._add(op.unit, self._executor.units[op.unit], (self._executor.samples / sizes[0]) ** 2)

    def exchanges(self, op: Operation) -> None:
        """Look at the gradients that ``op`` is about to give away."""
        sizes = self._executor.sizes
        own = sum(sizes) if self._exchange.accumulates else sizes[op.microbatch]
        if self.looks_at_first or not self._is_due() or not own:
            return
        assert op.range is not None
        before = time.perf_counter()
        for unit, part in self._executor.units.items():
            self._add(unit, part.intersect(op.range), self._executor.samples / own)
        taken_s = time.perf_counter() - before  # a pass over the gradients is no communication
        self._executor.outcome.seconds["update_s"] += taken_s
        self._executor.outcome.seconds["communication_s"] -= taken_s

    def numbers(self) -> np.ndarray:  # (2,)
        """Return this rank's part of the small batches' squared norm, and of 1 / their samples; begin anew."""
        samples, sizes = self._executor.samples, self._executor.sizes
        squared, self._squared = self._squared / self._executor.outcome.loss_scale**2, 0.0
        if not (self._is_due() and self._speaks):
            return np.array([squared, 0.0])
        if self.looks_at_first:
            return np.array([squared, 1.0 / sizes[0] if sizes[0] else 0.0])
        batches = bool(sum(sizes)) if self._exchange.accumulates else sum(map(bool, sizes))
        return np.array([squared, batches / samples])

    def _is_due(self) -> bool:
        return self._executor.number % self._every_steps == 0

    def _add(self, unit: int, part: Range, weight: float) -> None:
        """Add ``weight`` times the sum of squares of the gradients of a unit in ``part``."""
        if part:
            store = self._exchange.gradients_at(self._seat.model.stages[unit].layer)
            own = counted(self._seat.layout, [part], self._seat.tensor)
            self._squared += weight * norms.sum_of_squares(store, own)

    def after(self, step: int, found: StepResult) -> None:
        """Take what the ranks have agreed on in ``step``, unless its gradient is none."""
        squared, inverse = found.measured.tolist()
        big, big_squared = self._executor.samples, found.gradient_norm**2
        if not self._is_due() or found.skipped or not (math.isfinite(squared) and math.isfinite(big_squared)):
            return
        self.smoothed.add(estimate_noise(squared, inverse, big_squared, big))
        mean = self.smoothed.mean
        figures = (1.0 / inverse, big, squared, big_squared, mean.gradient_squared, mean.trace, mean.noise_scale)
        self._rows.append((step, *figures))

    def taken(self) -> list[tuple[float, ...]]:
        """Return the rows since the last call."""
        rows, self._rows = self._rows, []
        return rows


def write_noise_scales(include: Callable[[Callable[[Any, int], None]], None], meter: NoiseMeter | None) -> None:
    """Write what ``meter`` measured since the last call by `RunMetrics.include` (rank 0 does, the others forget it)."""
    if meter is not None and (rows := meter.taken()):
        include(lambda file, session: side_tables.append_noise_scales(file, session, rows))


def noise_figures(meter: NoiseMeter | None, batch: int) -> dict[str, Any]:
    """Return what a summary has of the noise at ``batch`` samples a step, {} where it is not measured (local).

    What is not known is None.
    """
    if meter is None:
        return {}
    scale = meter.smoothed.mean.noise_scale
    if not math.isfinite(scale):
        return {"noise_scale": None, "critical_batch": None, "noise_scale_reason": WHY_UNKNOWN}
    return {"noise_scale": scale, "critical_batch": max(1, round(scale)), "global_batch": batch}


def describe_noise(summary: Mapping[str, Any]) -> list[str]:
    """Return the line of a summary that says so, if there is anything to say."""
    if "noise_scale" not in summary:
        return []
    scale, batch = summary["noise_scale"], summary.get("global_batch", 0)
    if scale is None:
        return [f"gradient noise scale not known: {summary['noise_scale_reason']}"]
    if scale <= 0:
        return [f"gradient noise scale {scale:.3g}: the noise is smaller than the error of its estimate"]
    steps, samples = 1 + scale / batch, 1 + batch / scale
    told = f"gradient noise scale {scale:,.1f} samples, the critical batch: at {batch} samples a step a run takes "
    return [f"{told}{steps:.2f} times the fewest steps, and {samples:.2f} times the fewest samples"]
