"""How many activations are alive at once on each rank, and how many bytes: from the order of the passes alone.

A chunk keeps the activations of a micro-batch from its forward to its backward. Where the backward is split, what the
weights' gradients need is kept on from BACKWARD_INPUT to BACKWARD_WEIGHT, and counted apart. A chunk that is computed
again keeps its input only, until then.
"""

from dataclasses import dataclass

import numpy as np

from hpcdist.strategies.schedule.pipelines import Peak
from hpcdist.strategies.schedule.placement import Placement
from hpcdist.strategies.schedule.simulate_costs import Costs
from hpcdist.strategies.schedule.simulate_program import AGAIN, BACKWARD, FORWARD, INPUT, WEIGHT, Program


@dataclass(frozen=True)
class Memory:
    """The most at once on a rank: of micro-batches of a chunk, and of bytes where those of a unit are known."""

    peak: Peak
    nbytes: float | None


def peaks(program: Program, placement: Placement, costs: Costs) -> tuple[Memory, ...]:
    """Return what each rank needs at most (local)."""
    return tuple(_peak(program, program.row(rank), placement, costs) for rank in range(program.ranks))


def _peak(program: Program, row: slice, placement: Placement, costs: Costs) -> Memory:
    chunk, microbatch, work = program.chunk[row], program.microbatch[row], program.work[row]
    entries = np.flatnonzero(work >= 0)
    # A list has an entry for each unit: the first of a forward begins it, the last of a backward ends it.
    passes = np.stack([work[entries], chunk[entries], microbatch[entries]], axis=1)
    changes = np.any(passes[1:] != passes[:-1], axis=1)
    first, last = np.concatenate([[True], changes]), np.concatenate([changes, [True]])
    way, chunk, microbatch = work[entries], chunk[entries], microbatch[entries]
    begins = (way == FORWARD) | (way == AGAIN)
    at = np.where(begins, first, last)
    way, chunk, microbatch = way[at], chunk[at], microbatch[at]
    key = chunk * (microbatch.max(initial=0) + 1) + microbatch
    dropped = (way == FORWARD) & np.isin(key, key[way == AGAIN])
    up = ((way == FORWARD) & ~dropped) | (way == AGAIN)
    down = (way == BACKWARD) | (way == INPUT)
    live = np.cumsum(up.astype(np.int64) - down)
    held = np.cumsum((way == INPUT).astype(np.int64) - (way == WEIGHT))
    peak = Peak(*(int(count.max(initial=0)) for count in (live, held, live + held)))
    return Memory(peak, _bytes(way, chunk, dropped, placement, costs) if costs.kept_bytes else None)


def _bytes(way: np.ndarray, chunk: np.ndarray, dropped: np.ndarray, placement: Placement, costs: Costs) -> float:
    kept, held, inputs = (
        np.array([sum(of[unit] for unit in units) if of else 0.0 for units in placement.chunks])
        for of in (costs.kept_bytes, costs.held_bytes, ())
    )
    if costs.message_bytes:
        inputs = np.array([costs.message_bytes[units.start] for units in placement.chunks])
    change = np.zeros(len(way))
    change += np.where(way == FORWARD, np.where(dropped, inputs[chunk], kept[chunk]), 0.0)
    change += np.where(way == AGAIN, kept[chunk] - inputs[chunk], 0.0)
    change -= np.where((way == BACKWARD) | (way == INPUT), kept[chunk], 0.0)
    change += np.where(way == INPUT, held[chunk], 0.0) - np.where(way == WEIGHT, held[chunk], 0.0)
    return float(np.cumsum(change).max(initial=0.0))
