"""Simulated program of passes, and the maximum memory of their activations.

The simulated times equal the times of the lists that `hpcdist.strategies.schedule.generate.passes.expand` makes.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np

from hpcdist.errors import ScheduleError
from hpcdist.strategies.core.operations import StagePlacement
from hpcdist.strategies.schedule.generate.passes import Passes, Peak
from hpcdist.strategies.schedule.simulate import program as programs
from hpcdist.strategies.schedule.simulate.program import (
    AGAIN,
    BACKWARD,
    CODES,
    FORWARD,
    INPUT,
    RECV,
    SEND,
    WEIGHT,
    WORK,
    Program,
    StepCosts,
)

_BY_IDENTITY: Final = {id(way): code for way, code in CODES.items()}  # hashing an Enum member is slow


def compact(passes: Passes) -> np.ndarray:
    """Return ``passes`` as an integer array with three rows: pass type, micro-batch, local model chunk. Local."""
    if not passes:
        return np.zeros((3, 0), np.int64)
    ways, microbatches, chunks = zip(*passes, strict=True)
    codes = np.fromiter(map(_BY_IDENTITY.__getitem__, map(id, ways)), np.int64, len(ways))
    return np.stack([codes, np.array(microbatches, np.int64), np.array(chunks, np.int64)])


def program(
    passes: Sequence[np.ndarray], placement: StagePlacement, costs: StepCosts, *, recompute: bool = False
) -> Program:
    """Return the operations and messages of a pipeline step, as a `Program` for the simulator. Local.

    ``passes``: `compact` array of each rank. ``placement``: rank of each model chunk. ``costs``: seconds per pass.
    """
    rows = [_Row(passes[rank], placement, rank, recompute) for rank in range(placement.stages)]
    count = 1 + max((int(row.microbatch.max(initial=0)) for row in rows), default=0)
    code, chunk, way = (np.concatenate([getattr(row, name) for row in rows]) for name in ("code", "chunk", "way"))
    microbatch = np.concatenate([row.microbatch for row in rows])
    onward = np.isin(way, (FORWARD, AGAIN))
    # Messages are numbered by (direction, chunk that they enter or whose input gradient they carry, micro-batch).
    into = chunk + np.where(onward == (code == SEND), 1, 0)
    number = (np.where(onward, 0, len(placement.chunks)) + into) * count + microbatch
    used = np.flatnonzero(code == SEND)
    message_of = np.full(2 * len(placement.chunks) * count, -1)
    message_of[number[used]] = np.arange(len(used))
    target = np.where(code == WORK, -1, message_of[np.where(code == WORK, 0, number)])
    if (target[code == RECV] < 0).any():
        entry = int(np.flatnonzero((code == RECV) & (target < 0))[0])
        raise ScheduleError(
            f"model chunk {chunk[entry]} waits for micro-batch {microbatch[entry]}, which no rank sends; check the "
            "operation lists with hpcdist.strategies.schedule.verify"
        )
    work = np.where(code == WORK, way, programs.OTHER).astype(np.int8)
    return Program(
        starts=np.cumsum([0, *(len(row.code) for row in rows)]),
        code=code.astype(np.int8),
        target=target,
        seconds=np.where(work >= 0, _seconds(placement, costs)[np.maximum(work, 0), chunk], 0.0),
        work=work,
        microbatch=microbatch,
        chunk=chunk,
        links=_links(placement, into[used], onward[used]),
        link=costs.link,
    )


class _Row:
    def __init__(self, passes: np.ndarray, placement: StagePlacement, rank: int, recompute: bool) -> None:
        way, microbatch, local = passes
        numbers = np.array([number for number, owner in enumerate(placement.ranks) if owner == rank])
        chunks = numbers[local]
        firsts = [units.start for units in placement.chunks]
        crosses = np.array([placement.crosses(unit) for unit in firsts] + [False])  # into each chunk
        forward, weight = way == FORWARD, way == WEIGHT
        before = np.where(forward, crosses[chunks], crosses[chunks + 1]) & ~weight
        behind = np.where(forward, crosses[chunks + 1], crosses[chunks]) & ~weight
        recomputed = np.zeros(len(way), bool)
        if recompute:
            follows = (way[:-1] == FORWARD) & (microbatch[:-1] == microbatch[1:]) & (chunks[:-1] == chunks[1:])
            recomputed[1:] = ~follows
            recomputed &= (way == BACKWARD) | (way == INPUT)
        present = np.stack([recomputed, before, np.ones(len(way), bool), behind], axis=1)
        kinds = np.broadcast_to([WORK, RECV, WORK, SEND], present.shape)[present]
        ways = np.stack([np.full(len(way), AGAIN), way, way, way], axis=1)[present]
        counts = present.sum(axis=1)
        self.code, self.way = kinds, ways
        self.microbatch, self.chunk = np.repeat(microbatch, counts), np.repeat(chunks, counts)


def _links(placement: StagePlacement, into: np.ndarray, onward: np.ndarray) -> np.ndarray:
    links = np.zeros((len(placement.chunks), 2), np.int64)
    for number in range(1, len(placement.chunks)):
        one, other = placement.ranks[number - 1 : number + 1]
        links[number] = one * placement.stages + other, other * placement.stages + one
    taken: np.ndarray = links[into, (~onward).astype(np.int64)]
    return taken


def _seconds(placement: StagePlacement, costs: StepCosts) -> np.ndarray:
    return np.array([[sum(row[unit] for unit in units) for units in placement.chunks] for row in costs.rows])


def peaks(program: Program) -> tuple[Peak, ...]:
    """Return one `Peak` for each rank: its maximum numbers of micro-batches in progress, by state. Local."""
    return tuple(_peak(program, program.row(rank)) for rank in range(program.ranks))


def _peak(program: Program, row: slice) -> Peak:
    chunk, microbatch, work = program.chunk[row], program.microbatch[row], program.work[row]
    entries = np.flatnonzero(work >= 0)
    # An operation list has an entry per unit: the first entry of a forward pass starts it, the last ends a backward.
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
    return Peak(*(int(count.max(initial=0)) for count in (live, held, live + held)))
