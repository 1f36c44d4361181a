"""Reducers with compressed messages for ranks that hold the whole model.

`CodedSum` sums gradients as float32 without loss scale. If a step is given up, the previous step's residuals are
restored.

`LocalGradients` is the base class for compressors in place of the optimizer's momentum: DGC and 1-bit Adam. Their
payloads are not sums of gradients, and their state must not change in a step that is given up. So a step is:
gradients are complete and nothing is sent (KEEP, or REDUCE after the warm-up); all ranks agree that loss and gradients
are finite (AGREE); payloads travel and become the update directions (COMPRESS); the update follows.

The norm of the summed gradient is not known. The reported norm is sqrt(sum over the ranks of |g_r|^2), where g_r is
divided by the samples of the global batch. It is the norm of the sum if the gradients of different ranks are
orthogonal, like noise; equal gradients on P ranks have a sum with sqrt(P) times that norm. Clipping uses the same
estimate (Lin et al., arXiv:1712.01887, section 3.2): each of P replicas clips its own gradient at
``optimizer.clip_norm`` / sqrt(P), with one factor for all ranks of the replica.

`Dgc` is deep gradient compression (Lin et al.): SGD with momentum that sends only the largest values. Each rank keeps a
velocity and an unsent value for each element, 8 bytes. It sends the largest unsent values to all other ranks. Every
rank adds the values in rank order, and steps by the sum without momentum. For a tensor of n elements (or a piece of
one, if buckets cut it) and the density d, each of p ranks sends (p-1) 8 ceil(d n) bytes per step, plus at most 63 bytes
of alignment: less than the 2 (p-1)/p 4 n of a dense sum if d < 1/p. The density is 1/4, 1/16, 1/64 and 1/256 in the
four quarters of ``compression.warmup_steps``, but at least ``compression.density``, which holds afterwards.

Weight decay is added to the sum by the owner of the weights, as in SGD (coupled, L2, on matrices). It does not pass
through the momentum. Plain SGD sums the decay up to 1 / (1 - momentum) times, so use a decay larger by this factor. On
one data rank, a step equals a step of SGD with momentum, except for the decay. A restore on another number of ranks
keeps the sum of the velocities, and the sum of the unsent values, over the ranks.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

import numpy as np

from hpcdist import collectives
from hpcdist.arrays.backend import Array
from hpcdist.arrays.layout import Layout
from hpcdist.arrays.piece import Piece
from hpcdist.arrays.ranges import Range
from hpcdist.compression.dgc import WARMUP_STAGES, DeepGradientCompression, clip_factor, density_at
from hpcdist.compression.topk import TopK
from hpcdist.strategies.compressed.config import CompressionConfig
from hpcdist.strategies.compressed.low_rank import QUERY, PowerSgdReduction
from hpcdist.strategies.compressed.reduction import CodedUnit, GatheredReduction, GradientCoder
from hpcdist.strategies.compressed.registry import bucket_reduction
from hpcdist.strategies.core.operations import Kind, Operation
from hpcdist.strategies.core.rank_context import RankContext, buckets_of_rank
from hpcdist.strategies.core.sharded_update import ShardedUpdate
from hpcdist.strategies.data.reducers import Reducer, Sum
from hpcdist.strategies.data.residuals import Feedback, Residuals, with_loss_scale, without_loss_scale


class CodedSum(Sum):
    """Allreduce of gradients with a compressor. Construction is collective over the data axis."""

    def __init__(
        self, context: RankContext, update: ShardedUpdate, name: str, config: CompressionConfig, seed: int
    ) -> None:
        self._coded = bucket_reduction(context, name, config, seed)
        super().__init__(context, update, buckets=self._coded.buckets)
        self._codes, self._warmup_steps = self._coded.codes, config.warmup_steps
        self._owes = False  # gradients that are not encoded may lack residuals of a checkpoint
        if config.error_feedback:
            can_roll_back = context.working is not None  # else a gradient that is not finite ends the run
            comm = self._coded.comm
            residuals = Residuals(context, comm.rank, comm.size, self._coded.kept(), can_roll_back=can_roll_back)
            self.feedback = Feedback(residuals)
            self._codes.feedback = residuals.feedback

    @property
    def is_compressing(self) -> bool:
        """True if the gradients of the next update are compressed."""
        return self._coded.comm.size > 1 and self.update.optimizer.count >= self._warmup_steps

    def begin(self, operations: Sequence[Operation]) -> None:
        self._give_up()
        if isinstance(self._codes, PowerSgdReduction):
            self._codes.owes = self._owes
        else:
            self._codes.step = self.update.optimizer.count

    def _give_up(self) -> None:
        if self.feedback.is_open and isinstance(self._codes, PowerSgdReduction):
            self._codes.rollback()
        self.feedback.give_up()

    def reduce(self, op: Operation) -> None:
        if not self.is_compressing:
            self._pay(op.part)
            super().reduce(op)
            return
        self.feedback.is_open = True
        gradients = self.update.gradients.range(op.part)
        values = without_loss_scale(gradients, self.update.loss_scale)
        self._coded.reduction.allreduce(values, op.part)
        with_loss_scale(values, gradients, self.update.loss_scale)

    def _pay(self, part: Range) -> None:
        # Adds residuals to gradients that this step does not compress.
        if not self._owes or not self.feedback.residuals:
            return
        (residuals,) = self.feedback.residuals
        feedback, gradients = residuals.feedback, self.update.gradients.range(part)
        owing_parts = [kept for kept in self._coded.reduction.kept(part) if feedback.residuals.range(kept).any()]
        if not owing_parts:
            return  # adding zeros could change bits of the gradients
        self.feedback.is_open = True
        values = without_loss_scale(gradients, self.update.loss_scale)
        for kept in owing_parts:
            within = kept.shift(-part.start).slice
            owed = feedback.compensate(kept, values[within])
            values[within] = owed
            owed[...] = 0
        with_loss_scale(values, gradients, self.update.loss_scale)

    def begin_update(self, scale: float, correction: float) -> float:
        self._owes = False
        return super().begin_update(scale, correction)

    def _factors(self) -> list[Piece]:
        return self._codes.pieces(self._coded.kept()) if isinstance(self._codes, PowerSgdReduction) else []

    def pieces(self) -> list[Piece]:
        self._give_up()
        return [*super().pieces(), *(self._factors() if self._coded.comm.rank == 0 else [])]

    def prepare_restore(self, state: Mapping[str, Any]) -> Collection[str]:
        return [*super().prepare_restore(state), QUERY]

    def wanted(self) -> list[Piece]:
        return [*super().wanted(), *self._factors()]

    def restored(self, state: Mapping[str, Any]) -> None:
        super().restored(state)
        self._owes = bool(self.feedback.residuals)


class LocalGradients(Reducer):
    """Base class of reducers that apply the momentum themselves, in place of the optimizer."""

    def __init__(self, context: RankContext, update: ShardedUpdate, buckets: Sequence[Range]) -> None:
        super().__init__(update)
        self.context, self.buckets = context, buckets
        self._replica = 0.0  # squared norm of this replica's gradients, over all of its ranks
        self.handlers = {Kind.KEEP: self.keep, Kind.COMPRESS: self.compress}

    def keep(self, op: Operation) -> None:
        """Do nothing, because the gradients in the flat range ``op.range`` stay on this rank. Local."""

    def compress(self, op: Operation) -> None:
        """Exchange compressed gradients of ``op.range``, and replace them by update directions. Collective."""
        raise NotImplementedError

    def norm_squared(self) -> float:
        """Return the sum of squares of this rank's gradients.

        Collective if gradients are clipped, because each replica then needs the norm of its gradient on all its ranks.
        """
        squared, context = self.update.norm_squared(), self.context
        self._replica = squared
        if context.optimizer.clip_norm and context.pipeline.size * context.tensor.size > 1:
            replicas = np.zeros(context.data.size)
            replicas[context.data.rank] = squared
            collectives.allreduce(context.world, replicas, context.agree_algorithm)
            self._replica = float(replicas[context.data.rank])
        return squared

    def clip_factor(self, correction: float) -> float:
        """Return the gradient clipping factor of this replica, times ``correction``. Local.

        ``correction``: factor by which the update multiplies this step's gradient.
        """
        limit = self.context.optimizer.clip_norm
        replica = self._replica * correction**2
        return correction * (clip_factor(replica, limit, self.context.data.size) if limit else 1.0)


VELOCITY: Final = "velocity"


class DgcCoder(GradientCoder):
    """Encoder that sends only the largest values. Unsent values accumulate from step to step. Local."""

    def __init__(self, layout: Layout, density: float, states: Mapping[Range, DeepGradientCompression]) -> None:
        super().__init__(layout, TopK(density=density), seed=0, rank=0)
        self._states = states

    def encode_unit(self, unit: CodedUnit, values: Array, payload: Array) -> None:
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
        gradients = self.update.gradients.range(op.part)
        for _, where in self.context.layout.within(op.part):
            values, state = gradients[where.shift(-op.part.start).slice], self._states[where]
            state.accumulate(values, self._clip)
            if self.context.data.size == 1:
                state.release(values)
        if self.context.data.size > 1:
            self._reduction.allreduce(gradients, op.part)
