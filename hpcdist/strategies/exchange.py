"""The seam between a training step and the architecture that turns gradients into parameters."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from hpcdist.arrays.piece import Piece
from hpcdist.arrays.ranges import Range
from hpcdist.strategies.schedule.operations import Operation


class Exchange(Protocol):
    """How replicas turn their gradients into the next parameters.

    ``plan`` contributes operations to the step; the executor calls the other methods when it meets them. Every method
    but ``plan`` and ``pieces`` is collective over the data axis.
    """

    replicas_identical: bool  # whether the sentinel may compare parameters over the data axis

    def plan(self) -> list[Operation]:
        """Return the operations of one step (local)."""
        ...

    def reduce(self, part: Range) -> None:
        """Reduce the gradients of ``part`` over the replicas, in place."""
        ...

    def agree(self, values: np.ndarray) -> np.ndarray:
        """Return the sums over all ranks of ``values`` (float64), in place."""
        ...

    @property
    def gradient_norm(self) -> float:
        """Norm of the whole reduced gradient, each tensor counted once; taken once a step, after `agree`."""
        ...

    def direction(self, part: Range) -> None:
        """Turn the reduced gradients of ``part`` into update directions (local)."""
        ...

    def apply(self, part: Range) -> None:
        """Step the parameters of ``part`` along the directions."""
        ...

    def pieces(self) -> Sequence[Piece]:
        """Return views of the state that this rank saves and restores, named by tensor (local)."""
        ...
