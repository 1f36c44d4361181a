"""Decide whether a job is requeued after a start, and limit consecutive starts without a new checkpoint.

The limit applies to starts by the job script and by Slurm, which requeues a job after a node failure. Restarts by
`hpcdist run --restarts` have another limit.
"""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from hpcdist.batch import ledger
from hpcdist.comm.launch.restarts import FRUITLESS
from hpcdist.comm.record.run_journal import JournalEntry
from hpcdist.errors import INTERRUPTED, MISSING_CAPABILITY, OK, REQUEUE, USAGE

STOP_FILE: Final = "stop"
# After these exit codes another start would end alike, or is unwanted, whatever happened to the nodes. CONFIGURATION is
# not included: if a node crashes during MPI startup, a rank may see a world of 1 and refuse its configuration.
_FINAL_CODES: Final = (OK, USAGE, MISSING_CAPABILITY, INTERRUPTED)


class NewestCheckpoint(NamedTuple):
    """Newest checkpoint of a run: its name and its write time in ns, or "" and 0 if there is no checkpoint."""

    name: str = ""
    ns: int = 0

    @property
    def step(self) -> int:
        """Training step of the checkpoint."""
        return int(self.name.removeprefix("step-") or 0)


class RequeueVerdict(NamedTuple):
    """Decision to requeue a job or not: ``word`` is "again" or "stop". ``lost`` lists the nodes that do not answer."""

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
    """Decide whether to requeue ``job`` (a job id), which ended with exit code ``code``. Local.

    ``entries``: event log of the run. ``restart``: number of requeues of the job so far. ``saved``: newest checkpoint.
    Keyword-only ``lost_nodes``: function that returns the unreachable nodes.
    """
    ledger_job = ledger.jobs(entries).get(job)
    fruitless = _starts_in_vain(entries, job, saved)
    outcome = (
        f"saved {saved.name}"
        if saved.name and not fruitless
        else "this start made no new checkpoint in the run directory"
    )
    going_on = f"{outcome}; the job resumes from {'there' if not fruitless else saved.name or 'step 0'}"
    reason = _why_not_requeued(ledger_job, fruitless, saved, code)
    if not reason:
        return RequeueVerdict(ledger.AGAIN, going_on)
    if code in _FINAL_CODES or (ledger_job is not None and ledger_job.is_cancelled):
        return RequeueVerdict(ledger.STOP, reason)
    # Three reasons to continue anyway: preemption, a crashed node, an earlier start killed by a crash.
    lost: tuple[str, ...] = ()
    if preempted:
        cause = "Slurm preempts this job"
    elif lost := tuple(lost_nodes()):
        cause = f"{', '.join(lost)} of this job crashed or cannot be reached"
    elif crash := _crash_before(ledger_job, restart):
        cause = f"the previous start {crash}: starting once more"
    else:
        return RequeueVerdict(ledger.STOP, reason)
    return RequeueVerdict(ledger.AGAIN, f"{cause} (exit code {code} of the training); {going_on}", lost)


def fruitless_starts(entries: Iterable[JournalEntry], saved: NewestCheckpoint, digest: str) -> list[JournalEntry]:
    """Return the log entries of the latest consecutive job starts that made no new checkpoint.

    Such starts all resumed from ``saved``, the newest checkpoint. ``entries``: event log of the run. ``digest``: hash
    of the run's configuration.
    """
    # A start with another recipe ends the list. Starts of cancelled jobs do not count.
    starts: list[JournalEntry] = []
    entries = list(entries)
    cancelled = {entry.job for entry in entries if entry.event == ledger.CANCELLED}
    for entry in entries:
        if entry.event != ledger.BEGAN or entry.job in cancelled:
            continue
        # A start from an older checkpoint, or with another recipe, resets the row: there was progress since.
        same = (entry.text("from"), entry.number("saved_ns"), entry.text("recipe")) == (*saved, digest)
        starts = [*starts, entry] if same else []
    return starts


def node_count(environment: Mapping[str, str] = os.environ) -> int | None:
    """Return the number of nodes of the current job, or None if unknown, from environment variables. Local."""
    for name in ("SLURM_JOB_NUM_NODES", "SLURM_NNODES"):
        if environment.get(name, "").isdecimal():
            return int(environment[name])
    if environment.get("PBS_NODEFILE"):
        try:
            return len(set(Path(environment["PBS_NODEFILE"]).read_text().split())) or None
        except OSError:
            return None
    return 1 if environment.get("HPCDIST_JOB_ID") else None  # a local job


def _crash_before(ledger_job: ledger.LedgerJob | None, restart: int) -> str:
    entries = () if ledger_job is None else ledger_job.entries
    before = [entry for entry in entries if entry.number("restart") == restart - 1]
    ends = [entry for entry in before if entry.event == ledger.ENDED]
    if ends:
        nodes = ends[-1].texts("lost")
        return f"lost {', '.join(nodes)}" if nodes else ""
    # A start without an ``ended`` entry has crashed.
    return "was killed" if any(entry.event == ledger.BEGAN for entry in before) else ""


def _starts_in_vain(entries: list[JournalEntry], job: str, saved: NewestCheckpoint) -> int:
    ledger_job = ledger.jobs(entries).get(job)
    began = None if ledger_job is None else ledger_job.last(ledger.BEGAN)
    if began is None:
        return 0 if saved.name else FRUITLESS  # no ledger entry: any checkpoint counts as progress
    vain = fruitless_starts(entries, saved, began.text("recipe"))
    # Earlier starts count if they stopped in time with exit code 75: they had a chance to save.
    stopped = {
        (entry.job, entry.number("restart"))
        for entry in entries
        if entry.event == ledger.ENDED and entry.number("code") == REQUEUE
    }
    # The last entry is the current start, whose end is not yet recorded.
    return sum((entry.job, entry.number("restart")) in stopped for entry in vain[:-1]) + len(vain[-1:])


def _why_not_requeued(ledger_job: ledger.LedgerJob | None, vain: int, saved: NewestCheckpoint, code: int) -> str:
    if code == OK:
        return "the job is complete"
    if code != REQUEUE:
        return f"the job ended with exit code {code}, and only exit code {REQUEUE} starts a job again"
    if ledger_job is not None and ledger_job.is_cancelled:
        return f"saved {saved.name or 'nothing'}; not started again: the job was cancelled"
    if vain >= FRUITLESS:
        return f"not started again: {vain} consecutive starts made no new checkpoint ({saved.name or 'none exists'})"
    return ""
