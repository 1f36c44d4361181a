"""AdamW, and the moments of Adam that AdamW, LAMB and Muon share. The formulas are in `hpcdist.optim.optimizer`."""

from typing import ClassVar

from hpcdist.arrays.backend import Array
from hpcdist.arrays.ranges import Range
from hpcdist.optim import fused, kernels
from hpcdist.optim.base import Decay, ElementWise, SegmentWise


class AdamMomentSlots(SegmentWise):
    """Base class of AdamW and LAMB. Both compute the update direction from Adam's two moments."""

    slot_names: ClassVar[tuple[str, ...]] = ("m", "v")

    def _direction(self, where: Range, weights: Array, gradient: Array, scale: float, decay: float) -> None:
        kernels.adam_direction(
            weights,
            gradient,
            self.slots["m"].range(where),
            self.slots["v"].range(where),
            scale=scale,
            betas=(self.config.beta1, self.config.beta2),
            epsilon=self.config.epsilon,
            decay=decay,
            count=self.count if self.config.bias_correction else 0,
        )


class AdamW(AdamMomentSlots, ElementWise):
    """AdamW: Adam with decoupled weight decay. Biases and norm scales do not decay by default."""

    def _step(
        self, where: Range, weights: Array, gradient: Array, rate: float, decay: Decay, working: Array | None
    ) -> None:
        fused.adam(
            weights,
            gradient,
            self.slots["m"].range(where),
            self.slots["v"].range(where),
            scale=self._scale,
            rate=rate,
            betas=(self.config.beta1, self.config.beta2),
            epsilon=self.config.epsilon,
            decay=decay,
            count=self.count if self.config.bias_correction else 0,
            working=working,
        )
