"""Lists whose exchanges go on behind the computation: pure functions from the list of a rank to one that starts early.

What is started is waited for in the same order, so that a list without these passes and one with them exchange the same
buffers in the same order, and end with the same bits.
"""

from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from hpcdist.arrays.ranges import Range
from hpcdist.strategies.schedule.operations import COMPUTE, ENDS, Kind, Operation

NEEDS_SUMS = (Kind.SUM_ROWS, Kind.AGREE, Kind.DIRECTION)  # come behind all reductions


def started(
    steps: Sequence[Operation],
    units: Mapping[int, Range],
    needs: Mapping[int, Collection[int]],
    most: int | None = None,
) -> list[Operation]:
    """Turn each REDUCE of ``steps`` into a START in its place and a WAIT as late as can be.

    That is before SUM_ROWS and AGREE, or before a BACKWARD writes again where something is under way: ``units`` are the
    ranges of this rank, and ``needs`` maps each unit to those whose gradients its backward adds to. With ``most`` there
    are never more under way: where whole gradients are freed by WAIT, this bounds their memory to that of one more.
    """
    found: list[Operation] = []
    under_way: deque[Operation] = deque()

    def wait() -> None:
        found.append(replace(under_way.popleft(), kind=Kind.WAIT))

    for op in steps:
        if op.kind is Kind.REDUCE:
            while most is not None and len(under_way) >= most:
                wait()
            op = replace(op, kind=Kind.START)
            under_way.append(op)
        elif op.kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT):
            written = [units[unit] for unit in needs[op.unit] if unit in units]
            while any(part.intersect(other.range) for other in under_way if other.range for part in written):
                wait()
        elif op.kind in NEEDS_SUMS:
            while under_way:
                wait()
        found.append(op)
    while under_way:
        wait()
    return found


def prefetched(steps: Sequence[Operation], ahead: int) -> list[Operation]:
    """Turn each GATHER of a unit that is freed again into a START_GATHER and, in its place, a WAIT_GATHER.

    A gather starts as soon as the one ``ahead`` of it in the list has been waited for, so that at most ``ahead`` are
    under way, and as many more units in memory; but not before the same unit was freed, and not before the parameters
    are new (behind AGREE no gather moves). 0 leaves the list as it is.
    """
    agreed = next((index for index, op in enumerate(steps) if op.kind is Kind.AGREE), len(steps))
    freed = {op.unit for op in steps[:agreed] if op.kind is Kind.FREE}
    if not ahead or not freed:
        return list(steps)
    waiting = deque(op for op in steps[:agreed] if op.kind is Kind.GATHER and op.unit in freed)
    found: list[Operation] = []
    under_way: list[Operation] = []
    there: set[int] = set()  # units in memory, or on their way there

    def start() -> None:
        while waiting and len(under_way) < ahead and waiting[0].unit not in there:
            gather = waiting.popleft()
            there.add(gather.unit)
            under_way.append(gather)
            found.append(replace(gather, kind=Kind.START_GATHER))

    for op in steps[:agreed]:
        if op.kind is Kind.GATHER and op.unit in freed:
            start()  # the first of all, and those that had to wait for a FREE right before
            under_way.remove(op)
            found.append(replace(op, kind=Kind.WAIT_GATHER))
            start()
        else:
            found.append(op)
            if op.kind is Kind.FREE:
                there.discard(op.unit)
                start()
    return found + list(steps[agreed:])


def polled(steps: Sequence[Operation]) -> list[Operation]:
    """Put POLL behind each operation that computes while something is under way that was started."""
    found: list[Operation] = []
    under_way = sum(op.kind is Kind.SETTLE for op in steps)  # from the step before
    for op in steps:
        found.append(op)
        under_way += (op.kind in ENDS) - (op.kind in ENDS.values())
        if under_way and op.kind in COMPUTE:
            found.append(Operation(Kind.POLL))
    return found
