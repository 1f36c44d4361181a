"""The optimizers by name: SGD with momentum, LARS, AdamW, LAMB and Muon. The methods must be called in a fixed order.

    begin_step  ->  direction(piece)...  ->  partial_norms  -> (the caller sums them) ->  apply(piece)...

The result does not depend on the sharding, up to the summation order of the norms, or bitwise with exact norms.

AdamW (Loshchilov & Hutter 2019, arXiv:1711.05101, Algorithm 2) computes w - rate u from the weights w, with the
direction u = m^ / (sqrt(v^) + epsilon) + weight_decay w. m^ and v^ are the moments of the gradient (Kingma & Ba 2015),
corrected for the number of updates if ``bias_correction`` is true.

LAMB (You et al. 2020, arXiv:1904.00962, Algorithm 2) computes w - rate r u, with the trust ratio r = ||w|| / ||u||. The
norms are over the whole tensor on all ranks. r is clipped to ``trust_ratio_min`` and ``trust_ratio_max`` if they are
not 0; DeepSpeed uses 0.01 and 10. ``normalize_gradient`` first divides the whole gradient by its norm, as in NVLAMB
(NVIDIA 2019). By default, tensors whose `TensorSpec.adapted` is false do not decay, and their r is 1.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar, Final, TypeAlias

import numpy as np

from hpcdist.arrays.backend import Array, Ledger
from hpcdist.arrays.layout import Layout
from hpcdist.arrays.ranges import Range
from hpcdist.arrays.store import FlatStore
from hpcdist.optim import fused, kernels
from hpcdist.optim.adam import AdamMomentSlots, AdamW
from hpcdist.optim.base import Decay, ElementWise, LayerWise, SegmentWise, WrappedOptimizer
from hpcdist.optim.config import OptimizerConfig
from hpcdist.optim.muon import Muon

_LARGEST: Final = 1e30


class Lamb(AdamMomentSlots, LayerWise):
    """LAMB: update direction of AdamW, times (norm of the weights / norm of the direction) of each tensor."""

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


class Sgd(ElementWise):
    """SGD with Polyak's (1964) or Nesterov's momentum, as in Sutskever et al. 2013, section 2, or no momentum."""

    slot_names: ClassVar[tuple[str, ...]] = ("momentum",)

    def _slots_of(self, config: OptimizerConfig) -> tuple[str, ...]:
        return self.slot_names if config.momentum else ()

    def _direction(self, where: Range, weights: Array, gradient: Array, scale: float, decay: float) -> None:
        if not self.config.momentum:
            kernels.scale_in_place(gradient, scale)
            if decay:
                gradient += weights.dtype.type(decay) * weights
            return
        kernels.momentum_direction(
            weights,
            gradient,
            self.slots["momentum"].range(where),
            scale=scale,
            momentum=self.config.momentum,
            nesterov=self.config.nesterov,
            decay=decay,
        )

    def _step(
        self, where: Range, weights: Array, gradient: Array, rate: float, decay: Decay, working: Array | None
    ) -> None:
        if not self.config.momentum:
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
        """Return {"count": number of updates, "rate": learning rate of the most recent update}."""
        return {**super().state(), "rate": self._rate}

    def restore(self, state: Mapping[str, float]) -> None:
        """Restore the optimizer from ``state``. If ``state`` has no learning rate, use the scheduled rate."""
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


OPTIMIZERS: Final[dict[str, type[SegmentWise]]] = {
    "adamw": AdamW,
    "lamb": Lamb,
    "lars": Lars,
    "muon": Muon,
    "sgd": Sgd,
}
Optimizer: TypeAlias = SegmentWise | WrappedOptimizer


def state_vectors(config: OptimizerConfig) -> int:
    """Return the number of values per parameter that the optimizer of ``config`` keeps as its state."""
    moments = len(OPTIMIZERS[config.name].slot_names) if config.name != "sgd" or config.momentum else 0
    return moments + bool(config.ema_decay)


def build(
    config: OptimizerConfig,
    layout: Layout,
    parts: Range | Sequence[Range],
    dtype: np.dtype,
    *,
    total_steps: int,  # length of the learning-rate schedule
    ledger: Ledger | None = None,
    on: str = "cpu",  # device of the state, "cpu" or "gpu"
    make_slot: Callable[[str], FlatStore] | None = None,  # allocates a state vector such as "m"
) -> SegmentWise:
    """Return a new optimizer ``config.name`` for weights of ``dtype`` in the flat ranges ``parts`` of this rank."""
    return OPTIMIZERS[config.name](
        config, layout, parts, dtype, ledger=ledger, total_steps=total_steps, on=on, make_slot=make_slot
    )
