"""Plan one layout: put memory, time, operations, energy and the course of a run together.

`plan` is what `hpcdist plan` calls, and what a search calls for each of its candidates. Each figure comes from its
own module. Added here: the flags that say how far an estimate can be trusted, the largest MFU that measurements
support (`CHECKED_MFU`), and the bytes of a checkpoint.

`run` gives the expected course of a run: steps, checkpoints, failures and restarts; its duration, energy, carbon and
price. Nodes fail independently and at random: n of them fail n times as often as one. A save holds the steps up for as
long as the storage takes its bytes. A failure costs the work since the last save and a restart, which reads the
checkpoint. The checkpoint interval and the slowdown are Daly's (`hpcdist.strategies.core.daly_interval`), on whole
steps.
"""

import math
from dataclasses import replace
from typing import Final

from hpcdist.errors import ConfigurationError, UsageError
from hpcdist.planner.cluster.hardware import Cluster
from hpcdist.planner.energy import COMPUTING, JOULES_PER_KWH, devices_held, energy, nodes_of, unknown_terms, waiting_w
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
from hpcdist.planner.layout import ParallelLayout
from hpcdist.planner.limits.checks import flags
from hpcdist.planner.limits.unsupported import unsupported
from hpcdist.planner.memory.activations import is_mostly_scores
from hpcdist.planner.memory.device import memory
from hpcdist.planner.memory.model_states import unsharded, with_buckets
from hpcdist.planner.model.description import ModelDescription
from hpcdist.planner.model.stage_split import step_flops
from hpcdist.planner.time.step import MicrobatchFlow, timing
from hpcdist.strategies.core import daly_interval

ENDLESS: Final = 1000.0  # wall time over work, beyond which a run is said never to end
CHECKED_MFU: Final = (
    0.57  # the most of the published trainings that the planner is held against (benchmarks/planner/published)
)
FULL: Final = 0.95  # of the memory
HIDDEN: Final = 0.05  # of a step
LONG_CONTEXT: Final = 8192  # tokens, from which published kernels without FlashAttention tell little


def plan(
    description: ModelDescription,
    layout: ParallelLayout,
    cluster: Cluster,
    global_batch: int,
    steps: int,
    *,
    simulate: bool = False,
    limit_bytes: float = 0.0,
    known: MicrobatchFlow | None = None,
) -> PlanEstimate:
    """Return the estimate of ``steps`` steps of ``global_batch`` samples (local).

    With ``simulate`` the passes of a pipeline are run one by one, with the seconds of each stage; without, its closed
    form is taken. A layout that does not fit into memory has an estimate, too; one that cannot be at all
    (`hpcdist.planner.limits.checks`) should not come here. Buckets of gradients are longer than by default
    only where they fit into ``limit_bytes``, or into all the memory (0). ``known``: as
    `hpcdist.planner.time.step.timing` takes it. Raises ConfigurationError for a precision that the device of
    ``cluster`` has no peak for.
    """
    needed = memory(description, layout, cluster, global_batch)
    spare_bytes = max(0.0, (limit_bytes or needed.limit_bytes) - needed.bytes)
    took = timing(description, layout, cluster, global_batch, simulate=simulate, spare_bytes=spare_bytes, known=known)
    needed = with_buckets(needed, layout, took.bucket_bytes)
    work_ = step_flops(description, layout, global_batch)
    peak_flops = (layout.devices - layout.servers) * peak_of(cluster, layout)
    least = least_s(work_, layout, cluster)
    took = _capped(_corrected(took, layout, cluster), least)
    joules = energy(took, layout, cluster, peak_share(work_, took, peak_flops))
    mfu = work_.exact_flops / (took.step_s * peak_flops)  # of a long context, half of attention is not computed
    return PlanEstimate(
        layout=layout,
        global_batch=global_batch,
        tokens=global_batch * description.tokens,
        parameters=description.parameters,
        memory=needed,
        timing=took,
        work=work_,
        energy=joules,
        run=run(steps, took.step_s, joules, checkpoint_bytes(description, layout), layout, cluster),
        peak_flops=peak_flops,
        step_range_s=_step_range_s(took, least, layout, cluster),
        flags=(
            *took.flags,
            *_narrow(needed, took, layout),
            *_all_pairs(description, layout),
            *_unproven(layout, cluster, mfu),
            *_errors(took, layout, cluster, work_.model_flops / (took.modelled_s * peak_flops)),
            *flags(layout, cluster),
            *unsupported(layout),
            *unknown_terms(cluster),
        ),
    )


def _step_range_s(
    took: TimeEstimate, least: float, layout: ParallelLayout, cluster: Cluster
) -> tuple[float, float] | None:
    if not errors_known(layout, cluster):
        return None
    fewest, _, most = (max(least, ratio * took.modelled_s) for ratio in ZERO3_RATIOS)
    return fewest, most


def _corrected(took: TimeEstimate, layout: ParallelLayout, cluster: Cluster) -> TimeEstimate:
    """Return ``took`` with the time that published steps of such layouts took longer, at the median."""
    if not errors_known(layout, cluster):
        return took
    return replace(took, terms={**took.terms, CORRECTION: (ZERO3_RATIOS[1] - 1) * took.modelled_s})


def least_s(work_: FlopEstimate, layout: ParallelLayout, cluster: Cluster) -> float:
    """Return the seconds of a step with the most MFU that a plan on ``cluster`` may have; 0 where there is no limit."""
    if not cluster.most_mfu:
        return 0.0
    peak_flops = (layout.devices - layout.servers) * peak_of(cluster, layout)
    return work_.model_flops / (cluster.most_mfu * peak_flops)


def _capped(took: TimeEstimate, least: float) -> TimeEstimate:
    """Return ``took`` with a term for the time that it lacks to ``least`` seconds."""
    missing = least - took.step_s
    return replace(took, terms={**took.terms, UNPROVEN: missing}, least_s=least) if missing > 0 else took


def peak_of(cluster: Cluster, layout: ParallelLayout) -> float:
    """Return what a device could do at most, in operations a second, with the numbers that ``layout`` computes in."""
    known = cluster.device.peak_flops
    if layout.computes_in not in known:
        raise ConfigurationError(
            f"the device {cluster.device.name!r} of the cluster {cluster.name!r} has no peak for "
            f"{layout.computes_in}; choose a precision of {', '.join(known)}, or add it to the cluster's file"
        )
    return known[layout.computes_in]


def peak_share(work_: FlopEstimate, took: TimeEstimate | MicrobatchFlow, peak_flops: float) -> float:
    """Return the part of their peak that the devices reach while they compute (local)."""
    computing_s = sum(took.terms.get(name, 0.0) for name in COMPUTING)
    return min(1.0, work_.executed_flops / (computing_s * peak_flops)) if computing_s else 0.0


def checkpoint_bytes(description: ModelDescription, layout: ParallelLayout) -> float:
    """Return what is saved of the model: its parameters, in float32 at least, and the optimizer's state."""
    whole = unsharded(layout)
    is_half = whole.parameter < 4  # then the master is with the optimizer's bytes, and the working copy is not saved
    return description.parameters * float(whole.optimizer + (0 if is_half else whole.parameter))


def _narrow(needed: MemoryEstimate, took: TimeEstimate, layout: ParallelLayout) -> tuple[str, ...]:
    """Return flags of narrow margins: memory that is nearly full, messages that have to hide."""
    flags = []
    if FULL * needed.limit_bytes < needed.bytes <= needed.limit_bytes:
        flags.append(
            f"memory is {needed.bytes / needed.limit_bytes:.1%} full: an allocator that leaves cracks, or a larger "
            "batch in evaluation, does not fit any more"
        )
    without_s = took.step_s + took.hidden_s
    if took.hidden_s > HIDDEN * took.step_s:
        flags.append(
            f"{took.hidden_s / without_s:.0%} of {without_s:.3g} s are messages that hide behind computation "
            f"(overlap = {layout.overlap:g}): a step takes that long where they do not"
        )
    return tuple(flags)


def _all_pairs(description: ModelDescription, layout: ParallelLayout) -> tuple[str, ...]:
    """Return a flag where the attention of published kernels decides a plan that one in tiles would not."""
    is_long = description.tokens >= LONG_CONTEXT and description.shape is not None
    if layout.implementation != "megatron" or not (is_long or is_mostly_scores(description, layout)):
        return ()
    kept = "keeps" if layout.recompute == "none" else "makes"
    what = f"the attention of megatron {kept} the scores of all pairs of tokens (no FlashAttention)"
    return (f"{what}: --implementation hpcdist plans with tiles",)


def _unproven(layout: ParallelLayout, cluster: Cluster, mfu: float) -> tuple[str, ...]:
    """Return flags of estimates beyond the trainings that estimates were compared with."""
    if cluster.calibrated:
        return ()
    flags = []
    if layout.implementation == "hpcdist":
        flags.append(
            f"no training of this toolkit on {cluster.device.name} was held against an estimate; published ones were, "
            "of the implementation 'megatron'"
        )
    if mfu > CHECKED_MFU and not cluster.most_mfu:
        flags.append(
            f"an MFU of {mfu:.0%} is more than the {CHECKED_MFU:.0%} of the best training that estimates were compared "
            "with"
        )
    return tuple(flags)


def _errors(took: TimeEstimate, layout: ParallelLayout, cluster: Cluster, modelled_mfu: float) -> tuple[str, ...]:
    """Return flags with the known errors of such estimates."""
    flags = []
    if UNPROVEN in took.terms:
        flags.append(
            f"MFU is limited to {cluster.most_mfu:.1%}, the best published training on such devices: the formulas give "
            f"{modelled_mfu:.1%}, which nobody has measured; `hpcdist plan calibrate` measures yours"
        )
    if errors_known(layout, cluster):
        least, median, most = ZERO3_RATIOS
        flags.append(
            f"ZeRO-3: published steps took {least:g} to {most:g} times as long as the formulas give; the step, its "
            f"throughput, energy and price are computed with the median, {median:g}"
        )
    return tuple(flags)


def errors_known(layout: ParallelLayout, cluster: Cluster) -> bool:
    """Whether estimates of such layouts are known to be too fast: ZeRO-3 on devices that nobody has measured."""
    return layout.strategy == "zero3" and layout.data * layout.context > 1 and not cluster.calibrated


def run(
    steps: int, step_s: float, energy: StepEnergy, checkpoint_bytes: float, layout: ParallelLayout, cluster: Cluster
) -> RunEstimate:
    """Return the expected course of ``steps`` steps of ``step_s`` seconds and of ``energy`` each.

    ``checkpoint_bytes`` are those of all that is saved. A run that is shorter than the best interval saves once, at its
    end. Where failures come so fast that a run would last over `ENDLESS` times its work, seconds, joules and what
    follows are infinite.
    Raises UsageError for less than one step.
    """
    if steps < 1:
        raise UsageError(f"a run of {steps} steps is none; expected 1 or more")
    mtbf, save = mtbf_s(layout, cluster), save_s(checkpoint_bytes, layout, cluster)
    restart = restart_s(checkpoint_bytes, layout, cluster)
    between = min(steps, max(1, round(daly_interval.daly(save, mtbf) / step_s)))  # steps between two saves
    work_s, between_s = steps * step_s, between * step_s
    try:
        slowdown = daly_interval.slowdown(between_s, save, mtbf, restart)
    except OverflowError:
        slowdown = math.inf
    if slowdown > ENDLESS:
        slowdown = math.inf
    wall_s = work_s * slowdown
    failures = wall_s / mtbf
    waiting_s = steps / between * save + failures * restart
    joules = _joules(wall_s, min(wall_s, waiting_s), energy.joules / step_s, waiting_w(layout, cluster))
    site = cluster.site
    known = cluster.device.peak_w > 0
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
        carbon_g=joules / JOULES_PER_KWH * carbon if known and carbon is not None else None,
        price=_price(wall_s, joules if known else None, layout, cluster),
        currency=site.currency,
    )


def mtbf_s(layout: ParallelLayout, cluster: Cluster) -> float:
    """Return the mean seconds between two failures that end a job of ``layout``."""
    return cluster.failures.node_mtbf_s / nodes_of(layout, cluster)


def save_s(checkpoint_bytes: float, layout: ParallelLayout, cluster: Cluster) -> float:
    """Return the seconds in which all nodes of ``layout`` write their equal shares of a checkpoint."""
    storage, nodes = cluster.storage, nodes_of(layout, cluster)
    return checkpoint_bytes / min(storage.write_bytes_per_s, nodes * storage.node_write_bytes_per_s)


def restart_s(checkpoint_bytes: float, layout: ParallelLayout, cluster: Cluster) -> float:
    """Return the seconds from a failure to the next step: what the site needs, then reading the checkpoint once."""
    storage, nodes = cluster.storage, nodes_of(layout, cluster)
    reading_s = checkpoint_bytes / min(storage.read_bytes_per_s, nodes * storage.node_read_bytes_per_s)
    return cluster.failures.restart_s + reading_s


def _joules(wall_s: float, waiting_s: float, computing_w: float, waiting_power_w: float) -> float:
    if math.isinf(wall_s):
        return math.inf
    return (wall_s - waiting_s) * computing_w + waiting_s * waiting_power_w


def _price(wall_s: float, joules: float | None, layout: ParallelLayout, cluster: Cluster) -> float | None:
    """Return what devices of whole nodes and electricity cost; None without any price, or without the joules for one.

    A price of a device's hour that holds its electricity stands alone in a file: `kwh_price` is added to it.
    """
    site = cluster.site
    if site.device_hour_price is None and site.kwh_price is None:
        return None
    price = devices_held(layout, cluster) * wall_s / 3600 * (site.device_hour_price or 0.0)
    if site.kwh_price is None:
        return price
    return None if joules is None else price + joules / JOULES_PER_KWH * site.kwh_price
