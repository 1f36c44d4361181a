"""A training step as data: what one rank does, in order.

Schedules generate the compute operations, an exchange the others; the executor runs the list, and whatever simulates
or verifies a schedule reads the same list.
"""

from dataclasses import dataclass
from enum import Enum

from hpcdist.arrays.ranges import Range


class Kind(Enum):
    """What an operation does."""

    FORWARD = "forward"  # (microbatch, unit): one unit of the model
    BACKWARD = "backward"  # (microbatch, unit): both gradients of one unit
    REDUCE = "reduce"  # (range): gradients over the replicas
    AGREE = "agree"  # loss, found-inf, norm and the wish to stop; every REDUCE comes before it
    DIRECTION = "direction"  # (range): gradients become update directions
    APPLY = "apply"  # (range): parameters take a step along them


@dataclass(frozen=True, slots=True)
class Operation:
    """One entry of the list. ``unit`` is an index into the stages of the model, -1 where there is none."""

    kind: Kind
    microbatch: int = -1
    unit: int = -1
    range: Range | None = None

    def __str__(self) -> str:
        where = [str(n) for n in (self.microbatch, self.unit) if n >= 0]
        if self.range is not None:
            where.append(f"[{self.range.start}:{self.range.stop}]")
        return f"{self.kind.name}({', '.join(where)})"
