"""Assign samples to batches by seed and global index, and to replicas by even or measured shares.

`SampleOrder`: the order of an epoch is drawn uniformly where it is short. Longer ones are an alternating Feistel
network over the next power of two with cycle walking (Black and Rogaway, CT-RSA 2002), which needs no memory: fewer
than half of the images fall outside, so two passes are expected at most. Such a network makes even permutations only;
swapping two places by a random bit makes half of all odd.

`SampleShares` and `LoadBalancer`: a replica takes samples evenly or in proportion to its measured speed. The batch,
and so losses and weights up to rounding, stays the same. All ranks decide by the same numbers, and a new sharing
begins a few steps later, where no rank has read ahead yet.
"""

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import replace
from heapq import heapify, heapreplace
from typing import Any, Final

import numpy as np

from hpcdist.arrays import rng
from hpcdist.arrays.backend import ArrayGroup
from hpcdist.arrays.ranges import Range, cut, split
from hpcdist.comm.communicator import Communicator
from hpcdist.training.data.samples import Batch, MaskedSamples, Samples

ROUNDS = 8


def feistel_order(indices: np.ndarray, size: int, key: np.ndarray) -> np.ndarray:
    """Return the places of ``indices`` (n,) int64 in the permutation of ``size`` elements that ``key`` names.

    ``key`` (ROUNDS,) is uint64. Different indices below ``size`` get different places below ``size``.
    """
    assert size >= 1 and key.shape == (ROUNDS,) and key.dtype == np.uint64
    bits = (size - 1).bit_length()
    places = indices.astype(np.uint64)
    outside = np.ones(places.shape, bool)
    while outside.any():
        places[outside] = _feistel(places[outside], bits, key)
        outside = places >= np.uint64(size)
    return places.astype(np.int64)


def _feistel(values: np.ndarray, bits: int, key: np.ndarray) -> np.ndarray:
    """Permute the numbers of ``bits`` bits: each round changes one half by a hash of the other, so it can be undone."""
    low_bits = np.uint64(bits // 2)
    low_mask = np.uint64((1 << (bits // 2)) - 1)
    high_mask = np.uint64((1 << (bits - bits // 2)) - 1)
    low, high = values & low_mask, values >> low_bits
    for number in range(ROUNDS):
        if number % 2:
            low = low ^ (_mix(high, key[number]) & low_mask)
        else:
            high = high ^ (_mix(low, key[number]) & high_mask)
    return (high << low_bits) | low


def _mix(values: np.ndarray, key: np.uint64) -> np.ndarray:
    """Mix 64 bits (the finaliser of splitmix64; Steele et al., OOPSLA 2014)."""
    mixed = values ^ key
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


ORDER_STREAM = 0x6F72646572  # names the random stream of the order, apart from those of the parameters
# Rules of the order. A run keeps the one that it began with: another in the midst of an epoch would repeat samples.
FEISTEL: Final = 1  # what checkpoints without a rule were made by: far from uniform below some hundred samples
UNIFORM: Final = 2
RULES: Final = (FEISTEL, UNIFORM)
DRAWN_SAMPLES: Final = 1 << 16  # up to so many an order is drawn and stored: 0.5 MiB, 8 ms an epoch (measured)


def even_part(samples: int, parts: int, part: int) -> Range:
    """Return the samples of ``part`` of ``parts``: consecutive, of even sizes; the first parts get one more."""
    return split(samples, parts, itemsize=1, align_bytes=1)[part]


def microbatches(batch: Batch, count: int) -> list[Batch]:
    """Cut a batch into ``count`` views of it; with fewer samples than that, the last are empty."""
    x, y = batch
    return [(x[part.slice], y[part.slice]) for part in split(len(x), count, itemsize=1, align_bytes=1)]


def shards(batch: Batch, each: int, count: int) -> list[Batch]:
    """Cut a batch into ``count`` views of ``each`` samples; the last may be empty, as on ranks with a shard less."""
    x, y = batch
    return [(x[first : first + each], y[first : first + each]) for first in range(0, count * each, each)]


class SampleOrder:
    """Order of the samples in each epoch, by seed and rule; any part of it can be computed, of any epoch."""

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
                # All orders are equally likely unless two words are equal: for 2^16 words a chance of 1 in 2^33.
                self._epoch, self._drawn = epoch, np.argsort(generator.random_raw(self._samples), kind="stable")
            return self._drawn[start : start + count], word
        places = feistel_order(np.arange(start, start + count), self._samples, keys)
        swaps = self._rule == UNIFORM and swap  # 0 and 1
        return np.where(places < 2, 1 - places, places) if swaps else places, word

    def indices(self, first: int, count: int) -> list[int]:
        """Return ``count`` samples from the global index ``first`` on: each epoch takes every one once."""
        indices: list[int] = []
        while len(indices) < count:
            epoch, start = divmod(first + len(indices), self._samples)
            part = min(count - len(indices), self._samples - start)
            indices += self.places(epoch, start, part)[0].tolist()
        return indices


class Sampler:
    """Sampler of endless epochs: each takes every sample once, in its own order, at its own shift and masks."""

    def __init__(self, samples: Samples, seed: int, rule: int = UNIFORM) -> None:
        self._samples, self._seed, self._order = samples, seed, SampleOrder(seed, samples.count, rule)

    def batch(self, first: int, count: int) -> Batch:
        """Return ``count`` samples from the global index ``first`` on, counted from the start of the run."""
        parts = []
        while count > 0:
            epoch, start = divmod(first, self._samples.count)
            taken = min(count, self._samples.count - start)
            samples = self._samples
            if isinstance(samples, MaskedSamples):
                samples = samples.in_epoch(self._seed, epoch)
            parts.append(samples.take(*self.places(epoch, start, taken)))
            first, count = first + taken, count - taken
        if len(parts) == 1:
            return parts[0]
        if not parts:
            return self._samples.take(np.empty(0, np.int64), 0)
        return joined([x for x, _ in parts]), joined([y for _, y in parts])

    def places(self, epoch: int, start: int, count: int) -> tuple[np.ndarray, int]:
        """Return the samples (count,) from ``start`` on in the order of ``epoch``, and the shift of that epoch."""
        places, word = self._order.places(epoch, start, count)
        return places, word % self._samples.shifts


def joined(parts: Sequence[Any]) -> Any:
    """Return arrays (samples, ...), or groups of them, as one."""
    if isinstance(parts[0], ArrayGroup):
        arrays = zip(*(part.arrays for part in parts), strict=True)
        return replace(parts[0], arrays=tuple(np.concatenate(members) for members in arrays))
    return np.concatenate(parts)


def in_order(samples: Samples, limit: int, parts: int, part: int, longest: int) -> Iterator[Batch]:
    """Yield the batches of ``part`` of the samples at shift 0, each of at most ``longest`` samples.

    At most ``limit`` samples are taken by all parts together (0: all), spread evenly. All parts together yield the same
    samples whatever their number, and the same number of batches each: the last may be empty.
    """
    total = min(limit or samples.count, samples.count)
    chunks = list(cut(even_part(total, parts, part), longest))
    most = -(-even_part(total, parts, 0).size // longest)
    for chunk in chunks + [Range(total, total)] * (most - len(chunks)):
        indices = np.arange(chunk.start, chunk.stop)
        yield samples.take(indices if total == samples.count else indices * samples.count // total, 0)


BALANCE_EVERY_STEPS: Final = 16  # between two looks at the times; of those in between the median counts
LEAST_TIMINGS: Final = BALANCE_EVERY_STEPS // 2  # fewer of them, after a resume, hold too much of the first step
READ_AHEAD: Final = 4  # batches read beyond the last one in use at most, and one: see `prefetch.PREFETCH_DEPTH`
LEAST_GAIN: Final = 0.05  # a step must become so much shorter: noise alone changes nothing

ShareSizes = tuple[int, ...]  # samples of each replica, at least 1


def even_shares(samples: int, replicas: int) -> ShareSizes:
    """Share ``samples`` evenly; the first replicas get one more (local)."""
    return tuple(even_part(samples, replicas, replica).size for replica in range(replicas))


def balanced_shares(samples: int, sample_s: Sequence[float]) -> ShareSizes:
    """Share ``samples`` so that the slowest replica is done as early as can be, each with at least one (local).

    ``sample_s`` is the time that a replica needs for a sample. Every sample goes to the replica that would be done with
    it first, of equals to the one that comes first: the greatest time is then the least possible.
    """
    assert samples >= len(sample_s) and all(seconds > 0 for seconds in sample_s)
    sizes = [1] * len(sample_s)
    ends = [(2 * seconds, replica) for replica, seconds in enumerate(sample_s)]  # with one sample more
    heapify(ends)
    for _ in range(samples - len(sizes)):
        replica = ends[0][1]
        sizes[replica] += 1
        heapreplace(ends, ((sizes[replica] + 1) * sample_s[replica], replica))
    return tuple(sizes)


class SampleShares:
    """Shares of the replicas in the batch of each step. Local: all ranks hold equal ones.

    Batches are counted from 0: that of step s is ``s - 1``.
    """

    def __init__(self, samples: int, replicas: int) -> None:
        self._sizes = [(0, even_shares(samples, replicas))]  # (first batch, sizes), ascending

    def of(self, batch: int) -> ShareSizes:
        """Return the number of samples of each replica."""
        return next(sizes for first, sizes in reversed(self._sizes) if first <= batch)

    def own(self, batch: int, replica: int) -> Range:
        """Return the samples of ``replica`` as a range of the batch."""
        sizes = self.of(batch)
        start = sum(sizes[:replica])
        return Range(start, start + sizes[replica])

    @property
    def newest(self) -> ShareSizes:
        """The sizes that were decided last, perhaps for batches to come."""
        return self._sizes[-1][1]

    def change(self, first: int, sizes: ShareSizes) -> None:
        """Set ``sizes`` from batch ``first`` on, which no rank has read yet."""
        assert sum(sizes) == sum(self.newest) and first > self._sizes[-1][0]
        self._sizes.append((first, sizes))

    def forget(self, batch: int) -> None:
        """Drop the sizes of batches before ``batch``."""
        while len(self._sizes) > 1 and self._sizes[1][0] <= batch:
            del self._sizes[0]

    def state(self, batch: int) -> list[list[Any]]:
        """Return the sizes from ``batch`` on for a checkpoint: JSON values."""
        later = [[first, list(sizes)] for first, sizes in self._sizes if first > batch]
        return [[batch, list(self.of(batch))], *later]

    def restore(self, state: Sequence[Sequence[Any]]) -> bool:
        """Restore what `state` returned, if it was for as many replicas and samples; return whether it was."""
        restored = [(int(first), tuple(map(int, sizes))) for first, sizes in state]
        now = self._sizes[0][1]
        fits = bool(restored) and all(len(sizes) == len(now) and sum(sizes) == sum(now) for _, sizes in restored)
        fits = fits and all(first < later for (first, _), (later, _) in zip(restored, restored[1:], strict=False))
        if fits:
            self._sizes = [(0, restored[0][1]), *restored[1:]]
        return fits


class LoadBalancer:
    """Load balancer: changes ``shares`` by the times of the replicas.

    ``data`` joins the replicas of this rank's stages, ``pipeline`` the stages of its replica. Construction is local.
    """

    def __init__(self, data: Communicator, pipeline: Communicator, shares: SampleShares) -> None:
        self._data, self._pipeline, self._shares = data, pipeline, shares
        self._sample_s: list[float] = []

    def after(self, step: int, compute_s: float) -> bool:
        """Record the seconds that this rank computed in ``step``; return whether the shares changed.

        Collective over ``data`` and ``pipeline``, though most calls send nothing. The new shares are those of the steps
        of which no rank has read a batch ahead.
        """
        samples = self._shares.of(step - 1)[self._data.rank]
        self._sample_s.append(compute_s / samples)
        if step % BALANCE_EVERY_STEPS or len(self._sample_s) < LEAST_TIMINGS:
            return False
        own_s = statistics.median(self._sample_s)
        self._sample_s.clear()
        # A replica is as slow as its slowest stage; all of its stages must come to the same numbers.
        replica_s = max(self._pipeline.allgather_object(own_s))
        sample_s = self._data.allgather_object(replica_s)
        now = self._shares.newest
        wanted = balanced_shares(sum(now), sample_s) if min(sample_s) > 0 else now
        if _step_seconds(wanted, sample_s) >= (1 - LEAST_GAIN) * _step_seconds(now, sample_s):
            return False
        self._shares.forget(step - 1)
        self._shares.change(step + READ_AHEAD, wanted)
        return True


def _step_seconds(sizes: ShareSizes, sample_s: Sequence[float]) -> float:
    return max(size * seconds for size, seconds in zip(sizes, sample_s, strict=True))
