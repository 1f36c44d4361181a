"""Report of the comparisons with published trainings: lines, summaries, strong scaling, a plot and a file."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, Final

import numpy as np

from benchmarks.harness import columns_of, rows_of
from benchmarks.planner.predictions import Compared
from benchmarks.planner.tables import Table
from hpcdist.hdf5 import datasets, files
from hpcdist.hdf5.datasets import Column
from hpcdist.reporting.plotting import check_plot, save

SCHEMA, VERSION = "hpcdist.benchmark.validate_planner", 3
NEAR, FAR = 0.10, 0.20  # error limits of throughput for most rows, and for all rows
MOST: Final = 0.80
MARKS: Final[Mapping[str, Mapping[str, Any]]] = {
    "test": {"marker": "o", "markersize": 5},
    "shared": {"marker": "o", "markersize": 6, "fillstyle": "left"},
    "calibration": {"marker": "o", "markersize": 6, "fillstyle": "none"},
    "extra": {"marker": "x", "markersize": 5, "alpha": 0.7},
}
COLUMNS: Final = (
    Column("comparison", "i4", "1", "number of the comparison"),
    Column("table", "S24", "1", "file in benchmarks/planner/published"),
    Column("row", "S64", "1", "line of the table"),
    Column("quantity", "S24", "1", "what was published"),
    Column(
        "role", "S16", "1", "calibration: constants were chosen with it; shared: with a part of its run; test; extra"
    ),
    Column("kind", "S16", "1", "throughput, layer, memory, closed or bubble"),
    Column("published", "f8", "1", "in the units of the table"),
    Column("predicted", "f8", "1", "the same by the planner"),
    Column("error", "f8", "1", "predicted over published, less one; above 0: faster, or more"),
    Column("unit", "f8", "1", "of the last digit that is printed, in which closed forms agree"),
    Column("tflops", "f8", "1", "predicted 1e12 operations a second of a device, what is computed again included"),
    Column("slack", "f8", "1", "how far what was rounded before may move a closed form"),
    Column("series", "S16", "1", "of strong scaling that the row belongs to"),
    Column("program", "S48", "1", "training program and device of a step"),
)


def lines(result: Sequence[Compared], published: Mapping[str, Table]) -> Iterator[str]:
    """Yield a title per table and a line per comparison. Exact closed forms share a line."""
    for key, group in groupby(result, lambda one: one.table):
        comparisons = list(group)
        yield ""
        yield f"{published[key].title} ({published[key].source})"
        yield f"  {'row':<52}{'quantity':<22}{'published':>10}{'predicted':>11}{'error':>8}  role"
        for one in comparisons:
            if one.kind in ("closed", "bubble") and one.exact:
                continue
            error = f"{100 * one.error:+7.1f}%" if one.kind != "bubble" else f"{one.predicted - one.published:+8.4f}"
            yield f"  {one.row:<52}{one.quantity:<22}{one.published:10.5g}{one.predicted:11.5g}{error}  {one.role}"
        exact = sum(one.exact for one in comparisons if one.kind in ("closed", "bubble"))
        if exact:
            yield f"  {exact} closed forms agree to the last printed digit"
        if cut := [f"{one.row} ({one.published:g}, {one.predicted:.6g})" for one in comparisons if _is_cut(one)]:
            yield f"  {len(cut)} of them as printed with the other digits cut off, not rounded: {'; '.join(cut)}"
        for aspect in published[key].unmodelled:
            yield f"  not modelled: {aspect}"


def _is_cut(one: Compared) -> bool:
    return one.kind in ("closed", "bubble") and one.cut


def summary(comparisons: Sequence[Compared]) -> dict[str, dict[str, float]]:
    """Return counts and errors by table, kind and role; the table "all" combines all tables."""
    result: dict[str, dict[str, float]] = {}
    for one in comparisons:
        names = f"{one.table}, {one.kind}, {one.role}", f"all, {one.kind}, {one.role}"
        for name in names:
            result.setdefault(name, {})
    for name in result:
        table, kind, role = name.split(", ")
        selected = [o for o in comparisons if table in (o.table, "all") and (o.kind, o.role) == (kind, role)]
        signed = np.array([one.error for one in selected])
        errors = np.abs(signed)
        result[name] = {
            "rows": len(selected),
            "exact": sum(one.exact for one in selected),
            "near": int((errors <= NEAR).sum()),
            "far": int((errors <= FAR).sum()),
            "mean": float(errors.mean()),
            "signed": float(signed.mean()),
            "fast": int((signed > 0).sum()),
            "worst": float(errors.max()),
        }
    return result


def by_program(comparisons: Sequence[Compared]) -> Iterator[str]:
    """Yield a table of the errors of steps by training program, device and role."""
    groups: dict[tuple[str, str], list[float]] = {}
    for one in comparisons:
        if one.program and one.role != "extra":
            groups.setdefault((one.program, one.role), []).append(one.error)
    yield ""
    yield f"{'program, device, role':<56}{'rows':>5}{'median':>8}{'<= 10 %':>9}{'<= 20 %':>9}{'worst':>8}{'signed':>9}"
    for (program, role), errors in sorted(groups.items()):
        signed, size = np.array(errors), np.abs(errors)
        near, far = int((size <= NEAR).sum()), int((size <= FAR).sum())
        numbers = f"{100 * np.median(size):7.1f}%{near:9}{far:9}{100 * size.max():7.1f}%{100 * signed.mean():+8.1f}%"
        yield f"{program + ', ' + role:<56}{len(size):5}{numbers}"


def missed(result: Mapping[str, Mapping[str, float]]) -> tuple[str, ...]:
    """Describe the goals that the test rows of a `summary` miss. Kinds without rows miss no goal."""
    messages = []
    for kind in ("closed", "bubble"):
        one = result.get(f"all, {kind}, test")
        if one and one["exact"] < one["rows"]:
            messages.append(
                f"{one['rows'] - one['exact']:.0f} of {one['rows']:.0f} closed forms ({kind}) are not exact"
            )
    speed = result.get("all, throughput, test")
    if speed and speed["near"] < MOST * speed["rows"]:
        messages.append(f"{speed['near']:.0f} of {speed['rows']:.0f} rows within {NEAR:.0%}, wanted {MOST:.0%} of them")
    if speed and speed["far"] < speed["rows"]:
        messages.append(
            f"{speed['far']:.0f} of {speed['rows']:.0f} rows within {FAR:.0%}, wanted all; {speed['worst']:.1%}"
        )
    return tuple(messages)


def said(result: Mapping[str, Mapping[str, float]]) -> Iterator[str]:
    yield ""
    numbers = f"{'rows':>5}{'exact':>7}{'<= 10 %':>9}{'<= 20 %':>9}{'mean':>8}{'worst':>8}{'signed':>9}"
    yield f"{'table, kind, role':<56}{numbers}"
    for name in sorted(result, key=lambda name: (name.startswith("all"), name)):
        one = result[name]
        is_closed = ", closed" in name or ", bubble" in name
        middle = f"{one['exact']:7.0f}{'':>18}" if is_closed else f"{'':>7}{one['near']:9.0f}{one['far']:9.0f}"
        ends = "" if is_closed else f"{100 * one['mean']:7.1f}%{100 * one['worst']:7.1f}%{100 * one['signed']:+8.1f}%"
        yield f"{name:<56}{one['rows']:5.0f}{middle}{ends}"
    closed = result["all, closed, test"]
    yield ""
    yield f"closed forms exact: {closed['exact']:.0f} of {closed['rows']:.0f}"
    yield _counted(result, ("test",), f"test rows (wanted {MOST:.0%} and all)")
    yield _counted(result, ("test", "shared"), "with those that share their run with calibration rows")


def _counted(result: Mapping[str, Mapping[str, float]], roles: Sequence[str], what: str) -> str:
    summaries = [one for role in roles if (one := result.get(f"all, throughput, {role}"))]
    near, far, fast, rows = (sum(one[key] for one in summaries) for key in ("near", "far", "fast", "rows"))
    signed = sum(one["rows"] * one["signed"] for one in summaries) / rows
    return (
        f"throughput, {what}: within {NEAR:.0%} {near:.0f} of {rows:.0f} ({near / rows:.0%}), within {FAR:.0%} "
        f"{far:.0f}; the mean is {signed:+.1%}, {fast:.0f} of {rows:.0f} are predicted faster than they were"
    )


def shapes(result: Sequence[Compared]) -> Iterator[tuple[str, str, list[float], list[float]]]:
    """Yield name, role, published and predicted throughputs of each strong-scaling series.

    Throughputs are per device, relative to the first row of the series.
    """
    rows = [one for one in result if one.series and one.kind == "throughput"]
    for name in dict.fromkeys(one.series for one in rows):
        series = [one for one in rows if one.series == name]
        first = series[0]
        yield (
            name,
            first.role,
            [one.published / first.published for one in series],
            [one.predicted / first.predicted for one in series],
        )


def scaling(result: Sequence[Compared]) -> Iterator[str]:
    for name, role, published, predicted in shapes(result):
        pairs = list(zip(published, predicted, strict=True))
        difference = max(abs(other / one - 1) for one, other in pairs)
        both = ", ".join(f"{one:.2f} / {other:.2f}" for one, other in pairs[1:])
        yield f"strong scaling of {name} ({role}), published / predicted: {both}; {difference:.0%} apart at most"


def write(path: Path, result: Sequence[Compared], attributes: Mapping[str, Any]) -> None:
    """Write all comparisons to a new file. Raises StorageError."""
    files.check_place(path)
    names = [column.name for column in COLUMNS[1:]]
    rows = [{"comparison": number, **{name: getattr(one, name) for name in names}} for number, one in enumerate(result)]
    with files.edit(path, SCHEMA, VERSION) as file:
        file.attrs.update(attributes)
        datasets.create(file, "comparisons", COLUMNS)
        datasets.extend(file, "comparisons", columns_of(COLUMNS, rows))


def read(path: Path) -> list[Compared]:
    """Read the comparisons of a file. Raises StorageError."""
    with files.open_read(path, SCHEMA, VERSION) as file:
        rows = datasets.read(file, "comparisons")
    return [Compared(**{name: row[name] for name in row.keys() - {"comparison", "error"}}) for row in rows_of(rows)]


def plot(path: Path, result: Sequence[Compared], published: Mapping[str, Table]) -> None:
    """Plot predicted over published numbers: calibration rows hollow, shared rows half-filled, extra rows as crosses.

    Raises MissingCapabilityError without matplotlib.
    """
    figure = check_plot(path).Figure(figsize=(11, 5.2), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(1, 1.15))
    rows = [one for one in result if one.kind in ("throughput", "layer")]
    colours = {key: f"C{number}" for number, key in enumerate(dict.fromkeys(one.table for one in rows))}
    for key, colour in colours.items():
        right.plot([], [], color=colour, linestyle="none", label=published[key].title, **MARKS["test"])
        for role, style in MARKS.items():
            selected = [one for one in rows if (one.table, one.role) == (key, role) and one.tflops == one.tflops]
            speeds = np.array([(one.tflops / (1 + one.error), one.tflops) for one in selected]).reshape(-1, 2)
            left.plot(*speeds.T, color=colour, linestyle="none", **style)
    _bands(left)
    _errors(right, rows, colours)
    save(figure, path)


def _bands(axes: Any) -> None:
    ends = np.array([35.0, 700.0])
    for share, alpha in ((FAR, 0.10), (NEAR, 0.18)):
        axes.fill_between(ends, ends * (1 - share), ends * (1 + share), color="grey", alpha=alpha, linewidth=0)
    axes.plot(ends, ends, color="grey", linewidth=0.8)
    axes.set_xscale("log")
    axes.set_yscale("log")
    for axis, limit in ((axes.xaxis, axes.set_xlim), (axes.yaxis, axes.set_ylim)):
        limit(*ends)
        axis.set_ticks([50, 100, 200, 500], ["50", "100", "200", "500"])
        axis.set_ticks([], minor=True)
    axes.set_xlabel("published (TFLOP/s of a device, recomputation included)")
    axes.set_ylabel("predicted (TFLOP/s)")
    axes.set_title("bands: 10 and 20 %; hollow: calibration; half: shares its run; cross: does not count", fontsize=9)


def _errors(axes: Any, rows: Sequence[Compared], colours: Mapping[str, str]) -> None:
    for share, alpha in ((FAR, 0.10), (NEAR, 0.18)):
        axes.axhspan(-100 * share, 100 * share, color="grey", alpha=alpha, linewidth=0)
    axes.axhline(0, color="grey", linewidth=0.8)
    for index, one in enumerate(rows):
        axes.plot(index, 100 * one.error, color=colours[one.table], **MARKS[one.role])
    axes.set_xlabel("row, steps and layers, in the order that is printed")
    axes.set_ylabel("error of throughput (%), above 0: predicted faster")
    axes.legend(fontsize=8, loc="upper right")
