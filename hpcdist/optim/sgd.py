"""SGD with momentum in PyTorch's convention, and LARS, its layer-wise adaptive rate scaling."""

from collections.abc import Mapping
from typing import ClassVar

from hpcdist.arrays.backend import Array
from hpcdist.arrays.ranges import Range
from hpcdist.optim.base import Decay, ElementWise, LayerWise
from hpcdist.optim.config import OptimizerConfig
from hpcdist.optim.update import fused, kernels


class Sgd(ElementWise):
    """SGD with the heavy ball (Polyak 1964) or Nesterov's momentum, as in Sutskever et al. 2013, section 2.

    Like `torch.optim.SGD` without dampening. Without parameter groups, tensors with
    `TensorSpec.adapted` False do not decay.
    """

    slot_names: ClassVar[tuple[str, ...]] = ("momentum",)

    def _slots_of(self, config: OptimizerConfig) -> tuple[str, ...]:
        return self.slot_names if config.momentum else ()

    def _direction(self, where: Range, weights: Array, gradient: Array, scale: float, decay: float) -> None:
        momentum = self.slots["momentum"].range(where) if self.slots else None
        if momentum is None:
            kernels.scale_in_place(gradient, scale)
            if decay:
                gradient += weights.dtype.type(decay) * weights
            return
        kernels.momentum_direction(
            weights,
            gradient,
            momentum,
            scale=scale,
            momentum=self.config.momentum,
            nesterov=self.config.nesterov,
            decay=decay,
        )

    def _step(
        self, where: Range, weights: Array, gradient: Array, rate: float, decay: Decay, working: Array | None
    ) -> None:
        if not self.slots:
            fused.sgd(weights, gradient, scale=self._scale, rate=rate, decay=decay, working=working)
            return
        fused.momentum(
            weights,
            gradient,
            self.slots["momentum"].range(where),
            scale=self._scale,
            rate=rate,
            momentum=self.config.momentum,
            nesterov=self.config.nesterov,
            decay=decay,
            working=working,
        )


class Lars(LayerWise):
    """LARS: layer-wise adaptive rate scaling (You, Gitman and Ginsburg 2017, arXiv:1708.03888, Algorithm 1)."""

    #     local = trust_coefficient ||w|| / (||g|| + weight_decay ||w|| + epsilon)
    #     v = momentum c v + rate local (g + weight_decay w);  w -= v
    # w: weights, g: gradient after clipping, v: velocity. local is 1 if a norm is 0 or `TensorSpec.adapted` is False.
    # With ``momentum_correction``, c = rate / previous rate (Goyal et al. 2017, arXiv:1706.02677, section 3, remark 2),
    # else c = 1. Without parameter groups, tensors with ``adapted`` False do not decay.

    slot_names: ClassVar[tuple[str, ...]] = ("momentum",)
    slots_in_apply: ClassVar[bool] = True
    _rate = 0.0  # rate of the last update; 0: no update, or an update without effect
    _correction = 1.0

    def begin_step(self, factor: float = 1.0) -> None:
        super().begin_step(factor)
        before, self._rate = self._rate, self.learning_rate
        # After a rate of 0 a corrected velocity is 0.
        self._correction = self._rate / before if before and self.config.momentum_correction else 1.0

    def state(self) -> dict[str, float]:
        """Return the state to save: the number of updates, and the learning rate of the last update."""
        return {**super().state(), "rate": self._rate}

    def restore(self, state: Mapping[str, float]) -> None:
        """Restore the optimizer from ``state``. If it contains no learning rate, use the scheduled rate."""
        super().restore(state)
        self._factor = 1.0
        self._rate = float(state.get("rate", self.learning_rate if self.count else 0.0))

    def _direction(self, where: Range, weights: Array, gradient: Array, scale: float, decay: float) -> None:
        kernels.scale_in_place(gradient, scale)

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
        kernels.launch_scaled_direction(weights, gradient, step, partial, tensors, scale)

    def _ratio(self, weight_norm: float, step_norm: float, decay: float) -> float:
        if not (weight_norm > 0.0 and step_norm > 0.0):
            return 1.0
        config = self.config
        return config.trust_coefficient * weight_norm / (step_norm + decay * weight_norm + config.epsilon)

    def _update(self, where: Range, weights: Array, step: Array, rate: float, decay: float) -> None:
        kernels.descend_with_velocity(
            weights,
            step,
            self.slots["momentum"].range(where),
            rate=rate,
            momentum=self.config.momentum * self._correction,
            decay=decay,
        )

    def _update_all(
        self, where: Range, weights: Array, step: Array, tensors: kernels.TensorOptions, working: Array | None
    ) -> None:
        velocity, momentum = self.slots["momentum"].range(where), self.config.momentum * self._correction
        kernels.launch_update("descend_with_velocity", weights, step, (velocity,), working, tensors, momentum)
