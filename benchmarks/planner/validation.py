"""Predictions of the planner compared with published trainings, on the shipped clusters.

    python -m benchmarks planner
    python -m benchmarks planner -o validate.h5 --plot validate.png
    python -m benchmarks planner --calibrate a100-selene

The rows, sources and assumptions are in benchmarks/planner/published. "calibration" rows alone determined the constants
of the shipped clusters. "test" rows count in the summary. "shared" rows are steps of runs whose stages or blocks are
calibration rows; they are counted separately. "extra" rows do not count, for the reason in their file. Closed forms
(ZeRO bytes, parameters, MFU and HFU of a published time, bubbles of published stage times) must agree to the last
printed digit. Errors are of throughput: positive if the planner predicts a faster training. Goals: 80 % of the test
rows within 10 %, all within 20 %, closed forms exact; otherwise exit code 1.
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

SCHEMA, COMMITTED = report.SCHEMA, "planner/2026-12-01-validate-planner.h5"
WORSE = 1.01


@dataclass(frozen=True)
class Comparisons(Results):
    rows: Sequence[Compared] = ()
    complete: bool = True


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--table", nargs="+", help="files in benchmarks/planner/published; default: all")
    parser.add_argument(
        "--calibrate", metavar="CLUSTER", help="print the errors of its calibration rows over a grid of constants"
    )


def measure(chosen: argparse.Namespace, session: Session) -> Comparisons | None:
    """Compare all chosen tables. With --calibrate, print a grid of constants and return None."""
    published = tables()
    if chosen.calibrate:
        print(f"{'memory share':>12}{'curve x':>9}{'score':>8}{'worst':>8}")
        for point in sorted(points(published, chosen.calibrate), key=lambda candidate: candidate.score):
            print(f"{point.share:12.2f}{point.factor:9.2f}{100 * point.score:7.2f}%{100 * point.worst:7.1f}%")
        return None
    names = chosen.table or list(published)
    if missing := [name for name in names if name not in published]:
        sys.exit(f"no table {', '.join(missing)}; choose from {', '.join(published)}")
    rows = [row for name in names for row in compared(published[name])]
    return Comparisons({}, {}, {}, rows, not chosen.table)


def lines(results: Any) -> list[str]:
    sections: list[Iterable[str]] = [report.lines(results.rows, tables())]
    sections += [report.by_program(results.rows)]
    sections += [report.said(report.summary(results.rows))] if results.complete else []
    return [line for section in (*sections, report.scaling(results.rows)) for line in section]


def ratios(results: Any) -> harness.Ratios:
    """Return the larger of predicted / published and its inverse, by table and kind: 1 is exact."""
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
