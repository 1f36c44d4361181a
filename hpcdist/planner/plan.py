"""Plan one layout: combine memory, time, FLOPs, energy and the expected course of a run.

Nodes fail independently. A checkpoint stops training. A failure costs the work since the last checkpoint, plus a
restart. The checkpoint interval and the slowdown are Daly's, in whole steps.

A device draws idle power + utilisation * (peak power - idle power). Hosts and switches draw constant power.
Utilisation:

    computing   COMPUTE_FLOOR + (1 - COMPUTE_FLOOR) * reached share of the peak FLOP rate
    update      MEMORY_UTILISATION, also for the term "unproven"
    messages    MESSAGE_UTILISATION, only exposed messages
    waiting     WAITING_UTILISATION: pipeline bubble, input, checkpoints and restarts

COMPUTE_FLOOR is fitted to eight H100 at 45 % of peak, which draw with their host 76 % of 10.2 kW (arXiv:2506.14551).
The other values are assumptions, consistent with arXiv:2308.12908.
"""

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Final

from hpcdist.constants import J_PER_KWH
from hpcdist.errors import ConfigurationError, UsageError
from hpcdist.planner.checks import flags, unsupported
from hpcdist.planner.cluster.hardware import Cluster, Device
from hpcdist.planner.estimate import (
    CORRECTION,
    UNPROVEN,
    ZERO3_RATIOS,
    FlopEstimate,
    MemoryEstimate,
    PlanEstimate,
    RunEstimate,
    StepEnergy,
    TimeEstimate,
)
from hpcdist.planner.kernels import ENOUGH
from hpcdist.planner.layout import ParallelLayout
from hpcdist.planner.memory.activations import is_mostly_scores
from hpcdist.planner.memory.device import memory
from hpcdist.planner.memory.model_states import unsharded, with_buckets
from hpcdist.planner.model.description import ModelDescription
from hpcdist.planner.model.stage_split import step_flops
from hpcdist.planner.time.step import MicrobatchFlow, timing
from hpcdist.strategies.core import daly_interval

ENDLESS: Final = 1000.0  # wall time / work above which a run counts as endless
CHECKED_MFU: Final = 0.57  # best MFU of the published trainings in benchmarks/planner/published
FULL: Final = 0.95  # memory use above which a plan warns
HIDDEN: Final = 0.05  # overlapped share of a step above which a plan warns
LONG_CONTEXT: Final = 8192  # tokens; above, published results without FlashAttention are not representative
COMPUTE_FLOOR: Final = 0.75
MEMORY_UTILISATION: Final = 0.6
MESSAGE_UTILISATION: Final = 0.35
WAITING_UTILISATION: Final = 0.15
COMPUTING: Final = ("forward", "backward", "recompute")
SENDING: Final = ("tensor", "context", "expert", "pipeline", "data", "rows", CORRECTION)
ASSUMED: Final = (
    f"energy: assumption: of the power between idle and peak, a device draws {MEMORY_UTILISATION:.0%} in updates, "
    f"{MESSAGE_UTILISATION:.0%} in exposed messages and {WAITING_UTILISATION:.0%} while it waits"
)


def plan(
    description: ModelDescription,
    layout: ParallelLayout,
    cluster: Cluster,
    global_batch: int,
    steps: int,
    *,
    simulate: bool = False,  # simulate the pipeline schedule instead of using a closed formula
    limit_bytes: float = 0.0,  # limit up to which gradient buckets grow; 0: the device memory
    flow: MicrobatchFlow | None = None,  # micro-batch times of this layout, if computed already
) -> PlanEstimate:
    """Plan a run of ``steps`` training steps: estimate memory, time, energy and price.

    ``description``: the model to train. ``global_batch``: number of samples per step. Raises ConfigurationError for an
    unsupported precision.
    """
    # The caller must check that the layout is possible. The memory estimate may exceed the device memory.
    footprint = memory(description, layout, cluster, global_batch)
    spare_bytes = max(0.0, (limit_bytes or footprint.limit_bytes) - footprint.bytes)
    times = timing(description, layout, cluster, global_batch, simulate=simulate, spare_bytes=spare_bytes, flow=flow)
    footprint = with_buckets(footprint, layout, times.bucket_bytes)
    flops = step_flops(description, layout, global_batch)
    peak_flops = (layout.devices - layout.servers) * peak_of(cluster, layout)
    least = least_s(flops, layout, cluster)
    step_range_s = None
    fit = layout.kernels.fit(cluster.device.name)
    if is_known_too_fast(layout, cluster):
        fastest, median, slowest = ZERO3_RATIOS
        step_range_s = max(least, fastest * times.modelled_s), max(least, slowest * times.modelled_s)
        times = replace(times, terms={**times.terms, CORRECTION: (median - 1) * times.modelled_s})
    if times.step_s < least:
        times = replace(times, terms={**times.terms, UNPROVEN: least - times.step_s}, least_s=least)
    if step_range_s is None and has_range(layout, cluster):
        step_range_s = fit.fastest * times.step_s, fit.slowest * times.step_s
    joules = energy(times, layout, cluster, peak_share(flops, times, peak_flops))
    mfu = flops.exact_flops / (times.step_s * peak_flops)  # for a long context, half of attention is not computed
    return PlanEstimate(
        layout=layout,
        global_batch=global_batch,
        tokens=global_batch * description.tokens,
        parameters=description.parameters,
        memory=footprint,
        timing=times,
        work=flops,
        energy=joules,
        run=run(steps, times.step_s, joules, checkpoint_bytes(description, layout), layout, cluster),
        peak_flops=peak_flops,
        step_range_s=step_range_s,
        flags=(
            *times.flags,
            *_narrow(footprint, times, layout),
            *_all_pairs(description, layout),
            *_unproven(times, layout, cluster, mfu, flops.model_flops / (times.modelled_s * peak_flops)),
            *flags(layout, cluster),
            *unsupported(layout),
            *unknown_terms(cluster),
        ),
    )


def least_s(flops: FlopEstimate, layout: ParallelLayout, cluster: Cluster) -> float:
    """Return the step time in s at the highest MFU that ``cluster`` allows, or 0 if any MFU is allowed.

    ``flops``: FLOPs of the step.
    """
    if not cluster.most_mfu or has_range(layout, cluster):
        return 0.0
    peak_flops = (layout.devices - layout.servers) * peak_of(cluster, layout)
    return flops.model_flops / (cluster.most_mfu * peak_flops)


def peak_of(cluster: Cluster, layout: ParallelLayout) -> float:
    """Return the peak FLOP/s of a device in the precision in which ``layout`` computes matrix products."""
    peaks = cluster.device.peak_flops
    if layout.computes_in not in peaks:
        raise ConfigurationError(
            f"the device {cluster.device.name!r} of the cluster {cluster.name!r} has no peak FLOP rate for "
            f"{layout.computes_in}; choose one of the precisions {', '.join(peaks)}, or add the peak FLOP rate to the "
            "cluster file"
        )
    return peaks[layout.computes_in]


def peak_share(flops: FlopEstimate, times: TimeEstimate | MicrobatchFlow, total_peak_flops: float) -> float:
    """Return the fraction of the peak FLOP rate that the devices reach in the computing phases of a step.

    ``flops``: FLOPs of the step. ``times``: seconds per phase. ``total_peak_flops``: peak FLOP/s of all devices.
    """
    computing_s = sum(times.terms.get(name, 0.0) for name in COMPUTING)
    return min(1.0, flops.executed_flops / (computing_s * total_peak_flops)) if computing_s else 0.0


def checkpoint_bytes(description: ModelDescription, layout: ParallelLayout) -> float:
    """Return the bytes of a checkpoint of the model, in the precision of ``layout``."""
    whole = unsharded(layout)
    is_half = whole.parameter < 4  # then the optimizer has the float32 master, and the 16-bit copy is not saved
    return description.parameters * float(whole.optimizer + (0 if is_half else whole.parameter))


def _narrow(footprint: MemoryEstimate, times: TimeEstimate, layout: ParallelLayout) -> Iterator[str]:
    if FULL * footprint.limit_bytes < footprint.bytes <= footprint.limit_bytes:
        yield (
            f"memory is {footprint.bytes / footprint.limit_bytes:.1%} full: an allocator that leaves cracks "
            "(fragmentation), or a larger batch in evaluation, may exceed it"
        )
    without_s = times.step_s + times.hidden_s
    if times.hidden_s > HIDDEN * times.step_s:
        yield (
            f"{times.hidden_s / without_s:.0%} of {without_s:.3g} s are messages that hide during computation "
            f"(overlap = {layout.overlap:g}); without overlap a step takes {without_s:.3g} s"
        )


def _all_pairs(description: ModelDescription, layout: ParallelLayout) -> tuple[str, ...]:
    is_long = description.tokens >= LONG_CONTEXT and description.shape is not None
    if layout.kernels.tiles_attention or not (is_long or is_mostly_scores(description, layout)):
        return ()
    kept = "keeps" if layout.recompute == "none" else "makes"
    what = f"the attention of {layout.implementation} {kept} the scores of all pairs of tokens (no FlashAttention)"
    return (f"{what}; use --implementation megatron-core for fused attention",)


def _unproven(
    times: TimeEstimate, layout: ParallelLayout, cluster: Cluster, mfu: float, modelled_mfu: float
) -> Iterator[str]:
    if cluster.calibrated:
        return
    fit = layout.kernels.fit(cluster.device.name)
    if not layout.kernels.is_published:
        yield (
            f"hpcdist was never measured on this device ({cluster.device.name}): only plans of other implementations "
            "were compared with published trainings"
        )
    elif has_range(layout, cluster):
        yield (
            f"{layout.implementation} on {cluster.device.name} was compared with {fit.rows} published steps, which "
            f"took {fit.fastest:g} to {fit.slowest:g} times as long as planned"
        )
    else:
        yield (
            f"uncalibrated: {layout.implementation} on {cluster.device.name} rests on {fit.rows} published steps, "
            f"fewer than {ENOUGH}; the step has no range"
        )
    if mfu > CHECKED_MFU and not cluster.most_mfu and not has_range(layout, cluster):
        yield f"an MFU of {mfu:.0%} is more than {CHECKED_MFU:.0%}, the best training that estimates were compared with"
    if UNPROVEN in times.terms:
        yield (
            f"MFU is limited to {cluster.most_mfu:.1%}, the best published training on such devices: the formulas give "
            f"{modelled_mfu:.1%}, which was never measured; `hpcdist plan calibrate` measures your cluster"
        )
    if is_known_too_fast(layout, cluster):
        least, median, most = ZERO3_RATIOS
        yield (
            f"ZeRO-3: published steps took {least:g} to {most:g} times as long as the formulas give; the step, its "
            f"throughput, energy and price are computed with the median, {median:g}"
        )


def is_known_too_fast(layout: ParallelLayout, cluster: Cluster) -> bool:
    """Return True if the formulas underestimate the step time, as for ZeRO-3 on an uncalibrated cluster."""
    is_old = layout.kernels.gathers_by_tensor or not layout.kernels.is_published
    return is_old and layout.strategy == "zero3" and layout.data * layout.context > 1 and not cluster.calibrated


def has_range(layout: ParallelLayout, cluster: Cluster) -> bool:
    """Return True if the program of ``layout`` was fitted to at least `ENOUGH` published steps on such devices."""
    return not cluster.calibrated and layout.kernels.fit(cluster.device.name).rows >= ENOUGH


def run(
    steps: int, step_s: float, energy: StepEnergy, checkpoint_bytes: float, layout: ParallelLayout, cluster: Cluster
) -> RunEstimate:
    """Return expected time, energy and price of ``steps`` steps with checkpoints and failures.

    ``step_s``, ``energy``: time and energy of one step. ``checkpoint_bytes``: size of a checkpoint. Raises UsageError
    if ``steps`` is less than 1.
    """
    if steps < 1:
        raise UsageError(f"run.steps must be at least 1, got {steps}")
    mtbf, save = mtbf_s(layout, cluster), save_s(checkpoint_bytes, layout, cluster)
    restart = restart_s(checkpoint_bytes, layout, cluster)
    between = min(steps, max(1, round(daly_interval.daly(save, mtbf) / step_s)))  # steps between two checkpoints
    work_s, between_s = steps * step_s, between * step_s
    try:
        slowdown = daly_interval.slowdown(between_s, save, mtbf, restart)
    except OverflowError:
        slowdown = math.inf
    # Infinite time and price: the wall time would exceed `ENDLESS` times the working time.
    if slowdown > ENDLESS:
        slowdown = math.inf
    wall_s = work_s * slowdown
    failures = wall_s / mtbf
    waiting_s = min(wall_s, steps / between * save + failures * restart)
    joules = math.inf
    if math.isfinite(wall_s):
        joules = (wall_s - waiting_s) * (energy.joules / step_s) + waiting_s * waiting_w(layout, cluster)
    site = cluster.site
    has_power = cluster.device.peak_w > 0
    carbon = site.carbon_g_per_kwh
    return RunEstimate(
        steps=steps,
        work_s=work_s,
        wall_s=wall_s,
        mtbf_s=mtbf,
        failures=failures,
        save_s=save,
        interval_s=between_s,
        slowdown=slowdown,
        joules=joules,
        carbon_g=joules / J_PER_KWH * carbon if has_power and carbon is not None else None,
        price=_price(wall_s, joules if has_power else None, layout, cluster),
        currency=site.currency,
    )


def mtbf_s(layout: ParallelLayout, cluster: Cluster) -> float:
    """Return the mean time in s between two node failures in the job. Each failure ends the job."""
    return cluster.failures.node_mtbf_s / nodes_of(layout, cluster)


def save_s(checkpoint_bytes: float, layout: ParallelLayout, cluster: Cluster) -> float:
    """Return the seconds to write a checkpoint of ``checkpoint_bytes`` bytes from all nodes in parallel."""
    storage, nodes = cluster.storage, nodes_of(layout, cluster)
    return checkpoint_bytes / min(storage.write_bytes_per_s, nodes * storage.node_write_bytes_per_s)


def restart_s(checkpoint_bytes: float, layout: ParallelLayout, cluster: Cluster) -> float:
    """Return the seconds from a failure to the next step, with the time to read the checkpoint."""
    storage, nodes = cluster.storage, nodes_of(layout, cluster)
    reading_s = checkpoint_bytes / min(storage.read_bytes_per_s, nodes * storage.node_read_bytes_per_s)
    return cluster.failures.restart_s + reading_s


def _price(wall_s: float, joules: float | None, layout: ParallelLayout, cluster: Cluster) -> float | None:
    site = cluster.site
    if site.device_hour_price is None and site.kwh_price is None:
        return None
    price = devices_held(layout, cluster) * wall_s / 3600 * (site.device_hour_price or 0.0)
    if site.kwh_price is None:
        return price
    return None if joules is None else price + joules / J_PER_KWH * site.kwh_price


def energy(timing: TimeEstimate, layout: ParallelLayout, cluster: Cluster, peak_share: float) -> StepEnergy:
    """Return the energy of a training step on all nodes, by consumer, such as "devices" and "cooling".

    ``timing``: step time by phase. ``peak_share``: fraction of the peak FLOP rate reached during computation.
    """
    device, nodes, step_s = cluster.device, nodes_of(layout, cluster), timing.step_s
    worker_j = 0.0
    for name, seconds in timing.terms.items():
        is_served = name == "update" and layout.servers
        worker_j += seconds * power_w(device, WAITING_UTILISATION if is_served else utilisation(name, peak_share))
    exchange_s, update_s = timing.terms.get("data", 0.0), timing.terms.get("update", 0.0)
    server_j = exchange_s * power_w(device, MESSAGE_UTILISATION) + update_s * power_w(device, MEMORY_UTILISATION)
    server_j += (step_s - exchange_s - update_s) * power_w(device, WAITING_UTILISATION)
    workers = layout.devices - layout.servers
    unused = devices_held(layout, cluster) - layout.devices
    terms = {}
    if device.peak_w:
        terms["devices"] = workers * worker_j + layout.servers * server_j + unused * device.idle_w * step_s
    if cluster.node.host_w:
        terms["hosts"] = nodes * cluster.node.host_w * step_s
    if cluster.node.network_w:
        terms["network"] = nodes * cluster.node.network_w * step_s
    if cluster.site.pue is not None:
        terms["cooling"] = (cluster.site.pue - 1) * sum(terms.values())
    return StepEnergy(terms=terms, device_w=worker_j / step_s if step_s else 0.0)


def utilisation(phase: str, peak_share: float) -> float:
    """Return the utilisation of a device, from 0 to 1, in the ``phase`` of a step, such as "update".

    ``peak_share``: fraction of the peak FLOP rate that the device reaches in computing phases.
    """
    if phase in COMPUTING:
        return COMPUTE_FLOOR + (1 - COMPUTE_FLOOR) * min(1.0, max(0.0, peak_share))
    if phase in ("update", UNPROVEN):
        return MEMORY_UTILISATION
    return MESSAGE_UTILISATION if phase in SENDING else WAITING_UTILISATION


def power_w(device: Device, utilisation: float) -> float:
    """Return the power of ``device`` in W. ``utilisation`` 0 means idle power, and 1 means peak power."""
    return device.idle_w + (device.peak_w - device.idle_w) * utilisation


def waiting_w(layout: ParallelLayout, cluster: Cluster) -> float:
    """Return the power in W, including cooling, of all nodes of the job during a checkpoint or restart."""
    nodes, site = nodes_of(layout, cluster), cluster.site
    devices_w = (
        devices_held(layout, cluster) * power_w(cluster.device, WAITING_UTILISATION) if cluster.device.peak_w else 0.0
    )
    return (devices_w + nodes * (cluster.node.host_w + cluster.node.network_w)) * (site.pue or 1.0)


def nodes_of(layout: ParallelLayout, cluster: Cluster) -> int:
    """Return the smallest number of nodes whose devices suffice for ``layout``."""
    return -(-layout.devices // cluster.node.devices)


def devices_held(layout: ParallelLayout, cluster: Cluster) -> int:
    """Return the number of devices, used or unused, on the nodes of ``layout``."""
    return max(layout.devices, min(cluster.devices, nodes_of(layout, cluster) * cluster.node.devices))


def unknown_terms(cluster: Cluster) -> tuple[str, ...]:
    """Return warnings about terms of the energy that are unknown for ``cluster``, or based on assumptions."""
    terms = (
        (cluster.device.peak_w, "the power of a device is unknown: its energy is left out"),
        (cluster.node.host_w, "the power of a host is unknown: its energy is left out"),
        (cluster.node.network_w, "the power of the network is unknown: its energy is left out"),
        (cluster.site.pue, "the PUE is unknown: the energy of cooling is left out"),
    )
    left_out = tuple(text for is_known, text in terms if not is_known)
    return (*left_out, ASSUMED) if cluster.device.peak_w else left_out
