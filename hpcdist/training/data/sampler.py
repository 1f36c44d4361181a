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


class Sampler:
    """Endless training samples: each epoch takes every sample once, in its own order, at its own shift and masks."""

    def __init__(self, samples: Samples, seed: int, rule: int = UNIFORM) -> None:
        assert rule in RULES
        self._samples, self._seed, self._rule = samples, seed, rule
        self._epoch, self._order = -1, np.empty(0, np.int64)  # the order that was drawn last

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
        # Raw words of the generator, which no version of numpy changes.
        generator = rng.stream(self._seed, ORDER_STREAM, epoch).bit_generator
        raw = generator.random_raw(ROUNDS + 2)
        shift, total = int(raw[ROUNDS]) % self._samples.shifts, self._samples.count
        if self._rule == UNIFORM and total <= DRAWN_SAMPLES:
            if epoch != self._epoch:
                self._epoch, self._order = epoch, drawn(generator.random_raw(total))
            return self._order[start : start + count], shift
        order = permute(np.arange(start, start + count), total, raw[:ROUNDS])
        return exchanged(order) if self._rule == UNIFORM and raw[ROUNDS + 1] & np.uint64(1) else order, shift


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
