"""The exchange of data parallelism in lock-step: reduce gradients, agree, update, gather parameters."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from hpcdist.arrays.piece import Piece
from hpcdist.arrays.ranges import Range
from hpcdist.arrays.store import FlatStore
from hpcdist.strategies.core.background import BackgroundCollectives
from hpcdist.strategies.core.exchange import Exchange, Handlers, pieces_of
from hpcdist.strategies.core.logical_shards import LogicalShards
from hpcdist.strategies.core.operations import Kind, Operation
from hpcdist.strategies.core.rank_context import RankContext
from hpcdist.strategies.core.sharded_update import ShardedUpdate
from hpcdist.strategies.core.traits import Traits
from hpcdist.strategies.data.guard import LockStepGuard
from hpcdist.strategies.data.parts import Gatherer, Reducer


class DataExchange(Exchange):
    """Data-parallel strategy: a gradient ``reducer``, an optimizer ``update`` and a parameter ``gatherer``."""

    def __init__(
        self,
        context: RankContext,
        traits: Traits,
        update: ShardedUpdate,
        reducer: Reducer,
        gatherer: Gatherer,
        saved: Sequence[Range],  # ranges that this rank saves in a checkpoint
        *,
        background: BackgroundCollectives | None = None,  # background collectives of reducer and gatherer
        shards: LogicalShards | None = None,  # fixed micro-batches, whose gradients are summed in a fixed tree
    ) -> None:
        self.context, self.traits, self.update = context, traits, update
        self.reducer, self.gatherer, self.saved = reducer, gatherer, saved
        self.background, self.shards = background, shards
        handlers: Handlers = {**update.handlers, **gatherer.handlers, **reducer.handlers}
        if background is not None:
            handlers = {**handlers, Kind.POLL: lambda op: background.poll()}
        self._guard = LockStepGuard(context.data, context.agree_algorithm) if traits.gathers else None
        self.handlers = handlers if self._guard is None else self._guard.guarded(handlers)

    @property
    def parameters(self) -> FlatStore:
        return self.gatherer.parameters

    def plan(self) -> list[Operation]:
        return [
            *self.reducer.plan(),
            Operation(Kind.AGREE),
            *self.reducer.plan_after_agreement(),
            *self.update.plan(),
            *self.gatherer.plan(),
        ]

    def begin(self, operations: Sequence[Operation]) -> None:
        self.reducer.begin(operations)
        self.gatherer.begin()
        if self._guard is not None:
            self._guard.begin(operations)

    def parameters_at(self, layer: int) -> FlatStore:
        return self.gatherer.parameters_at(layer)

    def gradients_at(self, layer: int) -> FlatStore:
        return self.reducer.gradients_at(layer)

    def norm_squared(self) -> float:
        return self.reducer.norm_squared()

    def agree_losses(self, losses: Sequence[float], values: np.ndarray) -> tuple[float, np.ndarray]:
        if self.shards is None:
            return super().agree_losses(losses, values)
        return self.shards.agree_losses(losses, values, self.agree)

    def scaled_by(self, loss_scale: float) -> None:
        self.reducer.loss_scale = loss_scale

    def begin_update(self, scale: float) -> None:
        scale = self.reducer.begin_update(scale, self.correction)
        self.gatherer.begin_update()
        self.update.begin_update(scale)

    def load_initial(self, initial: FlatStore) -> None:
        super().load_initial(initial)
        self.gatherer.loaded()

    def pieces(self) -> Sequence[Piece]:
        shared = pieces_of({"parameters": self.weights, **self.update.slots()}, self.saved)
        return [*shared, *self.reducer.pieces()]

    def prepare_restore(self, state: Mapping[str, Any]) -> Collection[str]:
        return set(self.reducer.prepare_restore(state))

    def wanted(self) -> Sequence[Piece]:
        return [*super().wanted(), *self.reducer.wanted()]

    def state(self) -> dict[str, Any]:
        return super().state() | self.reducer.state() | (self.shards.state() if self.shards is not None else {})

    def restore(self, state: Mapping[str, Any]) -> None:
        if self.shards is not None:
            self.shards.check(state)
        super().restore(state)
        self.reducer.restored(state)
        self.gatherer.restored()

    def spread(self) -> None:
        self.gatherer.spread()

    def close(self) -> None:
        self.gatherer.close()
