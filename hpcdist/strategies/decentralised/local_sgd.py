"""Local SGD and DiLoCo: each rank makes its own steps, and all parameters are averaged every H steps.

Each rank's weight in the mean is its number of samples since the last averaging (McMahan et al., arXiv:1602.05629;
Stich, arXiv:1805.09767). The mean may be a step of an outer optimizer (DiLoCo, Douillard et al., arXiv:2311.08105),
with z the parameters after the previous averaging, and v the velocity:

    d = z - mean;  v <- outer_momentum v + d;  z <- z - outer_learning_rate (d + outer_momentum v)

With Psi bytes of parameters, each of p ranks sends 2 Psi (p-1)/p bytes every H steps, more if optimizer states are
averaged. The outer optimizer keeps Psi bytes, and Psi more for v. Saving a checkpoint also averages.
"""

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any, Final

from hpcdist.arrays.backend import namespace
from hpcdist.arrays.store import FlatStore
from hpcdist.optim import kernels
from hpcdist.strategies.core.operations import Kind, Operation
from hpcdist.strategies.core.rank_context import RankContext
from hpcdist.strategies.decentralised.config import DecentralisedConfig
from hpcdist.strategies.decentralised.replicas import Replicas

OUTER: Final = "optimizer.outer"  # kind of the outer velocity in a checkpoint


class OuterOptimizer:
    """Outer optimizer of local SGD. Its gradient is the decrease of the mean parameters since the last averaging."""

    def __init__(self, context: RankContext, config: DecentralisedConfig) -> None:
        self._rate, self._momentum = config.outer_learning_rate, config.outer_momentum
        self._start = context.store("optimizer")
        self.slots = {OUTER: context.store("optimizer")} if config.outer_momentum else {}

    def begin(self, parameters: FlatStore) -> None:
        """Save a copy of ``parameters``, from which the next outer gradient is computed."""
        self._start.copy_from(parameters)

    def step(self, parameters: FlatStore) -> None:
        """Replace the averaged ``parameters`` by the result of an outer optimizer step."""
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
    """Local SGD: averages parameters every ``config.period`` steps. Methods are collective over the data axis."""

    def __init__(self, context: RankContext, config: DecentralisedConfig) -> None:
        super().__init__(context)
        self.config = config
        self._outer = OuterOptimizer(context, config) if config.has_outer_optimizer else None
        self._steps = 0  # steps since the last averaging
        self._weights = (0, 0)  # samples of those steps: (this rank's, all ranks')
        self.handlers = {**self.handlers, Kind.AVERAGE: self.replace_by_mean}
        self.traits = replace(self.traits, mixing=self._describe())

    def plan(self) -> list[Operation]:
        part = self.context.part
        return [
            Operation(Kind.KEEP, range=part),
            Operation(Kind.AGREE),
            *self.update.plan(),
            Operation(Kind.AVERAGE, range=part),
        ]

    def count_samples(self, local_samples: int, samples: int) -> None:
        self.factor = samples / local_samples if local_samples else 0.0
        before = self._weights if self._steps else (0, 0)
        self._weights = before[0] + local_samples, before[1] + samples

    def begin_update(self, scale: float) -> None:
        self._steps += 1
        super().begin_update(scale)

    def replace_by_mean(self, op: Operation) -> None:
        """Every ``config.period`` steps, average the parameters over all ranks; else do nothing. Collective.

        After averaging, the optimizer moments are kept, averaged or reset, as ``config.moments`` says.
        """
        if self._steps == self.config.period:
            self._take_mean()
            if self.config.moments != "keep":
                self._unite_moments()
            self.apart = self.config.moments == "keep" and bool(self.update.slots())

    def come_together(self) -> None:
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
        for moments in self.update.slots().values():
            if self.config.moments == "reset":
                moments.zero()
            else:
                self.average(moments, weight, total)

    def load_initial(self, initial: FlatStore) -> None:
        super().load_initial(initial)
        self._begin()

    def restore(self, state: Mapping[str, Any]) -> None:
        super().restore(state)
        self._begin()

    def _begin(self) -> None:
        self.apart, self._steps = False, 0
        if self._outer is not None:
            self._outer.begin(self.parameters)

    def prepare_restore(self, state: Mapping[str, Any]) -> Collection[str]:
        return (OUTER,)

    def kept(self) -> dict[str, FlatStore]:
        return super().kept() | (self._outer.slots if self._outer is not None else {})

    def _describe(self) -> str:
        parts = [f"averaging every {self.config.period} steps"]
        if self.update.slots():
            parts.append(f"moments: {self.config.moments}")
        if self._outer is not None:
            parts.append(
                f"outer Nesterov {self.config.outer_momentum:g}, outer rate {self.config.outer_learning_rate:g}"
            )
        return ", ".join(parts)
