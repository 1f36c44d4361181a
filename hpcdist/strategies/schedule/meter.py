"""What may look at the gradients of a rank in a step: a seam, so that nothing is measured where nobody asked."""

from typing import Protocol

import numpy as np

from hpcdist.strategies.schedule.operations import Operation


class Meter(Protocol):
    """Looks at the gradients of one rank before they are exchanged. All of it is local."""

    def went_back(self, op: Operation) -> None:
        """Take note of a backward that was just computed."""
        ...

    def exchanges(self, op: Operation) -> None:
        """Take note that ``op`` is about to take gradients, which are complete."""
        ...

    def numbers(self) -> np.ndarray:
        """Return what was counted since the last call, equally many numbers on all ranks of the world."""
        ...
