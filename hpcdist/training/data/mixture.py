"""Mixtures of sources: the source of each sample of a run, by weights, as a function of the seed and sample number.

The weights divide [0, 1) into one interval per source. Sample n belongs to the source whose interval contains the point
frac(u + n / golden ratio), where u depends on the seed. These points are spread evenly (Kronecker sequence): the number
of a source's samples among the first n is n * weight + O(log n). A floor sum counts them in O(log n) steps, so a sample
needs no state, and a resume replays no earlier samples.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from itertools import accumulate
from typing import Any, Final, cast

import numpy as np

from hpcdist.arrays import rng
from hpcdist.arrays.backend import ArrayGroup
from hpcdist.training.data.sampler import UNIFORM, Sampler, joined
from hpcdist.training.data.samples import Batch, FilledSamples, Samples

MIXTURE_STREAM: Final = 0x6D697874757265  # key of the random stream of mixtures
_UNIT: Final = 1 << 64  # the points are integers below this number
_STEP: Final = 0x9E3779B97F4A7C15  # _UNIT / golden ratio


def floor_sum(count: int, divisor: int, factor: int, offset: int) -> int:
    """Return the sum over i = 0 to ``count - 1`` of floor((``factor`` * i + ``offset``) / ``divisor``)."""
    # As in Euclid's algorithm, the divisor and the factor change places. All arguments are at least 0.
    total = 0
    while True:
        quotient, factor = divmod(factor, divisor)
        total += count * (count - 1) // 2 * quotient
        quotient, offset = divmod(offset, divisor)
        total += count * quotient
        last = factor * count + offset
        if last < divisor:
            return total
        count, offset = divmod(last, divisor)
        divisor, factor = factor, divisor


class MixedSamples:
    """Samples of several ``parts``, numbered part after part. ``weights``: share of each part in the training."""

    shifts = 1

    def __init__(self, parts: Sequence[Samples], weights: Sequence[float]) -> None:
        self.parts, self.weights = parts, weights
        self.firsts = [0, *accumulate(part.count for part in parts)]
        self.count = self.firsts[-1]

    def take(self, indices: np.ndarray, shift: int) -> Batch:
        numbers = self._parts_of(indices)
        pieces = [(n, part.take(indices[numbers == n] - self.firsts[n], 0)) for n, part in enumerate(self.parts)]
        return _in_order([piece for n, piece in pieces if len(piece[0])] or [pieces[0][1]], numbers)

    def filled(self, indices: np.ndarray) -> np.ndarray:
        numbers, filled = self._parts_of(indices), np.empty(len(indices), np.int64)
        for n, part in enumerate(self.parts):
            filled[numbers == n] = cast(FilledSamples, part).filled(indices[numbers == n] - self.firsts[n])
        return filled

    def targets(self, indices: np.ndarray) -> int:
        numbers = self._parts_of(indices)
        members = [(part, indices[numbers == n] - self.firsts[n]) for n, part in enumerate(self.parts)]
        return sum(cast(FilledSamples, part).targets(members_of_part) for part, members_of_part in members)

    def _parts_of(self, indices: np.ndarray) -> np.ndarray:
        return np.searchsorted(self.firsts, indices, "right") - 1


@dataclass(frozen=True)
class SourceOrder:
    """Order of the sources in a run with ``seed``. ``weights``: positive weight of each source."""

    seed: int
    weights: tuple[float, ...]

    def before(self, first: int) -> list[int]:
        """Return the number of samples of each source among samples 0 to ``first - 1`` of the run."""
        borders, origin = self._borders, self._origin
        passed = floor_sum(first, _UNIT, _STEP, origin)
        below = [first + passed - floor_sum(first, _UNIT, _STEP, origin + _UNIT - border) for border in borders]
        return [count - previous for count, previous in zip(below, [0, *below], strict=False)]

    def sources(self, first: int, count: int) -> np.ndarray:
        """Return an array with the source number of each of ``count`` samples, from sample ``first`` of the run on."""
        begin = np.uint64((self._origin + first * _STEP) % _UNIT)
        points = np.arange(count, dtype=np.uint64) * np.uint64(_STEP) + begin  # modulo 2^64
        return np.searchsorted(np.array(self._borders[:-1], np.uint64), points, "right")

    @cached_property
    def _origin(self) -> int:
        return int(rng.stream(self.seed, MIXTURE_STREAM).bit_generator.random_raw())

    @cached_property
    def _borders(self) -> list[int]:
        # Exact fractions: the borders do not depend on the rounding of sums.
        sums = list(accumulate(map(Fraction, self.weights)))
        return [int(part * _UNIT / sums[-1]) for part in sums]


class MixedSampler:
    """Reader of batches of a mixture. Each source has endless epochs, as in `Sampler`."""

    def __init__(self, samples: MixedSamples, seed: int, rule: int = UNIFORM) -> None:
        self._samples, self._order = samples, SourceOrder(seed, tuple(samples.weights))
        # Sources with the same files must not have the same order.
        seeds = rng.stream(seed, MIXTURE_STREAM, 1).bit_generator.random_raw(len(samples.parts)).tolist()
        self._samplers = [Sampler(part, one, rule) for part, one in zip(samples.parts, seeds, strict=True)]

    def batch(self, first: int, count: int) -> Batch:
        """Return a batch of ``count`` samples from position ``first`` on, where the run starts at position 0."""
        numbers, begins = self._order.sources(first, count), self._order.before(first)
        sizes = np.bincount(numbers, minlength=len(begins)).tolist()
        parts = zip(self._samplers, begins, sizes, strict=True)
        pieces = [sampler.batch(begin, size) for sampler, begin, size in parts if size]
        return _in_order(pieces or [self._samplers[0].batch(0, 0)], numbers)

    def indices(self, first: int, count: int) -> list[int]:
        """Return a list of the ``count`` sample indices of a batch from position ``first`` on, as in `MixedSamples`."""
        numbers, indices = self._order.sources(first, count), np.empty(count, np.int64)
        for n, begin in enumerate(self._order.before(first)):
            in_part = numbers == n
            part = self._samplers[n].indices(begin, int(in_part.sum()))
            indices[in_part] = np.array(part, np.int64) + self._samples.firsts[n]
        return indices.tolist()


def sampler_of(samples: Samples, seed: int, rule: int = UNIFORM) -> Sampler | MixedSampler:
    """Return the reader of the batches of a run on ``samples``. ``rule``: the algorithm of the order (`RULES`)."""
    return (MixedSampler if isinstance(samples, MixedSamples) else Sampler)(cast(Any, samples), seed, rule)


def _in_order(pieces: Sequence[Batch], numbers: np.ndarray) -> Batch:
    # ``pieces`` have the samples by ascending source number; sample i of the result has the source ``numbers[i]``.
    places = np.empty(len(numbers), np.int64)
    places[np.argsort(numbers, kind="stable")] = np.arange(len(numbers))
    inputs, targets = joined([x for x, _ in pieces]), joined([y for _, y in pieces])
    whole: Any = inputs.map(lambda array: array[places]) if isinstance(inputs, ArrayGroup) else inputs[places]
    return whole, targets[places]
