"""Report of a benchmark of training steps: speeds, phases, operations, losses and memory; text, JSON, picture."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from hpcdist.bench.output_file import plain
from hpcdist.bench.step.request import COMPARED, EAGER, PHASES, SAME
from hpcdist.bench.step.results import StepCase, StepResults
from hpcdist.reporting import table as text_table
from hpcdist.reporting.figures import Catalogue, Figure
from hpcdist.reporting.plotting import drawing
from hpcdist.reporting.table import MISSING
from hpcdist.reporting.units import counted


@dataclass(frozen=True)
class StepTableRow:
    """The figures of one contender: medians over the steps of the slowest rank.

    ``x_eager`` is the median, over the turns, of the time of PyTorch eager over that of this contender: above 1 is
    faster than that; ``x_eager_cpu`` the same of the processor's time, summed over ranks, which counts no waiting and
    no neighbours. ``flops_per_s`` are the operations of the model (`hpcdist.models.counts`) a second, of all ranks
    together, and ``mfu`` their share of the peak. ``phases_s`` are medians of the slowest rank, None where a phase is
    not told apart. ``loss_difference`` is the largest relative one to the first contender, over 100 steps at most.
    """

    name: str
    step_s: float
    quartiles_s: tuple[float, float]
    cpu_s: float
    tokens_per_s: float
    x_eager: float | None
    x_eager_cpu: float | None
    flops_per_s: float
    mfu: float
    phases_s: Mapping[str, float | None]
    loss_first: float
    loss_last: float
    loss_difference: float
    activation_bytes: float | None
    activation_closed_bytes: float | None


def peak_flops_per_s(results: StepResults) -> dict[str, float]:
    """Return the fastest product of each library, of all ranks together: a turn is as fast as its slowest rank."""
    rates = results.matmul_flops_per_s
    return {name: results.provenance["ranks"] * float(rate.min(axis=1).max()) for name, rate in rates.items()}


def rows(results: StepResults) -> list[StepTableRow]:
    """Return a row for each contender, in the order of the file."""
    eager = next((case for case in results.cases if case.name == EAGER), None)
    return [_row(results, case, eager) for case in results.cases]


def _row(results: StepResults, case: StepCase, eager: StepCase | None) -> StepTableRow:
    about, shape = results.provenance, results.shape
    slowest_s = case.step_s.max(axis=1)
    low, median, high = (float(value) for value in np.percentile(slowest_s, [25, 50, 75]))
    samples = about["ranks"] * shape.samples
    rate = samples * (about["forward_flops"] + about["backward_flops"]) / median
    phases = np.median(case.phase_s.max(axis=1), axis=0)
    first = results.cases[0].loss[:COMPARED]
    losses = case.loss[:COMPARED]
    return StepTableRow(
        name=case.name,
        step_s=median,
        quartiles_s=(low, high),
        cpu_s=float(np.median(case.cpu_s.sum(axis=1))),
        tokens_per_s=samples * shape.context / median,
        x_eager=None if eager is None else float(np.median(eager.step_s.max(axis=1) / slowest_s)),
        x_eager_cpu=None if eager is None else float(np.median(eager.cpu_s.sum(axis=1) / case.cpu_s.sum(axis=1))),
        flops_per_s=rate,
        mfu=rate / max(peak_flops_per_s(results).values()),
        phases_s={name: None if np.isnan(value) else float(value) for name, value in zip(PHASES, phases, strict=True)},
        loss_first=float(case.loss[0]),
        loss_last=float(case.loss[-1]),
        loss_difference=float(np.max(np.abs(losses - first) / np.abs(first))),
        activation_bytes=case.activation_bytes,
        activation_closed_bytes=case.activation_closed_bytes,
    )


def _phase(name: str) -> Figure[StepTableRow]:
    return Figure(f"{name} ms", lambda row: row.phases_s[name], ".1f", 1e-3)


_FIGURES: Final[Catalogue[StepTableRow]] = Catalogue(
    Figure("", lambda row: row.name),
    Figure("ms a step", lambda row: row.step_s, ",.1f", 1e-3),
    Figure("(quartiles)", lambda row: f"({1e3 * row.quartiles_s[0]:,.1f} - {1e3 * row.quartiles_s[1]:,.1f})"),
    Figure("tokens/s", lambda row: row.tokens_per_s, ",.0f"),
    Figure("x eager", lambda row: row.x_eager, ".3f"),
    Figure("(CPU time)", lambda row: "" if row.x_eager_cpu is None else f"({row.x_eager_cpu:.3f})"),
    Figure("GFLOP/s", lambda row: row.flops_per_s, ".1f", 1e9),
    Figure("MFU", lambda row: row.mfu, ".1%"),
    *(_phase(name) for name in PHASES),
)


def text(results: StepResults) -> str:
    """Return the report as lines for people."""
    table, shape, about = rows(results), results.shape, results.provenance
    flops = about["forward_flops"] + about["backward_flops"]
    peaks = ", ".join(f"{name} {value / 1e9:.1f}" for name, value in peak_flops_per_s(results).items())
    model = (
        f"{shape.layers} layers, hidden {shape.hidden}, {shape.heads} heads, context {shape.context}, "
        f"vocabulary {shape.vocabulary}"
    )
    machine = f"{counted(about['ranks'], 'rank')} of {counted(about['threads'], 'thread')}"
    lines = [
        f"gpt of {about['parameters']:,} parameters: {model}; {shape.samples} samples a rank",
        f"{machine}; {flops / 1e9:.2f} GFLOP a sample; peak of matrix products, all ranks: {peaks} GFLOP/s",
        f"numpy's BLAS: {about['blas']}",
        "",
        *_FIGURES.aligned(table),
        "x eager: the median, over turns next to each other, of PyTorch eager's time over that of the line",
        "",
        *_operations(results),
        *_losses(table, results),
        *_memory(table),
    ]
    return "\n".join([*lines, *(f"left out: {name}: {why}" for name, why in results.left_out.items())])


def operations(case: StepCase) -> dict[tuple[str, str], float]:
    """Return the median seconds of each kind of operation and way in a step, and what none of them explains."""
    taken = dict(case.operation_s)
    whole = taken.pop(("all", "step"), None)
    if whole is not None:
        taken["other", "step"] = whole - sum(taken.values())
    return {key: float(np.median(seconds)) for key, seconds in taken.items()}


def _operations(results: StepResults) -> list[str]:
    known = [(case, operations(case)) for case in results.cases if case.operation_s]
    if not known:
        return []
    kinds = list(dict.fromkeys(kind for _, taken in known for kind, _ in taken))
    ways = ("forward", "backward", "step")
    cells = [["ms of an operation, forward + backward", *kinds]]
    for case, taken in known:
        row = [case.name]
        for kind in kinds:
            parts = [1e3 * taken[kind, way] for way in ways if (kind, way) in taken]
            row.append(" + ".join(f"{part:.1f}" for part in parts) if parts else MISSING)
        cells.append(row)
    return [*text_table.aligned(cells), ""]


def _losses(table: Sequence[StepTableRow], results: StepResults) -> list[str]:
    steps = min(COMPARED, len(results.cases[0].loss))
    lines = [
        f"{row.name}: loss {row.loss_first:.4f} -> {row.loss_last:.4f}, at most {row.loss_difference:.1e} of it from "
        f"{table[0].name} in {steps} steps" + ("" if row.loss_difference <= SAME else f": more than {SAME:g}")
        for row in table[1:]
    ]
    return [*lines, ""] if lines else []


def _memory(table: Sequence[StepTableRow]) -> list[str]:
    return [
        f"{row.name}: activations {row.activation_bytes / 2**20:.1f} MiB at their peak"
        + (
            ""
            if row.activation_closed_bytes is None
            else f", {row.activation_bytes / row.activation_closed_bytes:.3f} of the closed form"
        )
        for row in table
        if row.activation_bytes is not None
    ]


def jsonable(results: StepResults) -> dict[str, Any]:
    """Return the report as JSON values; what there is not is null."""
    taken = {case.name: {" ".join(key): value for key, value in operations(case).items()} for case in results.cases}
    return {
        "provenance": dict(results.provenance),
        "shape": asdict(results.shape),
        "peak_flops_per_s": peak_flops_per_s(results),
        "rows": [{name: plain(value) for name, value in asdict(row).items()} for row in rows(results)],
        "operations_s": taken,
        "left_out": dict(results.left_out),
    }


def plot(results: StepResults, file: Path) -> None:
    """Draw it. Raises MissingCapabilityError without matplotlib, UsageError, StorageError."""
    profiled = any(case.operation_s for case in results.cases)
    panels = [_draw_phases, *[_draw_operations] * profiled, *[_draw_losses] * (len(results.cases) > 1)]
    with drawing(file, 5.5 * len(panels), 5.0) as figure:
        for axis, draw in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
            draw(axis, results)


def _draw_phases(axis: Any, results: StepResults) -> None:
    """Draw a bar for each contender, of its phases and what is left of the step."""
    table = rows(results)
    names = [row.name for row in table]
    left = np.zeros(len(table))
    for name in PHASES:
        taken = 1e3 * np.array([row.phases_s[name] or 0.0 for row in table])
        if taken.any():
            axis.barh(names, taken, left=left, label=name)
            left += taken
    rest = np.maximum(0.0, 1e3 * np.array([row.step_s for row in table]) - left)
    axis.barh(names, rest, left=left, label="other", color="0.8")
    for number, row in enumerate(table):
        speed = "" if row.x_eager is None else f", {row.x_eager:.2f} x eager"
        axis.text(1e3 * row.step_s, number, f" MFU {row.mfu:.0%}{speed}", va="center", fontsize=8)
    axis.set_xlim(right=1.45 * 1e3 * max(row.step_s for row in table))
    axis.invert_yaxis()
    axis.set_xlabel("ms a step (median of the slowest rank)")
    peak = max(peak_flops_per_s(results).values()) / 1e9
    axis.set_title(f"{counted(results.provenance['ranks'], 'rank')}, peak {peak:.0f} GFLOP/s", fontsize=10)
    axis.legend(fontsize=8, ncols=3, loc="upper center", bbox_to_anchor=(0.5, -0.12))


def _draw_operations(axis: Any, results: StepResults) -> None:
    """Draw what each kind of operation takes, forward below backward, for every contender that was profiled."""
    known = [(case.name, operations(case)) for case in results.cases if case.operation_s]
    kinds = list(dict.fromkeys(kind for _, taken in known for kind, _ in taken))
    places, height = np.arange(len(kinds)), 0.8 / len(known)
    for number, (name, taken) in enumerate(known):
        left = np.zeros(len(kinds))
        for way, shade in (("forward", 1.0), ("backward", 0.6), ("step", 0.35)):
            values = 1e3 * np.array([taken.get((kind, way), 0.0) for kind in kinds])
            label = f"{name}: {way}" if way != "step" else None
            at = places + number * height
            axis.barh(at, values, height, left=left, label=label, color=f"C{number}", alpha=shade)
            left += values
    axis.set_yticks(places + 0.4 - height / 2, kinds)
    axis.invert_yaxis()
    axis.set_xlabel("ms a step, by kind of operation")
    axis.legend(fontsize=8, ncols=2, loc="upper center", bbox_to_anchor=(0.5, -0.12))


def _draw_losses(axis: Any, results: StepResults) -> None:
    """Draw the relative difference of every loss to that of the first contender."""
    first = results.cases[0].loss
    for number, case in enumerate(results.cases[1:], 1):
        apart = np.abs(case.loss - first) / np.abs(first)
        axis.plot(np.arange(1, len(apart) + 1), np.maximum(apart, 1e-9), ".-", label=case.name, color=f"C{number}")
    axis.axhline(SAME, color="black", linestyle="--", linewidth=1)
    axis.set_yscale("log")
    axis.set_xlabel("step")
    axis.set_ylabel(f"loss, relative to {results.cases[0].name}")
    axis.grid(True, alpha=0.3)
    axis.legend(fontsize=8)
