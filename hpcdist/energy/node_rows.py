"""Energy data of one node: windows of phases, rows for the group ``energy`` of a metrics file, and live figures.

Windows nest, and the innermost window gets the joules. Without an energy source, the file has only the tables
``utilisation`` and ``sampler``. Reads no sensor.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from hpcdist.constants import ENERGY_GROUP
from hpcdist.energy.report import NODE
from hpcdist.energy.sampler import DrainedSamples
from hpcdist.energy.sources.counters import SourceInfo
from hpcdist.energy.sources.utilisation import BYTES, COLUMNS, SHARES
from hpcdist.hdf5.datasets import Column, MetricsTable


@dataclass
class PhaseWindow:
    """Time interval of a phase, and the energy that is attributed to the phase in this interval."""

    phase: str
    begin_ns: int
    mj: list[float]  # of each energy source, without nested windows
    end_ns: int = 0
    own_ns: int = 0  # duration without nested windows


class PhaseWindows:
    """Energy and time of the phase windows (`PhaseWindow`) on one rank. Windows may be nested."""

    def __init__(self, num_sources: int) -> None:
        self.total_mj = [0.0] * num_sources  # of all windows together, by energy source
        self.closed: list[PhaseWindow] = []  # since the last `take`
        self._sums: dict[str, dict[str, Any]] = {}  # of all closed windows, as in `phases`
        self._open: list[PhaseWindow] = []
        self._edge_ns = 0
        self._last: list[int | None] = [None] * num_sources
        self._inside = [False] * num_sources  # there was time inside a window since the last good read
        self._outside = [False] * num_sources  # there was time outside of all windows since then

    def enter(self, phase: str, now_ns: int, values: Sequence[int | None]) -> None:
        """Begin a window of ``phase``. ``values``: mJ of each energy source at ``now_ns``, or None if unreadable."""
        self.edge(now_ns, values)
        self._open.append(PhaseWindow(phase, now_ns, [0.0] * len(self._last)))

    def leave(self, now_ns: int, values: Sequence[int | None]) -> None:
        """End the innermost open window. ``values``: mJ of each energy source at ``now_ns``, as in `enter`."""
        self.edge(now_ns, values)
        window = self._open.pop()
        window.end_ns = now_ns
        self.closed.append(window)
        self._sum(self._sums, window)

    def take(self) -> list[PhaseWindow]:
        """Return a list of the windows that ended since the last call."""
        taken, self.closed = self.closed, []
        return taken

    def edge(self, now_ns: int, values: Sequence[int | None]) -> None:
        """Add the time and energy since the previous reading to the innermost window. ``values``: as in `enter`."""
        inner = self._open[-1] if self._open else None
        if inner is not None:
            inner.own_ns += now_ns - self._edge_ns
        self._edge_ns = now_ns
        for source, value in enumerate(values):
            self._attribute(source, value, inner)

    def forget(self, source: int) -> None:
        """Mark the energy of source number ``source`` since the last reading as unknown."""
        self._last[source] = None

    def _attribute(self, source: int, value: int | None, inner: PhaseWindow | None) -> None:
        # A failed edge is bridged: the difference over it belongs to several windows, or to none, so each window is
        # unknown. The total still gets the difference if all of that time was inside windows.
        last, bridged = self._last[source], self._inside[source] or self._outside[source]
        inside, outside = self._inside[source] or inner is not None, self._outside[source] or inner is None
        if value is None:
            self._inside[source], self._outside[source] = inside, outside
            if inner is not None:
                inner.mj[source] = math.nan
            return
        used = math.nan if last is None else float(value - last)
        if inner is not None:
            inner.mj[source] += math.nan if bridged else used
        if inside:
            self.total_mj[source] += math.nan if outside else used
        self._last[source], self._inside[source], self._outside[source] = value, False, False

    def totals(self) -> list[float]:
        """Return a list with the mJ of each energy source, summed over all windows. NaN: unknown."""
        return [math.nan if pending else total for pending, total in zip(self._inside, self.total_mj, strict=True)]

    def phases(self) -> dict[str, dict[str, Any]]:
        """Return a dict per phase: "seconds", "windows" (number), "shortest_s" (shortest window), "mj" by source."""
        phases = {name: {**phase, "mj": [*phase["mj"]]} for name, phase in self._sums.items()}
        for window in self._open:
            self._sum(phases, window)
        return phases

    def _sum(self, phases: dict[str, dict[str, Any]], window: PhaseWindow) -> None:
        nothing = {"seconds": 0.0, "windows": 0, "shortest_s": math.inf, "mj": [0.0] * len(self._last)}
        phase = phases.setdefault(window.phase, nothing)
        own_s = window.own_ns / 1e9
        phase["seconds"] += own_s
        phase["windows"] += 1
        if window.end_ns:
            phase["shortest_s"] = min(phase["shortest_s"], own_s)
        phase["mj"] = [sum_mj + mj for sum_mj, mj in zip(phase["mj"], window.mj, strict=True)]


_WHERE: Final = (
    Column("session", "i8", "1", "which start of the run, from 0"),
    Column("node", "i8", "1", "index of the node in the job"),
    Column("source", "i8", "1", "index of the source in its node and session, as in energy/sources"),
)
_NODE: Final = (
    Column("t_mono_ns", "i8", "ns", "monotonic clock of the node"),
    Column("session", "i8", "1", "which start of the run, from 0"),
    Column("node", "i8", "1", "index of the node in the job"),
)
_MEANINGS: Final = {
    "cpu": "busy share of the processors that the ranks may use",
    "node_cpu": "busy share of all processors",
    "memory": "share of the memory that the ranks hold",
    "node_memory": "share of the memory that is not available",
    "gpu": "share of the time in which a kernel ran, mean over the job's GPUs",
    "gpu_memory": "share of the GPUs' memory in use, by whomever",
    "memory_bytes": "memory that the ranks hold, what they share once",
    "available_bytes": "memory that is available",
    "sent_bytes": "bytes sent over the interfaces since this start, by whomever",
    "received_bytes": "bytes received likewise",
}
_COLUMNS: Final[Mapping[str, tuple[Column, ...]]] = {
    "sources": (
        *_WHERE,
        Column("kind", "S8", "1", "gpu, cpu, dram, or node: all of it"),
        Column("name", "S96", "1", "UUID of a GPU, name of a RAPL zone, file of a Cray"),
    ),
    "about": (
        *_WHERE,
        Column("model", "S96", "1", "name of the device, as its driver has it"),
        Column("ranks", "i8", "1", "ranks of this job that use it; 0: it belongs to the whole node"),
        Column("power_field", "S16", "1", "of its power: instant, average, or usage where the driver does not say"),
        Column("power_scope", "S16", "1", "whose power it is: gpu, module, node, cpu, dram"),
        Column("note", "S240", "1", "shared, MIG, integrated power, changed power cap"),
        Column("declared", "i8", "1", "1: its joules come from a declared model, and were not measured"),
    ),
    "samples": (_NODE[0], *_WHERE, Column("energy_mj", "i8", "mJ", "cumulative energy counter, wraps unrolled")),
    "powers": (_NODE[0], *_WHERE, Column("power_mw", "i8", "mW", "power, as energy/about says of the source")),
    "gaps": (
        Column("t_mono_ns", "i8", "ns", "the sample before which the energy is not known; monotonic clock of the node"),
        *_WHERE,
    ),
    "windows": (
        Column("begin_mono_ns", "i8", "ns", "monotonic clock of the node"),
        Column("end_mono_ns", "i8", "ns", "monotonic clock of the node"),
        *_WHERE,
        Column("phase", "S32", "1", "training, checkpoint, validation"),
        Column("own_s", "f8", "s", "duration without the windows inside"),
        Column("energy_j", "f8", "J", "energy without the windows inside; NaN where an edge could not be read"),
    ),
    "utilisation": (*_NODE, *(Column(name, "f8", "By" if name in BYTES else "1", _MEANINGS[name]) for name in COLUMNS)),
    "sampler": (
        *_NODE,
        Column("busy_s", "f8", "s", "time of a processor that reading took since this start"),
        Column("lasted_s", "f8", "s", "time since this start"),
    ),
}
TABLES: Final = {name: MetricsTable(f"{ENERGY_GROUP}/{name}", columns) for name, columns in _COLUMNS.items()}
_OF_NODES: Final = ("utilisation", "sampler")


@dataclass(frozen=True)
class NodeRows:
    """New energy data of one node, to append to the metrics file."""

    node: int
    sources: Sequence[tuple[str, str, SourceInfo]]  # kind, name and properties
    drained: DrainedSamples
    windows: Sequence[PhaseWindow]  # phases of the training that have ended, with their energy
    now_ns: int = 0
    busy_s: float = 0.0  # processor seconds used to read the sensors
    lasted_s: float = 0.0  # since the measurement began
    watts: Mapping[str, float] = field(default_factory=dict)  # mean power by type of source, NaN if unknown
    lacking: frozenset[str] = frozenset()  # types of energy that the node uses but cannot measure completely


def append_rows(file: Any, session: int, nodes: Sequence[NodeRows]) -> None:
    """Append the data of ``nodes`` to the open metrics file, as start number ``session`` of the run. Local."""
    has_sources = any(node.sources for node in nodes)
    for name, table in TABLES.items():
        if has_sources or name in _OF_NODES:
            table.create(file)
    # Energy sources are written once per session.
    is_written = not has_sources or session in TABLES["sources"].read(file)["session"]
    for node in nodes:
        for name, rows in _rows(node, new=not is_written):
            TABLES[name].append(file, session=session, node=node.node, **rows)


def _rows(node: NodeRows, new: bool) -> Iterator[tuple[str, dict[str, Any]]]:
    if new:
        abouts = [about for _, _, about in node.sources]
        indices = range(len(abouts))
        kinds, names = ([source[column_index] for source in node.sources] for column_index in (0, 1))
        yield "sources", {"source": indices, "kind": kinds, "name": names}
        traits = ("model", "ranks", "power_field", "power_scope", "note", "declared")
        yield "about", {"source": indices, **{name: [getattr(about, name) for about in abouts] for name in traits}}
    drained = node.drained
    for table, rows, column in (("samples", drained.samples, "energy_mj"), ("powers", drained.powers, "power_mw")):
        yield table, {"t_mono_ns": rows[:, 0], "source": rows[:, 1], column: rows[:, 2]}
    yield "gaps", {"t_mono_ns": drained.gaps[:, 0], "source": drained.gaps[:, 1]}
    of_windows = [(window, source) for window in node.windows for source in range(len(node.sources))]
    yield (
        "windows",
        {
            "begin_mono_ns": [window.begin_ns for window, _ in of_windows],
            "end_mono_ns": [window.end_ns for window, _ in of_windows],
            "source": [source for _, source in of_windows],
            "phase": [window.phase for window, _ in of_windows],
            "own_s": [window.own_ns / 1e9 for window, _ in of_windows],
            "energy_j": [window.mj[source] / 1e3 for window, source in of_windows],
        },
    )
    if len(drained.looks):
        yield "utilisation", {"t_mono_ns": drained.looks, **dict(zip(COLUMNS, drained.shares.T, strict=True))}
    if node.lasted_s:
        yield "sampler", {"t_mono_ns": node.now_ns, "busy_s": node.busy_s, "lasted_s": node.lasted_s}


DIRECTIONS: Final = {"sent": COLUMNS.index("sent_bytes"), "received": COLUMNS.index("received_bytes")}


class MeanPower:
    """Mean power of the energy sources of a node."""

    def __init__(self) -> None:
        self._last: dict[int, tuple[int, int]] = {}  # time and energy of the last sample of a source

    def by_source(self, num_sources: int, drained: DrainedSamples) -> list[float]:
        """Return the mean watts of each source since the last call. ``drained``: samples since then. NaN: unknown."""
        gaps = set(drained.gaps[:, 1].tolist())
        means = []
        for source in range(num_sources):
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
        """Replace the latest data of all nodes by ``rows``, the result of `EnergyMonitor.collect`."""
        self._rows = rows
        for row in rows:
            if len(row.drained.looks):
                last = row.drained.shares[-1]
                self._bytes[row.node] = {name: float(last[column]) for name, column in DIRECTIONS.items()}

    def power(self) -> dict[str, float]:
        """Return a dict from kind, such as "gpu", to the watts of all nodes. NaN: a node lacks this measurement."""
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
        """Return {resource in `SHARES`: mean over time and nodes, from 0 to 1}, without unknown resources."""
        shares = [row.drained.shares[:, : len(SHARES)] for row in self._rows if len(row.drained.looks)]
        if not shares:
            return {}
        means = np.array([_means(node_shares) for node_shares in shares])
        by_resource = dict(zip(SHARES, _means(means).tolist(), strict=True))
        return {name: value for name, value in by_resource.items() if not math.isnan(value)}

    def network(self) -> dict[str, float]:
        """Return {"sent": bytes, "received": bytes} of all nodes since the start, or {} before the first sample."""
        if not self._bytes:
            return {}
        return {name: math.fsum(node[name] for node in self._bytes.values()) for name in DIRECTIONS}


def _means(shares: np.ndarray) -> np.ndarray:
    is_known = ~np.isnan(shares)
    counts = is_known.sum(axis=0)
    sums = np.where(is_known, shares, 0.0).sum(axis=0)
    return np.where(counts > 0, sums / np.maximum(counts, 1), np.nan)
