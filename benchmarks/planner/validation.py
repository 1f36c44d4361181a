"""Predictions of the planner beside published trainings: rows of published tables on the shipped clusters.

    python -m benchmarks planner
    python -m benchmarks planner -o validate.h5 --plot validate.png
    python -m benchmarks planner --calibrate a100-selene

The rows are in benchmarks/planner/published, with their sources and what had to be assumed. Constants of the shipped
clusters were chosen with the rows marked "calibration" alone; "test" rows count in the summary; "shared" rows are whole
steps of runs whose stages or blocks calibrate, and are counted apart; "extra" rows are shown, and their file tells why
they do not count. Closed forms (bytes of ZeRO, parameters, MFU and HFU of a known time, bubbles of known stage times)
have to agree to the last digit that is printed. Errors are of throughput: above 0 the planner is faster than what was
published. The exit code is 1 where a goal is missed: four fifths of the test rows within 10 %, all of them within 20 %,
closed forms exact.
"""

import argparse
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import harness
from benchmarks.harness import Results
from benchmarks.planner import report
from benchmarks.planner.calibration import points
from benchmarks.planner.predictions import Compared, compared
from benchmarks.planner.tables import tables
from hpcdist.comm.start import Session

SCHEMA, COMMITTED = report.SCHEMA, "planner/2026-11-27-validate-planner.h5"
WORSE = 1.01


@dataclass(frozen=True)
class Comparisons(Results):
    """All comparisons, and whether they are of all tables."""

    rows: Sequence[Compared] = ()
    complete: bool = True


def options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the study."""
    parser.add_argument("--table", nargs="+", help="files in benchmarks/planner/published; default: all")
    parser.add_argument(
        "--calibrate", metavar="CLUSTER", help="errors of its calibration rows over a grid of constants"
    )


def measure(chosen: argparse.Namespace, session: Session) -> Comparisons | None:
    """Return all comparisons; None where a grid of constants is asked for, and printed."""
    known = tables()
    if chosen.calibrate:
        print(f"{'memory share':>12}{'curve x':>9}{'score':>8}{'worst':>8}")
        for point in sorted(points(known, chosen.calibrate), key=lambda each: each.score):
            print(f"{point.share:12.2f}{point.factor:9.2f}{100 * point.score:7.2f}%{100 * point.worst:7.1f}%")
        return None
    names = chosen.table or list(known)
    if missing := [name for name in names if name not in known]:
        sys.exit(f"no table {', '.join(missing)}; there are {', '.join(known)}")
    rows = [row for name in names for row in compared(known[name])]
    return Comparisons({}, {}, {}, rows, not chosen.table)


def lines(results: Any) -> list[str]:
    """Return all comparisons, their summary and the shapes of strong scaling."""
    shown: list[Iterable[str]] = [report.lines(results.rows, tables())]
    shown += [report.said(report.summary(results.rows))] if results.complete else []
    return [line for part in (*shown, report.scaling(results.rows)) for line in part]


def ratios(results: Any) -> harness.Ratios:
    """Return, by table and kind, the larger of predicted and published over the smaller: 1 is exact."""
    by_kind: dict[str, list[float]] = {}
    for row in results.rows:
        if row.published and row.predicted:
            factor = row.predicted / row.published
            by_kind.setdefault(f"{row.table}, {row.kind}", []).append(max(factor, 1 / factor))
    return {name: np.array(factors) for name, factors in by_kind.items()}


def plot(results: Any, path: Path) -> None:
    report.plot(path, results.rows, tables())


def failures(results):
    return report.missed(report.summary(results.rows))


def read(path):
    return Comparisons({}, {}, {}, report.read(path))


def write(path, results, origin):
    return report.write(path, results.rows, origin)
