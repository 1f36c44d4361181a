"""Buffers that exceed the cache, used in turn, with contents whose sums are exact in any order.

Every timed call gets the next slot of a pool that is larger than the last-level cache, so that its data come from
memory, as a gradient's do. When all slots were used, the pool is verified and filled again, outside of the timed
part.
"""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from hpcdist.arrays.dtypes import accumulation_dtype
from hpcdist.arrays.ranges import ALIGN_BYTES, Range, align_up
from hpcdist.reporting.units import parse_bytes

CACHES: Final = 2  # the pool of a rank holds so many last-level caches
UNKNOWN_CACHE_BYTES: Final = 64 << 20
MEMORY_SHARE: Final = 0.4  # of what is available on the node, for the pools of all its ranks
PERIOD: Final = 127  # of the contents: a prime, so that no chunk, slice or slot begins like another by chance
VALUES: Final = 5  # contents are 0 .. 4: sums are exact in float32 up to millions of ranks
_REPEATS: Final = 128


def last_level_cache_bytes(root: Path = Path("/sys/devices/system/cpu/cpu0/cache")) -> int | None:
    """Return the size of the largest cache of a core; None where the system does not tell (local)."""
    found = []
    for path in root.glob("index*/size"):
        match = re.fullmatch(r"[1-9]\d*[KMG]", path.read_text().strip())
        if match:
            found.append(parse_bytes(match[0]))
    return max(found, default=None)


def available_bytes(path: Path = Path("/proc/meminfo")) -> int:
    """Return the memory of this node that can be had (local)."""
    try:
        match = re.search(r"^MemAvailable:\s+(\d+) kB", path.read_text(), re.MULTILINE)
    except OSError:
        match = None
    return int(match[1]) << 10 if match else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def slots(nbytes: int, cache_bytes: int, limit_bytes: int, hot: bool) -> int:
    """Return how many buffers of ``nbytes`` take turns: more than the cache holds, within the limit, one if hot."""
    if hot:
        return 1
    return max(1, min(1 + -(-CACHES * cache_bytes // nbytes), limit_bytes // nbytes))


class BufferContents:
    """The values of each rank's input and of their sum, periodic; slot k begins at phase k."""

    def __init__(self, ranks: int, dtype: np.dtype) -> None:
        index = np.arange(PERIOD, dtype=np.int64)
        self._bits = np.dtype(f"u{dtype.itemsize}")
        wide = accumulation_dtype(dtype)
        tiles = [((index * (rank + 1) + rank) % PERIOD % VALUES).astype(wide) for rank in range(ranks)]
        total = np.zeros(PERIOD, wide)
        for tile in tiles:
            total += tile
        self._of = [tile.astype(dtype) for tile in tiles]
        self._total = total.astype(dtype)
        self._long: dict[int | None, np.ndarray] = {}

    def _tile(self, rank: int | None) -> np.ndarray:
        """Return many periods of the input of ``rank``, or of the sum for None."""
        if rank not in self._long:
            self._long[rank] = np.tile(self._total if rank is None else self._of[rank], _REPEATS + 1)
        return self._long[rank]

    def fill(self, buffer: np.ndarray, rank: int, phase: int) -> None:
        """Write the input of ``rank`` (local)."""
        tile, step = self._tile(rank)[phase % PERIOD :], PERIOD * _REPEATS
        for start in range(0, buffer.size, step):
            part = buffer[start : start + step]
            part[...] = tile[: part.size]

    def fill_slots(self, slots: np.ndarray, rank: int) -> None:
        """Write the input of ``rank`` into ``slots`` of shape (count, size), row k from phase k on (local).

        Rows are written in their order, so that a cache is left with the last of them.
        """
        count, size = slots.shape
        whole = 0
        if size <= PERIOD * _REPEATS:
            # A pool of small slots has a million of them: the PERIOD different rows are written in one assignment.
            rows = np.lib.stride_tricks.sliding_window_view(self._tile(rank), size)[:PERIOD]
            whole = count - count % PERIOD
            slots[:whole].reshape(-1, PERIOD, size)[...] = rows
        for slot in range(whole, count):
            self.fill(slots[slot], rank, slot)

    def first_difference(self, buffer: np.ndarray, rank: int | None, phase: int) -> int:
        """Return the first index at which ``buffer`` is not the input of ``rank`` (None: the sum); -1 for none."""
        tile, step = self._tile(rank)[phase % PERIOD :], PERIOD * _REPEATS
        for start in range(0, buffer.size, step):
            part = buffer[start : start + step]
            wrong = part.view(self._bits) != tile[: part.size].view(self._bits)  # no value is a negative zero
            if wrong.any():
                return start + int(np.argmax(wrong))
        return -1


@dataclass(frozen=True)
class ExpectedResult:
    """What a call leaves: in ``part`` of its result the data of ``rank`` (None: the sum), from index ``origin`` on."""

    part: Range
    rank: int | None
    origin: int


@dataclass
class _Use:
    slot: int
    contender: int


class BufferPool:
    """Slots of one size in one piece of memory, used one after the other by all contenders of a cell."""

    def __init__(self, memory: np.ndarray, receive: np.ndarray, size: int, dtype: np.dtype, count: int) -> None:
        self.stride_bytes = align_up(size * dtype.itemsize, ALIGN_BYTES)
        self.memory, self.receive, self.size, self.dtype, self.count = memory, receive, size, dtype, count
        self._used: list[_Use] = []

    def buffer(self, slot: int) -> np.ndarray:
        """Return the buffer that a collective works on."""
        return self._of(self.memory, slot)

    def result(self, slot: int) -> np.ndarray:
        """Return the buffer of the same size that an all-to-all, or a copy, writes to."""
        return self._of(self.receive, slot)

    def _of(self, memory: np.ndarray, slot: int) -> np.ndarray:
        start = slot * self.stride_bytes
        return memory[start : start + self.size * self.dtype.itemsize].view(self.dtype)

    @property
    def is_used_up(self) -> bool:
        """Whether every slot has been taken since they were filled."""
        return len(self._used) == self.count

    def take(self, contender: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the next slot's buffer and result; the pool is not used up."""
        slot = len(self._used)
        self._used.append(_Use(slot, contender))
        return self.buffer(slot), self.result(slot)

    def fill(self, contents: BufferContents, rank: int) -> None:
        """Write the inputs of ``rank`` into all slots; nothing is in use afterwards (local)."""
        self._used.clear()
        slots = self.memory[: self.count * self.stride_bytes].reshape(self.count, self.stride_bytes)
        contents.fill_slots(slots[:, : self.size * self.dtype.itemsize].view(self.dtype), rank)

    def first_wrong(
        self, contents: BufferContents, contender: int, expected: Sequence[ExpectedResult], *, in_result: bool = False
    ) -> str:
        """Return what is first wrong in the slots that ``contender`` used since they were filled, "" for nothing."""
        for use in self._used:
            if use.contender != contender:
                continue
            data = self.result(use.slot) if in_result else self.buffer(use.slot)
            for item in expected:
                index = contents.first_difference(data[item.part.slice], item.rank, use.slot + item.origin)
                if index >= 0:
                    place = item.part.start + index
                    return f"element {place} is {data[place]}, which no order of summation gives"
        return ""
