"""Decision whether a job is requeued after a start of it has ended, and the bound on starts without a new checkpoint.

A start may follow on another in three ways:

    hpcdist run --restarts    inside of the job, without asking here: a training that failed
    the script of the job     by `scontrol requeue`, or as the next link of a chain, where `hpcdist jobs end` has
                              printed "again": that is `decide`
    Slurm itself              when it declares a node of the job down: the script is dead, and has written no end

`decide` knows the exit code, new checkpoints and nodes that answer. `fruitless_starts` bounds the last two, however
the starts ended: `hpcdist jobs begin` refuses another one with exit code 78. The first counts its own
(`hpcdist.comm.launch.restarts`).
"""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from hpcdist.batch import ledger
from hpcdist.comm.launch.restarts import FRUITLESS
from hpcdist.errors import INTERRUPTED, MISSING_CAPABILITY, OK, REQUEUE, USAGE

STOP_FILE: Final = "stop"
# Whatever became of the nodes, another start would end in the same way, or is not wanted. A refused configuration is
# none of these: where a node crashes while MPI begins, a rank finds itself in a world of 1.
_FINAL_CODES: Final = (OK, USAGE, MISSING_CAPABILITY, INTERRUPTED)


class NewestCheckpoint(NamedTuple):
    """The newest checkpoint of a run, and when it was written; "" and 0 where there is none."""

    name: str = ""
    ns: int = 0

    @property
    def step(self) -> int:
        """Steps of the checkpoint."""
        return int(self.name.removeprefix("step-") or 0)


class RequeueVerdict(NamedTuple):
    """Decision after a start: its ``word`` (`ledger.AGAIN` or `ledger.STOP`), the reason, and nodes that were lost."""

    word: str
    reason: str
    lost: tuple[str, ...] = ()


def decide(
    entries: list[ledger.LedgerEntry],
    job: str,
    restart: int,
    code: int,
    saved: NewestCheckpoint,
    *,
    preempted: bool,
    lost_nodes: Callable[[], Sequence[str]],
) -> RequeueVerdict:
    """Return whether ``job`` is requeued after its start ``restart``, which ended with exit code ``code`` (local).

    ``entries`` are the ledger of the run, and ``saved`` its newest checkpoint. ``lost_nodes`` asks the nodes of the job
    to run a process, and returns those that do not: up to a minute, so it is called only where it decides.
    """
    own = ledger.jobs(entries).get(job)
    vain = _starts_in_vain(entries, job, saved)
    outcome = (
        f"saved {saved.name}" if saved.name and not vain else "this start made no new checkpoint in the run directory"
    )
    going_on = f"{outcome}; the job goes on from {'there' if not vain else saved.name or 'the beginning'}"
    reason = _why_not_requeued(own, vain, saved, code)
    if not reason:
        return RequeueVerdict(ledger.AGAIN, going_on)
    if code in _FINAL_CODES or (own is not None and own.is_cancelled):
        return RequeueVerdict(ledger.STOP, reason)
    # Three reasons to go on nevertheless: a preemption, a node that crashed, a start before that a crash killed.
    lost: tuple[str, ...] = ()
    if preempted:
        cause = "Slurm preempts this job"
    elif lost := tuple(lost_nodes()):
        cause = f"{', '.join(lost)} of this job crashed or cannot be reached"
    elif before := _crash_before(own, restart):
        cause = f"the start before {before}: once more"
    else:
        return RequeueVerdict(ledger.STOP, reason)
    return RequeueVerdict(ledger.AGAIN, f"{cause} (exit code {code} of the training); {going_on}", lost)


def fruitless_starts(
    entries: Iterable[ledger.LedgerEntry], saved: NewestCheckpoint, digest: str
) -> list[ledger.LedgerEntry]:
    """Return the last starts in a row that began with ``saved``, with which this one would begin too (local).

    However they ended: a start that was killed made no more progress than one that failed. Those of cancelled jobs do
    not count: whoever ended them early has said nothing of what they would have done.
    """
    starts: list[ledger.LedgerEntry] = []
    entries = list(entries)
    cancelled = {entry.job for entry in entries if entry.event == ledger.CANCELLED}
    for entry in entries:
        if entry.event != ledger.BEGAN or entry.job in cancelled:
            continue
        # A start that went on from an older checkpoint, or with another recipe, ends the row: progress was made since.
        same = (entry.text("from"), entry.number("saved_ns"), entry.text("recipe")) == (*saved, digest)
        starts = [*starts, entry] if same else []
    return starts


def node_count(environment: Mapping[str, str] = os.environ) -> int | None:
    """Return how many nodes the job has in which this process runs; None where its scheduler does not say (local)."""
    for name in ("SLURM_JOB_NUM_NODES", "SLURM_NNODES"):
        if environment.get(name, "").isdecimal():
            return int(environment[name])
    if environment.get("PBS_NODEFILE"):
        try:
            return len(set(Path(environment["PBS_NODEFILE"]).read_text().split())) or None
        except OSError:
            return None
    return 1 if environment.get("HPCDIST_JOB_ID") else None  # a job of this machine


def _crash_before(own: ledger.LedgerJob | None, restart: int) -> str:
    """Return which nodes crashed under the start of this job before ``restart``; "" where none did.

    A start that has no end in the ledger lost the first node of the job, and this script with it.
    """
    entries = () if own is None else own.entries
    before = [entry for entry in entries if entry.number("restart") == restart - 1]
    ends = [entry for entry in before if entry.event == ledger.ENDED]
    if ends:
        nodes = ends[-1].texts("lost")
        return f"lost {', '.join(nodes)}" if nodes else ""
    return "was killed" if any(entry.event == ledger.BEGAN for entry in before) else ""


def _starts_in_vain(entries: list[ledger.LedgerEntry], job: str, saved: NewestCheckpoint) -> int:
    """Return how many starts in a row, the last of ``job`` included, were stopped with nothing newer than ``saved``.

    Those that were killed do not count here: `begin` bounds all that were in vain.
    """
    own = ledger.jobs(entries).get(job)
    began = None if own is None else own.last(ledger.BEGAN)
    if began is None:
        return 0 if saved.name else FRUITLESS  # the ledger says nothing: what is there counts
    vain = fruitless_starts(entries, saved, began.text("recipe"))
    # Of earlier starts those count that were told to stop in time and left with 75: they had their chance to save.
    stopped = {
        (entry.job, entry.number("restart"))
        for entry in entries
        if entry.event == ledger.ENDED and entry.number("code") == REQUEUE
    }
    # The last entry is the start that ends now, whose end is not written yet.
    return sum((entry.job, entry.number("restart")) in stopped for entry in vain[:-1]) + len(vain[-1:])


def _why_not_requeued(own: ledger.LedgerJob | None, vain: int, saved: NewestCheckpoint, code: int) -> str:
    """Return why the job does not go on by itself; "" where it does."""
    if code == OK:
        return "the job is complete"
    if code != REQUEUE:
        return f"the job ended with exit code {code}, and only exit code {REQUEUE} starts a job again"
    if own is not None and own.is_cancelled:
        return f"saved {saved.name or 'nothing'}; not started again: somebody has cancelled the job"
    if vain >= FRUITLESS:
        return f"not started again: {vain} starts in a row made no new checkpoint ({saved.name or 'there is none'})"
    return ""
