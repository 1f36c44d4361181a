"""Text of one plan for a terminal: `summary` has six lines, `text` has every term and warning."""

import math
from collections.abc import Callable, Iterable
from typing import Final

from hpcdist.planner.cluster.hardware import Cluster
from hpcdist.planner.estimate import MemoryEstimate, PlanEstimate
from hpcdist.planner.layout import ParallelLayout
from hpcdist.planner.model.description import ModelDescription
from hpcdist.planner.plan import devices_held, nodes_of
from hpcdist.planner.report.quantities import (
    DEGREES,
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
from hpcdist.strategies.data.config import STAGES

_LESS: Final = {  # memory term -> advice to reduce it
    "parameters": "a larger --tensor or --pipeline, or --zero 3",
    "gradients": "a larger --tensor or --pipeline, or --zero 2 or 3",
    "optimizer": "--zero 1, 2 or 3, which shard it over the data ranks",
    "messages": "a larger --tensor or --pipeline",
    "reserved": "a device with more memory",
}
_MIN_ZERO_STAGE: Final = {"parameters": 3, "gradients": 2, "optimizer": 1}  # lowest ZeRO stage that shards a term
_FASTER: Final = {  # term of a step -> advice to reduce it
    "forward": "more devices, or larger matrix products",
    "backward": "more devices, or larger matrix products",
    "recompute": "less recomputation (--recompute), if the memory suffices",
    "tensor": "tensor groups inside a node, or a smaller --tensor",
    "context": "a smaller --context-ranks",
    "expert": "a smaller --expert-ranks, or faster links",
    "pipeline": "fewer or larger micro-batches (--microbatch), or faster links",
    "bubble": "more micro-batches, a smaller --pipeline, or a --schedule with a smaller bubble",
    "data": "a larger --batch, --compression, or exchanges that overlap with computation",
    "rows": "tensor groups inside a node, or no --sequence-parallel",
    "stragglers": "fewer nodes, or the replacement of slow nodes",
    "update": "ZeRO (--zero), which shards the update over the data ranks",
    "input": "faster storage, or prefetching of samples",
    "unproven": "a measurement of the devices (hpcdist plan calibrate)",
    "correction": "--zero 1 or 2, or a larger --tensor and --pipeline",
}
# Flag of a plan without a number of devices. It is printed next to the layout.
ONE_REPLICA: Final = (
    "one replica is planned, because neither the number of replicas (parallel.data, --data) nor --devices is given; "
    "--devices N plans for N devices"
)
WIDTH: Final = 60  # characters of the memory bar
PAIRS: Final = 0.05  # relative difference from which on the MFU and HFU of visible pairs are printed, too
_HEAD: Final = 11  # width of the column of headings
_NAME: Final = 13  # width of the column of terms


def run_lines(estimate: PlanEstimate, cluster: Cluster) -> list[str]:
    """Return lines about duration, device hours, checkpoints and failures of the planned run."""
    run = estimate.run
    if not math.isfinite(run.wall_s):
        costs = f"a checkpoint takes {seconds(run.save_s)}, a restart {seconds(cluster.failures.restart_s)}"
        return [
            f"{counted(run.steps, 'step')} NEVER END: a failure every {seconds(run.mtbf_s)} on this many nodes, {costs}"
        ]
    tokens = f", {large_count(run.steps * estimate.tokens)} tokens" if estimate.tokens != estimate.global_batch else ""
    lines = [f"{counted(run.steps, 'step')}{tokens}: {seconds(run.wall_s)}, of which {seconds(run.work_s)} are steps"]
    devices = estimate.layout.devices
    count, noun = _samples_or_tokens(estimate)
    hours = figures(devices * run.wall_s / 3600)
    rate = figures(count / estimate.step_s / devices)
    lines.append(f"{counted(devices, 'device')}: {hours} device hours; {rate} {noun}/s a device")
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
    """Return lines about energy, carbon emissions and price of the planned run, and about energy per step."""
    energy, run, site = estimate.energy, estimate.run, cluster.site
    parts = ", ".join(f"{name} {share(size / energy.joules)}" for name, size in energy.terms.items() if size)
    endless = not math.isfinite(run.wall_s)
    whole = "" if endless else f"{joules(run.joules)} for the run, "
    lines = [
        f"{whole}{joules(energy.joules)} a step: {parts}",
        f"a device draws {figures(energy.device_w)} W of {figures(cluster.device.peak_w)} W",
        *idle_devices_line(estimate.layout, cluster),
    ]
    if site.pue is None:
        lines.append("cooling is not counted: the cluster has no site.pue")
    if endless:
        return lines
    if run.carbon_g is not None:
        source = f", {site.carbon_source}" if site.carbon_source else ""
        lines.append(f"{grams(run.carbon_g)} at {figures(site.carbon_g_per_kwh or 0.0)} g/kWh{source}")
    else:
        lines.append("carbon: unknown, the cluster has no site.carbon_g_per_kwh")
    if run.price is not None:
        lines.append(f"price {figures(run.price, 4)} {run.currency}".rstrip())
    else:
        lines.append("price: unknown, the cluster has no site.device_hour_price")
    return lines


def idle_devices_line(layout: ParallelLayout, cluster: Cluster) -> list[str]:
    """Return [line about unused devices on the nodes of ``layout``], or [] if all devices are used."""
    held = devices_held(layout, cluster)
    unused = held - layout.devices
    if not unused:
        return []
    nodes = counted(nodes_of(layout, cluster), "whole node")
    return [f"energy and price count {nodes}: {unused:,} of {held:,} devices {'is' if unused == 1 else 'are'} not used"]


def advice_lines(estimate: PlanEstimate) -> list[str]:
    """Return lines that advise how to reduce the largest memory term, the largest step overhead, and failures."""
    memory, largest, slowdown = estimate.memory, estimate.memory.largest_term, estimate.run.slowdown
    fraction = share(memory.terms[largest] / memory.limit_bytes)
    lines = [f"memory: {largest}, {fraction} of the limit; less with {_less(largest, estimate)}"]
    overheads = {name: term_s for name, term_s in estimate.timing.terms.items() if name not in ("forward", "backward")}
    name = max(overheads, key=lambda term: overheads[term], default="")
    if overheads.get(name, 0.0) > 0:
        advice = _FASTER.get(name, "another layout")
        lines.append(f"time: {name}, {share(overheads[name] / estimate.step_s)} of a step; shorter with {advice}")
    if slowdown > 1.05:
        lines.append(f"failures: {share(1 - 1 / slowdown)} of the run; faster checkpoints and restarts help")
    return lines


def _less(term: str, estimate: PlanEstimate) -> str:
    layout, is_activations = estimate.layout, term == "activations"
    options = {
        "--recompute full": is_activations and layout.recompute != "full",
        "a smaller --microbatch": layout.microbatch > 1,
        "--sequence-parallel": is_activations and layout.tensor > 1 and not layout.sequence_parallel,
        "a larger --tensor": True,
        "a larger --context-ranks": estimate.tokens != estimate.global_batch,
    }
    if is_activations or term == "scratch":
        *others, last = [option for option, is_unused in options.items() if is_unused]
        return f"{', '.join(others)} or {last}" if others else last
    if STAGES.get(layout.strategy, 0) >= _MIN_ZERO_STAGE.get(term, math.inf):
        return "a larger --data, --tensor or --pipeline"
    return _LESS.get(term, "another layout")


def summary(estimate: PlanEstimate, description: ModelDescription, cluster: Cluster) -> str:
    """Return a text of six lines about the plan ``estimate``: model, layout, memory, step, run, number of notes."""
    memory, run, layout = estimate.memory, estimate.run, estimate.layout
    count, noun = _samples_or_tokens(estimate)
    rate = f"{figures(count / estimate.step_s)} {noun}/s, MFU {share(estimate.mfu)}"
    limited = ", limited to the best published" if estimate.is_capped else ""
    nodes = counted(nodes_of(layout, cluster), "node")
    if math.isfinite(run.wall_s):
        costs = [f"{figures(layout.devices * run.wall_s / 3600)} device hours"]
        costs += [joules(run.joules)] if estimate.energy.terms else []
        costs += [f"{figures(run.price, 4)} {run.currency}".rstrip()] if run.price is not None else []
        course = f"{seconds(run.wall_s)} for {counted(run.steps, 'step')}: {', '.join(costs)}"
    else:
        course = f"NEVER ENDS: a failure every {seconds(run.mtbf_s)} on {nodes}"
    degrees = [f"{name} {getattr(layout, name):,}" for name in DEGREES if getattr(layout, name) > 1]
    split = f"{' x '.join(degrees)} on {nodes}" if degrees else "one device"
    hint = " (--devices N plans more)" if ONE_REPLICA in estimate.flags else ""
    lines = {
        "model": model_line(estimate, description),
        "layout": f"{split} of {cluster.name}{hint}; {strategy_lines(layout, estimate.global_batch)}",
        "memory": f"{_fit(memory, nbytes, 'free')}, mostly {memory.largest_term}",
        "step": f"{seconds(estimate.step_s)}{between(estimate.step_range_s)}, {rate}{limited}",
        "run": course,
        "notes": f"{len(estimate.flags)}; --explain prints them, the terms of memory, step and energy, and advice",
    }
    return "\n".join(f"{heading:{_HEAD}}{line}" for heading, line in lines.items())


def _fit(memory: MemoryEstimate, format_bytes: Callable[[float], str], noun: str) -> str:
    spare = memory.limit_bytes - memory.bytes
    verdict = f"fits, {format_bytes(spare)} {noun}" if memory.fits else f"DOES NOT FIT, {format_bytes(-spare)} too much"
    return f"{verdict}: at most {format_bytes(memory.bytes)} of {format_bytes(memory.limit_bytes)} a device"


def _samples_or_tokens(estimate: PlanEstimate) -> tuple[int, str]:
    if estimate.tokens != estimate.global_batch:
        return estimate.tokens, "tokens"
    return estimate.global_batch, "samples"


def text(estimate: PlanEstimate, description: ModelDescription, cluster: Cluster) -> str:
    """Return a text for a terminal with all details of the plan ``estimate`` of the model ``description``."""
    layout = estimate.layout
    nodes = f"{counted(nodes_of(layout, cluster), 'node')} of {cluster.name}"
    devices = f"{equation(layout)}: {counted(layout.devices, 'device')} on {nodes}"
    devices += f" ({cluster.node.devices} x {cluster.device.name} a node)"
    limited = [f"LIMITED: {flag}" for flag in estimate.flags if flag.startswith("MFU is limited")]
    hint = [flag for flag in estimate.flags if flag == ONE_REPLICA]
    notes = [flag for flag in estimate.flags if flag != ONE_REPLICA]
    lines = [
        *limited,
        *_section("model", [model_line(estimate, description)]),
        *_section("layout", [devices, strategy_lines(layout, estimate.global_batch), *hint]),
        "",
        *_section("memory", memory_lines(estimate.memory, layout)),
        "",
        *_section("step", step_lines(estimate)),
        "",
        *_section("run", run_lines(estimate, cluster)),
        *_section("energy", energy_lines(estimate, cluster)),
        *_section("limits", advice_lines(estimate)),
        *_section("flags", notes),
    ]
    return "\n".join(line.rstrip() for line in lines)


def one_line(estimate: PlanEstimate, cluster: Cluster) -> str:
    """Return one line with memory use, step time, run time, energy and carbon emissions of the plan ``estimate``."""
    memory, run = estimate.memory, estimate.run
    limited = f" (MFU limited to the published {share(estimate.mfu)})" if estimate.is_capped else ""
    parts = [
        f"{'fits' if memory.fits else 'DOES NOT FIT'}: {nbytes(memory.bytes)} of {nbytes(memory.limit_bytes)}",
        f"{seconds(estimate.step_s)}{between(estimate.step_range_s)} a step{limited}",
        f"{seconds(run.wall_s)} for {counted(run.steps, 'step')}",
    ]
    parts += [joules(run.joules)] if math.isfinite(run.joules) else []
    parts += [grams(run.carbon_g)] if run.carbon_g is not None and math.isfinite(run.carbon_g) else []
    return f"{'; '.join(parts)} ({cluster.name})"


def model_line(estimate: PlanEstimate, description: ModelDescription) -> str:
    """Return a line with the model name, and the numbers of parameters, and of samples and tokens per step."""
    tokens = f" = {large_count(estimate.tokens)} tokens" if description.tokens > 1 else ""
    size = f"{large_count(estimate.parameters, 4)} parameters"
    return f"{description.name}, {size}; {estimate.global_batch:,} samples{tokens} a step"


def equation(layout: ParallelLayout) -> str:
    """Return a text of the parallel sizes, such as "8 = data 2 x pipeline 4 x tensor 1 x context 1"."""
    product = " x ".join(f"{name} {getattr(layout, name)}" for name in DEGREES[:4])
    servers = f" + servers {layout.servers}" if layout.servers else ""
    experts = f", experts over {layout.expert}" if layout.expert > 1 else ""
    return f"{layout.devices:,} = {product}{servers}{experts}"


def strategy_lines(layout: ParallelLayout, global_batch: int) -> str:
    """Return a line with strategy, schedule, micro-batches per step, options and precision of ``layout``."""
    batches = f"{counted(layout.microbatches(global_batch), 'micro-batch')} of {counted(layout.microbatch, 'sample')}"
    schedule = f"{layout.schedule} over " if layout.pipeline > 1 else ""
    parts = [layout.strategy.replace("_", " "), f"{schedule}{batches}"]
    if layout.chunks > 1:
        parts.append(f"{layout.chunks} chunks each")
    return f"{', '.join([*parts, *layout.options, layout.precision])}; kernels and memory of {layout.implementation}"


def memory_lines(memory: MemoryEstimate, layout: ParallelLayout) -> list[str]:
    """Return lines about memory use: fits or not, bar chart, bytes of each term, and bytes per parameter as formula."""
    stage = f" (stage {memory.stage})" if layout.pipeline > 1 else ""
    lines = [f"{_fit(memory, bytes_in_both, 'left')}{stage}", bar(memory)]
    for name, size in memory.terms.items():
        if size:
            lines.append(f"{name[0].upper()} {name:{_NAME}}{nbytes(size):>10} {share(size / memory.bytes):>7}")
    return [*lines, f"rule: {memory.rule}"]


def bar(memory: MemoryEstimate) -> str:
    """Return a bar chart of memory as one line, such as "[PPGGOOOA....|".

    A letter is the initial of a memory term, "." is free memory, and "|" marks the memory limit.
    """
    scale = WIDTH / max(memory.bytes, memory.limit_bytes)
    drawn, end = "", 0.0
    for name, size in memory.terms.items():
        end += size * scale
        drawn += name[0].upper() * (round(end) - len(drawn))
    limit = round(memory.limit_bytes * scale)
    drawn = drawn.ljust(limit, ".")
    return f"[{drawn[:limit]}|{drawn[limit:]}"


def step_lines(estimate: PlanEstimate) -> list[str]:
    """Return lines about a step: time, phases, overlapped messages, MFU, pipeline bubble and sent bytes."""
    timing = estimate.timing
    count, noun = _samples_or_tokens(estimate)
    lines = [f"{seconds(estimate.step_s)}{between(estimate.step_range_s)}, {figures(count / estimate.step_s)} {noun}/s"]
    for name, term_s in timing.terms.items():
        if term_s:
            fraction = term_s / estimate.step_s
            lines.append(f"{name:{_NAME}}{seconds(term_s):>10} {share(fraction):>7}  {'#' * round(40 * fraction)}")
    if timing.hidden_s:
        lines.append(f"messages that overlap with computation: {seconds(timing.hidden_s)}")
    work, devices = estimate.work, estimate.layout.devices - estimate.layout.servers
    model = decimal(work.model_flops / estimate.step_s / devices, "FLOP/s")
    hardware = decimal(work.hardware_flops / estimate.step_s / devices, "FLOP/s")
    peak = decimal(estimate.peak_flops / devices, "FLOP/s")
    lines.append(f"MFU {share(estimate.mfu)} ({model} of {peak} a device), HFU {share(estimate.hfu)} ({hardware})")
    if (
        abs(estimate.mfu - estimate.exact_mfu) > PAIRS * estimate.mfu
        or abs(estimate.hfu - estimate.exact_hfu) > PAIRS * estimate.hfu
    ):
        lines.append(
            "attention counts all query-key pairs, as in publications; without masked pairs: MFU "
            f"{share(estimate.exact_mfu)}, HFU {share(estimate.exact_hfu)}"
        )
    if estimate.layout.pipeline > 1:
        lines.append(
            f"bubble: {share(timing.bubble)} of the time of the longest stage, as in publications: it includes waits "
            "for slower stages and for messages"
        )
    sent = []
    for axis, size in timing.bytes.items():
        if size:
            algorithm = timing.algorithms.get(axis, "")
            sent.append(f"{axis} {nbytes(size)}{f' ({algorithm})' if algorithm else ''}")
    return [*lines, *([f"a device sends {', '.join(sent)}"] if sent else [])]


def _section(heading: str, lines: Iterable[str]) -> list[str]:
    wrapped_lines = [text for line in lines for text in wrapped(line, width=LINE - _HEAD)]
    heads = [f"{heading:{_HEAD}}", *[" " * _HEAD] * (len(wrapped_lines) - 1)]
    return [head + line for head, line in zip(heads, wrapped_lines, strict=False)]
