"""Schedules on paper: verified, simulated and compared with their closed form, before anything runs."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from hpcdist.arrays.ranges import Range
from hpcdist.errors import UsageError
from hpcdist.strategies.core.grid import ProcessGrid
from hpcdist.strategies.schedule.generate import registry
from hpcdist.strategies.schedule.generate.passes import expand
from hpcdist.strategies.schedule.generate.schedule_file import ScheduleText
from hpcdist.strategies.schedule.operations import Kind, Operation
from hpcdist.strategies.schedule.placement import StagePlacement
from hpcdist.strategies.schedule.simulate import passes
from hpcdist.strategies.schedule.simulate import timeline as simulate_timeline
from hpcdist.strategies.schedule.simulate.costs import LinkCost, Rate, StepCosts
from hpcdist.strategies.schedule.simulate.passes import PeakMemory
from hpcdist.strategies.schedule.simulate.timeline import StepTimeline
from hpcdist.strategies.schedule.verify import pass_order
from hpcdist.strategies.schedule.verify.proof import verify

PROVEN: Final = 20_000  # passes of all ranks, up to which their lists of operations are verified too: a second
_SHOWN_RANKS: Final = 8


@dataclass(frozen=True)
class ScheduleRequest:
    """What a stage costs for a micro-batch, all chunks of a rank together: one for all ranks, or one for each.

    ``costs`` are (forward, gradient of the input, gradients of the weights) in seconds; a joint backward takes as long
    as the last two. Chunks of a rank are alike. A message takes its link for ``message_s``.
    """

    stages: int
    microbatches: int
    costs: tuple[tuple[float, float, float], ...] = ((1.0, 1.0, 1.0),)
    message_s: float = 0.0
    recompute: bool = False

    def __post_init__(self) -> None:
        if len(self.costs) not in (1, self.stages):
            raise UsageError(f"--costs is given {len(self.costs)} times; once for all stages, or {self.stages} times")
        if not all(math.isfinite(seconds) and seconds >= 0 for row in self.costs for seconds in row):
            raise UsageError(f"--costs {self.costs}: seconds are finite and not negative")
        if not all(map(any, self.costs)):
            raise UsageError(f"--costs {self.costs}: a stage that takes nothing has no bubble; give one part some time")
        if not math.isfinite(self.message_s):
            raise UsageError(f"--message-s {self.message_s}: seconds are finite")

    @property
    def equal(self) -> bool:
        """Whether all stages are alike and messages take nothing, as closed forms have it."""
        return len(set(self.costs)) == 1 and not self.message_s and not self.recompute

    def of(self, placement: StagePlacement) -> StepCosts:
        """Return the costs of a placement of one unit for each chunk."""
        rows = [self.costs[rank % len(self.costs)] for rank in placement.ranks]
        shares = [placement.ranks.count(rank) for rank in placement.ranks]
        forward_s, input_s, weight_s = (
            [row[part] / share for row, share in zip(rows, shares, strict=True)] for part in range(3)
        )
        return StepCosts(
            forward_s=forward_s,
            backward_s=[a + b for a, b in zip(input_s, weight_s, strict=True)],
            input_s=input_s,
            weight_s=weight_s,
            link=LinkCost(carries=Rate(self.message_s)),
        )


@dataclass(frozen=True)
class SimulatedSchedule:
    """A schedule, its timeline and what each rank keeps at most; ``closed`` is None where there is no such form.

    ``operations`` says whether the lists of operations were verified, and not only the passes that they are made of.
    """

    name: str
    written: ScheduleText
    timeline: StepTimeline
    memory: tuple[PeakMemory, ...]
    closed: float | None
    operations: bool


def simulate_schedule(name: str, written: ScheduleText, wanted: ScheduleRequest) -> SimulatedSchedule:
    """Return schedule ``name``, proven and simulated (local). Raises ScheduleError where it would hang, or is none."""
    if wanted.recompute and written.keeps:
        raise UsageError(
            f"--recompute with {name}: what a weight gradient needs stays in memory until it is computed; leave it "
            "out, or choose gpipe, 1f1b or interleaved"
        )
    placement = written.place([range(n, n + 1) for n in range(wanted.stages * written.chunks)])
    listed = sum(map(len, written.passes)) <= PROVEN
    if listed:
        _verify(written, placement, wanted)
    else:
        pass_order.prove(written.passes, placement, wanted.microbatches)
    costs = wanted.of(placement)
    rows = [passes.compact(row) for row in written.passes]
    timeline = simulate_timeline.simulate_passes(rows, placement, costs, recompute=wanted.recompute)
    forward_s, input_s, weight_s = wanted.costs[0]
    closed = registry.bubble(
        name,
        wanted.stages,
        wanted.microbatches,
        chunks=written.chunks,
        forward_s=forward_s,
        input_s=input_s,
        weight_s=weight_s,
    )
    memory = passes.peaks(timeline.program, placement, costs)
    return SimulatedSchedule(name, written, timeline, memory, closed if wanted.equal else None, listed)


def _verify(written: ScheduleText, placement: StagePlacement, wanted: ScheduleRequest) -> None:
    """Verify the step that the passes become, with an update behind it, as on one replica."""
    units = {unit: Range(unit, unit + 1) for unit in placement.units}
    lists = []
    for rank, row in enumerate(written.passes):
        own = [units[unit] for chunk in placement.of(rank) for unit in chunk]
        update = [Operation(kind, range=part) for kind in (Kind.DIRECTION, Kind.APPLY) for part in own]
        steps = expand(row, placement, rank, recompute=wanted.recompute)
        lists.append([*steps, Operation(Kind.AGREE), *update])
    grid = ProcessGrid(pipeline=wanted.stages)
    verify(lists, grid=grid, units=units, microbatches=wanted.microbatches, placement=placement)


def jsonable(found: SimulatedSchedule) -> dict[str, Any]:
    """Return the figures as JSON values (local)."""
    timeline = found.timeline
    path = timeline.critical_path()
    return {
        "schedule": found.name,
        "chunks": found.written.chunks,
        "verified": "operations" if found.operations else "passes",
        "bubble": timeline.bubble,
        "closed_form": found.closed,
        "makespan_rate": timeline.makespan_rate,
        "makespan_s": timeline.makespan_s,
        "critical_path": {
            "computes_s": sum(link.end_s - link.begin_s for link in path if not link.travels),
            "messages_s": sum(link.end_s - link.begin_s for link in path if link.travels),
            "hops": sum(before.rank != link.rank for before, link in zip(path, path[1:], strict=False)),
        },
        "ranks": [
            {
                "begin_s": stage.begin_s,
                "span_s": stage.span_s,
                "busy_s": stage.busy_s,
                "idle_s": stage.idle_s,
                "bubble": stage.bubble,
                "live": memory.peak.live,
                "held": memory.peak.held,
                "both": memory.peak.both,
            }
            for stage, memory in zip(timeline.stages, found.memory, strict=True)
        ],
    }


def text(rows: Sequence[SimulatedSchedule]) -> str:
    """Return the table for people."""
    head = ("schedule", "chunks", "bubble", "closed form", "makespan", "makespan rate", "live", "held", "path computes")
    cells = [head, *(_cells(found) for found in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(head))]
    lines = [
        "  ".join(f"{cell:{'<' if n == 0 else '>'}{widths[n]}}" for n, cell in enumerate(row)).rstrip() for row in cells
    ]
    lines += [
        "",
        "bubble: idle share of the longest stage's own span; makespan rate: idle share of all ranks' time",
        "live, held: most micro-batches of a chunk at once, by rank: until B or I, and on to W",
    ]
    return "\n".join(lines)


def _cells(found: SimulatedSchedule) -> tuple[str, ...]:
    told = jsonable(found)
    return (
        found.name,
        str(found.written.chunks),
        f"{found.timeline.bubble:.2%}",
        "-" if found.closed is None else f"{found.closed:.2%}",
        f"{found.timeline.makespan_s:.6g} s",
        f"{found.timeline.makespan_rate:.2%}",
        _by_rank([memory.peak.live for memory in found.memory]),
        _by_rank([memory.peak.held for memory in found.memory]),
        f"{told['critical_path']['computes_s']:.6g} s",
    )


def _by_rank(counts: Sequence[int]) -> str:
    if len(counts) <= _SHOWN_RANKS:
        return " ".join(map(str, counts))
    return f"{min(counts)} .. {max(counts)}"
