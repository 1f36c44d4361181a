"""Choice of a device's constants from the calibration rows, by a grid of memory shares and curve factors.

The memory share is the fraction of the bandwidth that elementwise kernels reach; the factor scales the efficiency curve
of matrix products. The score of a point is the root mean square of the errors, with equal weight for each table.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Final, NamedTuple

import numpy as np

from benchmarks.planner import predictions
from benchmarks.planner.tables import Table
from hpcdist.planner.cluster.hardware import Cluster, EfficiencyCurve

FACTORS: Final = (0.92, 0.96, 0.98, 1.0, 1.02, 1.04, 1.08)
SHARES: Final = (0.73, 0.76, 0.79, 0.82, 0.85, 0.88, 0.91)
# Quantities that are parts of other quantities of the same rows, or that have separate constants.
PARTS: Final = ("block_forward_ms", "stage_forward_ms", "stage_input_ms", "stage_weight_ms", "message_ms")
TYPES: Final = ("float16", "bfloat16")


class Point(NamedTuple):
    """A memory share, a curve factor, and the errors of the calibration rows."""

    share: float
    factor: float
    score: float
    worst: float


def points(published: Mapping[str, Table], name: str) -> Iterator[Point]:
    """Yield the grid around the constants of the shipped cluster ``name``."""
    calibration_tables = [
        replace(table, rows=rows)
        for table in published.values()
        if (rows := tuple(row for row in table.rows if row.role == "calibration" and row.cluster == name))
    ]
    shipped = predictions.cluster_of(name)
    for share in SHARES:
        for factor in FACTORS:
            errors = _errors(calibration_tables, changed(shipped, share, factor))
            score = float(np.sqrt(np.mean([np.mean(np.square(table_errors)) for table_errors in errors])))
            yield Point(share, factor, score, max(float(np.abs(table_errors).max()) for table_errors in errors))


def changed(cluster: Cluster, share: float, factor: float) -> Cluster:
    device = cluster.device
    curves = dict(device.matmul)
    for kind in TYPES:
        if kind in curves:
            curve = curves[kind]
            curves[kind] = EfficiencyCurve(
                sizes=curve.sizes, shares=tuple(min(1.0, factor * one) for one in curve.shares)
            )
    return replace(cluster, device=replace(device, memory_share=share, matmul=curves))


def _errors(chosen: Sequence[Table], cluster: Cluster) -> list[list[float]]:
    results = [row for table in chosen for row in predictions.compared(table, cluster)]
    counted = [row for row in results if row.kind in ("throughput", "layer") and row.quantity not in PARTS]
    return [[row.error for row in group] for _, group in groupby(counted, lambda row: row.table)]
