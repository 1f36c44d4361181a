"""Time of a step: micro-batches, pipeline bubble, exposed exchange, update and input.

The m micro-batches take m times the time of the slowest pipeline rank. Only the last micro-batch's backward overlaps
the exchange of gradients. Input is prefetched.

The update is bound by memory traffic. Bytes per updated number, with p bytes per parameter, g per gradient, and k
optimizer slots:

    norm        read g
    step        read g, read and write parameter and k slots: 2 p (1 + k); for 16 bits with a float32 master
                2 x 4 (1 + k), and write the parameter p
    Megatron    copy 16-bit gradients to float32 (read 2, write 4), unscale and check for infinities (8), clip (8),
                and zero the gradients (g)

A step ends with the slowest node. If step times of n nodes are independent and normal with standard deviation s T, the
slowest takes s T sqrt(2 ln n) longer: the term "stragglers". s is `Kernels.jitter`.
"""

import math
from collections.abc import Mapping
from typing import Final, NamedTuple

from hpcdist.errors import ConfigurationError
from hpcdist.planner.cluster.hardware import Cluster
from hpcdist.planner.estimate import TimeEstimate
from hpcdist.planner.layout import ParallelLayout
from hpcdist.planner.memory.model_states import stage_of, unsharded
from hpcdist.planner.model.description import ModelDescription
from hpcdist.planner.time.compute import local_parameters
from hpcdist.planner.time.exchange import ExchangeCost, exchange
from hpcdist.planner.time.gradient_payloads import STORED_ITEM_BYTES, summed_item_bytes
from hpcdist.planner.time.network import NO_COST, MessageCost, collective, message, span
from hpcdist.planner.time.pipeline import (
    StageTime,
    border_message,
    closed_pipe,
    messages_per_microbatch,
    ranks_of,
    simulated_pipe,
)
from hpcdist.planner.time.stage_load import CollectiveWait, StageLoad
from hpcdist.strategies.schedule.registry import FILE, SCHEDULES, check_schedule

WIDE_BYTES = 4  # float32: of a master, a moment


def update_s(parameters: float, layout: ParallelLayout, cluster: Cluster, expert_parameters: float = 0.0) -> float:
    """Return the seconds that a device needs for the gradient norm and the optimizer update.

    ``parameters``: number of parameters on the device before ZeRO shards them, including ``expert_parameters``.
    """
    numbers = updated_parameters(parameters - expert_parameters, layout, layout.data * layout.context)
    if expert_parameters:
        numbers += updated_parameters(expert_parameters, layout, max(1, layout.data * layout.context // layout.expert))
    norm = collective("allreduce", WIDE_BYTES, span(layout, "all", cluster), cluster)
    moves = cluster.device.memory_bytes_per_s * cluster.device.memory_share
    return numbers * update_bytes_per_parameter(layout) / moves + norm.seconds


def updated_parameters(parameters: float, layout: ParallelLayout, replicas: int) -> float:
    """Return the number of parameters, out of ``parameters``, that one of ``replicas`` ranks or one server updates."""
    if layout.strategy == "parameter_server":
        return parameters / (layout.servers or replicas)
    return parameters / replicas if stage_of(layout.strategy) else parameters


def update_bytes_per_parameter(layout: ParallelLayout) -> float:
    """Return the bytes per parameter that gradient norm and optimizer update move in the memory of a device."""
    parameter, gradient, _ = unsharded(layout)
    wide = layout.precision not in ("float32", "float64")
    master = WIDE_BYTES if wide else parameter
    step = 2 * master * (1 + layout.optimizer_slots) + (parameter if wide else 0)
    return layout.kernels.update_bytes(step, gradient, is_narrow=wide and gradient == 2)


AXES: Final = ("tensor", "context", "expert")
TOKEN_BYTES: Final = 4  # largest type of stored tokens


class MicrobatchFlow(NamedTuple):
    """Times of all micro-batches of a step. Gradient exchange and optimizer update are not included."""

    slowest: StageTime  # of the slowest pipeline rank
    fullest: StageTime  # of the pipeline rank with the most parameters
    hop: MessageCost  # message between two ranks
    terms: Mapping[str, float]  # seconds of each phase, such as "forward" and "backward"
    bubble: float


def microbatch_flow(
    description: ModelDescription,
    layout: ParallelLayout,
    cluster: Cluster,
    global_batch: int,
    *,
    simulate: bool = False,
) -> MicrobatchFlow:
    """Return the times of all micro-batches in a step of ``global_batch`` samples.

    ``description``: the model to train. ``simulate``: as for `timing`. Raises ConfigurationError if the schedule of
    ``layout`` is impossible.
    """
    m = layout.microbatches(global_batch)
    if layout.pipeline > 1:
        _check(layout, m)
    ranks = ranks_of(description, layout, cluster, m)
    slowest = max((stage for stage, _ in ranks), key=lambda stage: stage.whole_s)
    hop = border_message(description, layout, cluster)
    if simulate and layout.pipeline > 1:
        pipe = simulated_pipe(description, layout, cluster, m, slowest, hop.seconds)
    else:
        pipe = closed_pipe(layout, m, ranks, slowest, hop.seconds)
    fullest = max((stage for stage, _ in ranks), key=lambda stage: stage.load.parameters)
    load, waits = slowest.load, slowest.sent
    full = _full(layout, global_batch)
    terms = {
        "forward": full * load.forward_s,
        "backward": full * (load.input_s + load.weight_s) + (m - 1) * load.add_s,
        "recompute": max(0.0, full * load.again_s - (m * slowest.whole_s - pipe.busy_s)),
        **{axis: full * sum(wait.get(axis, 0.0) for wait in waits[:3]) for axis in AXES},
        "pipeline": pipe.message_s,
        "bubble": pipe.idle_s,
    }
    return MicrobatchFlow(slowest, fullest, hop, terms, pipe.bubble)


def timing(
    description: ModelDescription,
    layout: ParallelLayout,
    cluster: Cluster,
    global_batch: int,
    *,
    simulate: bool = False,  # simulate the pipeline schedule instead of using a formula
    spare_bytes: float = math.inf,  # free memory for gradient buckets above the default size
    flow: MicrobatchFlow | None = None,  # result of `microbatch_flow`
) -> TimeEstimate:
    """Return the seconds of a training step of ``global_batch`` samples, by phase, such as "forward".

    ``description``: the model to train. Raises ConfigurationError if the schedule or precision of ``layout`` is
    impossible.
    """
    if flow is None:
        flow = microbatch_flow(description, layout, cluster, global_batch, simulate=simulate)
    fullest, waits, hop = flow.fullest, flow.slowest.sent, flow.hop
    swap = data_exchange(description, layout, cluster, layout.microbatches(global_batch), fullest, spare_bytes)
    tied, rows = tied_sum(description, layout, cluster), rows_sum(fullest.load, layout, cluster)
    terms = {
        **flow.terms,
        "data": swap.exposed_s + tied.seconds,
        "rows": rows.seconds,
        "update": _update_s(description, fullest.load, layout, cluster),
    }
    nodes = -(-layout.devices // cluster.node.devices)
    if layout.kernels.jitter and nodes > 1:
        terms["stragglers"] = layout.kernels.jitter * math.sqrt(2 * math.log(nodes)) * sum(terms.values())
    terms["input"] = max(0.0, _input_s(description, layout, cluster, global_batch) - sum(terms.values()))
    return TimeEstimate(
        terms=terms,
        hidden_s=swap.hidden_s + _full(layout, global_batch) * waits.hidden_s,
        bubble=flow.bubble,
        bytes=_bytes(layout, _full(layout, global_batch), waits, hop, swap, tied, rows),
        algorithms={**waits.algorithms, **({"data": swap.algorithm} if swap.algorithm != "none" else {})},
        flags=tuple(
            dict.fromkeys((*flow.slowest.load.flags, *waits.flags, *hop.flags, *swap.flags, *_beyond(layout, cluster)))
        ),
        bucket_bytes=swap.bucket_bytes,
    )


def data_exchange(
    description: ModelDescription,
    layout: ParallelLayout,
    cluster: Cluster,
    microbatches: int,
    stage: StageTime,
    spare_bytes: float = math.inf,  # free memory for gradient buckets above the default size
) -> ExchangeCost:
    """Return the cost of the exchange of gradients and parameters of one pipeline rank over the data axis.

    ``stage``: times of the pipeline rank. ``spare_bytes``: free memory for gradient buckets above the default size.
    """
    load, ends = stage.load, (0.0, 0.0)
    if layout.pipeline == 1 and layout.kernels.keeps_end_layers:
        first, last = (local_parameters(unit, layout) for unit in (description.units[0], description.units[-1]))
        ends = first, last
    return exchange(
        load.parameters,
        layout,
        cluster,
        load.input_s + load.weight_s + load.again_s,
        microbatches,
        forward_s=load.forward_s,
        units=load.units,
        expert_parameters=load.expert_parameters,
        ends=ends,
        spare_bytes=spare_bytes,
        matrices=_matrices(description, layout) if layout.compression == "powersgd" and layout.pipeline == 1 else (),
    )


def _matrices(description: ModelDescription, layout: ParallelLayout) -> tuple[tuple[int, int, int], ...]:
    matrices = []
    for unit in description.units:
        for product in unit.products:
            cut = {"columns": (1, layout.tensor), "inner": (layout.tensor, 1)}.get(product.cut, (1, 1))
            often = unit.count * (product.experts // layout.expert if product.experts > 1 else 1)
            matrices.append((product.inner // cut[0], product.columns // cut[1], often))
    return tuple(matrices)


def tied_sum(description: ModelDescription, layout: ParallelLayout, cluster: Cluster) -> MessageCost:
    """Return the cost of the sum of the gradients of a tied tensor over the first and the last pipeline rank."""
    if layout.pipeline == 1 or not description.tied_parameters or SCHEDULES[layout.schedule].folded:
        return NO_COST
    elements = description.tied_parameters / layout.tensor
    if layout.kernels.sums_tied_in_pair:
        there = message(elements * STORED_ITEM_BYTES[layout.precision], layout, "pipeline", cluster)
        return there._replace(seconds=2 * there.seconds)
    return message(elements * summed_item_bytes(layout), layout, "pipeline", cluster)


def _update_s(description: ModelDescription, fullest: StageLoad, layout: ParallelLayout, cluster: Cluster) -> float:
    if layout.strategy == "parameter_server" and layout.servers:
        return update_s(description.parameters, layout, cluster)
    return update_s(fullest.parameters, layout, cluster, fullest.expert_parameters)


def _full(layout: ParallelLayout, global_batch: int) -> float:
    return -(-global_batch // layout.data) / layout.microbatch  # a smaller last micro-batch counts as a fraction


def rows_sum(load: StageLoad, layout: ParallelLayout, cluster: Cluster) -> MessageCost:
    """Return the cost of the sum over tensor ranks of the gradients of norm weights in the layers of ``load``."""
    if layout.tensor == 1 or not layout.sequence_parallel:
        # Only sequence parallelism needs this sum.
        return NO_COST
    return collective("allreduce", load.uncut * summed_item_bytes(layout), span(layout, "tensor", cluster), cluster)


def _input_s(description: ModelDescription, layout: ParallelLayout, cluster: Cluster, global_batch: int) -> float:
    nbytes = global_batch * (description.sample_bytes or description.tokens * TOKEN_BYTES)
    nodes = max(1, min(layout.data, -(-layout.devices // cluster.node.devices)))
    return nbytes / min(cluster.storage.read_bytes_per_s, nodes * cluster.storage.node_read_bytes_per_s)


def _bytes(
    layout: ParallelLayout,
    full: float,
    waits: CollectiveWait,
    hop: MessageCost,
    swap: ExchangeCost,
    tied: MessageCost,
    rows: MessageCost,
) -> dict[str, float]:
    sent = {axis: full * nbytes for axis, nbytes in waits.nbytes.items()}
    if rows.nbytes:
        sent["tensor"] += rows.nbytes
    if layout.pipeline > 1:
        sent["pipeline"] = messages_per_microbatch(layout) * full * hop.nbytes
    sent["data"] = swap.nbytes + tied.nbytes
    return sent


def _check(layout: ParallelLayout, microbatches: int) -> None:
    if layout.schedule == FILE:
        raise ConfigurationError(
            f"schedule = {FILE!r}: the planner cannot plan a schedule from a file; choose one of {', '.join(SCHEDULES)}"
        )
    check_schedule(layout.schedule, layout.pipeline, microbatches, layout.chunks)


def _beyond(layout: ParallelLayout, cluster: Cluster) -> tuple[str, ...]:
    if layout.devices <= cluster.devices:
        return ()
    return (f"{layout.devices} devices, but the cluster has {cluster.devices}: extrapolated",)
