"""The picture of a benchmark of training steps: phases, kinds of operation, and how far losses are apart."""

from pathlib import Path
from typing import Any

import numpy as np

from hpcdist.arrays.sizes import counted
from hpcdist.bench.collectives_report import check_plot
from hpcdist.bench.step_file import Results
from hpcdist.bench.step_plan import PHASES, SAME
from hpcdist.bench.step_report import operations, peak_flops_per_s, rows
from hpcdist.errors import StorageError


def plot(found: Results, file: Path) -> None:
    """Draw it. Raises MissingCapabilityError without matplotlib, UsageError, StorageError."""
    figures = check_plot(file)
    profiled = any(one.operation_s for one in found.cases)
    apart = len(found.cases) > 1
    figure = figures.Figure(figsize=(5.5 * (1 + profiled + apart), 5.0), layout="constrained")
    axes = list(figure.subplots(1, 1 + profiled + apart, squeeze=False)[0])
    _phases(axes.pop(0), found)
    if profiled:
        _operations(axes.pop(0), found)
    if apart:
        _losses(axes.pop(0), found)
    try:
        figure.savefig(file, dpi=120)
    except OSError as error:
        raise StorageError(f"{file}: cannot be written: {error.strerror}") from error


def _phases(axis: Any, found: Results) -> None:
    """Draw a bar for each contender, of its phases and what is left of the step."""
    table = rows(found)
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
    peak = max(peak_flops_per_s(found).values()) / 1e9
    axis.set_title(f"{counted(found.provenance['ranks'], 'rank')}, peak {peak:.0f} GFLOP/s", fontsize=10)
    axis.legend(fontsize=8, ncols=3, loc="upper center", bbox_to_anchor=(0.5, -0.12))


def _operations(axis: Any, found: Results) -> None:
    """Draw what each kind of operation takes, forward below backward, for every contender that was profiled."""
    known = [(one.name, operations(one)) for one in found.cases if one.operation_s]
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


def _losses(axis: Any, found: Results) -> None:
    """Draw the relative difference of every loss to that of the first contender."""
    first = found.cases[0].loss
    for number, one in enumerate(found.cases[1:], 1):
        apart = np.abs(one.loss - first) / np.abs(first)
        axis.plot(np.arange(1, len(apart) + 1), np.maximum(apart, 1e-9), ".-", label=one.name, color=f"C{number}")
    axis.axhline(SAME, color="black", linestyle="--", linewidth=1)
    axis.set_yscale("log")
    axis.set_xlabel("step")
    axis.set_ylabel(f"loss, relative to {found.cases[0].name}")
    axis.grid(True, alpha=0.3)
    axis.legend(fontsize=8)
