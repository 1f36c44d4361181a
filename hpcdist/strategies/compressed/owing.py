"""What exchanges with error feedback share: residuals that follow steps, skipped steps, and checkpoints.

Gradients are encoded as float32 and in unscaled units: 16-bit working gradients are widened and divided by the loss
scale before, so that what is fed back means the same whatever becomes of the scale.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

import numpy as np

from hpcdist.arrays.backend import Array
from hpcdist.arrays.piece import Piece
from hpcdist.collectives.workspace import scratch
from hpcdist.optim import kernels
from hpcdist.strategies.compressed.residuals import Residuals
from hpcdist.strategies.owner import OwnerExchange

_FLOAT32: Final = np.dtype(np.float32)


class Owing(OwnerExchange):
    """An exchange that may have ``residuals``. To stand before the exchange that it adds them to.

    A subclass opens the step when it encodes, and gives up one that is still open at its `begin`.
    """

    residuals: Residuals | None = None
    _is_open = False  # gradients were encoded that are not applied yet

    def _give_up(self) -> None:
        """Forget a step that was given up, if there was one (local)."""
        if self._is_open and self.residuals is not None:
            self.residuals.settle()
        self._is_open = False

    def begin_update(self, scale: float) -> None:
        """Begin the update of the step: what was encoded of its gradients counts."""
        self._is_open = False
        if self.residuals is not None:
            self.residuals.keep()
        super().begin_update(scale)

    def pieces(self) -> Sequence[Piece]:
        """Return also this rank's residuals."""
        self._give_up()
        return [*super().pieces(), *([] if self.residuals is None else self.residuals.pieces())]

    def foresee(self, state: Mapping[str, Any]) -> Collection[str]:
        """Take note of whose residuals a checkpoint has; it may lack all of them (local)."""
        found = set(super().foresee(state))
        if self.residuals is not None:
            self.residuals.foresee(state)
            found |= set(self.residuals.kinds)
        return found

    def wanted(self) -> Sequence[Piece]:
        """Return also where residuals go."""
        return [*super().wanted(), *([] if self.residuals is None else self.residuals.wanted())]

    def state(self) -> dict[str, Any]:
        """Return the optimizer's clock, and how many ranks have residuals."""
        return super().state() | ({} if self.residuals is None else self.residuals.state())

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take back what `state` returned, once the pieces are there."""
        super().restore(state)
        if self.residuals is not None:
            self.residuals.restored()


def unscaled(gradients: Array, loss_scale: float, wide: Array | None = None) -> Array:
    """Return ``gradients`` themselves, or float32 copies of 16-bit ones without their loss scale (local).

    Copies are written to ``wide``; without it they last until the next ones are made.
    """
    if gradients.dtype == _FLOAT32:
        return gradients
    if wide is None:
        wide = scratch("compressed.widened", gradients.size, _FLOAT32, gradients)
    kernels.widen(gradients, wide)
    wide *= np.float32(1.0 / loss_scale)
    return wide


def scaled(values: Array, gradients: Array, loss_scale: float) -> None:
    """Write ``values``, which `unscaled` returned, to 16-bit ``gradients`` with their loss scale (local)."""
    if values is not gradients:
        values *= np.float32(loss_scale)
        kernels.round_into(values, gradients)
