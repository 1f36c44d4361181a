"""Deep gradient compression: top-k of a velocity that each rank accumulates, Lin et al. 2018 (arXiv:1712.01887).

For one tensor on one rank, with the gradient g clipped there by limit / sqrt(ranks):

    u <- m u + g,         v <- v + u         momentum correction; Nesterov's: u <- m (u + g), v <- v + u + g
    send the k largest of |v|; v <- 0 and u <- 0 at their indices     masking

and all ranks step by the sum (or mean) of what was sent, without momentum of their own: it is in v already. What is
not sent stays in v and is sent later, so v takes the place of error feedback. Payloads are sparse: 8 k bytes.

Masking u keeps a velocity from carrying an element on in the direction of a gradient that is long applied. It also
means that where everything is sent u begins every step at 0, and the steps are those of SGD without momentum (1 + m
times as long for Nesterov's). With ``masks_velocity`` off they are those of momentum SGD, up to rounding. The share
that is sent begins at 1/4 and falls by 4 each stage (sparsity 75, 93.75, 98.4375, 99.6 %) until it is the one asked
for (the paper's: 99.9 %).

A step that will be skipped must not reach `accumulate`: agree on overflow before.
"""

from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from hpcdist.arrays import backend
from hpcdist.arrays.backend import Array, is_device
from hpcdist.arrays.jit import jit
from hpcdist.compression.sparsify import coo, topk
from hpcdist.errors import UsageError

WARMUP_STAGES: Final = 4


def density_at(stage: int, final: float) -> float:
    """Return the share of elements that is sent in ``stage``, an epoch in the paper; it is never below ``final``."""
    coo.check_density(final)
    return max(final, 0.25 ** (stage + 1)) if stage < WARMUP_STAGES else final


def clip_factor(norm_squared: float, limit: float, ranks: int) -> float:
    """Return what this rank multiplies its gradient by, so that its norm is at most ``limit`` / sqrt(``ranks``).

    Then the sum of independent gradients of so many ranks has about the norm ``limit``. 0 is no limit.
    """
    if ranks < 1 or limit < 0 or not 0 <= norm_squared < float("inf"):
        raise UsageError(
            f"a squared norm of {norm_squared}, a limit of {limit}, {ranks} ranks; pass a finite norm (look for "
            "overflow before), a limit of at least 0 and 1 rank or more"
        )
    norm = norm_squared**0.5
    allowed = limit / ranks**0.5
    return allowed / norm if limit > 0 and norm > allowed else 1.0


class DeepGradientCompression:
    """The state of one tensor of ``n`` elements on one rank: its ``velocity`` u and what is ``unsent``, v (local).

    They are ``held`` by somebody else, float32 (n,) each, or made here, of zeros.
    """

    def __init__(
        self,
        n: int,
        *,
        momentum: float,
        nesterov: bool = False,
        masks_velocity: bool = True,
        on: str = "cpu",
        held: tuple[Array, Array] | None = None,
    ) -> None:
        if not 0 <= momentum < 1:
            raise UsageError(f"momentum {momentum}; it is at least 0 and below 1")
        self.momentum, self.nesterov, self.masks_velocity = momentum, nesterov, masks_velocity
        self.velocity: Array
        self.unsent: Array
        self.velocity, self.unsent = held or [backend.zeros(n, np.dtype(np.float32), on) for _ in range(2)]

    def accumulate(self, gradient: Array, scale: float = 1.0) -> None:
        """Take ``scale`` times the float32 ``gradient`` (n,), which is kept.

        The scale is the product of `clip_factor` and, for a mean, 1 / ranks.
        """
        if gradient.dtype != np.float32 or gradient.shape != self.velocity.shape:
            raise UsageError(
                f"a gradient of {gradient.dtype} {gradient.shape} for a state of float32 {self.velocity.shape}; "
                "pass the float32 gradient of the same elements"
            )
        run = _accumulate_ufuncs if is_device(gradient) else _accumulate
        real = np.float32
        run(self.velocity, self.unsent, gradient, real(self.momentum), real(scale), self.nesterov)

    def encode(self, payload: Array) -> None:
        """Write the largest of what is unsent to the sparse ``payload`` (8 k,), and zero it in the state."""
        topk.select(self.unsent, payload)
        coo.clear(payload, self.unsent)
        if self.masks_velocity:
            coo.clear(payload, self.velocity)

    def release(self, out: Array) -> None:
        """Write all that is unsent to ``out`` (n,), and zero it in the state; the velocity stays as it is."""
        out[...] = self.unsent
        self.unsent[...] = 0

    def arrays(self) -> Mapping[str, Array]:
        """Return by name what a checkpoint keeps, float32 (n,) each."""
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
