"""What `validate_planner.py` says of its comparisons: lines, summaries, shapes of strong scaling, a picture, a file."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, Final

import numpy as np
from validate_planner_predict import Compared
from validate_planner_rows import Table

from hpcdist.errors import MissingCapabilityError
from hpcdist.hdf5 import files, tables
from hpcdist.hdf5.tables import Column

SCHEMA, VERSION = "hpcdist.benchmark.validate_planner", 1
NEAR, FAR = 0.10, 0.20  # what throughput is to be within: most rows, all rows
MOST: Final = 0.80
COLUMNS: Final = (
    Column("comparison", "i4", "1", "number of the comparison"),
    Column("table", "S24", "1", "file in benchmarks/published"),
    Column("row", "S64", "1", "line of the table"),
    Column("quantity", "S24", "1", "what was published"),
    Column("role", "S16", "1", "calibration: constants were chosen with it; test; extra: it does not count"),
    Column("kind", "S16", "1", "throughput, layer, memory, closed or bubble"),
    Column("published", "f8", "1", "in the units of the table"),
    Column("predicted", "f8", "1", "the same by the planner"),
    Column("error", "f8", "1", "predicted over published, less one; above 0: faster, or more"),
)


def lines(found: Sequence[Compared], known: Mapping[str, Table]) -> Iterator[str]:
    """Yield a title and a line for each comparison, table by table; closed forms that agree as one line."""
    for key, group in groupby(found, lambda one: one.table):
        own = list(group)
        yield ""
        yield f"{known[key].title} ({known[key].source})"
        yield f"  {'row':<52}{'quantity':<22}{'published':>10}{'predicted':>11}{'error':>8}  role"
        for one in own:
            if one.kind in ("closed", "bubble") and one.exact:
                continue
            error = f"{100 * one.error:+7.1f}%" if one.kind != "bubble" else f"{one.predicted - one.published:+8.4f}"
            yield f"  {one.row:<52}{one.quantity:<22}{one.published:10.5g}{one.predicted:11.5g}{error}  {one.role}"
        exact = sum(one.exact for one in own if one.kind in ("closed", "bubble"))
        if exact:
            yield f"  {exact} closed forms agree to the last printed digit"


def summary(found: Sequence[Compared]) -> dict[str, dict[str, float]]:
    """Return counts and errors by table, kind and role, and over all test rows (those of "all")."""
    result: dict[str, dict[str, float]] = {}
    for one in found:
        names = f"{one.table}, {one.kind}, {one.role}", f"all, {one.kind}, {one.role}"
        for name in names:
            result.setdefault(name, {})
    for name in result:
        table, kind, role = name.split(", ")
        own = [o for o in found if table in (o.table, "all") and (o.kind, o.role) == (kind, role)]
        errors = np.abs([one.error for one in own])
        result[name] = {
            "rows": len(own),
            "exact": sum(one.exact for one in own),
            "near": int((errors <= NEAR).sum()),
            "far": int((errors <= FAR).sum()),
            "mean": float(errors.mean()),
            "worst": float(errors.max()),
        }
    return result


def said(result: Mapping[str, Mapping[str, float]]) -> Iterator[str]:
    """Yield the lines of a `summary`, those over all tables last, and whether the goals are met."""
    yield ""
    yield f"{'table, kind, role':<56}{'rows':>5}{'exact':>7}{'<= 10 %':>9}{'<= 20 %':>9}{'mean':>8}{'worst':>8}"
    for name in sorted(result, key=lambda name: (name.startswith("all"), name)):
        one = result[name]
        is_closed = ", closed" in name or ", bubble" in name
        middle = f"{one['exact']:7.0f}{'':>18}" if is_closed else f"{'':>7}{one['near']:9.0f}{one['far']:9.0f}"
        ends = "" if is_closed else f"{100 * one['mean']:7.1f}%{100 * one['worst']:7.1f}%"
        yield f"{name:<56}{one['rows']:5.0f}{middle}{ends}"
    closed, whole = result["all, closed, test"], result["all, throughput, test"]
    yield ""
    yield f"closed forms exact: {closed['exact']:.0f} of {closed['rows']:.0f}"
    near, far, rows = whole["near"], whole["far"], whole["rows"]
    yield (
        f"throughput of test rows within {NEAR:.0%}: {near:.0f} of {rows:.0f} ({near / rows:.0%}; wanted {MOST:.0%}), "
        f"within {FAR:.0%}: {far:.0f} of {rows:.0f} (wanted all)"
    )


def shapes(found: Sequence[Compared]) -> Iterator[tuple[str, list[float], list[float]]]:
    """Yield each series of strong scaling: a device's throughput over that of the first row, published, predicted."""
    rows = [one for one in found if one.series and one.kind == "throughput"]
    for name in dict.fromkeys(one.series for one in rows):
        own = [one for one in rows if one.series == name]
        yield name, [o.published / own[0].published for o in own], [o.predicted / own[0].predicted for o in own]


def write(path: Path, found: Sequence[Compared], attributes: Mapping[str, Any]) -> None:
    """Write all comparisons to a new file. Raises StorageError."""
    files.check_place(path)
    names = [column.name for column in COLUMNS[1:]]
    columns = {"comparison": np.arange(len(found), dtype="i4")}
    for column in COLUMNS[1:]:
        values = [getattr(one, column.name) for one in found]
        text = column.dtype.startswith("S")
        columns[column.name] = np.array([value.encode() for value in values] if text else values, column.dtype)
    assert set(names) < set(columns)
    with files.edit(path, SCHEMA, VERSION) as file:
        file.attrs.update(attributes)
        tables.create(file, "comparisons", COLUMNS)
        tables.extend(file, "comparisons", columns)


def read(path: Path) -> list[Compared]:
    """Return the comparisons of a file. Raises StorageError."""
    with files.open_read(path, SCHEMA, VERSION) as file:
        rows = tables.read(file, "comparisons")
    texts = {name: [value.decode() for value in rows[name]] for name in ("table", "row", "quantity", "role", "kind")}
    numbers = {name: rows[name].tolist() for name in ("published", "predicted")}
    together = {**texts, **numbers}
    return [
        Compared(unit=0.0, **{name: values[at] for name, values in together.items()})
        for at in range(len(rows["comparison"]))
    ]


def plot(path: Path, found: Sequence[Compared], known: Mapping[str, Table]) -> None:
    """Draw predicted against published; calibration rows are hollow, extras small crosses.

    Raises MissingCapabilityError without matplotlib.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingCapabilityError("a picture needs matplotlib; install hpcdist[analysis]") from error
    figure = Figure(figsize=(11, 5.2), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(1, 1.15))
    rows = [one for one in found if one.kind in ("throughput", "layer")]
    colours = {key: f"C{number}" for number, key in enumerate(dict.fromkeys(one.table for one in rows))}
    for key, colour in colours.items():
        for role in ("calibration", "test", "extra"):
            own = [one for one in rows if (one.table, one.role) == (key, role)]
            if not own:
                continue
            style: dict[str, Any] = {"color": colour, "linestyle": "none", "markersize": 6}
            style |= {
                "calibration": {"marker": "o", "fillstyle": "none"},
                "test": {"marker": "o"},
                "extra": {"marker": "x", "alpha": 0.6},
            }[role]
            label = known[key].title if role == _first_role(rows, key) else None
            speeds = np.array([_speed(one) for one in own])
            left.plot(speeds[:, 0], speeds[:, 1], label=label, **style)
    _bands(left)
    _errors(right, rows, colours)
    figure.savefig(path, dpi=130)


def _first_role(rows: Sequence[Compared], key: str) -> str:
    """Return the role by whose mark a table is named in the legend."""
    roles = {one.role for one in rows if one.table == key}
    return next(role for role in ("test", "calibration", "extra") if role in roles)


def _speed(one: Compared) -> tuple[float, float]:
    """Return published and predicted in units of their own, both as rates."""
    if one.quantity.endswith(("_ms", "step_s")):
        return 1 / one.published, 1 / one.predicted
    return one.published, one.predicted


def _bands(axes: Any) -> None:
    ends = np.array(axes.get_xlim())
    ends = np.array([min(0.005, max(ends[0], 1e-3)), ends[1] * 1.5])
    for share, alpha in ((FAR, 0.10), (NEAR, 0.18)):
        axes.fill_between(ends, ends * (1 - share), ends * (1 + share), color="grey", alpha=alpha, linewidth=0)
    axes.plot(ends, ends, color="grey", linewidth=0.8)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlim(*ends)
    axes.set_ylim(*ends)
    axes.set_xlabel("published (TFLOP/s of a device, samples/s of a device, steps/s, blocks/ms, ratio)")
    axes.set_ylabel("predicted")
    axes.legend(fontsize=8, loc="upper left")
    axes.set_title("bands: 10 and 20 %; hollow: calibration; cross: does not count", fontsize=9)


def _errors(axes: Any, rows: Sequence[Compared], colours: Mapping[str, str]) -> None:
    axes.axhspan(-100 * FAR, 100 * FAR, color="grey", alpha=0.10, linewidth=0)
    axes.axhspan(-100 * NEAR, 100 * NEAR, color="grey", alpha=0.18, linewidth=0)
    axes.axhline(0, color="grey", linewidth=0.8)
    marks = {"calibration": ("o", "none"), "test": ("o", "full"), "extra": ("x", "full")}
    for at, one in enumerate(rows):
        marker, filled = marks[one.role]
        axes.plot(at, 100 * one.error, marker=marker, fillstyle=filled, color=colours[one.table], markersize=5)
    axes.set_xlabel("row")
    axes.set_ylabel("error of throughput (%), above 0: predicted faster")
