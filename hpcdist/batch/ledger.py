"""Ledger of a run: jobs submitted for it, their begins and ends, in ``jobs.jsonl`` in the run directory (local).

One JSON object a line, appended with one write: {"time", "event", "job", ...}, where ``event`` is

    submitted  scheduler, site, name, log, script, chain    by the process that submits
    began      restart, from, saved_ns, recipe, nodes       by the job, before it trains
    ended      restart, code, newest, saved_ns, word, lost  by the job, after it has trained
    cancelled  how                                          by the process that cancels

``saved_ns`` is when the newest checkpoint was written, ``recipe`` a digest of what is trained, ``word`` the decision
("again" or "stop"), ``lost`` the nodes that crashed, if any did. A job that is killed writes no end. Lines of other
programs, and lines torn by a crash, are skipped.

A registry of each user, ``$XDG_STATE_HOME/hpcdist/runs.jsonl``, lists the run directories.
"""

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from hpcdist.errors import StorageError
from hpcdist.reporting import regular

FILE_NAME: Final = "jobs.jsonl"
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
    """One line of the ledger; ``time`` has a time zone."""

    time: datetime
    event: str
    job: str
    values: Mapping[str, Any] = field(default_factory=dict)

    def text(self, name: str) -> str:
        """Return a value that is a text; "" where it is missing or none."""
        value = self.values.get(name)
        return value if isinstance(value, str) else ""

    def number(self, name: str) -> int | None:
        """Return a value that is a whole number; None where it is missing or none."""
        value = self.values.get(name)
        return value if type(value) is int else None

    def texts(self, name: str) -> list[str]:
        """Return a value that is a list of texts, and of it what is."""
        value = self.values.get(name)
        return [item for item in value if isinstance(item, str)] if isinstance(value, list) else []


@dataclass(frozen=True)
class LedgerJob:
    """All that the ledger of a run has of one job, in the order of the file."""

    id: str
    entries: tuple[LedgerEntry, ...]

    def last(self, event: str) -> LedgerEntry | None:
        """Return the newest entry of ``event``."""
        return next((entry for entry in reversed(self.entries) if entry.event == event), None)

    def text(self, name: str) -> str:
        """Return what the newest entry says that has ``name``; "" where none has."""
        return next((value for entry in reversed(self.entries) if (value := entry.text(name))), "")

    @property
    def is_ended(self) -> bool:
        """Whether it has said that it ends and does not come again."""
        own = [entry for entry in self.entries if entry.event in (SUBMITTED, BEGAN, ENDED)]
        return bool(own) and own[-1].event == ENDED and own[-1].text("word") != AGAIN

    @property
    def is_cancelled(self) -> bool:
        """Whether somebody has cancelled it: it may save and end, and is not to start again."""
        return self.last(CANCELLED) is not None

    @property
    def is_to_save(self) -> bool:
        """Whether it was cancelled in a way that lets it save and end."""
        cancelled = self.last(CANCELLED)
        return cancelled is not None and cancelled.text("how") == SAVE


def record(run_dir: Path, event: str, **values: Any) -> None:
    """Append an entry to the ledger of ``run_dir``, which is made where it is missing. ``job`` is among ``values``.

    Raises StorageError.
    """
    now = datetime.now(UTC).isoformat(timespec="milliseconds")
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        _append(run_dir / FILE_NAME, {"time": now, "event": event, **values})
    except OSError as error:
        raise StorageError(
            f"{run_dir / FILE_NAME} cannot be written: {error.strerror}; it keeps what becomes of the run's jobs: free "
            "space there, or choose another --out"
        ) from error


def read(run_dir: Path) -> list[LedgerEntry]:
    """Return the ledger of ``run_dir``, none where there is none. Raises StorageError where it cannot be read."""
    try:
        return [entry for value in regular.json_objects(run_dir / FILE_NAME) if (entry := _entry(value)) is not None]
    except OSError as error:
        failure = StorageError(f"{run_dir / FILE_NAME} cannot be read: {error.strerror or error}")
        failure.errno = error.errno
        raise failure from error


def jobs(entries: list[LedgerEntry]) -> dict[str, LedgerJob]:
    """Return the jobs of a ledger by id, in the order in which each is mentioned first."""
    entries_of: dict[str, list[LedgerEntry]] = {}
    for entry in entries:
        entries_of.setdefault(entry.job, []).append(entry)
    return {job: LedgerJob(job, tuple(own)) for job, own in entries_of.items()}


def later_links(jobs: Mapping[str, LedgerJob], job: str) -> list[str]:
    """Return the jobs of a run that were submitted to go on after ``job``: the later links of its chain, in order."""
    links: list[str] = []
    for other in jobs.values():
        submitted = other.last(SUBMITTED)
        chain = [] if submitted is None else submitted.texts("chain")
        whole = chain if other.id in chain else [*chain, other.id]
        if job in whole:
            links += [link for link in whole[whole.index(job) + 1 :] if link not in links]
    return links


def registry(environment: Mapping[str, str] = os.environ) -> Path:
    """Return the file that names the run directories of this user; it need not exist."""
    home = environment.get("XDG_STATE_HOME") or os.path.join(environment.get("HOME") or "~", ".local", "state")
    return Path(home).expanduser() / "hpcdist" / REGISTRY


def register_run(run_dir: Path, environment: Mapping[str, str] = os.environ) -> None:
    """Enter ``run_dir`` in the registry of this user. Where that cannot be written, it is told and nothing raised."""
    path, place = registry(environment), os.path.abspath(run_dir)
    try:
        if any(value.get("run_dir") == place for value in regular.json_objects(path)):
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        _append(path, {"time": datetime.now(UTC).isoformat(timespec="milliseconds"), "run_dir": place})
    except (OSError, RuntimeError) as error:  # RuntimeError: there is no home directory
        print(
            f"hpcdist: warning: {path} cannot be written ({error}): `hpcdist jobs` finds {place} only by its name; "
            "set XDG_STATE_HOME to a directory that can be",
            file=sys.stderr,
        )


def registered_runs(environment: Mapping[str, str] = os.environ) -> list[Path]:
    """Return the run directories of the registry that are still there, the newest last. Raises StorageError."""
    path = registry(environment)
    try:
        places = [value.get("run_dir") for value in regular.json_objects(path)]
    except OSError as error:
        raise StorageError(f"{path} cannot be read: {error.strerror or error}; name the run directories") from error
    named = dict.fromkeys(place for place in places if isinstance(place, str))
    return [Path(place) for place in named if _is_directory(place)]


def _is_directory(place: str) -> bool:
    try:
        return os.path.isdir(place)
    except ValueError:  # a zero byte in it
        return False


def _append(path: Path, values: Mapping[str, Any]) -> None:
    """Append one line with one write, which no other writer's can come into."""
    line = json.dumps(values, separators=(", ", ": ")) + "\n"
    fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK, 0o666)
    try:
        end = os.fstat(fd).st_size
        if end and os.pread(fd, 1, end - 1) != b"\n":  # a crash has torn the last line: it must not take this one along
            line = "\n" + line
        if os.write(fd, line.encode()) != len(line.encode()):
            raise OSError(0, "only a part of the line was written: is the disk full?")
    finally:
        os.close(fd)


def _entry(value: dict[str, Any]) -> LedgerEntry | None:
    """Return a line as an entry; None where it is none."""
    known = {name: value.pop(name, None) for name in ("time", "event", "job")}
    if not all(isinstance(value_of_key, str) and value_of_key for value_of_key in known.values()):
        return None
    try:
        time = datetime.fromisoformat(known["time"])
    except ValueError:
        return None
    return LedgerEntry(time if time.tzinfo else time.replace(tzinfo=UTC), known["event"], known["job"], value)
