"""Memory of a pipeline rank for the units it may get: the limit that a partition has to keep.

For the units of all its chunks together, n parameters of b bytes on p data ranks:

  states       n b (1 / d_p + 1 / d_g), and n (slots / d_o) of the optimizer, with the sharding degrees d of the
               exchange, 1 each for allreduce, and n b for what ZeRO keeps whole besides; a copy of a tied tensor has
               a parameter and a gradient
  activations  at the worst moment of the schedule: the sum over its chunks of live micro-batches, each times what it
               keeps
  messages     two inputs and two outputs of every chunk whose border is one of ranks: posted ahead, and on their way
  scratch      for each name the largest of any unit; units that are whole for a moment where they are cut (ZeRO), or
               in float32 where 16-bit floats are kept

Moments come from the operations of the schedule, the list that is executed. Not counted: batches, the buckets and
copies of collectives, gradients on their way to a stage that is late, what a BLAS or a GPU library takes, and blocks
that the arena keeps and nobody fits in.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Final

import numpy as np

from hpcdist.strategies.pipeline.costs import UnitCost
from hpcdist.strategies.schedule.operations import Kind, Operation
from hpcdist.strategies.zero.config import ShardingDegrees, ZeroConfig

IN_MESSAGES: Final = 2  # messages of a kind that are there at once


@dataclass(frozen=True)
class LiveMicroBatches:
    """Micro-batches that a chunk has at one moment: inputs, activations, and halves of a split backward."""

    inputs: int = 0
    kept: int = 0
    held: int = 0


Moment = tuple[LiveMicroBatches, ...]  # by local chunk


@dataclass(frozen=True, kw_only=True)
class StateBytes:
    """Bytes that a rank keeps of each parameter, with its gradient and its optimizer state.

    Where parameters, or gradients, are cut over the data axis, ``gathered`` and ``reduced`` units are whole at once,
    with ``itemsize`` bytes an element. ``widened``: bytes an element that the parameters, and the gradients, of a unit
    take besides while it computes; 0 where it computes in what is kept.
    """

    per_parameter: float
    itemsize: int
    gathered: int = 0
    reduced: int = 0
    widened: int = 0

    @classmethod
    def of(cls, config: ZeroConfig, degrees: ShardingDegrees, itemsize: int, optimizer_bytes: int) -> "StateBytes":
        """Return the bytes of an exchange that cuts by ``degrees``; ``optimizer_bytes`` has all slots, and a master."""
        cut = degrees.parameters > 1, degrees.gradients > 1
        whole = config.keep_parameters + config.keep_gradients
        per_parameter = (
            itemsize / degrees.parameters + itemsize / degrees.gradients + optimizer_bytes / degrees.optimizer
        )
        return cls(
            per_parameter=per_parameter + whole * itemsize,
            itemsize=itemsize,
            gathered=1 + config.prefetch if cut[0] and not config.keep_parameters else 0,
            reduced=int(cut[1] and not config.keep_gradients),
        )

    def whole(self, parameters: int) -> dict[str, int]:
        """Return the bytes of a unit of so many ``parameters`` while it is used, by category."""
        size = parameters * self.itemsize
        return {
            "gathered": self.gathered * size,
            "reduced": self.reduced * size,
            "widened": 2 * self.widened * parameters,
        }


def moments(steps: Sequence[Operation], chunks: Sequence[range]) -> tuple[Moment, ...]:
    """Return the live micro-batches of a rank that runs ``steps`` on its ``chunks``, at each local peak (local).

    None of them is covered by another.
    """
    place = {chunk.start: number for number, chunk in enumerate(chunks)}
    recomputed = {(op.microbatch, op.unit) for op in steps if op.recompute}
    now = np.zeros((len(chunks), 3), np.int64)
    moments_by_content: dict[bytes, np.ndarray] = {}
    grew = False
    for op in steps:
        if op.unit not in place or op.kind not in _CHANGES:
            continue
        change = np.array(_CHANGES[op.kind])
        if op.kind is Kind.FORWARD and op.recompute:
            change = np.array((0, 1, 0))
        elif op.kind is Kind.FORWARD and (op.microbatch, op.unit) in recomputed:
            change = np.array((1, 0, 0))
        if grew and change.min() < 0:
            moments_by_content.setdefault(now.tobytes(), now.copy())
        grew = bool(change.max() > 0)
        now[place[op.unit]] += change
    peaks = list(moments_by_content.values())
    worst = [peak for peak in peaks if not any((peak <= other).all() for other in peaks if other is not peak)]
    return tuple(tuple(LiveMicroBatches(*map(int, row)) for row in moment) for moment in worst)


_CHANGES: Final = {
    Kind.FORWARD: (1, 1, 0),
    Kind.BACKWARD: (-1, -1, 0),
    Kind.BACKWARD_INPUT: (0, -1, 1),
    Kind.BACKWARD_WEIGHT: (-1, 0, -1),
}


class StageMemory:
    """Bytes on the rank that computes given chunks. All of it is local, and the same on every rank.

    ``live`` are the moments of each rank, ``copies`` bytes that a unit needs for the tied tensors of other ranks.
    """

    def __init__(
        self,
        units: Sequence[UnitCost],
        states: StateBytes,
        live: Sequence[Sequence[Moment]],
        copies: Mapping[int, int] | None = None,
    ) -> None:
        self._live, extra = live, copies or {}
        own = [round(unit.parameters * states.per_parameter) + extra.get(i, 0) for i, unit in enumerate(units)]
        self._states = _sums(own)
        self._kept = _sums([unit.kept_bytes for unit in units])
        self._held = _sums([unit.held_bytes for unit in units])
        self._borders = np.array([*(unit.input_bytes for unit in units), 0])  # in front of each unit; 0 at the ends
        shared = [dict(unit.scratch) | states.whole(unit.parameters) for unit in units]
        names = sorted({name for sizes in shared for name in sizes})
        self._scratch = [_largest([sizes.get(name, 0) for sizes in shared]) for name in names]

    def on(self, rank: int, starts: Sequence[Any], stops: Sequence[Any]) -> Any:
        """Return the bytes on ``rank`` with the chunks [start, stop): whole numbers, or arrays of them."""
        return sum(self.terms(rank, starts, stops).values())

    def terms(self, rank: int, starts: Sequence[Any], stops: Sequence[Any]) -> dict[str, Any]:
        """Return the terms of the sum `on`, by name."""
        chunks = list(zip(starts, stops, strict=True))
        edges = [(self._borders[start], self._borders[stop]) for start, stop in chunks]
        activations: Any = 0
        for moment in self._live[rank]:
            alive: Any = 0
            for (start, stop), (entering, _), live in zip(chunks, edges, moment, strict=False):
                alive = alive + live.inputs * entering
                alive = alive + live.kept * (self._kept[stop] - self._kept[start])
                alive = alive + live.held * (self._held[stop] - self._held[start])
            activations = np.maximum(activations, alive)
        scratch: Any = 0
        for table in self._scratch:
            largest: Any = 0
            for start, stop in chunks:
                largest = np.maximum(largest, table[start, stop])
            scratch = scratch + largest
        return {
            "states": sum(self._states[stop] - self._states[start] for start, stop in chunks),
            "activations": activations,
            "messages": sum(IN_MESSAGES * (entering + leaving) for entering, leaving in edges),
            "scratch": scratch,
        }


def _sums(values: Sequence[int]) -> np.ndarray:
    return np.array(list(accumulate(values, initial=0)), np.int64)


def _largest(values: Sequence[int]) -> np.ndarray:
    """Return the largest of ``values[start:stop]`` at [start, stop]; 0 where there is none."""
    count = len(values)
    table = np.zeros((count + 1, count + 1), np.int64)
    for start in range(count):
        table[start, start + 1 :] = np.maximum.accumulate(np.array(values[start:], np.int64))
    return table
