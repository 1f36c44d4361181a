"""How a run stands: its starts and how each ended, and what its ranks said last. Reads small files only (local)."""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from hpcdist.comm import recordfile
from hpcdist.reporting import regular

STARTS: Final = "starts.json"
JOBS: Final = "jobs.jsonl"
NS: Final = 10**9
ALIVE_NS: Final = 60 * NS  # a start renews its sign of life every ten seconds
MOST_BYTES: Final = 4 << 20  # of a file of text that is read
RUNNING: Final = "under way"
FINISHED: Final = "finished"
STOPPED: Final = "stopped"
FAILED: Final = "failed"
KILLED: Final = "ended without a word"
UNKNOWN: Final = "not known"


@dataclass(frozen=True)
class Start:
    """One start of the run: times in seconds since 1970, ``end`` finished, stopped or "", ranks that died."""

    began: float
    seen: float
    end: str
    deaths: int


@dataclass(frozen=True)
class Word:
    """What a rank said last: ``kind`` raised, deadline, frozen or finished; wall clock."""

    rank: int
    kind: str
    time_ns: int
    text: str


@dataclass(frozen=True)
class Job:
    """An entry of the ledger of batch jobs."""

    time: str
    event: str
    job: str
    values: Mapping[str, Any]


@dataclass(frozen=True)
class State:
    """How the run stands. ``kind`` is one of the words above; ``detail`` a sentence, "" where there is none."""

    kind: str
    detail: str
    starts: Sequence[Start]
    words: Sequence[Word]
    jobs: Sequence[Job]
    world: int

    @property
    def began(self) -> float | None:
        """When the first start began; None: nobody knows."""
        return self.starts[0].began if self.starts else None

    @property
    def seen(self) -> float | None:
        """The last sign of life."""
        return self.starts[-1].seen if self.starts else None

    @property
    def requeues(self) -> int:
        """Jobs of a scheduler that began again."""
        return sum(job.event == "began" and (job.values.get("restart") or 0) > 0 for job in self.jobs)


def read(run_dir: Path, now_ns: int) -> State:
    """Return how the run in ``run_dir`` stands at ``now_ns``; what cannot be read is left out."""
    starts, jobs = _starts(run_dir / STARTS), _jobs(run_dir / JOBS)
    words, world, gone = _words(run_dir / "recorder")
    kind, detail = _judged(starts, words, now_ns, gone)
    return State(kind, detail, starts, words, jobs, world)


def _judged(starts: Sequence[Start], words: Sequence[Word], now_ns: int, gone: bool) -> tuple[str, str]:
    bad = sorted((word for word in words if word.kind in ("raised", "deadline")), key=lambda word: word.time_ns)
    cause = f"rank {bad[0].rank} {bad[0].kind} {bad[0].text}" if bad else ""
    if not starts:
        return (FAILED, cause) if bad else (UNKNOWN, "its directory does not say how it ended")
    last = starts[-1]
    if last.end == "finished":
        return FINISHED, ""
    if last.end:
        return STOPPED, "saved, and left by somebody's wish or the end of the job's time; a resume goes on with it"
    if bad:
        return FAILED, cause
    if now_ns - last.seen * NS < ALIVE_NS and not gone:
        return RUNNING, ""
    return KILLED, f"the last sign of life was at {when(last.seen)}: killed from outside, out of memory or a lost node"


def when(seconds: float) -> str:
    """Return a time in seconds since 1970 as people read it, in UTC."""
    try:
        return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    except (OverflowError, ValueError, OSError):
        return "an impossible time"


def text_of(path: Path) -> str:
    """Return what is in a small file; "" where it cannot be read."""
    try:
        with open(regular.open_regular(path), "rb") as file:
            return file.read(MOST_BYTES).decode(errors="replace")
    except OSError:
        return ""


def values_of(text: str) -> Any:
    """Return the JSON value in ``text``; None where it is none."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _starts(path: Path) -> list[Start]:
    found = values_of(text_of(path))
    rows = [row for row in found if isinstance(row, dict)] if isinstance(found, list) else []
    kept = []
    for row in rows:
        began, seen = row.get("began"), row.get("seen")
        if isinstance(began, int | float) and isinstance(seen, int | float):
            deaths = row.get("deaths")
            kept.append(Start(began, seen, str(row.get("end") or ""), deaths if isinstance(deaths, int) else 0))
    return kept


def _jobs(path: Path) -> list[Job]:
    found = []
    for line in text_of(path).splitlines():
        row = values_of(line)
        if isinstance(row, dict):
            known = [each for name in ("time", "event", "job") if isinstance(each := row.pop(name, None), str)]
            if len(known) == 3:
                found.append(Job(known[0], known[1], known[2], row))
    return found


@dataclass(frozen=True)
class _Head:
    """The begin of a rank's record, without its events."""

    rank: int
    began_ns: int
    world: int
    gone: bool  # its process is known to have ended
    words: Sequence[Word]


def _words(folder: Path) -> tuple[list[Word], int, bool]:
    """Return what the ranks said last, the number of ranks in the newest record, and whether all have ended.

    Of each record only the notes are read: the events of a thousand ranks would take seconds.
    """
    heads = [head for path in sorted(folder.glob("rank-*.rec")) if (head := _head(path)) is not None]
    if not heads:
        return [], 0, False
    world = max(heads, key=lambda head: head.began_ns).world
    own = [head for head in heads if head.rank < world]
    return [word for head in own for word in head.words], world, all(head.gone for head in own)


def _head(path: Path) -> _Head | None:
    """Return the begin of a record; None where it is none."""
    try:
        with open(regular.open_regular(path), "rb") as file:
            data = file.read(recordfile.TEXTS)
    except OSError:
        return None
    if len(data) < recordfile.TEXTS or not data.startswith(recordfile.MAGIC):
        return None
    _, version, rank, world, pid, _, ticks, wall, monotonic, host = recordfile.HEADER.unpack_from(data)
    if version != recordfile.VERSION:
        return None
    words = []
    for number, kind in enumerate(recordfile.KINDS):
        start = recordfile.NOTES + number * recordfile.NOTE_BYTES
        time_ns, length = recordfile.NOTE.unpack_from(data, start)
        if time_ns and kind in ("raised", "deadline", "frozen"):
            first = start + recordfile.NOTE.size
            text = data[first : first + min(length, recordfile.NOTE_BYTES)].decode(errors="replace")
            words.append(Word(rank, kind, time_ns + wall - monotonic, text))
    here = host.rstrip(b"\0").decode(errors="replace") == os.uname().nodename[:64]
    gone = here and ticks > 0 and recordfile.has_ended(pid, ticks)
    return _Head(rank, wall, world, gone, words)
