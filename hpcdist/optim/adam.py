"""AdamW and LAMB: Adam with decoupled weight decay, and its layer-wise variant for large batches.

AdamW (Loshchilov & Hutter 2019, arXiv:1711.05101, Algorithm 2) computes w - rate u from the weights w, with the
direction u = m^ / (sqrt(v^) + epsilon) + weight_decay w. m^ and v^ are the moments of the gradient (Kingma & Ba 2015),
corrected for the number of updates if ``bias_correction`` is true.

LAMB (You et al. 2020, arXiv:1904.00962, Algorithm 2) computes w - rate r u, with the trust ratio r = ||w|| / ||u||. The
norms are over the whole tensor on all ranks. r is clipped to ``trust_ratio_min`` and ``trust_ratio_max`` if they are
not 0; DeepSpeed uses 0.01 and 10. ``normalize_gradient`` first divides the whole gradient by its norm, as in NVLAMB
(NVIDIA 2019). By default, tensors whose `TensorSpec.adapted` is false do not decay, and their r is 1.
"""

from typing import ClassVar, Final

from hpcdist.arrays.backend import Array
from hpcdist.arrays.ranges import Range
from hpcdist.optim.base import Decay, ElementWise, LayerWise, SegmentWise
from hpcdist.optim.update import fused, kernels


class AdamMomentSlots(SegmentWise):
    """Base class of AdamW and LAMB. It keeps Adam's two moments and computes the update direction from a gradient."""

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
    """AdamW: Adam with decoupled weight decay. By default, tensors such as biases do not decay."""

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


_LARGEST: Final = 1e30


class Lamb(AdamMomentSlots, LayerWise):
    """LAMB: the direction of AdamW, scaled per tensor by a trust ratio: norm of the weights / norm of the direction."""

    def _direction_all(
        self,
        where: Range,
        weights: Array,
        gradient: Array,
        step: Array,
        partial: Array,
        scale: float,
        tensors: kernels.TensorOptions,
    ) -> None:
        config, slots = self.config, (self.slots["m"].range(where), self.slots["v"].range(where))
        factors = kernels.moment_factors((config.beta1, config.beta2), self.count if config.bias_correction else 0)
        scalars = (scale, *factors, config.epsilon)
        kernels.launch_adam_direction(weights, gradient, *slots, step, partial, tensors, *scalars)

    def _ratio(self, weight_norm: float, step_norm: float, decay: float) -> float:
        if not (weight_norm > 0.0 and step_norm > 0.0):
            return 1.0
        config, ratio = self.config, weight_norm / step_norm
        if config.trust_ratio_max:
            ratio = min(ratio, config.trust_ratio_max)
        ratio = max(ratio, config.trust_ratio_min)
        return ratio if ratio <= _LARGEST else 1.0
