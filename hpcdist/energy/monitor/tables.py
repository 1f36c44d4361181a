"""Tables of raw energy samples and windows in a metrics file, in the group ``energy``.

    sources      kind and name of each source of a node
    about        of each source: device, scope of its power, what is special about it
    samples      energy, as read: whole nanoseconds and millijoules
    powers       power of the sources that report it, in milliwatts
    gaps         samples before which an unknown amount of energy was used
    windows      phase, begin, end and joules of each window
    utilisation  how busy a node was: see `hpcdist.energy.sources.utilisation`
    sampler      processor time that reading took so far

Where there is no source, there are only the last two. Files of earlier versions have sources, samples and windows
only; an append to them adds the others. `hpcdist.energy.accounts.energy_metrics` reads them.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from hpcdist.energy.monitor.sampler import DrainedSamples
from hpcdist.energy.monitor.windows import PhaseWindow
from hpcdist.energy.sources.counters import SourceInfo
from hpcdist.energy.sources.utilisation import BYTES, COLUMNS
from hpcdist.hdf5 import datasets
from hpcdist.hdf5.datasets import Column

GROUP: Final = "energy"
_WHERE: Final = (
    Column("session", "i8", "1", "which start of the run, from 0"),
    Column("node", "i8", "1", "index of the node in the job"),
    Column("source", "i8", "1", "index of the source in its node and session, as in energy/sources"),
)
SOURCES: Final = (
    *_WHERE,
    Column("kind", "S8", "1", "gpu, cpu, dram, or node: all of it"),
    Column("name", "S96", "1", "UUID of a GPU, name of a RAPL zone, file of a Cray"),
)
ABOUT: Final = (
    *_WHERE,
    Column("model", "S96", "1", "name of the device, as its driver has it"),
    Column("ranks", "i8", "1", "ranks of this job that use it; 0: it belongs to the whole node"),
    Column("power_field", "S16", "1", "of its power: instant, average, or usage where the driver does not say which"),
    Column("power_scope", "S16", "1", "whose power it is: gpu, module, node, cpu, dram"),
    Column("note", "S240", "1", "shared, MIG, integrated power, changed power cap"),
    Column("declared", "i8", "1", "1: its joules come from a declared model, and were not measured"),
)
SAMPLES: Final = (
    Column("t_mono_ns", "i8", "ns", "monotonic clock of the node"),
    *_WHERE,
    Column("energy_mj", "i8", "mJ", "cumulative energy counter, wraps unrolled"),
)
POWERS: Final = (
    Column("t_mono_ns", "i8", "ns", "monotonic clock of the node"),
    *_WHERE,
    Column("power_mw", "i8", "mW", "power, as energy/about says of the source"),
)
GAPS: Final = (
    Column("t_mono_ns", "i8", "ns", "the sample before which the energy is not known; monotonic clock of the node"),
    *_WHERE,
)
WINDOWS: Final = (
    Column("begin_mono_ns", "i8", "ns", "monotonic clock of the node"),
    Column("end_mono_ns", "i8", "ns", "monotonic clock of the node"),
    *_WHERE,
    Column("phase", "S32", "1", "training, checkpoint, validation"),
    Column("own_s", "f8", "s", "duration without the windows inside"),
    Column("energy_j", "f8", "J", "energy without the windows inside; NaN where an edge could not be read"),
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
UTILISATION: Final = (
    *_NODE,
    *(Column(name, "f8", "By" if name in BYTES else "1", _MEANINGS[name]) for name in COLUMNS),
)
SAMPLER: Final = (
    *_NODE,
    Column("busy_s", "f8", "s", "time of a processor that reading took since this start"),
    Column("lasted_s", "f8", "s", "time since this start"),
)
TABLES: Final = {
    "sources": SOURCES,
    "about": ABOUT,
    "samples": SAMPLES,
    "powers": POWERS,
    "gaps": GAPS,
    "windows": WINDOWS,
    "utilisation": UTILISATION,
    "sampler": SAMPLER,
}
_OF_NODES: Final = ("utilisation", "sampler")
_OF_SOURCES: Final = tuple(name for name in TABLES if name not in _OF_NODES)


@dataclass(frozen=True)
class NodeRows:
    """Rows of one node: its sources as (kind, name, about), the samples of its sampler, and closed windows.

    ``busy_s`` of ``lasted_s`` seconds went into reading, at ``now_ns`` of its clock. ``watts`` are by kind since the
    last collection, NaN where they are not known, and ``lacking`` the kinds that it should have and does not.
    """

    node: int
    sources: Sequence[tuple[str, str, SourceInfo]]
    drained: DrainedSamples
    windows: Sequence[PhaseWindow]
    now_ns: int = 0
    busy_s: float = 0.0
    lasted_s: float = 0.0
    watts: Mapping[str, float] = field(default_factory=dict)
    lacking: frozenset[str] = frozenset()


def append(file: Any, session: int, nodes: Sequence[NodeRows]) -> None:
    """Append the rows of ``nodes`` to an open file (local). The sources of a session are written once."""
    tables = [*(_OF_SOURCES if any(node.sources for node in nodes) else ()), *_OF_NODES]
    for name in tables:
        if f"{GROUP}/{name}" not in file:
            datasets.create(file, f"{GROUP}/{name}", TABLES[name])
    known = "sources" not in tables or session in datasets.read(file, f"{GROUP}/sources")["session"]
    for node in nodes:
        if not known:
            _extend(file, "sources", session, node.node, _sources(node))
            _extend(file, "about", session, node.node, _about(node))
        drained = node.drained
        for table, rows, column in (("samples", drained.samples, "energy_mj"), ("powers", drained.powers, "power_mw")):
            values = {"t_mono_ns": rows[:, 0], "source": rows[:, 1], column: rows[:, 2]}
            _extend(file, table, session, node.node, values)
        _extend(file, "gaps", session, node.node, {"t_mono_ns": drained.gaps[:, 0], "source": drained.gaps[:, 1]})
        _extend(file, "windows", session, node.node, _windows(node))
        looked = {name: drained.shares[:, place] for place, name in enumerate(COLUMNS)} if len(drained.looks) else {}
        _extend(file, "utilisation", session, node.node, {"t_mono_ns": drained.looks, **looked})
        cost = {"t_mono_ns": node.now_ns, "busy_s": node.busy_s, "lasted_s": node.lasted_s}
        if node.lasted_s:
            _extend(file, "sampler", session, node.node, {name: np.array([value]) for name, value in cost.items()})


def _extend(file: Any, table: str, session: int, node: int, rows: Mapping[str, np.ndarray]) -> None:
    count = len(next(iter(rows.values())))
    if count:
        datasets.extend(
            file, f"{GROUP}/{table}", {**rows, "session": np.full(count, session), "node": np.full(count, node)}
        )


def _sources(node: NodeRows) -> dict[str, np.ndarray]:
    return {
        "source": np.arange(len(node.sources)),
        "kind": _words(8, (kind for kind, _, _ in node.sources)),
        "name": _words(96, (name for _, name, _ in node.sources)),
    }


def _about(node: NodeRows) -> dict[str, np.ndarray]:
    abouts = [about for _, _, about in node.sources]
    return {
        "source": np.arange(len(abouts)),
        "model": _words(96, (about.model for about in abouts)),
        "ranks": np.array([about.ranks for about in abouts], np.int64),
        "power_field": _words(16, (about.power_field for about in abouts)),
        "power_scope": _words(16, (about.power_scope for about in abouts)),
        "note": _words(240, (about.note for about in abouts)),
        "declared": np.array([about.declared for about in abouts], np.int64),
    }


def _words(most: int, words: Iterable[str]) -> np.ndarray:
    return np.array([word.encode("ascii", "replace") for word in words], f"S{most}")


def _windows(node: NodeRows) -> dict[str, np.ndarray]:
    """Return one row for each window and source."""
    rows = [(window, source) for window in node.windows for source in range(len(node.sources))]
    return {
        "begin_mono_ns": np.array([window.begin_ns for window, _ in rows], np.int64),
        "end_mono_ns": np.array([window.end_ns for window, _ in rows], np.int64),
        "source": np.array([source for _, source in rows], np.int64),
        "phase": np.array([window.phase for window, _ in rows], "S32"),
        "own_s": np.array([window.own_ns / 1e9 for window, _ in rows]),
        "energy_j": np.array([window.mj[source] / 1e3 for window, source in rows]),
    }
