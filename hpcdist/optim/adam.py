"""AdamW and LAMB: Adam with decoupled weight decay, and its layer-wise variant for large batches.

AdamW is an elementwise optimizer; `Lamb` multiplies the same direction by a trust ratio for each tensor.
"""

from typing import ClassVar, Final

from hpcdist.arrays.backend import Array
from hpcdist.arrays.ranges import Range
from hpcdist.optim.base import Decay, ElementWise, LayerWise, SegmentWise
from hpcdist.optim.update import fused, kernels


class AdamMomentSlots(SegmentWise):
    """Two moments, and the direction that they make of a gradient: what AdamW and LAMB share."""

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
    """AdamW: Loshchilov & Hutter 2019 (arXiv:1711.05101), Algorithm 2, over Kingma & Ba 2015, Algorithm 1.

    u = m^ / (sqrt(v^) + epsilon) + weight_decay w;  w -= rate u. Both moments are corrected for their start at 0, by
    the number of applied updates (a skipped one does not count), unless ``bias_correction`` is off: then only a warm-up
    makes up for it. The decay is multiplied by the current rate, warm-up included: PyTorch's convention (the paper
    multiplies it by its schedule alone, without alpha). It concerns adapted tensors only. u is taken of the weights
    before the update.
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
    """LAMB: You et al. 2020 (arXiv:1904.00962), Algorithm 2: the direction of AdamW, scaled by tensor.

    w -= rate r u with r = ||w|| / ||u||, u that of `hpcdist.optim.adam.AdamW`, decay included, and both norms over the
    whole tensor, whatever part of it a rank owns. Choices, as implementations differ in them:

    - m and v are corrected for their start at 0, as in the paper; not so with ``bias_correction`` = false.
    - phi is the identity. r itself, not ||w||, is kept within ``trust_ratio_min`` and ``trust_ratio_max`` where they
      are not 0; DeepSpeed takes 0.01 and 10, the paper names none.
    - r is 1, bounds or not, where either norm is 0 and for tensors that are not adapted, which have no decay either;
      and where it is above 1e30 and not bounded: u is nothing but rounding then, and rate r would overflow in float32.
    - The gradient is as it comes. With ``normalize_gradient`` all of it is divided by its norm first, as in NVLAMB (S.
      Sreenivas et al., "A guide to optimizer implementation for BERT at scale", NVIDIA 2019). Only beside epsilon, and
      between steps, does that make a difference: u does not change with the scale of all gradients.
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
