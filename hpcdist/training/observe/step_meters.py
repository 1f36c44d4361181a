"""Meters of the steps of a run: gradient noise scale (formulas: `hpcdist.optim`), and load of the expert routers.

A measurement of the noise scale costs one pass over the local gradients, before the exchange, and two numbers in an
existing message. Its small batch is one replica's samples of a step, or a micro-batch. The routers cost (E + 4) numbers
in the message of the loss for each of L layers with E experts. Loads are integers, so the biases are equal on every
rank. Formulas: `hpcdist.models.experts.router`.
"""

import math
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from hpcdist.arrays.ranges import Range
from hpcdist.errors import ConfigurationError
from hpcdist.models.experts.router import RouterState
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


class StepMeter(StepObserver):
    """Base class of step observers that collect one row of measurements per measured step."""

    def __init__(self) -> None:
        self._rows: list[tuple[float, ...]] = []

    def taken(self) -> list[tuple[float, ...]]:
        """Return a list of the rows since the last call. A row is a tuple of the step number and the measurements."""
        rows, self._rows = self._rows, []
        return rows


class NoiseMeter(StepMeter):
    """Step observer that measures the gradient noise scale every ``every_steps`` steps."""

    def __init__(self, context: RankContext, exchange: Exchange, every_steps: int) -> None:
        super().__init__()
        self._context, self._exchange, self._every_steps = context, exchange, every_steps
        self.looks_at_first = context.computes and context.data.size == 1 and self._exchange.traits.accumulates
        self._speaks = context.computes and context.pipeline.rank == 0 and context.tensor.rank == 0  # one per replica
        self._squared = 0.0
        self.smoothed = SmoothedNoise()

    def check(self, operations: Sequence[Operation]) -> None:
        """Raise ConfigurationError if the noise scale cannot be measured in a step with ``operations``. Collective."""
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
        """Return an array of this rank's terms of two sums: |g|^2 and 1/b.

        g is the mean gradient of the b samples of one replica or micro-batch. The sums are over all ranks. Call this
        method once per ``step``, because the call resets the local sum.
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


def noise_figures(meter: NoiseMeter | None, batch: int) -> dict[str, Any]:
    """Return {name: value} with the gradient noise scale and critical batch size, or {} without ``meter``. Local.

    ``batch``: global batch size. ``meter``: meter of the noise scale, or None.
    """
    if meter is None:
        return {}
    scale = meter.smoothed.mean.noise_scale
    if not math.isfinite(scale):
        return {"noise_scale": None, "critical_batch": None, "noise_scale_reason": WHY_UNKNOWN}
    return {"noise_scale": scale, "critical_batch": max(1, round(scale)), "global_batch": batch}


MANY_DROPPED: Final = 0.5  # fraction of dropped choices that prints a warning


class RouterFigures(NamedTuple):
    """Load balance and losses of the expert routers in one step, averaged over the model's layers."""

    imbalance: float  # load of the busiest expert divided by the mean load
    worst: float  # largest imbalance of a layer
    entropy: float  # of a token's router scores, in nats
    dropped: float  # fraction of the tokens' expert choices that were dropped
    balance_loss: float  # without its coefficient
    z_loss: float  # without its coefficient


class RouterMeter(StepMeter):
    """Step observer that sums the routers' token counts over all ranks, and updates the router biases."""

    def __init__(self, context: RankContext, state: RouterState) -> None:
        super().__init__()
        self._state = state
        self._speaks = context.computes and context.tensor.rank == 0  # ranks of a tensor axis see the same tokens
        self._warns = context.world.rank == 0
        self.last: RouterFigures | None = None
        self.loads = np.zeros((len(state.seen), state.experts))  # loads of the last step, by layer
        self.step = 0

    def begin_step(self, number: int, *_: object) -> None:
        self._state.take()

    def counts(self, step: RunningStep) -> np.ndarray:  # (layers x (experts + EXTRA),)
        seen = self._state.take()
        return (seen if self._speaks else np.zeros_like(seen)).reshape(-1)

    def complete_step(self, step: RunningStep, sums: np.ndarray) -> None:
        seen, experts = sums.reshape(self._state.seen.shape), self._state.experts
        self.loads, self.step = seen[:, :experts].copy(), step.number
        if not step.outcome.skipped:
            self._state.balance(self.loads)
        choices = max(1.0, float(self.loads[0].sum()))
        tokens = choices / self._state.per_token
        busiest = self.loads.max(axis=1) * experts / choices
        dropped, entropy, balance, z = seen[:, experts:].mean(axis=0).tolist()
        self.last = RouterFigures(
            float(busiest.mean()),
            float(busiest.max()),
            entropy / tokens,
            dropped / choices,
            balance / tokens,
            z / tokens,
        )
        self._rows.append((step.number, *self.last))
        if self._warns and self.last.dropped > MANY_DROPPED:
            self._warns = False
            print(
                f"hpcdist: step {step.number}: experts dropped {self.last.dropped:.0%} of the choices of tokens, and "
                f"the busiest had {self.last.worst:.2f} times the mean load; raise model.capacity_factor, or set it "
                "to 0 to drop nothing",
                file=sys.stderr,
                flush=True,
            )


def router_figures(meter: RouterMeter | None) -> dict[str, Any]:
    """Return {"router": {name: value}} for the last step, or {} if ``meter`` is None (no experts). Local."""
    if meter is None or meter.last is None:
        return {}
    return {"router": {name: float(value) for name, value in meter.last._asdict().items()}}


def describe_router(summary: Mapping[str, Any]) -> list[str]:
    """Return a list with the text line about expert routers in ``summary``, or [] for a model without experts."""
    router = summary.get("router")
    if router is None:
        return []
    dropped = f"{router['dropped']:.1%} of their choices dropped" if router["dropped"] else "nothing dropped"
    line = f"experts: the busiest of a layer had {router['imbalance']:.2f} times the mean load ({router['worst']:.2f} "
    return [f"{line}in the worst layer), entropy of a token {router['entropy']:.2f} nats, {dropped}"]
