"""Delayed allreduce: sum gradients while the next step is computed, and apply them one step late.

The gradients of step t, g_t(w_t), are summed over the replicas while step t+1 computes its gradients. Then they are
applied, so that a whole step hides the communication, not only the backward pass:

    w_{t+1} = w_t - eta_{t-1} d(g_{t-1}(w_{t-1}))        for t > 1; w_2 = w_1: the first step updates nothing

where d is the optimizer's direction for a gradient and eta the learning rate. The learning rate, the logged norm, the
clipping and the optimizer's count all belong to the step that produced the gradient. This is asynchronous descent with
a staleness of exactly one (Zinkevich, Smola & Langford, "Slow learners are fast", NIPS 2009; Pipe-SGD, Li et al.,
arXiv:1811.03619), equal on all ranks and reproducible bit for bit.

A checkpoint includes the pending gradient, as pieces of the kind `PENDING`. A resumed run therefore has the same bits
as an uninterrupted run. An evaluation during training uses parameters without the pending gradient. At the end of the
run, `DelayedExchange.finish` applies the pending gradient: w'_{t+1} = w_{t+1} - eta_t d(g_t(w_t)).

Memory: two gradients instead of one. Each of p ranks sends 2 Psi (p-1)/p per step, as without delay. A checkpoint is
larger by Psi bytes.
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
from hpcdist.strategies.core.background import BackgroundCollectives
from hpcdist.strategies.core.exchange import Traits, pieces_of
from hpcdist.strategies.core.operations import Kind, Operation
from hpcdist.strategies.core.rank_context import RankContext, buckets_of_rank
from hpcdist.strategies.core.sharded_update import ShardedUpdate
from hpcdist.strategies.data.exchange import DataExchange, saved_shares
from hpcdist.strategies.data.gatherers import Gatherer
from hpcdist.strategies.data.reducers import Reducer

PENDING: Final = "gradients.pending"  # kind, in a checkpoint, of the summed gradient that is not applied yet


class DelayedExchange(DataExchange):
    """Strategy that allreduces gradients during the next step and applies them one step late."""

    # The backward pass writes into the store ``written``, while the previous step's gradients are summed in the store
    # of ``update``. After the update, the two stores are swapped. Handlers are collective over the data axis.

    def __init__(
        self, context: RankContext, update: ShardedUpdate, written: FlatStore, background: BackgroundCollectives | None
    ) -> None:
        traits = Traits(algorithm=context.algorithm, identical=True, alternates=True, restores=("pending",))
        reducer = Reducer(update, counts=context.data.rank == 0)
        super().__init__(
            context, traits, update, reducer, Gatherer(update), saved_shares(context), background=background
        )
        self._written, self._buckets = written, buckets_of_rank(context, written.array.itemsize)
        self._pending_correction = 1.0  # `correction` of the step whose gradient is pending
        self._is_pending = self._is_deferred = False  # of the store of ``update``, and of ``written``
        self._in_flight: set[tuple[int, Range]] = set()  # (id of the store, bucket)
        self.handlers = {
            **self.handlers,
            Kind.DEFER: self.defer,
            Kind.SETTLE: self.settle,
            Kind.DIRECTION: self.update_if_pending,
            Kind.NORMS: self.update_if_pending,
            Kind.APPLY: self.apply,
        }

    def plan(self) -> list[Operation]:
        deferred = [Operation(kind, range=bucket) for kind in (Kind.DEFER, Kind.SETTLE) for bucket in self._buckets]
        return [*deferred, Operation(Kind.AGREE), *self.update.plan()]

    def gradients_at(self, layer: int) -> FlatStore:
        return self._written

    def defer(self, op: Operation) -> None:
        """Start to allreduce this step's gradients in the flat range ``op.range``. The next step applies them."""
        self._is_deferred = True
        if self.background is not None:
            key = (id(self._written), op.part)
            self.background.start(key, self._written.range(op.part), self.traits.algorithm)
            self._in_flight.add(key)

    def settle(self, op: Operation) -> None:
        """Wait for the allreduce of the previous step's gradients in the flat range ``op.range``."""
        self._settle(self.gradients, op.part)

    def _settle(self, store: FlatStore, bucket: Range) -> None:
        key = (id(store), bucket)
        if key in self._in_flight:
            assert self.background is not None
            self.background.wait(key)
            self._in_flight.remove(key)

    def norm_squared(self) -> float:
        return super().norm_squared() * self._pending_correction**2 if self._is_pending else 0.0

    def agree_losses(self, losses: Sequence[float], values: np.ndarray) -> tuple[float, np.ndarray]:
        loss, sums = super().agree_losses(losses, values)
        if not (math.isfinite(loss) and np.isfinite(sums).all()):
            for bucket in self._buckets:  # the step is given up, and computed again to find the reason
                self._settle(self._written, bucket)
        return loss, sums

    def begin_update(self, scale: float) -> None:
        if self._is_pending:
            super().begin_update(scale * self._pending_correction)

    def update_if_pending(self, op: Operation) -> None:
        """Execute the update operation ``op`` if a gradient is pending. Local."""
        if self._is_pending:
            self.update.handlers[op.kind](op)

    def apply(self, op: Operation) -> None:
        """Update the parameters in the range of ``op``. Local."""
        self.update_if_pending(op)
        if op.range != self.update.parts[-1]:
            return
        self.update.gradients, self._written = self._written, self.update.gradients
        self._is_pending, self._is_deferred = self._is_deferred, False
        self._pending_correction = self.correction

    def finish(self) -> bool:
        """Apply the pending gradient. Raises NonFiniteError on every rank if its norm is not finite. Collective."""
        if not self._is_pending:
            return False
        self._settle_all()
        norm_squared = float(self.agree(np.array([self.norm_squared()]))[0])
        if not math.isfinite(norm_squared):
            raise NonFiniteError(
                f"step {self.update.optimizer.count + 1}: the gradient of this last step has the squared norm "
                f"{norm_squared}, summed over all ranks. This gradient was not applied; lower "
                "optimizer.learning_rate, or set optimizer.clip_norm"
            )
        limit, normalizes = self.context.optimizer.clip_norm, self.context.optimizer.normalize_gradient
        self.begin_update(norms.clip_scale(norm_squared, limit, normalize=normalizes))
        for op in self.update.plan():
            self.update.handlers[op.kind](op)
        self._is_pending = False
        return True

    def _settle_all(self) -> None:
        for bucket in self._buckets:
            self._settle(self.gradients, bucket)

    def pieces(self) -> Sequence[Piece]:
        if not self._is_pending:
            return super().pieces()
        self._settle_all()
        return [*super().pieces(), *pieces_of({PENDING: self.gradients}, self.saved)]

    def prepare_restore(self, state: Mapping[str, Any]) -> Collection[str]:
        return (PENDING,)

    def wanted(self) -> Sequence[Piece]:
        return [*super().wanted(), *pieces_of({PENDING: self.gradients}, self.context.parts)]

    def state(self) -> dict[str, Any]:
        corrected = {} if self._pending_correction == 1.0 else {"pending_correction": self._pending_correction}
        return super().state() | {"pending": self._is_pending} | corrected

    def restore(self, state: Mapping[str, Any]) -> None:
        super().restore(state)
        self._is_pending, self._is_deferred = bool(state.get("pending", False)), False
        self._pending_correction = float(state.get("pending_correction", 1.0))
