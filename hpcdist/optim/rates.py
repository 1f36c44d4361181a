"""Learning rate of each update (warm-up, decay, scaling to the batch size), and gradient noise scale.

The warm-up is linear (Goyal et al. 2017, arXiv:1706.02677, section 2.2). Then the rate falls from the peak to
``final_fraction`` of the peak, as the shape of the decay. x is the progress of the decay in [0, 1]:

    cosine        (1 + cos(pi x)) / 2    equation 5 of arXiv:1608.03983, without restarts
    polynomial    (1 - x)^power          linear for power 1
    1-sqrt        1 - sqrt(x)            Haegele et al. 2024, arXiv:2405.18392, section 3
    inverse_sqrt  sqrt(warm-up / update) Vaswani et al. 2017, arXiv:1706.03762, section 5.3; independent of run.steps
    constant      1

With ``decay_steps``, the rate is constant until the last ``decay_steps`` updates of the run (warm-up, stable, decay: Hu
et al. 2024, arXiv:2404.06395, section 4). A rate for b samples is scaled to B = k b samples:

    linear   k rate         sgd and lars (Goyal et al. 2017, section 2.1)
    sqrt     sqrt(k) rate   adamw and lamb (arXiv:2205.10287)

A warm-up over N samples takes N / B updates: update t has min(1, t B / N) of the peak. If the batch grows
(arXiv:1711.00489), each rate is scaled to the batch of its update.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import Final

from hpcdist.errors import ConfigurationError
from hpcdist.optim.config import OptimizerConfig, Scaling


@dataclass(frozen=True)
class BatchSchedule:
    """Number of samples of each step of a run. The number can grow in stages."""

    final: int  # samples per step after the last stage
    stages: tuple[tuple[int, int], ...] = ()  # (end in samples since the start of the run, samples per step)

    def size(self, step: int) -> int:
        """Return the number of samples in step number ``step``, counted from 0."""
        return next((size for first, last, size in self._steps() if first <= step < last), self.final)

    def samples_before(self, step: int) -> int:
        """Return the total number of samples in the steps 0 to ``step`` - 1."""
        samples = after = 0
        for first, last, size in self._steps():
            samples, after = samples + size * (min(step, last) - min(step, first)), last
        return samples + self.final * max(0, step - after)

    def steps_for(self, samples: int) -> float:
        """Return the number of steps, which may have a fraction, of the first ``samples`` samples of the run."""
        start = 0
        for end, size in self.stages:
            if samples <= end:
                return self._steps_before(start) + (samples - start) / size
            start = end
        return self._steps_before(start) + (samples - start) / self.final

    @property
    def sizes(self) -> list[int]:
        """Samples per step in each growth stage, in time order, and finally after the last stage."""
        return [*(size for _, size in self.stages), self.final]

    def _steps(self) -> Iterator[tuple[int, int, int]]:
        # (first step, end step, samples per step) of each growth stage
        start = first = 0
        for end, size in self.stages:
            last = first + (end - start) // size
            yield first, last, size
            start, first = end, last

    def _steps_before(self, end: int) -> int:
        ends = [end for end, _ in self.stages]
        return next((last for stop, (_, last, _) in zip(ends, self._steps(), strict=True) if stop == end), 0)


def staged_batches(final: int, warmup: Sequence[int]) -> BatchSchedule:
    """Return the schedule of a global batch that grows in stages to ``final`` samples per step.

    ``warmup``: list (end, batch, end, batch, ...), with two numbers per stage. A stage has ``batch`` samples per step,
    and ends after ``end`` samples, counted from the start of the run. Raises ConfigurationError.
    """
    setting = f"run.batch_warmup = {list(warmup)}"
    if len(warmup) % 2:
        raise ConfigurationError(
            f"{setting} has an odd length, {len(warmup)}; expected two numbers per warm-up stage: the total number of "
            "samples at the end of the stage, and the samples per step, e.g. [3200, 32, 16000, 64]"
        )
    stages = tuple(zip(warmup[::2], warmup[1::2], strict=True))
    for (start, _), (end, size) in pairwise([(0, 0), *stages]):
        if size < 1 or end <= start:
            raise ConfigurationError(
                f"{setting} has a stage of {size} samples per step from sample {start} to sample {end}; a step must "
                "have at least 1 sample, and each stage must end after the previous stage"
            )
        if (end - start) % size:
            near = start + max(1, round((end - start) / size)) * size
            raise ConfigurationError(
                f"{setting}: the stage from sample {start} to sample {end} is not a whole number of steps of {size} "
                f"samples; let this stage end at sample {near}"
            )
    for smaller, larger in pairwise([*(size for _, size in stages), final]):
        if smaller >= larger:
            raise ConfigurationError(
                f"{setting} does not fit run.global_batch = {final}: the samples per step must increase from stage to "
                f"stage, up to run.global_batch, but {smaller} samples per step are followed by {larger}"
            )
    return BatchSchedule(final, stages)


SMOOTHING: Final = 0.98  # weight of earlier measurements in the mean: about 50 of them count


@dataclass(frozen=True)
class NoiseEstimate:
    """Estimates of the squared norm of the true gradient, and of the trace of the covariance of sample gradients."""

    gradient_squared: float
    trace: float

    @property
    def noise_scale(self) -> float:
        """Gradient noise scale (arXiv:1812.06162) in samples, or NaN if ``gradient_squared`` is not positive."""
        # If the Hessian is a multiple of the identity, a run with B samples per step takes 1 + noise_scale / B times
        # the smallest number of steps, and 1 + B / noise_scale times the smallest number of samples.
        return self.trace / self.gradient_squared if self.gradient_squared > 0.0 else math.nan


def estimate_noise(small_squared: float, inverse_small: float, big_squared: float, big: int) -> NoiseEstimate:
    """Estimate the gradient noise from the mean gradients of a small and a big batch.

    ``small_squared``, ``big_squared``: squared norms of the two mean gradients. ``inverse_small``: 1 / (number of
    samples in the small batch). ``big``: number of samples in the big batch.
    """
    # The mean gradient g_B of B samples is the true gradient G plus noise of covariance Sigma / B. Two sizes b < B give
    # unbiased estimates (McCandlish et al., arXiv:1812.06162, appendix A.1):
    #     tr(Sigma) = (|g_b|^2 - |g_B|^2) / (1/b - 1/B);  |G|^2 = |g_B|^2 - tr(Sigma) / B
    # Batches of b_r samples with weights w_r, sum(w_r) = 1: 1/b = sum(w_r / b_r), |g_b|^2 = sum(w_r |g_r|^2).
    trace = (small_squared - big_squared) / (inverse_small - 1.0 / big)
    return NoiseEstimate(big_squared - trace / big, trace)


class SmoothedNoise:
    """Exponential moving averages of `NoiseEstimate` over steps, corrected for the initial value 0."""

    def __init__(self) -> None:
        self._weight = self._gradient_squared = self._trace = 0.0

    def add(self, estimate: NoiseEstimate) -> None:
        """Update the moving averages with the estimate of one training step."""
        rest = 1.0 - SMOOTHING
        self._weight = SMOOTHING * self._weight + rest
        self._gradient_squared = SMOOTHING * self._gradient_squared + rest * estimate.gradient_squared
        self._trace = SMOOTHING * self._trace + rest * estimate.trace

    @property
    def mean(self) -> NoiseEstimate:
        """The moving averages, as a `NoiseEstimate` with NaN before the first call of `add`."""
        if not self._weight:
            return NoiseEstimate(math.nan, math.nan)
        return NoiseEstimate(self._gradient_squared / self._weight, self._trace / self._weight)

    def state(self) -> dict[str, float]:
        """Return the moving averages as a dict of numbers, to save in a checkpoint."""
        return {"weight": self._weight, "gradient_squared": self._gradient_squared, "trace": self._trace}

    def restore(self, state: Mapping[str, float]) -> None:
        """Restore the moving averages from ``state``, a result of `state`. An empty dict resets the averages."""
        self._weight = float(state.get("weight", 0.0))
        self._gradient_squared, self._trace = float(state.get("gradient_squared", 0)), float(state.get("trace", 0))


# rule -> factor of the rate for a batch that is ``growth`` times as large
RULES: Final[dict[Scaling, Callable[[float], float]]] = {
    "none": lambda growth: 1.0,
    "linear": lambda growth: growth,
    "sqrt": lambda growth: growth**0.5,
}


@dataclass(frozen=True, kw_only=True)
class StagedOptimizerConfig(OptimizerConfig):
    """Optimizer settings from `resolve_rate` for a batch that grows. ``learning_rate`` is for the final batch size."""

    batches: BatchSchedule
    rule: Scaling  # adapts the learning rate to earlier batch sizes
    ramp_samples: int  # learning-rate warm-up in samples; 0: use ``warmup_steps``

    def growth(self, update: int) -> float:
        """Return the factor of the learning rate for the batch size in update number ``update``, counted from 1."""
        return RULES[self.rule](self.batches.size(update - 1) / self.batches.final)

    def ramp(self, update: int) -> float:
        """Return the fraction of the peak learning rate in warm-up update number ``update``, counted from 1."""
        if self.ramp_samples:
            return min(1.0, self.batches.samples_before(update) / self.ramp_samples)
        return update / self.warmup_steps


def resolve_rate(config: OptimizerConfig, batches: BatchSchedule) -> OptimizerConfig:
    """Return a copy of ``config`` whose peak learning rate is scaled from ``base_batch`` to the size of ``batches``."""
    # The result has the warm-up in updates.
    growth = batches.final / config.base_batch if config.base_batch else 1.0
    warmup = batches.steps_for(config.warmup_samples) if config.warmup_samples else config.warmup_steps
    rate = config.learning_rate * RULES[config.scaling](growth)
    resolved = replace(config, learning_rate=rate, base_batch=0, scaling="none", warmup_steps=warmup, warmup_samples=0)
    if not batches.stages:
        return resolved
    values = {item.name: getattr(resolved, item.name) for item in fields(resolved)}
    return StagedOptimizerConfig(**values, batches=batches, rule=config.scaling, ramp_samples=config.warmup_samples)


def describe_rate(config: OptimizerConfig, batches: BatchSchedule) -> str:
    """Return a log text about batch growth, learning rate scaling and warm-up in samples, or "" if all are off."""
    resolved, parts = resolve_rate(config, batches), []
    if batches.stages:
        last = batches.stages[-1][0]
        parts.append(f"steps of {', '.join(map(str, batches.sizes))} samples, the last from sample {last} on")
    if config.base_batch:
        parts.append(
            f"learning rate {resolved.learning_rate:g} at its peak: {config.learning_rate:g} of a batch of "
            f"{config.base_batch} samples, scaled to {batches.final} ({config.scaling})"
        )
    if config.warmup_samples:
        parts.append(f"warm-up over {config.warmup_samples} samples: {resolved.warmup_steps:g} updates")
    return "; ".join(parts)


# fraction of the way from the final rate to the peak, by the progress in [0, 1] of the decay
SHAPES: Final[dict[str, Callable[[float, float], float]]] = {
    "cosine": lambda progress, power: 0.5 * (1.0 + math.cos(math.pi * progress)),
    "polynomial": lambda progress, power: (1.0 - progress) ** power,
    "1-sqrt": lambda progress, power: 1.0 - math.sqrt(progress),
    "constant": lambda progress, power: 1.0,
}


def learning_rate(config: OptimizerConfig, update: int, total_steps: int) -> float:
    """Return the learning rate of update number ``update``, which counts from 1 to ``total_steps``."""
    assert not (config.base_batch or config.warmup_samples), "call resolve_rate first"
    peak, ramp = config.learning_rate, update / config.warmup_steps if config.warmup_steps else 1.0
    if isinstance(config, StagedOptimizerConfig):
        peak, ramp = peak * config.growth(update), config.ramp(update)
    # The rate is highest at update ``warmup_steps``, which need not be an integer.
    if update <= config.warmup_steps:
        return peak * ramp
    if config.decay == "inverse_sqrt":
        return peak * math.sqrt(max(1.0, config.warmup_steps) / update)
    start = config.warmup_steps  # last update at the peak
    if config.decay_steps:
        start = max(start, total_steps - config.decay_steps)
    left = total_steps - start
    progress = min(1.0, max(0.0, (update - start) / left)) if left > 0 else 1.0
    share = SHAPES[config.decay](progress, config.power)
    return peak * (config.final_fraction + (1.0 - config.final_fraction) * share)
