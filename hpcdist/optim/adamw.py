"""Adam with decoupled weight decay."""

from typing import ClassVar

from hpcdist.arrays.backend import Array
from hpcdist.arrays.ranges import Range
from hpcdist.optim import kernels, updates
from hpcdist.optim.elementwise import ElementWise
from hpcdist.optim.segmentwise import SegmentWise


class AdamW(ElementWise):
    """AdamW: Loshchilov & Hutter 2019 (arXiv:1711.05101), Algorithm 2, over Kingma & Ba 2015, Algorithm 1.

    u = m^ / (sqrt(v^) + epsilon) + weight_decay w;  w -= rate u. Both moments are corrected for their start at 0, by
    the number of applied updates (a skipped one does not count), unless ``bias_correction`` is off: warm-up then does
    what is left of that. The decay is multiplied by the current rate, warm-up
    included: PyTorch's convention (the paper multiplies it by its schedule alone, without alpha). It concerns adapted
    tensors only. u is taken of the weights before the update.
    """

    slot_names: ClassVar[tuple[str, ...]] = ("m", "v")

    def _direction(self, where: Range, weights: Array, gradient: Array, scale: float, decay: float) -> None:
        direction(self, where, weights, gradient, scale, decay)

    def _step(
        self,
        where: Range,
        weights: Array,
        gradient: Array,
        scale: float,
        rate: float,
        decay: float,
        working: Array | None,
    ) -> None:
        updates.adam(
            weights,
            gradient,
            self.slots["m"].range(where),
            self.slots["v"].range(where),
            scale=scale,
            rate=rate,
            beta1=self.config.beta1,
            beta2=self.config.beta2,
            epsilon=self.config.epsilon,
            decay=decay,
            count=self.count,
            corrects=self.config.bias_correction,
            working=working,
        )


def direction(
    optimizer: SegmentWise, where: Range, weights: Array, gradient: Array, scale: float, decay: float
) -> None:
    """Turn the gradient of one stretch of a tensor into u, in place, and advance the moments of ``optimizer``."""
    kernels.adam_direction(
        weights,
        gradient,
        optimizer.slots["m"].range(where),
        optimizer.slots["v"].range(where),
        scale=scale,
        beta1=optimizer.config.beta1,
        beta2=optimizer.config.beta2,
        epsilon=optimizer.config.epsilon,
        decay=decay,
        count=optimizer.count,
        corrects=optimizer.config.bias_correction,
    )
