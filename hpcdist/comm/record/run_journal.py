"""Journal of a run: the file ``journal.jsonl`` in the run directory, with the events of its starts and its jobs. Local.

Each line is a JSON object {"time", "event", ...}. A single write with O_APPEND adds a line, so lines of concurrent
processes do not mix. Readers skip torn and invalid lines. `hpcdist.batch.ledger` has the events of jobs. Rank 0 writes
the events of a start (an execution of the training), in this order:

    start                launch, survives
    alive                at most every 10 s
    died                 deaths: number of ranks that died without ending the run
    finished or stopped

A start without `finished` or `stopped` has failed: its work since the last checkpoint is lost. A rank failure that the
other ranks survived does not count, because their state was in memory, so it is no reason to save more often. With
T = seconds of all starts together and r = number of failed starts, the estimated mean time between failures is

    mtbf = T / (r + 1)

It is finite before the first failure, unlike the maximum likelihood estimate T / r. It is 1 / (mean of the failure
rate's posterior distribution Gamma(r + 1, T)), for failures at random times (a Poisson process) and a flat prior: A.
Gelman et al., Bayesian Data Analysis, 3rd ed. 2013, section 2.6.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from hpcdist.comm.launch.exit_file import LAUNCH_DIR, SURVIVE
from hpcdist.constants import FINISHED, STOPPED
from hpcdist.errors import StorageError
from hpcdist.reporting import regular

JOURNAL_FILE: Final = "journal.jsonl"
OLD_JOBS_FILE: Final = "jobs.jsonl"  # earlier versions wrote these two files
OLD_STARTS_FILE: Final = "starts.json"
FRUITLESS: Final = 2  # after so many starts in a row without a new checkpoint, no further start follows
HEARTBEAT_S: Final = 10.0  # maximum age of the last sign of life
START: Final = "start"
ALIVE: Final = "alive"
DIED: Final = "died"
START_EVENTS: Final = (START, ALIVE, DIED, FINISHED, STOPPED)
_ALIVE_LINE: Final = b'{"event": "alive"'
_MOST_BYTES: Final = 1 << 30  # five years of signs of life
_LATEST_S: Final = 1e11  # largest plausible time, in seconds since 1970


@dataclass(frozen=True)
class JournalEntry:
    """Entry of a run's journal: the time and the name of an event, such as "start", and other values of the event."""

    time: datetime
    event: str
    values: Mapping[str, Any]

    @property
    def job(self) -> str:
        """Id of the batch job that this entry is about, or "" if the entry is about an execution of the training."""
        return self.text("job")

    def text(self, name: str) -> str:
        """Return this entry's value for the key ``name`` if it is a string, else ""."""
        value = self.values.get(name)
        return value if isinstance(value, str) else ""

    def number(self, name: str) -> int | None:
        """Return this entry's value for the key ``name`` if it is an integer, else None."""
        value = self.values.get(name)
        return value if type(value) is int else None

    def texts(self, name: str) -> list[str]:
        """Return the strings in the list that this entry has for the key ``name``, or [] if the value is not a list."""
        value = self.values.get(name)
        return [item for item in value if isinstance(item, str)] if isinstance(value, list) else []


@dataclass(frozen=True)
class StartEntry:
    """One execution of a run's training: begin, last sign of life, outcome, and number of ranks that died."""

    began: float  # in seconds since 1970
    seen: float  # time of the last sign of life, in seconds since 1970
    end: str = ""  # "finished", "stopped", or "": the start failed or is running
    launch: str = ""  # name of the start, or ""
    survives: str = ""  # value of `hpcdist run --survive`, or ""
    deaths: int = 0  # number of ranks that died without ending the run

    @property
    def seconds(self) -> float:
        """Seconds from the begin of this execution to its last sign of life, or 0 if the clock was set back."""
        return max(0.0, self.seen - self.began)


class StartRecord:
    """Writer of the events of this execution of a run, such as `start`, to the journal in ``directory``. Local."""

    def __init__(self, directory: Path, clock: Callable[[], float] = time.time, launch: str | None = None) -> None:
        if launch is None:
            launch = os.fsencode(Path(os.environ.get(LAUNCH_DIR, "")).name).decode(errors="backslashreplace")
        self._directory, self._clock, self._warn = directory, clock, True
        earlier, now = self._read(), clock()
        # After the death of the rank that wrote the journal, another rank continues the same start.
        if earlier and launch and earlier[-1].launch == launch and not earlier[-1].end:
            self.current = earlier.pop()
            self._write(ALIVE)
        else:
            self.current = StartEntry(now, now, launch=launch, survives=os.environ.get(SURVIVE, ""))
            self._write(START, launch=launch, survives=self.current.survives)
        self.before = tuple(earlier)

    @property
    def failures(self) -> int:
        """Number of earlier executions of the run that ended without `finished` or `stopped`."""
        return sum(not start.end for start in self.before)

    @property
    def seconds(self) -> float:
        """Total duration of all executions of the run in seconds, including this execution until now."""
        now = replace(self.current, seen=self._clock())
        return sum(start.seconds for start in (*self.before, now))

    @property
    def mtbf_s(self) -> float:
        """Mean time between failures in seconds: `seconds` / (`failures` + 1)."""
        return self.seconds / (self.failures + 1)

    def alive(self, always: bool = False) -> None:
        """Record in the journal that the run is alive. Without ``always``: at most once every `HEARTBEAT_S` seconds."""
        if always or not 0 <= self._clock() - self.current.seen < HEARTBEAT_S:
            self._write(ALIVE)

    def survived(self, deaths: int) -> None:
        """Record in the journal that ``deaths`` ranks died, and that the run continues."""
        self.current = replace(self.current, deaths=self.current.deaths + deaths)
        self._write(DIED, deaths=deaths)

    def ended(self, end: str) -> None:
        """Record in the journal that this execution ended without failure. ``end``: the event, FINISHED or STOPPED."""
        self.current = replace(self.current, end=end)
        self._write(end)

    def _write(self, event: str, **values: Any) -> None:
        self.current = replace(self.current, seen=self._clock())
        try:
            append(self._directory, event, self.current.seen, **values)
        except OSError as error:  # the run can continue
            path = self._directory / JOURNAL_FILE
            self._warn_once(f"{path} cannot be written ({error.strerror}): this start may count as failed")

    def _read(self) -> list[StartEntry]:
        try:
            return starts(read(self._directory))
        except StorageError as error:
            is_damaged, aside = regular.set_aside_damaged(self._directory / JOURNAL_FILE, error)
            fate = aside if is_damaged else "; it stays as it is"
            self._warn_once(f"{error}: the time between failures counts from this start{fate}")
            return []

    def _warn_once(self, text: str) -> None:
        if self._warn:
            print(f"hpcdist: {text}", file=sys.stderr, flush=True)
        self._warn = False


def append(run_dir: Path, event: str, seconds: float | None = None, **values: Any) -> None:
    """Append ``event`` to the journal in ``run_dir``. ``seconds``: time since 1970, None means now. Raises OSError."""
    now = datetime.fromtimestamp(time.time() if seconds is None else seconds, UTC).isoformat(timespec="milliseconds")
    append_line(run_dir / JOURNAL_FILE, {"event": event, "time": now, **values})


def append_line(path: Path, values: Mapping[str, Any]) -> None:
    """Append ``values`` as a line of JSON to the file ``path``. Raises OSError, also if ``path`` is a symlink."""
    line = json.dumps(values, separators=(", ", ": ")) + "\n"
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW
    fd = os.open(path, flags, 0o666)
    try:
        end = os.fstat(fd).st_size
        if end and os.pread(fd, 1, end - 1) != b"\n":  # a crash tore the last line: start a new one
            line = "\n" + line
        # A single write, so that lines of concurrent processes do not mix.
        if os.write(fd, line.encode()) != len(line.encode()):
            raise OSError(0, "only a part of the line was written; check the free space of the disk")
    finally:
        os.close(fd)


def read(run_dir: Path) -> list[JournalEntry]:
    """Return a list of all entries of the journal in ``run_dir``, or [] if no journal exists. Raises StorageError."""
    path = run_dir / JOURNAL_FILE
    try:
        values = [*_old_values(run_dir), *_values(path)]
    except OSError as error:
        failure = StorageError(f"{error.filename or path} cannot be read: {error.strerror or error}")
        failure.errno = error.errno
        raise failure from error
    return [entry for value in values if (entry := _entry(value)) is not None]


def starts(entries: Iterable[JournalEntry]) -> list[StartEntry]:
    """Return the list of a run's starts (executions of the training), oldest first. ``entries``: result of `read`."""
    result: list[StartEntry] = []
    for entry in entries:
        seconds = entry.time.timestamp()
        if entry.event == START:
            result.append(StartEntry(seconds, seconds, launch=entry.text("launch"), survives=entry.text("survives")))
        elif entry.event in START_EVENTS and result:
            deaths = result[-1].deaths + max(0, entry.number("deaths") or 0)
            end = entry.event if entry.event in (FINISHED, STOPPED) else result[-1].end
            result[-1] = replace(result[-1], seen=seconds, end=end, deaths=deaths)
    return result


def known_starts(run_dir: Path) -> list[StartEntry]:
    """Return the list of `starts` of the run in ``run_dir``, or [] if the run's journal cannot be read."""
    try:
        return starts(read(run_dir))
    except StorageError:
        return []


def _values(path: Path) -> Iterator[dict[str, Any]]:
    # A day of training has 8,640 signs of life: parse only the last of consecutive ones.
    try:
        lines = regular.read(path, _MOST_BYTES).split(b"\n")
    except (FileNotFoundError, NotADirectoryError):
        return
    for line, following in pairwise([*lines, b""]):
        is_superseded = following.startswith(_ALIVE_LINE) and following.endswith(b"}")
        if is_superseded and line.startswith(_ALIVE_LINE):
            continue
        if (value := regular.json_object(line)) is not None:
            yield value


def _old_values(run_dir: Path) -> Iterator[dict[str, Any]]:
    try:
        yield from regular.json_objects(run_dir / OLD_JOBS_FILE)
        rows = regular.json_value(run_dir / OLD_STARTS_FILE)
    except (OSError, ValueError) as error:
        if isinstance(error, FileNotFoundError | NotADirectoryError) or regular.is_damage(error):
            return
        raise
    for row in rows if isinstance(rows, list) else ():
        values = row if isinstance(row, dict) else {}
        times = [value for name in ("began", "seen") if isinstance(value := values.get(name), int | float)]
        if len(times) < 2 or not all(0 <= value < _LATEST_S for value in times):
            continue
        began, seen = (datetime.fromtimestamp(value, UTC).isoformat() for value in times)
        yield {**row, "time": began, "event": START}
        yield {"time": seen, "event": DIED, "deaths": row.get("deaths")}
        if row.get("end") in (FINISHED, STOPPED):
            yield {"time": seen, "event": row["end"]}


def _entry(value: dict[str, Any]) -> JournalEntry | None:
    event, job, text = value.pop("event", None), value.get("job"), value.pop("time", None)
    is_complete = isinstance(event, str) and event and isinstance(text, str)
    if not is_complete or not (event in START_EVENTS or (isinstance(job, str) and job)):
        return None
    try:
        moment = datetime.fromisoformat(text)
        return JournalEntry(moment if moment.tzinfo else moment.replace(tzinfo=UTC), event, value)
    except ValueError:
        return None
