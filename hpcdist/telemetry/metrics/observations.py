"""Observations of a run: the group ``observations`` of a metrics file, events beside steps and evaluations.

    names   the quantities of `hpcdist.telemetry.metrics.quantities`, as "memory_bytes[activations]"
    rows    step, session, wall clock, index of the name, value
    notes   the words of an event, as those of an anomaly

Steps and validation losses have tables of their own, and are not written twice. Figures that change with every look
(`THINNED`) are written at intervals that grow with the run, so that a month takes some 100 MB.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import numpy as np

from hpcdist.hdf5 import datasets
from hpcdist.hdf5.datasets import Column

GROUP: Final = "observations"
NAMES: Final = f"{GROUP}/names"
ROWS: Final = f"{GROUP}/rows"
NOTES: Final = f"{GROUP}/notes"
OWN_TABLES: Final = ("step", "evaluation")  # kinds of events that have tables of their own
THINNED: Final = ("memory", "collectives", "utilisation", "energy")
EVERY_NS: Final = 60 * 10**9  # apart at least; in the first hours of a start
PART: Final = 100  # so small a part of the time that it has lasted
NAME_BYTES: Final = 96
TEXT_BYTES: Final = 400
_NAMES: Final = (Column("name", f"S{NAME_BYTES}", "1", "quantity of the catalogue, with its label in brackets"),)
_WHEN: Final = (
    Column("step", "i8", "1", "completed optimizer steps when it was seen"),
    Column("session", "i8", "1", "which start of the run saw it, from 0"),
    Column("time_ns", "i8", "ns", "wall clock"),
)
_ROWS: Final = (
    *_WHEN,
    Column("name", "i8", "1", "index in observations/names"),
    Column("value", "f8", "1", "in the unit that the name ends with"),
)
_NOTES: Final = (
    *_WHEN,
    Column("kind", "S16", "1", "kind of the event"),
    Column("name", f"S{NAME_BYTES}", "1", "key of the text in its event"),
    Column("text", f"S{TEXT_BYTES}", "1", "what it said, UTF-8"),
)


class ObservableEvent(Protocol):
    """Protocol of an event of the stream."""

    @property
    def kind(self) -> str:
        """Kind of the event."""

    @property
    def step(self) -> int:
        """Completed optimizer steps."""

    @property
    def time_ns(self) -> int:
        """Wall clock."""

    @property
    def values(self) -> Mapping[str, float | int | str]:
        """Figures and words by their names."""


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


def append(file: Any, session: int, events: Sequence[ObservableEvent]) -> None:
    """Put ``events`` of one start, in their order, into an open file (local).

    The first ones of a start drop the rows of later steps of the start before: those steps are made again.
    """
    events = [event for event in events if event.kind not in OWN_TABLES]
    if not events:
        return
    if GROUP not in file:
        for name, columns in ((NAMES, _NAMES), (ROWS, _ROWS), (NOTES, _NOTES)):
            datasets.create(file, name, columns)
    if int(file[GROUP].attrs.get("session", -1)) != session:
        for name in (ROWS, NOTES):
            _drop_from(file, name, events[0].step)
        file[GROUP].attrs.update({"session": session, "began_ns": events[0].time_ns})
    events = _due(file, events)
    figures = [
        (event, name, float(value)) for event in events for name, value in event.values.items() if _is_number(value)
    ]
    words = [(event, name, value) for event in events for name, value in event.values.items() if isinstance(value, str)]
    if figures:
        _append_rows(file, session, figures)
    if words:
        word_columns = {"kind": _bytes([event.kind for event, _, _ in words], 16)}
        word_columns |= {"name": _bytes([name for _, name, _ in words], NAME_BYTES)}
        word_columns |= {"text": _bytes([text for _, _, text in words], TEXT_BYTES)}
        datasets.extend(file, NOTES, _when(session, [event for event, _, _ in words]) | word_columns)


def read(file: Any) -> Observations:
    """Return the observations of an open file; none from a file of an earlier version."""
    if GROUP not in file:
        return Observations()
    rows, notes = datasets.read(file, ROWS), datasets.read(file, NOTES)
    series = {}
    for index, name in enumerate(_texts(datasets.read(file, NAMES)["name"])):
        own = rows["name"] == index
        if own.any():
            series[name] = ObservedSeries(rows["step"][own], rows["time_ns"][own], rows["value"][own])
    entries = zip(*(_texts(notes[name]) for name in ("kind", "name", "text")), strict=True)
    when = zip(*(notes[name].tolist() for name in ("step", "session", "time_ns")), strict=True)
    return Observations(series, tuple(EventNote(*times, *texts) for times, texts in zip(when, entries, strict=True)))


def _is_number(value: Any) -> bool:
    return not isinstance(value, str)


def _drop_from(file: Any, name: str, step: int) -> None:
    """Drop the rows from the first one of a step after ``step`` on."""
    later = np.flatnonzero(datasets.read(file, name)["step"] > step)
    if later.size:
        datasets.shorten(file, name, int(later[0]))


def _due(file: Any, events: Sequence[ObservableEvent]) -> list[ObservableEvent]:
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


def _append_rows(file: Any, session: int, figures: Sequence[tuple[ObservableEvent, str, float]]) -> None:
    known = {name: index for index, name in enumerate(_texts(datasets.read(file, NAMES)["name"]))}
    # Two names that are alike in their first bytes would be one: none of the catalogue is as long.
    named = [name.encode()[:NAME_BYTES].decode(errors="ignore") for _, name, _ in figures]
    new = [name for name in dict.fromkeys(named) if name not in known]
    if new:
        known |= {name: len(known) + index for index, name in enumerate(new)}
        datasets.extend(file, NAMES, {"name": _bytes(new, NAME_BYTES)})
    rows = _when(session, [event for event, _, _ in figures])
    rows["name"] = np.array([known[name] for name in named])
    rows["value"] = np.array([value for _, _, value in figures])
    datasets.extend(file, ROWS, rows)


def _when(session: int, events: Sequence[ObservableEvent]) -> dict[str, np.ndarray]:
    return {
        "step": np.array([event.step for event in events], np.int64),
        "session": np.full(len(events), session),
        "time_ns": np.array([event.time_ns for event in events], np.int64),
    }


def _bytes(texts: Sequence[str], most: int) -> np.ndarray:
    """Return ``texts`` as UTF-8 of at most so many bytes: no character is cut in two."""
    return np.array(
        [text.encode(errors="replace")[:most].decode(errors="ignore").encode() for text in texts], f"S{most}"
    )


def _texts(values: np.ndarray) -> list[str]:
    return [value.decode(errors="replace") for value in values.tolist()]
