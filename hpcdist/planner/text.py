"""A plan for a reader at a login node: does it fit, how long, how much, and what breaks first."""

import math
from collections.abc import Iterable
from typing import Final

from hpcdist.planner.cluster import Cluster
from hpcdist.planner.description import Description
from hpcdist.planner.estimate import Estimate, Memory, Timing
from hpcdist.planner.layout import Layout
from hpcdist.planner.text_run import breaks_lines, energy_lines, run_lines
from hpcdist.planner.text_units import (
    LINE,
    between,
    both,
    counted,
    decimal,
    figures,
    grams,
    joules,
    many,
    nbytes,
    seconds,
    share,
    wrapped,
)

WIDTH: Final = 60  # characters of the bar of a memory
PAIRS: Final = 0.05  # of MFU or HFU, that attention to later tokens may make without a word
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


def text(found: Estimate, description: Description, cluster: Cluster) -> str:
    """Return all of a plan in lines of a terminal (local)."""
    lines = [
        *([f"LIMITED: {flag}" for flag in found.flags if flag.startswith("MFU is limited")]),
        *_section("model", [model_line(found, description)]),
        *_section("layout", layout_lines(found, cluster)),
        "",
        *_section("memory", memory_lines(found.memory, found.layout)),
        "",
        *_section("step", step_lines(found)),
        "",
        *_section("run", run_lines(found, cluster)),
        *_section("energy", energy_lines(found, cluster)),
        *_section("breaks", breaks_lines(found)),
        *_section("flags", found.flags),
    ]
    return "\n".join(line.rstrip() for line in lines)


def short(found: Estimate, cluster: Cluster) -> str:
    """Return a plan in one line: what it needs of a device, a step, the run, its energy (local)."""
    memory, run = found.memory, found.run
    verdict = "fits" if memory.fits else "DOES NOT FIT"
    limited = f" (MFU limited to the published {share(found.mfu)})" if found.is_capped else ""
    parts = [
        f"{verdict}: {nbytes(memory.bytes)} of {nbytes(memory.limit_bytes)}",
        f"{seconds(found.step_s)}{between(found.step_range_s)} a step{limited}",
        f"{seconds(run.wall_s)} for {counted(run.steps, 'step')}",
    ]
    if math.isfinite(run.joules):
        parts.append(joules(run.joules))
    if run.carbon_g is not None and math.isfinite(run.carbon_g):
        parts.append(grams(run.carbon_g))
    return f"{'; '.join(parts)} ({cluster.name})"


def model_line(found: Estimate, description: Description) -> str:
    """Return what is trained, and what a step of it takes (local)."""
    each = f" = {many(found.tokens)} tokens" if description.tokens > 1 else ""
    size = f"{many(found.parameters, 4)} parameters"
    return f"{description.name}, {size}; {found.global_batch:,} samples{each} a step"


def layout_lines(found: Estimate, cluster: Cluster) -> list[str]:
    """Return the degrees, what they are made of, and where that is (local)."""
    layout = found.layout
    boxes = -(-layout.devices // cluster.node.devices)
    place = f"{counted(layout.devices, 'device')} on {counted(boxes, 'node')} of {cluster.name}"
    each = f"{cluster.node.devices} x {cluster.device.name} a node"
    return [f"{equation(layout)}: {place} ({each})", ways(layout, found.global_batch)]


def equation(layout: Layout) -> str:
    """Return the product of the degrees: 64 = data 2 x pipeline 4 x tensor 8 x context 1 (local)."""
    product = (
        f"data {layout.data} x pipeline {layout.pipeline} x tensor {layout.tensor} x context {layout.context}"
        f"{f' + servers {layout.servers}' if layout.servers else ''}"
    )
    experts = f", experts over {layout.expert}" if layout.expert > 1 else ""
    return f"{layout.devices:,} = {product}{experts}"


def ways(layout: Layout, global_batch: int) -> str:
    """Return how the devices share the work, beside the degrees (local)."""
    count = layout.microbatches(global_batch)
    samples = counted(layout.microbatch, "sample")
    schedule = f"{layout.schedule} over " if layout.pipeline > 1 else ""
    parts = [layout.strategy.replace("_", " "), f"{schedule}{counted(count, 'micro-batch')} of {samples}"]
    if layout.chunks > 1:
        parts.append(f"{layout.chunks} chunks each")
    if layout.recompute != "none":
        parts.append(f"{layout.recompute} recomputation")
    if layout.sequence_parallel:
        parts.append("sequence parallel")
    if layout.compression != "none":
        parts.append(f"gradients as {layout.compression}")
    parts.append(layout.precision)
    return f"{', '.join(parts)}; kernels and memory of {layout.implementation}"


def memory_lines(memory: Memory, layout: Layout) -> list[str]:
    """Return whether it fits, a bar of it, and its terms (local)."""
    where = f", of stage {memory.stage}" if layout.pipeline > 1 else ""
    spare = memory.limit_bytes - memory.bytes
    verdict = f"fits, {both(spare)} left" if memory.fits else f"DOES NOT FIT, {both(-spare)} too much"
    lines = [
        f"{verdict}: {both(memory.bytes)} of {both(memory.limit_bytes)} on the fullest device{where}",
        bar(memory),
    ]
    for name, size in memory.terms.items():
        if size:
            part = f"{share(size / memory.bytes):>7}"
            lines.append(f"{_letter(name)} {name:{_NAME}}{nbytes(size):>10} {part}")
    return [*lines, f"rule: {memory.rule}"]


def bar(memory: Memory, width: int = WIDTH) -> str:
    """Return the memory as letters of its terms, a dot for what is free and a bar where the limit is (local).

    The longer of what is needed and of the limit is ``width`` characters.
    """
    scale = width / max(memory.bytes, memory.limit_bytes)
    drawn, ends = "", 0.0
    for name, size in memory.terms.items():
        ends += size * scale
        drawn += _letter(name) * (round(ends) - len(drawn))
    limit = round(memory.limit_bytes * scale)
    drawn += "." * (limit - len(drawn))
    return f"[{drawn[:limit]}|{drawn[limit:]}"


def _letter(name: str) -> str:
    return _LETTERS.get(name, name[:1].lower())


def step_lines(found: Estimate) -> list[str]:
    """Return the terms of a step, the rates that follow, and what devices send (local)."""
    timing = found.timing
    each, what = (found.tokens, "tokens") if found.tokens != found.global_batch else (found.global_batch, "samples")
    lines = [f"{seconds(found.step_s)}{between(found.step_range_s)}, {figures(each / found.step_s)} {what}/s"]
    for name, taken in timing.terms.items():
        if taken:
            part = taken / found.step_s
            lines.append(f"{name:{_NAME}}{seconds(taken):>10} {share(part):>7}  {'#' * round(40 * part)}")
    if timing.hidden_s:
        lines.append(f"behind computation: {seconds(timing.hidden_s)} of the exchange")
    lines += rates(found)
    if found.layout.pipeline > 1:
        lines.append(
            f"bubble {share(timing.bubble)} of the span of the longest stage, as papers count it: its waits for "
            "slower stages and for messages are in it, too"
        )
    return lines + _sent(timing)


def rates(found: Estimate) -> list[str]:
    """Return MFU and HFU, and what they are a device; and both over the pairs of tokens that are looked at (local)."""
    work, devices = found.work, found.layout.devices - found.layout.servers
    model = decimal(work.model_flops / found.step_s / devices, "FLOP/s")
    hardware = decimal(work.hardware_flops / found.step_s / devices, "FLOP/s")
    peak = decimal(found.peak_flops / devices, "FLOP/s")
    lines = [f"MFU {share(found.mfu)} ({model} of {peak} a device), HFU {share(found.hfu)} ({hardware})"]
    if abs(found.mfu - found.exact_mfu) > PAIRS * found.mfu or abs(found.hfu - found.exact_hfu) > PAIRS * found.hfu:
        lines.append(
            "attention over all pairs, as published; over those that are looked at MFU "
            f"{share(found.exact_mfu)}, HFU {share(found.exact_hfu)}"
        )
    return lines


def _sent(timing: Timing) -> list[str]:
    """Return what a device sends in a step on each axis, and by which algorithm."""
    said = []
    for axis, size in timing.bytes.items():
        if size:
            how = timing.algorithms.get(axis, "")
            said.append(f"{axis} {nbytes(size)}{f' ({how})' if how else ''}")
    return [f"a device sends {', '.join(said)}"] if said else []


def _section(heading: str, lines: Iterable[str]) -> list[str]:
    found = [part for line in lines for part in wrapped(line, width=LINE - _HEAD)]
    heads = [f"{heading:{_HEAD}}", *[" " * _HEAD] * (len(found) - 1)]
    return [head + line for head, line in zip(heads, found, strict=False)]
