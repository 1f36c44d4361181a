"""Local SGD and DiLoCo: each rank steps by itself, and all parameters are averaged every H steps.

H local steps, then the mean over the ranks, each with the weight of its samples since the last one (McMahan et al.,
arXiv:1602.05629; Stich, arXiv:1805.09767). A rank steps by the mean gradient of its own samples. With H = 1 plain SGD
is that of one process; with momentum it is where moments are averaged too.

The mean may be one step of an outer optimizer (DiLoCo, Douillard et al., arXiv:2311.08105; Nesterov's form of
Sutskever et al. 2013): with z the parameters after the averaging before,

    d = z - mean;  v <- outer_momentum v + d;  z <- z - outer_learning_rate (d + outer_momentum v)

Saving averages as well, whatever is left of the period, and begins a new one. Moments that ranks keep are averaged
there: what is saved is one model and one state.

With Psi bytes of parameters each of p ranks sends 2 Psi (p-1)/p every H steps, as much again for each moment that is
averaged, and agrees with the others on a few numbers in every step. The outer optimizer keeps Psi, and Psi more for
v.
"""

from collections.abc import Collection, Mapping
from typing import Any, Final

from hpcdist.arrays.backend import namespace
from hpcdist.arrays.store import FlatStore
from hpcdist.optim.update import kernels
from hpcdist.strategies.core.rank_context import RankContext
from hpcdist.strategies.decentralised.config import DecentralisedConfig
from hpcdist.strategies.decentralised.replicas import Replicas
from hpcdist.strategies.schedule.operations import Kind, Operation

OUTER: Final = "optimizer.outer"  # the kind of its velocity in a checkpoint


class OuterOptimizer:
    """Outer optimizer, with the same state on every rank. Local."""

    def __init__(self, context: RankContext, config: DecentralisedConfig) -> None:
        self._rate, self._momentum = config.outer_learning_rate, config.outer_momentum
        self._start = context.store("optimizer")
        self.slots = {OUTER: context.store("optimizer")} if config.outer_momentum else {}

    def begin(self, parameters: FlatStore) -> None:
        """Keep ``parameters`` as the start of the local steps."""
        self._start.copy_from(parameters)

    def step(self, parameters: FlatStore) -> None:
        """Replace ``parameters``, the mean of the replicas, by the start of the next local steps."""
        start, difference = self._start.array, parameters.array
        namespace(start).subtract(start, difference, out=difference)
        if self._momentum:
            velocity = self.slots[OUTER].array
            kernels.momentum_direction(
                start, difference, velocity, scale=1.0, momentum=self._momentum, nesterov=True, decay=0.0
            )
        kernels.descend(start, difference, self._rate)
        difference[...] = start


class LocalSgdExchange(Replicas):
    """Averaging every ``config.period`` steps. Collective over the data axis, but where it says local."""

    def __init__(self, context: RankContext, config: DecentralisedConfig) -> None:
        super().__init__(context)
        self.config = config
        self._outer = OuterOptimizer(context, config) if config.has_outer_optimizer else None
        self._steps = 0  # since parameters were averaged
        self._weights = (0, 0)  # samples of those steps, this rank's and those of all ranks
        self.handlers = {**self.handlers, Kind.AVERAGE: self.replace_by_mean}

    def plan(self) -> list[Operation]:
        """Return the local step, and AVERAGE, which is due in some of the steps."""
        part = self.context.part
        return [
            Operation(Kind.KEEP, range=part),
            Operation(Kind.AGREE),
            *self.sharded_update.plan(),
            Operation(Kind.AVERAGE, range=part),
        ]

    def count_samples(self, own: int, samples: int) -> None:
        """Record how many of the samples of the step are this rank's (local)."""
        self.factor = samples / own if own else 0.0
        before = self._weights if self._steps else (0, 0)
        self._weights = before[0] + own, before[1] + samples

    def begin_update(self, scale: float) -> None:
        """Begin the update of the step."""
        self._steps += 1
        super().begin_update(scale)

    def replace_by_mean(self, op: Operation) -> None:
        """Average where it is due."""
        if self._steps == self.config.period:
            self._take_mean()
            if self.config.moments != "keep":
                self._unite_moments()
            self.apart = self.config.moments == "keep" and bool(self.sharded_update.slots())

    def come_together(self) -> None:
        """Make parameters and moments the same on all ranks. Collective."""
        if self._steps:
            self._take_mean()
        self._unite_moments()

    def _take_mean(self) -> None:
        weight, total = self._weights
        self.note(self.average(self.parameters, weight, total))
        if self._outer is not None:
            self._outer.step(self.parameters)
        self._steps = 0

    def _unite_moments(self) -> None:
        weight, total = self._weights
        for moments in self.sharded_update.slots().values():
            if self.config.moments == "reset":
                moments.zero()
            else:
                self.average(moments, weight, total)

    def load_initial(self, initial: FlatStore) -> None:
        """Load the initial values."""
        super().load_initial(initial)
        self._begin()

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore the optimizer's clock, and begin a period from the restored parameters."""
        super().restore(state)
        self._begin()

    def _begin(self) -> None:
        self.apart, self._steps = False, 0
        if self._outer is not None:
            self._outer.begin(self.parameters)

    def prepare_restore(self, state: Mapping[str, Any]) -> Collection[str]:
        """Return the outer velocity: a checkpoint may lack it, and it begins at rest (local)."""
        return (OUTER,)

    def kept(self) -> dict[str, FlatStore]:
        """Return the stores that are saved beside the parameters, by kind (local)."""
        return super().kept() | (self._outer.slots if self._outer is not None else {})

    def describe(self) -> str:
        """Return period, moments and the outer optimizer (local)."""
        parts = [f"averaging every {self.config.period} steps"]
        if self.sharded_update.slots():
            parts.append(f"moments: {self.config.moments}")
        if self._outer is not None:
            parts.append(
                f"outer Nesterov {self.config.outer_momentum:g}, outer rate {self.config.outer_learning_rate:g}"
            )
        return ", ".join(parts)
