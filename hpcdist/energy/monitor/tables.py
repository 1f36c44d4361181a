"""Tables of raw energy samples and windows in a metrics file, in the group ``energy``.

Without an energy source, the file has only the tables ``utilisation`` and ``sampler``.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from hpcdist.constants import ENERGY_GROUP
from hpcdist.energy.monitor.sampler import DrainedSamples
from hpcdist.energy.monitor.windows import PhaseWindow
from hpcdist.energy.sources.counters import SourceInfo
from hpcdist.energy.sources.utilisation import BYTES, COLUMNS
from hpcdist.hdf5.datasets import Column
from hpcdist.hdf5.tables import MetricsTable

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
    """Energy data of one node since the last `EnergyMonitor.collect`, to append to the metrics file."""

    node: int
    sources: Sequence[tuple[str, str, SourceInfo]]  # type, name and properties
    drained: DrainedSamples
    windows: Sequence[PhaseWindow]  # phases of the training that have ended, with their energy
    now_ns: int = 0
    busy_s: float = 0.0  # processor seconds used to read the sensors
    lasted_s: float = 0.0  # since the measurement began
    watts: Mapping[str, float] = field(default_factory=dict)  # mean power by type of source, NaN if unknown
    lacking: frozenset[str] = frozenset()  # types of energy that the node uses but cannot measure completely


def append(file: Any, session: int, nodes: Sequence[NodeRows]) -> None:
    """Append the data of ``nodes`` to the tables of ``file``, an open HDF5 metrics file. Local.

    ``session``: number of earlier starts of the run.
    """
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
