"""Pipeline of a layout: seconds of its ranks, messages between stages, and bubble, in closed form and simulated.

`ranks_of` gives what each rank computes and sends for a micro-batch; `closed_pipe` and `simulated_pipe` turn that
into the time of all passes of a step. With p ranks of v chunks, m micro-batches, F, I, W the seconds of a rank for a
micro-batch (all of its chunks; F is forward, I and W the gradients of inputs and of weights) and T = F + I + W, the
time from the first pass to the end of the last one is m T and

    gpipe, 1f1b    (p-1) T                                              arXiv:1811.06965, arXiv:2104.04473
    interleaved    (p-1) T / v                                          arXiv:2104.04473, section 2.2
    zb-h1          (p-1) (F + I) - min(m-1, p-1) w                      w = min(W, I, F)
    zb-h2          (p-1) (F + I) - min(m/2, p-1) w - min((m-1)/2, p-1) min(W, I - w, F), quotients without remainder
    zb-v           (p-1) (F + I) - min(m-1, p-1) min(F, 2 W, (F + I)/2) - max(0, m-p) min(W, (F + I)/2), and at least
                   (p-1) max(F/2, I/2, F + I - 3 W)

That of zb-h1 agrees with arXiv:2401.10241, table 1, where m >= p and W <= I, F. The table gives those of zb-h2 and
zb-v by the span of one rank, for m >= 2p - 1: their ranks begin up to (p-1) F / v after each other, and end so. Where
no step waits for all ranks, as with the "post-validation" of that paper, the next one begins meanwhile, and that much
is no loss. All are what the simulator finds (`hpcdist.strategies.schedule.simulate.timeline`) for any m and times;
zb-v for F = I = W, else within 5 %. Where ranks differ, m T is that of the slowest one, and F, I, W of the rest are
the means of the others: an approximation.

Where chunks are recomputed, in A, before they wait for their gradients, as ours are, the idle time is shorter: with B
= I + W, T = A + F + B, and m > 1 (interleaved m > p)

    gpipe          (p-1) (F + B)
    1f1b           (p-1) (F + B) - min(2 A, A + B)
    interleaved    (p-1) (F + B) / v - min(3 A, A + B) / v

of the slowest rank, or 0, and for m = 1 it is (p-1) (F + B) - A.

A message between neighbours that takes x is waited for once on the way there and once back for the first micro-batch;
1f1b has at most p in flight on the first rank, so it waits again in every round:

    gpipe    2 (p-1) x      1f1b     2 (p-1 + (m-1) (p-1)/p) x      interleaved   2 (p v - 1) x
    zb-h1    4 (p-1) x      zb-h2    (p-1) x                        zb-v          (5 p - 7) x, at least 4 (p-1) x

as long as x is shorter than a pass, with a quotient without remainder; interleaved for m a multiple of p, those of
zero bubble about, and for many micro-batches. Megatron-LM sends and receives between passes and computes nothing
meanwhile: each pass is x longer, which makes 2 (v m + p-1) x.
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
from hpcdist.strategies.schedule.generate.registry import SCHEDULES, chunks_of

if TYPE_CHECKING:
    import numpy as np

    from hpcdist.strategies.schedule.simulate.timeline import StepTimeline

SPLIT = ("zb-h1", "zb-h2", "zb-v")


class PlannedSeconds(NamedTuple):
    """Seconds of a micro-batch on a rank, or in a chunk of it: forward, and the gradients of inputs and of weights."""

    forward_s: float
    input_s: float
    weight_s: float

    @property
    def whole_s(self) -> float:
        """Seconds of forward and backward."""
        return self.forward_s + self.input_s + self.weight_s


class PipelineTime(NamedTuple):
    """Time of a step's passes: those of the slowest rank, its waits for messages, and its idle time besides.

    ``bubble`` is the idle share as in `hpcdist.strategies.schedule.simulate.timeline`, messages included.
    """

    busy_s: float
    message_s: float
    idle_s: float
    bubble: float

    @property
    def whole_s(self) -> float:
        """Seconds from the first pass to the end of the last, or to where the next step begins."""
        return self.busy_s + self.message_s + self.idle_s


def closed_time(
    schedule: str,
    slowest: PlannedSeconds,
    others: PlannedSeconds,
    ranks: int,
    microbatches: int,
    *,
    chunks: int = 1,
    message_s: float = 0.0,
    blocking: bool = False,
    steps_overlap: bool = False,
    ahead_s: float = 0.0,
) -> PipelineTime:
    """Return the closed form for a pipeline of a ``slowest`` rank and the mean of the ``others``.

    ``message_s`` is what one between neighbours takes, ``blocking`` where nothing is computed meanwhile;
    ``steps_overlap`` where a step begins on a rank as soon as the one before it has ended there. ``ahead_s`` is what
    the slowest rank computes again, before it waits for the gradient.
    """
    busy_s = microbatches * (slowest.whole_s + ahead_s)
    if ranks == 1:
        return PipelineTime(busy_s, 0.0, 0.0, 0.0)
    chunks = chunks_of(schedule, chunks)
    idle_s = _idle_s(schedule, others, ranks, microbatches, chunks)
    if ahead_s:
        # Recomputation goes on while a rank waits for a gradient, and hides there: 2 A (interleaved 3 A) at most, and
        # A + B at most; with one micro-batch A.
        back_s = others.whole_s - others.forward_s
        hidden_s = min({"1f1b": 2, "interleaved": 3}.get(schedule, 0) * ahead_s, ahead_s + back_s) / chunks
        idle_s = max(0.0, idle_s - (hidden_s if microbatches > 1 else ahead_s))
    # Ranks of zb-h2 and zb-v begin (p-1) F / v after each other, and end so: no idle time within the span of a rank.
    span_s = idle_s
    if schedule in ("zb-h2", "zb-v"):
        span_s = max(0.0, idle_s - (ranks - 1) * others.forward_s / chunks)
    waits = _waits(schedule, ranks, microbatches, chunks, blocking)
    bubble = (span_s + waits * message_s) / (busy_s + span_s + waits * message_s) if busy_s else 0.0
    return PipelineTime(busy_s, waits * message_s, span_s if steps_overlap else idle_s, bubble)


def _idle_s(schedule: str, others: PlannedSeconds, ranks: int, microbatches: int, chunks: int) -> float:
    """Return the time beside m T (module docstring); ``others`` are F, I, W of the other ranks."""
    forward_s, input_s, weight_s = others
    behind, there_and_back = ranks - 1, (ranks - 1) * (forward_s + input_s)
    filled_s = min(others)  # w: the part of a W that fits into each gap
    if schedule == "zb-h1":
        return there_and_back - min(microbatches - 1, behind) * filled_s
    if schedule == "zb-h2":
        rest_s = min(weight_s, input_s - filled_s, forward_s)
        filled_s *= min(microbatches // 2, behind)
        return there_and_back - filled_s - min((microbatches - 1) // 2, behind) * rest_s
    if schedule == "zb-v":
        mean_s = (forward_s + input_s) / 2
        filled_s = min(microbatches - 1, behind) * min(forward_s, 2 * weight_s, mean_s)
        filled_s += max(0, microbatches - ranks) * min(weight_s, mean_s)
        least_s = max(forward_s / 2, input_s / 2, forward_s + input_s - 3 * weight_s)
        return max(there_and_back - filled_s, behind * least_s)
    return behind * others.whole_s / chunks


def _waits(schedule: str, ranks: int, microbatches: int, chunks: int, blocking: bool) -> int:
    """Return the number of messages on the critical path."""
    behind = ranks - 1
    if blocking and schedule not in SPLIT:  # each pass is as much longer as a message takes
        return 2 * (chunks * microbatches + behind)
    if schedule == "gpipe":
        return 2 * behind
    if schedule == "1f1b":
        return 2 * (behind + (microbatches - 1) * behind // ranks)
    if schedule == "interleaved":
        return 2 * (ranks * chunks - 1)
    return {"zb-h1": 4 * behind, "zb-h2": behind}.get(schedule, max(5 * ranks - 7, 4 * behind))


def simulated_timeline(
    schedule: str,
    chunks: Sequence[PlannedSeconds],
    ranks: int,
    microbatches: int,
    *,
    message_s: float = 0.0,
    recompute: bool = False,
) -> "StepTimeline":
    """Return the timeline of the passes over ``chunks``, in the order of the model, as the simulator runs them (local).

    A message keeps its link for ``message_s``. With ``recompute`` chunks are computed again before they wait for their
    gradients, in as long as their forward takes.
    """
    from hpcdist.strategies.schedule.simulate import timeline
    from hpcdist.strategies.schedule.simulate.program import LinkCost, StepCosts

    known = SCHEDULES[schedule]
    chunks_per_rank = len(chunks) // ranks
    placement = known.place([range(number, number + 1) for number in range(len(chunks))], ranks)
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
    """Return the passes of all ranks; cached, since they are simulated with messages and without."""
    from hpcdist.strategies.schedule.simulate.passes import compact

    return [compact(SCHEDULES[schedule].passes(rank, ranks, microbatches, chunks_per_rank)) for rank in range(ranks)]


class StageTime(NamedTuple):
    """One rank of the pipeline: its load, its waits for collectives, and the seconds of both for a micro-batch.

    ``ahead_s`` is its recomputation before the gradient is there, with messages; otherwise that is in ``seconds``.
    """

    load: StageLoad
    sent: CollectiveWait
    seconds: PlannedSeconds
    ahead_s: float

    @property
    def whole_s(self) -> float:
        """Seconds of a micro-batch, recomputation included."""
        return self.seconds.whole_s + self.ahead_s


def stage_of(
    load: StageLoad,
    layout: ParallelLayout,
    cluster: Cluster,
    microbatches: int,
    known: dict[tuple[str, str, float], MessageCost] | None = None,
) -> StageTime:
    """Return the time of a rank, or a chunk, with this ``load`` for one of so many micro-batches (local).

    ``known`` collects the costs of collectives of this layout.
    """
    waits = collective_wait(load, layout, cluster, known)
    again_s = load.again_s + sum(waits.again_s.values())
    early = recomputes_ahead(layout)
    seconds = PlannedSeconds(
        load.forward_s + sum(waits.forward_s.values()),
        load.input_s + sum(waits.back_s.values()) + (0.0 if early else again_s),
        load.weight_s + load.add_s * (microbatches - 1) / microbatches,
    )
    return StageTime(load, waits, seconds, again_s if early else 0.0)


def ranks_of(
    description: ModelDescription, layout: ParallelLayout, cluster: Cluster, microbatches: int
) -> list[tuple[StageTime, int]]:
    """Return the different ranks of the pipeline, and how many of each there are (local)."""
    known: dict[tuple[str, str, float], MessageCost] = {}
    return [
        (stage_of(load, layout, cluster, microbatches, known), often)
        for load, often in loads(description, layout, cluster)
    ]


def chunks_seconds(
    description: ModelDescription, layout: ParallelLayout, cluster: Cluster, microbatches: int
) -> list[PlannedSeconds]:
    """Return the seconds of each chunk for a micro-batch, in the order of the model (local)."""
    known: dict[tuple[str, str, float], MessageCost] = {}
    of_chunks = chunk_loads(description, layout, cluster)
    return [stage_of(load, layout, cluster, microbatches, known).seconds for load in of_chunks]


def border(description: ModelDescription, layout: ParallelLayout, cluster: Cluster) -> MessageCost:
    """Return the cost of the message of a micro-batch between two ranks of the pipeline (local).

    Tokens that are cut over the tensor axis are sent as they are. Where they are not, Megatron-LM sends a part from
    each tensor rank and gathers the parts behind the wire (arXiv:2104.04473, section 4.1); ours sends the whole.
    """
    if layout.pipeline == 1:
        return NO_COST
    numbers = layout.microbatch * description.tokens * description.width / layout.context
    nbytes = numbers * ITEM_BYTES[layout.computes_in]
    parted = layout.sequence_parallel or layout.implementation == "megatron"
    cost = message(nbytes / layout.tensor if parted else nbytes, layout, "pipeline", cluster)
    if layout.sequence_parallel or not parted:
        return cost
    gathered = collective("all_gather", nbytes, span(layout, "tensor", cluster), cluster)
    return cost._replace(seconds=cost.seconds + gathered.seconds)


def messages_per_microbatch(layout: ParallelLayout) -> int:
    """Return how many messages the busiest rank sends for a micro-batch (local).

    One with two neighbours sends an activation and a gradient for each of its chunks; of two ranks each has half of
    what crosses the borders of chunks between them.
    """
    chunks_per_rank = chunks_of(layout.schedule, layout.chunks)
    if layout.pipeline > 2:
        return 2 * chunks_per_rank
    return 2 * chunks_per_rank - (2 if SCHEDULES[layout.schedule].folded else 1)


def messages_block(layout: ParallelLayout) -> bool:
    """Whether messages between ranks keep them from computing."""
    return layout.implementation == "megatron" and layout.schedule not in SPLIT


def steps_overlap(layout: ParallelLayout) -> bool:
    """Whether a step begins where the one before has not ended everywhere: ours agrees on its norm first."""
    return layout.implementation == "megatron" and layout.schedule in SPLIT


def closed_pipe(
    layout: ParallelLayout, m: int, ranks: Sequence[tuple[StageTime, int]], slowest: StageTime, hop_s: float
) -> PipelineTime:
    """Return the closed form for these ``ranks`` and how many of each there are (local)."""
    others = slowest.seconds
    if layout.pipeline > 1:
        rest = [0.0, 0.0, 0.0]
        for stage, often in ranks:
            for part, seconds in enumerate(stage.seconds):
                rest[part] += seconds * (often - (stage is slowest))
        others = PlannedSeconds(*(total / (layout.pipeline - 1) for total in rest))
    return closed_form(layout, slowest.seconds, others, m, hop_s, slowest.ahead_s)


def closed_form(
    layout: ParallelLayout, slowest: PlannedSeconds, others: PlannedSeconds, m: int, hop_s: float, ahead_s: float = 0.0
) -> PipelineTime:
    """Return the closed form of the layout's schedule, for ranks of these times (local)."""
    return closed_time(
        layout.schedule,
        slowest,
        others,
        layout.pipeline,
        m,
        chunks=layout.chunks,
        message_s=hop_s,
        blocking=messages_block(layout),
        steps_overlap=steps_overlap(layout),
        ahead_s=ahead_s,
    )


def simulated_pipe(
    description: ModelDescription, layout: ParallelLayout, cluster: Cluster, m: int, slowest: StageTime, hop_s: float
) -> PipelineTime:
    """Return the simulated time of the passes, run once with messages and once without (local)."""
    chunks = chunks_seconds(description, layout, cluster, m)
    # Without messages the simulator gives what the schedule leaves idle; what it takes longer with them is waiting.
    repeats, busy_s = recomputes_ahead(layout), m * slowest.whole_s
    bare = simulated_timeline(layout.schedule, chunks, layout.pipeline, m, recompute=repeats)
    blocked_s = 2 * m * len(chunks) // layout.pipeline * hop_s if messages_block(layout) else 0.0
    if blocked_s:  # a message is a part of the pass: the rank computes nothing meanwhile
        chunks = [PlannedSeconds(chunk.forward_s + hop_s, chunk.input_s + hop_s, chunk.weight_s) for chunk in chunks]
        full = simulated_timeline(layout.schedule, chunks, layout.pipeline, m)
    else:
        full = simulated_timeline(layout.schedule, chunks, layout.pipeline, m, message_s=hop_s, recompute=repeats)
    if steps_overlap(layout):
        bare_s, full_s = (max(stage.span_s for stage in line.stages) for line in (bare, full))
    else:
        bare_s, full_s = bare.computes_s, full.computes_s
    longest = max(full.stages, key=lambda stage: (round(stage.span_s, 12), stage.bubble))  # ties: the idlest
    bubble = longest.bubble + blocked_s / longest.span_s
    # Where the slowest rank computes less again than it might, the passes end before its time is over.
    return PipelineTime(min(busy_s, bare_s), full_s - bare_s, max(0.0, bare_s - busy_s), bubble)
