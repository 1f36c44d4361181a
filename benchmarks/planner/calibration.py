"""Constants that the calibration rows choose: errors over a grid of memory shares and heights of the curve.

Two numbers of a device are chosen, by the calibration rows alone: the share of the memory's bandwidth that elementwise
kernels reach, and a factor of the curve of products. A point's score is the root of the mean of squared errors, each
table counting the same.
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
# Parts of what other quantities of the same rows are the sum of, and what has constants of its own.
PARTS: Final = ("block_forward_ms", "stage_forward_ms", "stage_input_ms", "stage_weight_ms", "message_ms")
TYPES: Final = ("float16", "bfloat16")


class Point(NamedTuple):
    """A memory share, a factor of the curve, and how far the calibration rows are from their predictions."""

    share: float
    factor: float
    score: float
    worst: float


def points(known: Mapping[str, Table], name: str) -> Iterator[Point]:
    """Yield the grid around the cluster ``name`` as it is shipped."""
    chosen = [
        replace(table, rows=rows)
        for table in known.values()
        if (rows := tuple(row for row in table.rows if row.role == "calibration" and row.cluster == name))
    ]
    shipped = predictions.cluster_of(name)
    for share in SHARES:
        for factor in FACTORS:
            errors = _errors(chosen, changed(shipped, share, factor))
            score = float(np.sqrt(np.mean([np.mean(np.square(own)) for own in errors])))
            yield Point(share, factor, score, max(float(np.abs(own).max()) for own in errors))


def changed(cluster: Cluster, share: float, factor: float) -> Cluster:
    """Return ``cluster`` with another memory share, and its 16-bit curves times ``factor``."""
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
    """Return the errors of the rows by table, with ``cluster`` in the place of the shipped one."""
    found = [one for table in chosen for one in predictions.compared(table, cluster)]
    counted = [one for one in found if one.kind in ("throughput", "layer") and one.quantity not in PARTS]
    return [[one.error for one in own] for _, own in groupby(counted, lambda one: one.table)]
