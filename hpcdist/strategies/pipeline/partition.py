"""The partition of a model's units over the ranks of a pipeline: the least time within the memory limits.

A rank has v chunks of units. Its time per micro-batch is the sum of the times of its units, divided by its relative
speed. The partition minimises the largest time, with a unit in every chunk, units in model order, and memory within
every limit.

v = 1: exact, by dynamic programming over (ranks so far, units so far), O(p n^2).

v > 1: assign each unit to the rank that finishes first. This is optimal if only the first unit (an embedding) and the
last (a head) differ. Otherwise improve this assignment, and boundaries at equal shares of work, by moving boundaries by
one unit, then search by branch and bound over the chunks in model order.

The search ends proven, or after `STEPS` steps with the best partition and the bound. Without memory limits the time is
at most all work over all speeds, plus v of the longest units on the slowest rank.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Final

import numpy as np

from hpcdist.errors import ConfigurationError
from hpcdist.strategies.pipeline.memory import StageMemory

STEPS: Final = 30_000  # about a second
SAME: Final = 1e-12  # relative rounding difference of sums in another order
VISITS: Final = 50  # loads remembered per boundary (chunks so far, units so far), to skip worse ones


@dataclass(frozen=True)
class StagePartition:
    """Assignment of a model's layers to pipeline chunks, and the time per micro-batch of the slowest rank."""

    chunks: tuple[range, ...]  # layers (also embedding and head) of each chunk, in model order
    largest: float  # seconds per micro-batch of the slowest rank
    bound: float  # lower bound of ``largest``

    @property
    def is_proven(self) -> bool:
        """True if the search proved that the slowest rank takes at least as long in every other partition."""
        return self.largest <= self.bound * (1 + SAME)


def search(
    layer_seconds: Sequence[float],
    rank_of_chunk: Sequence[int],
    speeds: Sequence[float],
    limits: Sequence[int],
    memory: StageMemory | None,
    steps: int = STEPS,
) -> StagePartition | None:
    """Return the partition that minimises the slowest rank's time, or None if no partition fits into memory. Local.

    ``layer_seconds``: time of each layer. ``rank_of_chunk``: pipeline rank of each chunk. ``speeds``, ``limits``:
    relative speed and memory limit in bytes (0: no limit) of each rank. ``steps``: maximum number of search steps.
    """
    task = _Task(tuple(layer_seconds), tuple(rank_of_chunk), tuple(speeds), tuple(limits), memory)
    bound = task.bound()
    best: tuple[float, tuple[int, ...]] | None = None
    for first in (task.counted(), task.even()):
        improved = _improve(task, first)
        value = task.value(improved)
        if task.fits(improved) and (best is None or value < best[0] * (1 - SAME)):
            best = value, improved
    if best is None or best[0] > bound * (1 + SAME):
        walk = _Walk(task, best, bound, steps)
        walk.run()
        best = walk.best
        if walk.is_complete and best is not None:
            bound = best[0]
    if best is None:
        return None
    return StagePartition(tuple(range(a, b) for a, b in pairwise(best[1])), best[0], bound)


@dataclass
class _Task:
    seconds: tuple[float, ...]
    ranks: tuple[int, ...]  # rank of each chunk
    speeds: tuple[float, ...]
    limits: tuple[int, ...]
    memory: StageMemory | None
    sums: list[float] = field(init=False)

    def __post_init__(self) -> None:
        self.sums = list(accumulate(self.seconds, initial=0.0))

    @property
    def limited(self) -> bool:
        return self.memory is not None and any(self.limits)

    def loads(self, edges: Sequence[int]) -> list[float]:
        loads = [0.0] * len(self.speeds)
        for rank, (start, stop) in zip(self.ranks, pairwise(edges), strict=False):
            loads[rank] += (self.sums[stop] - self.sums[start]) / self.speeds[rank]
        return loads

    def value(self, edges: Sequence[int]) -> float:
        return max(self.loads(edges))

    def longest_chunk(self, edges: Sequence[int]) -> float:
        parts = zip(self.ranks, pairwise(edges), strict=True)
        return max((self.sums[stop] - self.sums[start]) / self.speeds[rank] for rank, (start, stop) in parts)

    def fits(self, edges: Sequence[int], rank: int | None = None) -> bool:
        if self.memory is None or not self.limited:
            return True
        for candidate in range(len(self.speeds)) if rank is None else (rank,):
            pairs = [pair for owner, pair in zip(self.ranks, pairwise(edges), strict=False) if owner == candidate]
            if self.limits[candidate] and pairs:
                starts, stops = zip(*pairs, strict=True)
                if self.memory.on(candidate, starts, stops) > self.limits[candidate]:
                    return False
        return True

    def bound(self) -> float:
        inner = self.seconds[1:-1]
        least = min(inner, default=0.0)
        loads, _ = self._counts(least)
        return max(sum(self.seconds) / sum(self.speeds), max(loads))

    def _counts(self, unit_s: float) -> tuple[list[float], list[int]]:
        # Give each inner unit (all but the first and the last) to the rank that then finishes first. Return the seconds
        # of each rank, and the number of inner units of each chunk.
        chunks, last = len(self.ranks), len(self.seconds) - 1
        counts = [0 if number in (0, chunks - 1) else 1 for number in range(chunks)]
        loads = [0.0] * len(self.speeds)
        for number, rank in enumerate(self.ranks):
            loads[rank] += counts[number] * unit_s / self.speeds[rank]
        for end in (0, last):
            rank = self.ranks[0 if end == 0 else chunks - 1]
            loads[rank] += self.seconds[end] / self.speeds[rank]
        times = [count * unit_s for count in counts]
        times[0] += self.seconds[0]
        times[-1] += self.seconds[last]
        for _ in range(last - 1 - sum(counts)):
            rank = min(range(len(loads)), key=lambda one: (loads[one] + unit_s / self.speeds[one], one))
            loads[rank] += unit_s / self.speeds[rank]
            shortest = min((n for n, owner in enumerate(self.ranks) if owner == rank), key=lambda n: (times[n], n))
            counts[shortest] += 1
            times[shortest] += unit_s
        return loads, counts

    def counted(self) -> tuple[int, ...]:
        inner = self.seconds[1:-1]
        _, counts = self._counts(sum(inner) / len(inner) if inner else 0.0)
        counts[0] += 1
        counts[-1] += 1
        return tuple(accumulate(counts, initial=0))

    def even(self) -> tuple[int, ...]:
        chunks, units = len(self.ranks), len(self.seconds)
        shares = list(accumulate(self.speeds[rank] for rank in self.ranks))
        edges = [0]
        for number in range(1, chunks):
            target = self.sums[-1] * shares[number - 1] / shares[-1]
            candidates = range(edges[-1] + 1, units - (chunks - number) + 1)
            edges.append(min((abs(self.sums[edge] - target), edge) for edge in candidates)[1])
        return (*edges, units)


def _improve(task: _Task, edges: tuple[int, ...]) -> tuple[int, ...]:
    def rank_of(candidate: tuple[int, ...]) -> tuple[bool, float, float]:
        return not task.fits(candidate), task.value(candidate), task.longest_chunk(candidate)

    now = rank_of(edges)
    while True:
        moved = [
            (*edges[:at], edges[at] + step, *edges[at + 1 :])
            for at in range(1, len(edges) - 1)
            for step in (-1, 1)
            if edges[at - 1] < edges[at] + step < edges[at + 1]
        ]
        best = min(moved, key=rank_of, default=edges)
        rank = rank_of(best)
        if not _less(rank, now):
            return edges
        edges, now = best, rank


def _less(first: tuple[bool, float, float], second: tuple[bool, float, float]) -> bool:
    if first[0] != second[0]:
        return first[0] < second[0]
    if abs(first[1] - second[1]) > SAME * second[1]:
        return first[1] < second[1]
    return first[2] < second[2] * (1 - SAME)


class _Walk:
    # Branch and bound, depth first: add one chunk after another.
    def __init__(self, task: _Task, best: tuple[float, tuple[int, ...]] | None, bound: float, steps: int) -> None:
        self.task, self.best, self._bound, self._left = task, best, bound, steps
        self.is_complete = False
        self._seen: dict[tuple[int, int], list[list[float]]] = {}

    def run(self) -> None:
        stack: list[Iterator[tuple[int, ...]]] = [iter(((0,),))]
        while stack:
            edges = next(stack[-1], None)
            if edges is None:
                stack.pop()
                continue
            self._left -= 1
            if self._left < 0:
                return
            if len(edges) == len(self.task.ranks) + 1:
                value = self.task.value(edges)
                if self._is_better(value):
                    self.best = value, edges
                    if value <= self._bound * (1 + SAME):
                        break
            elif self._is_worth(edges):
                stack.append(self._next(edges))
        self.is_complete = True

    def _is_better(self, value: float) -> bool:
        return self.best is None or value < self.best[0] * (1 - SAME)

    def _next(self, edges: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        task, done, units = self.task, len(edges) - 1, len(self.task.seconds)
        remaining = len(task.ranks) - done - 1
        load, rank, start = task.loads(edges)[task.ranks[done]], task.ranks[done], edges[-1]
        for stop in range(start + 1, units - remaining + 1) if remaining else (units,):
            time = load + (task.sums[stop] - task.sums[start]) / task.speeds[rank]
            if not self._is_better(time):
                return  # more units only take longer
            if task.fits((*edges, stop), rank):
                yield (*edges, stop)

    def _is_worth(self, edges: tuple[int, ...]) -> bool:
        # Bound: the remaining work must fit in if it filled all ranks up to the best time so far.
        task, loads = self.task, self.task.loads(edges)
        if self.best is not None:
            room = sum((self.best[0] - load) * speed for load, speed in zip(loads, task.speeds, strict=True))
            if room <= (task.sums[-1] - task.sums[edges[-1]]) * (1 - SAME):
                return False
        if task.limited:
            return True
        # Dominance: the same boundary with no larger load on any rank was searched before.
        seen = self._seen.setdefault((len(edges), edges[-1]), [])
        if any(all(a <= b for a, b in zip(earlier, loads, strict=True)) for earlier in seen):
            return False
        if len(seen) < VISITS:
            seen.append(loads)
        return True


NEVER = float("inf")


@dataclass(frozen=True)
class StageDevices:
    """Relative speeds and memory limits of the ranks of a pipeline. A limit is in bytes; 0 means no limit."""

    speeds: tuple[float, ...]
    limits: tuple[int, ...]

    @classmethod
    def alike(cls, ranks: int) -> "StageDevices":
        """Return `StageDevices` of ``ranks`` devices with equal speed and no memory limits."""
        return cls((1.0,) * ranks, (0,) * ranks)


def partition(
    layer_seconds: Sequence[float], rank_of_chunk: Sequence[int], devices: StageDevices, memory: StageMemory | None
) -> StagePartition | None:
    """Return the partition that minimises the time of the slowest rank, or None if none fits into memory. Local.

    ``layer_seconds``: time of each layer. ``rank_of_chunk``: pipeline rank of each chunk of layers.
    """
    assert len(layer_seconds) >= len(rank_of_chunk) > 0
    if len(set(rank_of_chunk)) == len(rank_of_chunk):
        return _contiguous(layer_seconds, rank_of_chunk, devices, memory)
    return search(layer_seconds, rank_of_chunk, devices.speeds, devices.limits, memory)


def least_memory(units: int, ranks: Sequence[int], devices: StageDevices, memory: StageMemory) -> tuple[range, ...]:
    """Return the layer ranges that minimise the largest ratio of memory use to memory limit on any rank. Local.

    The result is a tuple of ranges. ``units``: number of layers. ``ranks``: pipeline rank of each range.
    """
    shares = [
        _bytes(memory, rank, units) / (devices.limits[rank] or max(devices.limits) or 1) for rank in range(len(ranks))
    ]
    least = _least([shares[rank] for rank in ranks])
    assert least is not None
    return least[1]


def check_units(units: int, ranks: int, chunks: int, uncut: str = "") -> None:
    """Raise ConfigurationError if ``units`` layers are too few for ``ranks`` ranks with ``chunks`` chunks each.

    ``uncut``: reason why a user's module could not be cut into several units, or "".
    """
    if units >= ranks * chunks:
        return
    or_fewer_chunks = " or chunks per rank" if chunks > 1 else ""
    raise ConfigurationError(
        f"parallel.pipeline = {ranks} needs at least {ranks * chunks} model units ({ranks} ranks x {chunks} chunks per "
        f"rank), but the model has only {units} units (embedding, layers and head, or the stages of your own model); "
        f"use fewer pipeline ranks{or_fewer_chunks}, or a model with more units{uncut and f'. {uncut}'}"
    )


def _contiguous(
    seconds: Sequence[float], ranks: Sequence[int], devices: StageDevices, memory: StageMemory | None
) -> StagePartition | None:
    count = len(seconds)
    sums = np.concatenate([[0.0], np.cumsum(np.asarray(seconds, np.float64))])
    times, sizes = [], []
    for rank in ranks:
        time = (sums[None, :] - sums[:, None]) / devices.speeds[rank]  # [start, stop]
        size = np.zeros((count + 1, count + 1)) if memory is None else _bytes(memory, rank, count)
        if devices.limits[rank]:
            time = np.where(size <= devices.limits[rank], time, NEVER)
        times.append(time)
        sizes.append(size)
    fastest = _least(times)
    if fastest is None:
        return None
    # Rounding of sums in another order must not decide.
    enough = fastest[0] * (1 + 1e-12)
    chunks = fastest[1]
    if memory is not None:
        small = _least([np.where(time <= enough, size, NEVER) for time, size in zip(times, sizes, strict=True)])
        assert small is not None
        chunks = small[1]
    largest = max(float(time[part.start, part.stop]) for time, part in zip(times, chunks, strict=True))
    return StagePartition(chunks, largest, largest)


def _bytes(memory: StageMemory, rank: int, count: int) -> np.ndarray:
    start, stop = np.indices((count + 1, count + 1))
    return np.asarray(memory.on(rank, [start], [stop]), np.float64)


def _least(costs: Sequence[np.ndarray]) -> tuple[float, tuple[range, ...]] | None:
    # Minimise the largest cost of a chunk; None if it is infinite. Chunk i is a non-empty range of units, and costs
    # costs[i][start, stop].
    count = costs[0].shape[0] - 1
    filled = np.triu(np.ones((count + 1, count + 1), bool), 1)
    best = np.full(count + 1, NEVER)  # by the number of assigned units
    best[0] = 0.0
    begins = []
    for cost in costs:
        reached = np.where(filled, np.maximum(best[:, None], cost), NEVER)
        begins.append(reached.argmin(axis=0))
        best = reached.min(axis=0)
    if best[count] == NEVER:
        return None
    parts, stop = [], count
    for begin in reversed(begins):
        start = int(begin[stop])
        parts.append(range(start, stop))
        stop = start
    return float(best[count]), tuple(reversed(parts))
