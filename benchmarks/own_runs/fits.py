"""Alpha-beta models at sizes that they were not fitted to, and formulas of what was not fitted at all."""

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
    """Something that was measured at a size, and predicted; ``way`` is "unseen" or "formula"."""

    where: str
    what: str
    way: str
    nbytes: float
    measured_s: float
    predicted_s: float

    @property
    def error(self) -> float:
        """Relative."""
        return self.predicted_s / self.measured_s - 1


def unseen(points: Path, where: str) -> list[Time]:
    """Return all sizes in a file of `hpcdist plan calibrate --points` that no fit has seen."""
    found = []
    for what, nbytes, seconds, borders in _series(points):
        fitted = line_fits.fit_pieces(nbytes, seconds, always=borders)
        at = dict(zip(nbytes.tolist(), seconds.tolist(), strict=True))
        found += [Time(where, what, "unseen", size, at[size], fitted.seconds(size)) for size in fitted.unseen_bytes]
    return found


def _series(points: Path) -> Iterator[tuple[str, np.ndarray, np.ndarray, np.ndarray]]:
    """Yield what was measured, its sizes, seconds, and the sizes at borders."""
    with files.open_read(points, SCHEMA, 1) as file:
        for (level,), *rest in _measured(file["messages"], "level", place=1):
            yield f"message, {level}", *rest
        for (operation, algorithm, level, ranks), *rest in _collectives(file):
            yield f"{algorithm} {operation}, {level}, {ranks} ranks", *rest


def _collectives(file: Any) -> Iterator[tuple[tuple[Any, ...], np.ndarray, np.ndarray, np.ndarray]]:
    """Yield operation, algorithm, level and ranks, with sizes, seconds, and the sizes at borders."""
    return _measured(file["collectives"], "operation", "algorithm", "level", "ranks", place=0)


def _measured(
    group: Any, *names: str, place: int
) -> Iterator[tuple[tuple[Any, ...], np.ndarray, np.ndarray, np.ndarray]]:
    """Yield what has the same in the columns ``names``, with sizes, ascending, seconds, and the sizes at borders."""
    keys = [tuple(row.values()) for row in rows_of({name: group[name][:] for name in names})]
    for key in dict.fromkeys(keys):
        own = np.array([one == key for one in keys])
        nbytes, seconds = group["nbytes"][:][own], group["seconds"][:, place][own]
        order = np.argsort(nbytes)
        yield key, nbytes[order], seconds[order], nbytes[group["border"][:][own]]


def by_formula(points: Path, cluster: Cluster, where: str, least_bytes: int) -> list[Time]:
    """Return collectives of all ranks by the formulas, from the levels of ``cluster``, which has no fits of them."""
    found = []
    group = network.span(ParallelLayout(data=cluster.devices), "data", cluster)
    with files.open_read(points, SCHEMA, 1) as file:
        for (operation, algorithm, level, ranks), sizes, times, _ in _collectives(file):
            if algorithm == "auto" or level != BETWEEN or ranks != cluster.devices:
                continue
            for nbytes, seconds in zip(sizes.tolist(), times.tolist(), strict=True):
                if nbytes >= least_bytes:
                    cost = network.collective(operation, nbytes, group, cluster, algorithm)
                    found.append(Time(where, f"{algorithm} {operation}", "formula", nbytes, seconds, cost.seconds))
    return found


def table(times: list[Time]) -> str:
    """Return a line for each operation: how many sizes, and how far off."""
    lines = []
    for key in dict.fromkeys((one.where, one.way, one.what) for one in times):
        own = [one for one in times if (one.where, one.way, one.what) == key]
        errors = np.array([abs(one.error) for one in own])
        low, high = min(one.nbytes for one in own), max(one.nbytes for one in own)
        said = f"{int((errors <= GOAL).sum())} of {len(own)} within {GOAL:.0%}"
        lines.append(
            f"{', '.join(key):<78} {low:>10,.0f} to {high:>12,.0f} bytes: {said}, median {np.median(errors):.1%}, "
            f"worst {errors.max():.0%}"
        )
    for way in dict.fromkeys(one.way for one in times):
        errors = np.array([abs(one.error) for one in times if one.way == way])
        said = f"{int((errors <= GOAL).sum())} of {len(errors)} within {GOAL:.0%}, median {np.median(errors):.1%}"
        lines.append(f"{'alpha-beta at unseen sizes' if way == 'unseen' else 'formulas from levels'}: {said}")
    return "\n".join(lines)
