"""Simulated program of passes, one entry for a whole chunk, and the peak memory of their activations.

It is the same step as the lists that `hpcdist.strategies.schedule.generate.passes.expand` makes of the passes, a
chunk in one entry where a list has one for each unit: its times are those of the lists (tests compare them), for
pipelines far beyond what runs as lists, without an object for each operation.

`peaks` counts how many activations are alive at once on each rank, from the order of the passes alone. A chunk keeps
the activations of a micro-batch from its forward to its backward. Where the backward is split, what the weights'
gradients need is kept on from BACKWARD_INPUT to BACKWARD_WEIGHT, and counted apart. A chunk that is computed again
keeps its input only, until then.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np

from hpcdist.errors import ScheduleError
from hpcdist.strategies.schedule.generate.passes import Passes, Peak
from hpcdist.strategies.schedule.operations import StagePlacement
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

_BY_IDENTITY: Final = {id(way): code for way, code in CODES.items()}  # an Enum's own hash is a call into Python


def compact(passes: Passes) -> np.ndarray:
    """Return ``passes`` as (3, passes): kind of pass, micro-batch, chunk of the rank (local)."""
    if not passes:
        return np.zeros((3, 0), np.int64)
    ways, microbatches, chunks = zip(*passes, strict=True)
    codes = np.fromiter(map(_BY_IDENTITY.__getitem__, map(id, ways)), np.int64, len(ways))
    return np.stack([codes, np.array(microbatches, np.int64), np.array(chunks, np.int64)])


def program(
    passes: Sequence[np.ndarray], placement: StagePlacement, costs: StepCosts, *, recompute: bool = False
) -> Program:
    """Return the program of the ranks whose `compact` ``passes`` are given, in their order (local)."""
    rows = [_Row(passes[rank], placement, rank, recompute) for rank in range(placement.stages)]
    count = 1 + max((int(row.microbatch.max(initial=0)) for row in rows), default=0)
    code, chunk, way = (np.concatenate([getattr(row, name) for row in rows]) for name in ("code", "chunk", "way"))
    microbatch = np.concatenate([row.microbatch for row in rows])
    onward = np.isin(way, (FORWARD, AGAIN))
    # An activation on its way into a chunk, or its gradient: message by (direction, chunk into which it goes, m).
    into = chunk + np.where(onward == (code == SEND), 1, 0)
    number = (np.where(onward, 0, len(placement.chunks)) + into) * count + microbatch
    used = np.flatnonzero(code == SEND)
    known = np.full(2 * len(placement.chunks) * count, -1)
    known[number[used]] = np.arange(len(used))
    target = np.where(code == WORK, -1, known[np.where(code == WORK, 0, number)])
    if (target[code == RECV] < 0).any():
        entry = int(np.flatnonzero((code == RECV) & (target < 0))[0])
        raise ScheduleError(
            f"chunk {chunk[entry]} waits for micro-batch {microbatch[entry]}, which no rank sends; prove them first"
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
    """Entries of one rank: up to three for each pass, and one more where it is recomputed."""

    def __init__(self, passes: np.ndarray, placement: StagePlacement, rank: int, recompute: bool) -> None:
        way, microbatch, local = passes
        numbers = np.array([number for number, owner in enumerate(placement.ranks) if owner == rank])
        own = numbers[local]
        firsts = [units.start for units in placement.chunks]
        crosses = np.array([placement.crosses(unit) for unit in firsts] + [False])  # into a chunk, by its number
        forward, weight = way == FORWARD, way == WEIGHT
        before = np.where(forward, crosses[own], crosses[own + 1]) & ~weight
        behind = np.where(forward, crosses[own + 1], crosses[own]) & ~weight
        again = np.zeros(len(way), bool)
        if recompute:
            follows = (way[:-1] == FORWARD) & (microbatch[:-1] == microbatch[1:]) & (own[:-1] == own[1:])
            again[1:] = ~follows
            again &= (way == BACKWARD) | (way == INPUT)
        there = np.stack([again, before, np.ones(len(way), bool), behind], axis=1)
        kinds = np.broadcast_to([WORK, RECV, WORK, SEND], there.shape)[there]
        ways = np.stack([np.full(len(way), AGAIN), way, way, way], axis=1)[there]
        each = there.sum(axis=1)
        self.code, self.way = kinds, ways
        self.microbatch, self.chunk = np.repeat(microbatch, each), np.repeat(own, each)


def _links(placement: StagePlacement, into: np.ndarray, onward: np.ndarray) -> np.ndarray:
    """Return the link of each message."""
    links = np.zeros((len(placement.chunks), 2), np.int64)
    for number in range(1, len(placement.chunks)):
        one, other = placement.ranks[number - 1 : number + 1]
        links[number] = one * placement.stages + other, other * placement.stages + one
    taken: np.ndarray = links[into, (~onward).astype(np.int64)]
    return taken


def _seconds(placement: StagePlacement, costs: StepCosts) -> np.ndarray:
    """Return the seconds of a pass through a chunk, (what it is, chunk)."""
    return np.array([[sum(row[unit] for unit in units) for units in placement.chunks] for row in costs.rows])


def peaks(program: Program) -> tuple[Peak, ...]:
    """Return the peak of each rank in live micro-batches (local)."""
    return tuple(_peak(program, program.row(rank)) for rank in range(program.ranks))


def _peak(program: Program, row: slice) -> Peak:
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
    return Peak(*(int(count.max(initial=0)) for count in (live, held, live + held)))
