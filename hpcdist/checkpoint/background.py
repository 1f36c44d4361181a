"""Saving beside the steps: a snapshot at a step boundary, written by a thread that sends no message.

    begin     the pieces are copied into spare memory of their writers; the state may change from here on
    writing   each writer's thread writes its shard; every step, the ranks sum how many of them are not done
    telling   at the boundary where none is left, rank 0 is told the entries
    commit    rank 0's thread writes index and manifest and renames the directory; its end is found as above

So no step waits for a disk, and the manifest is written when all have agreed that the shards are on theirs. At most
one checkpoint is under way: the next one, the end of a run and a wish to stop wait for it. What fails on one rank is
raised on all, at the boundary behind the step in which it is known. Costs: the memory of a second state (with
``local_directory``, its bytes on a disk of the node), and a copy of it a save.
"""

import threading
from collections.abc import Callable, Sequence
from enum import Enum
from pathlib import Path
from typing import TypeVar

import numpy as np

from hpcdist.arrays.ledger import Ledger
from hpcdist.arrays.piece import Piece
from hpcdist.checkpoint import save
from hpcdist.checkpoint.kept import Kept
from hpcdist.checkpoint.local import LocalFile
from hpcdist.checkpoint.save import Outcome, Plan, agree
from hpcdist.checkpoint.spare import Spare
from hpcdist.checkpoint.writers import Delivery, group_of
from hpcdist.comm.communicator import Communicator

Result = TypeVar("Result")


class Phase(Enum):
    """What is under way; the same on all ranks."""

    IDLE = 0
    WRITING = 1
    COMMIT = 2


class Task(threading.Thread):
    """``work`` in a thread of its own, which returns what became of it and never raises."""

    def __init__(self, work: Callable[[], Outcome]) -> None:
        super().__init__(name="hpcdist checkpoint", daemon=True)
        self._work = work
        self.outcome = Outcome()
        self.start()

    def run(self) -> None:
        """Work; called by the thread."""
        try:
            self.outcome = self._work()
        except BaseException as error:  # noqa: BLE001 - a thread must not die without a word: all ranks are told
            self.outcome = Outcome(f"{type(error).__name__}: {error}")


class Background:
    """The checkpoints of ``comm`` that are written beside the steps. Every method is collective, unless it says not."""

    def __init__(
        self,
        comm: Communicator,
        ledger: Ledger | None = None,
        *,
        local_directory: Path | None = None,
        kept: Kept | None = None,
    ) -> None:
        self._comm, self._kept = comm, kept
        self._spare = Spare(ledger) if local_directory is None else LocalFile(local_directory)
        self._phase = Phase.IDLE
        self._task: Task | None = None
        self._own = Outcome()
        self._plan: Plan | None = None

    @property
    def is_busy(self) -> bool:
        """Whether a checkpoint is under way; the same on all ranks (local)."""
        return self._phase is not Phase.IDLE

    def numbers(self) -> np.ndarray:
        """Return what `settle` wants the sums of: is this rank still at work, and has it failed (local)."""
        if self._task is not None and self._task.is_alive():
            return np.array([1.0, 0.0])
        own = self._own if self._task is None else self._task.outcome
        return np.array([0.0, float(self.is_busy and bool(own.error))])

    def begin(self, plan: Plan, pieces: Sequence[Piece], writers: str) -> None:
        """Begin the checkpoint ``plan``; the pieces may change when this returns. Raises StorageError on all ranks.

        One that is under way is waited for.
        """
        self.finish()
        group = group_of(self._comm, writers)
        save.prepare(plan, group, self._comm)
        delivery = Delivery(group, pieces)
        self._plan, self._own, self._phase = plan, Outcome(), Phase.WRITING
        if not group.writes:
            self._own = Outcome(delivery.bring())
            return
        try:
            slots, sources = delivery.slots, self._spare.fill(delivery)
        except (OSError, MemoryError) as error:
            self._own = Outcome(f"no snapshot: {error or type(error).__name__}")
            delivery.end()
            return
        self._task = Task(lambda: save.write(plan, group, slots, sources, self._kept))

    def goes_on(self, sums: np.ndarray) -> bool:
        """Whether nobody is at work any more, or somebody has failed, by the sums of `numbers` (local)."""
        working, failed = sums.tolist()
        return self.is_busy and bool(failed or not working)

    def settle(self, sums: np.ndarray) -> Path | None:
        """Go on where all ranks have come so far: ``sums`` are those of `numbers`, taken at the same step.

        Returns the checkpoint when it has become visible. Raises StorageError on all ranks when one has failed.
        """
        return self._go_on() if self.goes_on(sums) else None

    def finish(self) -> Path | None:
        """Wait for the checkpoint that is under way, and return it. Raises StorageError on all ranks."""
        path = None
        while self.is_busy:
            path = self._go_on()
        return path

    def abandon(self) -> None:
        """Give up what is under way, after a death: wait for this rank's thread alone, whatever became of it (local).

        A checkpoint that rank 0 had begun to commit becomes visible if all of it was written.
        """
        self._joined()
        self._phase = Phase.IDLE

    def _go_on(self) -> Path | None:
        plan, phase = self._plan, self._phase
        assert plan is not None
        own = self._joined()
        self._phase = Phase.IDLE  # should anything be raised
        if phase is Phase.COMMIT:
            agree(self._comm, own.error if self._comm.rank == 0 else "")
            if self._kept is not None:
                self._kept.settle()
            return plan.final
        outcomes = save.gather(self._comm, own)
        if any(outcome.error for outcome in outcomes):
            agree(self._comm, save.commit(plan, outcomes) if self._comm.rank == 0 else "")
        self._phase, self._own = Phase.COMMIT, Outcome()
        if self._comm.rank == 0:
            self._task = Task(lambda: Outcome(save.commit(plan, outcomes)))
        return None

    def _joined(self) -> Outcome:
        """Return what became of this rank's part, once it is done (local)."""
        if self._task is None:
            return self._own
        self._task.join()
        outcome, self._task = self._task.outcome, None
        return outcome
