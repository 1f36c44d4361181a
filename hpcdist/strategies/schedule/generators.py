"""Schedules: pure functions from degrees to lists of operations."""

from collections.abc import Mapping, Sequence

from hpcdist.arrays.ranges import Range
from hpcdist.strategies.schedule.operations import Kind, Operation


def sequential(units: int, microbatches: int) -> list[Operation]:
    """Run each micro-batch forward through all units and back: one micro-batch of activations is alive.

    With more than one micro-batch this is gradient accumulation.
    """
    steps = []
    for microbatch in range(microbatches):
        steps += [Operation(Kind.FORWARD, microbatch, unit) for unit in range(units)]
        steps += [Operation(Kind.BACKWARD, microbatch, unit) for unit in reversed(range(units))]
    return steps


def interleave(
    compute: Sequence[Operation], exchange: Sequence[Operation], units: Mapping[int, Range]
) -> list[Operation]:
    """Put the operations of an exchange among those of a schedule, each REDUCE as early as its gradients are complete.

    The gradients of a range are complete after the last BACKWARD of every unit that the range touches; ``units`` maps
    unit to range. All other operations follow in their order behind the last REDUCE.
    """
    last_backward = {op.unit: index for index, op in enumerate(compute) if op.kind is Kind.BACKWARD}
    due: dict[int, list[Operation]] = {}
    rest = []
    for op in exchange:
        if op.kind is Kind.REDUCE:
            assert op.range is not None
            touched = [last_backward[unit] for unit, part in units.items() if part.intersect(op.range)]
            due.setdefault(max(touched, default=len(compute) - 1), []).append(op)
        else:
            rest.append(op)
    steps: list[Operation] = []
    for index, op in enumerate(compute):
        steps.append(op)
        steps += due.get(index, [])
    return steps + rest


SCHEDULES = {"sequential": sequential}
