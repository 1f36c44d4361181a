"""Figures and texts for the introduction and summary of a run: architecture, utilisation, stragglers."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from hpcdist.arrays.dtypes import is_16bit_float
from hpcdist.arrays.matmul_peak import matmul_flops_per_s
from hpcdist.comm.communicator import Communicator
from hpcdist.constants import HALVES
from hpcdist.models.config import FOREIGN
from hpcdist.models.counts import counts
from hpcdist.reporting.jsonable import json_number
from hpcdist.reporting.units import counted
from hpcdist.strategies.data.config import STAGES, ZeroConfig
from hpcdist.strategies.expert.model import TravellingRows
from hpcdist.strategies.expert.shared import SharedRows
from hpcdist.strategies.parameter_server.partition import Roles
from hpcdist.strategies.schedule import registry
from hpcdist.strategies.tensor.model import CutModel
from hpcdist.telemetry.metrics import side_tables
from hpcdist.training.build.trainer import Trainer
from hpcdist.training.observe.metrics import RunMetrics
from hpcdist.training.recipe.recipe import Recipe

LARGE_STAGE_SHARE: Final = 0.75  # fraction of the parameters in one stage, above which sharding saves little memory
OVERLAP_TEXTS: Final = {"thread": "overlapped by a thread", "poll": "overlapped by polling"}


def describe_architecture(trainer: Trainer) -> str:
    """Return a text line about the parallel setup: strategy, algorithm, and settings that are not default. Local."""
    recipe, grid = trainer.recipe, trainer.grid
    parallel, servers = recipe.parallel, recipe.parameter_server
    algorithms = list(dict.fromkeys(row.partition("<=")[0] for row in trainer.exchange.traits.algorithm.split(",")))
    parts = [parallel.strategy, " or ".join(algorithms) + (" by size" if len(algorithms) > 1 else "")]
    if parallel.strategy == "parameter_server":
        roles = Roles.of(servers, trainer.context.members.size)
        parts[1:] = [counted(len(roles.servers), f"{servers.placement} server"), servers.described]
    if servers.transport != "messages":
        parts.append(f"transport {servers.transport}")
    if words := trainer.exchange.traits.mixing:
        parts.insert(1, words)
    parts += _state_placement(recipe.zero, trainer)
    if recipe.communication.overlap != "none":
        parts.append(
            OVERLAP_TEXTS[recipe.communication.overlap] + (", delayed" if recipe.communication.delayed else "")
        )
    if trainer.compression.name != "none":
        parts.append(f"gradients as {trainer.compression.name}")
    if recipe.compression.parameters != "none":
        parts.append(f"weights gathered as {recipe.compression.parameters}")
    if recipe.data.shares == "measured":
        parts.append("samples by measured speed")
    if recipe.precision.working is not None:
        parts.append(f"{recipe.precision.working} working copies")
    if words := trainer.exchange.traits.sums:
        parts.append(words)
    if isinstance(trainer.model, CutModel):
        rows = ", activations by rows" if parallel.sequence_parallel else ""
        parts.append(f"tensor by {trainer.model.axis.algorithm}{rows}")
    if trainer.context.context_axis is not None:
        parts.append(f"context by {trainer.context.context_axis.method}")
    if grid.expert > 1:
        travel = getattr(trainer.model.operations.experts, "travel", None)
        assert isinstance(travel, TravellingRows | SharedRows)
        parts.append(f"experts over {grid.expert} ranks by {travel.axis.algorithm}")
    if grid.pipeline > 1:
        parts.append(f"{parallel.order} of {parallel.microbatches} micro-batches")
        bubble = registry.bubble(parallel.order, grid.pipeline, parallel.microbatches, chunks=parallel.chunks_each)
        if parallel.recompute:
            parts.append("recomputing")
        elif bubble is not None:
            parts.append(f"bubble {bubble:.0%}")
    elif parallel.microbatches > 1:
        parts.append(f"{parallel.microbatches} micro-batches")
    if parallel.recomputes_layers:
        parts.append("layers recomputed")
    return ", ".join(parts)


def describe_precision(recipe: Recipe) -> str:
    """Return a text about the dtype of matrix products on a GPU, or "" on a CPU or for user models. Local."""
    precision = recipe.precision
    if recipe.run.device != "gpu" or recipe.model.kind in FOREIGN:
        return ""
    if precision.stages in HALVES:
        return (
            f"matrix products and activations in {precision.stages}, their sums and the master weights in float32; "
            "without precision.mode, everything is float32"
        )
    kept = "" if precision.working is None else f", parameters and gradients in {precision.working}"
    hint = "; precision.mode = 'bfloat16' with precision.activations = 'working' uses tensor cores"
    return f"matrix products and activations in {precision.stages}{kept}" + hint * (precision.stages == "float32")


def _state_placement(zero: ZeroConfig, trainer: Trainer) -> list[str]:
    stage = STAGES.get(trainer.recipe.parallel.strategy)
    if stage is None:
        return []
    parts = []
    if zero.parameters or zero.gradients or zero.optimizer:
        cut = zero.degrees(stage, trainer.grid.replicas)
        parts.append(f"degrees {cut.parameters}, {cut.gradients}, {cut.optimizer}")
    if zero.persistent_below:
        parts.append(f"layers below {zero.persistent_below:,} elements whole")
    if zero.prefetch:
        parts.append(f"{zero.prefetch} gathered ahead")
    if zero.shared_parameters:
        parts.append("parameters shared by a node")
    for place, what in ((zero.offload_optimizer, "optimizer state"), (zero.offload_parameters, "shards")):
        if place != "none":
            parts.append(f"{what} {'in files' if place == 'file' else 'on the host'}")
    return parts


def warn_of_whole_gathers(trainer: Trainer) -> str:
    """Return a warning text if ZeRO-3 gathers most parameters of a user's model in one message, else "". Local."""
    model, ranges = trainer.model, trainer.context.ranges
    if trainer.recipe.model.kind not in FOREIGN or not trainer.exchange.traits.gathers:
        return ""
    largest = max(ranges, key=lambda unit: ranges[unit].size)
    share = ranges[largest].size / sum(part.size for part in ranges.values())
    if share < LARGE_STAGE_SHARE:
        return ""
    stage = model.stages[largest]
    called, uncut = getattr(stage, "name", ""), getattr(stage, "uncut", None)
    advice = {None: "Wrap", "": "Pass cut=True to wrap, or wrap"}.get(uncut, f"{uncut}. Wrap")
    return (
        f"ZeRO-3 gathers stage by stage, and stage {stage.layer}{called and f', {called},'} has {share:.0%} of the "
        "parameters of this rank: during a step every rank holds them and their gradients whole; only the optimizer "
        f"state stays sharded. {advice} a list of smaller stages, such as [embedding, *blocks, head]"
    )


UTILISATION_FIGURES: Final = ("flops_per_sample", "flops_per_s", "peak_flops_per_s", "mfu")
USER_MODEL_NOT_COUNTED: Final = "the operations of a user's model are not counted"
NO_MEMORY_FOR_PEAK: Final = "not enough memory for the matrix product that measures the peak"
PEAK_SECONDS: Final = 0.03  # duration of the peak measurement on each rank


def utilisation_figures(comm: Communicator, trainer: Trainer, tokens_per_s: float, reason: str) -> dict[str, Any]:
    """Return {name: value} of the model FLOPs utilization (MFU) at a training speed of ``tokens_per_s``. Collective.

    The values are model FLOPs per sample and per second, peak FLOPs per second of all ranks, and MFU, or None if
    unknown. ``reason``: reason why the speed is unknown if ``tokens_per_s`` is NaN.
    """
    utilisation: dict[str, Any] = dict.fromkeys(UTILISATION_FIGURES)
    if trainer.recipe.model.kind in FOREIGN:
        return utilisation | {"mfu_reason": USER_MODEL_NOT_COUNTED}
    utilisation["flops_per_sample"] = counts(
        trainer.recipe.model, documents=trainer.source.documents, **trainer.source.inputs
    ).flops
    if math.isnan(tokens_per_s):
        return utilisation | {"mfu_reason": reason}
    utilisation["flops_per_s"] = tokens_per_s / trainer.model.tokens_per_sample * utilisation["flops_per_sample"]
    comm.barrier()  # ranks that share cores must measure at the same time
    local_peak = _measured_peak(trainer) if trainer.context.computes else 0.0
    peak = sum(comm.allgather_object(local_peak))
    if math.isnan(peak):
        return utilisation | {"mfu_reason": NO_MEMORY_FOR_PEAK}
    return utilisation | {"peak_flops_per_s": peak, "mfu": utilisation["flops_per_s"] / peak}


def _measured_peak(trainer: Trainer) -> float:
    dtype = trainer.model.dtype
    # All 16-bit types are equally fast on GPUs that support them.
    measured = np.dtype(np.float16) if is_16bit_float(dtype) else dtype
    try:
        return matmul_flops_per_s(measured, trainer.recipe.run.device, PEAK_SECONDS)
    except MemoryError:
        return math.nan


def describe_utilisation(summary: dict[str, Any]) -> list[str]:
    """Return a list with the summary line about model FLOPs utilization, or [] if the training speed is unknown."""
    if summary["flops_per_s"] is None:
        return []
    speed = f"{summary['flops_per_s'] / 1e9:,.1f} GFLOP/s of the model"
    if summary["mfu"] is None:
        return [f"{speed}; {summary['mfu_reason']}"]
    return [f"{speed}, {summary['mfu']:.1%} of what matrix products reach ({summary['peak_flops_per_s'] / 1e9:,.0f})"]


def write_side_tables(metrics: RunMetrics, trainer: Trainer) -> None:
    """Write consensus distances, noise scales and expert loads measured since the last call. Only rank 0 writes."""
    if new := trainer.exchange.new_consensus_distances():
        metrics.put(side_tables.CONSENSUS, step=list(new), distance=list(new.values()))
    if trainer.noise is not None and (rows := trainer.noise.taken()):
        names = [column.name for column in side_tables.NOISE_SCALE.columns if column.name != "session"]
        metrics.put(side_tables.NOISE_SCALE, **dict(zip(names, zip(*rows, strict=True), strict=True)))
    if trainer.router is not None and (rows := trainer.router.taken()):
        names = [column.name for column in side_tables.EXPERTS.columns if column.name != "session"]
        metrics.put(side_tables.EXPERTS, **dict(zip(names, zip(*rows, strict=True), strict=True)))
        loads = trainer.router.loads
        layers = range(1, len(loads) + 1)
        metrics.put(side_tables.EXPERT_LOADS, step=[trainer.router.step] * len(loads), layer=layers, load=loads)


def consensus_figures(trainer: Trainer) -> dict[str, Any]:
    """Return {name: value} about the distance between replica parameters, or {} if replicas are always equal. Local."""
    return {name: json_number(value) for name, value in trainer.exchange.consensus().items()}


def describe_consensus(summary: Mapping[str, Any]) -> list[str]:
    """Return a list with the line about the distance between replicas, or [] if ``summary`` has no distance."""
    distance = summary.get("consensus_distance")
    return [] if distance is None else [f"replicas were {distance:.3g} of the norm of their mean apart, then averaged"]


def straggler_figures(trainer: Trainer, workers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return {name: value} about stragglers. ``workers``: one dict of measurements per computing rank. Local."""
    # "samples_by_replica": from the last step, or None if samples are always divided evenly. With parameter servers,
    # dropped gradients or their staleness are included.
    exchange = trainer.exchange
    stragglers: dict[str, Any] = {"samples_by_replica": workers[0]["shares"]}
    if exchange.traits.fullest is None:
        return stragglers
    stragglers["servers_fullest"] = exchange.traits.fullest
    if exchange.traits.drops_late:
        return stragglers | {"dropped_gradients": sum(rank["dropped"] for rank in workers)}
    count = sum(rank["count"] for rank in workers)
    if not count:
        return stragglers | {"staleness_mean": None, "staleness_most": None}
    total = sum(rank[part].get("staleness", 0) for rank in workers for part in ("first", "sums"))
    return stragglers | {"staleness_mean": total / count, "staleness_most": max(rank["stalest"] for rank in workers)}


def describe_stragglers(summary: Mapping[str, Any]) -> list[str]:
    """Return a list of the summary lines about stragglers, or [] if ``summary`` has no values about stragglers."""
    lines = []
    if summary.get("samples_by_replica") is not None:
        shares = summary["samples_by_replica"]
        lines.append(f"replicas took {min(shares)} to {max(shares)} of {sum(shares)} samples in the last step")
    if summary.get("staleness_mean") is not None:
        lines.append(f"gradients were {summary['staleness_mean']:.1f} updates old, at most {summary['staleness_most']}")
    if summary.get("dropped_gradients") is not None:
        count = summary["dropped_gradients"]
        lines.append(f"{counted(count, 'gradient')} came too late and {'was' if count == 1 else 'were'} dropped")
    if summary.get("servers_fullest", 1.0) > 1.01:
        lines.append(f"the server that holds most has {summary['servers_fullest']:.2f} of an even share")
    return lines
