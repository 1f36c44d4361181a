"""Deep gradient compression (Lin et al., arXiv:1712.01887): SGD with momentum that sends only the largest values.

Each rank keeps a velocity and an unsent value for each element, 8 bytes. It sends the largest unsent values to all
other ranks. Every rank adds the values in rank order, and steps by the sum without momentum. For a tensor of n
elements (or a piece of one, if buckets cut it) and the density d, each of p ranks sends (p-1) 8 ceil(d n) bytes per
step, plus at most 63 bytes of alignment: less than the 2 (p-1)/p 4 n of a dense sum if d < 1/p.

The density is 1/4, 1/16, 1/64 and 1/256 in the four quarters of ``compression.warmup_steps``, but at least
``compression.density``, which holds afterwards.

Weight decay is added to the sum by the owner of the weights, as in SGD (coupled, L2, on matrices). It does not pass
through the momentum. Plain SGD sums the decay up to 1 / (1 - momentum) times, so use a decay larger by this factor.

On one data rank, a step equals a step of SGD with momentum, except for the decay. A restore on another number of ranks
keeps the sum of the velocities, and the sum of the unsent values, over the ranks.
"""

from collections.abc import Mapping
from typing import Final

import numpy as np

from hpcdist.arrays.backend import Array
from hpcdist.arrays.layout import Layout
from hpcdist.arrays.ranges import Range
from hpcdist.compression.dgc import WARMUP_STAGES, DeepGradientCompression, density_at
from hpcdist.compression.topk import TopK
from hpcdist.strategies.compressed.config import CompressionConfig
from hpcdist.strategies.compressed.reduction import CodedUnit, GatheredReduction, GradientCoder
from hpcdist.strategies.core.buckets import buckets_of_rank
from hpcdist.strategies.core.operations import Kind, Operation
from hpcdist.strategies.core.rank_context import RankContext
from hpcdist.strategies.core.sharded_update import ShardedUpdate
from hpcdist.strategies.data.local import LocalGradients
from hpcdist.strategies.data.residuals import Feedback, Residuals

VELOCITY: Final = "velocity"


class DgcCoder(GradientCoder):
    """Encoder of the largest values in ``states``, where unsent values accumulate from step to step. Local."""

    def __init__(self, layout: Layout, density: float, states: Mapping[Range, DeepGradientCompression]) -> None:
        super().__init__(layout, TopK(density=density), seed=0, rank=0)
        self._states = states

    def encode_unit(self, unit: CodedUnit, values: Array, payload: Array) -> None:
        """Write the largest unsent values of the tensor ``unit`` to ``payload``. ``values`` is ignored."""
        self._states[unit.where].encode(payload)


class Dgc(LocalGradients):
    """Deep gradient compression (DGC): ranks exchange the largest values of their momentum (velocity)."""

    # ``context.optimizer`` has the momentum. The optimizer of ``update`` has none.

    def __init__(
        self, context: RankContext, update: ShardedUpdate, config: CompressionConfig, *, masks_velocity: bool = True
    ) -> None:
        # ``masks_velocity``: set the velocity of sent elements to 0.
        super().__init__(context, update, buckets_of_rank(context, np.dtype(np.float32).itemsize))
        self.config = config
        place = context.data.rank, context.data.size, context.parts
        self.unsent = Residuals(context, *place, can_roll_back=False)
        self.velocity = Residuals(context, *place, can_roll_back=False, kind=VELOCITY)
        self.feedback = Feedback(self.unsent, self.velocity)
        u, v = (residuals.feedback.residuals for residuals in (self.velocity, self.unsent))
        self._states = {
            where: DeepGradientCompression(
                where.size,
                momentum=context.optimizer.momentum,
                nesterov=context.optimizer.nesterov,
                masks_velocity=masks_velocity,
                held=(u.range(where), v.range(where)),
            )
            for bucket in self.buckets
            for _, where in context.layout.within(bucket)
        }
        self._by_density = {self.density: self._reduction_at_density()}
        self._clip = 1.0

    @property
    def density(self) -> float:
        """Fraction of the gradient elements that the next update sends."""
        done, steps = self.update.optimizer.count, self.config.warmup_steps
        stage = WARMUP_STAGES * done // steps if steps else WARMUP_STAGES
        return density_at(stage, self.config.density)

    def _reduction_at_density(self) -> GatheredReduction:
        return GatheredReduction(self.context.data, DgcCoder(self.context.layout, self.density, self._states))

    def plan(self) -> list[Operation]:
        return [Operation(Kind.KEEP, range=bucket) for bucket in self.buckets]

    def plan_after_agreement(self) -> list[Operation]:
        return [Operation(Kind.COMPRESS, range=bucket) for bucket in self.buckets]

    def begin_update(self, scale: float, correction: float) -> float:
        self._clip = self.clip_factor(correction)
        density = self.density
        if density not in self._by_density:
            self._by_density = {density: self._reduction_at_density()}
        (self._reduction,) = self._by_density.values()
        return super().begin_update(1.0, correction)  # each rank clips its own gradients

    def compress(self, op: Operation) -> None:
        """Replace the gradients in the range ``op.range`` by the sum of the values that all ranks send."""
        gradients = self.update.gradients.range(op.part)
        for _, where in self.context.layout.within(op.part):
            values, state = gradients[where.shift(-op.part.start).slice], self._states[where]
            state.accumulate(values, self._clip)
            if self.context.data.size == 1:
                state.release(values)
        if self.context.data.size > 1:
            self._reduction.allreduce(gradients, op.part)
