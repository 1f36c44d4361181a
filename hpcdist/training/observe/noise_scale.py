"""Gradient noise scale of a run, measured during its steps (formulas: `hpcdist.optim`).

The small batch is one replica's samples of a step, or a micro-batch. A measured step costs one pass over the local
gradients, before the exchange, and two numbers in an existing message.
"""

import math
import time
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from hpcdist.arrays.ranges import Range
from hpcdist.errors import ConfigurationError
from hpcdist.optim import norms
from hpcdist.optim.rates import SmoothedNoise, estimate_noise
from hpcdist.strategies.core.exchange import Exchange
from hpcdist.strategies.core.operations import Operation
from hpcdist.strategies.core.rank_context import RankContext
from hpcdist.strategies.core.sharded_update import counted
from hpcdist.strategies.schedule.step import RunningStep, StepObserver
from hpcdist.strategies.schedule.verify.rank_checks import COMPLETES, WRITES

WHY_UNKNOWN: Final = (
    "the true gradient is smaller than the error of its estimate; measure longer or more often "
    "(run.noise_scale_every_steps), or over more samples a step"
)


def _mixed_microbatches(operations: Sequence[Operation]) -> str:
    complete: set[int] = set()
    for op in operations:
        if op.kind in WRITES and op.unit not in complete:
            if op.microbatch:
                return (
                    f"run.noise_scale_every_steps with one data rank needs the gradients of micro-batch 0 alone, but "
                    f"the schedule computes {op} before they are complete; choose another parallel.schedule, more "
                    "data ranks, or run.noise_scale_every_steps = 0"
                )
            if op.kind in COMPLETES:
                complete.add(op.unit)
    return ""


class NoiseMeter(StepObserver):
    """Step observer that measures the gradient noise scale every ``every_steps`` steps."""

    def __init__(self, context: RankContext, exchange: Exchange, every_steps: int) -> None:
        self._context, self._exchange, self._every_steps = context, exchange, every_steps
        self.looks_at_first = context.computes and context.data.size == 1 and self._exchange.traits.accumulates
        self._speaks = context.computes and context.pipeline.rank == 0 and context.tensor.rank == 0  # one per replica
        self._squared = 0.0
        self.smoothed = SmoothedNoise()
        self._rows: list[tuple[float, ...]] = []

    def check(self, operations: Sequence[Operation]) -> None:
        """Raise ConfigurationError on all ranks if the pipeline schedule prevents the measurement. Collective.

        ``operations``: operations of one step on this rank, in order.
        """
        refusals = self._context.world.allgather_object(_mixed_microbatches(operations) if self.looks_at_first else "")
        if any(refusals):
            raise ConfigurationError(next(filter(None, refusals)))

    def went_back(self, step: RunningStep, op: Operation) -> None:
        if not (self.looks_at_first and op.kind in COMPLETES and op.microbatch == 0 and self._is_due(step)):
            return
        if step.sizes[0]:
            self._add(op.unit, step.units[op.unit], (step.samples / step.sizes[0]) ** 2)

    def exchanges(self, step: RunningStep, op: Operation) -> None:
        sizes = step.sizes
        batch_size = sum(sizes) if self._exchange.traits.accumulates else sizes[op.microbatch]
        if self.looks_at_first or not self._is_due(step) or not batch_size:
            return
        before = time.perf_counter()
        for unit, part in step.units.items():
            self._add(unit, part.intersect(op.part), step.samples / batch_size)
        taken_s = time.perf_counter() - before  # not part of the communication
        step.outcome.seconds["update_s"] += taken_s
        step.outcome.seconds["communication_s"] -= taken_s

    def counts(self, step: RunningStep) -> np.ndarray:  # (2,)
        """Return an array of two numbers, whose sums over all ranks are |g|^2 and 1/b. Call this once per step.

        g is the mean gradient of b samples: the samples of one replica or of one micro-batch.
        """
        samples, sizes = step.samples, step.sizes
        squared, self._squared = self._squared / step.outcome.loss_scale**2, 0.0
        if not (self._is_due(step) and self._speaks):
            return np.array([squared, 0.0])
        if self.looks_at_first:
            return np.array([squared, 1.0 / sizes[0] if sizes[0] else 0.0])
        batches = bool(sum(sizes)) if self._exchange.traits.accumulates else sum(map(bool, sizes))
        return np.array([squared, batches / samples])

    def _is_due(self, step: RunningStep) -> bool:
        return step.number % self._every_steps == 0

    def _add(self, unit: int, part: Range, weight: float) -> None:
        if part:
            store = self._exchange.gradients_at(self._context.model.stages[unit].layer)
            ranges = counted(self._context.layout, [part], self._context.tensor)
            self._squared += weight * norms.sum_of_squares(store, ranges)

    def complete_step(self, step: RunningStep, sums: np.ndarray) -> None:
        if not self._is_due(step) or step.outcome.skipped:
            return
        squared, inverse = sums.tolist()
        squared *= step.outcome.correction**2
        big, big_squared = step.samples, step.outcome.gradient_norm**2
        if not (math.isfinite(squared) and math.isfinite(big_squared)):
            return
        self.smoothed.add(estimate_noise(squared, inverse, big_squared, big))
        mean = self.smoothed.mean
        figures = (1.0 / inverse, big, squared, big_squared, mean.gradient_squared, mean.trace, mean.noise_scale)
        self._rows.append((step.number, *figures))

    def taken(self) -> list[tuple[float, ...]]:
        """Return the measurements since the last call, as table rows: one tuple of numbers per measured step."""
        rows, self._rows = self._rows, []
        return rows


def noise_figures(meter: NoiseMeter | None, batch: int) -> dict[str, Any]:
    """Return a dict with the gradient noise scale and the critical batch size, or {} if ``meter`` is None. Local.

    ``batch``: global batch size, in samples.
    """
    if meter is None:
        return {}
    scale = meter.smoothed.mean.noise_scale
    if not math.isfinite(scale):
        return {"noise_scale": None, "critical_batch": None, "noise_scale_reason": WHY_UNKNOWN}
    return {"noise_scale": scale, "critical_batch": max(1, round(scale)), "global_batch": batch}
