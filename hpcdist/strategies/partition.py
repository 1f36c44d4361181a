"""Which consecutive units each rank of a pipeline computes: as little time as can be, in the memory there is.

A rank has one chunk of units, or v of them (`hpcdist.strategies.schedule.placement`). Its time is the sum of the times
of all its units, by its relative speed: that is what it works for each micro-batch, so where m is large the slowest
rank is the pace of the pipeline. The largest such time is made as small as can be among all cuts in which every chunk
has a unit, in the order of the model, and every rank keeps its limit of memory.

- One chunk a rank: exactly, by dynamic programming over (ranks so far, units so far), O(p n^2). Among all cuts that are
  as fast, one with the smallest largest memory is taken: the same programme once more, for bytes, over the parts that
  are fast enough.
- Several chunks, looped or folded: a rank's sum couples chunks that are far apart, and the general problem contains
  that of packing bins. See `hpcdist.strategies.partition_search`: the optimum is proven for models whose inner units
  take equally long, and for others up to a number of steps, else the bound comes with the cut.

Chunks of one rank are not balanced among themselves beyond that: the bubble of an interleaved schedule is smallest
where they are equal too, which identical units give.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hpcdist.errors import ConfigurationError
from hpcdist.models.model import Model
from hpcdist.strategies import partition_search
from hpcdist.strategies.partition_memory import Memory

NEVER = float("inf")


@dataclass(frozen=True)
class Devices:
    """The ranks of a pipeline: how fast they are, relative to each other, and how many bytes they have, 0: enough."""

    speeds: tuple[float, ...]
    limits: tuple[int, ...]

    @classmethod
    def alike(cls, ranks: int) -> "Devices":
        """Return so many equal ranks, with enough memory."""
        return cls((1.0,) * ranks, (0,) * ranks)


@dataclass(frozen=True)
class Cut:
    """The chunks, in the order of the model; no cut is faster than ``bound`` s, where that is known."""

    chunks: tuple[range, ...]
    largest: float
    bound: float

    @property
    def is_proven(self) -> bool:
        """Whether no cut is faster."""
        return self.largest <= self.bound * (1 + 1e-12)


def partition(seconds: Sequence[float], ranks: Sequence[int], devices: Devices, memory: Memory | None) -> Cut | None:
    """Return the best cut of units that take ``seconds`` into chunks for ``ranks``, in the order of the model (local).

    None where no cut keeps the limits, or the search has found none. At least as many units as chunks are needed.
    """
    assert len(seconds) >= len(ranks) > 0
    if len(set(ranks)) == len(ranks):
        return _contiguous(seconds, ranks, devices, memory)
    found = partition_search.search(seconds, ranks, devices.speeds, devices.limits, memory)
    return None if found is None else Cut(found.chunks, found.largest, found.bound)


def leanest(units: int, ranks: Sequence[int], devices: Devices, memory: Memory) -> tuple[range, ...]:
    """Return the cut, of one chunk a rank, whose worst memory is smallest beside its limit (local)."""
    shares = [
        _bytes(memory, rank, units) / (devices.limits[rank] or max(devices.limits) or 1) for rank in range(len(ranks))
    ]
    found = _least([shares[rank] for rank in ranks])
    assert found is not None
    return found[1]


def cut(model: Model, ranks: int) -> list[range]:
    """Return one chunk for each of ``ranks``, with the largest number of parameters as small as can be (local)."""
    check_units(len(model.stages), ranks, 1)
    sizes = [float(sum(spec.size for spec in stage.tensors())) for stage in model.stages]
    found = partition(sizes, range(ranks), Devices.alike(ranks), None)
    assert found is not None
    return list(found.chunks)


def check_units(units: int, ranks: int, chunks: int) -> None:
    """Raise ConfigurationError when there are fewer units than chunks."""
    if units >= ranks * chunks:
        return
    each = f" x {chunks} chunks each = {ranks * chunks}" if chunks > 1 else ""
    fewer = " or chunks" if chunks > 1 else ""
    raise ConfigurationError(
        f"parallel.pipeline = {ranks}{each}, but the model has only {units} stages (its layers, and what is before and "
        f"behind them); use at most {units} in all: fewer pipeline ranks{fewer}, or a model of more layers (one of "
        "your own: of more stages)"
    )


def _contiguous(seconds: Sequence[float], ranks: Sequence[int], devices: Devices, memory: Memory | None) -> Cut | None:
    """Return the best cut of one chunk a rank."""
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
    # Sums of the same units in another order differ by rounding, which must not decide.
    enough = fastest[0] * (1 + 1e-12)
    chunks = fastest[1]
    if memory is not None:
        small = _least([np.where(time <= enough, size, NEVER) for time, size in zip(times, sizes, strict=True)])
        assert small is not None
        chunks = small[1]
    largest = max(float(time[part.start, part.stop]) for time, part in zip(times, chunks, strict=True))
    return Cut(chunks, largest, largest)


def _bytes(memory: Memory, rank: int, count: int) -> np.ndarray:
    """Return the bytes on ``rank`` with the units [start, stop), for all of them; meaningless where start > stop."""
    start, stop = np.indices((count + 1, count + 1))
    return np.asarray(memory.on(rank, [start], [stop]), np.float64)


def _least(costs: Sequence[np.ndarray]) -> tuple[float, tuple[range, ...]] | None:
    """Return the smallest possible largest cost, and the first cut that has it; ``costs[part][start, stop]``.

    None where it cannot be finite. No part is empty.
    """
    count = costs[0].shape[0] - 1
    filled = np.triu(np.ones((count + 1, count + 1), bool), 1)
    best = np.full(count + 1, NEVER)  # by the number of units that are in parts
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
