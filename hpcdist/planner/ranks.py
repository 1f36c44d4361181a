"""The pipeline of one layout: what its ranks take, what goes between them, and how long that makes a step's passes."""

from collections.abc import Sequence
from typing import NamedTuple

from hpcdist.planner.again import ahead
from hpcdist.planner.cluster import ITEM_BYTES, Cluster
from hpcdist.planner.description import Description
from hpcdist.planner.layout import Layout
from hpcdist.planner.network import NOTHING, Cost, collective, message
from hpcdist.planner.network_span import span
from hpcdist.planner.pipeline import SPLIT, Pipe, Seconds, closed, simulated
from hpcdist.planner.stage_seconds import Load, Sent, chunk_loads, loads, sent
from hpcdist.strategies.schedule.generate.registry import SCHEDULES, chunks_of


class Stage(NamedTuple):
    """One rank of the pipeline: what it computes and sends for a micro-batch, and both together.

    ``ahead_s`` is what it computes again before the gradient is there, with its messages; else that is in ``seconds``.
    """

    load: Load
    sent: Sent
    seconds: Seconds
    ahead_s: float

    @property
    def whole_s(self) -> float:
        """All of a micro-batch."""
        return self.seconds.whole_s + self.ahead_s


def stage_of(
    load: Load,
    layout: Layout,
    cluster: Cluster,
    microbatches: int,
    known: dict[tuple[str, str, float], Cost] | None = None,
) -> Stage:
    """Return what a rank, or a chunk, with this ``load`` takes for one of so many micro-batches (local).

    ``known`` collects the costs of collectives of this layout.
    """
    waits = sent(load, layout, cluster, known)
    again_s = load.again_s + sum(waits.again_s.values())
    early = ahead(layout)
    seconds = Seconds(
        load.forward_s + sum(waits.forward_s.values()),
        load.input_s + sum(waits.back_s.values()) + (0.0 if early else again_s),
        load.weight_s + load.add_s * (microbatches - 1) / microbatches,
    )
    return Stage(load, waits, seconds, again_s if early else 0.0)


def ranks_of(description: Description, layout: Layout, cluster: Cluster, microbatches: int) -> list[tuple[Stage, int]]:
    """Return the different ranks of the pipeline, and how many of each there are (local)."""
    known: dict[tuple[str, str, float], Cost] = {}
    return [
        (stage_of(load, layout, cluster, microbatches, known), often)
        for load, often in loads(description, layout, cluster)
    ]


def chunks_seconds(description: Description, layout: Layout, cluster: Cluster, microbatches: int) -> list[Seconds]:
    """Return the seconds of each chunk for a micro-batch, in the order of the model (local)."""
    known: dict[tuple[str, str, float], Cost] = {}
    of_chunks = chunk_loads(description, layout, cluster)
    return [stage_of(load, layout, cluster, microbatches, known).seconds for load in of_chunks]


def border(description: Description, layout: Layout, cluster: Cluster) -> Cost:
    """Return what the message of a micro-batch between two ranks of the pipeline takes (local).

    Tokens that are cut over the tensor axis are sent as they are. Where they are not, Megatron-LM sends a part from
    each tensor rank and gathers the parts behind the wire (arXiv:2104.04473, section 4.1); ours sends the whole.
    """
    if layout.pipeline == 1:
        return NOTHING
    numbers = layout.microbatch * description.tokens * description.width / layout.context
    nbytes = numbers * ITEM_BYTES[layout.computes_in]
    parted = layout.sequence_parallel or layout.implementation == "megatron"
    cost = message(nbytes / layout.tensor if parted else nbytes, layout, "pipeline", cluster)
    if layout.sequence_parallel or not parted:
        return cost
    gathered = collective("all_gather", nbytes, span(layout, "tensor", cluster), cluster)
    return cost._replace(seconds=cost.seconds + gathered.seconds)


def messages(layout: Layout) -> int:
    """Return how many messages the busiest rank sends for a micro-batch (local).

    One with two neighbours sends an activation and a gradient for each of its chunks; of two ranks each has half of
    what crosses the borders of chunks between them.
    """
    each = chunks_of(layout.schedule, layout.chunks)
    if layout.pipeline > 2:
        return 2 * each
    return 2 * each - (2 if SCHEDULES[layout.schedule].folded else 1)


def blocks(layout: Layout) -> bool:
    """Whether messages between ranks keep them from computing."""
    return layout.implementation == "megatron" and layout.schedule not in SPLIT


def steps_overlap(layout: Layout) -> bool:
    """Whether a step begins where the one before has not ended everywhere: ours agrees on its norm first."""
    return layout.implementation == "megatron" and layout.schedule in SPLIT


def closed_pipe(layout: Layout, m: int, found: Sequence[tuple[Stage, int]], slowest: Stage, hop_s: float) -> Pipe:
    """Return the closed form for the ranks that are ``found`` (local)."""
    others = slowest.seconds
    if layout.pipeline > 1:
        rest = [0.0, 0.0, 0.0]
        for stage, often in found:
            for part, seconds in enumerate(stage.seconds):
                rest[part] += seconds * (often - (stage is slowest))
        others = Seconds(*(total / (layout.pipeline - 1) for total in rest))
    return closed_form(layout, slowest.seconds, others, m, hop_s, slowest.ahead_s)


def closed_form(layout: Layout, slowest: Seconds, others: Seconds, m: int, hop_s: float, ahead_s: float = 0.0) -> Pipe:
    """Return the closed form of the layout's schedule, for ranks that take so long (local)."""
    return closed(
        layout.schedule,
        slowest,
        others,
        layout.pipeline,
        m,
        chunks=layout.chunks,
        message_s=hop_s,
        blocking=blocks(layout),
        steps_overlap=steps_overlap(layout),
        ahead_s=ahead_s,
    )


def simulated_pipe(
    description: Description, layout: Layout, cluster: Cluster, m: int, slowest: Stage, hop_s: float
) -> Pipe:
    """Return what the simulator says, run once with messages and once without (local)."""
    chunks = chunks_seconds(description, layout, cluster, m)
    repeats, busy_s = ahead(layout), m * slowest.whole_s
    bare = simulated(layout.schedule, chunks, layout.pipeline, m, recompute=repeats)
    blocked_s = 2 * m * len(chunks) // layout.pipeline * hop_s if blocks(layout) else 0.0
    if blocked_s:
        chunks = [Seconds(one.forward_s + hop_s, one.input_s + hop_s, one.weight_s) for one in chunks]
        full = simulated(layout.schedule, chunks, layout.pipeline, m)
    else:
        full = simulated(layout.schedule, chunks, layout.pipeline, m, message_s=hop_s, recompute=repeats)
    if steps_overlap(layout):
        bare_s, full_s = (max(stage.span_s for stage in line.stages) for line in (bare, full))
    else:
        bare_s, full_s = bare.computes_s, full.computes_s
    longest = max(full.stages, key=lambda stage: (round(stage.span_s, 12), stage.bubble))
    bubble = longest.bubble + blocked_s / longest.span_s
    # Where the slowest rank computes less again than it might, the passes end before its time is over.
    return Pipe(min(busy_s, bare_s), full_s - bare_s, max(0.0, bare_s - busy_s), bubble)
