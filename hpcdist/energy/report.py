"""Energy report of a job, merged from the joules of its nodes.

The total is NaN if a node lacks a kind (gpu, cpu, dram) that another node measured or that the job needs. If every node
has a counter of the whole node (kind "node"), these counters give the total.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Final, TypeAlias

import msgspec

from hpcdist.reporting.jsonable import json_number

UPDATES: Final = 2  # a difference over fewer counter updates is noise
NODE: Final = "node"  # the kind of a counter that includes all other kinds
NO_SOURCE: Final = "no source can be read"
DECLARED: Final = "declared model, not measured"
EARLIER_START: Final = "an earlier start of this run: "
MAX_REASONS: Final = 4  # reasons that are printed


Amount: TypeAlias = Annotated[float, msgspec.Meta(gt=-1e30, lt=1e30)]  # joules or seconds
Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0, lt=1 << 53)]


@dataclass(frozen=True)
class SourceResult:
    """Properties of one energy source of a node, and its failed reads."""

    name: str
    kind: str
    update_s: float = math.nan  # between two updates of the counter, NaN if unknown
    failed_reads: int = 0
    trouble: str = ""  # description of the failures
    note: str = ""  # limitation of the joules, for example that several ranks share the device
    declared: bool = False  # the joules are estimates from the watts in section [energy] of the recipe


@dataclass(frozen=True)
class NodeContribution:
    """Energy measured on one node."""

    node: int
    sources: Sequence[SourceResult] = ()
    phases: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # result of `PhaseWindows.phases`
    totals_mj: Sequence[float] = ()  # of each source, NaN if unknown
    missing: Mapping[str, str] = field(default_factory=dict)  # kind of energy that is not measured completely: reason
    needed: frozenset[str] = frozenset()  # kinds of energy without which the job's total is unknown
    unused: frozenset[str] = frozenset()  # kinds of devices that no rank of the node uses, such as "gpu"
    sampler_s: float = math.nan  # processor seconds of the sampler in `sampled_s` seconds; NaN: not measured
    sampled_s: float = math.nan


def merge(nodes: Sequence[NodeContribution], earlier: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the energy report of a job as a dict. ``earlier``: result of `state` before the last restart, or None."""
    kinds = counted(nodes)
    troubles = [*_missing(nodes, kinds), *_mismatch(kinds, earlier)]
    by_kind, reasons = {}, list(troubles)
    for kind in kinds:
        by_kind[kind], why = _total(nodes, kind, earlier)
        reasons += why
    if not kinds:
        reasons.append(f"{NO_SOURCE}: {'; '.join(_excluded(nodes, kinds))}")
    energy_j = math.nan if reasons else math.fsum(by_kind.values())
    names = list(dict.fromkeys([*(earlier or {}).get("phases", ()), *(name for node in nodes for name in node.phases)]))
    is_declared = any(source.declared and source.kind in kinds for node in nodes for source in node.sources)
    shares = [node.sampler_s / node.sampled_s for node in nodes if node.sampled_s > 0]
    return {
        "energy_j": energy_j,  # NaN if unknown, for the reason below
        "reason": _joined(reasons),
        "by_kind": by_kind,  # adds up to the total
        # joules of all nodes, and the maxima over the nodes of "seconds" and "windows"
        "phases": {name: _phase(nodes, name, kinds, troubles, earlier) for name in names},
        "sources": [_row(node, index, source, kinds) for node in nodes for index, source in enumerate(node.sources)],
        # if the total is from counters of whole nodes: joules of components such as "cpu"
        "parts": _components(nodes, kinds),
        "not_included": _excluded(nodes, kinds),
        "label": DECLARED if is_declared or (earlier or {}).get("label") else "",
        # fraction of a processor that sampling used, on the node with the largest fraction
        "sampler_share": max((share for share in shares if not math.isnan(share)), default=math.nan),
    }


def counted(nodes: Sequence[NodeContribution]) -> list[str]:
    """Return a sorted list of the kinds of energy sources, such as "gpu", whose joules add up to the job's total."""
    if nodes and all(any(source.kind == NODE for source in node.sources) for node in nodes):
        return [NODE]
    kinds = {source.kind for node in nodes for source in node.sources} | {k for node in nodes for k in node.needed}
    return sorted(kinds - {NODE})


def _components(nodes: Sequence[NodeContribution], kinds: Sequence[str]) -> dict[str, float]:
    if list(kinds) != [NODE]:
        return {}
    others = sorted({source.kind for node in nodes for source in node.sources} - {NODE})
    return {kind: _total(nodes, kind, None)[0] for kind in others}


class PhaseState(msgspec.Struct):
    """Seconds, joules (None if unknown) and number of windows of one phase, as saved in a checkpoint."""

    seconds: Amount
    windows: Count
    joules: Amount | None = None


class EnergyState(msgspec.Struct):
    """Energy that a run has used so far, over all of its starts, as saved in a checkpoint."""

    by_kind: dict[str, Amount | None]
    phases: dict[str, PhaseState]
    reason: str | None = None
    label: str = ""


def state(report: Mapping[str, Any]) -> dict[str, Any]:
    """Return the `EnergyState` of ``report``, a result of `merge`, as a JSON dict for a checkpoint. None: unknown."""
    phases = {
        name: {"joules": json_number(phase["joules"]), "seconds": phase["seconds"], "windows": phase["windows"]}
        for name, phase in report["phases"].items()
    }
    by_kind = {kind: json_number(joules) for kind, joules in report["by_kind"].items()}
    return {"by_kind": by_kind, "phases": phases, "reason": report["reason"], "label": report["label"]}


def _missing(nodes: Iterable[NodeContribution], kinds: Iterable[str]) -> list[str]:
    return [
        f"node {node.node} has no {kind}: {node.missing.get(kind, 'it was not looked for')}"
        for kind in kinds
        for node in nodes
        if kind not in node.unused and not any(source.kind == kind for source in node.sources)
    ]


def _mismatch(kinds: Sequence[str], earlier: Mapping[str, Any] | None) -> list[str]:
    if earlier is None:
        return []
    if earlier["reason"] is not None:
        return [EARLIER_START + earlier["reason"].removeprefix(EARLIER_START)]
    if sorted(earlier["by_kind"]) == list(kinds):
        return []
    return [
        f"{EARLIER_START}measured {', '.join(sorted(earlier['by_kind']))}, and this one {', '.join(kinds) or 'nothing'}"
    ]


def _total(nodes: Sequence[NodeContribution], kind: str, earlier: Mapping[str, Any] | None) -> tuple[float, list[str]]:
    joules, reasons = [], []
    for node in nodes:
        seconds = sum(phase["seconds"] for phase in node.phases.values())
        for source, mj in zip(node.sources, node.totals_mj, strict=True):
            if source.kind == kind:
                joules.append(mj / 1e3)
                reasons += _doubts(node, source, mj, seconds, "")
    if earlier is not None and kind in earlier["by_kind"]:
        before = earlier["by_kind"][kind]
        joules.append(math.nan if before is None else before)
    return (math.nan if reasons or not joules else math.fsum(joules)), reasons


def _phase(
    nodes: Sequence[NodeContribution],
    name: str,
    kinds: Sequence[str],
    troubles: Sequence[str],
    earlier: Mapping[str, Any] | None,
) -> dict[str, Any]:
    joules, reasons = [], list(troubles)
    for node in nodes:
        phase = node.phases.get(name)
        if phase is not None:
            for source, mj in zip(node.sources, phase["mj"], strict=True):
                if source.kind not in kinds:
                    continue
                joules.append(mj / 1e3)
                reasons += _doubts(node, source, mj, phase["shortest_s"], name)
    node_phases = [node.phases[name] for node in nodes if name in node.phases]
    seconds, windows = (max((phase[key] for phase in node_phases), default=0) for key in ("seconds", "windows"))
    before = (earlier or {}).get("phases", {}).get(name)
    if before is not None:
        seconds, windows = seconds + before["seconds"], windows + before["windows"]
        if before["joules"] is None:
            reasons.append(f"{EARLIER_START}{name} is not known")
        else:
            joules.append(before["joules"])
    if not kinds:
        reasons.append(NO_SOURCE)
    total = math.nan if reasons else math.fsum(joules)
    return {"joules": total, "seconds": float(seconds), "windows": windows, "reason": _joined(reasons)}


def _doubts(node: NodeContribution, source: SourceResult, mj: float, shortest_s: float, phase: str) -> list[str]:
    at = f"node {node.node}, {source.name}"
    if math.isnan(mj):
        return [f"node {node.node}, {source.trouble or f'{source.name}: a read failed'}"]
    if source.declared:
        return []  # the model has no updates to wait for
    if math.isnan(source.update_s):
        return [f"{at}: its counter did not move twice"]
    if shortest_s < UPDATES * source.update_s:
        measured = f"a window of {phase}" if phase else "the whole measurement"
        return [f"{at}: {measured} is {shortest_s:.3g} s, shorter than {UPDATES} updates of {source.update_s:.3g} s"]
    return []


def _excluded(nodes: Iterable[NodeContribution], kinds: Iterable[str]) -> list[str]:
    places: dict[tuple[str, str], list[int]] = {}
    for node in nodes:
        for kind, reason in node.missing.items():
            if kind not in kinds and list(kinds) != [NODE]:  # a counter of whole nodes includes every kind
                places.setdefault((kind, reason), []).append(node.node)
    lines = []
    for (kind, reason), where in places.items():
        some = ", ".join(map(str, where[:MAX_REASONS])) + (", ..." if len(where) > MAX_REASONS else "")
        lines.append(f"{kind} (node {some}): {reason}")
    return lines


def _row(node: NodeContribution, index: int, source: SourceResult, kinds: Sequence[str]) -> dict[str, Any]:
    return {
        "node": node.node,
        "name": source.name,
        "kind": source.kind,
        "joules": node.totals_mj[index] / 1e3,
        "update_s": source.update_s,
        "failed_reads": source.failed_reads,
        "note": "; ".join(filter(None, (DECLARED if source.declared else "", source.note))),
        "counted": source.kind in kinds,
    }


def _joined(reasons: Sequence[str]) -> str | None:
    before = [reason for reason in reasons if reason.startswith(EARLIER_START)]
    current = [reason for reason in dict.fromkeys(reasons) if reason not in before]
    if before == [EARLIER_START + "; ".join(current)]:
        before = []
    different = [*before, *(reason for reason in current if not any(reason in earlier for earlier in before))]
    if len(different) > MAX_REASONS:
        different = [*different[:MAX_REASONS], f"and {len(different) - MAX_REASONS} more reasons"]
    return "; ".join(different) or None
