"""How many samples of a batch each replica takes: evenly many, or in proportion to measured speed.

A batch is the same samples however it is shared, and gradients are weighted by samples, so losses and weights are those
of the even run up to the rounding of sums in another order. What follows a decision is known to all ranks alike: they
decide by the same numbers, and a new sharing begins a few steps later, where no rank has read ahead yet.
"""

import statistics
from collections.abc import Sequence
from heapq import heapify, heapreplace
from typing import Any, Final

from hpcdist.arrays.ranges import Range
from hpcdist.comm.communicator import Communicator

EVERY_STEPS: Final = 16  # between two looks at the times; of those in between the median counts
LEAST_TIMES: Final = EVERY_STEPS // 2  # fewer of them, after a resume, hold too much of the first step
AHEAD: Final = 4  # batches that a rank may have read beyond the last one in use, and one to spare: see `prefetch.DEPTH`
LEAST_GAIN: Final = 0.05  # a step must become so much shorter: noise alone changes nothing

Sizes = tuple[int, ...]  # samples of each replica, at least 1


def even(samples: int, replicas: int) -> Sizes:
    """Share ``samples`` evenly; the first replicas get one more (local)."""
    each, more = divmod(samples, replicas)
    return tuple(each + (replica < more) for replica in range(replicas))


def fastest(samples: int, sample_s: Sequence[float]) -> Sizes:
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


class Shares:
    """Which samples of the batch of each step are those of each replica. Local: all ranks hold equal ones.

    Batches are counted from 0: that of step s is ``s - 1``.
    """

    def __init__(self, samples: int, replicas: int) -> None:
        self._sizes = [(0, even(samples, replicas))]  # (first batch, sizes), ascending

    def of(self, batch: int) -> Sizes:
        """Return the number of samples of each replica."""
        return next(sizes for first, sizes in reversed(self._sizes) if first <= batch)

    def own(self, batch: int, replica: int) -> Range:
        """Return which samples of the batch are those of ``replica``."""
        sizes = self.of(batch)
        start = sum(sizes[:replica])
        return Range(start, start + sizes[replica])

    @property
    def newest(self) -> Sizes:
        """The sizes that were decided last; they may be those of batches to come."""
        return self._sizes[-1][1]

    def change(self, first: int, sizes: Sizes) -> None:
        """Take other ``sizes`` from batch ``first`` on, which nobody has read yet."""
        assert sum(sizes) == sum(self.newest) and first > self._sizes[-1][0]
        self._sizes.append((first, sizes))

    def forget(self, batch: int) -> None:
        """Let go of the sizes of batches before ``batch``."""
        while len(self._sizes) > 1 and self._sizes[1][0] <= batch:
            del self._sizes[0]

    def state(self, batch: int) -> list[list[Any]]:
        """Return what a checkpoint before ``batch`` needs: JSON values."""
        later = [[first, list(sizes)] for first, sizes in self._sizes if first > batch]
        return [[batch, list(self.of(batch))], *later]

    def restore(self, state: Sequence[Sequence[Any]]) -> bool:
        """Take back what `state` returned, if it was for as many replicas and samples; return whether it was."""
        found = [(int(first), tuple(map(int, sizes))) for first, sizes in state]
        now = self._sizes[0][1]
        fits = bool(found) and all(len(sizes) == len(now) and sum(sizes) == sum(now) for _, sizes in found)
        fits = fits and all(first < later for (first, _), (later, _) in zip(found, found[1:], strict=False))
        if fits:
            self._sizes = [(0, found[0][1]), *found[1:]]
        return fits


class Balance:
    """Changes ``shares`` by the times that replicas needed. ``ahead`` batches may have been read beyond the last step.

    ``data`` joins the replicas of this rank's stages, ``pipeline`` the stages of its replica. Construction is local.
    """

    def __init__(self, data: Communicator, pipeline: Communicator, shares: Shares, ahead: int = AHEAD) -> None:
        self._data, self._pipeline, self._shares, self._ahead = data, pipeline, shares, ahead
        self._sample_s: list[float] = []

    def after(self, step: int, compute_s: float) -> bool:
        """Take note of the time in which this rank has computed ``step``; whether the shares were changed by it.

        Collective over ``data`` and ``pipeline``, though most calls send nothing. The new shares are those of the step
        ``step + 1 + ahead`` and later ones.
        """
        samples = self._shares.of(step - 1)[self._data.rank]
        self._sample_s.append(compute_s / samples)
        if step % EVERY_STEPS or len(self._sample_s) < LEAST_TIMES:
            return False
        own_s = statistics.median(self._sample_s)
        self._sample_s.clear()
        # A replica is as slow as its slowest stage; all of its stages must come to the same numbers.
        replica_s = max(self._pipeline.allgather_object(own_s))
        sample_s = self._data.allgather_object(replica_s)
        now = self._shares.newest
        wanted = fastest(sum(now), sample_s) if min(sample_s) > 0 else now
        if _step_s(wanted, sample_s) >= (1 - LEAST_GAIN) * _step_s(now, sample_s):
            return False
        self._shares.forget(step - 1)
        self._shares.change(step + self._ahead, wanted)
        return True


def _step_s(sizes: Sizes, sample_s: Sequence[float]) -> float:
    return max(size * seconds for size, seconds in zip(sizes, sample_s, strict=True))
