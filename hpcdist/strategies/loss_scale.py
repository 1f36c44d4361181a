"""Loss scaling: gradients that float16 would flush to zero are computed of a loss times a scale, and divided by it.

Micikevicius et al., arXiv:1710.03740, section 3.2. One scale for the whole job, a power of two, so that it rounds
nothing. The ranks agree on the norm of the scaled gradient before anybody touches a weight; where it is not finite, all
of them skip the step: no weight, moment, count or rate changes. Loss and activations are float32 and are not scaled
until the backward, so that a loss that is not finite is an error at any scale.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from hpcdist.errors import NonFiniteError

START: Final = 2.0**16
LEAST: Final = 1.0  # unless a recipe says otherwise: precision.minimum_scale
MOST: Final = 2.0**24
PATIENCE: Final = 16  # overflows in a row at a scale that cannot be lowered


class Unscaled:
    """No scale: a gradient that is not finite ends the run. Local."""

    scale = 1.0
    skipped = 0

    def after(self, step: str, norm: float) -> bool:
        """Return whether the step updates; raises NonFiniteError, which says ``step``, where ``norm`` is not finite."""
        if not math.isfinite(norm):
            raise NonFiniteError(step)
        return True

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps: nothing."""
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take nothing back; a checkpoint of scaled steps goes on without a scale."""


@dataclass
class FixedScale(Unscaled):
    """Always the same ``scale``. Local: every rank is told the same norms.

    ``skipped`` counts the steps of the whole run that were given up, ``overflows`` those in a row.
    """

    scale: float
    skipped: int = 0
    overflows: int = 0

    def after(self, step: str, norm: float) -> bool:
        """Return whether the step updates, which it does where ``norm``, agreed on by all ranks, is finite.

        Raises NonFiniteError after `PATIENCE` overflows in a row that no lower scale could end.
        """
        if math.isfinite(norm):
            self.overflows = 0
            self._grow()
            return True
        self.skipped += 1
        self.overflows += 1
        self._lower(step)
        return False

    def _grow(self) -> None:
        """Take note of a step without overflow."""

    def _lower(self, step: str) -> None:
        if self.overflows >= PATIENCE:
            raise self._refusal(step, self.overflows, "a smaller precision.loss_scale, or 0 to let it adapt")

    def _refusal(self, step: str, count: int, cure: str) -> NonFiniteError:
        return NonFiniteError(
            f"{step}: it has overflowed float16 for {count} steps in a row at the loss scale {self.scale:g}; try "
            f"{cure}, or precision.mode = 'bfloat16'"
        )

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps of it."""
        return {"skipped": self.skipped, "overflows": self.overflows}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take back what `state` returned, of this kind or another."""
        self.skipped, self.overflows = int(state.get("skipped", 0)), int(state.get("overflows", 0))


@dataclass
class DynamicScale(FixedScale):
    """A scale that doubles after ``interval`` steps without overflow, and halves at the overflow number ``hysteresis``.

    That is in a row, and each further one of the row halves it again, but never below ``least``. ``grown`` counts the
    steps since the last overflow or change, ``stuck`` the overflows in a row at the least scale.
    """

    scale: float = START
    interval: int = 2000
    hysteresis: int = 2
    least: float = LEAST
    grown: int = 0
    stuck: int = 0

    def _grow(self) -> None:
        self.stuck = 0
        self.grown += 1
        if self.grown >= self.interval:
            self.grown = 0
            self.scale = min(2.0 * self.scale, MOST)

    def _lower(self, step: str) -> None:
        self.grown = 0
        if self.scale == self.least:
            self.stuck += 1
        if self.stuck >= PATIENCE:
            raise self._refusal(step, self.stuck, "a lower optimizer.learning_rate or precision.minimum_scale")
        if self.overflows >= self.hysteresis:
            self.scale = max(0.5 * self.scale, self.least)

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps of it."""
        return super().state() | {"scale": self.scale, "grown": self.grown, "stuck": self.stuck}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take back what `state` returned; a run that had no such scale begins with the first one."""
        super().restore(state)
        self.scale = max(float(state.get("scale", self.scale)), self.least)
        self.grown, self.stuck = int(state.get("grown", 0)), int(state.get("stuck", 0))


def build(mode: str, fixed: float, interval: int, hysteresis: int, least: float = LEAST) -> Unscaled:
    """Return the scale of ``precision.mode``: only float16 has one, ``fixed`` or, where that is 0, a dynamic one."""
    if mode != "float16":
        return Unscaled()
    if fixed:
        return FixedScale(fixed)
    return DynamicScale(interval=interval, hysteresis=hysteresis, least=least)
