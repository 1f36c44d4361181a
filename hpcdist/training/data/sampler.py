"""Assignment of samples to batches by seed and global index, and to replicas by even or measured shares.

A long order is an alternating Feistel network over the next power of two with cycle walking (Black and Rogaway, CT-RSA
2002): no memory, and at most two expected passes. A random swap of positions 0 and 1 adds the odd permutations, which a
Feistel network cannot make.
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
    """Return the elements at positions ``indices`` of a random permutation of the integers 0 to ``size - 1``.

    ``indices``: int64 array. ``key``: uint64 array of ROUNDS random integers, which select the permutation.
    """
    assert size >= 1 and key.shape == (ROUNDS,) and key.dtype == np.uint64
    bits = (size - 1).bit_length()
    positions = indices.astype(np.uint64)
    outside = np.ones(positions.shape, bool)
    while outside.any():
        positions[outside] = _feistel(positions[outside], bits, key)
        outside = positions >= np.uint64(size)
    return positions.astype(np.int64)


def _feistel(values: np.ndarray, bits: int, key: np.ndarray) -> np.ndarray:
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
    # The finaliser of splitmix64 (Steele et al., OOPSLA 2014).
    mixed = values ^ key
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


ORDER_STREAM = 0x6F72646572  # key of the random stream of the order
# Rules of the order. A run keeps its first rule: a change within an epoch would repeat samples.
FEISTEL: Final = 1  # the rule of checkpoints without a stored rule: far from uniform below some hundred samples
UNIFORM: Final = 2
RULES: Final = (FEISTEL, UNIFORM)
DRAWN_SAMPLES: Final = 1 << 16  # up to this size an order is drawn and stored: 0.5 MiB, 8 ms an epoch (measured)


def even_part(samples: int, parts: int, part: int) -> Range:
    """Divide ``samples`` samples into ``parts`` even ranges, longer ranges first. Return range number ``part``."""
    return split(samples, parts, itemsize=1, align_bytes=1)[part]


def microbatches(batch: Batch, count: int) -> list[Batch]:
    """Split ``batch`` into a list of ``count`` views. With fewer than ``count`` samples, the last views are empty."""
    x, y = batch
    return [(x[part.slice], y[part.slice]) for part in split(len(x), count, itemsize=1, align_bytes=1)]


def shards(batch: Batch, size: int, count: int) -> list[Batch]:
    """Split ``batch`` into a list of ``count`` logical shards of ``size`` samples. The last shards may be empty."""
    x, y = batch
    return [(x[first : first + size], y[first : first + size]) for first in range(0, count * size, size)]


class SampleOrder:
    """Random orders of ``samples`` samples, a new order for each epoch. ``rule``: the algorithm, one of `RULES`."""

    def __init__(self, seed: int, samples: int, rule: int = UNIFORM) -> None:
        assert rule in RULES
        self._seed, self._samples, self._rule = seed, samples, rule
        self._epoch, self._drawn = -1, np.empty(0, np.int64)  # the last drawn order

    def epoch_indices(self, epoch: int, start: int, count: int) -> tuple[np.ndarray, int]:
        """Return (``count`` sample indices from position ``start`` of ``epoch`` on, random integer of the epoch).

        Callers shift the sample boundaries of the epoch by the random integer.
        """
        # Raw words do not change between versions of numpy.
        generator = rng.stream(self._seed, ORDER_STREAM, epoch).bit_generator
        words = generator.random_raw(ROUNDS + 2)
        keys, word, swap = words[:ROUNDS], int(words[ROUNDS]), int(words[ROUNDS + 1]) & 1
        if self._rule == UNIFORM and self._samples <= DRAWN_SAMPLES:
            if epoch != self._epoch:
                # All orders are equally likely unless two words collide: a chance of 1 in 2^33 for 2^16 words.
                self._epoch, self._drawn = epoch, np.argsort(generator.random_raw(self._samples), kind="stable")
            return self._drawn[start : start + count], word
        positions = feistel_order(np.arange(start, start + count), self._samples, keys)
        swaps = self._rule == UNIFORM and swap  # 0 and 1
        return np.where(positions < 2, 1 - positions, positions) if swaps else positions, word

    def indices(self, first: int, count: int) -> list[int]:
        """Return a list of ``count`` sample indices from position ``first`` of the endless sequence of epochs on."""
        indices: list[int] = []
        while len(indices) < count:
            epoch, start = divmod(first + len(indices), self._samples)
            part = min(count - len(indices), self._samples - start)
            indices += self.epoch_indices(epoch, start, part)[0].tolist()
        return indices


class Sampler:
    """Reader of batches from endless epochs. Each epoch has every sample once, in a new random order."""

    # Each epoch also has other sample boundaries in the text, and other masked tokens in `MaskedSamples`.
    def __init__(self, samples: Samples, seed: int, rule: int = UNIFORM) -> None:
        self._samples, self._seed, self._order = samples, seed, SampleOrder(seed, samples.count, rule)

    def batch(self, first: int, count: int) -> Batch:
        """Return a batch of ``count`` samples from position ``first`` on. The run starts at position 0."""
        parts = []
        while count > 0:
            epoch, start = divmod(first, self._samples.count)
            size = min(count, self._samples.count - start)
            samples = self._samples
            if isinstance(samples, MaskedSamples):
                samples = samples.in_epoch(self._seed, epoch)
            indices, word = self._order.epoch_indices(epoch, start, size)
            parts.append(samples.take(indices, word % samples.shifts))
            first, count = first + size, count - size
        if len(parts) == 1:
            return parts[0]
        if not parts:
            return self._samples.take(np.empty(0, np.int64), 0)
        return joined([x for x, _ in parts]), joined([y for _, y in parts])

    def indices(self, first: int, count: int) -> list[int]:
        """Return a list of the sample indices of the batch of ``count`` samples from position ``first`` on."""
        return self._order.indices(first, count)


def joined(parts: Sequence[Any]) -> Any:
    """Concatenate the arrays or `ArrayGroup` objects in ``parts`` along the first axis (samples)."""
    if isinstance(parts[0], ArrayGroup):
        arrays = zip(*(part.arrays for part in parts), strict=True)
        return replace(parts[0], arrays=tuple(np.concatenate(members) for members in arrays))
    return np.concatenate(parts)


def in_order(samples: Samples, limit: int, parts: int, part: int, longest: int) -> Iterator[Batch]:
    """Yield the evaluation batches of shard number ``part`` of ``parts``. A batch has at most ``longest`` samples.

    ``limit``: total number of samples to use, evenly spaced in ``samples``, or 0 for all. Each shard yields the same
    number of batches. The last batches of a shard may be empty.
    """
    total = min(limit or samples.count, samples.count)
    chunks = list(cut(even_part(total, parts, part), longest))
    most = -(-even_part(total, parts, 0).size // longest)
    for chunk in chunks + [Range(total, total)] * (most - len(chunks)):
        indices = np.arange(chunk.start, chunk.stop)
        yield samples.take(indices if total == samples.count else indices * samples.count // total, 0)


BALANCE_EVERY_STEPS: Final = 16  # interval of the load balancer; it uses the median time of these steps
LEAST_TIMINGS: Final = BALANCE_EVERY_STEPS // 2  # fewer timings, after a resume, are dominated by the first step
READ_AHEAD: Final = 4  # more than the number of batches that are read ahead: see `prefetch.PREFETCH_DEPTH`
LEAST_GAIN: Final = 0.05  # smallest relative gain of a step that changes the shares, above timing noise

ShareSizes = tuple[int, ...]  # samples per replica, at least 1


def even_shares(samples: int, replicas: int) -> ShareSizes:
    """Divide ``samples`` evenly. Return a tuple with the number per replica. The first replicas get the remainder."""
    return tuple(even_part(samples, replicas, replica).size for replica in range(replicas))


def balanced_shares(samples: int, sample_s: Sequence[float]) -> ShareSizes:
    """Return a tuple with each replica's number of samples, for the shortest step time.

    ``samples``: total number of samples. ``sample_s``: seconds per sample of each replica.
    """
    assert samples >= len(sample_s) and all(seconds > 0 for seconds in sample_s)
    sizes = [1] * len(sample_s)
    ends = [(2 * seconds, replica) for replica, seconds in enumerate(sample_s)]  # finish times with one more sample
    heapify(ends)
    for _ in range(samples - len(sizes)):
        replica = ends[0][1]
        sizes[replica] += 1
        heapreplace(ends, ((sizes[replica] + 1) * sample_s[replica], replica))
    return tuple(sizes)


class SampleShares:
    """Number of samples of each replica in a global batch. The numbers may change over time. Equal on all ranks."""

    def __init__(self, samples: int, replicas: int) -> None:
        self._sizes = [(0, even_shares(samples, replicas))]  # (first batch, sizes), ascending

    def of(self, batch: int) -> ShareSizes:
        """Return a tuple with each replica's number of samples in batch number ``batch``."""
        return next(sizes for first, sizes in reversed(self._sizes) if first <= batch)

    def range_of(self, batch: int, replica: int) -> Range:
        """Return the range of samples within batch number ``batch`` that ``replica`` computes."""
        sizes = self.of(batch)
        start = sum(sizes[:replica])
        return Range(start, start + sizes[replica])

    @property
    def newest(self) -> ShareSizes:
        """Tuple with each replica's number of samples per batch, as set by the last call of `change`."""
        return self._sizes[-1][1]

    def change(self, first: int, sizes: ShareSizes) -> None:
        """Set each replica's number of samples to ``sizes`` from batch ``first`` on.

        No rank may have read batch ``first`` yet.
        """
        assert sum(sizes) == sum(self.newest) and first > self._sizes[-1][0]
        self._sizes.append((first, sizes))

    def forget(self, batch: int) -> None:
        """Delete the numbers for batches before ``batch``, to free memory."""
        while len(self._sizes) > 1 and self._sizes[1][0] <= batch:
            del self._sizes[0]

    def state(self, batch: int) -> list[list[Any]]:
        """Return a list of [first batch, samples per replica] from ``batch`` on, to be stored in a checkpoint."""
        later = [[first, list(sizes)] for first, sizes in self._sizes if first > batch]
        return [[batch, list(self.of(batch))], *later]

    def restore(self, state: Sequence[Sequence[Any]]) -> bool:
        """Restore ``state``, a result of the method `state`, and return True.

        Change nothing and return False if ``state`` has another number of replicas or another batch size.
        """
        restored = [(int(first), tuple(map(int, sizes))) for first, sizes in state]
        now = self._sizes[0][1]
        fits = bool(restored) and all(len(sizes) == len(now) and sum(sizes) == sum(now) for _, sizes in restored)
        fits = fits and all(first < later for (first, _), (later, _) in zip(restored, restored[1:], strict=False))
        if fits:
            self._sizes = [(0, restored[0][1]), *restored[1:]]
        return fits


class LoadBalancer:
    """Load balancer that adapts ``shares``, the samples of each replica, to the measured speeds of the replicas."""

    # ``data`` connects replicas, ``pipeline`` the stages of this replica.
    def __init__(self, data: Communicator, pipeline: Communicator, shares: SampleShares) -> None:
        self._data, self._pipeline, self._shares = data, pipeline, shares
        self._sample_s: list[float] = []

    def after(self, step: int, compute_s: float) -> bool:
        """Record the compute time of ``step``. Return True if the shares of later batches have changed. Collective.

        ``compute_s``: number of seconds that this rank has computed in ``step``.
        """
        samples = self._shares.of(step - 1)[self._data.rank]
        self._sample_s.append(compute_s / samples)
        if step % BALANCE_EVERY_STEPS or len(self._sample_s) < LEAST_TIMINGS:
            return False
        own_s = statistics.median(self._sample_s)
        self._sample_s.clear()
        # A replica is as slow as its slowest stage; all its stages must get the same numbers.
        replica_s = max(self._pipeline.allgather_object(own_s))
        sample_s = self._data.allgather_object(replica_s)
        current = self._shares.newest
        balanced = balanced_shares(sum(current), sample_s) if min(sample_s) > 0 else current
        if _step_seconds(balanced, sample_s) >= (1 - LEAST_GAIN) * _step_seconds(current, sample_s):
            return False
        self._shares.forget(step - 1)
        self._shares.change(step + READ_AHEAD, balanced)
        return True


def _step_seconds(sizes: ShareSizes, sample_s: Sequence[float]) -> float:
    return max(size * seconds for size, seconds in zip(sizes, sample_s, strict=True))
