"""Strategies whose replicas differ: a base class, and local SGD with DiLoCo.

Before a checkpoint, parameters and optimizer moments are averaged. This is part of the algorithm: a resumed run has the
bits of a run that saved at the same step. To average n bytes on p ranks, each sends 2 n (p-1)/p.

Consensus distance: sqrt(1/p sum_i ||x_i - mean||^2) / ||mean|| of the replicas x_i, after a step and before averaging.

In local SGD each rank makes its own steps, and all parameters are averaged every H steps. Each rank's weight in the
mean is its number of samples since the last averaging (McMahan et al., arXiv:1602.05629; Stich, arXiv:1805.09767). The
mean may be a step of an outer optimizer (DiLoCo, Douillard et al., arXiv:2311.08105), with z the parameters after the
previous averaging, and v the velocity:

    d = z - mean;  v <- outer_momentum v + d;  z <- z - outer_learning_rate (d + outer_momentum v)

With Psi bytes of parameters, each of p ranks sends 2 Psi (p-1)/p bytes every H steps, more if optimizer states are
averaged. The outer optimizer keeps Psi bytes, and Psi more for v. Saving a checkpoint also averages.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np

from hpcdist import collectives
from hpcdist.arrays.backend import namespace
from hpcdist.arrays.piece import Piece
from hpcdist.arrays.ranges import split
from hpcdist.arrays.store import FlatStore
from hpcdist.collectives.segments import scratch
from hpcdist.optim import kernels, norms
from hpcdist.strategies.core.exchange import Exchange, Handlers, Traits, pieces_of
from hpcdist.strategies.core.operations import Kind, Operation
from hpcdist.strategies.core.rank_context import RankContext, buckets_of_layers
from hpcdist.strategies.core.sharded_update import ShardedUpdate
from hpcdist.strategies.decentralised.config import DecentralisedConfig


class Replicas(Exchange):
    """Base class of strategies whose replicas differ, because each replica updates with its own gradient."""

    # Subclasses average the replicas. Their attribute ``factor``, such as the number of ranks, converts this rank's
    # share of the global mean gradient to the mean gradient of this rank's samples.

    def __init__(self, context: RankContext) -> None:
        self.context, self.traits = context, Traits(algorithm=context.algorithm)
        stores = context.store("parameters", allocate=context.for_replicas("parameters")), context.store("gradients")
        self.update = ShardedUpdate(
            *stores, context.build_optimizer(context.part), [context.part], None, context.agree_algorithm
        )
        self.ranges = buckets_of_layers(context.layout, context.dtype.itemsize, context.bucket_bytes, context.part)
        # Consensus distance by step, equal on all ranks: the relative difference of the replicas from their mean.
        # `new_consensus_distances` returns and clears it.
        self.distances: dict[int, float] = {}
        self.distance = math.nan  # last consensus distance measured in this start
        self.apart = False  # whether a step was made since all replicas were equal
        self.factor = 1.0  # from this rank's share of the mean gradient of all samples to its own gradient
        self._norm_squared = 0.0
        self.handlers: Handlers = {Kind.KEEP: self.keep, **self.update.handlers}

    @property
    def step(self) -> int:
        """Number of updates since the start of training, including the update in progress."""
        return self.update.optimizer.count

    def plan(self) -> list[Operation]:
        raise NotImplementedError

    def keep(self, op: Operation) -> None:
        """Do nothing, because gradients in ``op.range`` are not averaged over the ranks. Local."""

    def norm_squared(self) -> float:
        self._norm_squared = self.update.norm_squared() * self.factor**2
        return self._norm_squared / self.context.data.size

    def begin_update(self, scale: float) -> None:
        """Start the update with this rank's gradient, clipped by this gradient's norm. ``scale`` is ignored. Local."""
        limit, normalizes = self.context.optimizer.clip_norm, self.context.optimizer.normalize_gradient
        clip = norms.clip_scale(self._norm_squared * self.correction**2, limit, normalize=normalizes)
        self.apart = True
        super().begin_update(clip * self.factor * self.correction)

    def average(self, store: FlatStore, weight: int = 1, total: int = 0, *, replace: bool = True) -> np.ndarray:  # (2,)
        """Replace ``store`` by its mean over the data axis. Return [|store - mean|^2, |mean|^2]. Collective.

        ``weight``: factor of this rank's values. ``total``: divisor of the sum (default: number of ranks).
        """
        squares = np.zeros(2)
        for part in (part.intersect(held) for held in store.parts for part in self.ranges if part.intersect(held)):
            values = store.range(part)
            mean = scratch("decentralised.mean", values.size, values.dtype, values)
            if weight == 1:
                mean[...] = values
            else:
                namespace(values).multiply(values, values.dtype.type(weight), out=mean)
            collectives.allreduce(self.context.data, mean, self.context.algorithm)
            mean /= mean.dtype.type(total or self.context.data.size)
            # Without ``replace``, the store is unchanged.
            difference = values if replace else mean
            squares[1] += float(kernels.sum_of_squares(mean))
            namespace(values).subtract(values, mean, out=difference)
            squares[0] += float(kernels.sum_of_squares(difference))
            if replace:
                values[...] = mean
        return squares

    def record_consensus(self, squares: np.ndarray) -> None:
        """Record the consensus distance of this step from ``squares``, the result of `average`. Collective."""
        apart = float(self.agree(squares[:1].copy())[0]) / self.context.data.size
        self.distance = self.distances[self.step] = math.sqrt(apart / squares[1]) if squares[1] else math.nan

    def new_consensus_distances(self) -> dict[int, float]:
        new, self.distances = self.distances, {}
        return new

    def measure(self) -> None:
        self.record_consensus(self.average(self.parameters, replace=False))

    def average_replicas(self) -> None:
        """Average the parameters and the optimizer moments over all ranks. Collective."""
        self.record_consensus(self.average(self.parameters))
        for moments in self.update.slots().values():
            self.average(moments)

    def flush(self) -> bool:
        apart, self.apart = self.apart, False
        if apart:
            self.average_replicas()
        return apart

    def pieces(self) -> Sequence[Piece]:
        part, data = self.context.part, self.context.data
        share = split(part.size, data.size, self.parameters.array.itemsize)[data.rank].shift(part.start)
        return pieces_of({"parameters": self.parameters, **self.kept()}, [share])

    def kept(self) -> dict[str, FlatStore]:
        """Return a dict {kind of optimizer state, such as "optimizer.outer": store to save}."""
        return self.update.slots()

    def wanted(self) -> Sequence[Piece]:
        return pieces_of({"parameters": self.parameters, **self.kept()}, [self.context.part])

    def consensus(self) -> Mapping[str, float]:
        return {"spectral_gap": math.nan, "consensus_distance": self.distance}


OUTER: Final = "optimizer.outer"  # kind of the outer velocity in a checkpoint


class OuterOptimizer:
    """Outer optimizer of local SGD, which updates the averaged parameters.

    The outer gradient is the change of the averaged parameters since the last averaging.
    """

    def __init__(self, context: RankContext, config: DecentralisedConfig) -> None:
        self._rate, self._momentum = config.outer_learning_rate, config.outer_momentum
        self._start = context.store("optimizer")
        self.slots = {OUTER: context.store("optimizer")} if config.outer_momentum else {}

    def begin(self, parameters: FlatStore) -> None:
        """Copy ``parameters`` as the starting point. The outer gradient is the change since this copy."""
        self._start.copy_from(parameters)

    def step(self, parameters: FlatStore) -> None:
        """Make an outer optimizer step from the starting point, and write the result to the averaged ``parameters``."""
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
    """Strategy "local_sgd": ranks average their parameters every ``config.period`` steps."""

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
        """Average the parameters over all ranks if this step ends a period. Collective."""
        if self._steps == self.config.period:
            self._take_mean()
            if self.config.moments != "keep":
                self._unite_moments()
            self.apart = self.config.moments == "keep" and bool(self.update.slots())

    def average_replicas(self) -> None:
        if self._steps:
            self._take_mean()
        self._unite_moments()

    def _take_mean(self) -> None:
        weight, total = self._weights
        self.record_consensus(self.average(self.parameters, weight, total))
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
