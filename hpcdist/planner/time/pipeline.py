"""Pipeline time of a layout, in closed form or simulated: computation, messages between stages, and idle time.

With p ranks, v chunks per rank, m micro-batches, F, I, W the seconds of a rank per micro-batch (forward, gradients of
inputs and of weights, over all of its chunks) and T = F + I + W, the time of all passes is m T plus the idle time

    gpipe, 1f1b    (p-1) T                                              arXiv:1811.06965, arXiv:2104.04473
    interleaved    (p-1) T / v                                          arXiv:2104.04473, section 2.2
    zb-h1          (p-1) (F + I) - min(m-1, p-1) w                      w = min(W, I, F); arXiv:2401.10241
    zb-h2          (p-1) (F + I) - min(m/2, p-1) w - min((m-1)/2, p-1) min(W, I - w, F), integer quotients
    zb-v           (p-1) (F + I) - min(m-1, p-1) min(F, 2 W, (F + I)/2) - max(0, m-p) min(W, (F + I)/2), and at least
                   (p-1) max(F/2, I/2, F + I - 3 W)

zb-h1 agrees with table 1 of its paper for m >= p and W <= I, F. All forms agree with the simulator for any m; zb-v only
for F = I = W, otherwise within 5 %. The term m T uses the times of the slowest rank. The other terms use the means of
F, I, W over the other ranks.

If chunks are recomputed before their gradient arrives, as in hpcdist, the slowest rank needs A more seconds per
micro-batch. Its idle time is then shorter, but at least 0: for 1f1b by min(2 A, A + I + W), for interleaved (m > p) by
min(3 A, A + I + W) / v, and for m = 1 by A.

The number of waits (`_waits`) is valid for messages shorter than a pass. Interleaved also needs m to be a multiple of
p; zero-bubble schedules are approximate.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from hpcdist.planner.cluster.hardware import ITEM_BYTES, Cluster
from hpcdist.planner.layout import ParallelLayout
from hpcdist.planner.model.description import ModelDescription
from hpcdist.planner.model.stage_split import recomputes_ahead
from hpcdist.planner.time.network import NO_COST, MessageCost, collective, message, span
from hpcdist.planner.time.stage_load import CollectiveWait, StageLoad, chunk_loads, collective_wait, loads
from hpcdist.strategies.schedule.registry import SCHEDULES, chunks_of

if TYPE_CHECKING:
    import numpy as np

    from hpcdist.strategies.schedule.timeline import StepTimeline

SPLIT = ("zb-h1", "zb-h2", "zb-v")


class PlannedSeconds(NamedTuple):
    """Seconds of three passes for one micro-batch: forward, input gradients, and weight gradients."""

    forward_s: float
    input_s: float
    weight_s: float

    @property
    def whole_s(self) -> float:
        """Sum of the seconds of the three passes."""
        return self.forward_s + self.input_s + self.weight_s


class PipelineTime(NamedTuple):
    """Seconds of a step on the slowest pipeline rank: computation, messages and idle time."""

    busy_s: float  # computation
    message_s: float  # message transfers
    idle_s: float  # other idle time
    bubble: float  # fraction without computation, from the rank's first forward to its last backward

    @property
    def whole_s(self) -> float:
        """Sum of computation, messages and idle time, in seconds."""
        return self.busy_s + self.message_s + self.idle_s


def closed_time(
    schedule: str,
    slowest: PlannedSeconds,
    others: PlannedSeconds,
    ranks: int,
    microbatches: int,
    *,
    chunks: int = 1,  # model chunks per rank
    message_s: float = 0.0,  # seconds of a message between neighbouring ranks
    blocking: bool = False,  # a rank cannot compute during messages
    steps_overlap: bool = False,  # a rank starts the next step without waiting for other ranks
    ahead_s: float = 0.0,  # seconds per micro-batch of recomputation that can overlap the wait for the gradient
) -> PipelineTime:
    """Return the step time of a pipeline from a closed formula for ``schedule``.

    ``slowest``: pass times of the slowest pipeline rank. ``others``: mean pass times of all other pipeline ranks.
    ``ranks``: number of pipeline ranks.
    """
    busy_s = microbatches * (slowest.whole_s + ahead_s)
    if ranks == 1:
        return PipelineTime(busy_s, 0.0, 0.0, 0.0)
    chunks = chunks_of(schedule, chunks)
    idle_s = _idle_s(schedule, others, ranks, microbatches, chunks)
    if ahead_s:
        # Recomputation overlaps the wait for a gradient: at most 2 A (interleaved 3 A) and A + B; A if m = 1.
        back_s = others.whole_s - others.forward_s
        hidden_s = min({"1f1b": 2, "interleaved": 3}.get(schedule, 0) * ahead_s, ahead_s + back_s) / chunks
        idle_s = max(0.0, idle_s - (hidden_s if microbatches > 1 else ahead_s))
    # Ranks of zb-h2 and zb-v start and end (p-1) F / v after each other, so their spans have less idle time.
    span_s = idle_s
    if schedule in ("zb-h2", "zb-v"):
        span_s = max(0.0, idle_s - (ranks - 1) * others.forward_s / chunks)
    waits = _waits(schedule, ranks, microbatches, chunks, blocking)
    bubble = (span_s + waits * message_s) / (busy_s + span_s + waits * message_s) if busy_s else 0.0
    return PipelineTime(busy_s, waits * message_s, span_s if steps_overlap else idle_s, bubble)


def _idle_s(schedule: str, others: PlannedSeconds, ranks: int, microbatches: int, chunks: int) -> float:
    forward_s, input_s, weight_s = others
    other_ranks, there_and_back = ranks - 1, (ranks - 1) * (forward_s + input_s)
    filled_s = min(others)  # w: part of W that fits into each gap
    if schedule == "zb-h1":
        return there_and_back - min(microbatches - 1, other_ranks) * filled_s
    if schedule == "zb-h2":
        rest_s = min(weight_s, input_s - filled_s, forward_s)
        filled_s *= min(microbatches // 2, other_ranks)
        return there_and_back - filled_s - min((microbatches - 1) // 2, other_ranks) * rest_s
    if schedule == "zb-v":
        mean_s = (forward_s + input_s) / 2
        filled_s = min(microbatches - 1, other_ranks) * min(forward_s, 2 * weight_s, mean_s)
        filled_s += max(0, microbatches - ranks) * min(weight_s, mean_s)
        least_s = max(forward_s / 2, input_s / 2, forward_s + input_s - 3 * weight_s)
        return max(there_and_back - filled_s, other_ranks * least_s)
    return other_ranks * others.whole_s / chunks


def _waits(schedule: str, ranks: int, microbatches: int, chunks: int, blocking: bool) -> int:
    other_ranks = ranks - 1
    if blocking and schedule not in SPLIT:  # each pass is longer by a message
        return 2 * (chunks * microbatches + other_ranks)
    if schedule == "gpipe":
        return 2 * other_ranks
    if schedule == "1f1b":
        return 2 * (other_ranks + (microbatches - 1) * other_ranks // ranks)
    if schedule == "interleaved":
        return 2 * (ranks * chunks - 1)
    return {"zb-h1": 4 * other_ranks, "zb-h2": other_ranks}.get(schedule, max(5 * ranks - 7, 4 * other_ranks))


def simulated_timeline(
    schedule: str,
    chunks: Sequence[PlannedSeconds],
    ranks: int,
    microbatches: int,
    *,
    message_s: float = 0.0,  # seconds of a message on a link
    recompute: bool = False,  # recompute chunks before the gradient arrives
) -> "StepTimeline":
    """Simulate one step on all pipeline ranks, and return the start and end times of all passes.

    ``chunks``: pass times of each model chunk, in model order. ``ranks``: number of pipeline ranks.
    """
    from hpcdist.strategies.schedule import timeline
    from hpcdist.strategies.schedule.simulated_program import LinkCost, StepCosts

    row = SCHEDULES[schedule]
    chunks_per_rank = len(chunks) // ranks
    placement = row.place([range(number, number + 1) for number in range(len(chunks))], ranks)
    costs = StepCosts(
        forward_s=[chunk.forward_s for chunk in chunks],
        backward_s=[chunk.input_s + chunk.weight_s for chunk in chunks],
        input_s=[chunk.input_s for chunk in chunks],
        weight_s=[chunk.weight_s for chunk in chunks],
        link=LinkCost(carries_s=message_s),
    )
    return timeline.simulate_passes(
        _rows(schedule, ranks, microbatches, chunks_per_rank), placement, costs, recompute=recompute
    )


@lru_cache(maxsize=4)
def _rows(schedule: str, ranks: int, microbatches: int, chunks_per_rank: int) -> "list[np.ndarray]":
    from hpcdist.strategies.schedule.timeline import compact

    # Cached, because each schedule is simulated twice.
    return [compact(SCHEDULES[schedule].passes(rank, ranks, microbatches, chunks_per_rank)) for rank in range(ranks)]


class StageTime(NamedTuple):
    """Times of one micro-batch on a pipeline rank, or in one model chunk, including waits for collectives."""

    load: StageLoad  # computation and collectives
    sent: CollectiveWait  # seconds of waiting for collectives, by axis
    seconds: PlannedSeconds  # forward and backward, with ``sent``
    ahead_s: float  # recomputation that can run while the rank waits for the gradient

    @property
    def whole_s(self) -> float:
        """Seconds of one micro-batch: forward, backward and recomputation together."""
        return self.seconds.whole_s + self.ahead_s


def stage_of(
    load: StageLoad,
    layout: ParallelLayout,
    cluster: Cluster,
    microbatches: int,
    costs: dict[tuple[str, str, float], MessageCost] | None = None,
) -> StageTime:
    """Return the times per micro-batch of a pipeline rank with the computation and collectives in ``load``.

    ``costs``: dict that caches costs of collectives between calls, or None.
    """
    waits = collective_wait(load, layout, cluster, costs)
    again_s = load.again_s + sum(waits.again_s.values())
    is_early = recomputes_ahead(layout)
    seconds = PlannedSeconds(
        load.forward_s + sum(waits.forward_s.values()),
        load.input_s + sum(waits.back_s.values()) + (0.0 if is_early else again_s),
        load.weight_s + load.add_s * (microbatches - 1) / microbatches,
    )
    return StageTime(load, waits, seconds, again_s if is_early else 0.0)


def ranks_of(
    description: ModelDescription, layout: ParallelLayout, cluster: Cluster, microbatches: int
) -> list[tuple[StageTime, int]]:
    """Return a list of pairs (times of a pipeline rank per micro-batch, number of pipeline ranks with these times).

    ``microbatches``: number of micro-batches per step.
    """
    costs: dict[tuple[str, str, float], MessageCost] = {}
    return [
        (stage_of(load, layout, cluster, microbatches, costs), often)
        for load, often in loads(description, layout, cluster)
    ]


def border_message(description: ModelDescription, layout: ParallelLayout, cluster: Cluster) -> MessageCost:
    """Return the cost of one pipeline message: activations of a micro-batch, sent to the next pipeline rank."""
    if layout.pipeline == 1:
        return NO_COST
    numbers = layout.microbatch * description.tokens * description.width / layout.context
    nbytes = numbers * ITEM_BYTES[layout.computes_in]
    parted = layout.sequence_parallel or layout.kernels.splits_borders
    cost = message(nbytes / layout.tensor if parted else nbytes, layout, "pipeline", cluster)
    if layout.sequence_parallel or not parted:
        return cost
    gathered = collective("all_gather", nbytes, span(layout, "tensor", cluster), cluster)
    return cost._replace(seconds=cost.seconds + gathered.seconds)


def messages_per_microbatch(layout: ParallelLayout) -> int:
    """Return the largest number of messages that any pipeline rank sends per micro-batch."""
    chunks_per_rank = chunks_of(layout.schedule, layout.chunks)
    if layout.pipeline > 2:
        return 2 * chunks_per_rank
    return 2 * chunks_per_rank - (2 if SCHEDULES[layout.schedule].folded else 1)


def messages_block(layout: ParallelLayout) -> bool:
    """Return True if a pipeline rank cannot compute while messages of this rank are in flight."""
    return layout.kernels.blocks_on_messages and layout.schedule not in SPLIT


def steps_overlap(layout: ParallelLayout) -> bool:
    """Return True if a pipeline rank may start the next step before other ranks finish the current step."""
    return layout.kernels.blocks_on_messages and layout.schedule in SPLIT


def closed_pipe(
    layout: ParallelLayout,
    microbatches: int,
    ranks: Sequence[tuple[StageTime, int]],
    slowest: StageTime,
    message_s: float,
) -> PipelineTime:
    """Return the step time of a pipeline from a closed formula and the times of all pipeline ranks.

    ``ranks``: result of `ranks_of`. ``slowest``: times of the slowest rank, an element of ``ranks``. ``message_s``:
    seconds of a message between neighbouring ranks.
    """
    others = slowest.seconds
    if layout.pipeline > 1:
        rest = [0.0, 0.0, 0.0]
        for stage, often in ranks:
            for index, seconds in enumerate(stage.seconds):
                rest[index] += seconds * (often - (stage is slowest))
        others = PlannedSeconds(*(total / (layout.pipeline - 1) for total in rest))
    return closed_form(layout, slowest.seconds, others, microbatches, message_s, slowest.ahead_s)


def closed_form(
    layout: ParallelLayout,
    slowest: PlannedSeconds,
    others: PlannedSeconds,
    microbatches: int,
    message_s: float,
    ahead_s: float = 0.0,
) -> PipelineTime:
    """Return the result of `closed_time` for the schedule, chunks and pipeline size of ``layout``.

    ``ahead_s``: seconds of recomputation per micro-batch that may overlap the wait for a gradient.
    """
    return closed_time(
        layout.schedule,
        slowest,
        others,
        layout.pipeline,
        microbatches,
        chunks=layout.chunks,
        message_s=message_s,
        blocking=messages_block(layout),
        steps_overlap=steps_overlap(layout),
        ahead_s=ahead_s,
    )


def simulated_pipe(
    description: ModelDescription,
    layout: ParallelLayout,
    cluster: Cluster,
    microbatches: int,
    slowest: StageTime,
    message_s: float,
) -> PipelineTime:
    """Return the step time of a pipeline from a simulation of the schedule of ``layout``.

    ``slowest``: times of the slowest rank. ``message_s``: seconds of a message between neighbouring ranks.
    """
    costs: dict[tuple[str, str, float], MessageCost] = {}
    chunk_times = (
        stage_of(load, layout, cluster, microbatches, costs) for load in chunk_loads(description, layout, cluster)
    )
    chunks = [times.seconds for times in chunk_times]
    # Without messages the simulation gives the idle time of the schedule; the additional time is waiting for messages.
    repeats, busy_s = recomputes_ahead(layout), microbatches * slowest.whole_s
    bare = simulated_timeline(layout.schedule, chunks, layout.pipeline, microbatches, recompute=repeats)
    blocked_s = 2 * microbatches * len(chunks) // layout.pipeline * message_s if messages_block(layout) else 0.0
    if blocked_s:  # a message is part of its pass
        chunks = [
            PlannedSeconds(chunk.forward_s + message_s, chunk.input_s + message_s, chunk.weight_s) for chunk in chunks
        ]
        full = simulated_timeline(layout.schedule, chunks, layout.pipeline, microbatches)
    else:
        full = simulated_timeline(
            layout.schedule, chunks, layout.pipeline, microbatches, message_s=message_s, recompute=repeats
        )
    if steps_overlap(layout):
        bare_s, full_s = (max(stage.span_s for stage in line.stages) for line in (bare, full))
    else:
        bare_s, full_s = bare.computes_s, full.computes_s
    longest = max(full.stages, key=lambda stage: (round(stage.span_s, 12), stage.bubble))  # ties: most idle
    bubble = longest.bubble + blocked_s / longest.span_s
    # If the slowest rank recomputes less than assumed, the passes end before its busy time.
    return PipelineTime(min(busy_s, bare_s), full_s - bare_s, max(0.0, bare_s - busy_s), bubble)
