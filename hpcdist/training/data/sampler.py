"""Which samples a batch holds: decided by the global sample index and the seed, never by the number of ranks."""

from collections.abc import Iterator
from typing import Final

import numpy as np

from hpcdist.arrays import rng
from hpcdist.arrays.ranges import Range, cut, split
from hpcdist.training.data.masking import Masked
from hpcdist.training.data.permutation import ROUNDS, drawn, exchanged, permute
from hpcdist.training.data.samples import Batch, Samples

ORDER_STREAM = 0x6F72646572  # names the random stream of the order, apart from those of the parameters
# Rules of the order. A run keeps the one that it began with: another in the midst of an epoch would repeat samples.
FEISTEL: Final = 1  # what checkpoints without a rule were made by: far from uniform below some hundred samples
UNIFORM: Final = 2
RULES: Final = (FEISTEL, UNIFORM)
DRAWN_SAMPLES: Final = 1 << 16  # up to so many an order is drawn and stored: 0.5 MiB, 8 ms an epoch (measured)


def share(samples: int, parts: int, part: int) -> Range:
    """Return the samples of ``part``: consecutive, and balanced to one sample; the first parts get one more."""
    return split(samples, parts, itemsize=1, align_bytes=1)[part]


def microbatches(batch: Batch, count: int) -> list[Batch]:
    """Cut a batch into ``count`` views of it; with fewer samples than that, the last are empty."""
    x, y = batch
    return [(x[part.slice], y[part.slice]) for part in split(len(x), count, itemsize=1, align_bytes=1)]


def shards(batch: Batch, each: int, count: int) -> list[Batch]:
    """Cut a batch into ``count`` views of ``each`` samples; the last may be empty, as on ranks with a shard less."""
    x, y = batch
    return [(x[first : first + each], y[first : first + each]) for first in range(0, count * each, each)]


class Order:
    """The order of so many samples in each epoch, by seed and rule: asked for any part of it, in any epoch."""

    def __init__(self, seed: int, samples: int, rule: int = UNIFORM) -> None:
        assert rule in RULES
        self._seed, self._samples, self._rule = seed, samples, rule
        self._epoch, self._drawn = -1, np.empty(0, np.int64)  # the order that was drawn last

    def places(self, epoch: int, start: int, count: int) -> tuple[np.ndarray, int]:
        """Return the samples (count,) from ``start`` on in the order of ``epoch``, and one more random word of it."""
        # Raw words of the generator, which no version of numpy changes.
        generator = rng.stream(self._seed, ORDER_STREAM, epoch).bit_generator
        words = generator.random_raw(ROUNDS + 2)
        keys, word, swap = words[:ROUNDS], int(words[ROUNDS]), int(words[ROUNDS + 1]) & 1
        if self._rule == UNIFORM and self._samples <= DRAWN_SAMPLES:
            if epoch != self._epoch:
                self._epoch, self._drawn = epoch, drawn(generator.random_raw(self._samples))
            return self._drawn[start : start + count], word
        places = permute(np.arange(start, start + count), self._samples, keys)
        return exchanged(places) if self._rule == UNIFORM and swap else places, word

    def indices(self, first: int, count: int) -> list[int]:
        """Return ``count`` samples from the global index ``first`` on: each epoch takes every one once."""
        indices: list[int] = []
        while len(indices) < count:
            epoch, start = divmod(first + len(indices), self._samples)
            part = min(count - len(indices), self._samples - start)
            indices += self.places(epoch, start, part)[0].tolist()
        return indices


class Sampler:
    """Endless training samples: each epoch takes every sample once, in its own order, at its own shift and masks."""

    def __init__(self, samples: Samples, seed: int, rule: int = UNIFORM) -> None:
        self._samples, self._seed, self._order = samples, seed, Order(seed, samples.count, rule)

    def batch(self, first: int, count: int) -> Batch:
        """Return ``count`` samples from the global index ``first`` on, counted from the start of the run."""
        parts = []
        while count > 0:
            epoch, start = divmod(first, self._samples.count)
            taken = min(count, self._samples.count - start)
            samples = self._samples
            if isinstance(samples, Masked):
                samples = samples.in_epoch(self._seed, epoch)
            parts.append(samples.take(*self.places(epoch, start, taken)))
            first, count = first + taken, count - taken
        if len(parts) == 1:
            return parts[0]
        if not parts:
            return self._samples.take(np.empty(0, np.int64), 0)
        return np.concatenate([x for x, _ in parts]), np.concatenate([y for _, y in parts])

    def places(self, epoch: int, start: int, count: int) -> tuple[np.ndarray, int]:
        """Return the samples (count,) from ``start`` on in the order of ``epoch``, and the shift of that epoch."""
        places, word = self._order.places(epoch, start, count)
        return places, word % self._samples.shifts


def in_order(samples: Samples, limit: int, parts: int, part: int, longest: int) -> Iterator[Batch]:
    """Yield the batches of ``part`` of the samples at shift 0, each of at most ``longest`` samples.

    At most ``limit`` samples are taken by all parts together (0: all), spread evenly. All parts together yield the same
    samples whatever their number, and the same number of batches each: the last may be empty.
    """
    total = min(limit or samples.count, samples.count)
    chunks = list(cut(share(total, parts, part), longest))
    most = -(-share(total, parts, 0).size // longest)
    for chunk in chunks + [Range(total, total)] * (most - len(chunks)):
        indices = np.arange(chunk.start, chunk.stop)
        yield samples.take(indices if total == samples.count else indices * samples.count // total, 0)
