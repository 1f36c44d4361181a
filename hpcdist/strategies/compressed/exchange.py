"""Allreduce of compressed gradients, and the base class of exchanges that compress in the place of a momentum.

`CompressedExchange` has the buckets of `AllreduceExchange`, summed by one of the compressed reductions. Where a step
is given up, residuals and factors are those of before it. On one data rank nothing travels, and nothing is
compressed; nor is it on one node where only what leaves a node is. What is owed from before a restore is then paid in
full.

`LocalGradients` is for compressors that take the place of an optimizer's momentum (DGC, 1-bit Adam): what they send
is no sum of gradients, and they keep state that no step may touch which is not made. So the order of a step is:
gradients are complete and nothing is sent (KEEP), all ranks agree that loss and gradients are finite (AGREE),
payloads travel and become the directions of this step (COMPRESS), and the update follows. A step that is not made has
encoded nothing, and nothing has to be taken back.

The norm of the sum of the gradients is then not known. Gradients are divided by the samples of the whole batch, and
what is reported as the gradient norm is sqrt(sum over the ranks of |g_r|^2): the norm of their sum, were those of
different ranks orthogonal, as noise is; where all ranks have the same gradient, theirs has sqrt(P) times that norm.
Clipping goes by the same estimate (Lin et al., arXiv:1712.01887, section 3.2): each of P replicas clips its own
gradient at ``optimizer.clip_norm`` / sqrt(P), its stages and the parts of its tensor axis together by one factor. (A
rank that clips the mean gradient of its own samples at clip_norm, which is P g_r, clips sqrt(P) times harder.)
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from hpcdist.arrays.piece import Piece
from hpcdist.arrays.ranges import Range
from hpcdist.compression.sparsify import dgc
from hpcdist.optim.config import OptimizerConfig
from hpcdist.strategies.allreduce import AllreduceExchange
from hpcdist.strategies.compressed.config import CompressionConfig
from hpcdist.strategies.compressed.error_feedback import (
    ErrorFeedbackExchange,
    Residuals,
    with_loss_scale,
    without_loss_scale,
)
from hpcdist.strategies.compressed.low_rank import QUERY, PowerSgdReduction
from hpcdist.strategies.compressed.reduction import GradientCoder
from hpcdist.strategies.compressed.registry import bucket_reduction
from hpcdist.strategies.core.rank_context import RankContext
from hpcdist.strategies.schedule.operations import Kind, Operation


class LocalGradients(AllreduceExchange):
    """Base of exchanges whose compressor replaces the momentum; ``optimizer``, of the update, has none."""

    def __init__(self, context: RankContext, optimizer: OptimizerConfig) -> None:
        super().__init__(replace(context, optimizer=optimizer))
        self._replica = 0.0  # the squared norm of this replica's gradients, all stages together
        self.handlers = {**self.handlers, Kind.KEEP: self.keep, Kind.COMPRESS: self.compress}

    def keep(self, op: Operation) -> None:
        """Leave the gradients as they are (local)."""

    def compress(self, op: Operation) -> None:
        """Exchange payloads, and turn gradients into directions. Collective over the data axis."""
        raise NotImplementedError

    def norm_squared(self) -> float:
        """Return the squared norm of this rank's own gradients.

        Local, or collective over the world where replicas that are to be clipped have several ranks each.
        """
        own, context = self.sharded_update.norm_squared(), self.context
        if context.optimizer.clip_norm and context.pipeline.size * context.tensor.size > 1:
            replicas = np.zeros(context.data.size)
            replicas[context.data.rank] = own
            self._replica = float(self.agree(replicas)[context.data.rank])
        else:
            self._replica = own
        return own

    def clip_factor(self) -> float:
        """Return the factor that corrects and clips this rank's finite gradients, the same in its replica (local)."""
        limit = self.context.optimizer.clip_norm
        replica = self._replica * self.correction**2
        return self.correction * (dgc.clip_factor(replica, limit, self.context.data.size) if limit else 1.0)


class CompressedExchange(ErrorFeedbackExchange, AllreduceExchange):
    """Allreduce of gradients compressed by ``name``. Collective over the data axis, but where it says local.

    ``seed`` is that of the run: all draws follow from it, the step, the rank and the place of a tensor.
    """

    def __init__(self, context: RankContext, name: str, config: CompressionConfig, seed: int) -> None:
        super().__init__(context)
        self.config = config
        self._owes = False  # residuals of a checkpoint may be due where gradients are not encoded
        self._summing = bucket_reduction(context, name, config, seed)
        self._codes = self._summing.codes
        if config.error_feedback:
            can_roll_back = context.working is not None  # else a norm that is not finite ends the run
            group = self._summing.comm
            self.residuals = Residuals(
                context, group.rank, group.size, self._summing.kept(), can_roll_back=can_roll_back
            )
            self._codes.feedback = self.residuals.feedback

    @property
    def is_compressing(self) -> bool:
        """Whether the gradients of the next update are compressed (local)."""
        return self._summing.comm.size > 1 and self.sharded_update.optimizer.count >= self.config.warmup_steps

    def plan(self) -> list[Operation]:
        """Return REDUCE per bucket, AGREE, then the update of everything."""
        reduces = [Operation(Kind.REDUCE, range=bucket) for bucket in self._summing.buckets]
        return [*reduces, Operation(Kind.AGREE), *self.sharded_update.plan()]

    def begin(self, operations: Sequence[Operation]) -> None:
        """Undo the encoding of a step that was given up, if there was one (local)."""
        self._give_up()
        if isinstance(self._codes, GradientCoder):
            self._codes.step = self.sharded_update.optimizer.count
        else:
            self._codes.owes = self._owes

    def _give_up(self) -> None:
        if self._is_open and isinstance(self._codes, PowerSgdReduction):
            self._codes.rollback()
        super()._give_up()

    def reduce(self, op: Operation) -> None:
        """Sum the gradients of the range in place. Collective over the data axis."""
        if not self.is_compressing:
            self._pay(op.part)
            super().reduce(op)
            return
        self._is_open = True
        gradients = self.gradients.range(op.part)
        values = without_loss_scale(gradients, self._loss_scale)
        self._summing.reduction.allreduce(values, op.part)
        with_loss_scale(values, gradients, self._loss_scale)

    def _pay(self, part: Range) -> None:
        """Add the residuals of ``part`` to its gradients in full, where these are not encoded (local)."""
        if not self._owes or self.residuals is None:
            return
        feedback, gradients = self.residuals.feedback, self.gradients.range(part)
        owing_parts = [own for own in self._summing.reduction.kept(part) if feedback.residuals.range(own).any()]
        if not owing_parts:
            return  # the bits of the gradients stay as they are
        self._is_open = True
        values = without_loss_scale(gradients, self._loss_scale)
        for own in owing_parts:
            within = own.shift(-part.start).slice
            owed = feedback.compensate(own, values[within])
            values[within] = owed
            owed[...] = 0
        with_loss_scale(values, gradients, self._loss_scale)

    def begin_update(self, scale: float) -> None:
        """Begin the update of the step, and commit its residuals."""
        self._owes = False
        super().begin_update(scale)

    def pieces(self) -> Sequence[Piece]:
        """Return the pieces of the base class with residuals; the first rank adds the factors, equal on all."""
        pieces = list(super().pieces())
        if isinstance(self._codes, PowerSgdReduction) and self._summing.comm.rank == 0:
            pieces += self._codes.pieces(self._summing.kept())
        return pieces

    def prepare_restore(self, state: Mapping[str, Any]) -> Collection[str]:
        """Record the ranks whose residuals a checkpoint has; it may lack residuals and factors (local)."""
        return {*super().prepare_restore(state), QUERY}

    def wanted(self) -> Sequence[Piece]:
        """Return the pieces of the base class, residuals and factors, to be restored."""
        factors = self._codes.pieces(self._summing.kept()) if isinstance(self._codes, PowerSgdReduction) else []
        return [*super().wanted(), *factors]

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned, once the pieces are there (local)."""
        super().restore(state)
        self._owes = self.residuals is not None
