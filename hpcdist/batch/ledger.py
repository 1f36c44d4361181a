"""Job ledger: the log ``jobs.jsonl`` of the jobs of a run, in its directory. Local.

JSON lines {"time", "event", "job", ...} with these events and further keys:

    submitted  scheduler, site, name, log, script, chain
    began      restart, from, saved_ns, recipe, nodes
    ended      restart, code, newest, saved_ns, word, lost
    cancelled  how

``saved_ns``: write time of the newest checkpoint. ``word``: requeue decision ("again" or "stop"). ``lost``: crashed
nodes. A killed job writes no `ended`.
"""

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from hpcdist.constants import JOBS_FILE
from hpcdist.errors import StorageError
from hpcdist.reporting import regular

REGISTRY: Final = "runs.jsonl"
SUBMITTED: Final = "submitted"
BEGAN: Final = "began"
ENDED: Final = "ended"
CANCELLED: Final = "cancelled"
AGAIN: Final = "again"
STOP: Final = "stop"
SAVE: Final = "save"


@dataclass(frozen=True)
class LedgerEntry:
    """Entry of a run's job ledger: an ``event`` ("submitted", "ended", ...) of the batch job with id ``job``."""

    time: datetime
    event: str
    job: str
    values: Mapping[str, Any] = field(default_factory=dict)

    def text(self, name: str) -> str:
        """Return this entry's value for the key ``name`` if it is a string, else ""."""
        value = self.values.get(name)
        return value if isinstance(value, str) else ""

    def number(self, name: str) -> int | None:
        """Return this entry's value for the key ``name`` if it is an integer, else None."""
        value = self.values.get(name)
        return value if type(value) is int else None

    def texts(self, name: str) -> list[str]:
        """Return the strings in this entry's list for the key ``name``, or [] if the value is not a list."""
        value = self.values.get(name)
        return [item for item in value if isinstance(item, str)] if isinstance(value, list) else []


@dataclass(frozen=True)
class LedgerJob:
    """A batch job: all its entries in the job ledger, oldest first."""

    id: str
    entries: tuple[LedgerEntry, ...]

    def last(self, event: str) -> LedgerEntry | None:
        """Return this job's newest entry of type ``event``, or None if there is no such entry."""
        return next((entry for entry in reversed(self.entries) if entry.event == event), None)

    def text(self, name: str) -> str:
        """Return the newest string for the key ``name`` in this job's entries, or "" if no entry has one."""
        return next((value for entry in reversed(self.entries) if (value := entry.text(name))), "")

    @property
    def is_ended(self) -> bool:
        """True if the job has ended and did not request to be requeued."""
        phases = [entry for entry in self.entries if entry.event in (SUBMITTED, BEGAN, ENDED)]
        return bool(phases) and phases[-1].event == ENDED and phases[-1].text("word") != AGAIN

    @property
    def is_cancelled(self) -> bool:
        """True if `hpcdist jobs cancel` cancelled the job. It may still save and end, but must not start again."""
        return self.last(CANCELLED) is not None

    @property
    def is_to_save(self) -> bool:
        """True if the job was cancelled, but may save a checkpoint before it ends."""
        cancelled = self.last(CANCELLED)
        return cancelled is not None and cancelled.text("how") == SAVE


def record(run_dir: Path, event: str, **values: Any) -> None:
    """Append ``event`` to the job ledger of ``run_dir``, with the values ``**values``. Raises StorageError."""
    now = datetime.now(UTC).isoformat(timespec="milliseconds")
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        _append(run_dir / JOBS_FILE, {"time": now, "event": event, **values})
    except OSError as error:
        raise StorageError(
            f"{run_dir / JOBS_FILE}, the record of the run's jobs, cannot be written: {error.strerror}; free "
            "space on its file system, or choose another --out"
        ) from error


def read(run_dir: Path) -> list[LedgerEntry]:
    """Return all entries of the job ledger in ``run_dir``, or [] if there is no ledger. Raises StorageError."""
    try:
        return [entry for value in regular.json_objects(run_dir / JOBS_FILE) if (entry := _entry(value)) is not None]
    except OSError as error:
        failure = StorageError(f"{run_dir / JOBS_FILE} cannot be read: {error.strerror or error}")
        failure.errno = error.errno
        raise failure from error


def jobs(entries: list[LedgerEntry]) -> dict[str, LedgerJob]:
    """Return {job id: `LedgerJob`} for the jobs in ``entries``, in the order of their first entries."""
    entries_of: dict[str, list[LedgerEntry]] = {}
    for entry in entries:
        entries_of.setdefault(entry.job, []).append(entry)
    return {job: LedgerJob(job, tuple(job_entries)) for job, job_entries in entries_of.items()}


def later_links(jobs: Mapping[str, LedgerJob], job: str) -> list[str]:
    """Return the ids of the jobs that continue the run after ``job``, in order. ``jobs``: all jobs by id."""
    links: list[str] = []
    for other in jobs.values():
        submitted = other.last(SUBMITTED)
        chain = [] if submitted is None else submitted.texts("chain")
        whole = chain if other.id in chain else [*chain, other.id]
        if job in whole:
            links += [link for link in whole[whole.index(job) + 1 :] if link not in links]
    return links


def registry(environment: Mapping[str, str] = os.environ) -> Path:
    """Return the path of the file with this user's list of run directories. The file may not exist yet."""
    home = environment.get("XDG_STATE_HOME") or os.path.join(environment.get("HOME") or "~", ".local", "state")
    return Path(home).expanduser() / "hpcdist" / REGISTRY


def register_run(run_dir: Path, environment: Mapping[str, str] = os.environ) -> None:
    """Add ``run_dir`` to this user's list of run directories. Prints a warning if the list cannot be written."""
    path, place = registry(environment), os.path.abspath(run_dir)
    try:
        if any(value.get("run_dir") == place for value in regular.json_objects(path)):
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        _append(path, {"time": datetime.now(UTC).isoformat(timespec="milliseconds"), "run_dir": place})
    except (OSError, RuntimeError) as error:  # RuntimeError: no home directory
        print(
            f"hpcdist: warning: {path} cannot be written ({error}), so `hpcdist jobs` lists {place} only if you name "
            "it; set XDG_STATE_HOME to a writable directory",
            file=sys.stderr,
        )


def registered_runs(environment: Mapping[str, str] = os.environ) -> list[Path]:
    """Return the directories of this user's submitted runs that still exist, newest last. Raises StorageError."""
    path = registry(environment)
    try:
        places = [value.get("run_dir") for value in regular.json_objects(path)]
    except OSError as error:
        raise StorageError(
            f"{path}, the list of this user's runs, cannot be read: {error.strerror or error}; name the runs instead: "
            "hpcdist jobs COMMAND RUN_DIR"
        ) from error
    named = dict.fromkeys(place for place in places if isinstance(place, str))
    return [Path(place) for place in named if _is_directory(place)]


def _is_directory(place: str) -> bool:
    try:
        return os.path.isdir(place)
    except ValueError:  # the path contains a zero byte
        return False


def _append(path: Path, values: Mapping[str, Any]) -> None:
    line = json.dumps(values, separators=(", ", ": ")) + "\n"
    fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK, 0o666)
    try:
        end = os.fstat(fd).st_size
        if end and os.pread(fd, 1, end - 1) != b"\n":  # a crash tore the last line: start a new one
            line = "\n" + line
        # A single write, so that lines of concurrent processes do not mix.
        if os.write(fd, line.encode()) != len(line.encode()):
            raise OSError(0, "the line was written only partially: is the disk full?")
    finally:
        os.close(fd)


def _entry(value: dict[str, Any]) -> LedgerEntry | None:
    fields = {name: value.pop(name, None) for name in ("time", "event", "job")}
    if not all(isinstance(value_of_key, str) and value_of_key for value_of_key in fields.values()):
        return None
    try:
        time = datetime.fromisoformat(fields["time"])
    except ValueError:
        return None
    return LedgerEntry(time if time.tzinfo else time.replace(tzinfo=UTC), fields["event"], fields["job"], value)
