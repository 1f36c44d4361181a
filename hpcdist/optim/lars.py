"""Layer-wise adaptive rate scaling for SGD."""

from typing import ClassVar

from hpcdist.arrays.backend import Array
from hpcdist.arrays.ranges import Range
from hpcdist.optim import kernels
from hpcdist.optim.segmentwise import SegmentWise


class Lars(SegmentWise):
    """LARS: You, Gitman & Ginsburg 2017 (arXiv:1708.03888), Algorithm 1.

    local = trust_coefficient ||w|| / (||g|| + weight_decay ||w|| + epsilon);
    v = momentum v + rate local (g + weight_decay w);  w -= v.
    Choices: the rate is inside the velocity, as in the paper, and a changed rate does not rescale what is there;
    epsilon is added (the paper has none); local is 1, not the trust coefficient, when either norm is 0 and for tensors
    that are not adapted, which have no decay either; it is not clipped from above. g is the gradient after clipping by
    the global norm. The direction is g itself: velocity and decay enter with the ratio, when the norms are known.
    """

    slot_names: ClassVar[tuple[str, ...]] = ("momentum",)
    needs_norms: ClassVar[bool] = True
    slots_in_apply: ClassVar[bool] = True

    def _direction(self, where: Range, weights: Array, gradient: Array, scale: float, decay: float) -> None:
        kernels.scale_in_place(gradient, scale)

    def _ratio(self, weight_norm: float, step_norm: float) -> float:
        if not (weight_norm > 0.0 and step_norm > 0.0):
            return 1.0
        config = self.config
        return config.trust_coefficient * weight_norm / (step_norm + config.weight_decay * weight_norm + config.epsilon)

    def _update(self, where: Range, weights: Array, step: Array, ratio: float, decay: float) -> None:
        kernels.descend_with_velocity(
            weights,
            step,
            self.slots["momentum"].range(where),
            rate=self.learning_rate * ratio,
            momentum=self.config.momentum,
            decay=decay,
        )
