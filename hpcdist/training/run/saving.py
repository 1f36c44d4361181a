"""Save checkpoints of a run, blocking or in the background, in a directory striped over a file system's servers."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from hpcdist.checkpoint import stripe
from hpcdist.checkpoint.background import BackgroundCheckpoints
from hpcdist.checkpoint.config import CheckpointConfig
from hpcdist.checkpoint.two_phase import IncrementalWriter, SavePlan, save_planned
from hpcdist.comm.communicator import Communicator
from hpcdist.training.build import state
from hpcdist.training.build.trainer import Trainer


class CheckpointSaver:
    """Blocking saver of checkpoints of ``trainer`` in ``directory``. Methods are collective unless marked "Local"."""

    waits = True  # True if a checkpoint is complete when `save` returns

    def __init__(self, trainer: Trainer, directory: Path) -> None:
        self.trainer, self.directory = trainer, directory
        self._kept = IncrementalWriter() if trainer.recipe.checkpoint.incremental else None

    @property
    def is_busy(self) -> bool:
        """True if a checkpoint is still being written. All ranks get the same result."""
        return False

    def save(self, step: int, **more: Any) -> Path:
        """Save the state after ``step`` steps, and ``**more`` (further scalars). Return the checkpoint's path."""
        trainer = self.trainer
        trainer.flush()
        writers = trainer.recipe.checkpoint.writers
        return save_planned(self.plan(step, more), trainer.exchange.pieces(), trainer.comm, writers, self._kept)

    def plan(self, step: int, more: Mapping[str, Any]) -> SavePlan:
        """Return a `SavePlan` for a checkpoint after ``step`` steps. ``more``: further scalars to save. Local."""
        plan = state.save_plan(self.trainer, self.directory, step, more)
        faults = self.trainer.faults
        return plan if faults is None else replace(plan, opens=faults.opens(step))

    def numbers(self) -> np.ndarray:
        """Return an array of two flags: 1 if this rank is still writing, 1 if its last write failed; else 0. Local.

        The array is empty if checkpoints are not written in the background.
        """
        return np.zeros(0)

    def goes_on(self, sums: np.ndarray) -> bool:
        """Return True if `settle` must be called: all ranks have written, or a rank has failed. Local.

        ``sums``: result of `numbers`, summed over all ranks.
        """
        return False

    def settle(self, sums: np.ndarray) -> Path | None:
        """Commit the checkpoint in flight if possible. Return its path when it is complete, else None.

        ``sums``: result of `numbers`, summed over all ranks. Raises StorageError on all ranks if a rank failed to
        write.
        """
        return None

    def finish(self) -> Path | None:
        """Wait for the checkpoint in flight. Return its path or None. On failure, all ranks raise StorageError."""
        return None

    def abandon(self) -> None:
        """Give up the checkpoint in flight after a failure: it never becomes visible. Local."""


class BackgroundCheckpointSaver(BackgroundCheckpoints, CheckpointSaver):
    """Saver that copies the state to a snapshot. Threads write the snapshot to disk during the next steps."""

    waits = False

    def __init__(self, trainer: Trainer, directory: Path) -> None:
        CheckpointSaver.__init__(self, trainer, directory)
        disk = trainer.recipe.checkpoint.local_directory
        local, kept = Path(disk) if disk else None, self._kept
        BackgroundCheckpoints.__init__(self, trainer.comm, trainer.ledger, local_directory=local, incremental=kept)

    def save(self, step: int, **more: Any) -> Path:
        trainer = self.trainer
        trainer.flush()
        plan = self.plan(step, more)
        self.begin(plan, trainer.exchange.pieces(), trainer.recipe.checkpoint.writers)
        return plan.final


def build_saver(trainer: Trainer, directory: Path) -> CheckpointSaver:
    """Return the checkpoint saver (blocking or background) that the recipe of ``trainer`` selects. Local."""
    kind = BackgroundCheckpointSaver if trainer.recipe.checkpoint.asynchronous else CheckpointSaver
    return kind(trainer, directory)


def stripe_checkpoints(
    comm: Communicator, directory: Path, config: CheckpointConfig, state_bytes: int, say: Callable[[str], None]
) -> None:
    """Set the file-system striping (as of Lustre) of the checkpoint ``directory``. Collective over ``comm``.

    ``state_bytes``: size of this rank's part of a checkpoint. ``say``: function that prints the result on rank 0.
    """
    # The directory is created if missing. A failure does not end the run.
    stripes = config.stripe != "none" and comm.rank == 0 and stripe.file_system(directory).striped
    if not comm.broadcast_object(stripes):
        return
    total = sum(comm.allgather_object(state_bytes))
    writers = int(config.writers) if config.writers.isdecimal() else comm.size
    if config.writers == "node":
        writers = comm.nodes().count
    if comm.rank > 0:
        return
    plan = stripe.plan(directory, total, min(writers, comm.size), config.stripe)
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError:
        return  # the save will raise the error
    failure = stripe.apply(plan)
    say(f"stripes of the checkpoints: {plan.text} ({plan.why})")
    if failure:
        say(f"warning: {failure}; checkpoints use the default stripes of the file system")
