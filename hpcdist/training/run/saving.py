"""Save checkpoints of a run: blocking or in the background, in a directory striped over a file system's servers."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from hpcdist.checkpoint import stripe
from hpcdist.checkpoint.config import CheckpointConfig
from hpcdist.checkpoint.saving.background import BackgroundCheckpoints
from hpcdist.checkpoint.saving.two_phase import IncrementalWriter, SavePlan, save_planned
from hpcdist.comm.communicator import Communicator
from hpcdist.training.build import state
from hpcdist.training.build.trainer import Trainer


class CheckpointSaver:
    """Saver of the state of ``trainer`` in ``directory``, which waits for the disk.

    Collective, unless a method says not. Injected faults of the trainer happen to the files of this rank.
    """

    waits = True  # whether a checkpoint is complete when `save` returns

    def __init__(self, trainer: Trainer, directory: Path) -> None:
        self.trainer, self.directory = trainer, directory
        self._kept = IncrementalWriter() if trainer.recipe.checkpoint.incremental else None

    @property
    def is_busy(self) -> bool:
        """Whether a checkpoint is under way; the same on all ranks."""
        return False

    def save(self, step: int, **more: Any) -> Path:
        """Save the state after ``step`` steps with ``more`` scalars; return its path, where it is or will be."""
        trainer = self.trainer
        trainer.flush()
        of_run = trainer.exchange.pieces(), trainer.comm, trainer.recipe.checkpoint.writers
        return save_planned(self.plan(step, more), *of_run, self._kept)

    def plan(self, step: int, more: Mapping[str, Any]) -> SavePlan:
        """Return the checkpoint after ``step`` steps (local)."""
        plan = state.save_plan(self.trainer, self.directory, step, more)
        faults = self.trainer.faults
        return plan if faults is None else replace(plan, opens=faults.opens(step))

    def numbers(self) -> np.ndarray:
        """Return the numbers that the ranks sum in every step for `settle` (local)."""
        return np.zeros(0)

    def goes_on(self, sums: np.ndarray) -> bool:
        """Whether `settle` would have something to do; the same on all ranks (local)."""
        return False

    def settle(self, sums: np.ndarray) -> Path | None:
        """Go on with the checkpoint that is under way, by the ``sums`` of `numbers` over all ranks."""
        return None

    def finish(self) -> Path | None:
        """Wait for the checkpoint that is under way, and return it. Raises StorageError on all ranks."""
        return None

    def abandon(self) -> None:
        """Give up the checkpoint that is under way, after a failure: it never becomes visible (local)."""


class BackgroundCheckpointSaver(BackgroundCheckpoints, CheckpointSaver):
    """Saver that takes a snapshot, which threads write beside the steps that follow."""

    waits = False

    def __init__(self, trainer: Trainer, directory: Path) -> None:
        CheckpointSaver.__init__(self, trainer, directory)
        disk = trainer.recipe.checkpoint.local_directory
        local, kept = Path(disk) if disk else None, self._kept
        BackgroundCheckpoints.__init__(self, trainer.comm, trainer.ledger, local_directory=local, incremental=kept)

    def save(self, step: int, **more: Any) -> Path:
        """Begin to save the state after ``step`` steps, once the checkpoint before is complete."""
        trainer = self.trainer
        trainer.flush()
        plan = self.plan(step, more)
        self.begin(plan, trainer.exchange.pieces(), trainer.recipe.checkpoint.writers)
        return plan.final


def build_saver(trainer: Trainer, directory: Path) -> CheckpointSaver:
    """Return how the recipe of ``trainer`` wants it (local)."""
    kind = BackgroundCheckpointSaver if trainer.recipe.checkpoint.asynchronous else CheckpointSaver
    return kind(trainer, directory)


def stripe_checkpoints(
    comm: Communicator, directory: Path, config: CheckpointConfig, state_bytes: int, say: Callable[[str], None]
) -> None:
    """Stripe ``directory``, made when missing, for ``state_bytes`` of each rank. Collective over ``comm``.

    Rank 0 does, and reports the command by ``say``. A failure is reported, too, and the run goes on: files then have
    the default stripes of the file system.
    """
    wanted = config.stripe != "none" and comm.rank == 0 and stripe.file_system(directory).striped
    if not comm.broadcast_object(wanted):
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
        say(f"warning: {failure}; checkpoints have the stripes that the file system gives them")
