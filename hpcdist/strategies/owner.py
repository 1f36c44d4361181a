"""The update of the ranges that a rank owns: the same for every architecture, whatever brought the gradients there."""

from collections.abc import Sequence

import numpy as np

from hpcdist import collectives
from hpcdist.arrays.ranges import Range
from hpcdist.arrays.store import FlatStore
from hpcdist.comm.communicator import Communicator
from hpcdist.optim import clip
from hpcdist.optim.optimizer import Optimizer
from hpcdist.strategies.schedule.operations import Kind, Operation


class Owner:
    """Steps ``parameters`` on ``parts`` along the reduced ``gradients``, in the two phases of an optimizer.

    ``sharers`` joins the ranks that own the other parts of the same tensors, None where tensors are whole: layer-wise
    rates and the global norm are then exact however tensors are cut.
    """

    def __init__(
        self,
        parameters: FlatStore,
        gradients: FlatStore,
        optimizer: Optimizer,
        parts: Sequence[Range],
        sharers: Communicator | None,
        agree_algorithm: str,
    ) -> None:
        self.parameters, self.gradients, self.optimizer = parameters, gradients, optimizer
        self.parts = [part for part in parts if part]
        self._sharers, self._algorithm = sharers, agree_algorithm
        self._scale = 1.0
        self._norms: np.ndarray | None = None  # (segments, 2)
        self.carries_out = {
            Kind.DIRECTION: self.direction,
            Kind.NORMS: self.norms,
            Kind.APPLY: self.apply,
        }

    def plan(self) -> list[Operation]:
        """Return DIRECTION of every part, NORMS where layer-wise rates need them, APPLY of every part (local)."""
        norms = [Operation(Kind.NORMS)] if self.optimizer.needs_norms else []
        return [
            *(Operation(Kind.DIRECTION, range=part) for part in self.parts),
            *norms,
            *(Operation(Kind.APPLY, range=part) for part in self.parts),
        ]

    def norm_squared(self) -> float:
        """Return the sum of squares of the gradients of the owned parts (local)."""
        return clip.sum_of_squares(self.gradients, self.parts)

    def begin_update(self, scale: float) -> None:
        """Advance the optimizer's clock; gradients of this step are multiplied by ``scale`` (local)."""
        self._scale = scale
        self.optimizer.begin_step()

    def direction(self, op: Operation) -> None:
        """Turn gradients into directions (local)."""
        assert op.range is not None
        self.optimizer.direction(op.range, self.parameters, self.gradients, self._scale)

    def norms(self, op: Operation) -> None:
        """Sum the norms of tensors over those who share them. Collective over the sharers."""
        self._norms = self.optimizer.partial_norms()
        if self._sharers is not None:
            collectives.allreduce(self._sharers, self._norms.reshape(-1), self._algorithm)

    def apply(self, op: Operation) -> None:
        """Step the parameters (local)."""
        assert op.range is not None
        self.optimizer.apply(op.range, self.parameters, self.gradients, None, self._norms)

    def slots(self) -> dict[str, FlatStore]:
        """Return the stores of the optimizer's state, by the kind that a checkpoint gives them (local)."""
        return {f"optimizer.{name}": store for name, store in self.optimizer.slots.items()}
