"""History of the counters of a run, start by start, from the tables of its metrics file.

The run may be under way. Counters add up by themselves: of many samples, evenly spread blocks and the first and last
of each source are enough.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from hpcdist.energy.report import NODE
from hpcdist.hdf5 import files, tables
from hpcdist.reporting import regular

GROUP: Final = "energy"
SAMPLES: Final = f"{GROUP}/samples"
BLOCK: Final = 1 << 16  # rows that are read at once
MOST_BLOCKS: Final = 1024  # of more samples, a start may seem shorter by the time that a block takes
POINTS: Final = (64, 16384)  # of a source that stay of a block at least, and of all blocks about
_COLUMNS: Final = ("t_mono_ns", "session", "node", "source", "energy_mj")


@dataclass(frozen=True)
class SourceHistory:
    """A source in one start: joules since its first sample, ``seconds`` (n,) after it. ``gaps``: some are not known."""

    node: int
    kind: str
    name: str
    note: str
    declared: bool
    seconds: np.ndarray
    joules: np.ndarray
    gaps: bool = False

    @property
    def total_j(self) -> float:
        """The joules from the first sample to the last; NaN with gaps."""
        return math.nan if self.gaps or not len(self.joules) else float(self.joules[-1])


@dataclass(frozen=True)
class StartHistory:
    """One start of a run: its sources, whose nodes began at about the same time."""

    session: int
    courses: tuple[SourceHistory, ...]

    @property
    def counted(self) -> tuple[SourceHistory, ...]:
        """The sources that enter the total: a counter of a whole node has the others in it."""
        nodes = {course.node for course in self.courses}
        if nodes and nodes == {course.node for course in self.courses if course.kind == NODE}:
            return tuple(course for course in self.courses if course.kind == NODE)
        return tuple(course for course in self.courses if course.kind != NODE)

    @property
    def seconds(self) -> float:
        """How long it was measured, on the node where that was longest."""
        return max((float(course.seconds[-1]) for course in self.courses if len(course.seconds)), default=0.0)

    @property
    def joules(self) -> float:
        """All joules; NaN where a source is not known, or there is none."""
        return math.fsum(course.total_j for course in self.counted) if self.counted else math.nan

    def until(self, seconds: np.ndarray) -> np.ndarray:
        """Return the joules until so many seconds after the begin (n,); NaN where a source is not known."""
        found = np.zeros(len(seconds)) if self.counted else np.full(len(seconds), math.nan)
        for course in self.counted:
            if course.gaps or not len(course.seconds):
                return np.full(len(seconds), math.nan)
            found += np.interp(seconds, course.seconds, course.joules)
        return found


def read(path: Path) -> list[StartHistory]:
    """Return the starts of a run, [] where nothing was measured; ``path`` has its metrics. Raises StorageError."""
    with files.open_read(path) as file, regular.damage(path, f"its {GROUP} is damaged, or of another program"):
        if SAMPLES not in file:
            return []
        known, found, gaps = _sources(file), _samples(file), _gaps(file)
    starts: dict[int, list[SourceHistory]] = {}
    for place, (kind, name, note, declared) in known.items():
        rows = found.get(place, np.empty((0, 2), np.int64))
        since = rows - rows[0] if len(rows) else rows
        course = SourceHistory(
            place[1], kind, name, note, declared, since[:, 0] / 1e9, since[:, 1] / 1e3, place in gaps
        )
        starts.setdefault(place[0], []).append(course)
    return [StartHistory(session, tuple(courses)) for session, courses in sorted(starts.items())]


_Place = tuple[int, int, int]  # session, node, source


def _places(table: dict[str, np.ndarray]) -> list[_Place]:
    return [tuple(map(int, row)) for row in zip(table["session"], table["node"], table["source"], strict=True)]  # type: ignore[misc]


def _sources(file: Any) -> dict[_Place, tuple[str, str, str, bool]]:
    """Return kind, name, note and whether it is declared of each source; earlier versions said no more than a name."""
    table = tables.read(file, f"{GROUP}/sources")
    about: dict[_Place, tuple[str, bool]] = {}
    if f"{GROUP}/about" in file:
        rows = tables.read(file, f"{GROUP}/about")
        about = dict(
            zip(_places(rows), zip(map(_text, rows["note"]), map(bool, rows["declared"]), strict=True), strict=True)
        )
    return {
        place: (_text(kind), _text(name), *about.get(place, ("", False)))
        for place, kind, name in zip(_places(table), table["kind"], table["name"], strict=True)
    }


def _gaps(file: Any) -> set[_Place]:
    return set(_places(tables.read(file, f"{GROUP}/gaps"))) if f"{GROUP}/gaps" in file else set()


def _samples(file: Any) -> dict[_Place, np.ndarray]:
    """Return times and counts (n, 2) of each source, thinned."""
    columns = [file[f"{SAMPLES}/{name}"] for name in _COLUMNS]
    rows = min(column.shape[0] for column in columns)
    blocks = -(-rows // BLOCK)
    chosen = np.unique(np.linspace(0, blocks - 1, min(blocks, MOST_BLOCKS)).astype(int)) if blocks else ()
    kept: dict[_Place, list[np.ndarray]] = {}
    for block in chosen:
        part = slice(block * BLOCK, min(rows, (block + 1) * BLOCK))
        times, session, node, source, energy = (column[part] for column in columns)
        places, which = np.unique(np.stack([session, node, source], axis=1), axis=0, return_inverse=True)
        for index, place in enumerate(places):
            own = np.flatnonzero(which.ravel() == index)
            own = own[_thinned(len(own), max(POINTS[0], POINTS[1] // len(chosen)))]
            kept.setdefault(tuple(map(int, place)), []).append(np.stack([times[own], energy[own]], axis=1))  # type: ignore[arg-type]
    return {place: _ordered(np.concatenate(parts)) for place, parts in kept.items()}


def _thinned(count: int, most: int) -> np.ndarray:
    """Return at most so many indices of ``count``, the first and the last among them."""
    return np.unique(np.linspace(0, count - 1, min(count, most)).astype(int))


def _ordered(rows: np.ndarray) -> np.ndarray:
    return rows[np.argsort(rows[:, 0], kind="stable")]


def _text(value: bytes | str) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)


def joules_at(starts: Sequence[StartHistory], session: np.ndarray, seconds: np.ndarray) -> np.ndarray:
    """Return the joules of a run until moments (n,) ``seconds`` after the begin of the start with number ``session``.

    Those of all starts before are in it, lost work too.
    """
    found = np.full(len(seconds), math.nan)
    before = 0.0
    for start in starts:
        own = session == start.session
        found[own] = before + start.until(seconds[own])
        before += start.joules
    return found
