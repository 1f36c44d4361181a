"""Deep gradient compression: top-k of a velocity that each rank accumulates, Lin et al. 2018 (arXiv:1712.01887).

For one tensor on one rank, with momentum m, velocity u, unsent values v, and a gradient g that this rank has clipped to
limit / sqrt(ranks):

    u <- m u + g,         v <- v + u         momentum correction; Nesterov's: u <- m (u + g), v <- v + u + g
    send the k largest of |v|; v <- 0 and u <- 0 at their indices     masking

All ranks then step by the sum (or mean) of the sent values, without momentum, because v contains it. v replaces error
feedback. Do not call `accumulate` for a step that will be skipped.
"""

from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from hpcdist.arrays import backend
from hpcdist.arrays.backend import Array, is_device
from hpcdist.arrays.jit import jit
from hpcdist.compression import coo, topk
from hpcdist.errors import UsageError

WARMUP_STAGES: Final = 4


def density_at(stage: int, final: float) -> float:
    """Return the fraction of elements to send in warm-up stage number ``stage``: 1/4, 1/16, ..., at least ``final``."""
    coo.check_density(final)
    return max(final, 0.25 ** (stage + 1)) if stage < WARMUP_STAGES else final


def clip_factor(norm_squared: float, limit: float, ranks: int) -> float:
    """Return the factor, at most 1, that reduces a gradient norm to ``limit`` / sqrt(``ranks``).

    ``norm_squared``: square of the gradient norm. ``limit`` 0 means no limit.
    """
    if ranks < 1 or limit < 0 or not 0 <= norm_squared < float("inf"):
        raise UsageError(
            f"clipping got a squared norm of {norm_squared}, a limit of {limit} and {ranks} ranks; pass a finite "
            "norm (check for overflow first), a limit of at least 0 and at least 1 rank"
        )
    norm = norm_squared**0.5
    allowed = limit / ranks**0.5
    return allowed / norm if limit > 0 and norm > allowed else 1.0


class DeepGradientCompression:
    """State of deep gradient compression for a tensor of ``n`` elements: velocity and unsent values."""

    def __init__(
        self,
        n: int,
        *,
        momentum: float,
        nesterov: bool = False,
        masks_velocity: bool = True,
        on: str = "cpu",
        held: tuple[Array, Array] | None = None,  # existing arrays for both states
    ) -> None:
        if not 0 <= momentum < 1:
            raise UsageError(f"momentum must be at least 0 and below 1, got {momentum}")
        self.momentum, self.nesterov, self.masks_velocity = momentum, nesterov, masks_velocity
        self.velocity: Array
        self.unsent: Array
        self.velocity, self.unsent = held or [backend.zeros(n, np.dtype(np.float32), on) for _ in range(2)]

    def accumulate(self, gradient: Array, scale: float = 1.0) -> None:
        """Update the velocity and the unsent values with ``scale`` times the float32 ``gradient`` of shape (n,)."""
        if gradient.dtype != np.float32 or gradient.shape != self.velocity.shape:
            raise UsageError(
                f"got a {gradient.dtype} gradient of shape {gradient.shape}; pass a float32 gradient of shape "
                f"{self.velocity.shape}, the shape of this state"
            )
        # `scale` is the result of `clip_factor`, divided by the number of ranks to average gradients.
        run = _accumulate_ufuncs if is_device(gradient) else _accumulate
        real = np.float32
        run(self.velocity, self.unsent, gradient, real(self.momentum), real(scale), self.nesterov)

    def encode(self, payload: Array) -> None:
        """Move the k unsent values of largest magnitude to ``payload``. Its size of 8 k bytes determines k."""
        topk.select(self.unsent, payload)
        coo.clear(payload, self.unsent)
        # momentum factor masking
        if self.masks_velocity:
            coo.clear(payload, self.velocity)

    def release(self, out: Array) -> None:
        """Copy all unsent values to ``out``, of shape (n,), and set the unsent values to 0."""
        out[...] = self.unsent
        self.unsent[...] = 0

    def arrays(self) -> Mapping[str, Array]:
        """Return a dict {name: float32 array of shape (n,)} to save in a checkpoint."""
        return {"velocity": self.velocity, "unsent": self.unsent}


@jit
def _accumulate(velocity: Any, unsent: Any, gradient: Any, momentum: Any, scale: Any, nesterov: Any) -> None:
    if nesterov:
        for i in range(gradient.size):
            g = gradient[i] * scale
            fast = momentum * (velocity[i] + g)
            velocity[i] = fast
            unsent[i] = (unsent[i] + fast) + g
    else:
        for i in range(gradient.size):
            fast = momentum * velocity[i] + gradient[i] * scale
            velocity[i] = fast
            unsent[i] += fast


def _accumulate_ufuncs(velocity: Any, unsent: Any, gradient: Any, momentum: Any, scale: Any, nesterov: Any) -> None:
    scaled = gradient * scale
    if nesterov:
        velocity += scaled
        velocity *= momentum
        unsent += velocity
        unsent += scaled
    else:
        velocity *= momentum
        velocity += scaled
        unsent += velocity


_two = np.ones(2, np.float32)
_accumulate.sample(lambda: (_two.copy(), _two.copy(), _two, np.float32(0.5), np.float32(1), False))
