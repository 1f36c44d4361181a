"""Observations of a run: the group ``observations`` of a metrics file, with events other than steps and evaluations.

Frequent figures (`THINNED`) are written at intervals that grow with the run, so that a month takes about 100 MB.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from hpcdist.hdf5.datasets import Column, MetricsTable, texts

GROUP: Final = "observations"
OWN_TABLES: Final = ("step", "evaluation")  # kinds of events with separate tables
THINNED: Final = ("memory", "collectives", "utilisation", "energy")
EVERY_NS: Final = 60 * 10**9  # longest interval of thinned events
PART: Final = 100  # the interval is at most the age of the start divided by this number
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
    "collectives", "logged", "end",
)  # fmt: skip


@dataclass(frozen=True)
class RunEvent:
    """Event in a run after ``step`` completed steps. ``values``: numbers and texts of the event by name."""

    kind: str
    step: int
    values: Mapping[str, float | int | str] = field(default_factory=dict)  # the value of a counter is its total so far
    ranks: Mapping[str, np.ndarray] = field(default_factory=dict)  # arrays of shape (world,); NaN: unknown
    time_ns: int = field(default_factory=time.time_ns)  # wall clock

    def __post_init__(self) -> None:
        assert self.kind in KINDS, self.kind


@dataclass(frozen=True)
class ObservedSeries:
    """Observed values of one quantity, with their steps and times, as three arrays of equal length."""

    step: np.ndarray
    time_ns: np.ndarray
    value: np.ndarray


@dataclass(frozen=True)
class EventNote:
    """Text from an event of a run, with the kind, step and time of the event."""

    step: int
    session: int
    time_ns: int
    kind: str
    name: str
    text: str


@dataclass(frozen=True)
class Observations:
    """Observations read from a metrics file. ``series``: values by metric key. ``notes``: the texts of events."""

    series: Mapping[str, ObservedSeries] = field(default_factory=dict)
    notes: Sequence[EventNote] = ()


def append(file: Any, session: int, events: Sequence[RunEvent]) -> None:
    """Append ``events`` to the open metrics ``file``. ``session``: number of the run's current start. Local."""
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
    # Names are unique in their first NAME_BYTES bytes: none of the catalogue is as long.
    shortened = [name.encode()[:NAME_BYTES].decode(errors="ignore") for name in names]
    indices = {name: index for index, name in enumerate(texts(NAMES.read(file)["name"]))}
    new = [name for name in dict.fromkeys(shortened) if name not in indices]
    NAMES.append(file, name=new)
    indices |= {name: len(indices) + index for index, name in enumerate(new)}
    return [indices[name] for name in shortened]


def read(file: Any) -> Observations:
    """Return the values and texts of all events in the open metrics ``file``. Files of old versions have no events."""
    if GROUP not in file:
        return Observations()
    rows, notes = ROWS.read(file), NOTES.read(file)
    series = {}
    for index, name in enumerate(texts(NAMES.read(file)["name"])):
        selected = rows["name"] == index
        if selected.any():
            series[name] = ObservedSeries(rows["step"][selected], rows["time_ns"][selected], rows["value"][selected])
    when = (notes[name].tolist() for name in ("step", "session", "time_ns"))
    words = (texts(notes[name]) for name in ("kind", "name", "text"))
    return Observations(series, tuple(EventNote(*note) for note in zip(*when, *words, strict=True)))


def _due(file: Any, events: Sequence[RunEvent]) -> list[RunEvent]:
    # Leave out events of the types in `THINNED` if an event of the same type was stored shortly before.
    due, attributes = [], file[GROUP].attrs
    last = {kind: int(attributes.get(f"{kind}_ns", 0)) for kind in THINNED}
    ends = any(event.kind == "end" for event in events)
    for event in events:
        if event.kind in last:
            lasted = event.time_ns - int(attributes["began_ns"])
            # Negative differences, after the clock was put back, must not suppress events forever.
            if 0 <= event.time_ns - last[event.kind] < min(EVERY_NS, lasted // PART) and not ends:
                continue
            last[event.kind] = event.time_ns
        due.append(event)
    for kind, time_ns in last.items():
        if time_ns != int(attributes.get(f"{kind}_ns", 0)):
            attributes[f"{kind}_ns"] = time_ns
    return due
