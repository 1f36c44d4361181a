"""Markdown tables of the architectures study: how far each architecture scales, what stops it, and its costs.

Efficiency is goodput per device, relative to the best architecture at its best device count.
"""

from collections.abc import Sequence
from typing import Final

from benchmarks.architectures.catalogue import ARCHITECTURES, COUNTS, SERVED
from benchmarks.architectures.scaling import Found, Point, Stop, said
from hpcdist.reporting.table import markdown

SHOWN: Final = (64, 1024, 16384, 131072)
TIGHT: Final = 1024  # device count of the columns of bytes and memory
_WHY: Final = {
    "computing": "micro-batches too small for the device",
    "recompute": "activations computed again",
    "servers": "devices that only serve",
    "tensor": "messages inside of layers",
    "bubble": "bubble of the pipeline",
    "bandwidth": "bytes of the exchange",
    "latency": "latency of the exchange",
    "update": "update",
    "failures": "failures",
    "memory": "memory",
    "batch": "fewer samples than replicas",
}
_OF: Final = {
    ("one-server", "bandwidth"): "incast: all gradients into one link",
    ("servers", "bandwidth"): f"incast: {SERVED - 1} workers to a server",
    ("one-server", "latency"): "incast: a message from every worker",
    ("servers", "latency"): "a message from every worker to every server",
    ("colocated", "latency"): "a message from everybody to everybody",
    ("ring", "latency"): "latency of the ring: 2 (p-1) hops",
    ("ring", "bandwidth"): "one link of a node carries everything",
    ("rings", "latency"): "latency of the ring: 2 (p-1) hops",
    ("hierarchical", "latency"): "latency of the ring of nodes",
    ("zero3", "bandwidth"): "ZeRO-3's volume, 3 Psi for each micro-batch",
    ("zero3", "latency"): "latency of ZeRO-3's gathers, tensor by tensor",
    ("2d", "latency"): "latency of ZeRO-3's gathers, tensor by tensor",
    ("zero1", "latency"): "latency of messages layer by layer",
    ("zero2", "latency"): "latency of messages layer by layer",
}
LABELS: Final = {one.name: one.label for one in ARCHITECTURES}


def text(result: Sequence[Found]) -> str:
    return "\n\n".join(_scenario(outcome) for outcome in result)


def words(name: str, reason: str) -> str:
    """Describe the limit ``reason`` of architecture ``name``."""
    return _OF.get((name, reason), _WHY.get(reason, reason))


def why(name: str, stop: Stop) -> str:
    """Describe why an architecture stops, with the share of extra time."""
    reason = words(name, stop.reason)
    return f"{reason} ({stop.share:.0%})" if stop.share and stop.share < 0.995 else reason


def _scenario(outcome: Found) -> str:
    rows = [
        [
            "architecture",
            *(f"efficiency at {count:,}" for count in SHOWN),
            f"GB sent a step at {TIGHT:,}",
            f"GB of memory (model states) at {TIGHT:,}",
            f"J a sample at {TIGHT:,} / {SHOWN[-1]:,}",
            "most goodput at",
            "half of the ideal up to",
            "most is lost to, behind",
            "doubling pays up to",
            "what stops it",
        ]
    ]
    for name, line in outcome.points.items():
        at = {point.devices: point for point in line}
        stop = outcome.stops[name]
        rows.append(
            [LABELS[name], *(_share(outcome, at.get(count)) for count in SHOWN), *_costs(at), *_stop(name, stop, line)]
        )
    about = f"### {outcome.scenario.title}"
    return "\n".join([about, "", *markdown(rows), "", *_best(outcome)])


def _share(outcome: Found, point: Point | None) -> str:
    if point is None or point.estimate is None:
        return "-"
    return f"{outcome.efficiency(point):.1%}"


def _costs(at: dict[int, Point]) -> list[str]:
    point, last = at.get(TIGHT), at.get(SHOWN[-1])
    if point is None or point.estimate is None:
        return [
            "-",
            f"needs {point.least_bytes / 1e9:,.0f}" if point and point.least_bytes < float("inf") else "-",
            "-",
        ]
    server = f", a server {point.server_bytes / 1e9:,.0f}" if point.server_bytes else ""
    more = f"{last.joules:.3g}" if last and last.estimate else "-"
    return [
        f"{point.sent_bytes / 1e9:.3g}{server}",
        f"{point.estimate.memory.bytes / 1e9:.0f} ({point.states_bytes / 1e9:.3g})",
        f"{point.joules:.3g} / {more}",
    ]


def _stop(name: str, stop: Stop, line: Sequence[Point]) -> list[str]:
    if not stop.first:
        return ["-", "-", why(name, stop), "-", why(name, stop)]
    end = stop.last == COUNTS[-1]
    return [
        f"{stop.best:,}",
        f"{stop.half:,}" if stop.half else "-",
        words(name, stop.lost),
        f"{stop.last:,}{' or more' if end else ''}",
        why(name, stop),
    ]


def _best(outcome: Found) -> list[str]:
    lines = []
    for count in SHOWN:
        at = [(name, point) for name, line in outcome.points.items() for point in line if point.devices == count]
        if not at:
            continue
        name, point = max(at, key=lambda item: item[1].goodput)
        estimate = point.estimate
        if estimate is not None:
            facts = (
                f"{LABELS[name]} ({said(estimate.layout)})",
                f"{estimate.step_s:.3g} s a step",
                f"{point.goodput:,.0f} samples/s",
                f"{point.joules:.3g} J a sample",
                f"a failure every {estimate.run.mtbf_s / 3600:.3g} h",
                f"{1 - 1 / estimate.run.slowdown:.1%} lost to saves and failures",
            )
            lines.append(f"- {count:,} devices: {', '.join(facts)}")
    return lines
