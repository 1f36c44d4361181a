"""Delayed allreduce: sum gradients behind the computation of the next step, and apply them one step late.

The gradients of step t, g_t(w_t), are summed over the replicas while step t+1 computes its own; then they are
applied, so that communication is hidden behind a whole step, not only behind the backward of the layers before:

    w_{t+1} = w_t - eta_{t-1} d(g_{t-1}(w_{t-1}))        for t > 1; w_2 = w_1: the first step updates nothing

where d is what the optimizer makes of a gradient. Everything that belongs to a step is that of the step which
produced the gradient: the index of the learning rate, the norm that is logged and clipped by, the optimizer's count.
This is asynchronous descent with a staleness of exactly one (Zinkevich, Smola & Langford, "Slow learners are fast",
NIPS 2009; Pipe-SGD, Li et al., arXiv:1811.03619), the same on all ranks, and reproducible bit for bit.

A checkpoint has the sum that is not applied yet among its pieces, of the kind `PENDING`: where a run saves changes no
bit of it. An evaluation on the way has not had that gradient. `DelayedExchange.finish` applies it at the end of the
run: w'_{t+1} = w_{t+1} - eta_t d(g_t(w_t)).

Memory: two gradients instead of one. Each of p ranks sends what it sends without delay: 2 Psi (p-1)/p a step. A
checkpoint is larger by Psi.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

import numpy as np

from hpcdist.arrays.piece import Piece
from hpcdist.arrays.ranges import Range
from hpcdist.arrays.store import FlatStore
from hpcdist.errors import NonFiniteError
from hpcdist.optim import norms
from hpcdist.strategies.allreduce import AllreduceExchange, buckets_of_rank
from hpcdist.strategies.core.exchange import pieces_of
from hpcdist.strategies.core.rank_context import RankContext
from hpcdist.strategies.schedule.operations import Kind, Operation

PENDING: Final = "gradients.pending"  # the kind of what is still to be applied, in a checkpoint


class DelayedExchange(AllreduceExchange):
    """Allreduce whose buckets are summed behind the next step (DEFER, SETTLE), and applied at its end.

    Collective over the data axis. Backward writes into one of two stores, the sums of the step before go on in the
    other; after the update they change places.
    """

    alternates = True
    whole_state = False  # the sums under way belong to the step before
    restores: Collection[str] = ("pending",)

    def __init__(self, context: RankContext) -> None:
        super().__init__(context)
        over = context.data if self.overlap is None else self.overlap.over
        # The owner has the store of the step before; there is none in the first step.
        self._written = context.store("gradients", allocate=context.for_replicas("gradients", over))
        self._buckets = buckets_of_rank(context, self._written.array.itemsize)
        self._pending_correction = 1.0  # `correction` of the step whose gradient is pending
        self._is_pending = self._is_deferred = False  # of the owner's store, and of the one that backward writes
        self._under_way: set[tuple[int, Range]] = set()  # (store, bucket)
        self.handlers = {
            Kind.POLL: self.poll,
            **self.sharded_update.handlers,
            Kind.DEFER: self.defer,
            Kind.SETTLE: self.settle,
            Kind.DIRECTION: self.update,
            Kind.NORMS: self.update,
            Kind.APPLY: self.apply,
        }

    def plan(self) -> list[Operation]:
        """Return DEFER per bucket of this step, SETTLE per bucket of the one before, AGREE, and the update."""
        deferred = [Operation(kind, range=bucket) for kind in (Kind.DEFER, Kind.SETTLE) for bucket in self._buckets]
        return [*deferred, Operation(Kind.AGREE), *self.sharded_update.plan()]

    def gradients_at(self, layer: int) -> FlatStore:
        """Return the store of this step's gradients."""
        return self._written

    def defer(self, op: Operation) -> None:
        """Begin to sum the gradients of the range in place. Collective over the data axis."""
        self._is_deferred = True
        if self.overlap is not None:
            key = (id(self._written), op.part)
            self.overlap.start(key, self._written.range(op.part), self.algorithm)
            self._under_way.add(key)

    def settle(self, op: Operation) -> None:
        """Wait for the sum of the range of the step before (local)."""
        self._settle(self.gradients, op.part)

    def _settle(self, store: FlatStore, bucket: Range) -> None:
        key = (id(store), bucket)
        if key in self._under_way:
            assert self.overlap is not None
            self.overlap.wait(key)
            self._under_way.remove(key)

    def norm_squared(self) -> float:
        """Return the share of the gradient that this step applies; 0 where there is none."""
        return super().norm_squared() * self._pending_correction**2 if self._is_pending else 0.0

    def agree_losses(self, losses: Sequence[float], values: np.ndarray) -> tuple[float, np.ndarray]:
        """Sum ``losses`` and ``values`` over the world. Collective."""
        loss, sums = super().agree_losses(losses, values)
        if not (math.isfinite(loss) and np.isfinite(sums).all()):
            for bucket in self._buckets:  # the step is given up, and computed again to find out why
                self._settle(self._written, bucket)
        return loss, sums

    def begin_update(self, scale: float) -> None:
        """Begin the update by the gradient of the step before, where there is one."""
        if self._is_pending:
            super().begin_update(scale * self._pending_correction)

    def update(self, op: Operation) -> None:
        """Carry out ``op``, a part of the update, where a gradient is pending (local)."""
        if self._is_pending:
            self.sharded_update.handlers[op.kind](op)

    def apply(self, op: Operation) -> None:
        """Update the parameters; after the last part, swap the stores of this step and the one before (local)."""
        self.update(op)
        if op.range != self.sharded_update.parts[-1]:
            return
        self.sharded_update.gradients, self._written = self._written, self.sharded_update.gradients
        self._is_pending, self._is_deferred = self._is_deferred, False
        self._pending_correction = self.correction

    def finish(self) -> bool:
        """Apply the gradient of the last step. Collective over the world; raises NonFiniteError on every rank."""
        if not self._is_pending:
            return False
        self._settle_all()
        norm_squared = float(self.agree(np.array([self.norm_squared()]))[0])
        if not math.isfinite(norm_squared):
            raise NonFiniteError(
                f"step {self.sharded_update.optimizer.count + 1}: the gradient of this last step has the squared norm "
                f"{norm_squared}, summed over all ranks. It was not applied: lower optimizer.learning_rate, or set "
                "optimizer.clip_norm"
            )
        limit, normalizes = self.context.optimizer.clip_norm, self.context.optimizer.normalize_gradient
        self.begin_update(norms.clip_scale(norm_squared, limit, normalize=normalizes))
        for op in self.sharded_update.plan():
            self.sharded_update.handlers[op.kind](op)
        self._is_pending = False
        return True

    def _settle_all(self) -> None:
        """Wait for the sum of the last gradient. Collective over the data axis, where it was under way."""
        for bucket in self._buckets:
            self._settle(self.gradients, bucket)

    def pieces(self) -> Sequence[Piece]:
        """Return the pieces of the base class and this rank's share of the pending gradient, once its sum is there.

        Collective over the data axis, where it was under way.
        """
        if not self._is_pending:
            return super().pieces()
        self._settle_all()
        return [*super().pieces(), *pieces_of({PENDING: self.gradients}, self.shares())]

    def prepare_restore(self, state: Mapping[str, Any]) -> Collection[str]:
        """Return the pending gradient: a checkpoint may lack it (local)."""
        return (PENDING,)

    def wanted(self) -> Sequence[Piece]:
        """Return the pieces of the base class and the pending gradient, to be restored."""
        return [*super().wanted(), *pieces_of({PENDING: self.gradients}, self.context.parts)]

    def state(self) -> dict[str, Any]:
        """Return the optimizer's clock, whether a gradient is pending, and its correction unless it is 1."""
        corrected = {} if self._pending_correction == 1.0 else {"pending_correction": self._pending_correction}
        return super().state() | {"pending": self._is_pending} | corrected

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned, once the pieces are there (local)."""
        super().restore(state)
        self._is_pending, self._is_deferred = bool(state.get("pending", False)), False
        self._pending_correction = float(state.get("pending_correction", 1.0))
