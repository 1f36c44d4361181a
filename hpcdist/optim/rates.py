"""Learning rate of each update: warm-up and decay, and scaling of the rate and the warm-up to the batch size.

Also the batch sizes of the steps, and the gradient noise scale that bounds a useful batch size. Light: imports nothing
but the errors.

The warm-up is linear, then follows a cosine, polynomial or constant decay. Warm-up is that of Goyal et al. 2017
(arXiv:1706.02677), section 2.2, the cosine equation 5 of Loshchilov & Hutter 2017 (SGDR, arXiv:1608.03983) without
restarts. Updates count from 1 and include neither skipped ones nor micro-batches.

A rate is tuned for some batch of b samples. For B = k b samples the first guess, to be tuned again, is

    linear   k rate         sgd and lars: k steps of b and one step of B move as far, while gradients change little
                            (Goyal et al. 2017, arXiv:1706.02677, section 2.1; Krizhevsky 2014, arXiv:1404.5997)
    sqrt     sqrt(k) rate   adamw and lamb: their step has the length of the gradient's noise divided out, which is
                            1 / sqrt(k) as large (Malladi et al. 2022, arXiv:2205.10287; You et al., arXiv:1904.00962)

Either ends where the batch reaches the critical one (see below): beyond, more samples a step help little at any rate.
A warm-up over N samples is N / B updates: update t has min(1, t B / N) of the peak, so that the rate after as many
samples is the same share of it for every B. Where the batch grows in the run, the rate of each update is scaled to its
own batch, and the warm-up counts the samples that were really taken.

`BatchSchedule` says how many samples each step takes: always as many, or fewer at first. While the loss is high, the
noise of gradients is small beside them and small batches lose nothing: S. L. Smith et al., "Don't decay the learning
rate, increase the batch size" (arXiv:1711.00489). Steps take consecutive samples of the one global order, so that
each comes once, whatever the stages; where a step begins in that order follows from its number alone, on every rank,
at the start and at a resume.

Gradient noise scale: S. McCandlish, J. Kaplan, D. Amodei et al., "An empirical model of large-batch training"
(arXiv:1812.06162), appendix A.1. The mean gradient g_B of B samples is the true one, G, and noise of the covariance
Sigma / B, so two batch sizes, b < B, give both unknowns, each without bias:

    E |g_B|^2 = |G|^2 + tr(Sigma) / B
    tr(Sigma) = (|g_b|^2 - |g_B|^2) / (1/b - 1/B)
    |G|^2     = |g_B|^2 - tr(Sigma) / B           = (B |g_B|^2 - b |g_b|^2) / (B - b)

and the noise scale B_simple = tr(Sigma) / |G|^2, in samples. Where the Hessian is a multiple of the identity it is
the critical batch: with B samples a step a run takes 1 + B_simple / B times the fewest steps that any batch needs,
and 1 + B / B_simple times the fewest samples (section 2.2). It grows while the loss falls. Of several batches, with
b_r samples and a share w_r in sum(w_r) = 1, the mean sum(w_r |g_r|^2) is that of a batch with 1/b = sum(w_r / b_r).
With w_r = b_r / B that is b = B / n for n of them, however uneven they are.

One step says little: the estimates are differences, and |G|^2 may come out negative. Both are averaged over steps,
each by itself, before they are divided: the mean of quotients would be biased, and need not exist.
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
    """Return the estimate from squared norms of the mean gradients of 1 / ``inverse_small`` and of ``big`` samples."""
    trace = (small_squared - big_squared) / (inverse_small - 1.0 / big)
    return NoiseEstimate(big_squared - trace / big, trace)


class SmoothedNoise:
    """Exponential means of numerator and denominator, each by itself, corrected for their start at 0."""

    def __init__(self) -> None:
        self._weight = self._gradient_squared = self._trace = 0.0

    def add(self, estimate: NoiseEstimate) -> None:
        """Take the estimate of one step."""
        rest = 1.0 - SMOOTHING
        self._weight = SMOOTHING * self._weight + rest
        self._gradient_squared = SMOOTHING * self._gradient_squared + rest * estimate.gradient_squared
        self._trace = SMOOTHING * self._trace + rest * estimate.trace

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


# rule -> what the rate is multiplied by, for a batch that is so many times as large
RULES: Final[dict[Scaling, Callable[[float], float]]] = {
    "none": lambda growth: 1.0,
    "linear": lambda growth: growth,
    "sqrt": lambda growth: growth**0.5,
}


@dataclass(frozen=True, kw_only=True)
class StagedOptimizerConfig(OptimizerConfig):
    """The section, resolved for ``batches`` that grow: its rate is that of the final ones.

    ``rule`` scales the rate of the others; ``ramp_samples`` are those of a warm-up that counts samples, 0 for updates.
    """

    batches: BatchSchedule
    rule: Scaling
    ramp_samples: int

    def growth(self, update: int) -> float:
        """Return what the rate of an update, counted from 1, is multiplied by."""
        return RULES[self.rule](self.batches.size(update - 1) / self.batches.final)

    def ramp(self, update: int) -> float:
        """Return the share of the peak in an update of the warm-up."""
        if self.ramp_samples:
            return min(1.0, self.batches.samples_before(update) / self.ramp_samples)
        return update / self.warmup_steps


def resolve_rate(config: OptimizerConfig, batches: BatchSchedule) -> OptimizerConfig:
    """Return ``config`` for updates of ``batches``: with the peak, and the warm-up in updates (local)."""
    growth = batches.final / config.base_batch if config.base_batch else 1.0
    warmup = batches.steps_for(config.warmup_samples) if config.warmup_samples else config.warmup_steps
    rate = config.learning_rate * RULES[config.scaling](growth)
    resolved = replace(config, learning_rate=rate, base_batch=0, scaling="none", warmup_steps=warmup, warmup_samples=0)
    if not batches.stages:
        return resolved
    values = {item.name: getattr(resolved, item.name) for item in fields(resolved)}
    return StagedOptimizerConfig(**values, batches=batches, rule=config.scaling, ramp_samples=config.warmup_samples)


def describe_rate(config: OptimizerConfig, batches: BatchSchedule) -> str:
    """Return a line for people on what `resolve_rate` changes in ``config``; "" where it is nothing (local)."""
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


# share of the way from the final rate to the peak, by progress in [0, 1] through the decay
SHAPES: Final[dict[str, Callable[[float, float], float]]] = {
    "cosine": lambda progress, power: 0.5 * (1.0 + math.cos(math.pi * progress)),
    "polynomial": lambda progress, power: (1.0 - progress) ** power,
    "constant": lambda progress, power: 1.0,
}


def learning_rate(config: OptimizerConfig, update: int, total_steps: int) -> float:
    """Return the rate of the ``update``-th update (1 is the first) of a run of ``total_steps``.

    The first update has a rate above 0, update ``warmup_steps`` the peak, update ``total_steps`` and all that follow
    the final one. A warm-up that is longer than the run is cut off, not compressed. It need not be a whole number of
    updates: then the peak lies between two. ``config`` comes from `resolve_rate` for the batches of the run; where
    they grow, so does the peak, by its rule.
    """
    assert not (config.base_batch or config.warmup_samples), "a rate per batch: see `scaling.resolved`"
    peak, ramp = config.learning_rate, update / config.warmup_steps if config.warmup_steps else 1.0
    if isinstance(config, StagedOptimizerConfig):
        peak, ramp = peak * config.growth(update), config.ramp(update)
    if update <= config.warmup_steps:
        return peak * ramp
    left = total_steps - config.warmup_steps
    progress = min(1.0, (update - config.warmup_steps) / left) if left > 0 else 1.0
    share = SHAPES[config.decay](progress, config.power)
    return peak * (config.final_fraction + (1.0 - config.final_fraction) * share)
