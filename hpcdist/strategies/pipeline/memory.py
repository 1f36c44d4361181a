"""Memory of a pipeline rank for its units.

The sum over the units of all its chunks, with n parameters of b bytes on p data ranks:

  states       n b (1 / d_p + 1 / d_g) + n (slots / d_o) for the optimizer, with the sharding degrees d of the exchange
               (1 for allreduce), and n b for each state that ZeRO also keeps whole
  activations  the maximum over time of the sum over its chunks of live micro-batches times kept bytes
  messages     two inputs and two outputs of every chunk next to another rank
  scratch      the largest of each name over the units; gathered units (ZeRO); float32 units next to 16-bit storage

Not counted: batches, buffers of collectives, gradients queued for a late stage, and libraries.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Final

import numpy as np

from hpcdist.strategies.core.grid import ShardingDegrees
from hpcdist.strategies.core.operations import Kind, Operation
from hpcdist.strategies.data.config import ZeroConfig
from hpcdist.strategies.pipeline.costs import UnitCost

IN_MESSAGES: Final = 2  # buffers per kind of message


@dataclass(frozen=True)
class LiveMicroBatches:
    """Numbers of micro-batches whose arrays a pipeline chunk keeps in memory at one point of a step."""

    inputs: int = 0  # with a stored input
    kept: int = 0  # with activations for the backward pass
    held: int = 0  # with arrays for the weight gradients of a split backward pass


Moment = tuple[LiveMicroBatches, ...]  # by local chunk


@dataclass(frozen=True, kw_only=True)
class StateBytes:
    """Bytes per rank of parameters, gradients and optimizer state."""

    per_parameter: float  # permanent bytes per parameter
    itemsize: int  # bytes per element of parameters and gradients
    gathered: int = 0  # number of stages whose unsharded parameters are in memory at once
    reduced: int = 0  # number of stages whose unsharded gradients are in memory at once
    widened: int = 0  # bytes per element of a stage's temporary float32 arrays, or 0

    @classmethod
    def of(cls, config: ZeroConfig, degrees: ShardingDegrees, itemsize: int, optimizer_bytes: int) -> "StateBytes":
        """Return the `StateBytes` of a rank. ``degrees``: number of ranks that shard each kind of state.

        ``itemsize``: bytes per parameter. ``optimizer_bytes``: bytes of optimizer state per parameter.
        """
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
        """Return a dict {name: bytes} of the temporary unsharded arrays of a layer with ``parameters`` parameters."""
        size = parameters * self.itemsize
        return {
            "gathered": self.gathered * size,
            "reduced": self.reduced * size,
            "widened": 2 * self.widened * parameters,
        }


def moments(steps: Sequence[Operation], chunks: Sequence[range]) -> tuple[Moment, ...]:
    """Return a tuple of the points of a step at which a rank may need the most memory.

    A point is a tuple of one `LiveMicroBatches` per chunk. ``steps``: rank's operations. ``chunks``: layers per chunk.
    """
    chunk_numbers = {chunk.start: number for number, chunk in enumerate(chunks)}
    recomputed = {(op.microbatch, op.unit) for op in steps if op.recompute}
    now = np.zeros((len(chunks), 3), np.int64)
    moments_by_content: dict[bytes, np.ndarray] = {}
    grew = False
    for op in steps:
        if op.unit not in chunk_numbers or op.kind not in _CHANGES:
            continue
        change = np.array(_CHANGES[op.kind])
        if op.kind is Kind.FORWARD and op.recompute:
            change = np.array((0, 1, 0))
        elif op.kind is Kind.FORWARD and (op.microbatch, op.unit) in recomputed:
            change = np.array((1, 0, 0))
        if grew and change.min() < 0:
            moments_by_content.setdefault(now.tobytes(), now.copy())
        grew = bool(change.max() > 0)
        now[chunk_numbers[op.unit]] += change
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
    """Estimator of the memory use of pipeline ranks. Local."""

    def __init__(
        self,
        units: Sequence[UnitCost],
        states: StateBytes,
        live: Sequence[Sequence[Moment]],
        copies: Mapping[int, int] | None = None,
    ) -> None:
        # ``units``: costs of each layer, of the embedding and of the head. ``live``: result of `moments` for each rank.
        # ``copies``: bytes of copies of tied tensors, by unit number.
        self._live, extra = live, copies or {}
        state_bytes = [round(unit.parameters * states.per_parameter) + extra.get(i, 0) for i, unit in enumerate(units)]
        self._states = _sums(state_bytes)
        self._kept = _sums([unit.kept_bytes for unit in units])
        self._held = _sums([unit.held_bytes for unit in units])
        self._borders = np.array([*(unit.input_bytes for unit in units), 0])  # before each unit; 0 at the ends
        shared = [dict(unit.scratch) | states.whole(unit.parameters) for unit in units]
        names = sorted({name for sizes in shared for name in sizes})
        self._scratch = [_largest([sizes.get(name, 0) for sizes in shared]) for name in names]

    def on(self, rank: int, starts: Sequence[Any], stops: Sequence[Any]) -> Any:
        """Return the memory use of ``rank`` in bytes if its chunk i has the layers starts[i] to stops[i] - 1."""
        return sum(self.terms(rank, starts, stops).values())

    def terms(self, rank: int, starts: Sequence[Any], stops: Sequence[Any]) -> dict[str, Any]:
        """Return a dict {category: bytes} of the memory use of ``rank``. A category is "activations", for example.

        Chunk i of ``rank`` has the layers starts[i] to stops[i] - 1.
        """
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
    # table[start, stop] is the maximum of values[start:stop], or 0 if this range is empty.
    count = len(values)
    table = np.zeros((count + 1, count + 1), np.int64)
    for start in range(count):
        table[start, start + 1 :] = np.maximum.accumulate(np.array(values[start:], np.int64))
    return table
