"""Timeline of a simulated step: busy and idle times of the stages, the bubble, and the critical path.

The bubble of a stage (P. Qi et al., arXiv:2401.10241) is the idle share of its span, from its first pass to the end of
its last.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from hpcdist.strategies.core.operations import Kind, Operation, StagePlacement
from hpcdist.strategies.schedule.simulate import passes as passes_simulate
from hpcdist.strategies.schedule.simulate import program as programs
from hpcdist.strategies.schedule.simulate.program import CODES, RECV, SEND, WORK, Program, StepCosts, Times
from hpcdist.strategies.schedule.verify.deadlock import RECEIVES, SENDS


@dataclass(frozen=True)
class StageTimes:
    """Times of one pipeline rank in a simulated step, in seconds."""

    begin_s: float
    span_s: float  # from the start of the first pass to the end of the last pass
    busy_s: float  # total time of the passes
    idle_s: float  # total waits in receives

    @property
    def bubble(self) -> float:
        """Fraction of the time from this rank's first pass to its last pass in which the rank is idle."""
        return max(0.0, (self.span_s - self.busy_s) / self.span_s) if self.span_s else 0.0  # sums are rounded


@dataclass(frozen=True)
class StepTimeline:
    """Simulated step: a program, and the simulated start and end times of the program's operations."""

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
        """Seconds from the start of the step to the end of the last operation of any rank."""
        return float(self.times.end_s.max(initial=0.0))

    @property
    def computes_s(self) -> float:
        """Seconds from the start of the first pass to the end of the last pass, over all ranks."""
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
        """Idle fraction from the first to the last pass on any rank, averaged over the computing ranks."""
        computing = [stage for stage in self.stages if stage.span_s]
        whole_s = len(computing) * self.computes_s
        return 1.0 - sum(stage.busy_s for stage in computing) / whole_s if whole_s else 0.0

    def critical_path(self) -> "list[CriticalSegment]":
        """Return the critical path: a gapless list of operations and messages that determines the step time. Local."""
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
    """Segment of the critical path: operation number ``entry`` of a `Program`, or the message it receives."""

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
    """Simulate a pipeline step and return its timeline. Raises ScheduleError if a rank waits forever. Local.

    ``steps``: list of operations of each rank. ``placement``: rank of each model chunk. ``costs``: seconds per pass.
    """
    program = _program(steps, placement, costs)
    return StepTimeline(program, programs.run(program))


def simulate_passes(
    rows: Sequence[np.ndarray], placement: StagePlacement, costs: StepCosts, *, recompute: bool = False
) -> StepTimeline:
    """Return the timeline of ``rows``, each rank's passes as a `compact` array. Raises ScheduleError in a deadlock."""
    program = passes_simulate.program(rows, placement, costs, recompute=recompute)
    return StepTimeline(program, programs.run(program))
