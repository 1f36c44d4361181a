"""Guard on the order of collectives, for layers whose parameters are gathered for each use.

If one rank takes another branch than the other ranks, collectives of different layers match. The ranks would then hang,
or mix up two layers of equal size. So all ranks agree on the order of the first step. In later steps, each rank
compares the local operations with this order, without a message.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Final

import numpy as np
import xxhash

from hpcdist import collectives
from hpcdist.comm.communicator import Communicator
from hpcdist.errors import ScheduleError
from hpcdist.strategies.core.exchange import Handlers
from hpcdist.strategies.core.operations import Kind, Operation

# Kinds that take part in a collective of a layer, or start one.
GUARDED: Final = (Kind.GATHER, Kind.START_GATHER, Kind.REDUCE, Kind.START)


class LockStepGuard:
    """Checker that all data ranks execute collectives in the same order, in training and in evaluation."""

    def __init__(self, data: Communicator, algorithm: str) -> None:
        self._data, self._algorithm = data, algorithm
        self._orders: dict[str, list[Operation]] = {}
        self._pass = ""
        self._due: Iterator[tuple[int, Operation]] | None = None  # None: no list has begun, nothing is compared

    def guarded(self, handlers: Handlers) -> Handlers:
        """Return a copy of ``handlers`` (functions by operation type); types in `GUARDED` first call `meet`. Local."""
        return {kind: self._around(handler) if kind in GUARDED else handler for kind, handler in handlers.items()}

    def _around(self, handler: Callable[[Operation], None]) -> Callable[[Operation], None]:
        def compare_and_handle(op: Operation) -> None:
            self.meet(op)
            handler(op)

        return compare_and_handle

    def begin(self, operations: Sequence[Operation]) -> None:
        """Start to compare a step's ``operations`` with the first step (or evaluation). The first call is collective.

        Raises ScheduleError if the order differs.
        """
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

    def meet(self, op: Operation) -> None:
        """Raise ScheduleError unless ``op`` is the next operation in the order of the first step. Local."""
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
        if votes[0] == ~votes[1]:  # maximum and minimum are equal: all ranks have one digest
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
            f"data rank {self._data.rank} takes another branch than the others in {self._pass}: got {_named(actual)}, "
            f"expected {_named(expected)}{f' as number {index}' if index else ''} of the order agreed on in the first "
            "one; every rank must gather and reduce the same units in the same order"
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
