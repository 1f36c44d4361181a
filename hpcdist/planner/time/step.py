"""Critical path of a step: micro-batches, pipeline bubble, exposed exchange, update and input.

A step of m micro-batches takes m times what the slowest rank of the pipeline computes and sends for one (less where
the last of them is smaller), then what the pipeline is idle or waits for its messages
(`hpcdist.planner.time.pipeline`), what the exchange of gradients and parameters leaves exposed
(`hpcdist.planner.time.exchange`), and the update. Only the backward of the last micro-batch can hide the gradients of
a step. Data is read ahead, while the step before computes: a step waits for it where that is shorter. With a pipeline
the gradients of a tied embedding are summed over the ranks of its first and its last stage.

The update is the norm of all gradients and the optimizer, both bound by memory traffic. For each number that a device
updates (its share under ZeRO), with p bytes a parameter, g a gradient, and k numbers of the optimizer:

    norm        g read, and an allreduce of one number over all devices
    step        g read, parameter and k numbers read and written: 2 p (1 + k); of 16 bits a float32 master instead,
                2 x 4 (1 + k), and the working parameter p written
    Megatron    16-bit gradients are copied to float32 first (2 read, 4 written); they are scaled back and looked
                through for infinities (8), clipped (8) and, when all is done, set to 0 (g)

Workers wait while parameter servers update, each its share: of the whole model, which dedicated ones deal out by size
(`hpcdist.strategies.parameter_server.partition`).
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
    border,
    closed_pipe,
    messages_per_microbatch,
    ranks_of,
    simulated_pipe,
)
from hpcdist.planner.time.stage_load import CollectiveWait, StageLoad
from hpcdist.strategies.schedule.generate.registry import FILE, SCHEDULES, check_schedule

WIDE_BYTES = 4  # a master, a moment


def update_s(parameters: float, layout: ParallelLayout, cluster: Cluster, expert_parameters: float = 0.0) -> float:
    """Return the seconds of the update of a device with so many ``parameters``, experts among them (local).

    With dedicated servers they are those of the whole model.
    """
    numbers = owned(parameters - expert_parameters, layout, layout.data * layout.context)
    if expert_parameters:
        numbers += owned(expert_parameters, layout, max(1, layout.data * layout.context // layout.expert))
    norm = collective("allreduce", WIDE_BYTES, span(layout, "all", cluster), cluster)
    moves = cluster.device.memory_bytes_per_s * cluster.device.memory_share
    return numbers * bytes_each(layout) / moves + norm.seconds


def owned(parameters: float, layout: ParallelLayout, replicas: int) -> float:
    """Return how many of ``parameters`` one device, or server, updates (local)."""
    if layout.strategy == "parameter_server":
        return parameters / (layout.servers or replicas)
    return parameters / replicas if stage_of(layout.strategy) else parameters


def bytes_each(layout: ParallelLayout) -> float:
    """Return the bytes that norm and optimizer move for each number (local)."""
    parameter, gradient, _ = unsharded(layout)
    wide = layout.precision not in ("float32", "float64")
    master = WIDE_BYTES if wide else parameter
    step = 2 * master * (1 + layout.optimizer_slots) + (parameter if wide else 0)
    if layout.implementation == "megatron":
        copied = 2 + WIDE_BYTES if wide and gradient == 2 else 0
        return copied + 2 * WIDE_BYTES + WIDE_BYTES + 2 * WIDE_BYTES + WIDE_BYTES + step + gradient
    return 2 * gradient + step


AXES: Final = ("tensor", "context", "expert")
TOKEN_BYTES: Final = 4  # at most, as samples are stored


class MicrobatchFlow(NamedTuple):
    """Seconds of the micro-batches of a step, whichever strategy and compression the data axis has.

    ``slowest`` is the rank of the pipeline that takes longest, ``fullest`` the one with most parameters, ``hop`` a
    message between two ranks; ``terms`` are those of `TimeEstimate` up to "bubble".
    """

    slowest: StageTime
    fullest: StageTime
    hop: MessageCost
    terms: Mapping[str, float]
    bubble: float


def microbatch_flow(
    description: ModelDescription,
    layout: ParallelLayout,
    cluster: Cluster,
    global_batch: int,
    *,
    simulate: bool = False,
) -> MicrobatchFlow:
    """Return the time of the micro-batches of a step (local). Arguments and errors are those of `timing`."""
    m = layout.microbatches(global_batch)
    if layout.pipeline > 1:
        _check(layout, m)
    ranks = ranks_of(description, layout, cluster, m)
    slowest = max((stage for stage, _ in ranks), key=lambda stage: stage.whole_s)
    hop = border(description, layout, cluster)
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
    simulate: bool = False,
    spare_bytes: float = math.inf,
    known: MicrobatchFlow | None = None,
) -> TimeEstimate:
    """Return the time of a step by terms (local).

    With ``simulate`` the passes of a pipeline are run one by one, each chunk with its own seconds. ``spare_bytes``:
    memory that longer buckets of gradients may take. ``known`` is the `flow` of this layout, or of one that has another
    strategy or compression only. Raises ConfigurationError for a schedule or a precision that cannot be.
    """
    if known is None:
        known = microbatch_flow(description, layout, cluster, global_batch, simulate=simulate)
    fullest, waits, hop = known.fullest, known.slowest.sent, known.hop
    swap = data_exchange(description, layout, cluster, layout.microbatches(global_batch), fullest, spare_bytes)
    tied, rows = tied_sum(description, layout, cluster), rows_sum(fullest.load, layout, cluster)
    terms = {
        **known.terms,
        "data": swap.exposed_s + tied.seconds,
        "rows": rows.seconds,
        "update": _update_s(description, fullest.load, layout, cluster),
    }
    terms["input"] = max(0.0, _input_s(description, layout, cluster, global_batch) - sum(terms.values()))
    return TimeEstimate(
        terms=terms,
        hidden_s=swap.hidden_s + _full(layout, global_batch) * waits.hidden_s,
        bubble=known.bubble,
        bytes=_bytes(layout, _full(layout, global_batch), waits, hop, swap, tied, rows),
        algorithms=_algorithms(waits, swap),
        flags=tuple(
            dict.fromkeys((*known.slowest.load.flags, *waits.flags, *hop.flags, *swap.flags, *_beyond(layout, cluster)))
        ),
        bucket_bytes=swap.bucket_bytes,
    )


def data_exchange(
    description: ModelDescription,
    layout: ParallelLayout,
    cluster: Cluster,
    m: int,
    stage: StageTime,
    spare_bytes: float = math.inf,
) -> ExchangeCost:
    """Return the exchange of the data axis for the parameters of ``stage``, after ``m`` micro-batches (local).

    It hides behind computation alone: messages of other axes are taken to need the same links.
    """
    load, ends = stage.load, (0.0, 0.0)
    if layout.pipeline == 1 and layout.implementation == "hpcdist":
        first, last = (local_parameters(unit, layout) for unit in (description.units[0], description.units[-1]))
        ends = first, last
    return exchange(
        load.parameters,
        layout,
        cluster,
        load.input_s + load.weight_s + load.again_s,
        m,
        forward_s=load.forward_s,
        units=load.units,
        expert_parameters=load.expert_parameters,
        ends=ends,
        spare_bytes=spare_bytes,
        matrices=_matrices(description, layout) if layout.compression == "powersgd" and layout.pipeline == 1 else (),
    )


def _matrices(description: ModelDescription, layout: ParallelLayout) -> tuple[tuple[int, int, int], ...]:
    """Return the matrices of all units, as they are on one device: (rows, columns, how many)."""
    matrices = []
    for unit in description.units:
        for product in unit.products:
            cut = {"columns": (1, layout.tensor), "inner": (layout.tensor, 1)}.get(product.cut, (1, 1))
            often = unit.count * (product.experts // layout.expert if product.experts > 1 else 1)
            matrices.append((product.inner // cut[0], product.columns // cut[1], often))
    return tuple(matrices)


def tied_sum(description: ModelDescription, layout: ParallelLayout, cluster: Cluster) -> MessageCost:
    """Return the sum of the gradients of a tied tensor over the first and the last rank, which have it (local).

    In hpcdist the first one owns it: the gradient comes, the new value goes back
    (`hpcdist.strategies.pipeline.tied`). A folded schedule puts both ends of the model on the first rank, which needs
    no message.
    """
    if layout.pipeline == 1 or not description.tied_parameters or SCHEDULES[layout.schedule].folded:
        return NO_COST
    own = description.tied_parameters / layout.tensor
    if layout.implementation == "hpcdist":
        there = message(own * STORED_ITEM_BYTES[layout.precision], layout, "pipeline", cluster)
        return there._replace(seconds=2 * there.seconds)
    return message(own * summed_item_bytes(layout), layout, "pipeline", cluster)


def _update_s(description: ModelDescription, fullest: StageLoad, layout: ParallelLayout, cluster: Cluster) -> float:
    if layout.strategy == "parameter_server" and layout.servers:
        return update_s(description.parameters, layout, cluster)
    return update_s(fullest.parameters, layout, cluster, fullest.expert_parameters)


def _full(layout: ParallelLayout, global_batch: int) -> float:
    """Return how many full micro-batches the samples would be of the replica that has most."""
    return -(-global_batch // layout.data) / layout.microbatch


def rows_sum(load: StageLoad, layout: ParallelLayout, cluster: Cluster) -> MessageCost:
    """Return the sum of gradients of what the tensor axis does not cut, each rank having seen its tokens only (local).

    Once a step, with sequence parallelism (arXiv:2205.05198; norms, and biases behind a sum).
    """
    if layout.tensor == 1 or not layout.sequence_parallel:
        return NO_COST
    return collective("allreduce", load.uncut * summed_item_bytes(layout), span(layout, "tensor", cluster), cluster)


def _input_s(description: ModelDescription, layout: ParallelLayout, cluster: Cluster, global_batch: int) -> float:
    """Return how long reading the samples of a step takes; ranks of one replica read them once."""
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
    """Return the bytes that the busiest rank sends in a step, by axis."""
    sent = {axis: full * nbytes for axis, nbytes in waits.nbytes.items()}
    if rows.nbytes:
        sent["tensor"] += rows.nbytes
    if layout.pipeline > 1:
        sent["pipeline"] = messages_per_microbatch(layout) * full * hop.nbytes
    sent["data"] = swap.nbytes + tied.nbytes
    return sent


def _algorithms(waits: CollectiveWait, swap: ExchangeCost) -> dict[str, str]:
    return {**waits.algorithms, **({"data": swap.algorithm} if swap.algorithm != "none" else {})}


def _check(layout: ParallelLayout, microbatches: int) -> None:
    """Raise for a schedule that cannot run so, and for that of a file, whose passes are not known here."""
    if layout.schedule == FILE:
        raise ConfigurationError(
            f"schedule = {FILE!r}: a schedule from a file may be anything, so no plan is made of it; choose one of "
            f"{', '.join(SCHEDULES)}"
        )
    check_schedule(layout.schedule, layout.pipeline, microbatches, layout.chunks)


def _beyond(layout: ParallelLayout, cluster: Cluster) -> tuple[str, ...]:
    if layout.devices <= cluster.devices:
        return ()
    return (f"{layout.devices} devices, and the cluster has {cluster.devices}: extrapolated",)
