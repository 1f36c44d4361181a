"""Timeline of one step: the bars of each pipeline rank, from which a picture is drawn.

Passes are those of the simulator, with the seconds of each chunk. Recomputation comes at the beginning of the
backward that needs it. The exchange of the data axis ends where `hpcdist.planner.time.step` says: a part of it during
the last backward, the rest after it; the update begins when all ranks have finished.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import reduce
from typing import TYPE_CHECKING, Final, NamedTuple

from hpcdist.planner.cluster.hardware import Cluster
from hpcdist.planner.layout import ParallelLayout
from hpcdist.planner.model.description import ModelDescription
from hpcdist.planner.model.stage_split import recomputes_ahead
from hpcdist.planner.time.pipeline import PlannedSeconds, border, messages_block, simulated_timeline, stage_of
from hpcdist.planner.time.stage_load import StageLoad, chunk_loads, combined, loads
from hpcdist.planner.time.step import data_exchange, rows_sum, tied_sum, timing

if TYPE_CHECKING:
    from hpcdist.strategies.schedule.simulate.timeline import StepTimeline

KINDS: Final = (
    "forward",
    "backward",
    "input",
    "weight",
    "recompute",
    "message",
    "exchange",
    "update",
    "input_data",
)


class TimelineBar(NamedTuple):
    """Something that a rank of the pipeline does: ``stage`` is the rank, ``kind`` one of `KINDS`.

    -1: of no micro-batch. An "exchange" may lie beside passes; nothing else overlaps.
    """

    stage: int
    kind: str
    begin_s: float
    end_s: float
    microbatch: int = -1
    chunk: int = 0


@dataclass(frozen=True, kw_only=True)
class PlannedTimeline:
    """A step of ``end_s`` seconds on ``stages`` ranks of the pipeline; bars are in the order of ranks and of time."""

    stages: int
    bars: tuple[TimelineBar, ...]
    end_s: float


def timeline(
    description: ModelDescription, layout: ParallelLayout, cluster: Cluster, global_batch: int
) -> PlannedTimeline:
    """Return one step, as the simulator runs it (local). Raises what `hpcdist.planner.time.step.timing` raises."""
    m = layout.microbatches(global_batch)
    piped = layout.pipeline > 1
    of_chunks = chunk_loads(description, layout, cluster) if piped else (loads(description, layout, cluster)[0][0],)
    took = timing(description, layout, cluster, global_batch, simulate=piped)
    hop_s = border(description, layout, cluster).seconds
    held_s = hop_s if piped and messages_block(layout) else 0.0
    chunks = [stage_of(load, layout, cluster, m).seconds for load in of_chunks]
    padded = [PlannedSeconds(one.forward_s + held_s, one.input_s + held_s, one.weight_s) for one in chunks]
    schedule = layout.schedule if piped else "sequential"
    ran = simulated_timeline(
        schedule, padded, layout.pipeline, m, message_s=hop_s - held_s, recompute=recomputes_ahead(layout)
    )
    begin_s = took.terms["input"]
    bars = [TimelineBar(rank, "input_data", 0.0, begin_s) for rank in range(layout.pipeline) if begin_s]
    bars += _passes(ran, of_chunks, held_s, begin_s)
    ends_s = [begin_s + stage.begin_s + stage.span_s for stage in ran.stages]
    ready_s, tied_s = max(ends_s), tied_sum(description, layout, cluster).seconds
    for rank, (end_s, load) in enumerate(zip(ends_s, _of_ranks(ran, of_chunks), strict=True)):
        swap = data_exchange(description, layout, cluster, m, stage_of(load, layout, cluster, m))
        after_s = swap.exposed_s + (tied_s if rank in (0, layout.pipeline - 1) else 0.0)
        after_s += rows_sum(load, layout, cluster).seconds
        if swap.hidden_s or after_s:
            bars.append(TimelineBar(rank, "exchange", end_s - swap.hidden_s, end_s + after_s))
        ready_s = max(ready_s, end_s + after_s)
    bars += [TimelineBar(rank, "update", ready_s, ready_s + took.terms["update"]) for rank in range(layout.pipeline)]
    return PlannedTimeline(
        stages=layout.pipeline,
        bars=tuple(sorted(bars, key=lambda bar: (bar.stage, bar.begin_s, bar.end_s))),
        end_s=ready_s + took.terms["update"],
    )


def _passes(
    ran: "StepTimeline", of_chunks: tuple[StageLoad, ...], held_s: float, after_s: float
) -> Iterator[TimelineBar]:
    """Yield the passes, without the messages that they hold ranks up for, and these beside them."""
    from hpcdist.strategies.schedule.simulate.program import AGAIN, BACKWARD, FORWARD, INPUT, WEIGHT

    names = {FORWARD: "forward", BACKWARD: "backward", INPUT: "input", WEIGHT: "weight", AGAIN: "recompute"}
    program, times = ran.program, ran.times
    early = bool((program.work == AGAIN).any())
    for rank in range(program.ranks):
        row = program.row(rank)
        columns = (program.work[row], program.microbatch[row], program.chunk[row], times.begin_s[row], times.end_s[row])
        for way, microbatch, chunk, begin_s, end_s in zip(*(column.tolist() for column in columns), strict=True):
            if way not in names:
                continue
            at_s, until_s = begin_s + after_s, end_s + after_s
            again_s = of_chunks[chunk].again_s if way in (BACKWARD, INPUT) and not early else 0.0
            if again_s:
                yield TimelineBar(rank, "recompute", at_s, at_s + again_s, microbatch, chunk)
            over_s = until_s - (0.0 if way in (WEIGHT, AGAIN) else held_s)
            yield TimelineBar(rank, names[way], at_s + again_s, over_s, microbatch, chunk)
            if over_s < until_s:
                yield TimelineBar(rank, "message", over_s, until_s, microbatch, chunk)


def _of_ranks(ran: "StepTimeline", of_chunks: tuple[StageLoad, ...]) -> list[StageLoad]:
    """Return the load of each rank: its chunks together."""
    program = ran.program
    owned = [sorted(set(program.chunk[program.row(rank)].tolist())) for rank in range(program.ranks)]
    return [reduce(combined, (of_chunks[number] for number in own)) for own in owned]
