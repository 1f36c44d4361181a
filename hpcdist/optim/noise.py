"""The gradient noise scale: how large a batch has to be before more samples a step help little.

S. McCandlish, J. Kaplan, D. Amodei et al., "An empirical model of large-batch training" (arXiv:1812.06162), appendix
A.1. The mean gradient g_B of B samples is the true one, G, and noise of the covariance Sigma / B:

    E |g_B|^2 = |G|^2 + tr(Sigma) / B

so two batch sizes, b < B, give both unknowns, each without bias:

    tr(Sigma) = (|g_b|^2 - |g_B|^2) / (1/b - 1/B)
    |G|^2     = |g_B|^2 - tr(Sigma) / B           = (B |g_B|^2 - b |g_b|^2) / (B - b)

and the noise scale B_simple = tr(Sigma) / |G|^2, in samples. Where the Hessian is a multiple of the identity it is the
critical batch: with B samples a step a run takes 1 + B_simple / B times the fewest steps that any batch needs, and
1 + B / B_simple times the fewest samples (section 2.2). It grows while the loss falls.

Of several batches, with b_r samples and a share w_r in sum(w_r) = 1, the mean sum(w_r |g_r|^2) is that of a batch with
1/b = sum(w_r / b_r). With w_r = b_r / B that is b = B / n for n of them, however uneven they are.

One step says little: the estimates are differences, and |G|^2 may come out negative. Both are averaged over steps, each
by itself, before they are divided: the mean of quotients would be biased, and need not exist.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

SMOOTHING: Final = 0.98  # the weight of all measurements before in the mean: some 50 of them count


@dataclass(frozen=True)
class Estimate:
    """The squared norm of the true gradient, and the trace of the covariance of one sample's."""

    gradient_squared: float
    trace: float

    @property
    def noise_scale(self) -> float:
        """The noise scale in samples; NaN where the gradient is not above the error of its estimate."""
        return self.trace / self.gradient_squared if self.gradient_squared > 0.0 else math.nan


def estimate(small_squared: float, inverse_small: float, big_squared: float, big: int) -> Estimate:
    """Return both from the squared norms of the mean gradients of 1 / ``inverse_small`` and of ``big`` samples."""
    trace = (small_squared - big_squared) / (inverse_small - 1.0 / big)
    return Estimate(big_squared - trace / big, trace)


class Smoothed:
    """Exponential means of numerator and denominator, each by itself; the first estimates weigh as much as they are."""

    def __init__(self) -> None:
        self._weight = self._gradient_squared = self._trace = 0.0

    def add(self, found: Estimate) -> None:
        """Take the estimate of one step."""
        rest = 1.0 - SMOOTHING
        self._weight = SMOOTHING * self._weight + rest
        self._gradient_squared = SMOOTHING * self._gradient_squared + rest * found.gradient_squared
        self._trace = SMOOTHING * self._trace + rest * found.trace

    @property
    def mean(self) -> Estimate:
        """The means so far; NaN before the first."""
        if not self._weight:
            return Estimate(math.nan, math.nan)
        return Estimate(self._gradient_squared / self._weight, self._trace / self._weight)

    def state(self) -> dict[str, float]:
        """Return what a checkpoint keeps."""
        return {"weight": self._weight, "gradient_squared": self._gradient_squared, "trace": self._trace}

    def restore(self, state: Mapping[str, float]) -> None:
        """Take back what `state` returned; nothing, of a run that measured nothing so far."""
        self._weight = float(state.get("weight", 0.0))
        self._gradient_squared, self._trace = float(state.get("gradient_squared", 0)), float(state.get("trace", 0))
