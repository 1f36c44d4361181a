"""Report of the benchmark of collectives: a table, JSON, and a plot of times and bandwidths against the size."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from hpcdist.bench.collectives.contenders import MEMCPY, NATIVE
from hpcdist.bench.collectives.results import (
    COLD,
    ORDINARY,
    OURS,
    SHARED,
    CollectivesConfiguration,
    CollectivesResults,
    ConfigurationKey,
    bus_factor,
)
from hpcdist.errors import UsageError
from hpcdist.reporting import table as text_table
from hpcdist.reporting.plotting import drawing
from hpcdist.reporting.table import MISSING, Catalogue, Figure, text_of


@dataclass(frozen=True)
class CollectivesRow(ConfigurationKey):
    """Table row of a benchmarked algorithm. All durations refer to the slowest rank. None means not applicable."""

    reference: bool
    iterations: int
    median_s: float
    quartiles_s: tuple[float, float]
    p95_s: float
    x_native: float | None  # speed relative to the MPI library's collective on ordinary memory
    algorithm_bandwidth: float | None  # bytes/s
    bus_bandwidth: float | None  # bytes/s
    skew_s: float | None  # time from the first rank's begin to the last rank's begin, median over iterations
    verified: int
    wrong: str
    label: str = ""  # name in tables and plots


def rows(configurations: Iterable[CollectivesConfiguration]) -> list[CollectivesRow]:
    """Return a list of one row per configuration, sorted by operation, dtype, ranks, size and algorithm."""
    configurations = list(configurations)
    native_s = {
        _cell(configuration): float(np.median(configuration.slowest_s))
        for configuration in configurations
        if (configuration.key.algorithm, configuration.key.implementation) == (NATIVE, OURS)
        and configuration.key.buffers == ORDINARY
        and not configuration.wrong
    }
    table = [_row(configuration, native_s.get(_cell(configuration))) for configuration in configurations]
    keys = [configuration.key for configuration in configurations]
    libraries = {key.mpi_library: key.vendor for key in keys if key.implementation == OURS}
    if len(libraries) > 1:  # labels name the MPI library, with the version if a vendor occurs twice
        if len(set(libraries.values())) < len(libraries):
            libraries = {library: " ".join(library.split(",")[0].split()) for library in libraries}
        table = [
            replace(row, label=f"{row.label}, {libraries[row.mpi_library]}") if row.implementation == OURS else row
            for row in table
        ]
    return sorted(table, key=lambda row: (*_group(row), row.bytes, row.reference, row.algorithm != NATIVE, row.label))


def _cell(configuration: CollectivesConfiguration) -> tuple[Any, ...]:
    key = configuration.key
    return (key.op, key.dtype, key.bytes, key.ranks, key.nodes, key.cache, key.mpi_library)


def _group(row: CollectivesRow) -> tuple[str, str, int]:
    return row.op, row.dtype, row.ranks


def _row(configuration: CollectivesConfiguration, native_s: float | None) -> CollectivesRow:
    key, times = configuration.key, configuration.slowest_s
    low, median, high, late = (float(value) for value in np.percentile(times, [25, 50, 75, 95]))
    skew = configuration.start_s.max(axis=1)
    bandwidth = key.bytes / median if key.ranks > 1 and not configuration.reference else None
    return CollectivesRow(
        **asdict(key),
        label=key.label,
        reference=configuration.reference,
        iterations=len(times),
        median_s=median,
        quartiles_s=(low, high),
        p95_s=late,
        x_native=None if native_s is None or configuration.reference or key.ranks == 1 else native_s / median,
        algorithm_bandwidth=bandwidth,
        bus_bandwidth=None if bandwidth is None else bandwidth * bus_factor(key.op, key.ranks),
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


def _us(seconds: float) -> str:
    return text_of(seconds, ",.1f", 1e-6)


def text(table: Sequence[CollectivesRow]) -> str:
    """Format the rows ``table`` as an aligned text table, with an empty line between sizes."""
    cells = _FIGURES.rows(table)
    for row, line in zip(table, cells[1:], strict=True):
        if row.wrong:  # the times of a wrong result have no meaning
            line[5:] = ["WRONG RESULT", *[MISSING] * (len(line) - 6)]
    lines = text_table.aligned(cells, left=(0, 1, 4))
    return "\n".join(text_table.spaced(lines, [(*_group(row), row.bytes) for row in table]))


def notes(table: Sequence[CollectivesRow]) -> list[str]:
    """Return text lines about measurement conditions, start delays and wrong results, to print below the table."""
    lines = []
    if any(row.cache == COLD for row in table):
        lines.append("cold: each iteration used a different buffer, so the data came from memory (without --hot)")
    if any(row.cache != COLD for row in table):
        lines.append("hot: each iteration used the same, recently written buffer (--hot)")
    skews = [row.skew_s for row in table if row.skew_s is not None and row.ranks > 1]
    if skews:
        lines.append(
            "a time is from a barrier to the end on the slowest rank. It includes the skew of the barrier: "
            f"{1e6 * np.median(skews):.2f} us (median) from the first rank to the last rank that leaves the barrier"
        )
    verified = sum(row.verified for row in table)
    lines.append(f"{verified} results were compared element by element" if verified else "no result was verified")
    lines += [f"{row.label}, {row.op} of {row.bytes} bytes of {row.dtype}: {row.wrong}" for row in table if row.wrong]
    return lines


def jsonable(results: CollectivesResults) -> dict[str, Any]:
    """Return a dict for JSON with the provenance and one object per configuration. Missing values are null."""
    return {
        "provenance": dict(results.provenance),
        "configurations": [asdict(row) for row in rows(results.configurations)],
    }


def plot(table: Sequence[CollectivesRow], file: Path) -> None:
    """Save a plot of duration and bus bandwidth over size to ``file``. Raises UsageError without a correct result."""
    panels: dict[tuple[str, str, int], list[CollectivesRow]] = {}
    for row in table:
        if not row.wrong:
            panels.setdefault(_group(row), []).append(row)
    if not panels:
        raise UsageError("there is nothing to plot: no measurement has a correct result")
    lines = max(len({row.label for row in panel}) for panel in panels.values())
    with drawing(file, 15, max(4.5, 0.18 * lines + 1) * len(panels)) as figure:
        axes = figure.subplots(len(panels), 2, squeeze=False)
        for (left, right), ((op, dtype, ranks), panel) in zip(axes, panels.items(), strict=True):
            _lines(left, right, panel)
            left.set_title(f"{op}, {dtype}, {ranks} ranks", fontsize=10)


def _lines(left: Any, right: Any, table: Sequence[CollectivesRow]) -> None:
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
        bandwidths = [row.bytes / row.median_s if row.reference else row.bus_bandwidth for row in line]
        if None not in bandwidths:
            right.plot(sizes, np.array(bandwidths, float) / 1e9, **style)
    left.set_ylabel("median time, slowest rank (us)")
    right.set_ylabel("bus bandwidth (GB/s); references: bytes / time")
    for axis in (left, right):
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.set_xlabel("bytes")
        axis.grid(True, which="major", alpha=0.3)
    right.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.01, 1.0))
