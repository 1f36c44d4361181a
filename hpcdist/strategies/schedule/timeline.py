"""Timeline of a simulated step: its program, busy and idle times of the stages, the bubble, and the critical path.

The simulated times of passes equal the times of the lists that `hpcdist.strategies.schedule.passes.expand` makes. The
bubble of a stage (P. Qi et al., arXiv:2401.10241) is the idle share of its span, from its first pass to the end of its
last.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np

from hpcdist.errors import ScheduleError
from hpcdist.strategies.core.operations import Kind, Operation, StagePlacement
from hpcdist.strategies.schedule import simulated_program as programs
from hpcdist.strategies.schedule.passes import Passes, Peak
from hpcdist.strategies.schedule.simulated_program import (
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
    Times,
)
from hpcdist.strategies.schedule.verify.deadlock import RECEIVES, SENDS

_BY_IDENTITY: Final = {id(way): code for way, code in CODES.items()}  # hashing an Enum member is slow


def compact(passes: Passes) -> np.ndarray:
    """Return the n ``passes`` of a rank as an int64 array of shape (3, n). Local.

    The rows are the type of each pass, its micro-batch, and the local index of its model chunk.
    """
    if not passes:
        return np.zeros((3, 0), np.int64)
    ways, microbatches, chunks = zip(*passes, strict=True)
    codes = np.fromiter(map(_BY_IDENTITY.__getitem__, map(id, ways)), np.int64, len(ways))
    return np.stack([codes, np.array(microbatches, np.int64), np.array(chunks, np.int64)])


def program_of_passes(
    passes: Sequence[np.ndarray], placement: StagePlacement, costs: StepCosts, *, recompute: bool = False
) -> Program:
    """Convert ``passes``, which has one array from `compact` per rank, to a `Program` for the simulator. Local.

    ``costs``: time of each pass and of a message.
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
    """Return a tuple of one `Peak` per rank: the rank's maximum numbers of micro-batches in progress. Local."""
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


@dataclass(frozen=True)
class StageTimes:
    """Times of one pipeline rank in a simulated step, in seconds."""

    begin_s: float
    span_s: float  # from the start of the first pass to the end of the last pass
    busy_s: float  # total time of the passes
    idle_s: float  # total waits in receives

    @property
    def bubble(self) -> float:
        """Idle fraction of this rank from its first pass to its last pass."""
        return max(0.0, (self.span_s - self.busy_s) / self.span_s) if self.span_s else 0.0  # sums are rounded


@dataclass(frozen=True)
class StepTimeline:
    """Simulated step: a program, and the start and end times of its operations."""

    program: Program
    times: Times

    @cached_property
    def stages(self) -> tuple[StageTimes, ...]:
        return tuple(self._stage(self.program.row(rank)) for rank in range(self.program.ranks))

    def _stage(self, row: slice) -> StageTimes:
        program, times = self.program, self.times
        begin_s, end_s, code, passes = times.begin_s[row], times.end_s[row], program.code[row], program.work[row] >= 0
        took_s = end_s - begin_s
        received = code == RECV
        idle_s = float((took_s[received] - program.seconds[row][received]).sum())
        if not passes.any():
            return StageTimes(0.0, 0.0, 0.0, idle_s)
        first_s, last_s = float(begin_s[passes].min()), float(end_s[passes].max())
        return StageTimes(first_s, last_s - first_s, float(took_s[passes].sum()), idle_s)

    @property
    def makespan_s(self) -> float:
        """Seconds from the start of the step until all ranks have finished their last operation."""
        return float(self.times.end_s.max(initial=0.0))

    @property
    def computes_s(self) -> float:
        """Seconds from the start of the earliest pass on any rank to the end of the latest pass on any rank."""
        computing = [stage for stage in self.stages if stage.span_s]
        ends = [stage.begin_s + stage.span_s for stage in computing]
        return max(ends, default=0.0) - min((stage.begin_s for stage in computing), default=0.0)

    @property
    def bubble(self) -> float:
        """Idle fraction of the slowest rank between its first and its last pass."""
        longest = max(stage.span_s for stage in self.stages)
        return max(stage.bubble for stage in self.stages if stage.span_s >= longest * (1 - 1e-12))

    @property
    def makespan_rate(self) -> float:
        """Mean idle fraction of the ranks that compute, from the earliest pass to the latest pass on any rank."""
        computing = [stage for stage in self.stages if stage.span_s]
        whole_s = len(computing) * self.computes_s
        return 1.0 - sum(stage.busy_s for stage in computing) / whole_s if whole_s else 0.0

    def critical_path(self) -> "list[CriticalSegment]":
        """Return a list of the operations and messages that determine the step time, in order of time. Local."""
        program, times = self.program, self.times
        segments: list[CriticalSegment] = []
        entry = int(times.end_s.argmax()) if len(times.end_s) else -1
        while entry >= 0:
            rank = program.rank_of(entry)
            cause, end_s = int(times.cause[entry]), float(times.end_s[entry])
            if cause < 0:
                segments.append(CriticalSegment(rank, entry, float(times.begin_s[entry]), end_s, travels=False))
                entry = entry - 1 if entry > program.starts[rank] else -1
                continue
            arrival_s = end_s - float(program.seconds[entry])
            if arrival_s < end_s:
                segments.append(CriticalSegment(rank, entry, arrival_s, end_s, travels=False))
            while times.before[cause] >= 0:
                cause = int(times.before[cause])
            segments.append(CriticalSegment(rank, entry, float(times.end_s[cause]), arrival_s, travels=True))
            entry = cause
        return [link for link in reversed(segments) if link.end_s > link.begin_s]


@dataclass(frozen=True)
class CriticalSegment:
    """Segment of the critical path: an operation, or the transfer of a message to the operation that receives it."""

    rank: int
    entry: int
    begin_s: float
    end_s: float
    travels: bool  # whether this is a message


def _program(lists: Sequence[Sequence[Operation]], placement: StagePlacement, costs: StepCosts) -> Program:
    chunk_of = {unit: number for number, units in enumerate(placement.chunks) for unit in units}
    messages: dict[object, int] = {}  # numbered when first seen at either end
    links: dict[int, int] = {}
    rows: list[tuple[int, int, float, int, int, int]] = []
    for rank, steps in enumerate(lists):
        for op in steps:
            code, target, seconds, work, chunk = WORK, -1, 0.0, programs.OTHER, -1
            if op.kind in CODES:
                chunk, work = chunk_of[op.unit], CODES[op.kind]
                seconds = costs.rows[work][op.unit]
                work = programs.AGAIN if op.recompute else work
            elif op.kind in SENDS or op.kind in RECEIVES:
                sends, chunk = op.kind in SENDS, chunk_of[op.unit]
                kind = op.kind if sends else RECEIVES[op.kind][0]
                before = op.unit - 1 if op.source < 0 else op.source
                target = messages.setdefault((kind, op.microbatch, op.unit, before), len(messages))
                code = SEND if sends else RECV
                if sends:
                    other = placement.rank_of(op.unit if kind is Kind.SEND_ACTIVATION else before)
                    links[target] = rank * len(lists) + other
            rows.append((code, target, seconds, work, op.microbatch, chunk))
    columns = list(zip(*rows, strict=True)) or [()] * 6
    code_of, target_of, seconds_of, work_of, microbatch_of, chunks_of = columns
    return Program(
        starts=np.cumsum([0, *map(len, lists)]),
        code=np.array(code_of, np.int8),
        target=np.array(target_of, np.int64),
        seconds=np.array(seconds_of, np.float64),
        work=np.array(work_of, np.int8),
        microbatch=np.array(microbatch_of, np.int64),
        chunk=np.array(chunks_of, np.int64),
        links=np.array([links.get(number, 0) for number in range(len(messages))], np.int64),
        link=costs.link,
    )


def simulate_lists(steps: Sequence[Sequence[Operation]], placement: StagePlacement, costs: StepCosts) -> StepTimeline:
    """Simulate a step, and return the `StepTimeline`. Raises ScheduleError if ranks deadlock.

    ``steps``: list of operations of each rank. ``costs``: time of each pass and of a message.
    """
    program = _program(steps, placement, costs)
    return StepTimeline(program, programs.run(program))


def simulate_passes(
    rows: Sequence[np.ndarray], placement: StagePlacement, costs: StepCosts, *, recompute: bool = False
) -> StepTimeline:
    """Simulate the passes of all ranks, and return the `StepTimeline`. Raises ScheduleError if ranks deadlock. Local.

    ``rows``: for each rank, the array from `compact`. ``costs``: time of each pass and of a message.
    """
    program = program_of_passes(rows, placement, costs, recompute=recompute)
    return StepTimeline(program, programs.run(program))
