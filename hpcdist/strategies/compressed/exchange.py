"""Allreduce of compressed gradients: the buckets of `AllreduceExchange`, summed by one of the compressed ways.

Where a step is given up, residuals and factors are those of before it. On one data rank nothing travels, and nothing
is compressed; nor is it on one node where only what leaves a node is. What is owed from before a restore is then paid
in full.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from hpcdist.arrays.piece import Piece
from hpcdist.arrays.ranges import Range
from hpcdist.strategies.allreduce import AllreduceExchange
from hpcdist.strategies.compressed.build import summing
from hpcdist.strategies.compressed.coder import Coder
from hpcdist.strategies.compressed.config import CompressionConfig
from hpcdist.strategies.compressed.low_rank import QUERY, LowRank
from hpcdist.strategies.compressed.owing import Owing, scaled, unscaled
from hpcdist.strategies.compressed.residuals import Residuals
from hpcdist.strategies.schedule.operations import Kind, Operation
from hpcdist.strategies.seat import Seat


class CompressedExchange(Owing, AllreduceExchange):
    """Gradients summed over the data axis as ``name`` compresses them. Collective over it, but where it says local.

    ``seed`` is that of the run: all draws follow from it, the step, the rank and the place of a tensor.
    """

    def __init__(self, seat: Seat, name: str, config: CompressionConfig, seed: int) -> None:
        super().__init__(seat)
        self.config, self._loss_scale = config, 1.0
        self._owes = False  # residuals of a checkpoint may be due where gradients are not encoded
        self._summing = summing(seat, name, config, seed)
        self._codes = self._summing.codes
        if config.error_feedback:
            can_roll_back = seat.working is not None  # else a norm that is not finite ends the run
            self.residuals = Residuals(seat, self._summing.comm, self._summing.kept(), can_roll_back=can_roll_back)
            self._codes.feedback = self.residuals.feedback

    @property
    def is_compressing(self) -> bool:
        """Whether the gradients of the next update are compressed (local)."""
        return self._summing.comm.size > 1 and self.owner.optimizer.count >= self.config.warmup_steps

    def plan(self) -> list[Operation]:
        """Return REDUCE per bucket, AGREE, then the update of everything."""
        reduces = [Operation(Kind.REDUCE, range=bucket) for bucket in self._summing.buckets]
        return [*reduces, Operation(Kind.AGREE), *self.owner.plan()]

    def begin(self, operations: Sequence[Operation]) -> None:
        """Forget a step that was given up (local)."""
        self._give_up()
        if isinstance(self._codes, Coder):
            self._codes.step = self.owner.optimizer.count
        else:
            self._codes.owes = self._owes

    def _give_up(self) -> None:
        if self._is_open and isinstance(self._codes, LowRank):
            self._codes.rollback()
        super()._give_up()

    def scaled_by(self, loss_scale: float) -> None:
        """Take note of the loss scale of the step that begins (local)."""
        self._loss_scale = loss_scale

    def reduce(self, op: Operation) -> None:
        """Sum the gradients of the range in place. Collective over the data axis."""
        assert op.range is not None
        if not self.is_compressing:
            self._pay(op.range)
            super().reduce(op)
            return
        self._is_open = True
        gradients = self.gradients.range(op.range)
        values = unscaled(gradients, self._loss_scale)
        self._summing.way.allreduce(values, op.range)
        scaled(values, gradients, self._loss_scale)

    def _pay(self, part: Range) -> None:
        """Add to own gradients all that is owed of them: they travel as they are, or not at all (local)."""
        if not self._owes or self.residuals is None:
            return
        feedback, gradients = self.residuals.feedback, self.gradients.range(part)
        kept = [own for own in self._summing.way.kept(part) if feedback.residuals.range(own).any()]
        if not kept:
            return  # the bits of the gradients stay as they are
        self._is_open = True
        values = unscaled(gradients, self._loss_scale)
        for own in kept:
            within = own.shift(-part.start).slice
            owed = feedback.compensate(own, values[within])
            values[within] = owed
            owed[...] = 0
        scaled(values, gradients, self._loss_scale)

    def begin_update(self, scale: float) -> None:
        """Begin the update of the step: what was encoded of its gradients counts."""
        self._owes = False
        super().begin_update(scale)

    def pieces(self) -> Sequence[Piece]:
        """Return also residuals; factors, which all who exchange them have, are those of the first."""
        found = list(super().pieces())
        if isinstance(self._codes, LowRank) and self._summing.comm.rank == 0:
            found += self._codes.pieces(self._summing.kept())
        return found

    def foresee(self, state: Mapping[str, Any]) -> Collection[str]:
        """Take note of whose residuals a checkpoint has; it may lack all of them, and factors (local)."""
        return {*super().foresee(state), QUERY}

    def wanted(self) -> Sequence[Piece]:
        """Return also where residuals and factors go."""
        factors = self._codes.pieces(self._summing.kept()) if isinstance(self._codes, LowRank) else []
        return [*super().wanted(), *factors]

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take back what `state` returned, once the pieces are there (local)."""
        super().restore(state)
        self._owes = self.residuals is not None
