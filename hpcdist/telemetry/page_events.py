"""What happened in a run beside its steps: starts, deaths, skipped steps, silent faults, anomalies, failures."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from hpcdist.arrays.sizes import counted
from hpcdist.telemetry.page_state import State, when
from hpcdist.telemetry.sampled import Run

MOST: Final = 100  # of a kind; more are counted


@dataclass(frozen=True)
class Happening:
    """One of them: after ``step`` steps (None: not known), ``time`` as text or "", and a sentence."""

    step: int | None
    time: str
    kind: str
    text: str


def read(run: Run | None, state: State) -> list[Happening]:
    """Return all of them by their steps."""
    found = [*_words(state), *_starts(run, state)]
    if run is not None:
        found += [*_deaths(run), *_skipped(run), *_faults(run), *_notes(run)]
    return sorted(found, key=lambda one: (one.step is None, one.step or 0, one.time))


def _starts(run: Run | None, state: State) -> Iterator[Happening]:
    """Tell each start, with the step from which it went on where the rows say so."""
    firsts = _firsts(run)
    for number, start in enumerate(state.starts):
        step = firsts[number] - 1 if len(firsts) == len(state.starts) else (0 if number == 0 else None)
        lasted = duration(start.seen - start.began) if start.seen > start.began else "less than ten seconds"
        if start.end:
            ended = f"{start.end} after {lasted}"
        elif number == len(state.starts) - 1:
            ended = f"{state.kind}, {lasted} so far" if state.kind == "under way" else f"{state.kind} after {lasted}"
        else:
            ended = f"ended by nobody's wish after {lasted}"
        deaths = f"; {counted(start.deaths, 'death')} outlived" if start.deaths else ""
        yield Happening(step, when(start.began), "start", f"start {number + 1}: {ended}{deaths}")


def _firsts(run: Run | None) -> list[int]:
    """Return the first step of each session that made one."""
    if run is None or not len(run.steps["step"]):
        return []
    new = np.flatnonzero(np.diff(run.steps["session"], prepend=run.steps["session"][0] - 1))
    return [int(step) for step in run.steps["step"][new]]


def _words(state: State) -> Iterator[Happening]:
    for word in sorted(state.words, key=lambda word: word.time_ns)[:MOST]:
        yield Happening(None, when(word.time_ns / 1e9), "failure", f"rank {word.rank} {word.kind} {word.text}")


def _deaths(run: Run) -> Iterator[Happening]:
    for row in _rows(run, "lives"):
        if not row["died"] and not row["added"]:
            continue
        parts = [counted(int(row["died"]), "rank") + " died"] if row["died"] else []
        parts += [counted(int(row["added"]), "process") + " joined"] if row["added"] else []
        text = f"{', '.join(parts)}; {int(row['world'])} ranks went on"
        seconds = float(row["seconds"])
        text += f" after {seconds:.2f} s" if np.isfinite(seconds) else ""
        yield Happening(
            int(row["step"]), "", "death" if row["died"] else "growth", text.replace("processs", "processes")
        )


def _skipped(run: Run) -> Iterator[Happening]:
    rows = [row for row in _rows(run, "loss_scale") if row["skipped"]]
    for row in rows[:MOST]:
        text = f"the gradient overflowed at loss scale {float(row['scale']):g}: nothing was updated"
        yield Happening(int(row["step"]), "", "skipped step", text)
    if len(rows) > MOST:
        text = f"and {len(rows) - MOST} more steps up to step {int(rows[-1]['step'])}"
        yield Happening(int(rows[MOST]["step"]), "", "skipped step", text)


def _faults(run: Run) -> Iterator[Happening]:
    for row in _rows(run, "recomputed"):
        if not row["same"]:
            where = f", on rank {int(row['rank'])}" if row["rank"] >= 0 else ""
            text = f"two computations of the same step gave other bits{where}: a silent fault, decided by a third"
            yield Happening(int(row["step"]), "", "silent fault", text)


def _notes(run: Run) -> Iterator[Happening]:
    told = [note for note in run.observed.notes if note.kind == "anomaly"]
    for note in told[:MOST]:
        yield Happening(note.step, when(note.time_ns / 1e9), "anomaly", note.text)
    if len(told) > MOST:
        yield Happening(told[MOST].step, "", "anomaly", f"and {len(told) - MOST} more up to step {told[-1].step}")


def _rows(run: Run, table: str) -> Sequence[dict[str, Any]]:
    columns = run.tables.get(table, {})
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def duration(seconds: float) -> str:
    """Return a length of time as people say it."""
    if not np.isfinite(seconds):
        return "an unknown time"
    if seconds < 120:
        return f"{seconds:.1f} s" if seconds >= 0.1 else f"{seconds * 1e3:.1f} ms"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    days, hours = divmod(seconds / 3600, 24)
    return f"{int(days)} d {int(hours)} h" if days else f"{hours:.1f} h"
