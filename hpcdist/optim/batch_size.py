"""Batch-size schedule of the steps, and the gradient noise scale that bounds a useful batch size.

`BatchSchedule` says how many samples each step takes: always as many, or fewer at first. While the loss is high, the
noise of gradients is small beside them and small batches lose nothing: S. L. Smith et al., "Don't decay the learning
rate, increase the batch size" (arXiv:1711.00489). Steps take consecutive samples of the one global order, so that
each comes once, whatever the stages; where a step begins in that order follows from its number alone, on every rank,
at the start and at a resume. Light: imports nothing but the errors.

The gradient noise scale says how large a batch has to be before more samples a step help little.

S. McCandlish, J. Kaplan, D. Amodei et al., "An empirical model of large-batch training" (arXiv:1812.06162), appendix
A.1. The mean gradient g_B of B samples is the true one, G, and noise of the covariance Sigma / B:

    E |g_B|^2 = |G|^2 + tr(Sigma) / B

so two batch sizes, b < B, give both unknowns, each without bias:

    tr(Sigma) = (|g_b|^2 - |g_B|^2) / (1/b - 1/B)
    |G|^2     = |g_B|^2 - tr(Sigma) / B           = (B |g_B|^2 - b |g_b|^2) / (B - b)

and the noise scale B_simple = tr(Sigma) / |G|^2, in samples. Where the Hessian is a multiple of the identity it is
the critical batch: with B samples a step a run takes 1 + B_simple / B times the fewest steps that any batch needs,
and 1 + B / B_simple times the fewest samples (section 2.2). It grows while the loss falls.

Of several batches, with b_r samples and a share w_r in sum(w_r) = 1, the mean sum(w_r |g_r|^2) is that of a batch
with 1/b = sum(w_r / b_r). With w_r = b_r / B that is b = B / n for n of them, however uneven they are.

One step says little: the estimates are differences, and |G|^2 may come out negative. Both are averaged over steps,
each by itself, before they are divided: the mean of quotients would be biased, and need not exist.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from hpcdist.errors import ConfigurationError


@dataclass(frozen=True)
class BatchSchedule:
    """Batches of ``final`` samples, after those of ``stages``: (samples at which a stage ends, samples of a step)."""

    final: int
    stages: tuple[tuple[int, int], ...] = ()

    def size(self, step: int) -> int:
        """Return the samples of ``step``, counted from 0."""
        return next((size for first, last, size in self._steps() if first <= step < last), self.final)

    def samples_before(self, step: int) -> int:
        """Return how many samples the steps before ``step``, counted from 0, take together."""
        samples = after = 0
        for first, last, size in self._steps():
            samples, after = samples + size * (min(step, last) - min(step, first)), last
        return samples + self.final * max(0, step - after)

    def steps_for(self, samples: int) -> float:
        """Return how many steps take so many samples, the last perhaps a part of its own."""
        start = 0
        for end, size in self.stages:
            if samples <= end:
                return self._steps_before(start) + (samples - start) / size
            start = end
        return self._steps_before(start) + (samples - start) / self.final

    @property
    def smallest(self) -> int:
        """The samples of the smallest step."""
        return min([self.final, *(size for _, size in self.stages)])

    @property
    def sizes(self) -> list[int]:
        """The samples of a step of each stage, the final one last."""
        return [*(size for _, size in self.stages), self.final]

    def _steps(self) -> Iterator[tuple[int, int, int]]:
        """Yield (first step, step behind the last, samples of a step) of the stages before the final one."""
        start = first = 0
        for end, size in self.stages:
            last = first + (end - start) // size
            yield first, last, size
            start, first = end, last

    def _steps_before(self, end: int) -> int:
        """Return the number of steps up to the end of a stage."""
        ends = [end for end, _ in self.stages]
        return next((last for stop, (_, last, _) in zip(ends, self._steps(), strict=True) if stop == end), 0)


def staged_batches(final: int, warmup: Sequence[int]) -> BatchSchedule:
    """Return the batches of a recipe: ``warmup`` has, for each stage, the sample it ends at and the samples of a step.

    Raises ConfigurationError unless both grow and every stage is a whole number of steps.
    """
    given = f"run.batch_warmup = {list(warmup)}"
    if len(warmup) % 2:
        raise ConfigurationError(f"{given}; it must be pairs: samples at which a stage ends, samples of a step in it")
    stages = tuple(zip(warmup[::2], warmup[1::2], strict=True))
    for (start, _), (end, size) in pairwise([(0, 0), *stages]):
        if size < 1 or end <= start:
            raise ConfigurationError(
                f"{given}: a stage of {size} samples a step from {start} to {end} samples; a step takes at least one, "
                "and stages end one behind the other"
            )
        if (end - start) % size:
            near = start + max(1, round((end - start) / size)) * size
            raise ConfigurationError(
                f"{given}: from {start} to {end} samples is no whole number of steps of {size}; let the stage end at "
                f"{near}"
            )
    for smaller, larger in pairwise([*(size for _, size in stages), final]):
        if smaller >= larger:
            raise ConfigurationError(
                f"{given} with run.global_batch = {final}: after steps of {smaller} samples come steps of {larger}; "
                "each stage must have larger ones, and the last those of global_batch"
            )
    return BatchSchedule(final, stages)


SMOOTHING: Final = 0.98  # the weight of all measurements before in the mean: some 50 of them count


@dataclass(frozen=True)
class NoiseEstimate:
    """The squared norm of the true gradient, and the trace of the covariance of one sample's."""

    gradient_squared: float
    trace: float

    @property
    def noise_scale(self) -> float:
        """The noise scale in samples; NaN where the gradient is not above the error of its estimate."""
        return self.trace / self.gradient_squared if self.gradient_squared > 0.0 else math.nan


def estimate_noise(small_squared: float, inverse_small: float, big_squared: float, big: int) -> NoiseEstimate:
    """Return both from the squared norms of the mean gradients of 1 / ``inverse_small`` and of ``big`` samples."""
    trace = (small_squared - big_squared) / (inverse_small - 1.0 / big)
    return NoiseEstimate(big_squared - trace / big, trace)


class SmoothedNoise:
    """Exponential means of numerator and denominator, each by itself; the first estimates weigh as much as they are."""

    def __init__(self) -> None:
        self._weight = self._gradient_squared = self._trace = 0.0

    def add(self, found: NoiseEstimate) -> None:
        """Take the estimate of one step."""
        rest = 1.0 - SMOOTHING
        self._weight = SMOOTHING * self._weight + rest
        self._gradient_squared = SMOOTHING * self._gradient_squared + rest * found.gradient_squared
        self._trace = SMOOTHING * self._trace + rest * found.trace

    @property
    def mean(self) -> NoiseEstimate:
        """The means so far; NaN before the first."""
        if not self._weight:
            return NoiseEstimate(math.nan, math.nan)
        return NoiseEstimate(self._gradient_squared / self._weight, self._trace / self._weight)

    def state(self) -> dict[str, float]:
        """Return what a checkpoint keeps."""
        return {"weight": self._weight, "gradient_squared": self._gradient_squared, "trace": self._trace}

    def restore(self, state: Mapping[str, float]) -> None:
        """Take back what `state` returned; nothing, of a run that measured nothing so far."""
        self._weight = float(state.get("weight", 0.0))
        self._gradient_squared, self._trace = float(state.get("gradient_squared", 0)), float(state.get("trace", 0))
