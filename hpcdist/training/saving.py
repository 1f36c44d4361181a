"""How a run saves: all ranks wait for the disk, or go on while threads write."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from hpcdist.checkpoint.saving.background import BackgroundCheckpoints
from hpcdist.checkpoint.saving.incremental import IncrementalWriter
from hpcdist.checkpoint.saving.two_phase import SavePlan, save_planned
from hpcdist.hdf5.overlay import Overlay
from hpcdist.training import state
from hpcdist.training.trainer import Trainer


class Saver:
    """Saves the state of ``trainer`` in ``directory``, and waits for it. Collective, unless a method says not."""

    waits = True  # whether a checkpoint is complete when `save` returns
    is_busy = False  # whether one is under way; the same on all ranks

    def __init__(self, trainer: Trainer, directory: Path) -> None:
        self.trainer, self.directory = trainer, directory
        self.opens: Callable[[int], Callable[[Path], Overlay]] | None = None  # makes the files of a step, if need be
        self._kept = IncrementalWriter() if trainer.recipe.checkpoint.incremental else None

    def save(self, step: int, **kept: Any) -> Path:
        """Save the state after ``step`` steps, and what else is ``kept``; return where it lies, or will lie."""
        trainer = self.trainer
        trainer.flush()
        plan = self.plan(step, kept)
        return save_planned(
            plan, trainer.exchange.pieces(), trainer.comm, trainer.recipe.checkpoint.writers, self._kept
        )

    def plan(self, step: int, kept: Mapping[str, Any]) -> SavePlan:
        """Return the checkpoint after ``step`` steps (local)."""
        plan = state.plan(self.trainer, self.directory, step, kept)
        return plan if self.opens is None else replace(plan, opens=self.opens(step))

    def numbers(self) -> np.ndarray:
        """Return what the ranks sum in every step for `settle` (local)."""
        return np.zeros(0)

    def goes_on(self, sums: np.ndarray) -> bool:
        """Whether `settle` would have something to do; the same on all ranks (local)."""
        return False

    def settle(self, sums: np.ndarray) -> None:
        """Go on with the checkpoint that is under way, by the ``sums`` of `numbers` over all ranks."""

    def finish(self) -> None:
        """Wait for the checkpoint that is under way. Raises StorageError on all ranks."""

    def abandon(self) -> None:
        """Give up the checkpoint that is under way, after a death: it never becomes visible (local)."""


class BackgroundSaver(Saver):
    """Takes a snapshot, which is written beside the steps that follow."""

    waits = False

    def __init__(self, trainer: Trainer, directory: Path) -> None:
        super().__init__(trainer, directory)
        local = trainer.recipe.checkpoint.local_directory
        self._background = BackgroundCheckpoints(
            trainer.comm, trainer.ledger, local_directory=Path(local) if local else None, kept=self._kept
        )

    @property
    def is_busy(self) -> bool:  # type: ignore[override]
        """Whether a checkpoint is under way."""
        return self._background.is_busy

    def save(self, step: int, **kept: Any) -> Path:
        """Begin to save the state after ``step`` steps, once the checkpoint before is complete."""
        trainer = self.trainer
        trainer.flush()
        plan = self.plan(step, kept)
        self._background.begin(plan, trainer.exchange.pieces(), trainer.recipe.checkpoint.writers)
        return plan.final

    def numbers(self) -> np.ndarray:
        """Return whether this rank is still at work, and whether it has failed."""
        return self._background.numbers()

    def goes_on(self, sums: np.ndarray) -> bool:
        """Whether nobody is at work any more, or somebody has failed."""
        return self._background.goes_on(sums)

    def settle(self, sums: np.ndarray) -> None:
        """Let the checkpoint become visible when all have written."""
        self._background.settle(sums)

    def finish(self) -> None:
        """Wait for it."""
        self._background.finish()

    def abandon(self) -> None:
        """Wait for this rank's thread, and no other."""
        self._background.abandon()


def saver_of(trainer: Trainer, directory: Path) -> Saver:
    """Return how the recipe of ``trainer`` wants it (local)."""
    kind = BackgroundSaver if trainer.recipe.checkpoint.asynchronous else Saver
    return kind(trainer, directory)
