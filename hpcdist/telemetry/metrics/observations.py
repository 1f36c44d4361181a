"""Observations of a run: the group ``observations`` of a metrics file, events beside steps and evaluations.

    names   the quantities of `hpcdist.telemetry.metrics.quantities`, as "memory_bytes[activations]"
    rows    step, session, wall clock, index of the name, value
    notes   the words of an event, as those of an anomaly

Steps and validation losses have tables of their own, and are not written twice. Figures that change with every look
(`THINNED`) are written at intervals that grow with the run, so that a month takes some 100 MB.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from hpcdist.hdf5.datasets import Column
from hpcdist.hdf5.tables import MetricsTable, texts

GROUP: Final = "observations"
OWN_TABLES: Final = ("step", "evaluation")  # kinds of events that have tables of their own
THINNED: Final = ("memory", "collectives", "utilisation", "energy")
EVERY_NS: Final = 60 * 10**9  # apart at least; in the first hours of a start
PART: Final = 100  # so small a part of the time that it has lasted
NAME_BYTES: Final = 96
TEXT_BYTES: Final = 400
_WHEN: Final = (
    Column("step", "i8", "1", "completed optimizer steps when it was seen"),
    Column("session", "i8", "1", "which start of the run saw it, from 0"),
    Column("time_ns", "i8", "ns", "wall clock"),
)
NAMES: Final = MetricsTable(
    f"{GROUP}/names",
    (Column("name", f"S{NAME_BYTES}", "1", "quantity of the catalogue, with its label in brackets"),),
)
ROWS: Final = MetricsTable(
    f"{GROUP}/rows",
    (
        *_WHEN,
        Column("name", "i8", "1", "index in observations/names"),
        Column("value", "f8", "1", "in the unit that the name ends with"),
    ),
)
NOTES: Final = MetricsTable(
    f"{GROUP}/notes",
    (
        *_WHEN,
        Column("kind", "S16", "1", "kind of the event"),
        Column("name", f"S{NAME_BYTES}", "1", "key of the text in its event"),
        Column("text", f"S{TEXT_BYTES}", "1", "what it said, UTF-8"),
    ),
)


KINDS: Final = (
    "begin", "step", "evaluation", "checkpoint", "skipped", "anomaly", "energy", "utilisation", "memory",
    "collectives", "end",
)  # fmt: skip


@dataclass(frozen=True)
class RunEvent:
    """Event of a run after ``step`` steps, at ``time_ns`` of the wall clock.

    ``values`` has figures under the keys of `quantities.key` (a counter's value is its total so far) and, under any
    other key, texts. ``ranks`` has figures of each rank, (world,), NaN where one is not known. Unknown figures are left
    out.
    """

    kind: str
    step: int
    values: Mapping[str, float | int | str] = field(default_factory=dict)
    ranks: Mapping[str, np.ndarray] = field(default_factory=dict)
    time_ns: int = field(default_factory=time.time_ns)

    def __post_init__(self) -> None:
        assert self.kind in KINDS, self.kind


@dataclass(frozen=True)
class ObservedSeries:
    """Series of one quantity over time, each array (rows,)."""

    step: np.ndarray
    time_ns: np.ndarray
    value: np.ndarray


@dataclass(frozen=True)
class EventNote:
    """Text of an event."""

    step: int
    session: int
    time_ns: int
    kind: str
    name: str
    text: str


@dataclass(frozen=True)
class Observations:
    """Observations in memory: ``series`` by name, in the order in which each was seen first."""

    series: Mapping[str, ObservedSeries] = field(default_factory=dict)
    notes: Sequence[EventNote] = ()


def append(file: Any, session: int, events: Sequence[RunEvent]) -> None:
    """Put ``events`` of one start, in their order, into an open file (local).

    The first ones of a start drop the rows of later steps of the start before: those steps are made again.
    """
    events = [event for event in events if event.kind not in OWN_TABLES]
    if not events:
        return
    for table in (NAMES, ROWS, NOTES):
        table.create(file)
    if int(file[GROUP].attrs.get("session", -1)) != session:
        for table in (ROWS, NOTES):
            table.drop_from(file, events[0].step + 1)
        file[GROUP].attrs.update({"session": session, "began_ns": events[0].time_ns})
    values = [(event, name, value) for event in _due(file, events) for name, value in event.values.items()]
    figures = [row for row in values if not isinstance(row[2], str)]
    words = [row for row in values if isinstance(row[2], str)]
    ROWS.append(
        file,
        name=_indices(file, [name for _, name, _ in figures]),
        value=[value for _, _, value in figures],
        **_when(session, figures),
    )
    NOTES.append(
        file,
        kind=[event.kind for event, _, _ in words],
        name=[name for _, name, _ in words],
        text=[text for _, _, text in words],
        **_when(session, words),
    )


def _when(session: int, rows: Sequence[tuple[RunEvent, str, Any]]) -> dict[str, Any]:
    return {"step": [row[0].step for row in rows], "session": session, "time_ns": [row[0].time_ns for row in rows]}


def _indices(file: Any, names: Sequence[str]) -> list[int]:
    """Return the index of each name in the table of names, to which new ones are appended."""
    # Two names that are alike in their first bytes would be one: none of the catalogue is as long.
    shortened = [name.encode()[:NAME_BYTES].decode(errors="ignore") for name in names]
    known = {name: index for index, name in enumerate(texts(NAMES.read(file)["name"]))}
    new = [name for name in dict.fromkeys(shortened) if name not in known]
    NAMES.append(file, name=new)
    known |= {name: len(known) + index for index, name in enumerate(new)}
    return [known[name] for name in shortened]


def read(file: Any) -> Observations:
    """Return the observations of an open file; none from a file of an earlier version."""
    if GROUP not in file:
        return Observations()
    rows, notes = ROWS.read(file), NOTES.read(file)
    series = {}
    for index, name in enumerate(texts(NAMES.read(file)["name"])):
        own = rows["name"] == index
        if own.any():
            series[name] = ObservedSeries(rows["step"][own], rows["time_ns"][own], rows["value"][own])
    when = (notes[name].tolist() for name in ("step", "session", "time_ns"))
    words = (texts(notes[name]) for name in ("kind", "name", "text"))
    return Observations(series, tuple(EventNote(*note) for note in zip(*when, *words, strict=True)))


def _due(file: Any, events: Sequence[RunEvent]) -> list[RunEvent]:
    """Return ``events`` without thinned ones that come too soon, except at the end of the run.

    The time of the last one of each kind is an attribute of the file.
    """
    due, attributes = [], file[GROUP].attrs
    last = {kind: int(attributes.get(f"{kind}_ns", 0)) for kind in THINNED}
    ends = any(event.kind == "end" for event in events)
    for event in events:
        if event.kind in last:
            lasted = event.time_ns - int(attributes["began_ns"])
            # A clock that was put back must not end it for good.
            if 0 <= event.time_ns - last[event.kind] < min(EVERY_NS, lasted // PART) and not ends:
                continue
            last[event.kind] = event.time_ns
        due.append(event)
    for kind, time_ns in last.items():
        if time_ns != int(attributes.get(f"{kind}_ns", 0)):
            attributes[f"{kind}_ns"] = time_ns
    return due
