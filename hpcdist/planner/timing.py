"""Seconds of a step on the critical path: of the slowest rank of the pipeline, and what all wait for besides.

A step of m micro-batches takes m times what the slowest rank computes and sends for one, then what the pipeline is idle
or waits for its messages (`hpcdist.planner.pipeline`), what the exchange of gradients and parameters leaves exposed
(`hpcdist.planner.exchange`), and the update (`hpcdist.planner.update`). Only the last micro-batch's backward can hide
the gradients of a step. Data is read ahead, while the step before computes: it is waited for where that is shorter.

With a pipeline the gradients of a tied embedding are summed over its first and its last rank.
"""

from collections.abc import Sequence
from typing import Final, NamedTuple

from hpcdist.errors import ConfigurationError
from hpcdist.planner.cluster import Cluster
from hpcdist.planner.compute import ITEM_BYTES
from hpcdist.planner.description import Description
from hpcdist.planner.estimate import Timing
from hpcdist.planner.exchange import Exchange, exchange, gradient_bytes
from hpcdist.planner.layout import Layout
from hpcdist.planner.network import NOTHING, Cost, collective, message, span
from hpcdist.planner.pipeline import SPLIT, Pipe, Seconds, closed, simulated
from hpcdist.planner.stage_seconds import Load, Sent, chunk_loads, loads, sent
from hpcdist.planner.update import update_s
from hpcdist.strategies.schedule.catalogue import FILE, SCHEDULES, check, chunks_of

AXES: Final = ("tensor", "context", "expert")
TOKEN_BYTES: Final = 4  # as samples are stored


class Stage(NamedTuple):
    """One rank of the pipeline: what it computes and sends for a micro-batch, and both together."""

    load: Load
    sent: Sent
    seconds: Seconds


def timing(
    description: Description, layout: Layout, cluster: Cluster, global_batch: int, *, simulate: bool = False
) -> Timing:
    """Return where the time of a step goes (local).

    With ``simulate`` the passes of a pipeline are run one by one, each chunk with its own seconds. Raises
    ConfigurationError for a schedule or a precision that cannot be.
    """
    m = layout.microbatches(global_batch)
    if layout.pipeline > 1:
        _check(layout, m)
    found = [(stage_of(load, layout, cluster, m), often) for load, often in loads(description, layout, cluster)]
    slowest = max((stage for stage, _ in found), key=lambda stage: stage.seconds.whole_s)
    hop = border(description, layout, cluster)
    pipe = (_simulated if simulate and layout.pipeline > 1 else _closed)(
        description, layout, cluster, m, found, slowest, hop.seconds
    )
    fullest = max((stage for stage, _ in found), key=lambda stage: stage.load.parameters)
    swap = data_exchange(description, layout, cluster, m, fullest)
    tied = tied_sum(description, layout, cluster)
    load, waits = slowest.load, slowest.sent
    terms = {
        "forward": m * load.forward_s,
        "backward": m * (load.input_s + load.weight_s) + (m - 1) * load.add_s,
        "recompute": m * load.again_s,
        **{axis: m * (waits.forward_s.get(axis, 0.0) + waits.back_s.get(axis, 0.0)) for axis in AXES},
        "pipeline": pipe.message_s,
        "bubble": pipe.idle_s,
        "data": swap.exposed_s + tied.seconds,
        "update": update_s(fullest.load.parameters, layout, cluster, fullest.load.expert_parameters),
    }
    terms["input"] = max(0.0, _input_s(description, layout, cluster, global_batch) - sum(terms.values()))
    return Timing(
        terms=terms,
        hidden_s=swap.hidden_s,
        bubble=pipe.bubble,
        bytes=_bytes(layout, m, waits, hop, swap, tied),
        algorithms=_algorithms(waits, swap),
        flags=tuple(dict.fromkeys((*load.flags, *waits.flags, *hop.flags, *swap.flags, *_beyond(layout, cluster)))),
    )


def stage_of(load: Load, layout: Layout, cluster: Cluster, microbatches: int) -> Stage:
    """Return what a rank, or a chunk, with this ``load`` takes for one of so many micro-batches (local)."""
    waits = sent(load, layout, cluster)
    add_s = load.add_s * (microbatches - 1) / microbatches
    seconds = Seconds(
        load.forward_s + sum(waits.forward_s.values()),
        load.input_s + load.again_s + sum(waits.back_s.values()),
        load.weight_s + add_s,
    )
    return Stage(load, waits, seconds)


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


def _closed(
    description: Description,
    layout: Layout,
    cluster: Cluster,
    m: int,
    found: Sequence[tuple[Stage, int]],
    slowest: Stage,
    hop_s: float,
) -> Pipe:
    """Return the closed form of the pipeline."""
    others = slowest.seconds
    if layout.pipeline > 1:
        rest = [0.0, 0.0, 0.0]
        for stage, often in found:
            for part, seconds in enumerate(stage.seconds):
                rest[part] += seconds * (often - (stage is slowest))
        others = Seconds(*(total / (layout.pipeline - 1) for total in rest))
    return closed(
        layout.schedule,
        slowest.seconds,
        others,
        layout.pipeline,
        m,
        chunks=layout.chunks,
        message_s=hop_s,
        blocking=blocks(layout),
        steps_overlap=steps_overlap(layout),
    )


def _simulated(
    description: Description,
    layout: Layout,
    cluster: Cluster,
    m: int,
    found: Sequence[tuple[Stage, int]],
    slowest: Stage,
    hop_s: float,
) -> Pipe:
    """Return what the simulator says, once with messages and once without."""
    chunks = chunk_seconds(description, layout, cluster, m)
    busy_s = m * slowest.seconds.whole_s
    bare = simulated(layout.schedule, chunks, layout.pipeline, m)
    blocked_s = 2 * m * len(chunks) // layout.pipeline * hop_s if blocks(layout) else 0.0
    if blocked_s:
        chunks = [Seconds(one.forward_s + hop_s, one.input_s + hop_s, one.weight_s) for one in chunks]
        full = simulated(layout.schedule, chunks, layout.pipeline, m)
    else:
        full = simulated(layout.schedule, chunks, layout.pipeline, m, message_s=hop_s)
    if steps_overlap(layout):
        bare_s, full_s = (max(stage.span_s for stage in line.stages) for line in (bare, full))
    else:
        bare_s, full_s = bare.computes_s, full.computes_s
    longest = max(full.stages, key=lambda stage: (round(stage.span_s, 12), stage.bubble))
    bubble = longest.bubble + blocked_s / longest.span_s
    return Pipe(busy_s, full_s - bare_s, max(0.0, bare_s - busy_s), bubble)


def chunk_seconds(description: Description, layout: Layout, cluster: Cluster, microbatches: int) -> list[Seconds]:
    """Return the seconds of each chunk for a micro-batch, in the order of the model (local)."""
    of_chunks = chunk_loads(description, layout, cluster)
    return [stage_of(load, layout, cluster, microbatches).seconds for load in of_chunks]


def blocks(layout: Layout) -> bool:
    """Whether messages between stages keep ranks from computing."""
    return layout.implementation == "megatron" and layout.schedule not in SPLIT


def steps_overlap(layout: Layout) -> bool:
    """Whether a step begins where the one before has not ended everywhere: ours agrees on its norm first."""
    return layout.implementation == "megatron" and layout.schedule in SPLIT


def data_exchange(description: Description, layout: Layout, cluster: Cluster, m: int, stage: Stage) -> Exchange:
    """Return the exchange of the data axis for the parameters of ``stage``, after ``m`` micro-batches (local)."""
    load = stage.load
    return exchange(
        load.parameters,
        layout,
        cluster,
        stage.seconds.input_s + stage.seconds.weight_s,
        m,
        forward_s=stage.seconds.forward_s,
        units=load.units,
        expert_parameters=load.expert_parameters,
        matrices=_matrices(description, layout) if layout.compression == "powersgd" and layout.pipeline == 1 else (),
    )


def _matrices(description: Description, layout: Layout) -> tuple[tuple[int, int, int], ...]:
    """Return the matrices of all units, as they are on one device: (rows, columns, how many)."""
    found = []
    for unit in description.units:
        for product in unit.products:
            cut = {"columns": (1, layout.tensor), "inner": (layout.tensor, 1)}.get(product.cut, (1, 1))
            often = unit.count * (product.experts // layout.expert if product.experts > 1 else 1)
            found.append((product.inner // cut[0], product.columns // cut[1], often))
    return tuple(found)


def tied_sum(description: Description, layout: Layout, cluster: Cluster) -> Cost:
    """Return the sum of the gradients of a tied tensor over the first and the last rank, which have it (local)."""
    if layout.pipeline == 1 or not description.tied_parameters:
        return NOTHING
    return message(description.tied_parameters / layout.tensor * gradient_bytes(layout), layout, "pipeline", cluster)


def _input_s(description: Description, layout: Layout, cluster: Cluster, global_batch: int) -> float:
    """Return how long reading the samples of a step takes; ranks of one replica read them once."""
    nbytes = global_batch * description.tokens * TOKEN_BYTES
    nodes = max(1, min(layout.data, -(-layout.devices // cluster.node.devices)))
    return nbytes / min(cluster.storage.read_bytes_per_s, nodes * cluster.storage.node_read_bytes_per_s)


def _bytes(layout: Layout, m: int, waits: Sent, hop: Cost, swap: Exchange, tied: Cost) -> dict[str, float]:
    """Return what a rank in the middle of the pipeline sends in a step, by axis."""
    found = {axis: m * nbytes for axis, nbytes in waits.nbytes.items()}
    if layout.pipeline > 1:
        found["pipeline"] = 2 * m * chunks_of(layout.schedule, layout.chunks) * hop.nbytes
    found["data"] = swap.nbytes + tied.nbytes
    return found


def _algorithms(waits: Sent, swap: Exchange) -> dict[str, str]:
    return {**waits.algorithms, **({"data": swap.algorithm} if swap.algorithm != "none" else {})}


def _check(layout: Layout, microbatches: int) -> None:
    """Refuse schedules that cannot run so, and those of a file, whose passes nobody knows here."""
    if layout.schedule == FILE:
        raise ConfigurationError(
            f"schedule = {FILE!r}: a schedule from a file may be anything, so no plan is made of it; choose one of "
            f"{', '.join(SCHEDULES)}"
        )
    check(layout.schedule, layout.pipeline, microbatches, layout.chunks)


def _beyond(layout: Layout, cluster: Cluster) -> tuple[str, ...]:
    if layout.devices <= cluster.devices:
        return ()
    return (f"{layout.devices} devices, and the cluster has {cluster.devices}: extrapolated",)
