"""Base class of strategies whose replicas differ: own steps, and one averaged model in checkpoints.

A rank steps by its own gradient, and clips by the norm of that. The loss that is reported is the mean over the
samples of all ranks, each under the parameters of its own rank; the gradient norm is the root of the mean square over
the ranks. All ranks agree before each update that loss and gradients are finite; the ranks are in lock-step.

A checkpoint is one model: before it, and so at the end of a run, parameters and the moments of the optimizer are
averaged over the ranks. That is part of the algorithm: a run that goes on from a checkpoint has the bits of one that
saved at the same step and went on. Any other strategy, and any number of ranks, can go on from there.

`average` takes one allreduce: with n bytes on p ranks each sends 2 n (p-1)/p on the ring. Values are multiplied by
whole numbers, summed, and divided by a whole number: a factor of 1/p, rounded, would shrink or stretch the model a
little at every averaging.

Consensus distance: sqrt(1/p sum_i ||x_i - mean||^2) / ||mean||, after a step and before any averaging of all, with
the mean that such an averaging takes.
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
from hpcdist.optim import norms
from hpcdist.optim.update import kernels
from hpcdist.strategies.allreduce import buckets_of_layers
from hpcdist.strategies.core.exchange import Handlers, pieces_of
from hpcdist.strategies.core.rank_context import RankContext
from hpcdist.strategies.core.sharded_update import ShardedUpdate, ShardedUpdateExchange
from hpcdist.strategies.schedule.operations import Kind, Operation


class Replicas(ShardedUpdateExchange):
    """Base of replicas that update by their own gradients. A subclass adds their factor, and the averaging.

    ``distances`` has the consensus distance of steps after which it was measured, until somebody takes it; the same
    everywhere.
    """

    replicas_identical = False

    def __init__(self, context: RankContext) -> None:
        super().__init__(context)
        stores = context.store("parameters", allocate=context.for_replicas("parameters")), context.store("gradients")
        self.sharded_update = ShardedUpdate(
            *stores, context.build_optimizer(context.part), [context.part], None, context.agree_algorithm
        )
        self.ranges = buckets_of_layers(context.layout, context.dtype.itemsize, context.bucket_bytes, context.part)
        self.distances: dict[int, float] = {}
        self.distance = math.nan  # the last one that was measured in this start
        self.apart = False  # whether a step was made since all replicas were the same
        self.factor = 1.0  # from this rank's share of the mean gradient of all samples to the gradient that it steps by
        self._norm_squared = 0.0
        self.handlers: Handlers = {Kind.KEEP: self.keep, **self.sharded_update.handlers}

    @property
    def step(self) -> int:
        """Number of updates; once it updates, that of the step under way."""
        return self.sharded_update.optimizer.count

    def plan(self) -> list[Operation]:
        """Return the local step, and the mixing or averaging before or after it."""
        raise NotImplementedError

    def keep(self, op: Operation) -> None:
        """Leave the gradients as they are (local)."""

    def norm_squared(self) -> float:
        """Return this rank's share of the mean of the squared norms of the ranks' own gradients."""
        self._norm_squared = self.sharded_update.norm_squared() * self.factor**2
        return self._norm_squared / self.context.data.size

    def begin_update(self, scale: float) -> None:
        """Begin the update of the step; ``scale``, of a gradient that all share, is replaced by that of the own one."""
        limit, normalizes = self.context.optimizer.clip_norm, self.context.optimizer.normalize_gradient
        own = norms.clip_scale(self._norm_squared * self.correction**2, limit, normalize=normalizes)
        self.apart = True
        super().begin_update(own * self.factor * self.correction)

    def average(self, store: FlatStore, weight: int = 1, total: int = 0, *, replace: bool = True) -> np.ndarray:  # (2,)
        """Return the sums of squares of this rank's values less the mean, and of the mean. Collective.

        The mean counts the values of each rank ``weight`` times; ``total`` is the sum of the weights, 0 for that of
        1 each. With ``replace`` the values of ``store`` are the mean afterwards, the same bits on every rank. Waits for
        a GPU.
        """
        squares = np.zeros(2)
        for part in self.ranges:
            own = store.range(part)
            mean = scratch("decentralised.mean", own.size, own.dtype, own)
            if weight == 1:
                mean[...] = own
            else:
                namespace(own).multiply(own, own.dtype.type(weight), out=mean)
            collectives.allreduce(self.context.data, mean, self.algorithm)
            mean /= mean.dtype.type(total or self.context.data.size)
            apart = own if replace else mean
            squares[1] += float(kernels.sum_of_squares(mean))
            namespace(own).subtract(own, mean, out=apart)
            squares[0] += float(kernels.sum_of_squares(apart))
            if replace:
                own[...] = mean
        return squares

    def note(self, squares: np.ndarray) -> None:
        """Record the consensus distance of this step, from the squares that `average` returned. Collective."""
        apart = float(self.agree(squares[:1].copy())[0]) / self.context.data.size
        self.distance = self.distances[self.step] = math.sqrt(apart / squares[1]) if squares[1] else math.nan

    def new_consensus_distances(self) -> dict[int, float]:
        """Return the consensus distances, by step, since the last call, and forget them (local)."""
        new, self.distances = self.distances, {}
        return new

    def measure(self) -> None:
        """Measure the consensus distance. Collective."""
        self.note(self.average(self.parameters, replace=False))

    def come_together(self) -> None:
        """Make parameters and moments the same on all ranks. Collective."""
        self.note(self.average(self.parameters))
        for moments in self.sharded_update.slots().values():
            self.average(moments)

    def flush(self) -> bool:
        """Make all ranks hold one model and one state of its optimizer; return whether they did not. Collective."""
        apart, self.apart = self.apart, False
        if apart:
            self.come_together()
        return apart

    def pieces(self) -> Sequence[Piece]:
        """Return this rank's share, by bytes, of parameters and optimizer state, which `flush` made the same."""
        part, data = self.context.part, self.context.data
        mine = split(part.size, data.size, self.parameters.array.itemsize)[data.rank].shift(part.start)
        return pieces_of({"parameters": self.parameters, **self.kept()}, [mine])

    def kept(self) -> dict[str, FlatStore]:
        """Return the stores that are saved beside the parameters, by kind (local)."""
        return self.sharded_update.slots()

    def wanted(self) -> Sequence[Piece]:
        """Return all parameters and all state: every rank restores the whole."""
        return pieces_of({"parameters": self.parameters, **self.kept()}, [self.context.part])

    def consensus(self) -> Mapping[str, float]:
        """Return the last consensus distance; the spectral gap is not known (local)."""
        return {"spectral_gap": math.nan, "consensus_distance": self.distance}

    def describe(self) -> str:
        """Return the averaging or mixing of the replicas in words (local)."""
        raise NotImplementedError
