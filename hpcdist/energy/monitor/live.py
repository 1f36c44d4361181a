"""Live power and utilisation of a job, from the latest rows of its nodes. Reads no sensor."""

import math
from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np

from hpcdist.energy.monitor.sampler import DrainedSamples
from hpcdist.energy.monitor.tables import NodeRows
from hpcdist.energy.report import NODE
from hpcdist.energy.sources.utilisation import COLUMNS, SHARES

DIRECTIONS: Final = {"sent": COLUMNS.index("sent_bytes"), "received": COLUMNS.index("received_bytes")}


class MeanPower:
    """Mean power of the sources of a node between calls of `by_source`, from the energy that they counted."""

    def __init__(self) -> None:
        self._last: dict[int, tuple[int, int]] = {}  # time and energy of the last sample of a source

    def by_source(self, sources: int, drained: DrainedSamples) -> list[float]:
        """Return the watts of each source since the last call; NaN where that is not known."""
        gaps = set(drained.gaps[:, 1].tolist())
        means = []
        for source in range(sources):
            own = drained.samples[drained.samples[:, 1] == source]
            watts = math.nan
            if len(own):
                then_ns, before_mj = self._last.get(source, (int(own[0, 0]), int(own[0, 2])))
                now_ns, now_mj = int(own[-1, 0]), int(own[-1, 2])
                self._last[source] = now_ns, now_mj
                if now_ns > then_ns and source not in gaps:
                    watts = (now_mj - before_mj) * 1e6 / (now_ns - then_ns)
            means.append(watts)
        return means


class LiveFigures:
    """Latest figures of all nodes."""

    def __init__(self) -> None:
        self._rows: Sequence[NodeRows] = ()
        self._bytes: dict[int, Mapping[str, float]] = {}

    def see(self, rows: Sequence[NodeRows]) -> None:
        """Take the rows that nodes have brought since the last call."""
        self._rows = rows
        for row in rows:
            if len(row.drained.looks):
                last = row.drained.shares[-1]
                self._bytes[row.node] = {name: float(last[place]) for name, place in DIRECTIONS.items()}

    def power(self) -> dict[str, float]:
        """Return watts by kind; NaN where a node lacks a kind it should have. "node" only where all nodes have it."""
        kinds = dict.fromkeys(kind for row in self._rows for kind in row.watts)
        if not all(NODE in row.watts for row in self._rows):
            kinds.pop(NODE, None)
        return {
            kind: math.nan
            if any(kind in row.lacking for row in self._rows)
            else math.fsum(row.watts.get(kind, 0.0) for row in self._rows)
            for kind in kinds
        }

    def utilisation(self) -> dict[str, float]:
        """Return the mean share over time and nodes by resource; those that no node knows are left out."""
        shares = [row.drained.shares[:, : len(SHARES)] for row in self._rows if len(row.drained.looks)]
        if not shares:
            return {}
        means = np.array([_means(node_shares) for node_shares in shares])
        by_resource = dict(zip(SHARES, _means(means).tolist(), strict=True))
        return {name: value for name, value in by_resource.items() if not math.isnan(value)}

    def network(self) -> dict[str, float]:
        """Return the bytes in each direction; NaN where a node cannot tell, nothing before the first look."""
        if not self._bytes:
            return {}
        return {name: math.fsum(node[name] for node in self._bytes.values()) for name in DIRECTIONS}


def _means(shares: np.ndarray) -> np.ndarray:
    """Return the mean of each column (columns,) over what is known of ``shares`` (rows, columns)."""
    known = ~np.isnan(shares)
    counts = known.sum(axis=0)
    sums = np.where(known, shares, 0.0).sum(axis=0)
    return np.where(counts > 0, sums / np.maximum(counts, 1), np.nan)
