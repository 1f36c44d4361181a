"""AdamW and LAMB: Adam with decoupled weight decay, and its layer-wise variant for large batches."""

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
    """AdamW: Loshchilov & Hutter 2019 (arXiv:1711.05101), Algorithm 2, with the moments of Kingma & Ba 2015.

    The weights w become w - rate u, with u = m^ / (sqrt(v^) + epsilon) + weight_decay w and the learning rate ``rate``.
    m^ and v^ are the moments m and v of the gradient. If ``bias_correction`` is true, they are corrected for the number
    of updates. By default, tensors whose `TensorSpec.adapted` is false, such as biases, do not decay.
    """

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
    """LAMB: You et al. 2020 (arXiv:1904.00962), Algorithm 2: the direction of AdamW, scaled per tensor.

    The weights w become w - rate r u. u is the direction of `hpcdist.optim.adam.AdamW`, including weight decay. The
    trust ratio is r = ||w|| / ||u||, with norms over the whole tensor on all ranks.

    - r is clipped to ``trust_ratio_min`` and ``trust_ratio_max`` if they are not 0. DeepSpeed uses 0.01 and 10.
    - r is 1, regardless of these bounds, if a norm is 0. Without an upper bound, r above 1e30 becomes 1.
    - For tensors whose `TensorSpec.adapted` is false, such as biases, r is 1. By default they do not decay.
    - ``normalize_gradient`` first divides the whole gradient by its norm, as in NVLAMB (NVIDIA 2019).
    """

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
