"""A step in progress, its result, and the protocol between an executor and the observers of its steps."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol, TypeAlias

import numpy as np

from hpcdist.arrays.backend import Array
from hpcdist.arrays.ranges import Range
from hpcdist.strategies.core.operations import Kind, Operation

Handler: TypeAlias = Callable[[Operation], None]


@dataclass(frozen=True)
class RecomputeVerdict:
    """Result of computing a suspicious step again: reason for suspicion, faulty ranks, description of the fault."""

    suspicion: str
    ranks: tuple[int, ...] = ()
    fault: str = ""


@dataclass
class StepResult:
    """Result of a training step: mean loss over the global batch, stop requests, and seconds by phase."""

    loss: float = float("nan")
    gradient_norm: float = float("nan")
    stop_requests: np.ndarray = field(default_factory=lambda: np.zeros(0))
    loss_scale: float = 1.0
    correction: float = 1.0  # factor of loss and gradient because targets have weights
    skipped: bool = False  # True if the gradient overflowed at ``loss_scale``: nothing was updated
    recomputed: RecomputeVerdict | None = None
    measured: np.ndarray = field(default_factory=lambda: np.zeros(0))  # observers' `counts`, summed over the world
    seconds: dict[str, float] = field(
        default_factory=lambda: {"compute_s": 0.0, "communication_s": 0.0, "update_s": 0.0}
    )


class RunningStep(Protocol):
    """Interface by which observers read the executor's current step or, between two steps, the last step."""

    @property
    def number(self) -> int:
        """Number of the step; the first step of a run is number 1."""

    @property
    def samples(self) -> int:
        """Number of samples in the step, summed over all replicas."""

    @property
    def sizes(self) -> Sequence[int]:
        """Number of samples in each micro-batch of this rank's replica, in order."""

    @property
    def units(self) -> Mapping[int, Range]:
        """Dict from the number of each layer on this rank to its range in the flat parameter vector."""

    @property
    def outcome(self) -> StepResult:
        """Result of the step so far; fields that are not yet computed have their default values."""

    @property
    def own_losses(self) -> list[float]:
        """Losses of this rank's micro-batches, each summed over the targets of the micro-batch."""

    def gradients_in(self, part: Range) -> Array | None:
        """Return the gradients of ``part``, a parameter range in one layer, or None if not on this rank. Local."""

    def compute_again(self) -> None:
        """Compute the current step a second time, so that an observer can compare the results. Collective."""


NO_COUNTS: Final = np.zeros(0)


class StepObserver:
    """Base class of step observers, which the executor calls during a step. Only `agreed` is collective."""

    def around(self, kind: Kind, handler: Handler) -> Handler:
        """Return the function that executes operations of type ``kind``: ``handler`` or a wrapper of ``handler``.

        The executor calls this once per type. ``handler`` may be the wrapper of another observer.
        """
        return handler

    def begin_step(self, number: int, operations: Sequence[Operation], sizes: Sequence[int]) -> None:
        """Called before step ``number``, which runs ``operations``. ``sizes``: samples per micro-batch."""

    def went_back(self, step: RunningStep, op: Operation) -> None:
        """Called after the backward operation ``op`` of ``step``. Does nothing by default."""

    def exchanges(self, step: RunningStep, op: Operation) -> None:
        """Called before ``op`` exchanges this rank's complete gradients in the flat range ``op.part``."""

    def counts(self, step: RunningStep) -> np.ndarray:
        """Return numbers to be summed over the ranks, as a 1-D array of the same length on all ranks. Local."""
        return NO_COUNTS

    def agreed(self, step: RunningStep) -> None:
        """Called before the update, when ``step.outcome`` has the loss and gradient norm. Collective."""

    def complete_step(self, step: RunningStep, sums: np.ndarray) -> None:
        """Called after the step; ``sums`` are the `counts` of this observer summed over the world."""

    def leave_step(self) -> None:
        """Called when the step ends, both after success and after an error."""
