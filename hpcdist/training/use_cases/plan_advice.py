"""Advice from plans: the smallest change that fits into memory, and the likely causes of a slow training.

A cause is a change of the plan, such as recomputation or a slower network. `causes` plans each change, and sorts the
causes by how close the planned speed is to the measured speed.
"""

import math
import re
import statistics
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Any, Final

from hpcdist.errors import DataError, StorageError
from hpcdist.planner import checks
from hpcdist.planner import plan as planner
from hpcdist.planner.cluster.hardware import Cluster
from hpcdist.planner.estimate import PlanEstimate
from hpcdist.planner.kernels import Megatron2022
from hpcdist.planner.layout import ParallelLayout, divisors
from hpcdist.planner.time.compute import unit_seconds
from hpcdist.telemetry.report import report
from hpcdist.training.use_cases.plan import PlanSubject

# Patterns of log lines -> True if the number is milliseconds of a step, False if it is tokens/s of a device.
_LINES: Final = {
    re.compile(r"\b(?:tps|wps): *([0-9][0-9,.]*)"): False,  # torchtitan
    re.compile(r"elapsed time per iteration \(ms\): *([0-9][0-9,.]*)"): True,  # Megatron-LM
}
_ANSI: Final = re.compile(r"\x1b\[[0-9;]*m")
VISIBLE: Final = 0.98  # a cause that keeps more than this share of the planned speed is left out
RARITY: Final = 0.1  # of a power limit, which is rarer than the other causes
POWER: Final = 0.7  # share of the speed of computation under a power limit
PCIE: Final = 25e9  # bytes/s between devices of a node without NVLink


@dataclass(frozen=True)
class Cause:
    """Possible cause of a slow training: a text, and the planned tokens/s of a device if it holds."""

    text: str
    advice: str
    tokens_per_device_s: float
    rarity: float = 0.0  # added to the distance between planned and measured speed, in logarithms


def measured_speed(path: Path, tokens: int, devices: int) -> float:
    """Return the tokens/s of a device in the log or run directory ``path``: in a log, the median of the second half.

    ``tokens``: tokens of a step, for logs that print the time of a step. Raises StorageError or DataError.
    """
    if path.is_dir():
        total = report(path).figures["tokens_per_s"]
        if not total:
            raise DataError(f"the run {path} has no speed in tokens/s; give the measured tokens/s with --measured")
        return float(total) / devices
    try:
        lines = _ANSI.sub("", path.read_text(encoding="utf-8", errors="replace"))
    except OSError as error:
        raise StorageError(f"the log {path} cannot be read: {error}; correct the path") from error
    for pattern, is_time in _LINES.items():
        numbers = [float(text.replace(",", "").rstrip(".")) for text in pattern.findall(lines)]
        if numbers:
            middle = statistics.median(numbers[len(numbers) // 2 :])
            return 1000 * tokens / middle / devices if is_time else middle
    raise DataError(
        f"the log {path} has no line of torchtitan (tps: N) or Megatron-LM (elapsed time per iteration (ms): N); give "
        "the measured tokens/s of a device with --measured"
    )


def speed(estimate: PlanEstimate) -> float:
    """Return the planned tokens/s of a device."""
    return estimate.tokens / estimate.step_s / estimate.layout.devices


def causes(subject: PlanSubject, cluster: Cluster, measured: float) -> tuple[PlanEstimate, tuple[Cause, ...]]:
    """Return (plan of ``subject``, causes that would slow it, the most likely cause first).

    ``measured``: measured tokens/s of a device.
    """

    def of(layout: ParallelLayout, on: Cluster) -> PlanEstimate:
        return planner.plan(subject.description, layout, on, subject.global_batch, 1)

    estimate = of(subject.layout, cluster)
    candidates = [
        Cause(text, advice, speed(of(layout, on))) for text, advice, layout, on in _changed(subject.layout, cluster)
    ]
    candidates += [
        Cause(text, advice, estimate.tokens / (estimate.step_s + seconds) / subject.layout.devices)
        for text, advice, seconds in _slower(subject, cluster)
    ]
    candidates.append(Cause(*_limited(estimate), rarity=RARITY))
    planned = speed(estimate)
    slow = [cause for cause in candidates if cause.tokens_per_device_s < VISIBLE * planned]

    def distance(cause: Cause) -> float:
        return abs(math.log(cause.tokens_per_device_s / measured)) + cause.rarity

    return estimate, tuple(sorted(slow, key=distance))


def _changed(layout: ParallelLayout, cluster: Cluster) -> Iterator[tuple[str, str, ParallelLayout, Cluster]]:
    if layout.recompute != "full":
        yield "full recomputation", "turn off activation checkpointing", replace(layout, recompute="full"), cluster
    yield "messages that do not overlap", "turn on overlap and prefetching", replace(layout, overlap=0.0), cluster
    if layout.implementation == "fsdp2-compiled":
        yield "no compiler", "use torch.compile", replace(layout, implementation="fsdp2"), cluster
    if layout.devices <= cluster.node.devices:
        first = replace(cluster.levels[0], bytes_per_s=min(PCIE, cluster.levels[0].bytes_per_s))
        alone = replace(cluster, levels=(first, *(replace(level, bytes_per_s=PCIE) for level in cluster.levels[1:])))
        yield "messages over PCIe instead of NVLink", "check NCCL_P2P_DISABLE and the topology", layout, alone
        return
    last = cluster.levels[-1]
    for factor, text in ((cluster.node.devices, "one NIC for a node"), (32, "TCP instead of RDMA between nodes")):
        slow = replace(last, bytes_per_s=last.bytes_per_s / factor, alone_bytes_per_s=0.0)
        on = replace(cluster, levels=(*cluster.levels[:-1], slow))
        yield f"a slow network: {text}", "measure it with nccl-tests; use HSDP or tensor ranks", layout, on


def _limited(estimate: PlanEstimate) -> tuple[str, str, float]:
    computing_s = sum(estimate.timing.terms.get(name, 0.0) for name in planner.COMPUTING)
    limited_s = estimate.step_s + (1 / POWER - 1) * computing_s
    return (
        "a power or clock limit",
        "read the clocks with nvidia-smi",
        estimate.tokens / limited_s / estimate.layout.devices,
    )


def _slower(subject: PlanSubject, cluster: Cluster) -> Iterator[tuple[str, str, float]]:
    layout = subject.layout
    if layout.kernels.tiles_attention and "bfloat16" in cluster.device.peak_flops:
        stored = layout.but(implementation=Megatron2022.name)
        added = 0.0
        for unit in subject.description.units:
            if unit.attention is not None:
                slow, fast = (unit_seconds(unit, each, cluster).attention_s for each in (stored, layout))
                added += unit.count * (sum(slow) - sum(fast))
        many = layout.microbatches(subject.global_batch)
        yield "attention is not fused", "use FlashAttention or SDPA", many * added / layout.pipeline


def smallest_change(subject: PlanSubject, cluster: Cluster) -> dict[str, Any]:
    """Return the layout options with which ``subject`` fits into the device memory, or {} if up to three do not help.

    Of the smallest sets of changed options, the result is the set with the shortest step.
    """
    layout = subject.layout
    changes: list[dict[str, Any]] = [{"strategy": f"zero{stage}"} for stage in (1, 2, 3)]
    changes += [{"recompute": name} for name in ("selective", "full") if layout.recompute == "none" or name == "full"]
    changes += [{"microbatch": size} for size in divisors(layout.microbatch)[:-1]]
    changes += [{"sequence_parallel": True}] if layout.tensor > 1 else []
    changes += [
        {axis: 2 * getattr(layout, axis), "data": layout.data // 2}
        for axis in ("tensor", "pipeline", "context")
        if layout.data % 2 == 0
    ]
    for count in (1, 2, 3):
        fitting: list[tuple[float, int, dict[str, Any]]] = []
        for chosen in combinations(changes, count):
            fields = {name: value for change in chosen for name, value in change.items()}
            if len(fields) < sum(map(len, chosen)):
                continue
            candidate = replace(layout, **fields)
            if subject.programs:
                is_split = candidate.pipeline * candidate.tensor * candidate.context * candidate.expert > 1
                candidate = replace(candidate, implementation=subject.programs[is_split])
            batch, description = subject.global_batch, subject.description
            if next(checks.shape_problems(description, candidate, cluster, batch), None) is not None:
                continue
            estimate = planner.plan(description, candidate, cluster, batch, 1)
            if estimate.memory.fits:
                fitting.append((estimate.step_s, len(fitting), fields))
        if fitting:
            fields = min(fitting)[2]
            return {{"context": "context_ranks"}.get(name, name): value for name, value in fields.items()}
    return {}
