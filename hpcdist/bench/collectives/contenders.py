"""Contenders of a benchmark of collectives, and the buffers that they work on.

A contender (`contender`) is one algorithm on one kind of memory: ours, and the MPI library's own. Two references
(`references`) are measured beside them in every round:

    memcpy   every rank copies the buffer to other memory once, all at the same time. On one node that is about what an
             allreduce must cost; one that works in place can be a little faster, since it touches less memory
    wire     where there are several nodes, the first ranks of two of them send each other the buffer at the same time

Every timed call gets the next slot of a pool (`BufferPool`) that is larger than the last-level cache, so that its data
come from memory, as a gradient's do. When all slots were used, the pool is verified and filled again, outside of the
timed part. The contents (`BufferContents`) are small integers, whose sums are exact in any order.
"""

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, Final

import numpy as np

from hpcdist import collectives
from hpcdist.arrays.dtypes import accumulation_dtype, dtype_of
from hpcdist.arrays.ranges import ALIGN_BYTES, Range, align_up
from hpcdist.bench.collectives.results import OPERATIONS, ORDINARY, SHARED, UNEVEN, CollectivesCell, part_sizes
from hpcdist.collectives.algorithms.all_to_all import ALL_TO_ALL, all_to_all
from hpcdist.collectives.algorithms.broadcast import BROADCAST, broadcast
from hpcdist.collectives.dispatch import AlgorithmTable, parse_algorithm
from hpcdist.collectives.node import shared_memory
from hpcdist.collectives.tuning import autotune
from hpcdist.comm.communicator import Communicator
from hpcdist.errors import BufferHandoverError, ConfigurationError, MissingCapabilityError, UsageError
from hpcdist.reporting.units import parse_bytes

NATIVE: Final = "native"
# What `hpcdist.collectives.tuning.autotune` chooses for the size, as it does at the start of a training.
AUTO: Final = "auto"
MEMCPY: Final = "memcpy"
WIRE: Final = "wire"
REFERENCES: Final = (MEMCPY, WIRE)
# Those that read the buffers of other ranks where they lie, if they can: only these are measured on shared memory too.
READS_SHARED: Final = ("node_shared", "hierarchical", AUTO)
CACHES: Final = 2  # the pool of a rank holds so many last-level caches
UNKNOWN_CACHE_BYTES: Final = 64 << 20
MEMORY_SHARE: Final = 0.4  # of what is available on the node, for the pools of all its ranks
PERIOD: Final = 127  # of the contents: a prime, so that no chunk, slice or slot begins like another by chance
VALUES: Final = 5  # contents are 0 .. 4: sums are exact in float32 up to millions of ranks
_REPEATS: Final = 128


def last_level_cache_bytes(root: Path = Path("/sys/devices/system/cpu/cpu0/cache")) -> int | None:
    """Return the size of the largest cache of a core; None where the system does not tell (local)."""
    sizes = []
    for path in root.glob("index*/size"):
        match = re.fullmatch(r"[1-9]\d*[KMG]", path.read_text().strip())
        if match:
            sizes.append(parse_bytes(match[0]))
    return max(sizes, default=None)


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
    """Values of each rank's input and of their sum, periodic; slot k begins at phase k."""

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
    """Result of a call: in ``part`` of it the data of ``rank`` (None: the sum), from index ``origin`` on."""

    part: Range
    rank: int | None
    origin: int


class BufferPool:
    """Slots of one size in one piece of memory, used one after the other by all contenders of a cell."""

    def __init__(self, memory: np.ndarray, receive: np.ndarray, size: int, dtype: np.dtype, count: int) -> None:
        self.stride_bytes = align_up(size * dtype.itemsize, ALIGN_BYTES)
        self.memory, self.receive, self.size, self.dtype, self.count = memory, receive, size, dtype, count
        self._used: list[int] = []  # the contender of each slot that was given since they were filled

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
        self._used.append(contender)
        return self.buffer(slot), self.result(slot)

    def fill(self, contents: BufferContents, rank: int) -> None:
        """Write the inputs of ``rank`` into all slots; nothing is in use afterwards (local)."""
        self._used.clear()
        slots = self.memory[: self.count * self.stride_bytes].reshape(self.count, self.stride_bytes)
        contents.fill_slots(slots[:, : self.size * self.dtype.itemsize].view(self.dtype), rank)

    def first_wrong(
        self, contents: BufferContents, contender: int, expected: Sequence[ExpectedResult], *, in_result: bool = False
    ) -> str:
        """Return the first wrong element of the slots that ``contender`` used since they were filled, "" for none."""
        for slot in (slot for slot, user in enumerate(self._used) if user == contender):
            data = self.result(slot) if in_result else self.buffer(slot)
            for item in expected:
                index = contents.first_difference(data[item.part.slice], item.rank, slot + item.origin)
                if index >= 0:
                    place = item.part.start + index
                    return f"element {place} is {data[place]}, which no order of summation gives"
        return ""


# (buffer, result) -> nothing; a result is only written by a contender that cannot work in place
Run = Callable[[np.ndarray, np.ndarray], None]


@dataclass(frozen=True)
class CollectivesContender:
    """Algorithm on a kind of memory, ready to run on a cell; ``expected`` is None for a reference: not verified."""

    algorithm: str
    buffers: str
    run: Run
    expected: tuple[ExpectedResult, ...] | None
    takes_part: bool = True  # False on ranks that a reference has nothing to do for
    in_result: bool = False  # what is expected is not left in the buffer, but in the result


def _allreduce(comm: Communicator, cell: CollectivesCell, algorithm: str) -> tuple[Run, list[ExpectedResult]]:
    def run(buffer: np.ndarray, result: np.ndarray) -> None:
        collectives.allreduce(comm, buffer, algorithm)

    return run, [ExpectedResult(Range(0, cell.size), None, 0)]


def _shares(comm: Communicator, cell: CollectivesCell, algorithm: str) -> list[Range]:
    return collectives.SHARDED[algorithm].shares(comm, cell.size, dtype_of(cell.dtype).itemsize)


def _reduce_scatter(comm: Communicator, cell: CollectivesCell, algorithm: str) -> tuple[Run, list[ExpectedResult]]:
    shares, reduce_scatter = _shares(comm, cell, algorithm), collectives.SHARDED[algorithm].reduce_scatter
    own = shares[comm.rank]
    return lambda buffer, result: reduce_scatter(comm, buffer, shares), [ExpectedResult(own, None, own.start)]


def _all_gather(comm: Communicator, cell: CollectivesCell, algorithm: str) -> tuple[Run, list[ExpectedResult]]:
    shares, all_gather = _shares(comm, cell, algorithm), collectives.SHARDED[algorithm].all_gather
    expected = [ExpectedResult(part, rank, part.start) for rank, part in enumerate(shares)]
    return lambda buffer, result: all_gather(comm, buffer, shares), expected


def _broadcast(comm: Communicator, cell: CollectivesCell, algorithm: str) -> tuple[Run, list[ExpectedResult]]:
    def run(buffer: np.ndarray, result: np.ndarray) -> None:
        broadcast(comm, buffer, 0, algorithm)

    return run, [ExpectedResult(Range(0, cell.size), 0, 0)]


def _all_to_all(comm: Communicator, cell: CollectivesCell, algorithm: str) -> tuple[Run, list[ExpectedResult]]:
    sizes = part_sizes(cell.op, cell.size, comm.size)
    own, ends = sizes[comm.rank], [0, *accumulate(sizes)]
    parts = [Range(start, stop) for start, stop in pairwise(ends)]
    rows = [Range(own * peer, own * (peer + 1)) for peer in range(comm.size)]

    def run(buffer: np.ndarray, result: np.ndarray) -> None:
        all_to_all(comm, buffer, result[: own * comm.size], parts, rows, algorithm)

    return run, [ExpectedResult(row, peer, ends[comm.rank]) for peer, row in enumerate(rows)]


_UNEVEN: Final = {name: function for name, function in ALL_TO_ALL.items() if name != "bruck"}  # of one size
_BY_NAME: Final[dict[str, Mapping[str, Any]]] = {
    "allreduce": collectives.ALLREDUCE,
    "reduce_scatter": collectives.SHARDED,
    "all_gather": collectives.SHARDED,
    "broadcast": BROADCAST,
    "all_to_all": ALL_TO_ALL,
    **{op: _UNEVEN for op in OPERATIONS if op.startswith(UNEVEN)},
}


def algorithms(op: str) -> tuple[str, ...]:
    """Return the names of the algorithms for ``op``, the MPI library's own first (local)."""
    return (*_BY_NAME[op], AUTO) if op == "allreduce" else tuple(_BY_NAME[op])


def kinds(algorithm: str, op: str, wanted: Sequence[str]) -> list[str]:
    """Return the kinds of memory on which ``algorithm`` is measured (local).

    Beside ordinary memory, shared memory is for those that make use of it; alone it is for all but native. No
    all-to-all does.
    """
    if algorithm == NATIVE:
        return [ORDINARY]
    fits = not _is_all_to_all(op) and (algorithm in READS_SHARED or ORDINARY not in wanted)
    return [kind for kind in wanted if kind == ORDINARY or fits]


def _is_all_to_all(op: str) -> bool:
    return op == "all_to_all" or op.startswith(UNEVEN)


def contender(
    comm: Communicator, cell: CollectivesCell, algorithm: str, buffers: str, chosen: str = ""
) -> CollectivesContender:
    """Return ``algorithm`` for ``cell`` on memory of the kind ``buffers``. Collective over ``comm``.

    ``chosen`` is the algorithm that "auto" stands for.
    """
    make: dict[str, Callable[[Communicator, CollectivesCell, str], tuple[Run, list[ExpectedResult]]]] = {
        "allreduce": _allreduce,
        "reduce_scatter": _reduce_scatter,
        "all_gather": _all_gather,
        "broadcast": _broadcast,
        "all_to_all": _all_to_all,
    }
    to_all = _is_all_to_all(cell.op)
    run, expected = make["all_to_all" if to_all else cell.op](comm, cell, chosen or algorithm)
    return CollectivesContender(algorithm, buffers, run, tuple(expected), in_result=to_all)


def references(comm: Communicator, cell: CollectivesCell) -> list[CollectivesContender]:
    """Return the references, which bound every algorithm on this machine. Collective over ``comm``."""

    def copy(buffer: np.ndarray, result: np.ndarray) -> None:
        np.copyto(result, buffer)

    contenders = [CollectivesContender(MEMCPY, ORDINARY, copy, None)]
    members = comm.nodes().members
    if len(members) > 1:
        pair = [members[0][0], members[1][0]]
        peer = pair[1 - pair.index(comm.rank)] if comm.rank in pair else None

        def exchange(buffer: np.ndarray, result: np.ndarray) -> None:
            if peer is not None:
                comm.sendrecv(buffer, peer, result, peer)

        contenders.append(CollectivesContender(WIRE, ORDINARY, exchange, None, takes_part=peer is not None))
    return contenders


def refusal(comm: Communicator, contender: CollectivesContender, buffer: np.ndarray, result: np.ndarray) -> str:
    """Run ``contender`` once and return why any rank refused it, "" where it runs. Collective over ``comm``.

    Algorithms refuse on every rank and before they send anything.
    """
    reason = ""
    try:
        contender.run(buffer, result)
    except (UsageError, BufferHandoverError, ConfigurationError, MissingCapabilityError) as error:
        reason = str(error) or type(error).__name__
    return next(filter(None, comm.allgather_object(reason)), "")


def chosen(comm: Communicator, dtype: np.dtype, buffers: str, max_bytes: int, mpi_library: str) -> AlgorithmTable:
    """Return which algorithm "auto" is for each size up to ``max_bytes``, measured now. Collective over ``comm``."""
    wanted = autotune.TuningRequest(
        max_bytes=max_bytes,
        dtype=dtype,
        allocate=(lambda size: shared_memory.allocate(comm, size, dtype)) if buffers == SHARED else None,
    )
    return parse_algorithm(autotune.select(comm, comm, wanted, mpi_library, cached=False).text)
