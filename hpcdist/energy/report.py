"""Report of a job's joules, merged from what each node counted. Pure: no sensor, no message.

A kind (gpu, cpu, dram) enters the total when it was read on every node; where it was read on some nodes only, or the
job cannot do without it, the total is NaN, with the reason. What no node can read is left out and listed. Missing is
never zero. Where every node has a counter of the whole node (kind "node"), that is the total, and the others are
parts of it: shown, and not added once more.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Final, TypeAlias

import msgspec

from hpcdist.reporting.jsonable import json_number

UPDATES: Final = 2  # a difference over fewer updates of a counter is noise
NODE: Final = "node"  # the kind of a counter that includes the others
NO_SOURCE: Final = "no source can be read"
DECLARED: Final = "declared model, not measured"
EARLIER_START: Final = "an earlier start of this run: "
MAX_REASONS: Final = 4  # of a job of a thousand nodes, the first ones are named


Amount: TypeAlias = Annotated[float, msgspec.Meta(gt=-1e30, lt=1e30)]  # joules or seconds: no value is beyond these
Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0, lt=1 << 53)]


@dataclass(frozen=True)
class SourceResult:
    """Result of one source: ``trouble`` describes failed reads.

    ``note`` says what is special about it (shared by ranks, in MIG mode, integrated power), ``declared`` that its
    joules come from a model.
    """

    name: str
    kind: str
    update_s: float = math.nan
    failed_reads: int = 0
    trouble: str = ""
    note: str = ""
    declared: bool = False


@dataclass(frozen=True)
class NodeContribution:
    """Energy that one node counted. ``phases`` are those of `PhaseWindows.phases`, ``totals_mj`` is by source.

    ``sampler_s`` are the seconds of a processor that the sampler took, ``sampled_s`` those in which it did; NaN: not
    measured.
    """

    node: int
    sources: Sequence[SourceResult] = ()
    phases: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    totals_mj: Sequence[float] = ()
    missing: Mapping[str, str] = field(default_factory=dict)
    needed: frozenset[str] = frozenset()
    unused: frozenset[str] = frozenset()
    sampler_s: float = math.nan
    sampled_s: float = math.nan


def merge(nodes: Sequence[NodeContribution], earlier: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the report of a job; ``earlier`` is the `state` of the previous starts of this run.

    ``energy_j`` (NaN: not known, see ``reason``), the same ``by_kind`` and by ``phases`` (joules, seconds of the
    slowest node, windows, reason), ``sources``, ``parts`` by kind of what ``energy_j`` includes already, and in
    ``not_included`` what was not measured. ``label`` is `DECLARED` where any of it comes from a model, else "".
    ``sampler_share`` is the share of a processor that reading took on the node where it took most.
    """
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
    return {
        "energy_j": energy_j,
        "reason": _joined(reasons),
        "by_kind": by_kind,
        "phases": {name: _phase(nodes, name, kinds, troubles, earlier) for name in names},
        "sources": [_row(node, index, source, kinds) for node in nodes for index, source in enumerate(node.sources)],
        "parts": _parts(nodes, kinds),
        "not_included": _excluded(nodes, kinds),
        "label": _label(nodes, kinds, earlier),
        "sampler_share": _sampler_share(nodes),
    }


def counted(nodes: Sequence[NodeContribution]) -> list[str]:
    """Return the kinds that enter the total of a job, in order."""
    if nodes and all(any(source.kind == NODE for source in node.sources) for node in nodes):
        return [NODE]
    kinds = {source.kind for node in nodes for source in node.sources} | {k for node in nodes for k in node.needed}
    return sorted(kinds - {NODE})


def _parts(nodes: Sequence[NodeContribution], kinds: Sequence[str]) -> dict[str, float]:
    """Return the joules by kind of what a counter of whole nodes includes."""
    if list(kinds) != [NODE]:
        return {}
    others = sorted({source.kind for node in nodes for source in node.sources} - {NODE})
    return {kind: _total(nodes, kind, None)[0] for kind in others}


def _label(nodes: Sequence[NodeContribution], kinds: Sequence[str], earlier: Mapping[str, Any] | None) -> str:
    declared = any(source.declared and source.kind in kinds for node in nodes for source in node.sources)
    return DECLARED if declared or (earlier or {}).get("label") else ""


def _sampler_share(nodes: Sequence[NodeContribution]) -> float:
    shares = [
        node.sampler_s / node.sampled_s for node in nodes if node.sampled_s > 0 and not math.isnan(node.sampler_s)
    ]
    return max(shares, default=math.nan)


class PhaseState(msgspec.Struct):
    """State of a phase in a checkpoint."""

    seconds: Amount
    windows: Count
    joules: Amount | None = None


class EnergyState(msgspec.Struct):
    """State of a report in a checkpoint, as it is read back."""

    by_kind: dict[str, Amount | None]
    phases: dict[str, PhaseState]
    reason: str | None = None
    label: str = ""


def state(report: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a checkpoint keeps of a report, as JSON values: what is not known is None. See `EnergyState`."""
    phases = {
        name: {"joules": json_number(phase["joules"]), "seconds": phase["seconds"], "windows": phase["windows"]}
        for name, phase in report["phases"].items()
    }
    by_kind = {kind: json_number(joules) for kind, joules in report["by_kind"].items()}
    return {"by_kind": by_kind, "phases": phases, "reason": report["reason"], "label": report["label"]}


def _missing(nodes: Iterable[NodeContribution], kinds: Iterable[str]) -> list[str]:
    """Return which nodes lack a kind that the total needs."""
    return [
        f"node {node.node} has no {kind}: {node.missing.get(kind, 'it was not looked for')}"
        for kind in kinds
        for node in nodes
        if kind not in node.unused and not any(source.kind == kind for source in node.sources)
    ]


def _mismatch(kinds: Sequence[str], earlier: Mapping[str, Any] | None) -> list[str]:
    """Return why the joules of earlier starts of the run cannot be added, [] where they can."""
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
    """Return the joules of a kind in all windows, and why they are not known."""
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
    """Return the joules of a phase over all kinds, with the seconds of the slowest node."""
    joules, reasons = [], list(troubles)
    for node in nodes:
        phase = node.phases.get(name)
        if phase is not None:
            for source, mj in zip(node.sources, phase["mj"], strict=True):
                if source.kind not in kinds:
                    continue
                joules.append(mj / 1e3)
                reasons += _doubts(node, source, mj, phase["shortest_s"], name)
    own = [node.phases[name] for node in nodes if name in node.phases]
    seconds, windows = (max((phase[key] for phase in own), default=0) for key in ("seconds", "windows"))
    before = (earlier or {}).get("phases", {}).get(name)
    if before is not None:
        seconds, windows = seconds + before["seconds"], windows + before["windows"]
        if before["joules"] is None:
            reasons.append(f"{EARLIER_START}{name} is not known")
        else:
            joules.append(before["joules"])
    if not kinds:
        reasons.append(NO_SOURCE)
    known = math.nan if reasons else math.fsum(joules)
    return {"joules": known, "seconds": float(seconds), "windows": windows, "reason": _joined(reasons)}


def _doubts(node: NodeContribution, source: SourceResult, mj: float, shortest_s: float, phase: str) -> list[str]:
    """Return why ``mj`` of a source is not reliable; ``shortest_s`` is the shortest window it comes from."""
    at = f"node {node.node}, {source.name}"
    if math.isnan(mj):
        return [f"node {node.node}, {source.trouble or f'{source.name}: a read failed'}"]
    if source.declared:
        return []  # the model has no updates to wait for
    if math.isnan(source.update_s):
        return [f"{at}: its counter did not move twice"]
    if shortest_s < UPDATES * source.update_s:
        what = f"a window of {phase}" if phase else "all of the time that was measured"
        return [f"{at}: {what} is {shortest_s:.3g} s, shorter than {UPDATES} updates of {source.update_s:.3g} s"]
    return []


def _excluded(nodes: Iterable[NodeContribution], kinds: Iterable[str]) -> list[str]:
    """Return the kinds that are in no total, each with its reasons and the nodes that have them."""
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
    """Return the first reasons as one text, in which an earlier start repeats none of them; None for none."""
    before = [reason for reason in reasons if reason.startswith(EARLIER_START)]
    own = [reason for reason in dict.fromkeys(reasons) if reason not in before]
    if before == [EARLIER_START + "; ".join(own)]:
        before = []
    different = [*before, *(reason for reason in own if not any(reason in earlier for earlier in before))]
    if len(different) > MAX_REASONS:
        different = [*different[:MAX_REASONS], f"and {len(different) - MAX_REASONS} more reasons"]
    return "; ".join(different) or None
