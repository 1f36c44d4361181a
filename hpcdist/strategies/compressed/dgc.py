"""Deep gradient compression as an exchange: SGD's momentum before the wire, Lin et al. (arXiv:1712.01887).

See `hpcdist.compression.sparsify.dgc` for the maths. Each rank keeps for each element a velocity and what is unsent
of it, 8 bytes; it sends the largest of what is unsent to all others, who add up what came in order of ranks and step
by the sum, without momentum of their own. For tensors of n elements, or pieces of them where buckets cut them, and the
density d, each of p ranks sends (p-1) 8 ceil(d n) bytes a step, and up to 63 more to align the payload of a tensor:
below the 2 (p-1)/p 4 n of a dense sum where d is below 1/p.

The density is 1/4, 1/16, 1/64 and 1/256 in the four quarters of ``compression.warmup_steps``, never below
``compression.density``, and that afterwards. Gradients are clipped where they are: see `LocalGradients`.

Weight decay stays with the owner of the weights, who adds decay w to the sum before the step, as SGD does (coupled,
L2, on matrices); it is the same on all ranks and need not travel. It does not pass through the momentum: that of
plain SGD sums it up to 1 / (1 - momentum) times as much, so a decay that is to do the same is as much larger.

On one data rank everything is sent, to nobody: the steps are those of SGD with momentum, but for that decay. A
checkpoint for another number of ranks keeps the sums over the ranks, of the velocities as of what is unsent (see
`hpcdist.strategies.compressed.error_feedback`): both go into what is stepped by as sums.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

import numpy as np

from hpcdist.arrays.backend import Array
from hpcdist.arrays.layout import Layout
from hpcdist.arrays.ranges import Range
from hpcdist.compression.sparsify.dgc import WARMUP_STAGES, DeepGradientCompression, density_at
from hpcdist.compression.sparsify.topk import TopK
from hpcdist.strategies.allreduce import buckets_of_rank
from hpcdist.strategies.compressed.config import CompressionConfig
from hpcdist.strategies.compressed.error_feedback import ErrorFeedbackExchange, Residuals
from hpcdist.strategies.compressed.exchange import LocalGradients
from hpcdist.strategies.compressed.reduction import CodedUnit, GatheredReduction, GradientCoder
from hpcdist.strategies.core.rank_context import RankContext
from hpcdist.strategies.schedule.operations import Kind, Operation

VELOCITY: Final = "velocity"


class DgcCoder(GradientCoder):
    """Coder that sends the largest of the unsent values; the gradients that it is given are not looked at."""

    def __init__(self, layout: Layout, density: float, states: Mapping[Range, DeepGradientCompression]) -> None:
        super().__init__(layout, TopK(density=density), seed=0, rank=0)
        self._states = states

    def encode_unit(self, unit: CodedUnit, values: Array, payload: Array) -> None:
        """Write the payload of one unit, and clear the values that it has from the unsent ones."""
        self._states[unit.where].encode(payload)


class DgcExchange(ErrorFeedbackExchange, LocalGradients):
    """Exchange of sparse velocities over the data axis. Collective over it, but where it says local.

    Without ``masks_velocity`` elements that are sent keep their velocity: with all of them sent that is momentum SGD.
    """

    def __init__(self, context: RankContext, config: CompressionConfig, *, masks_velocity: bool = True) -> None:
        optimizer = context.optimizer
        super().__init__(context, replace(optimizer, momentum=0.0, nesterov=False))
        self.config = config
        self.buckets = buckets_of_rank(context, np.dtype(np.float32).itemsize)
        own = context.data.rank, context.data.size, context.parts
        self.unsent = Residuals(self.context, *own, can_roll_back=False)
        self.velocity = Residuals(self.context, *own, can_roll_back=False, kind=VELOCITY)
        u, v = (residuals.feedback.residuals for residuals in (self.velocity, self.unsent))
        self._states = {
            where: DeepGradientCompression(
                where.size,
                momentum=optimizer.momentum,
                nesterov=optimizer.nesterov,
                masks_velocity=masks_velocity,
                held=(u.range(where), v.range(where)),
            )
            for bucket in self.buckets
            for _, where in context.layout.within(bucket)
        }
        self._by_density = {self.density: self._gathered()}
        self._clip = 1.0

    @property
    def all_residuals(self) -> tuple[Residuals, ...]:
        """The unsent values and the velocities of this rank."""
        return self.unsent, self.velocity

    @property
    def density(self) -> float:
        """The share of elements that the next update sends (local)."""
        done, steps = self.sharded_update.optimizer.count, self.config.warmup_steps
        stage = WARMUP_STAGES * done // steps if steps else WARMUP_STAGES
        return density_at(stage, self.config.density)

    def _gathered(self) -> GatheredReduction:
        return GatheredReduction(self.context.data, DgcCoder(self.context.layout, self.density, self._states))

    def plan(self) -> list[Operation]:
        """Return KEEP per bucket, AGREE, COMPRESS per bucket, then the update of everything."""
        keeps, sent = (
            [Operation(kind, range=bucket) for bucket in self.buckets] for kind in (Kind.KEEP, Kind.COMPRESS)
        )
        return [*keeps, Operation(Kind.AGREE), *sent, *self.sharded_update.plan()]

    def begin_update(self, scale: float) -> None:
        """Begin the update of the step; ``scale`` is not used: each rank clips its own gradients."""
        self._clip = self.clip_factor()
        density = self.density
        if density not in self._by_density:
            self._by_density = {density: self._gathered()}
        (self._reduction,) = self._by_density.values()
        super().begin_update(1.0)

    def compress(self, op: Operation) -> None:
        """Replace the gradients of the range by the sum of what all ranks send of it."""
        gradients = self.gradients.range(op.part)
        for _, where in self.context.layout.within(op.part):
            own, state = gradients[where.shift(-op.part.start).slice], self._states[where]
            state.accumulate(own, self._clip)
            if self.context.data.size == 1:
                state.release(own)
        if self.context.data.size > 1:
            self._reduction.allreduce(gradients, op.part)
