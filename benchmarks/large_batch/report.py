"""Report of the large-batch study: Markdown tables, a verdict for each task, and plots."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from benchmarks.large_batch.search import Cell
from hpcdist.reporting.plotting import check_plot, save
from hpcdist.reporting.table import markdown
from hpcdist.reporting.units import counted

LAYERWISE: Final = ("lars", "lamb")
TWICE: Final = 2.0  # factor over the fewest samples at the critical batch


@dataclass(frozen=True)
class Point:
    """Samples to the target by seed, infinite if missed. Without seeds, the samples of the search."""

    cell: Cell

    @property
    def found(self) -> list[float]:
        trainings = self.cell.checks or (self.cell.searched,)
        return sorted(math.inf if math.isnan(training.samples) else training.samples for training in trainings)

    @property
    def median(self) -> float:
        return statistics.median_low(self.found)

    def text(self) -> str:
        """Format median, range and rate. A star marks a best rate at the border of the tried rates."""
        at = f"at {self.cell.learning_rate:.3g}{'*' if self.cell.at_border else ''}"
        if math.isinf(self.found[0]):
            return f"missed {at}"
        return f"{_samples(self.median)} ({_samples(self.found[0])} to {_samples(self.found[-1])}) {at}"


def curves(cells: Sequence[Cell], task: str) -> dict[str, list[Point]]:
    result: dict[str, list[Point]] = {}
    for cell in sorted(cells, key=lambda cell: cell.batch):
        if cell.task == task:
            result.setdefault(cell.optimizer, []).append(Point(cell))
    return result


def bend(line: Sequence[Point]) -> float:
    """Return the batch with twice the fewest samples and twice the fewest steps, or NaN if unknown.

    The fit is samples = E + S batch with the fewest samples E and the fewest steps S (McCandlish et al. 2018,
    arXiv:1812.06162), by least squares of relative errors of the medians. The result is E / S, or infinity if samples
    do not grow.
    """
    points = [(point.cell.batch, point.median) for point in line if math.isfinite(point.median)]
    if len(points) < 3:
        return math.nan
    batch, samples = np.array(points, float).T
    (fewest, steps), *_ = np.linalg.lstsq(np.stack([1 / samples, batch / samples], axis=1), np.ones(len(points)))
    return math.inf if steps <= 0 else max(0.0, float(fewest / steps))


def reach(line: Sequence[Point]) -> int:
    """Return the largest batch with at most twice the samples of the optimizer's best batch, or 0."""
    least = min(point.median for point in line)
    return max((p.cell.batch for p in line if math.isfinite(p.median) and p.median <= TWICE * least), default=0)


def noise(line: Sequence[Point]) -> tuple[int, float, float]:
    """Return the batch, the noise scale after half of the samples, and the final noise scale."""
    for point in line:
        if point.cell.noise is not None:
            samples, _, scales = point.cell.noise.curve.T
            half = int(np.searchsorted(samples, samples[-1] / 2))
            return point.cell.batch, float(scales[half]), float(scales[-1])
    return 0, math.nan, math.nan


def text(cells: Sequence[Cell]) -> str:
    blocks = []
    for task in dict.fromkeys(cell.task for cell in cells):
        lines = curves(cells, task)
        batches = sorted({cell.batch for cell in cells if cell.task == task})
        rows = [["samples a step", *lines, "layer-wise over others"]]
        for batch in batches:
            texts = {name: point.text() for name, line in lines.items() for point in line if point.cell.batch == batch}
            rows.append([f"{batch}", *(texts.get(name, "-") for name in lines), _ratio(*best(lines, batch))])
        rows.append(["at most twice its fewest samples up to", *(_batch(reach(line)) for line in lines.values()), ""])
        rows.append(["the curve bends at", *(_batch(bend(line)) for line in lines.values()), ""])
        scales = [noise(line) for line in lines.values()]
        rows.append(["noise scale half way", *(_batch(half) for _, half, _ in scales), ""])
        rows.append(["noise scale at the target", *(_batch(last) for _, _, last in scales), ""])
        missing = sum(point.cell.at_border for line in lines.values() for point in line)
        about = f"### {task}: samples to the target, median (range) over seeds, at the best rate"
        notes = [f"\\* the best of the tried rates is at their border: {counted(missing, 'cell')}"] if missing else []
        blocks.append("\n".join([about, "", *markdown(rows), "", *notes, *answer(task, lines)]))
    return "\n\n".join(blocks)


def answer(task: str, lines: dict[str, list[Point]]) -> list[str]:
    """Formulate the verdict on ``task``: whether layer-wise optimizers reach larger batches than the others."""
    reached = {point.cell.batch for line in lines.values() for point in line if math.isfinite(point.median)}
    if not reached:
        return [f"{task}: no optimizer reaches the target."]
    layerwise, plain = best(lines, max(reached))
    if layerwise is None or plain is None:
        return []
    output = (
        f"{task}, {max(reached)} samples a step, the largest batch that reaches the target: the best layer-wise "
        f"optimizer is {layerwise.cell.optimizer}, {_needs(layerwise)}; the best other optimizer is "
        f"{plain.cell.optimizer}, {_needs(plain)}."
    )
    return [f"{output} **{_verdict(layerwise, plain)}**"]


def best(lines: dict[str, list[Point]], batch: int) -> tuple[Point | None, Point | None]:
    """Return the points with the fewest samples at ``batch``: of layer-wise optimizers, and of the others."""
    groups: dict[bool, list[Point]] = {True: [], False: []}
    for name, line in lines.items():
        groups[name in LAYERWISE] += [point for point in line if point.cell.batch == batch]
    layerwise, plain = (min(groups[kind], key=lambda p: p.median, default=None) for kind in (True, False))
    return layerwise, plain


def _ratio(layerwise: Point | None, plain: Point | None) -> str:
    if layerwise is None or plain is None or math.isinf(layerwise.median + plain.median):
        return "-"
    return f"{layerwise.median / plain.median:.2f}"


def _verdict(layerwise: Point, plain: Point) -> str:
    ratio = layerwise.median / plain.median
    if layerwise.found[-1] < plain.found[0]:
        return f"Layer-wise rates reach further: {ratio:.2f} times the samples."
    if plain.found[-1] < layerwise.found[0]:
        return f"Layer-wise rates do not reach further: {ratio:.2f} times the samples."
    return f"No difference beyond the spread of the seeds: {ratio:.2f} times the samples."


def _needs(point: Point) -> str:
    if math.isinf(point.median):
        return "missed"
    return f"{_samples(point.median)} samples, {point.median / point.cell.batch:.1f} updates"


def _samples(value: float) -> str:
    return "missed" if math.isinf(value) else f"{value:,.0f}"


def _batch(value: float) -> str:
    if math.isnan(value) or value <= 0:
        return "not known"
    return "beyond all" if math.isinf(value) else f"{value:,.{0 if value >= 10 else 1}f}"


def plot(cells: Sequence[Cell], file: Path) -> None:
    """Plot samples and updates to the target over the batch, with a row of panels for each task.

    Dotted lines are the noise scales at the target. Raises MissingCapabilityError without matplotlib, and StorageError
    if the file cannot be written.
    """
    figures = check_plot(file)
    tasks = list(dict.fromkeys(cell.task for cell in cells))
    figure = figures.Figure(figsize=(12, 4.5 * len(tasks)), layout="constrained")
    axes = figure.subplots(len(tasks), 2, squeeze=False)
    for (left, right), task in zip(axes, tasks, strict=True):
        for number, (name, line) in enumerate(curves(cells, task).items()):
            _draw(left, line, number, name, updates=False)
            _draw(right, line, number, name, updates=True)
            scale = noise(line)[2]
            if scale > 0:
                left.axvline(scale, color=f"C{number}", linestyle=":", linewidth=1)
        left.set_title(task, fontsize=10)
        left.set_ylabel("samples to the target")
        right.set_ylabel("updates to the target")
        batches = sorted({cell.batch for cell in cells if cell.task == task})
        for axis in (left, right):
            axis.set_xscale("log", base=2)
            axis.set_yscale("log")
            axis.set_xticks(batches, [f"{batch}" for batch in batches])
            axis.set_xlabel("samples a step")
            axis.grid(True, which="major", alpha=0.3)
        right.legend(fontsize=8)
    save(figure, file)


def _draw(axis: Any, line: Sequence[Point], number: int, name: str, *, updates: bool) -> None:
    reached = [point for point in line if math.isfinite(point.median)]
    batches = np.array([point.cell.batch for point in reached], float)
    by = batches if updates else np.ones(len(reached))
    medians = np.array([point.median for point in reached])
    most = np.array([max(filter(math.isfinite, point.found)) for point in reached])
    ranges = np.array([medians - [point.found[0] for point in reached], most - medians]) / by
    style = {"color": f"C{number}", "label": name, "marker": "o", "markersize": 4, "capsize": 3}
    axis.errorbar(batches * 1.03**number, medians / by, ranges, **style)
