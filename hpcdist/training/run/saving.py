"""Checkpoints of a run: when to save, blocking or in the background, in a directory striped over servers."""

import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from hpcdist.checkpoint import stripe
from hpcdist.checkpoint.background import BackgroundCheckpoints
from hpcdist.checkpoint.config import OBSERVED, CheckpointConfig
from hpcdist.checkpoint.convert.huggingface_export import CheckpointExport, ExportPlan
from hpcdist.checkpoint.restoring.restore import on_first_rank
from hpcdist.checkpoint.two_phase import IncrementalWriter, SavePlan, save_planned
from hpcdist.comm.communicator import Communicator
from hpcdist.comm.record.run_journal import StartRecord
from hpcdist.constants import FINISHED, STOPPED
from hpcdist.strategies.core.daly_interval import daly
from hpcdist.training.build import state
from hpcdist.training.build.trainer import Trainer
from hpcdist.training.run_directory import plan_export

ASSUMED_SAVE_S: Final = 1.0
ASSUMED_BYTES_PER_S: Final = 100e6
LEAVING_S: Final = 2.0  # time after the last save: metrics, a barrier, MPI finalize
TIMINGS_KEPT: Final = 1000  # number of recent steps, and of saves


class CheckpointSaver:
    """Blocking saver of checkpoints of ``trainer`` in ``directory``. Methods are collective unless marked "Local"."""

    waits = True  # True if a checkpoint is complete when `save` returns

    def __init__(self, trainer: Trainer, directory: Path) -> None:
        self.trainer, self.directory = trainer, directory
        self._kept = IncrementalWriter() if trainer.recipe.checkpoint.incremental else None
        self._export = self._planned_export()

    def _planned_export(self) -> ExportPlan | None:
        recipe, first_step = self.trainer.recipe, self.trainer.first_step
        if not recipe.checkpoint.export_to:
            return None

        def planned() -> ExportPlan:
            # A resumed run may replace the directory of its last start.
            # Adapters are not merged: no rank has all parts of a weight and of its adapters.
            of = self.directory.parent, recipe, Path(recipe.checkpoint.export_to)
            plan = plan_export(*of, replace=first_step > 0, only_adapters=recipe.lora.rank > 0)
            plan.check()
            return plan

        return replace(on_first_rank(self.trainer.comm, planned), replace=True)

    @property
    def is_busy(self) -> bool:
        """True if a checkpoint is still being written. All ranks get the same result."""
        return False

    def save(self, step: int, **more: Any) -> Path:
        """Save the state after ``step`` steps. Return the checkpoint's path. ``**more``: additional scalars to save."""
        trainer = self.trainer
        trainer.flush()
        writers = trainer.recipe.checkpoint.writers
        return save_planned(self.plan(step, more), trainer.pieces(), trainer.comm, writers, self._kept)

    def plan(self, step: int, more: Mapping[str, Any]) -> SavePlan:
        """Return a `SavePlan` of the tensors and scalars of a checkpoint after ``step`` steps. Local.

        ``more``: additional scalars for the checkpoint.
        """
        plan = state.save_plan(self.trainer, self.directory, step, more)
        faults, config = self.trainer.faults, self.trainer.recipe.checkpoint
        every, is_last = config.export_every_steps, step == self.trainer.recipe.run.steps
        if self._export is not None and (is_last or (every and step % every == 0)):
            plan = replace(plan, export=CheckpointExport(self._export))
        return plan if faults is None else replace(plan, opens=faults.opens(step))

    def numbers(self) -> np.ndarray:
        """Return an array of two flags about background writes. A blocking saver returns an empty array. Local.

        The first flag is 1 if this rank is still writing. The second flag is 1 if this rank's last write failed.
        """
        return np.zeros(0)  # this saver does not write in the background

    def goes_on(self, sums: np.ndarray) -> bool:
        """Return True if `settle` must be called, because all ranks have written or a rank has failed. Local.

        ``sums``: result of `numbers`, summed over all ranks.
        """
        return False  # otherwise: all ranks have written, or a rank has failed

    def settle(self, sums: np.ndarray) -> Path | None:
        """Commit the checkpoint in flight if all ranks have written it. Return the checkpoint's path, else None.

        ``sums``: result of `numbers`, summed over all ranks. All ranks raise StorageError if a write failed.
        """
        return None

    def finish(self) -> Path | None:
        """Complete the checkpoint in flight, and return its path. Return None without a checkpoint in flight.

        All ranks raise StorageError if a write failed.
        """
        return None

    def abandon(self) -> None:
        """Stop writing the checkpoint in flight after a failure. The checkpoint never becomes visible. Local."""


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
        self.begin(plan, trainer.pieces(), trainer.recipe.checkpoint.writers)
        return plan.final


def build_saver(trainer: Trainer, directory: Path) -> CheckpointSaver:
    """Return the saver, blocking or background, that the recipe of ``trainer`` selects. Collective.

    ``directory``: directory for all checkpoints of the run.
    """
    kind = BackgroundCheckpointSaver if trainer.recipe.checkpoint.asynchronous else CheckpointSaver
    return kind(trainer, directory)


def stripe_checkpoints(
    comm: Communicator, directory: Path, config: CheckpointConfig, state_bytes: int, say: Callable[[str], None]
) -> None:
    """Set the file-system striping (as of Lustre) of the checkpoint ``directory``. Collective over ``comm``.

    ``state_bytes``: number of bytes that this rank saves. ``say``: function that prints the result. The directory is
    created if it is missing. A failure does not end the run.
    """
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


class CheckpointTimer:
    """Timer that decides when to save checkpoints, and whether the job's time is up. Local; only one rank needs it."""

    # ``state_bytes``: size of this rank's state. ``ends``: end of the job, in seconds since 1970. ``say`` prints a
    # message. ``clock`` returns the time. ``starts``: writer of the journal, with the run's failures.
    def __init__(
        self,
        config: CheckpointConfig,
        state_bytes: int,
        ends: float = math.inf,
        say: Callable[[str], None] = lambda _: None,
        clock: Callable[[], float] = time.time,
        starts: StartRecord | None = None,
    ) -> None:
        self._starts = starts
        self._config, self._ends, self._say, self._clock = config, ends, say, clock
        self._up = False
        self._guess_s = ASSUMED_SAVE_S + state_bytes / ASSUMED_BYTES_PER_S
        self._steps: deque[float] = deque(maxlen=TIMINGS_KEPT)
        self._saves: deque[float] = deque(maxlen=TIMINGS_KEPT)
        self._complete: deque[float] = deque(maxlen=TIMINGS_KEPT)
        self._saved = clock()

    def stepped(self, seconds: float) -> None:
        """Record that a step took ``seconds``, and that the run is alive."""
        self._steps.append(seconds)
        if self._starts is not None:
            self._starts.alive()

    def ended(self, stopped: bool) -> None:
        """Record that the run ended without error. ``stopped``: True if a stop request ended it early."""
        if self._starts is not None:
            self._starts.ended(STOPPED if stopped else FINISHED)

    def saved(self, seconds: float) -> None:
        """Record that saving a checkpoint delayed the training by ``seconds``."""
        self._saves.append(seconds)
        self._saved = self._clock()
        if self._starts is not None:
            self._starts.alive(always=True)

    def completed(self, seconds: float) -> None:
        """Record that a checkpoint was complete on disk ``seconds`` after the start of the save."""
        self._complete.append(seconds)

    @property
    def cost_s(self) -> float:
        """Median number of seconds by which a save delays the training, or an estimate before the first save."""
        return quantile(self._saves, 0.5) if self._saves else self._guess_s

    @property
    def interval_s(self) -> float:
        """Seconds of training between two saves, by Daly's formula; infinite if `mtbf_s` is 0."""
        return daly(self.cost_s, self.mtbf_s) if self.mtbf_s else math.inf

    @property
    def mtbf_s(self) -> float:
        """Mean time between failures in seconds: set by the recipe, or from the journal of the run. 0 if unknown."""
        configured = self._config.mtbf_s
        if configured != OBSERVED:
            return float(configured)
        return 0.0 if self._starts is None else max(self._starts.mtbf_s, self.cost_s)

    def due(self) -> bool:
        """Return True if it is time to save a checkpoint at the end of the next step."""
        if math.isinf(self.interval_s):
            return False
        step_s = quantile(self._steps, 0.5) if self._steps else 0.0
        return self._clock() - self._saved + step_s / 2 >= self.interval_s  # at the nearest step boundary

    def time_up(self) -> bool:
        """Return True if too little time is left in the job for one more step and a save."""
        if self._up or math.isinf(self._ends):
            return self._up
        cost_s = quantile(self._complete, 0.95) if self._complete else self._guess_s
        step_s = quantile(self._steps, 0.99) if self._steps else 0.0
        left_s = self._ends - LEAVING_S - self._clock()
        if left_s < cost_s + step_s:
            self._up = True
            need = f"a step takes up to {step_s:.2f} s and a save {cost_s:.2f} s"
            self._say(f"the job ends in {left_s + LEAVING_S:.1f} s, so it stops now: {need}")
        return self._up


def quantile(values: Sequence[float], share: float) -> float:
    """Return the smallest v in ``values`` for which at least the fraction ``share`` of ``values`` is <= v."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, math.ceil(share * len(ordered)) - 1)]
