"""How many samples each step takes: always as many, or fewer at first.

While the loss is high, the noise of gradients is small beside them and small batches lose nothing
(`hpcdist.optim.noise`): S. L. Smith et al., "Don't decay the learning rate, increase the batch size"
(arXiv:1711.00489). Steps take consecutive samples of the one global order, so that each comes once, whatever the
stages; where a step begins in that order follows from its number alone, on every rank, at the start and at a resume.
Light: imports nothing but the errors.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from hpcdist.errors import ConfigurationError


@dataclass(frozen=True)
class Batches:
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


def staged(final: int, warmup: Sequence[int]) -> Batches:
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
    return Batches(final, stages)
