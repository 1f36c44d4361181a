"""Overlap of ZeRO's messages with computation, a layer around the plain path, and the guard on their order.

  REDUCE   ->  START ... WAIT                  the whole gradient of a layer is freed, and its shard taken in, by WAIT
  GATHER   ->  START_GATHER ... WAIT_GATHER

Sums of gradients go on behind a backward, and layers are gathered ahead. All of it goes over a communicator of its
own, so memory that is exchanged here is shared over that one, and further memory is taken there only when nothing is
under way.

`LockStepGuard`: where parameters are gathered for each use, a rank that takes another branch than the others would
meet them in a collective of another layer: they hang or, worse, mix up two layers of one size. So the order of the
first step is agreed on by all ranks, and from then on each compares what it is about to do with it, without a
message.
"""

from collections.abc import Iterator, Sequence
from typing import Any, Final

import numpy as np
import xxhash

from hpcdist import collectives
from hpcdist.arrays.store import FlatStore
from hpcdist.comm.communicator import Communicator
from hpcdist.errors import ConfigurationError, ScheduleError
from hpcdist.strategies.core.exchange import BackgroundCollectives
from hpcdist.strategies.core.parameter_views import TransientLayers
from hpcdist.strategies.core.rank_context import RankContext
from hpcdist.strategies.schedule.operations import Kind, Operation
from hpcdist.strategies.zero.config import ShardingDegrees, ZeroConfig
from hpcdist.strategies.zero.levels import WHOLE, Levels
from hpcdist.strategies.zero.plain import PlainZero

# Kinds that take part in a collective of a layer, or start one.
GUARDED: Final = (Kind.GATHER, Kind.START_GATHER, Kind.REDUCE, Kind.START, Kind.DEFER)


class LockStepGuard:
    """Guard on the order of collectives: one order for a step, and one for an evaluation, which has no AGREE."""

    def __init__(self, data: Communicator, algorithm: str) -> None:
        self._data, self._algorithm = data, algorithm
        self._known: dict[str, list[Operation]] = {}
        self._pass = ""
        self._due: Iterator[tuple[int, Operation]] | None = None  # None: no list has begun, nobody is watched

    def begin(self, operations: Sequence[Operation]) -> None:
        """Compare ``operations`` with the agreed order; the first time, agree on it. Collective then, else local.

        Raises ScheduleError: where the first orders differ on all ranks, later on the one that differs.
        """
        self._pass = "a step" if any(op.kind is Kind.AGREE for op in operations) else "an evaluation"
        order = [op for op in operations if op.kind in GUARDED]
        known = self._known.setdefault(self._pass, order)
        if known is order:  # just stored: the first list of its kind. An equal one of a later step is another object
            self._agree(order)
        elif known != order:
            index = _first_difference(known, order)
            raise self._refusal(index, _at(order, index), _at(known, index))
        self._due = enumerate(known, start=1)

    def meet(self, op: Operation) -> None:
        """Raise ScheduleError unless ``op`` is next in the agreed order (local)."""
        if self._due is None:
            return
        index, due = next(self._due, (0, None))  # beyond the end no operation is due
        if due != op:
            raise self._refusal(index, op, due)

    def _agree(self, order: list[Operation]) -> None:
        digest = xxhash.xxh3_64_intdigest(" ".join(map(str, order)).encode()) >> 1  # 63 bits fit an int64
        # ~x falls where x rises, so the maximum of ~x is the complement of the minimum of x: one reduction finds both.
        votes = np.array([digest, ~digest], np.int64)
        collectives.allreduce(self._data, votes, self._algorithm, op="max")
        if votes[0] == ~votes[1]:  # maximum and minimum are the same: all ranks have one digest
            return
        orders = self._data.allgather_object(order)
        rank = next(rank for rank, other in enumerate(orders) if other != orders[0])
        index = _first_difference(orders[0], orders[rank])
        raise ScheduleError(
            f"the data ranks do not agree on the order of {self._pass}: number {index} of rank {rank} is "
            f"{_named(_at(orders[rank], index))}, of rank 0 {_named(_at(orders[0], index))}; every rank must take the "
            "same branches"
        )

    def _refusal(self, index: int, got: Operation | None, expected: Operation | None) -> ScheduleError:
        return ScheduleError(
            f"data rank {self._data.rank} takes another branch than the others in {self._pass}: got {_named(got)}, "
            f"expected {_named(expected)}{f' as number {index}' if index else ''} of the order agreed on in the first "
            "one; every rank must gather and reduce the same units in the same order"
        )


def _first_difference(first: Sequence[Operation], second: Sequence[Operation]) -> int:
    """Return the number, from 1, of the first entry in which they differ; one of them may have ended there."""
    same = [a == b for a, b in zip(first, second, strict=False)]
    return same.index(False) + 1 if False in same else len(same) + 1


def _at(order: Sequence[Operation], number: int) -> Operation | None:
    return order[number - 1] if number <= len(order) else None


def _named(op: Operation | None) -> str:
    if op is None:
        return "the end"
    return f"{op} of unit {op.unit}" if op.unit >= 0 else str(op)


class OverlappedZero(PlainZero):
    """Layer of ZeRO that overlaps messages with computation, where ``communication.overlap`` says so.

    What starts and waits is collective over the data axis. Raises ConfigurationError for sharding degrees with which it
    cannot.
    """

    def __init__(self, context: RankContext, degrees: ShardingDegrees, config: ZeroConfig, **of_base: Any) -> None:
        self._prefetch = config.prefetch
        super().__init__(context, degrees, config, **of_base)
        if self.overlap is not None:
            self.handlers = {
                **self.handlers,
                Kind.START: self.start,
                Kind.WAIT: self.wait,
                Kind.START_GATHER: self.start_gather,
                Kind.WAIT_GATHER: self.wait_gather,
                Kind.POLL: self.poll,
            }

    def _make_levels(self, degrees: ShardingDegrees) -> Levels:
        context, levels = self.context, super()._make_levels(degrees)
        if context.overlap != "none" and context.data.size > 1:
            if not levels.at_once:
                raise ConfigurationError(
                    f"communication.overlap = {context.overlap!r} with sharding degrees that are neither 1 nor all of "
                    f"the {context.data.size} data ranks is not built in this version: only what is cut over all of "
                    "them in one step goes on beside the computation; set zero.parameters, zero.gradients and "
                    "zero.optimizer to 0, or communication.overlap = 'none'"
                )
            # Made here, before any store: memory that is exchanged in the background is shared over its communicator.
            self.overlap, self.ahead = BackgroundCollectives(context.data, context.overlap), self._prefetch
        self._order = LockStepGuard(context.data, context.agree_algorithm)
        return levels

    def _transient_layers(self, name: str, units: Sequence[int], over: Communicator | None) -> TransientLayers:
        if self.overlap is None or not (name == "gradients" or self.ahead):
            return super()._transient_layers(name, units, over)
        return TransientLayers(self.context, name, units, self.overlap.over, self.overlap.drain)

    def _gradients_of_all_layers(self, over: Communicator | None) -> FlatStore:
        return super()._gradients_of_all_layers(over if self.overlap is None else self.overlap.over)

    def begin(self, operations: Sequence[Operation]) -> None:
        """Guard the order of the list, where parameters are gathered for each use."""
        super().begin(operations)
        if self.gathers:
            self._order.begin(operations)

    def reduce(self, op: Operation) -> None:
        """Sum the gradients of a layer, in the agreed order."""
        self._order.meet(op)
        super().reduce(op)

    def gather(self, op: Operation) -> None:
        """All-gather a layer, in the agreed order; wait for one that was started ahead."""
        self._order.meet(op)
        layer = self.context.model.stages[op.unit].layer
        if layer in self._cut_layers and self.overlap is not None and self.ahead:
            self._start_gather(layer)
            self.overlap.wait(layer)
        else:
            super().gather(op)

    def start(self, op: Operation) -> None:
        """Begin to sum the gradients of a layer."""
        assert self.overlap is not None
        self._order.meet(op)
        layer = self._layer_of(op)
        whole = self.gradients_at(layer).range(self.levels.cuts[layer][WHOLE])
        self.overlap.start_sum(op.range, whole, self.levels.shares(layer), self.levels.algorithm)

    def wait(self, op: Operation) -> None:
        """Wait for the sum, and keep this rank's shard of it."""
        assert self.overlap is not None
        self.overlap.wait(op.range)
        self._keep_shard(self._layer_of(op))

    def start_gather(self, op: Operation) -> None:
        """Begin to all-gather a layer."""
        self._order.meet(op)
        self._start_gather(self._layer_of(op))

    def wait_gather(self, op: Operation) -> None:
        """Wait for the gathered layer."""
        assert self.overlap is not None
        self.overlap.wait_gather(self._layer_of(op))

    def _start_gather(self, layer: int) -> None:
        assert self.overlap is not None
        whole = self._with_own_shard(layer).range(self.levels.cuts[layer][WHOLE])
        self.overlap.start_gather(layer, whole, self.levels.shares(layer), self.levels.algorithm)
