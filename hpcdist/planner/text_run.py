"""The course of a run, its energy and price, and what breaks first, for a reader at a login node."""

import math
from collections.abc import Mapping
from typing import Final

from hpcdist.planner.cluster import Cluster
from hpcdist.planner.energy import held, nodes_of
from hpcdist.planner.estimate import Estimate
from hpcdist.planner.layout import Layout
from hpcdist.planner.text_units import counted, figures, grams, joules, many, seconds, share

_LESS: Final = {  # term -> what makes it smaller
    "parameters": "more tensor or pipeline devices, or ZeRO 3",
    "gradients": "ZeRO 2 or 3, or more tensor or pipeline devices",
    "optimizer": "ZeRO 1 to 3, which cut it over the data devices",
    "activations": "recomputation, a smaller micro-batch, sequence parallelism or more tensor devices",
    "messages": "more tensor or pipeline devices",
    "scratch": "a smaller micro-batch or more tensor devices",
    "reserved": "a device with more memory",
}
_FASTER: Final = {  # term -> what makes it shorter
    "forward": "more devices, or products of larger matrices",
    "backward": "more devices, or products of larger matrices",
    "recompute": "less recomputation, where there is memory for it",
    "tensor": "tensor groups inside a node, or fewer tensor devices",
    "context": "fewer context devices",
    "expert": "experts over fewer devices, or faster links",
    "pipeline": "fewer, or fuller, micro-batches or faster links",
    "bubble": "more micro-batches, fewer pipeline devices or a schedule with a smaller bubble",
    "data": "a larger batch, compression, or exchanges behind computation",
    "rows": "no sequence parallelism, or tensor groups inside a node",
    "update": "ZeRO, which cuts it over the data devices",
    "input": "faster storage, or reading ahead",
    "unproven": "a measurement of the device: hpcdist plan calibrate",
}


def run_lines(found: Estimate, cluster: Cluster) -> list[str]:
    """Return how long all steps take, with what saves and failures cost (local)."""
    run = found.run
    if not math.isfinite(run.wall_s):
        costs = f"a checkpoint takes {seconds(run.save_s)}, a restart {seconds(cluster.failures.restart_s)}"
        return [
            f"{counted(run.steps, 'step')} NEVER END: a failure every {seconds(run.mtbf_s)} on this many nodes, {costs}"
        ]
    tokens = f", {many(run.steps * found.tokens)} tokens" if found.tokens != found.global_batch else ""
    steps = counted(run.steps, "step")
    lines = [f"{steps}{tokens}: {seconds(run.wall_s)}, of which {seconds(run.work_s)} are steps"]
    devices = found.layout.devices
    what = "tokens" if found.tokens != found.global_batch else "samples"
    hours = figures(devices * run.wall_s / 3600)
    rate = figures(found.tokens / found.step_s / devices)
    lines.append(f"{counted(devices, 'device')} for that long: {hours} device hours; {rate} {what}/s a device")
    expected = "fewer than 0.01" if run.failures < 0.01 else figures(run.failures)
    lines.append(
        f"a failure every {seconds(run.mtbf_s)} on this many nodes: {expected} are expected, with "
        f"{seconds(cluster.failures.restart_s)} for a restart"
    )
    when = f"best every {seconds(run.interval_s)} (Young, Daly)" if run.interval_s < run.work_s else "best at the end"
    lines.append(
        f"a checkpoint takes {seconds(run.save_s)}, {when}; saves and failures: {share(run.slowdown - 1)} more time"
    )
    return lines


def energy_lines(found: Estimate, cluster: Cluster) -> list[str]:
    """Return joules, grams and price, as far as the cluster's file knows what makes them (local)."""
    energy, run, site = found.energy, found.run, cluster.site
    parts = ", ".join(f"{name} {share(size / energy.joules)}" for name, size in energy.terms.items() if size)
    endless = not math.isfinite(run.wall_s)
    whole = "" if endless else f"{joules(run.joules)} for the run, "
    lines = [f"{whole}{joules(energy.joules)} a step: {parts}"]
    lines.append(f"a device draws {figures(energy.device_w)} W of {figures(cluster.device.peak_w)} W")
    lines += unused(found.layout, cluster)
    if site.pue is None:
        lines.append("cooling is not counted: the cluster has no site.pue")
    if endless:
        return lines
    if run.carbon_g is not None:
        source = f", {site.carbon_source}" if site.carbon_source else ""
        lines.append(f"{grams(run.carbon_g)} at {figures(site.carbon_g_per_kwh or 0.0)} g/kWh{source}")
    else:
        lines.append("carbon: not known, the cluster has no site.carbon_g_per_kwh")
    if run.price is not None:
        lines.append(f"price {figures(run.price, 4)} {run.currency}".rstrip())
    else:
        lines.append("price: not known, the cluster has no site.device_hour_price")
    return lines


def unused(layout: Layout, cluster: Cluster) -> list[str]:
    """Return that idle devices are paid for, where the layout does not fill its nodes (local)."""
    there = held(layout, cluster)
    idle = there - layout.devices
    if not idle:
        return []
    nodes = counted(nodes_of(layout, cluster), "node")
    waits = "is" if idle == 1 else "are"
    return [f"energy and price are those of {nodes}: of {counted(there, 'device')} there {idle:,} {waits} not used"]


def breaks_lines(found: Estimate) -> list[str]:
    """Return what limits this layout first, of memory and of time, and what helps (local)."""
    memory, largest = found.memory, found.memory.breaks_first
    part = memory.terms[largest] / memory.limit_bytes
    first = f"memory: {largest}, {share(part)} of the limit; less with {_LESS.get(largest, 'another layout')}"
    lost = _lost(found.timing.terms)
    lines = [first]
    if lost is not None:
        name, taken = lost
        less = _FASTER.get(name, "another layout")
        lines.append(f"time: {name}, {share(taken / found.step_s)} of a step; shorter with {less}")
    if found.run.slowdown > 1.05:
        lines.append(f"failures: {share(1 - 1 / found.run.slowdown)} of the run; faster checkpoints and restarts help")
    return lines


def _lost(terms: Mapping[str, float]) -> tuple[str, float] | None:
    """Return the longest part of a step that computes nothing new; None where there is none."""
    others = {name: taken for name, taken in terms.items() if name not in ("forward", "backward") and taken > 0}
    if not others:
        return None
    name = max(others, key=lambda one: others[one])
    return name, others[name]
