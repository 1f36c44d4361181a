"""Report of a benchmark of collectives: a table, JSON, and times and bandwidths against the size."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from hpcdist.bench.collectives.contenders import MEMCPY, NATIVE, REFERENCES
from hpcdist.bench.collectives.results import (
    COLD,
    OURS,
    SHARED,
    CollectivesConfiguration,
    CollectivesResults,
    bus_factor,
)
from hpcdist.errors import UsageError
from hpcdist.reporting import table as text_table
from hpcdist.reporting.figures import Catalogue, Figure
from hpcdist.reporting.plotting import drawing
from hpcdist.reporting.table import MISSING, text_of

WRONG: Final = "WRONG RESULT"


@dataclass(frozen=True)
class CollectivesRow:
    """The figures of one configuration, over the slowest rank of each iteration; None where there is none.

    ``x_native`` above 1 is faster than the MPI library's own collective on ordinary memory in the same run.
    """

    op: str
    dtype: str
    ranks: int
    nodes: int
    bytes: int
    algorithm: str
    buffers: str
    label: str
    implementation: str
    mpi_library: str
    reference: bool
    cache: str
    iterations: int
    median_s: float
    quartiles_s: tuple[float, float]
    p95_s: float
    x_native: float | None
    algorithm_bandwidth: float | None  # bytes/s
    bus_bandwidth: float | None  # bytes/s
    skew_s: float | None  # median over the iterations of the last rank's begin after the first's
    verified: int
    wrong: str


def rows(configurations: Iterable[CollectivesConfiguration]) -> list[CollectivesRow]:
    """Return one row for each configuration, by operation, dtype, ranks and size, native first, references last."""
    known = list(configurations)
    native = {
        _cell(configuration): float(np.median(configuration.slowest_s))
        for configuration in known
        if configuration.key.algorithm == NATIVE
        and configuration.key.implementation == OURS
        and configuration.key.buffers == "ordinary"
        and not configuration.wrong
    }
    table = [_row(configuration, native.get(_cell(configuration))) for configuration in known]
    libraries = {
        configuration.key.mpi_library: configuration.key.vendor
        for configuration in known
        if configuration.key.implementation == OURS
    }
    if len(libraries) > 1:  # the same algorithm on several: say which, with the version where a vendor is there twice
        if len(set(libraries.values())) < len(libraries):
            libraries = {library: " ".join(library.split(",")[0].split()) for library in libraries}
        table = [
            replace(row, label=f"{row.label}, {libraries[row.mpi_library]}") if row.implementation == OURS else row
            for row in table
        ]
    return sorted(table, key=lambda row: (row.op, row.dtype, row.ranks, row.bytes, _place(row), row.label))


def _cell(configuration: CollectivesConfiguration) -> tuple[Any, ...]:
    key = configuration.key
    return (key.op, key.dtype, key.bytes, key.ranks, key.nodes, key.cache, key.mpi_library)


def _place(row: CollectivesRow) -> int:
    return 2 if row.reference else 0 if row.algorithm == NATIVE else 1


def _row(configuration: CollectivesConfiguration, native_s: float | None) -> CollectivesRow:
    key, times = configuration.key, configuration.slowest_s
    low, median, high, late = (float(value) for value in np.percentile(times, [25, 50, 75, 95]))
    skew = configuration.start_s.max(axis=1)
    moved = key.bytes / median if key.ranks > 1 and not configuration.reference else None
    return CollectivesRow(
        **asdict(key),
        label=key.label,
        reference=configuration.reference,
        iterations=len(times),
        median_s=median,
        quartiles_s=(low, high),
        p95_s=late,
        x_native=None if native_s is None or configuration.reference or key.ranks == 1 else native_s / median,
        algorithm_bandwidth=moved,
        bus_bandwidth=None if moved is None else moved * bus_factor(key.op, key.ranks),
        skew_s=None if np.isnan(skew).any() else float(np.median(skew)),
        verified=configuration.verified,
        wrong=configuration.wrong,
    )


_FIGURES: Final[Catalogue[CollectivesRow]] = Catalogue(
    Figure("op", lambda row: row.op),
    Figure("dtype", lambda row: row.dtype),
    Figure("ranks", lambda row: row.ranks),
    Figure("bytes", lambda row: row.bytes),
    Figure("algorithm", lambda row: row.label),
    Figure("median us", lambda row: _us(row.median_s)),
    Figure("(quartiles)", lambda row: f"({_us(row.quartiles_s[0])} - {_us(row.quartiles_s[1])})"),
    Figure("p95", lambda row: _us(row.p95_s)),
    Figure("n", lambda row: row.iterations),
    Figure("x native", lambda row: row.x_native, ".2f"),
    Figure("alg GB/s", lambda row: row.algorithm_bandwidth, ".3f", 1e9),
    Figure("bus GB/s", lambda row: row.bus_bandwidth, ".3f", 1e9),
)
_TEXTS: Final = (0, 1, 4)


def _us(seconds: float) -> str:
    return text_of(seconds, ",.1f", 1e-6)


def text(table: Sequence[CollectivesRow]) -> str:
    """Return the table as lines for people, an empty line between sizes."""
    cells = _FIGURES.rows(table)
    for row, line in zip(table, cells[1:], strict=True):
        if row.wrong:  # its times mean nothing
            line[5:] = [WRONG, *[MISSING] * (len(line) - 6)]
    lines = text_table.aligned(cells, _TEXTS)
    return "\n".join(text_table.spaced(lines, [(row.op, row.dtype, row.ranks, row.bytes) for row in table]))


def notes(table: Sequence[CollectivesRow]) -> list[str]:
    """Return what a reader of the table has to know of how it came about."""
    lines = []
    if any(row.cache == COLD for row in table):
        lines.append("cold: every iteration worked on another buffer, so that its data came from memory (not --hot)")
    if any(row.cache != COLD for row in table):
        lines.append("hot: every iteration worked on the same buffer, written just before (--hot)")
    skews = [row.skew_s for row in table if row.skew_s is not None and row.ranks > 1]
    if skews:
        lines.append(
            "times are those of the slowest rank from a barrier on, and hold its skew: "
            f"{1e6 * np.median(skews):.2f} us between the first and the last rank that left it (median)"
        )
    verified = sum(row.verified for row in table)
    lines.append(f"{verified} results were compared element by element" if verified else "no result was verified")
    lines += [f"{row.label}, {row.op} of {row.bytes} bytes of {row.dtype}: {row.wrong}" for row in table if row.wrong]
    return lines


def jsonable(results: CollectivesResults) -> dict[str, Any]:
    """Return the report as JSON values; what there is not is null."""
    return {
        "provenance": dict(results.provenance),
        "configurations": [asdict(row) for row in rows(results.configurations)],
    }


def plot(table: Sequence[CollectivesRow], file: Path) -> None:
    """Draw time and bus bandwidth against the size, one line an algorithm, a row of panels for each operation.

    Raises MissingCapabilityError without matplotlib, StorageError when the file cannot be written.
    """
    good = [row for row in table if not row.wrong]
    panels = list(dict.fromkeys((row.op, row.dtype, row.ranks) for row in good))
    if not panels:
        raise UsageError("nothing was measured well, so there is nothing to plot")
    lines = max(len({row.label for row in good if (row.op, row.dtype, row.ranks) == panel}) for panel in panels)
    with drawing(file, 15, max(4.5, 0.18 * lines + 1) * len(panels)) as figure:
        axes = figure.subplots(len(panels), 2, squeeze=False)
        for (left, right), panel in zip(axes, panels, strict=True):
            _lines(left, right, [row for row in good if (row.op, row.dtype, row.ranks) == panel])
            left.set_title(f"{panel[0]}, {panel[1]}, {panel[2]} ranks", fontsize=10)


def _lines(left: Any, right: Any, table: Sequence[CollectivesRow]) -> None:
    """Draw the rows of one panel: the MPI library's own thick, references dashed."""
    from matplotlib import colormaps

    for axis in (left, right):
        axis.set_prop_cycle(color=[colormaps["tab20"](number) for number in range(20)])
    for label in dict.fromkeys(row.label for row in table):
        line = sorted((row for row in table if row.label == label), key=lambda row: row.bytes)
        sizes = [row.bytes for row in line]
        style: dict[str, Any] = {"marker": ".", "label": label}
        if line[0].buffers == SHARED:
            style |= {"linestyle": "-."}
        if line[0].reference:
            style |= {"linestyle": "--", "color": "0.4" if line[0].algorithm == MEMCPY else "0.7"}
        elif line[0].algorithm == NATIVE:
            style |= {"linewidth": 2.5, "color": "black"}
        left.plot(sizes, [1e6 * row.median_s for row in line], **style)
        if all(row.bus_bandwidth is not None for row in line):
            right.plot(sizes, [(row.bus_bandwidth or 0.0) / 1e9 for row in line], **style)
        elif line[0].algorithm in REFERENCES:
            right.plot(sizes, [row.bytes / row.median_s / 1e9 for row in line], **style)
    left.set_ylabel("median time, slowest rank (us)")
    right.set_ylabel("bus bandwidth (GB/s); references: bytes / time")
    for axis in (left, right):
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.set_xlabel("bytes")
        axis.grid(True, which="major", alpha=0.3)
    right.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.01, 1.0))
