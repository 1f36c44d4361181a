"""Stochastic gradient descent with momentum, in PyTorch's convention."""

from typing import ClassVar

from hpcdist.arrays.backend import Array
from hpcdist.arrays.ranges import Range
from hpcdist.optim import kernels, updates
from hpcdist.optim.config import OptimizerConfig
from hpcdist.optim.elementwise import ElementWise


class Sgd(ElementWise):
    """SGD with the heavy ball (Polyak 1964) or Nesterov's momentum, as in Sutskever et al. 2013, section 2.

    As `torch.optim.SGD` does it, with dampening 0: g += weight_decay w;  v = momentum v + g;  the step is v, or with
    Nesterov g + momentum v;  w -= rate step. The rate stands outside the velocity, so that a changed rate acts at once
    on all of it and needs no momentum correction (Goyal et al. 2017, arXiv:1706.02677, section 3, remark 2;
    Sutskever's form, equations 1 and 2, has it inside). The decay is the coupled one (L2), on adapted tensors only.
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
        self,
        where: Range,
        weights: Array,
        gradient: Array,
        scale: float,
        rate: float,
        decay: float,
        working: Array | None,
    ) -> None:
        if not self.slots:
            updates.plain(weights, gradient, scale=scale, rate=rate, decay=decay, working=working)
            return
        updates.momentum(
            weights,
            gradient,
            self.slots["momentum"].range(where),
            scale=scale,
            rate=rate,
            momentum=self.config.momentum,
            nesterov=self.config.nesterov,
            decay=decay,
            working=working,
        )
