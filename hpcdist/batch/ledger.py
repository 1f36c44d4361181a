"""Jobs of a run: their entries in its journal, and the decision whether a job is requeued. Local.

Events of a job, and the further keys of their entries:

    submitted  scheduler, site, name, log, script, chain
    began      restart, from, saved_ns, recipe, nodes
    ended      restart, code, newest, saved_ns, word, lost
    cancelled  how

``saved_ns``: write time of the newest checkpoint. ``word``: requeue decision ("again" or "stop"). ``lost``: crashed
nodes. A killed job writes no `ended`.

`fruitless_starts` limits consecutive starts without a new checkpoint, by the job script and by Slurm, which requeues a
job after a node failure. Restarts by `hpcdist run --restarts` have another limit.
"""

import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, NamedTuple

from hpcdist.comm.record import run_journal
from hpcdist.comm.record.run_journal import FRUITLESS, JOURNAL_FILE, JournalEntry
from hpcdist.errors import INTERRUPTED, MISSING_CAPABILITY, OK, REQUEUE, USAGE, StorageError
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
    """A batch job and the entries of the run's journal that belong to this job, oldest first."""

    id: str
    entries: tuple[JournalEntry, ...]

    def last(self, event: str) -> JournalEntry | None:
        """Return this job's newest entry of type ``event``, or None if there is no such entry."""
        return next((entry for entry in reversed(self.entries) if entry.event == event), None)

    def text(self, name: str) -> str:
        """Return the newest text value of the key ``name`` in this job's entries, or "" if no entry has the key."""
        return next((value for entry in reversed(self.entries) if (value := entry.text(name))), "")

    @property
    def is_ended(self) -> bool:
        """True if the job has ended and did not request to be requeued."""
        phases = [entry for entry in self.entries if entry.event in (SUBMITTED, BEGAN, ENDED)]
        return bool(phases) and phases[-1].event == ENDED and phases[-1].text("word") != AGAIN

    @property
    def is_cancelled(self) -> bool:
        """True if `hpcdist jobs cancel` cancelled the job. The job may still save and end, but must not restart."""
        return self.last(CANCELLED) is not None

    @property
    def is_to_save(self) -> bool:
        """True if the job was cancelled, but may save a checkpoint before it ends."""
        cancelled = self.last(CANCELLED)
        return cancelled is not None and cancelled.text("how") == SAVE


def record(run_dir: Path, event: str, **values: Any) -> None:
    """Append an entry of type ``event`` and keys ``**values`` to the journal of ``run_dir``. Raises StorageError."""
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        run_journal.append(run_dir, event, **values)
    except OSError as error:
        raise StorageError(
            f"{run_dir / JOURNAL_FILE}, the journal of the run, cannot be written: {error.strerror}; free "
            "space on its file system, or choose another --out"
        ) from error


def read(run_dir: Path) -> list[JournalEntry]:
    """Return the journal entries of ``run_dir`` that belong to batch jobs, oldest first. Raises StorageError."""
    return [entry for entry in run_journal.read(run_dir) if entry.job]


def jobs(entries: Sequence[JournalEntry]) -> dict[str, LedgerJob]:
    """Return {job id: `LedgerJob`}, ordered by the first entry of each job. ``entries``: the result of `read`."""
    entries_of: dict[str, list[JournalEntry]] = {}
    for entry in entries:
        entries_of.setdefault(entry.job, []).append(entry)
    return {job: LedgerJob(job, tuple(job_entries)) for job, job_entries in entries_of.items()}


def later_links(jobs: Mapping[str, LedgerJob], job: str) -> list[str]:
    """Return the ids of the jobs after the job id ``job`` in that job's chain, in order. ``jobs``: {id: job}."""
    links: list[str] = []
    for other in jobs.values():
        submitted = other.last(SUBMITTED)
        chain = [] if submitted is None else submitted.texts("chain")
        whole = chain if other.id in chain else [*chain, other.id]
        if job in whole:
            links += [link for link in whole[whole.index(job) + 1 :] if link not in links]
    return links


def registry(environment: Mapping[str, str] = os.environ) -> Path:
    """Return the path of the file that lists this user's run directories. The file may not exist yet.

    The ``environment`` variables XDG_STATE_HOME and HOME determine the path.
    """
    home = environment.get("XDG_STATE_HOME") or os.path.join(environment.get("HOME") or "~", ".local", "state")
    return Path(home).expanduser() / "hpcdist" / REGISTRY


def register_run(run_dir: Path, environment: Mapping[str, str] = os.environ) -> None:
    """Add ``run_dir`` to this user's list of run directories. Prints a warning if the list cannot be written.

    ``environment``: environment variables that locate the list, see `registry`.
    """
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
    """Return the existing directories in this user's list of runs, newest last. Raises StorageError.

    ``environment``: environment variables that locate the list of runs, see `registry`.
    """
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


# After these exit codes another start would end alike, or is unwanted, whatever happened to the nodes. CONFIGURATION is
# not included: if a node crashes during MPI startup, a rank may see a world of 1 and refuse its configuration.
_FINAL_CODES: Final = (OK, USAGE, MISSING_CAPABILITY, INTERRUPTED)


class NewestCheckpoint(NamedTuple):
    """Newest checkpoint of a run: its name and its write time in ns, or "" and 0 if there is no checkpoint."""

    name: str = ""
    ns: int = 0

    @property
    def step(self) -> int:
        """Number of training steps before the checkpoint, or 0 if the checkpoint's name is not "step-N"."""
        number = self.name.removeprefix("step-")
        return int(number) if number.isdecimal() else 0


class RequeueVerdict(NamedTuple):
    """Decision about requeueing a job. ``word``: "again" or "stop". ``lost``: names of nodes that do not answer."""

    word: str
    reason: str
    lost: tuple[str, ...] = ()


def decide(
    entries: list[JournalEntry],
    job: str,
    restart: int,
    code: int,
    saved: NewestCheckpoint,
    *,
    preempted: bool,
    lost_nodes: Callable[[], Sequence[str]],
) -> RequeueVerdict:
    """Return a `RequeueVerdict` for the job with the id ``job``, which ended with exit code ``code``. Local.

    ``entries``: journal of the run. ``restart``: number of earlier requeues of the job. ``saved``: newest
    checkpoint of the run.
    """
    ledger_job = jobs(entries).get(job)
    fruitless = _starts_in_vain(entries, job, saved)
    outcome = (
        f"saved {saved.name}"
        if saved.name and not fruitless
        else "this start made no new checkpoint in the run directory"
    )
    going_on = f"{outcome}; the job resumes from {'there' if not fruitless else saved.name or 'step 0'}"
    reason = _why_not_requeued(ledger_job, fruitless, saved, code)
    if not reason:
        return RequeueVerdict(AGAIN, going_on)
    if code in _FINAL_CODES or (ledger_job is not None and ledger_job.is_cancelled):
        return RequeueVerdict(STOP, reason)
    # Three reasons to continue anyway: preemption, a crashed node, an earlier start killed by a crash.
    lost: tuple[str, ...] = ()
    if preempted:
        cause = "Slurm preempts this job"
    elif lost := tuple(lost_nodes()):
        cause = f"{', '.join(lost)} of this job crashed or cannot be reached"
    elif crash := _crash_before(ledger_job, restart):
        cause = f"the previous start {crash}: starting once more"
    else:
        return RequeueVerdict(STOP, reason)
    return RequeueVerdict(AGAIN, f"{cause} (exit code {code} of the training); {going_on}", lost)


def fruitless_starts(entries: Iterable[JournalEntry], saved: NewestCheckpoint, digest: str) -> list[JournalEntry]:
    """Return the `began` entries of the latest consecutive job starts that made no checkpoint newer than ``saved``.

    ``entries``: journal of the run. ``digest``: hash of the recipe, or the command line. Starts before a start with
    another digest are ignored.
    """
    # Starts of cancelled jobs do not count.
    starts: list[JournalEntry] = []
    entries = list(entries)
    cancelled = {entry.job for entry in entries if entry.event == CANCELLED}
    for entry in entries:
        if entry.event != BEGAN or entry.job in cancelled:
            continue
        # A start from an older checkpoint, or with another recipe, resets the list: there was progress since.
        same = (entry.text("from"), entry.number("saved_ns"), entry.text("recipe")) == (*saved, digest)
        starts = [*starts, entry] if same else []
    return starts


def node_count(environment: Mapping[str, str] = os.environ) -> int | None:
    """Return the current job's number of nodes, from the variables in ``environment``, or None if unknown. Local."""
    for name in ("SLURM_JOB_NUM_NODES", "SLURM_NNODES"):
        if environment.get(name, "").isdecimal():
            return int(environment[name])
    if environment.get("PBS_NODEFILE"):
        try:
            return len(set(Path(environment["PBS_NODEFILE"]).read_text().split())) or None
        except OSError:
            return None
    return 1 if environment.get("HPCDIST_JOB_ID") else None  # a local job


def _crash_before(ledger_job: LedgerJob | None, restart: int) -> str:
    entries = () if ledger_job is None else ledger_job.entries
    before = [entry for entry in entries if entry.number("restart") == restart - 1]
    ends = [entry for entry in before if entry.event == ENDED]
    if ends:
        nodes = ends[-1].texts("lost")
        return f"lost {', '.join(nodes)}" if nodes else ""
    # A start without an ``ended`` entry has crashed.
    return "was killed" if any(entry.event == BEGAN for entry in before) else ""


def _starts_in_vain(entries: list[JournalEntry], job: str, saved: NewestCheckpoint) -> int:
    ledger_job = jobs(entries).get(job)
    began = None if ledger_job is None else ledger_job.last(BEGAN)
    if began is None:
        return 0 if saved.name else FRUITLESS  # no ledger entry: any checkpoint counts as progress
    vain = fruitless_starts(entries, saved, began.text("recipe"))
    # Earlier starts count if they stopped in time with exit code 75: they had a chance to save.
    stopped = {
        (entry.job, entry.number("restart"))
        for entry in entries
        if entry.event == ENDED and entry.number("code") == REQUEUE
    }
    # The last entry is the current start, whose end is not yet recorded.
    return sum((entry.job, entry.number("restart")) in stopped for entry in vain[:-1]) + len(vain[-1:])


def _why_not_requeued(ledger_job: LedgerJob | None, vain: int, saved: NewestCheckpoint, code: int) -> str:
    if code == OK:
        return "the job is complete"
    if code != REQUEUE:
        return f"the job ended with exit code {code}, and only exit code {REQUEUE} starts a job again"
    if ledger_job is not None and ledger_job.is_cancelled:
        return f"saved {saved.name or 'nothing'}; not started again: the job was cancelled"
    if vain >= FRUITLESS:
        return f"not started again: {vain} consecutive starts made no new checkpoint ({saved.name or 'none exists'})"
    return ""
