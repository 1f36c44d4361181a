"""Ledger of the jobs of a run: the entries of its journal that have a "job". Local.

Events of a job, and the further keys of their entries:

    submitted  scheduler, site, name, log, script, chain
    began      restart, from, saved_ns, recipe, nodes
    ended      restart, code, newest, saved_ns, word, lost
    cancelled  how

``saved_ns``: write time of the newest checkpoint. ``word``: requeue decision ("again" or "stop"). ``lost``: crashed
nodes. A killed job writes no `ended`.
"""

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from hpcdist.comm.record import run_journal
from hpcdist.comm.record.run_journal import JOURNAL_FILE, JournalEntry
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
class LedgerJob:
    """A batch job: all its entries in the journal, oldest first."""

    id: str
    entries: tuple[JournalEntry, ...]

    def last(self, event: str) -> JournalEntry | None:
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
    """Append ``event`` to the journal of ``run_dir``, with the values ``**values``. Raises StorageError."""
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        run_journal.append(run_dir, event, **values)
    except OSError as error:
        raise StorageError(
            f"{run_dir / JOURNAL_FILE}, the journal of the run, cannot be written: {error.strerror}; free "
            "space on its file system, or choose another --out"
        ) from error


def read(run_dir: Path) -> list[JournalEntry]:
    """Return the entries of jobs in the journal of ``run_dir``, oldest first. Raises StorageError."""
    return [entry for entry in run_journal.read(run_dir) if entry.job]


def jobs(entries: Sequence[JournalEntry]) -> dict[str, LedgerJob]:
    """Return {job id: `LedgerJob`} for the jobs in ``entries``, in the order of their first entries."""
    entries_of: dict[str, list[JournalEntry]] = {}
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
        run_journal.append_line(path, {"time": datetime.now(UTC).isoformat(timespec="milliseconds"), "run_dir": place})
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
