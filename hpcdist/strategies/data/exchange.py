"""The exchange of data parallelism in lock-step: reduce gradients, agree, update, gather parameters.

`LockStepGuard` guards the order of collectives, for layers whose parameters are gathered for each use. If one rank
takes another branch than the other ranks, collectives of different layers match. The ranks would then hang, or mix up
two layers of equal size. So all ranks agree on the order of the first step. In later steps, each rank compares the
local operations with this order, without a message.

Next on the path of a gradient: `reducers`. Next on the way back of parameters: `gatherers`.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np
import xxhash

from hpcdist.arrays.piece import Piece
from hpcdist.arrays.ranges import Range, split
from hpcdist.arrays.store import FlatStore
from hpcdist.comm.communicator import Communicator
from hpcdist.errors import ScheduleError
from hpcdist.strategies.core.background import BackgroundCollectives
from hpcdist.strategies.core.exchange import Exchange, Handlers, Traits, have_equal_digests, pieces_of
from hpcdist.strategies.core.logical_shards import LogicalShards
from hpcdist.strategies.core.operations import Kind, Operation
from hpcdist.strategies.core.rank_context import RankContext
from hpcdist.strategies.core.sharded_update import ShardedUpdate, counted
from hpcdist.strategies.data.gatherers import Gatherer
from hpcdist.strategies.data.reducers import Reducer


class DataExchange(Exchange):
    """Data-parallel strategy that consists of a gradient reducer, an optimizer update and a parameter gatherer."""

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
        self.update.loss_scale = loss_scale

    def begin_update(self, scale: float) -> None:
        scale = self.reducer.begin_update(scale, self.correction)
        self.gatherer.begin_update()
        self.update.begin_update(scale, self.rate_factor)

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


def saved_shares(context: RankContext) -> list[Range]:
    """Return a list of the flat ranges of replicated state that this rank saves in a checkpoint. Local."""
    data, dtype = context.data, context.dtype if context.working is None else context.master_dtype
    shares = [split(part.size, data.size, dtype.itemsize)[data.rank].shift(part.start) for part in context.parts]
    return counted(context.layout, shares, context.tensor)


# Kinds that take part in a collective of a layer, or start one.
GUARDED: Final = (Kind.GATHER, Kind.START_GATHER, Kind.REDUCE, Kind.START)


class LockStepGuard:
    """Guard that checks that all data ranks execute collectives in the same order."""

    def __init__(self, data: Communicator, algorithm: str) -> None:
        self._data, self._algorithm = data, algorithm
        self._orders: dict[str, list[Operation]] = {}
        self._pass = ""
        self._due: Iterator[tuple[int, Operation]] | None = None  # None: no list has begun, nothing is compared

    def guarded(self, handlers: Handlers) -> Handlers:
        """Return ``handlers`` with a call of `check_next` before each handler that communicates. Local.

        ``handlers``: dict {operation type: function}.
        """
        return {kind: self._around(handler) if kind in GUARDED else handler for kind, handler in handlers.items()}

    def _around(self, handler: Callable[[Operation], None]) -> Callable[[Operation], None]:
        def compare_and_handle(op: Operation) -> None:
            self.check_next(op)
            handler(op)

        return compare_and_handle

    def begin(self, operations: Sequence[Operation]) -> None:
        """Raise ScheduleError if a step's ``operations`` differ from the first step. The first call is collective."""
        self._pass = "a step" if any(op.kind is Kind.AGREE for op in operations) else "an evaluation"
        order = [op for op in operations if op.kind in GUARDED]
        agreed = self._orders.setdefault(self._pass, order)
        # Only the first call raises on all ranks. Later calls raise only on the rank that differs.
        if agreed is order:  # just stored: the first list of its kind. An equal list of a later step is another object
            self._agree(order)
        elif agreed != order:
            index = _first_difference(agreed, order)
            raise self._refusal(index, _at(order, index), _at(agreed, index))
        self._due = enumerate(agreed, start=1)

    def check_next(self, op: Operation) -> None:
        """Raise ScheduleError if the next collective of the first step was not ``op``. Local."""
        if self._due is None:
            return
        index, due = next(self._due, (0, None))  # beyond the end no operation is due
        if due != op:
            raise self._refusal(index, op, due)

    def _agree(self, order: list[Operation]) -> None:
        digest = xxhash.xxh3_64_intdigest(" ".join(map(str, order)).encode())
        if have_equal_digests(self._data, digest, self._algorithm):
            return
        orders = self._data.allgather_object(order)
        rank = next(rank for rank, other in enumerate(orders) if other != orders[0])
        index = _first_difference(orders[0], orders[rank])
        raise ScheduleError(
            f"data ranks execute the collectives of {self._pass} in different orders: collective number {index} is "
            f"{_named(_at(orders[rank], index))} on rank {rank}, but {_named(_at(orders[0], index))} on rank 0; every "
            "rank must take the same branches of the program"
        )

    def _refusal(self, index: int, actual: Operation | None, expected: Operation | None) -> ScheduleError:
        return ScheduleError(
            f"data rank {self._data.rank} takes another branch than other ranks in {self._pass}: got {_named(actual)}, "
            f"expected {_named(expected)}{f' as number {index}' if index else ''} of the collectives, as in the first "
            "step or evaluation; every rank must gather and reduce the same units in the same order"
        )


def _first_difference(first: Sequence[Operation], second: Sequence[Operation]) -> int:
    same = [a == b for a, b in zip(first, second, strict=False)]
    return same.index(False) + 1 if False in same else len(same) + 1


def _at(order: Sequence[Operation], number: int) -> Operation | None:
    return order[number - 1] if number <= len(order) else None


def _named(op: Operation | None) -> str:
    if op is None:
        return "the end"
    return f"{op} of unit {op.unit}" if op.unit >= 0 else str(op)
