"""Plan of one layout as text for a terminal: `summary` in six lines, `text` with every term and note."""

import math
from collections.abc import Iterable, Mapping
from typing import Final

from hpcdist.planner.cluster.hardware import Cluster
from hpcdist.planner.energy import devices_held, nodes_of
from hpcdist.planner.estimate import MemoryEstimate, PlanEstimate, TimeEstimate
from hpcdist.planner.layout import ParallelLayout
from hpcdist.planner.model.description import ModelDescription
from hpcdist.planner.report.quantities import (
    LINE,
    between,
    bytes_in_both,
    counted,
    decimal,
    figures,
    grams,
    joules,
    large_count,
    nbytes,
    seconds,
    share,
    wrapped,
)
from hpcdist.strategies.zero.config import STAGES

_LESS: Final = {  # term -> what makes it smaller
    "parameters": "more tensor or pipeline devices, or ZeRO 3",
    "gradients": "more tensor or pipeline devices, or ZeRO 2 or 3",
    "optimizer": "ZeRO 1 to 3, which cut it over the data devices",
    "messages": "more tensor or pipeline devices",
    "reserved": "a device with more memory",
}
_CUT_BY: Final = {"parameters": 3, "gradients": 2, "optimizer": 1}  # stages of ZeRO that cut a term, from this one on
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
    "correction": "ZeRO 1 or 2, or tensor and pipeline devices",
}


def run_lines(estimate: PlanEstimate, cluster: Cluster) -> list[str]:
    """Return how long all steps take, with what saves and failures cost (local)."""
    run = estimate.run
    if not math.isfinite(run.wall_s):
        costs = f"a checkpoint takes {seconds(run.save_s)}, a restart {seconds(cluster.failures.restart_s)}"
        return [
            f"{counted(run.steps, 'step')} NEVER END: a failure every {seconds(run.mtbf_s)} on this many nodes, {costs}"
        ]
    tokens = f", {large_count(run.steps * estimate.tokens)} tokens" if estimate.tokens != estimate.global_batch else ""
    steps = counted(run.steps, "step")
    lines = [f"{steps}{tokens}: {seconds(run.wall_s)}, of which {seconds(run.work_s)} are steps"]
    devices = estimate.layout.devices
    each, what = _samples_or_tokens(estimate)
    hours = figures(devices * run.wall_s / 3600)
    rate = figures(each / estimate.step_s / devices)
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


def energy_lines(estimate: PlanEstimate, cluster: Cluster) -> list[str]:
    """Return joules, grams and price, as far as the cluster's file knows what makes them (local)."""
    energy, run, site = estimate.energy, estimate.run, cluster.site
    parts = ", ".join(f"{name} {share(size / energy.joules)}" for name, size in energy.terms.items() if size)
    endless = not math.isfinite(run.wall_s)
    whole = "" if endless else f"{joules(run.joules)} for the run, "
    lines = [f"{whole}{joules(energy.joules)} a step: {parts}"]
    lines.append(f"a device draws {figures(energy.device_w)} W of {figures(cluster.device.peak_w)} W")
    lines += idle_devices_line(estimate.layout, cluster)
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


def idle_devices_line(layout: ParallelLayout, cluster: Cluster) -> list[str]:
    """Return that idle devices are paid for, where the layout does not fill its nodes (local)."""
    there = devices_held(layout, cluster)
    idle = there - layout.devices
    if not idle:
        return []
    nodes = counted(nodes_of(layout, cluster), "node")
    waits = "is" if idle == 1 else "are"
    return [f"energy and price are those of {nodes}: of {counted(there, 'device')} there {idle:,} {waits} not used"]


def breaks_lines(estimate: PlanEstimate) -> list[str]:
    """Return what limits this layout first, of memory and of time, and what helps (local)."""
    memory, largest = estimate.memory, estimate.memory.breaks_first
    part = memory.terms[largest] / memory.limit_bytes
    first = f"memory: {largest}, {share(part)} of the limit; less with {_less(largest, estimate)}"
    lost = _lost(estimate.timing.terms)
    lines = [first]
    if lost is not None:
        name, taken = lost
        less = _FASTER.get(name, "another layout")
        lines.append(f"time: {name}, {share(taken / estimate.step_s)} of a step; shorter with {less}")
    if estimate.run.slowdown > 1.05:
        lines.append(
            f"failures: {share(1 - 1 / estimate.run.slowdown)} of the run; faster checkpoints and restarts help"
        )
    return lines


def _less(term: str, estimate: PlanEstimate) -> str:
    """Return what makes a term of the memory smaller, of what this layout has not yet."""
    layout = estimate.layout
    ways = {
        "recomputation": term == "activations" and layout.recompute != "full",
        "a smaller micro-batch": layout.microbatch > 1,
        "sequence parallelism": term == "activations" and layout.tensor > 1 and not layout.sequence_parallel,
        "more tensor devices": True,
        "more context devices (--context-ranks)": estimate.tokens != estimate.global_batch,
    }
    if term in ("activations", "scratch"):
        *others, last = [way for way, is_left in ways.items() if is_left]
        return f"{', '.join(others)} or {last}" if others else last
    if term in _CUT_BY and STAGES.get(layout.strategy, 0) >= _CUT_BY[term]:
        return "more data, tensor or pipeline devices"
    return _LESS.get(term, "another layout")


def _lost(terms: Mapping[str, float]) -> tuple[str, float] | None:
    """Return the longest part of a step that computes nothing new; None where there is none."""
    others = {name: taken for name, taken in terms.items() if name not in ("forward", "backward") and taken > 0}
    if not others:
        return None
    name = max(others, key=lambda term: others[term])
    return name, others[name]


# A note of a plan that nobody has told the number of devices; it stands beside the layout.
ONE_REPLICA: Final = (
    "neither the replicas (parallel.data, --data) nor --devices are given: one is planned; --devices N plans for N"
)
WIDTH: Final = 60  # characters of the bar of a memory
PAIRS: Final = 0.05  # of MFU or HFU, that attention to later tokens may make without a word
DEGREES: Final = ("data", "pipeline", "tensor", "context", "expert", "servers")  # fields of a layout
_HEAD: Final = 11  # of the column of headings
_NAME: Final = 13  # of that of terms
_LETTERS: Final = {
    "parameters": "P",
    "gradients": "G",
    "optimizer": "O",
    "activations": "A",
    "messages": "M",
    "scratch": "S",
    "reserved": "R",
}


def summary(estimate: PlanEstimate, description: ModelDescription, cluster: Cluster) -> str:
    """Return the answer of a plan in six lines: model, layout, memory, step, run, and how to see the rest."""
    memory, run, layout = estimate.memory, estimate.run, estimate.layout
    each, unit = _samples_or_tokens(estimate)
    rate = f"{figures(each / estimate.step_s)} {unit}/s, MFU {share(estimate.mfu)}"
    spare = memory.limit_bytes - memory.bytes
    verdict = f"fits, {nbytes(spare)} free" if memory.fits else f"DOES NOT FIT, {nbytes(-spare)} too much"
    largest = f"mostly {memory.breaks_first}"
    limited = ", limited to the best published" if estimate.is_capped else ""
    if math.isfinite(run.wall_s):
        costs = [f"{figures(layout.devices * run.wall_s / 3600)} device hours"]
        costs += [joules(run.joules)] if estimate.energy.terms else []
        costs += [f"{figures(run.price, 4)} {run.currency}".rstrip()] if run.price is not None else []
        course = f"{seconds(run.wall_s)} for {counted(run.steps, 'step')}: {', '.join(costs)}"
    else:
        course = f"NEVER ENDS: a failure every {seconds(run.mtbf_s)} on {counted(nodes_of(layout, cluster), 'node')}"
    degrees = [f"{name} {getattr(layout, name):,}" for name in DEGREES if getattr(layout, name) > 1]
    where = f"{' x '.join(degrees)} on {counted(nodes_of(layout, cluster), 'node')}" if degrees else "one device"
    where += f" of {cluster.name}"
    if ONE_REPLICA in estimate.flags:
        where += " (--devices N plans more)"
    lines = {
        "model": model_line(estimate, description),
        "layout": f"{where}; {strategy_lines(layout, estimate.global_batch)}",
        "memory": f"{verdict}: {nbytes(memory.bytes)} of {nbytes(memory.limit_bytes)} on the fullest device, {largest}",
        "step": f"{seconds(estimate.step_s)}{between(estimate.step_range_s)}, {rate}{limited}",
        "run": course,
        "notes": f"{len(estimate.flags)}; --explain prints them, the terms of memory, step and energy, and advice",
    }
    return "\n".join(f"{heading:{_HEAD}}{line}" for heading, line in lines.items())


def _samples_or_tokens(estimate: PlanEstimate) -> tuple[int, str]:
    """Return the number of tokens of a step and "tokens", or of samples if a sample is one token."""
    if estimate.tokens != estimate.global_batch:
        return estimate.tokens, "tokens"
    return estimate.global_batch, "samples"


def text(estimate: PlanEstimate, description: ModelDescription, cluster: Cluster) -> str:
    """Return every part of a plan in lines of a terminal (local)."""
    lines = [
        *([f"LIMITED: {flag}" for flag in estimate.flags if flag.startswith("MFU is limited")]),
        *_section("model", [model_line(estimate, description)]),
        *_section(
            "layout", [*layout_lines(estimate, cluster), *(flag for flag in estimate.flags if flag == ONE_REPLICA)]
        ),
        "",
        *_section("memory", memory_lines(estimate.memory, estimate.layout)),
        "",
        *_section("step", step_lines(estimate)),
        "",
        *_section("run", run_lines(estimate, cluster)),
        *_section("energy", energy_lines(estimate, cluster)),
        *_section("breaks", breaks_lines(estimate)),
        *_section("flags", (flag for flag in estimate.flags if flag != ONE_REPLICA)),
    ]
    return "\n".join(line.rstrip() for line in lines)


def one_line(estimate: PlanEstimate, cluster: Cluster) -> str:
    """Return a plan in one line: what it needs of a device, a step, the run, its energy (local)."""
    memory, run = estimate.memory, estimate.run
    verdict = "fits" if memory.fits else "DOES NOT FIT"
    limited = f" (MFU limited to the published {share(estimate.mfu)})" if estimate.is_capped else ""
    parts = [
        f"{verdict}: {nbytes(memory.bytes)} of {nbytes(memory.limit_bytes)}",
        f"{seconds(estimate.step_s)}{between(estimate.step_range_s)} a step{limited}",
        f"{seconds(run.wall_s)} for {counted(run.steps, 'step')}",
    ]
    if math.isfinite(run.joules):
        parts.append(joules(run.joules))
    if run.carbon_g is not None and math.isfinite(run.carbon_g):
        parts.append(grams(run.carbon_g))
    return f"{'; '.join(parts)} ({cluster.name})"


def model_line(estimate: PlanEstimate, description: ModelDescription) -> str:
    """Return what is trained, and what a step of it takes (local)."""
    each = f" = {large_count(estimate.tokens)} tokens" if description.tokens > 1 else ""
    size = f"{large_count(estimate.parameters, 4)} parameters"
    return f"{description.name}, {size}; {estimate.global_batch:,} samples{each} a step"


def layout_lines(estimate: PlanEstimate, cluster: Cluster) -> list[str]:
    """Return the degrees, what they are made of, and where that is (local)."""
    layout = estimate.layout
    boxes = -(-layout.devices // cluster.node.devices)
    place = f"{counted(layout.devices, 'device')} on {counted(boxes, 'node')} of {cluster.name}"
    each = f"{cluster.node.devices} x {cluster.device.name} a node"
    return [f"{equation(layout)}: {place} ({each})", strategy_lines(layout, estimate.global_batch)]


def equation(layout: ParallelLayout) -> str:
    """Return the product of the degrees: 64 = data 2 x pipeline 4 x tensor 8 x context 1 (local)."""
    product = (
        f"data {layout.data} x pipeline {layout.pipeline} x tensor {layout.tensor} x context {layout.context}"
        f"{f' + servers {layout.servers}' if layout.servers else ''}"
    )
    experts = f", experts over {layout.expert}" if layout.expert > 1 else ""
    return f"{layout.devices:,} = {product}{experts}"


def strategy_lines(layout: ParallelLayout, global_batch: int) -> str:
    """Return how the devices share the work, beside the degrees (local)."""
    count = layout.microbatches(global_batch)
    samples = counted(layout.microbatch, "sample")
    schedule = f"{layout.schedule} over " if layout.pipeline > 1 else ""
    parts = [layout.strategy.replace("_", " "), f"{schedule}{counted(count, 'micro-batch')} of {samples}"]
    if layout.chunks > 1:
        parts.append(f"{layout.chunks} chunks each")
    return f"{', '.join([*parts, *layout.options, layout.precision])}; kernels and memory of {layout.implementation}"


def memory_lines(memory: MemoryEstimate, layout: ParallelLayout) -> list[str]:
    """Return whether it fits, a bar of it, and its terms (local)."""
    where = f", of stage {memory.stage}" if layout.pipeline > 1 else ""
    spare = memory.limit_bytes - memory.bytes
    verdict = f"fits, {bytes_in_both(spare)} left" if memory.fits else f"DOES NOT FIT, {bytes_in_both(-spare)} too much"
    lines = [
        f"{verdict}: {bytes_in_both(memory.bytes)} of {bytes_in_both(memory.limit_bytes)} on the fullest device{where}",
        bar(memory),
    ]
    for name, size in memory.terms.items():
        if size:
            part = f"{share(size / memory.bytes):>7}"
            lines.append(f"{_letter(name)} {name:{_NAME}}{nbytes(size):>10} {part}")
    return [*lines, f"rule: {memory.rule}"]


def bar(memory: MemoryEstimate) -> str:
    """Return the memory as letters of its terms, a dot for what is free and a bar where the limit is (local).

    The longer of what is needed and of the limit is `WIDTH` characters.
    """
    scale = WIDTH / max(memory.bytes, memory.limit_bytes)
    drawn, ends = "", 0.0
    for name, size in memory.terms.items():
        ends += size * scale
        drawn += _letter(name) * (round(ends) - len(drawn))
    limit = round(memory.limit_bytes * scale)
    drawn += "." * (limit - len(drawn))
    return f"[{drawn[:limit]}|{drawn[limit:]}"


def _letter(name: str) -> str:
    return _LETTERS.get(name, name[:1].lower())


def step_lines(estimate: PlanEstimate) -> list[str]:
    """Return the terms of a step, the rates that follow, and what devices send (local)."""
    timing = estimate.timing
    each, what = _samples_or_tokens(estimate)
    lines = [f"{seconds(estimate.step_s)}{between(estimate.step_range_s)}, {figures(each / estimate.step_s)} {what}/s"]
    for name, taken in timing.terms.items():
        if taken:
            part = taken / estimate.step_s
            lines.append(f"{name:{_NAME}}{seconds(taken):>10} {share(part):>7}  {'#' * round(40 * part)}")
    if timing.hidden_s:
        lines.append(f"behind computation: {seconds(timing.hidden_s)} of messages")
    lines += rates(estimate)
    if estimate.layout.pipeline > 1:
        lines.append(
            f"bubble {share(timing.bubble)} of the span of the longest stage, as papers count it: its waits for "
            "slower stages and for messages are in it, too"
        )
    return lines + _sent(timing)


def rates(estimate: PlanEstimate) -> list[str]:
    """Return MFU and HFU, and what they are a device; and both over the pairs of tokens that are looked at (local)."""
    work, devices = estimate.work, estimate.layout.devices - estimate.layout.servers
    model = decimal(work.model_flops / estimate.step_s / devices, "FLOP/s")
    hardware = decimal(work.hardware_flops / estimate.step_s / devices, "FLOP/s")
    peak = decimal(estimate.peak_flops / devices, "FLOP/s")
    lines = [f"MFU {share(estimate.mfu)} ({model} of {peak} a device), HFU {share(estimate.hfu)} ({hardware})"]
    if (
        abs(estimate.mfu - estimate.exact_mfu) > PAIRS * estimate.mfu
        or abs(estimate.hfu - estimate.exact_hfu) > PAIRS * estimate.hfu
    ):
        lines.append(
            "attention over all pairs, as published; over those that are looked at MFU "
            f"{share(estimate.exact_mfu)}, HFU {share(estimate.exact_hfu)}"
        )
    return lines


def _sent(timing: TimeEstimate) -> list[str]:
    """Return what a device sends in a step on each axis, and by which algorithm."""
    parts = []
    for axis, size in timing.bytes.items():
        if size:
            how = timing.algorithms.get(axis, "")
            parts.append(f"{axis} {nbytes(size)}{f' ({how})' if how else ''}")
    return [f"a device sends {', '.join(parts)}"] if parts else []


def _section(heading: str, lines: Iterable[str]) -> list[str]:
    wrapped_lines = [part for line in lines for part in wrapped(line, width=LINE - _HEAD)]
    heads = [f"{heading:{_HEAD}}", *[" " * _HEAD] * (len(wrapped_lines) - 1)]
    return [head + line for head, line in zip(heads, wrapped_lines, strict=False)]
