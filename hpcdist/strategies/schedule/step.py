"""Step in progress: its result, and the protocol between an executor and the observers of its steps.

An executor is given its `StepObserver`s once, at its construction, and calls them in their order. They see the step as
a `RunningStep`. Noise scale, silent data corruption, injected faults and profiler ranges are observers; without any
nothing is called.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol, TypeAlias

import numpy as np

from hpcdist.arrays.backend import Array
from hpcdist.arrays.ranges import Range
from hpcdist.strategies.schedule.operations import Kind, Operation

Handler: TypeAlias = Callable[[Operation], None]


@dataclass(frozen=True)
class RecomputeVerdict:
    """Result of a second computation of a step: its reason ("" for no ``suspicion``), and the ranks at fault."""

    suspicion: str
    ranks: tuple[int, ...] = ()
    fault: str = ""


@dataclass
class StepResult:
    """Result of a step: the mean loss over the whole batch, requests to stop, seconds by phase on this rank.

    ``correction``: the gradient of this step is multiplied by it, since its weights are known at its end only.
    ``skipped``: the gradient overflowed at its ``loss_scale``, and nothing was updated. ``measured`` is what the
    observers count, one after another, summed over the world.
    """

    loss: float = float("nan")
    gradient_norm: float = float("nan")
    stop_requests: np.ndarray = field(default_factory=lambda: np.zeros(0))
    loss_scale: float = 1.0
    correction: float = 1.0
    skipped: bool = False
    recomputed: RecomputeVerdict | None = None
    measured: np.ndarray = field(default_factory=lambda: np.zeros(0))
    seconds: dict[str, float] = field(
        default_factory=lambda: {"compute_s": 0.0, "communication_s": 0.0, "update_s": 0.0}
    )


class RunningStep(Protocol):
    """The step that an executor makes, or made last, as its observers see it."""

    @property
    def number(self) -> int:
        """The number of the step, counted from 1."""

    @property
    def samples(self) -> int:
        """The samples of all replicas together."""

    @property
    def sizes(self) -> Sequence[int]:
        """The samples of each micro-batch of this rank's replica."""

    @property
    def units(self) -> Mapping[int, Range]:
        """The units that this rank computes, each with the range of its parameters."""

    @property
    def outcome(self) -> StepResult:
        """The result, as far as the step has come."""

    @property
    def own_losses(self) -> list[float]:
        """Sums of the losses over the targets, of each micro-batch of this rank."""

    def gradients_in(self, part: Range) -> Array | None:
        """Return this rank's gradients in ``part``, a range of whole layers or in one; None for none (local)."""

    def compute_again(self) -> None:
        """Compute the step that is being agreed on once more, and agree on what comes of it. Collective."""


NO_COUNTS: Final = np.zeros(0)


class StepObserver:
    """Observer of the steps of one rank. Every method does nothing here; all are local, but for `agreed`."""

    def around(self, kind: Kind, handler: Handler) -> Handler:
        """Return the function that runs instead of ``handler`` for operations of ``kind``.

        Called once for each kind, when the executor is built. The function of a later observer is around that of an
        earlier one. It also runs where a step is computed again, and in an evaluation.
        """
        return handler

    def begin_step(self, number: int, operations: Sequence[Operation], sizes: Sequence[int]) -> None:
        """Take note that step ``number`` begins, with micro-batches of ``sizes`` samples: nothing of it has run."""

    def went_back(self, step: RunningStep, op: Operation) -> None:
        """Take note of the backward ``op``, which was just computed."""

    def exchanges(self, step: RunningStep, op: Operation) -> None:
        """Take note that ``op`` is about to take gradients of this rank, which are complete."""

    def counts(self, step: RunningStep) -> np.ndarray:
        """Return what was counted since the last call: equally many numbers (float64) on all ranks of the world.

        They are summed over the world in the message that has the loss.
        """
        return NO_COUNTS

    def agreed(self, step: RunningStep) -> None:
        """Take note that all ranks know loss and norm, and nothing is updated yet. Collective over the world."""

    def complete_step(self, step: RunningStep, sums: np.ndarray) -> None:
        """Take note that the step is complete, with the ``sums`` of `counts` over the world."""

    def leave_step(self) -> None:
        """Take note that the step is over: complete, or given up with an error."""
