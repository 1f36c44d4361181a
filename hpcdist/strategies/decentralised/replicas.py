"""Base class of strategies with differing replicas: own steps, and one averaged model in checkpoints.

Before a checkpoint, parameters and optimizer moments are averaged. This is part of the algorithm: a resumed run has the
bits of a run that saved at the same step. To average n bytes on p ranks, each sends 2 n (p-1)/p.

Consensus distance: sqrt(1/p sum_i ||x_i - mean||^2) / ||mean|| of the replicas x_i, after a step and before averaging.
"""

import math
from collections.abc import Mapping, Sequence

import numpy as np

from hpcdist import collectives
from hpcdist.arrays.backend import namespace
from hpcdist.arrays.piece import Piece
from hpcdist.arrays.ranges import split
from hpcdist.arrays.store import FlatStore
from hpcdist.collectives.segments import scratch
from hpcdist.optim import kernels, norms
from hpcdist.strategies.core.buckets import buckets_of_layers
from hpcdist.strategies.core.exchange import Exchange, Handlers, pieces_of
from hpcdist.strategies.core.operations import Kind, Operation
from hpcdist.strategies.core.rank_context import RankContext
from hpcdist.strategies.core.sharded_update import ShardedUpdate
from hpcdist.strategies.core.traits import Traits


class Replicas(Exchange):
    """Base class of strategies whose replicas differ, because each rank updates with its own gradient."""

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
        """Ignore the operation ``op``: this rank's gradients are not averaged over the ranks. Local."""

    def norm_squared(self) -> float:
        """Return this rank's squared gradient norm divided by the number of ranks."""
        self._norm_squared = self.update.norm_squared() * self.factor**2
        return self._norm_squared / self.context.data.size

    def begin_update(self, scale: float) -> None:
        """Start the update with this rank's gradient, clipped by its own norm; the argument ``scale`` is ignored."""
        limit, normalizes = self.context.optimizer.clip_norm, self.context.optimizer.normalize_gradient
        clip = norms.clip_scale(self._norm_squared * self.correction**2, limit, normalize=normalizes)
        self.apart = True
        super().begin_update(clip * self.factor * self.correction)

    def average(self, store: FlatStore, weight: int = 1, total: int = 0, *, replace: bool = True) -> np.ndarray:  # (2,)
        """Replace ``store`` by its mean over the data axis. Return [|store - mean|^2, |mean|^2]. Collective.

        ``weight``: this rank's weight. ``total``: sum of the weights, by default all 1.
        """
        squares = np.zeros(2)
        for part in self.ranges:
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

    def note(self, squares: np.ndarray) -> None:
        """Compute and record this step's consensus distance from ``squares``, the result of `average`. Collective."""
        apart = float(self.agree(squares[:1].copy())[0]) / self.context.data.size
        self.distance = self.distances[self.step] = math.sqrt(apart / squares[1]) if squares[1] else math.nan

    def new_consensus_distances(self) -> dict[int, float]:
        new, self.distances = self.distances, {}
        return new

    def measure(self) -> None:
        self.note(self.average(self.parameters, replace=False))

    def come_together(self) -> None:
        """Average the parameters and the optimizer moments over all ranks. Collective."""
        self.note(self.average(self.parameters))
        for moments in self.update.slots().values():
            self.average(moments)

    def flush(self) -> bool:
        apart, self.apart = self.apart, False
        if apart:
            self.come_together()
        return apart

    def pieces(self) -> Sequence[Piece]:
        """Return this rank's checkpoint pieces: its shard of the averaged parameters and optimizer state."""
        part, data = self.context.part, self.context.data
        share = split(part.size, data.size, self.parameters.array.itemsize)[data.rank].shift(part.start)
        return pieces_of({"parameters": self.parameters, **self.kept()}, [share])

    def kept(self) -> dict[str, FlatStore]:
        """Return a dict of optimizer arrays to save in a checkpoint, keyed by name, such as ``optimizer.outer``."""
        return self.update.slots()

    def wanted(self) -> Sequence[Piece]:
        return pieces_of({"parameters": self.parameters, **self.kept()}, [self.context.part])

    def consensus(self) -> Mapping[str, float]:
        return {"spectral_gap": math.nan, "consensus_distance": self.distance}
