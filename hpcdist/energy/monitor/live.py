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
    """Mean power of a node's energy sources since the previous call of `by_source`."""

    def __init__(self) -> None:
        self._last: dict[int, tuple[int, int]] = {}  # time and energy of the last sample of a source

    def by_source(self, sources: int, drained: DrainedSamples) -> list[float]:
        """Return the mean watts of sources 0 to ``sources`` - 1, or NaN. ``drained``: samples since the last call."""
        gaps = set(drained.gaps[:, 1].tolist())
        means = []
        for source in range(sources):
            rows = drained.samples[drained.samples[:, 1] == source]
            watts = math.nan
            if len(rows):
                then_ns, before_mj = self._last.get(source, (int(rows[0, 0]), int(rows[0, 2])))
                now_ns, now_mj = int(rows[-1, 0]), int(rows[-1, 2])
                self._last[source] = now_ns, now_mj
                if now_ns > then_ns and source not in gaps:
                    watts = (now_mj - before_mj) * 1e6 / (now_ns - then_ns)
            means.append(watts)
        return means


class LiveFigures:
    """Latest power, utilisation and network traffic of all nodes."""

    def __init__(self) -> None:
        self._rows: Sequence[NodeRows] = ()
        self._bytes: dict[int, Mapping[str, float]] = {}

    def see(self, rows: Sequence[NodeRows]) -> None:
        """Replace the stored samples and mean power of each node by ``rows``, the result of `EnergyMonitor.collect`."""
        self._rows = rows
        for row in rows:
            if len(row.drained.looks):
                last = row.drained.shares[-1]
                self._bytes[row.node] = {name: float(last[column]) for name, column in DIRECTIONS.items()}

    def power(self) -> dict[str, float]:
        """Return {kind of energy source, such as "gpu": watts of all nodes}. NaN: not measured completely on a node."""
        kinds = dict.fromkeys(kind for row in self._rows for kind in row.watts)
        # Watts of whole nodes are a total only if all nodes have them.
        if not all(NODE in row.watts for row in self._rows):
            kinds.pop(NODE, None)
        return {
            kind: math.nan
            if any(kind in row.lacking for row in self._rows)
            else math.fsum(row.watts.get(kind, 0.0) for row in self._rows)
            for kind in kinds
        }

    def utilisation(self) -> dict[str, float]:
        """Return {resource: utilisation from 0 to 1} for the known resources in `SHARES`: mean over time and nodes."""
        shares = [row.drained.shares[:, : len(SHARES)] for row in self._rows if len(row.drained.looks)]
        if not shares:
            return {}
        means = np.array([_means(node_shares) for node_shares in shares])
        by_resource = dict(zip(SHARES, _means(means).tolist(), strict=True))
        return {name: value for name, value in by_resource.items() if not math.isnan(value)}

    def network(self) -> dict[str, float]:
        """Return the network bytes "sent" and "received" by all nodes since the construction of the monitor.

        A value is NaN if unknown. Before the first sample, the result is {}.
        """
        if not self._bytes:
            return {}
        return {name: math.fsum(node[name] for node in self._bytes.values()) for name in DIRECTIONS}


def _means(shares: np.ndarray) -> np.ndarray:
    is_known = ~np.isnan(shares)
    counts = is_known.sum(axis=0)
    sums = np.where(is_known, shares, 0.0).sum(axis=0)
    return np.where(counts > 0, sums / np.maximum(counts, 1), np.nan)
