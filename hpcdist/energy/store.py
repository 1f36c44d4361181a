"""Raw samples and windows as tables of a metrics file: ``energy/sources``, ``energy/samples``, ``energy/windows``."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from hpcdist.energy.windows import Window
from hpcdist.hdf5 import tables
from hpcdist.hdf5.tables import Column

GROUP: Final = "energy"
_WHERE: Final = (
    Column("session", "i8", "1", "which start of the run, from 0"),
    Column("node", "i8", "1", "index of the node in the job"),
    Column("source", "i8", "1", "index of the source in its node and session, as in energy/sources"),
)
SOURCES: Final = (
    *_WHERE,
    Column("kind", "S8", "1", "gpu, cpu or dram"),
    Column("name", "S96", "1", "UUID of a GPU, name of a RAPL zone"),
)
SAMPLES: Final = (
    Column("t_mono_ns", "i8", "ns", "monotonic clock of the node"),
    *_WHERE,
    Column("energy_mj", "i8", "mJ", "cumulative energy counter, wraps unrolled"),
)
WINDOWS: Final = (
    Column("begin_mono_ns", "i8", "ns", "monotonic clock of the node"),
    Column("end_mono_ns", "i8", "ns", "monotonic clock of the node"),
    *_WHERE,
    Column("phase", "S32", "1", "training, checkpoint, validation"),
    Column("own_s", "f8", "s", "duration without the windows inside"),
    Column("energy_j", "f8", "J", "energy without the windows inside; NaN where an edge could not be read"),
)
TABLES: Final = {"sources": SOURCES, "samples": SAMPLES, "windows": WINDOWS}


@dataclass(frozen=True)
class NodeRows:
    """What one node brings: its sources as (kind, name), samples as of `Sampler.drain`, and closed windows."""

    node: int
    sources: Sequence[tuple[str, str]]
    samples: np.ndarray  # (samples, 3) int64: t_mono_ns, source, energy_mj
    windows: Sequence[Window]


def append(file: Any, session: int, nodes: Sequence[NodeRows]) -> None:
    """Append the rows of ``nodes`` to an open file (local). The sources of a session are written once."""
    if GROUP not in file:
        for name, columns in TABLES.items():
            tables.create(file, f"{GROUP}/{name}", columns)
    known = tables.read(file, f"{GROUP}/sources")["session"]
    for node in nodes:
        if session not in known:
            _extend(file, "sources", session, node.node, _sources(node))
        _extend(file, "samples", session, node.node, _samples(node))
        _extend(file, "windows", session, node.node, _windows(node))


def _extend(file: Any, table: str, session: int, node: int, rows: Mapping[str, np.ndarray]) -> None:
    count = len(rows["source"])
    if count:
        tables.extend(
            file, f"{GROUP}/{table}", {**rows, "session": np.full(count, session), "node": np.full(count, node)}
        )


def _sources(node: NodeRows) -> dict[str, np.ndarray]:
    return {
        "source": np.arange(len(node.sources)),
        "kind": np.array([kind for kind, _ in node.sources], "S8"),
        "name": np.array([name for _, name in node.sources], "S96"),
    }


def _samples(node: NodeRows) -> dict[str, np.ndarray]:
    return {"t_mono_ns": node.samples[:, 0], "source": node.samples[:, 1], "energy_mj": node.samples[:, 2]}


def _windows(node: NodeRows) -> dict[str, np.ndarray]:
    """One row for each window and source."""
    rows = [(window, source) for window in node.windows for source in range(len(node.sources))]
    return {
        "begin_mono_ns": np.array([window.begin_ns for window, _ in rows], np.int64),
        "end_mono_ns": np.array([window.end_ns for window, _ in rows], np.int64),
        "source": np.array([source for _, source in rows], np.int64),
        "phase": np.array([window.phase for window, _ in rows], "S32"),
        "own_s": np.array([window.own_ns / 1e9 for window, _ in rows]),
        "energy_j": np.array([window.mj[source] / 1e3 for window, source in rows]),
    }
