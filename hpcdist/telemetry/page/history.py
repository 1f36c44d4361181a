"""History of a run: its starts and their ends, its jobs, the last records of its ranks, and its incidents."""

import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from hpcdist.comm.launch import environment
from hpcdist.comm.record import flight_recorder, run_journal
from hpcdist.comm.record.run_journal import HEARTBEAT_S, JournalEntry, StartEntry
from hpcdist.constants import FINISHED, NS_PER_S, STOPPED
from hpcdist.errors import StorageError
from hpcdist.reporting import regular
from hpcdist.reporting.units import counted, format_duration, format_time
from hpcdist.telemetry.metrics.side_tables import SampledMetrics

ALIVE_NS: Final = 6 * int(HEARTBEAT_S) * NS_PER_S
RUNNING: Final = "under way"
FAILED: Final = "failed"
KILLED: Final = "ended without a message"
UNKNOWN: Final = "not known"


@dataclass(frozen=True)
class LastRecord:
    """Last entry of a rank in its flight recorder file. ``kind``: type of the entry, such as "finished"."""

    rank: int
    kind: str
    time_ns: int
    text: str


@dataclass(frozen=True)
class RunState:
    """State of the run. ``kind``: a constant such as RUNNING or FINISHED. ``detail``: an explanation, or ""."""

    kind: str
    detail: str
    starts: Sequence[StartEntry]
    words: Sequence[LastRecord]
    jobs: Sequence[JournalEntry]
    world: int

    @property
    def began(self) -> float | None:
        """Unix time of the first start of the run, or None if unknown."""
        return self.starts[0].began if self.starts else None

    @property
    def seen(self) -> float | None:
        """Unix time of the last heartbeat of the run, or None if unknown."""
        return self.starts[-1].seen if self.starts else None

    @property
    def requeues(self) -> int:
        """Number of times that the scheduler restarted a job of the run."""
        return sum(job.event == "began" and (job.number("restart") or 0) > 0 for job in self.jobs)


def read_state(run_dir: Path, now_ns: int) -> RunState:
    """Return the state of the run in ``run_dir`` at wall-clock time ``now_ns``. Unreadable files are skipped."""
    entries: list[JournalEntry] = []
    with suppress(StorageError):
        entries = run_journal.read(run_dir)
    starts, jobs = run_journal.starts(entries), [entry for entry in entries if entry.job]
    words, world, gone = _last_records(run_dir / "recorder")
    kind, detail = _verdict(starts, words, now_ns, gone)
    return RunState(kind, detail, starts, words, jobs, world)


def _verdict(starts: Sequence[StartEntry], words: Sequence[LastRecord], now_ns: int, gone: bool) -> tuple[str, str]:
    bad = sorted((word for word in words if word.kind in ("raised", "deadline")), key=lambda word: word.time_ns)
    cause = f"rank {bad[0].rank} {bad[0].kind} {bad[0].text}" if bad else ""
    if not starts:
        return (FAILED, cause) if bad else (UNKNOWN, "its directory does not say how it ended")
    last = starts[-1]
    if last.end == FINISHED:
        return FINISHED, ""
    if last.end:
        return STOPPED, "saved, and stopped by a request or the end of the job; a resume goes on with it"
    if bad:
        return FAILED, cause
    if now_ns - last.seen * NS_PER_S < ALIVE_NS and not gone:
        return RUNNING, ""
    return (
        KILLED,
        f"the last sign of life was at {format_time(last.seen)}: killed from outside, out of memory or a lost node",
    )


@dataclass(frozen=True)
class _RecordHead:
    rank: int
    began_ns: int
    world: int
    gone: bool  # True if its process is known to have ended
    words: Sequence[LastRecord]


def _last_records(folder: Path) -> tuple[list[LastRecord], int, bool]:
    heads = [head for path in sorted(folder.glob("rank-*.rec")) if (head := _record_head(path)) is not None]
    if not heads:
        return [], 0, False
    world = max(heads, key=lambda head: head.began_ns).world
    # Files of other ranks are from earlier starts with more ranks.
    current = [head for head in heads if head.rank < world]
    return [word for head in current for word in head.words], world, all(head.gone for head in current)


def _record_head(path: Path) -> _RecordHead | None:
    try:
        with open(regular.open_regular(path), "rb") as file:
            data = file.read(flight_recorder.TEXTS)
    except OSError:
        return None
    if len(data) < flight_recorder.TEXTS or not data.startswith(flight_recorder.MAGIC):
        return None
    _, version, rank, world, pid, _, ticks, wall, monotonic, host = flight_recorder.HEADER.unpack_from(data)
    if version != flight_recorder.VERSION:
        return None
    words = []
    for number, kind in enumerate(flight_recorder.KINDS):
        start = flight_recorder.NOTES + number * flight_recorder.NOTE_BYTES
        time_ns, length = flight_recorder.NOTE.unpack_from(data, start)
        if time_ns and kind in ("raised", "deadline", "frozen"):
            first = start + flight_recorder.NOTE.size
            text = data[first : first + min(length, flight_recorder.NOTE_BYTES)].decode(errors="replace")
            words.append(LastRecord(rank, kind, time_ns + wall - monotonic, text))
    here = host.rstrip(b"\0").decode(errors="replace") == os.uname().nodename[:64]
    gone = here and ticks > 0 and environment.has_ended(pid, ticks)
    return _RecordHead(rank, wall, world, gone, words)


MAX_INCIDENTS: Final = 100  # listed incidents of a kind; further ones are only counted


@dataclass(frozen=True)
class Incident:
    """Incident in a run after ``step`` steps (None if unknown), at the formatted ``time`` ("" if unknown)."""

    step: int | None
    time: str
    kind: str
    text: str


def read_incidents(run: SampledMetrics | None, state: RunState) -> list[Incident]:
    """Return a list of the incidents of a run, ordered by step. ``run``: metrics of the run, or None.

    Incidents are starts, deaths, skipped steps, silent faults, anomalies and failures. ``state``: see `read_state`.
    """
    incidents = [*_failure_incidents(state), *_start_incidents(run, state)]
    if run is not None:
        incidents += [*_death_incidents(run), *_skip_incidents(run), *_fault_incidents(run), *_note_incidents(run)]
    return sorted(incidents, key=lambda incident: (incident.step is None, incident.step or 0, incident.time))


def _start_incidents(run: SampledMetrics | None, state: RunState) -> Iterator[Incident]:
    firsts = _first_steps(run)
    for number, start in enumerate(state.starts):
        step = firsts[number] - 1 if len(firsts) == len(state.starts) else (0 if number == 0 else None)
        lasted = format_duration(start.seen - start.began) if start.seen > start.began else "less than ten seconds"
        if start.end:
            ended = f"{start.end} after {lasted}"
        elif number == len(state.starts) - 1:
            ended = f"{state.kind}, {lasted} so far" if state.kind == "under way" else f"{state.kind} after {lasted}"
        else:
            ended = f"ended unexpectedly after {lasted}"
        deaths = f"; {counted(start.deaths, 'death')} survived" if start.deaths else ""
        yield Incident(step, format_time(start.began), "start", f"start {number + 1}: {ended}{deaths}")


def _first_steps(run: SampledMetrics | None) -> list[int]:
    if run is None or not len(run.steps["step"]):
        return []
    new = np.flatnonzero(np.diff(run.steps["session"], prepend=run.steps["session"][0] - 1))
    return [int(step) for step in run.steps["step"][new]]


def _failure_incidents(state: RunState) -> Iterator[Incident]:
    for word in sorted(state.words, key=lambda word: word.time_ns)[:MAX_INCIDENTS]:
        yield Incident(None, format_time(word.time_ns / 1e9), "failure", f"rank {word.rank} {word.kind} {word.text}")


def _death_incidents(run: SampledMetrics) -> Iterator[Incident]:
    for row in _rows(run, "lives"):
        if not row["died"] and not row["added"]:
            continue
        parts = [counted(int(row["died"]), "rank") + " died"] if row["died"] else []
        parts += [counted(int(row["added"]), "process") + " joined"] if row["added"] else []
        text = f"{', '.join(parts)}; {int(row['world'])} ranks went on"
        seconds = float(row["seconds"])
        text += f" after {seconds:.2f} s" if np.isfinite(seconds) else ""
        yield Incident(
            int(row["step"]), "", "death" if row["died"] else "growth", text.replace("processs", "processes")
        )


def _skip_incidents(run: SampledMetrics) -> Iterator[Incident]:
    rows = [row for row in _rows(run, "loss_scale") if row["skipped"]]
    for row in rows[:MAX_INCIDENTS]:
        text = f"the gradient overflowed at loss scale {float(row['scale']):g}: nothing was updated"
        yield Incident(int(row["step"]), "", "skipped step", text)
    yield from _rest("skipped step", [int(row["step"]) for row in rows], "more steps")


def _fault_incidents(run: SampledMetrics) -> Iterator[Incident]:
    for row in _rows(run, "recomputed"):
        if not row["same"]:
            where = f", on rank {int(row['rank'])}" if row["rank"] >= 0 else ""
            text = f"two computations of the same step gave other bits{where}: a silent fault, decided by a third"
            yield Incident(int(row["step"]), "", "silent fault", text)


def _note_incidents(run: SampledMetrics) -> Iterator[Incident]:
    anomalies = [note for note in run.observed.notes if note.kind == "anomaly"]
    for note in anomalies[:MAX_INCIDENTS]:
        yield Incident(note.step, format_time(note.time_ns / 1e9), "anomaly", note.text)
    yield from _rest("anomaly", [note.step for note in anomalies], "more")


def _rest(kind: str, steps: Sequence[int], more: str) -> Iterator[Incident]:
    if len(steps) > MAX_INCIDENTS:
        text = f"and {len(steps) - MAX_INCIDENTS} {more} up to step {steps[-1]}"
        yield Incident(steps[MAX_INCIDENTS], "", kind, text)


def _rows(run: SampledMetrics, table: str) -> Sequence[dict[str, Any]]:
    columns = run.tables.get(table, {})
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
