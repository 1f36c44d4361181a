"""The lock-step guard: the ranks of a data axis gather and reduce the same layers in the same order.

Where parameters are gathered for each use, a rank that takes another branch than the others would meet them in a
collective of another layer: they hang, or worse, mix up two layers of one size. So the order of the first step is
agreed on by all ranks, and from then on each compares what it is about to do with it, without a message.
"""

from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np
import xxhash

from hpcdist import collectives
from hpcdist.comm.communicator import Communicator
from hpcdist.errors import ScheduleError
from hpcdist.strategies.schedule.operations import Kind, Operation

# What takes part in a collective of a layer, or begins to.
GUARDED: Final = (Kind.GATHER, Kind.START_GATHER, Kind.REDUCE, Kind.START, Kind.DEFER)


class Order:
    """What is due on this rank. A step and an evaluation, which has no AGREE, each have an order of their own."""

    def __init__(self, data: Communicator, algorithm: str) -> None:
        self._data, self._algorithm = data, algorithm
        self._known: dict[str, list[Operation]] = {}
        self._pass = ""
        self._due: Iterator[tuple[int, Operation]] | None = None  # None: no list has begun, nobody is watched

    def begin(self, operations: Sequence[Operation]) -> None:
        """Compare what is about to run with the order agreed on; the first time, agree. Collective then, else local.

        Raises ScheduleError: where the first orders differ on all ranks, later on the one that differs.
        """
        self._pass = "a step" if any(op.kind is Kind.AGREE for op in operations) else "an evaluation"
        order = [op for op in operations if op.kind in GUARDED]
        known = self._known.setdefault(self._pass, order)
        if known is order:
            self._agree(order)
        elif known != order:
            index = _first_difference(known, order)
            raise self._refusal(index, _at(order, index), _at(known, index))
        self._due = enumerate(known, start=1)

    def meet(self, op: Operation) -> None:
        """Raise ScheduleError unless ``op`` is what all ranks do next (local)."""
        if self._due is None:
            return
        index, due = next(self._due, (0, None))
        if due != op:
            raise self._refusal(index, op, due)

    def _agree(self, order: list[Operation]) -> None:
        digest = xxhash.xxh3_64_intdigest(" ".join(map(str, order)).encode()) >> 1  # 63 bits fit an int64
        votes = np.array([digest, ~digest], np.int64)
        collectives.allreduce(self._data, votes, self._algorithm, op="max")
        if votes[0] == ~votes[1]:
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


def _first_difference(one: Sequence[Operation], other: Sequence[Operation]) -> int:
    """Return the number, from 1, of the first entry in which they differ; one of them may have ended there."""
    same = [a == b for a, b in zip(one, other, strict=False)]
    return same.index(False) + 1 if False in same else len(same) + 1


def _at(order: Sequence[Operation], number: int) -> Operation | None:
    return order[number - 1] if number <= len(order) else None


def _named(op: Operation | None) -> str:
    if op is None:
        return "the end"
    return f"{op} of unit {op.unit}" if op.unit >= 0 else str(op)
