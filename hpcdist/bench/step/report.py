"""Report of the benchmark of training steps as text, JSON or plot: speeds, phases, operations, losses and memory."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from hpcdist.bench.output_file import plain
from hpcdist.bench.step.request import COMPARED, EAGER, PHASES, SAME
from hpcdist.bench.step.results import StepCase, StepResults
from hpcdist.reporting import table as text_table
from hpcdist.reporting.plotting import drawing
from hpcdist.reporting.table import MISSING, Catalogue, Figure
from hpcdist.reporting.units import counted

PASSES: Final = ("forward", "backward", "step")


@dataclass(frozen=True)
class StepTableRow:
    """Table row of one benchmarked implementation. Durations are medians over steps of the maximum over ranks."""

    name: str
    step_s: float
    quartiles_s: tuple[float, float]
    cpu_s: float  # median over steps of the sum over ranks
    tokens_per_s: float
    x_eager: float | None  # (time of PyTorch eager) / (this time)
    x_eager_cpu: float | None  # (CPU time of PyTorch eager) / (this CPU time)
    flops_per_s: float
    mfu: float  # flops_per_s relative to the peak
    phases_s: Mapping[str, float | None]  # None for an unmeasured phase
    loss_first: float
    loss_last: float
    loss_difference: float  # largest relative difference to the first implementation's losses
    activation_bytes: float | None
    activation_closed_bytes: float | None


def peak_flops_per_s(results: StepResults) -> dict[str, float]:
    """Return {array library: peak of all ranks in flop/s}: the number of ranks times the slowest rank's speed."""
    rates = results.matmul_flops_per_s
    return {name: results.provenance["ranks"] * float(rate.min(axis=1).max()) for name, rate in rates.items()}


def rows(results: StepResults) -> list[StepTableRow]:
    """Return a list of table rows, one for each benchmarked implementation, in the order of ``results``."""
    eager = next((case for case in results.cases if case.name == EAGER), None)
    return [_row(results, case, eager) for case in results.cases]


def _row(results: StepResults, case: StepCase, eager: StepCase | None) -> StepTableRow:
    about, shape = results.provenance, results.shape
    slowest_s = case.step_s.max(axis=1)
    low, median, high = (float(value) for value in np.percentile(slowest_s, [25, 50, 75]))
    samples = about["ranks"] * shape.samples
    flops_per_s = samples * (about["forward_flops"] + about["backward_flops"]) / median
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
        flops_per_s=flops_per_s,
        mfu=flops_per_s / max(peak_flops_per_s(results).values()),
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
    """Format ``results`` as text: speeds, times of operations, losses, memory, and skipped implementations."""
    table, about = rows(results), results.provenance
    model = ", ".join(f"{name} {value}" for name, value in asdict(results.shape).items())
    machine = f"{counted(about['ranks'], 'rank')} of {counted(about['threads'], 'thread')}"
    gflop = (about["forward_flops"] + about["backward_flops"]) / 1e9
    peaks = ", ".join(f"{name} {value / 1e9:.1f}" for name, value in peak_flops_per_s(results).items())
    lines = [
        f"gpt of {about['parameters']:,} parameters: {model} (samples of a rank in a step)",
        f"{machine}; {gflop:.2f} GFLOP a sample; peak of matrix products, all ranks: {peaks} GFLOP/s",
        f"numpy's BLAS: {about['blas']}",
        "",
        *_FIGURES.aligned(table),
        "x eager: median over the turns of (time of PyTorch eager) / (time of the contender)",
        "",
        *_operations(results),
        *_losses(table, results),
        *(_memory(row, row.activation_bytes) for row in table if row.activation_bytes is not None),
        *(f"left out: {name}: {reason}" for name, reason in results.left_out.items()),
    ]
    return "\n".join(lines)


def operations(case: StepCase) -> dict[tuple[str, str], float]:
    """Return {(operation kind, pass): median seconds per step}. The key ("other", "step") has the remaining time."""
    seconds = dict(case.operation_s)
    step_s = seconds.pop(("all", "step"), None)
    if step_s is not None:
        seconds["other", "step"] = step_s - sum(seconds.values())
    return {key: float(np.median(values)) for key, values in seconds.items()}


def _profiles(results: StepResults) -> tuple[dict[str, dict[tuple[str, str], float]], list[str]]:
    profiles = {case.name: operations(case) for case in results.cases if case.operation_s}
    return profiles, list(dict.fromkeys(kind for seconds in profiles.values() for kind, _ in seconds))


def _operations(results: StepResults) -> list[str]:
    profiles, kinds = _profiles(results)
    if not profiles:
        return []
    cells = [["ms of an operation, forward + backward", *kinds]]
    for name, seconds in profiles.items():
        texts = [[f"{1e3 * seconds[kind, key]:.1f}" for key in PASSES if (kind, key) in seconds] for kind in kinds]
        cells.append([name, *(" + ".join(parts) or MISSING for parts in texts)])
    return [*text_table.aligned(cells), ""]


def _losses(table: Sequence[StepTableRow], results: StepResults) -> list[str]:
    steps = min(COMPARED, len(results.cases[0].loss))
    lines = [
        f"{row.name}: loss {row.loss_first:.4f} -> {row.loss_last:.4f}; largest relative difference to "
        f"{table[0].name} in {steps} steps: {row.loss_difference:.1e}"
        + ("" if row.loss_difference <= SAME else f", more than {SAME:g}")
        for row in table[1:]
    ]
    return [*lines, ""] if lines else []


def _memory(row: StepTableRow, nbytes: float) -> str:
    closed = row.activation_closed_bytes
    ratio = "" if closed is None else f", {nbytes / closed:.3f} of the closed form"
    return f"{row.name}: peak of the activations {nbytes / 2**20:.1f} MiB{ratio}"


def jsonable(results: StepResults) -> dict[str, Any]:
    """Return ``results`` as a dict for JSON, with one row per implementation. Unknown values are None."""
    return {
        "provenance": dict(results.provenance),
        "shape": asdict(results.shape),
        "peak_flops_per_s": peak_flops_per_s(results),
        "rows": [{name: plain(value) for name, value in asdict(row).items()} for row in rows(results)],
        "operations_s": {
            case.name: {" ".join(key): value for key, value in operations(case).items()} for case in results.cases
        },
        "left_out": dict(results.left_out),
    }


def plot(results: StepResults, file: Path) -> None:
    """Plot the phase times, operation times and loss differences in ``results`` to ``file``. Raises HpcdistError."""
    profiled = any(case.operation_s for case in results.cases)
    panels = [_draw_phases, *[_draw_operations] * profiled, *[_draw_losses] * (len(results.cases) > 1)]
    with drawing(file, 5.5 * len(panels), 5.0) as figure:
        for axis, draw in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
            draw(axis, results)


def _draw_phases(axis: Any, results: StepResults) -> None:
    table = rows(results)
    names = [row.name for row in table]
    left = np.zeros(len(table))
    for name in PHASES:
        phase_ms = 1e3 * np.array([row.phases_s[name] or 0.0 for row in table])
        if phase_ms.any():
            axis.barh(names, phase_ms, left=left, label=name)
            left += phase_ms
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
    profiles, kinds = _profiles(results)
    positions, height = np.arange(len(kinds)), 0.8 / len(profiles)
    for number, (name, seconds) in enumerate(profiles.items()):
        left = np.zeros(len(kinds))
        for key, shade in zip(PASSES, (1.0, 0.6, 0.35), strict=True):
            values = 1e3 * np.array([seconds.get((kind, key), 0.0) for kind in kinds])
            label = f"{name}: {key}" if key != "step" else None
            bars = {"left": left, "label": label, "color": f"C{number}", "alpha": shade}
            axis.barh(positions + number * height, values, height, **bars)
            left += values
    axis.set_yticks(positions + 0.4 - height / 2, kinds)
    axis.invert_yaxis()
    axis.set_xlabel("ms a step, by kind of operation")
    axis.legend(fontsize=8, ncols=2, loc="upper center", bbox_to_anchor=(0.5, -0.12))


def _draw_losses(axis: Any, results: StepResults) -> None:
    first = results.cases[0].loss
    for number, case in enumerate(results.cases[1:], 1):
        difference = np.maximum(np.abs(case.loss - first) / np.abs(first), 1e-9)
        axis.plot(np.arange(1, len(first) + 1), difference, ".-", label=case.name, color=f"C{number}")
    axis.axhline(SAME, color="black", linestyle="--", linewidth=1)
    axis.set(yscale="log", xlabel="step", ylabel=f"relative difference of the loss to {results.cases[0].name}")
    axis.grid(True, alpha=0.3)
    axis.legend(fontsize=8)
