"""What a loop writes down of some of its steps, beside the rows of all: scales of the loss, second looks, shares."""

from hpcdist.strategies.schedule.executor import StepResult
from hpcdist.telemetry.metrics import side_tables
from hpcdist.training.metrics import Metrics
from hpcdist.training.progress import Progress
from hpcdist.training.trainer import Trainer


class Notes:
    """Writes into ``metrics`` and tells a person by ``progress``; rank 0 does, the others have nothing to do."""

    def __init__(self, trainer: Trainer, metrics: Metrics, progress: Progress) -> None:
        self._trainer, self._metrics, self._progress = trainer, metrics, progress
        self._loss_scale = 1.0  # of the last row about it
        self._has_suspected = False

    def stepped(self, step: int, found: StepResult) -> None:
        """Write down what was special about ``step``, where something was."""
        self._scale(step, found)
        self._recomputed(step, found)

    def _scale(self, step: int, found: StepResult) -> None:
        """Write what happened to the scale of the loss, where something did."""
        if found.skipped:
            self._progress.say(f"step {step}: skipped, its gradient overflows at the loss scale {found.loss_scale:g}")
        if found.skipped or found.loss_scale != self._loss_scale:
            self._metrics.scaled(step, found.loss_scale, found.skipped)
            self._loss_scale = found.loss_scale

    def _recomputed(self, step: int, found: StepResult) -> None:
        """Write what a second computation of the step found, where there was one."""
        if (again := found.recomputed) is None:
            return
        if again.fault:
            self._progress.say(again.fault)
        elif again.suspicion and not self._has_suspected:
            self._progress.say(f"step {step}: {again.suspicion}; computed again, it has the same bits: it is the data")
            self._has_suspected = True  # once is enough: the others are in the metrics
        row = bool(again.suspicion), not again.fault, again.ranks[0] if again.ranks else -1
        self._metrics.include(lambda file, session: side_tables.append_recomputed(file, session, step, *row))

    def shares(self, done: int, first: int) -> None:
        """Write the shares of the steps after ``done``, of those that are known from the ``first`` on."""
        if self._trainer.shares is not None:
            for batch, samples in self._trainer.shares.state(done)[first:]:
                self._metrics.shared(batch + 1, samples)
