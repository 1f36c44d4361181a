"""Seconds of a step on the critical path: of the slowest rank of the pipeline, and what all wait for besides.

A step of m micro-batches takes m times what the slowest rank computes and sends for one (less where the last of them
is smaller), then what the pipeline is idle or waits for its messages (`hpcdist.planner.ranks`), what the exchange of
gradients and parameters leaves exposed (`hpcdist.planner.exchange`), and the update (`hpcdist.planner.update`). Only
the last micro-batch's backward can hide the gradients of a step. Data is read ahead, while the step before computes: it
is waited for where that is shorter.

With a pipeline the gradients of a tied embedding are summed over the ranks of its first and its last stage.
"""

import math
from collections.abc import Mapping
from typing import Final, NamedTuple

from hpcdist.errors import ConfigurationError
from hpcdist.planner.cluster import Cluster
from hpcdist.planner.compute import local_parameters
from hpcdist.planner.description import Description
from hpcdist.planner.estimate import Timing
from hpcdist.planner.exchange import Exchange, exchange
from hpcdist.planner.layout import Layout
from hpcdist.planner.network import NOTHING, Cost, collective, message
from hpcdist.planner.network_span import span
from hpcdist.planner.ranks import Stage, border, closed_pipe, messages, ranks_of, simulated_pipe
from hpcdist.planner.stage_seconds import Load, Sent
from hpcdist.planner.update import update_s
from hpcdist.planner.wire import BYTES, summed_bytes
from hpcdist.strategies.schedule.generate.registry import FILE, SCHEDULES, check_schedule

AXES: Final = ("tensor", "context", "expert")
TOKEN_BYTES: Final = 4  # at most, as samples are stored


class Flow(NamedTuple):
    """What the micro-batches of a step take, whichever strategy and compression the data axis has.

    ``slowest`` is the rank of the pipeline that takes longest, ``fullest`` the one with most parameters, ``hop`` a
    message between two ranks; ``terms`` are those of `Timing` up to "bubble".
    """

    slowest: Stage
    fullest: Stage
    hop: Cost
    terms: Mapping[str, float]
    bubble: float


def flow(
    description: Description, layout: Layout, cluster: Cluster, global_batch: int, *, simulate: bool = False
) -> Flow:
    """Return what the micro-batches of a step take (local). Arguments and errors are those of `timing`."""
    m = layout.microbatches(global_batch)
    if layout.pipeline > 1:
        _check(layout, m)
    found = ranks_of(description, layout, cluster, m)
    slowest = max((stage for stage, _ in found), key=lambda stage: stage.whole_s)
    hop = border(description, layout, cluster)
    if simulate and layout.pipeline > 1:
        pipe = simulated_pipe(description, layout, cluster, m, slowest, hop.seconds)
    else:
        pipe = closed_pipe(layout, m, found, slowest, hop.seconds)
    fullest = max((stage for stage, _ in found), key=lambda stage: stage.load.parameters)
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
    return Flow(slowest, fullest, hop, terms, pipe.bubble)


def timing(
    description: Description,
    layout: Layout,
    cluster: Cluster,
    global_batch: int,
    *,
    simulate: bool = False,
    spare_bytes: float = math.inf,
    known: Flow | None = None,
) -> Timing:
    """Return where the time of a step goes (local).

    With ``simulate`` the passes of a pipeline are run one by one, each chunk with its own seconds. ``spare_bytes``:
    memory that longer buckets of gradients may take. ``known`` is the `flow` of this layout, or of one that has another
    strategy or compression only. Raises ConfigurationError for a schedule or a precision that cannot be.
    """
    if known is None:
        known = flow(description, layout, cluster, global_batch, simulate=simulate)
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
    return Timing(
        terms=terms,
        hidden_s=swap.hidden_s,
        bubble=known.bubble,
        bytes=_bytes(layout, _full(layout, global_batch), waits, hop, swap, tied, rows),
        algorithms=_algorithms(waits, swap),
        flags=tuple(
            dict.fromkeys((*known.slowest.load.flags, *waits.flags, *hop.flags, *swap.flags, *_beyond(layout, cluster)))
        ),
        bucket_bytes=swap.bucket_bytes,
    )


def data_exchange(
    description: Description, layout: Layout, cluster: Cluster, m: int, stage: Stage, spare_bytes: float = math.inf
) -> Exchange:
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
    """Return the sum of the gradients of a tied tensor over the first and the last rank, which have it (local).

    In hpcdist the first one owns it: the gradient comes, the new value goes back
    (`hpcdist.strategies.pipeline.tied`). A folded schedule puts both ends of the model on the first rank, which needs
    no message.
    """
    if layout.pipeline == 1 or not description.tied_parameters or SCHEDULES[layout.schedule].folded:
        return NOTHING
    own = description.tied_parameters / layout.tensor
    if layout.implementation == "hpcdist":
        there = message(own * BYTES[layout.precision], layout, "pipeline", cluster)
        return there._replace(seconds=2 * there.seconds)
    return message(own * summed_bytes(layout), layout, "pipeline", cluster)


def _update_s(description: Description, fullest: Load, layout: Layout, cluster: Cluster) -> float:
    if layout.strategy == "parameter_server" and layout.servers:
        return update_s(description.parameters, layout, cluster)
    return update_s(fullest.parameters, layout, cluster, fullest.expert_parameters)


def _full(layout: Layout, global_batch: int) -> float:
    """Return how many full micro-batches the samples would be of the replica that has most."""
    return -(-global_batch // layout.data) / layout.microbatch


def rows_sum(load: Load, layout: Layout, cluster: Cluster) -> Cost:
    """Return the sum of gradients of what the tensor axis does not cut, each rank having seen its tokens only (local).

    Once a step, with sequence parallelism (arXiv:2205.05198; norms, and biases behind a sum).
    """
    if layout.tensor == 1 or not layout.sequence_parallel:
        return NOTHING
    return collective("allreduce", load.uncut * summed_bytes(layout), span(layout, "tensor", cluster), cluster)


def _input_s(description: Description, layout: Layout, cluster: Cluster, global_batch: int) -> float:
    """Return how long reading the samples of a step takes; ranks of one replica read them once."""
    nbytes = global_batch * (description.sample_bytes or description.tokens * TOKEN_BYTES)
    nodes = max(1, min(layout.data, -(-layout.devices // cluster.node.devices)))
    return nbytes / min(cluster.storage.read_bytes_per_s, nodes * cluster.storage.node_read_bytes_per_s)


def _bytes(
    layout: Layout, full: float, waits: Sent, hop: Cost, swap: Exchange, tied: Cost, rows: Cost
) -> dict[str, float]:
    """Return what the busiest rank sends in a step, by axis."""
    found = {axis: full * nbytes for axis, nbytes in waits.nbytes.items()}
    if rows.nbytes:
        found["tensor"] += rows.nbytes
    if layout.pipeline > 1:
        found["pipeline"] = messages(layout) * full * hop.nbytes
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
    check_schedule(layout.schedule, layout.pipeline, microbatches, layout.chunks)


def _beyond(layout: Layout, cluster: Cluster) -> tuple[str, ...]:
    if layout.devices <= cluster.devices:
        return ()
    return (f"{layout.devices} devices, and the cluster has {cluster.devices}: extrapolated",)
