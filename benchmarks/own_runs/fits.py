"""Errors of alpha-beta models at sizes outside their fit, and of formulas for collectives without a fit."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from benchmarks.harness import rows_of
from hpcdist.hdf5 import files
from hpcdist.planner.calibrate import line_fits
from hpcdist.planner.cluster.hardware import Cluster
from hpcdist.planner.layout import ParallelLayout
from hpcdist.planner.time import network

GOAL: Final = 0.20
SCHEMA: Final = "hpcdist.calibration"
BETWEEN: Final = "network"


class Time(NamedTuple):
    """A measured time of a message or collective, and its prediction; ``way`` is "unseen" or "formula"."""

    where: str
    what: str
    way: str
    nbytes: float
    measured_s: float
    predicted_s: float

    @property
    def error(self) -> float:
        return self.predicted_s / self.measured_s - 1


def unseen(points: Path, where: str) -> list[Time]:
    """Return the sizes in a file of `hpcdist plan calibrate --points` that the fits have not used."""
    results = []
    for what, nbytes, seconds, borders in _series(points):
        model = line_fits.fit_pieces(nbytes, seconds, required_sizes=borders)
        times = dict(zip(nbytes.tolist(), seconds.tolist(), strict=True))
        results += [Time(where, what, "unseen", size, times[size], model.seconds(size)) for size in model.unseen_bytes]
    return results


def _series(points: Path) -> Iterator[tuple[str, np.ndarray, np.ndarray, np.ndarray]]:
    with files.open_read(points, SCHEMA, 1) as file:
        for (level,), *rest in _measured(file["messages"], "level", place=1):
            yield f"message, {level}", *rest
        for (operation, algorithm, level, ranks), *rest in _collectives(file):
            yield f"{algorithm} {operation}, {level}, {ranks} ranks", *rest


def _collectives(file: Any) -> Iterator[tuple[tuple[Any, ...], np.ndarray, np.ndarray, np.ndarray]]:
    return _measured(file["collectives"], "operation", "algorithm", "level", "ranks", place=0)


def _measured(
    group: Any, *names: str, place: int
) -> Iterator[tuple[tuple[Any, ...], np.ndarray, np.ndarray, np.ndarray]]:
    """Group the rows by the columns ``names``; yield key, ascending sizes, seconds and border sizes."""
    keys = [tuple(row.values()) for row in rows_of({name: group[name][:] for name in names})]
    for key in dict.fromkeys(keys):
        selected = np.array([row_key == key for row_key in keys])
        nbytes, seconds = group["nbytes"][:][selected], group["seconds"][:, place][selected]
        order = np.argsort(nbytes)
        yield key, nbytes[order], seconds[order], nbytes[group["border"][:][selected]]


def by_formula(points: Path, cluster: Cluster, where: str, least_bytes: int) -> list[Time]:
    """Predict the collectives of all ranks by the formulas, from the levels of ``cluster``."""
    results = []
    group = network.span(ParallelLayout(data=cluster.devices), "data", cluster)
    with files.open_read(points, SCHEMA, 1) as file:
        for (operation, algorithm, level, ranks), sizes, times, _ in _collectives(file):
            if algorithm == "auto" or level != BETWEEN or ranks != cluster.devices:
                continue
            for nbytes, seconds in zip(sizes.tolist(), times.tolist(), strict=True):
                if nbytes >= least_bytes:
                    cost = network.collective(operation, nbytes, group, cluster, algorithm)
                    results.append(Time(where, f"{algorithm} {operation}", "formula", nbytes, seconds, cost.seconds))
    return results


def table(times: list[Time]) -> str:
    lines = []
    for key in dict.fromkeys((one.where, one.way, one.what) for one in times):
        group = [one for one in times if (one.where, one.way, one.what) == key]
        errors = np.array([abs(one.error) for one in group])
        low, high = min(one.nbytes for one in group), max(one.nbytes for one in group)
        summary = f"{int((errors <= GOAL).sum())} of {len(group)} within {GOAL:.0%}"
        lines.append(
            f"{', '.join(key):<78} {low:>10,.0f} to {high:>12,.0f} bytes: {summary}, median {np.median(errors):.1%}, "
            f"worst {errors.max():.0%}"
        )
    for way in dict.fromkeys(one.way for one in times):
        errors = np.array([abs(one.error) for one in times if one.way == way])
        summary = f"{int((errors <= GOAL).sum())} of {len(errors)} within {GOAL:.0%}, median {np.median(errors):.1%}"
        lines.append(f"{'alpha-beta at unseen sizes' if way == 'unseen' else 'formulas from levels'}: {summary}")
    return "\n".join(lines)
