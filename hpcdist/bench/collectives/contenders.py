"""Contenders of the benchmark of collectives, and the buffers that they work on.

A contender (`contender`) is one algorithm on one kind of memory: an algorithm of hpcdist, or the MPI library's
collective ("native"). Every round also measures two reference transfers (`references`):

    memcpy   every rank copies its buffer to other memory, all ranks at the same time. On one node this is about the
             minimum time of an allreduce; an in-place allreduce touches less memory and can be a little faster
    wire     on several nodes, the first ranks of two nodes send each other the buffer at the same time

Every timed call gets the next slot of a `BufferPool`, which is larger than the last-level cache: the data come from
memory, as gradients do. When all slots were used, the pool is verified and filled again, outside the timed section. The
`BufferContents` are small integers, whose sums are exact in any order.
"""

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, Final

import numpy as np

from hpcdist import collectives
from hpcdist.arrays.dtypes import accumulation_dtype, dtype_of
from hpcdist.arrays.ranges import ALIGN_BYTES, Range, align_up
from hpcdist.bench.collectives.results import OPERATIONS, ORDINARY, SHARED, UNEVEN, CollectivesCell, part_sizes
from hpcdist.collectives import autotune
from hpcdist.collectives.algorithms.all_to_all import ALL_TO_ALL, all_to_all
from hpcdist.collectives.algorithms.broadcast import BROADCAST, broadcast
from hpcdist.collectives.autotune import NATIVE
from hpcdist.collectives.dispatch import AlgorithmTable, parse_algorithm
from hpcdist.collectives.node import shared_memory
from hpcdist.comm.communicator import Communicator
from hpcdist.errors import BufferHandoverError, ConfigurationError, MissingCapabilityError, UsageError
from hpcdist.reporting.units import parse_bytes

AUTO: Final = "auto"  # the choice of `hpcdist.collectives.autotune` for the size, as at the start of a training
MEMCPY: Final = "memcpy"
WIRE: Final = "wire"
REFERENCES: Final = (MEMCPY, WIRE)
READS_SHARED: Final = ("node_shared", "hierarchical", AUTO)  # read other ranks' buffers in place if these are shared
CACHES: Final = 2  # size of a rank's pool, in last-level caches
UNKNOWN_CACHE_BYTES: Final = 64 << 20  # assumed cache size if the system does not report one
MEMORY_SHARE: Final = 0.4  # share of a node's available memory for the pools of all its ranks
PERIOD: Final = 127  # of the contents, in elements: a prime, so that chunks, slices and slots begin differently
VALUES: Final = 5  # contents are 0 to 4: sums are exact in float32 for millions of ranks
_REPEATS: Final = 128


def last_level_cache_bytes() -> int | None:
    """Return the size of the largest CPU cache in bytes, or None if unknown. Local."""
    paths = Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")
    texts = [path.read_text().strip() for path in paths]
    return max((parse_bytes(text) for text in texts if re.fullmatch(r"[1-9]\d*[KMG]", text)), default=None)


def available_bytes() -> int:
    """Return the available memory of this node in bytes. Local."""
    # Without MemAvailable in the report, half of the physical memory counts as available.
    try:
        match = re.search(r"^MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE)
    except OSError:
        match = None
    return int(match[1]) << 10 if match else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def slots(nbytes: int, cache_bytes: int, limit_bytes: int, hot: bool) -> int:
    """Return the number of buffers to use in turn: 1 if ``hot``, else enough to exceed a cache of ``cache_bytes``.

    ``nbytes``: size of each buffer. ``limit_bytes``: maximum size of all buffers together.
    """
    return 1 if hot else max(1, min(1 + -(-CACHES * cache_bytes // nbytes), limit_bytes // nbytes))


class BufferContents:
    """Test data for collectives: a periodic input for each of ``ranks`` ranks, and the sum of all inputs."""

    def __init__(self, ranks: int, dtype: np.dtype) -> None:
        index = np.arange(PERIOD, dtype=np.int64)
        self._bits = np.dtype(f"u{dtype.itemsize}")
        wide = accumulation_dtype(dtype)
        periods = [((index * (rank + 1) + rank) % PERIOD % VALUES).astype(wide) for rank in range(ranks)]
        total = np.zeros(PERIOD, wide)
        for period in periods:
            total += period
        # The key is the rank of an input, or None for the sum.
        self._periods = {rank: period.astype(dtype) for rank, period in [*enumerate(periods), (None, total)]}
        self._tiles: dict[int | None, np.ndarray] = {}

    def _tile(self, rank: int | None) -> np.ndarray:
        if rank not in self._tiles:
            self._tiles[rank] = np.tile(self._periods[rank], _REPEATS + 1)
        return self._tiles[rank]

    def _pieces(self, buffer: np.ndarray, rank: int | None, phase: int) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
        tile, step = self._tile(rank)[phase % PERIOD :], PERIOD * _REPEATS
        for start in range(0, buffer.size, step):
            piece = buffer[start : start + step]
            yield start, piece, tile[: piece.size]

    def fill(self, buffer: np.ndarray, rank: int, first_element: int) -> None:
        """Write the test input of ``rank``, starting at its element ``first_element``, into ``buffer``. Local."""
        for _, piece, values in self._pieces(buffer, rank, first_element):
            piece[...] = values

    def fill_slots(self, slots: np.ndarray, rank: int) -> None:
        """Fill each row of ``slots`` with the test input of ``rank``. Row k starts at element k of the input. Local."""
        # Rows are written in order, so that the cache holds the last rows.
        count, size = slots.shape
        num_grouped = 0
        if size <= PERIOD * _REPEATS:
            # A pool can have a million small slots: the PERIOD different rows are written in one assignment.
            rows = np.lib.stride_tricks.sliding_window_view(self._tile(rank), size)[:PERIOD]
            num_grouped = count - count % PERIOD
            slots[:num_grouped].reshape(-1, PERIOD, size)[...] = rows
        for slot in range(num_grouped, count):
            self.fill(slots[slot], rank, slot)

    def first_difference(self, buffer: np.ndarray, rank: int | None, first_element: int) -> int:
        """Return the first index at which ``buffer`` differs from the test input of ``rank``, or -1 if equal.

        ``rank`` None means the sum of all inputs. ``buffer[0]`` corresponds to the input's element ``first_element``.
        """
        for start, piece, values in self._pieces(buffer, rank, first_element):
            differs = piece.view(self._bits) != values.view(self._bits)  # no value is a negative zero
            if differs.any():
                return start + int(np.argmax(differs))
        return -1


@dataclass(frozen=True)
class ExpectedResult:
    """Expected values in the range ``part`` of a result: test input of ``rank``. ``rank`` None: sum of all inputs."""

    part: Range
    rank: int | None
    origin: int  # index of the first value in the input


class BufferPool:
    """Memory for ``count`` buffers and ``count`` result arrays, which the benchmarked algorithms use in turn."""

    def __init__(self, memory: np.ndarray, receive: np.ndarray, size: int, dtype: np.dtype, count: int) -> None:
        self.stride_bytes = align_up(size * dtype.itemsize, ALIGN_BYTES)
        self.memory, self.receive, self.size, self.dtype, self.count = memory, receive, size, dtype, count
        self._users: list[int] = []  # the contender of each slot used since the last fill

    def buffer(self, slot: int) -> np.ndarray:
        """Return buffer number ``slot``, on which a collective works in place."""
        return self._view(self.memory, slot)

    def result(self, slot: int) -> np.ndarray:
        """Return the result array number ``slot``, to which an all-to-all or a copy writes."""
        return self._view(self.receive, slot)

    def _view(self, memory: np.ndarray, slot: int) -> np.ndarray:
        start = slot * self.stride_bytes
        return memory[start : start + self.size * self.dtype.itemsize].view(self.dtype)

    @property
    def is_used_up(self) -> bool:
        """True if every buffer was used since the last `fill`."""
        return len(self._users) == self.count

    def take(self, contender: int) -> tuple[np.ndarray, np.ndarray]:
        """Return an unused pair (buffer, result array). Record that algorithm number ``contender`` uses the pair."""
        slot = len(self._users)
        self._users.append(contender)
        return self.buffer(slot), self.result(slot)

    def fill(self, contents: BufferContents, rank: int) -> None:
        """Write the test input of ``rank`` from ``contents`` into all buffers, and mark them as unused. Local."""
        self._users.clear()
        slots = self.memory[: self.count * self.stride_bytes].reshape(self.count, self.stride_bytes)
        contents.fill_slots(slots[:, : self.size * self.dtype.itemsize].view(self.dtype), rank)

    def first_wrong(
        self, contents: BufferContents, contender: int, expected: Sequence[ExpectedResult], *, in_result: bool = False
    ) -> str:
        """Return a text about the first wrong result of algorithm number ``contender``, or "" if none is wrong."""
        for slot in (slot for slot, user in enumerate(self._users) if user == contender):
            data = self.result(slot) if in_result else self.buffer(slot)
            for item in expected:
                index = contents.first_difference(data[item.part.slice], item.rank, slot + item.origin)
                if index >= 0:
                    index += item.part.start
                    return f"element {index} is {data[index]}, which no order of summation gives"
        return ""


Run = Callable[[np.ndarray, np.ndarray], None]  # (buffer, result): works in place, or writes to ``result`` if it cannot


@dataclass(frozen=True)
class CollectivesContender:
    """Algorithm to benchmark on "ordinary" or "shared" memory, with a function that runs it."""

    algorithm: str
    buffers: str
    run: Run
    expected: tuple[ExpectedResult, ...] | None
    takes_part: bool = True  # False on ranks that are idle in a reference transfer
    in_result: bool = False  # the expected values are in the result, not in the buffer


Prepared = tuple[Run, list[ExpectedResult]]


def _allreduce(comm: Communicator, cell: CollectivesCell, algorithm: str) -> Prepared:
    expected = [ExpectedResult(Range(0, cell.size), None, 0)]
    return lambda buffer, result: collectives.allreduce(comm, buffer, algorithm), expected


def _sharded(comm: Communicator, cell: CollectivesCell, algorithm: str) -> Prepared:
    sharding = collectives.SHARDED[algorithm]
    shares = sharding.shares(comm, cell.size, dtype_of(cell.dtype).itemsize)
    if cell.op == "reduce_scatter":
        expected = [ExpectedResult(shares[comm.rank], None, shares[comm.rank].start)]
        return lambda buffer, result: sharding.reduce_scatter(comm, buffer, shares), expected
    expected = [ExpectedResult(share, rank, share.start) for rank, share in enumerate(shares)]
    return lambda buffer, result: sharding.all_gather(comm, buffer, shares), expected


def _broadcast(comm: Communicator, cell: CollectivesCell, algorithm: str) -> Prepared:
    expected = [ExpectedResult(Range(0, cell.size), 0, 0)]
    return lambda buffer, result: broadcast(comm, buffer, 0, algorithm), expected


def _all_to_all(comm: Communicator, cell: CollectivesCell, algorithm: str) -> Prepared:
    sizes = part_sizes(cell.op, cell.size, comm.size)
    size, ends = sizes[comm.rank], [0, *accumulate(sizes)]
    parts = [Range(start, stop) for start, stop in pairwise(ends)]
    rows = [Range(size * peer, size * (peer + 1)) for peer in range(comm.size)]
    expected = [ExpectedResult(row, peer, ends[comm.rank]) for peer, row in enumerate(rows)]
    return lambda buffer, result: all_to_all(comm, buffer, result[: size * comm.size], parts, rows, algorithm), expected


_UNEVEN: Final = {name: function for name, function in ALL_TO_ALL.items() if name != "bruck"}  # needs equal parts
# Operation -> algorithms by name, and the function that prepares one of them
_OPERATIONS: Final[dict[str, tuple[Mapping[str, Any], Callable[[Communicator, CollectivesCell, str], Prepared]]]] = {
    "allreduce": (collectives.ALLREDUCE, _allreduce),
    "reduce_scatter": (collectives.SHARDED, _sharded),
    "all_gather": (collectives.SHARDED, _sharded),
    "broadcast": (BROADCAST, _broadcast),
    "all_to_all": (ALL_TO_ALL, _all_to_all),
    **{op: (_UNEVEN, _all_to_all) for op in OPERATIONS if op.startswith(UNEVEN)},
}


def algorithms(op: str) -> tuple[str, ...]:
    """Return the names of the algorithms for ``op``. The first name, "native", means the MPI library. Local."""
    names = tuple(_OPERATIONS[op][0])
    return (*names, AUTO) if op == "allreduce" else names


def kinds(algorithm: str, op: str, requested: Sequence[str]) -> list[str]:
    """Return the kinds of memory in ``requested`` on which ``algorithm`` is measured for ``op``. Local."""
    # "native" and all-to-all use ordinary memory only. If both kinds are requested, only algorithms that read shared
    # memory are measured on it.
    if algorithm == NATIVE:
        return [ORDINARY]
    can_share = _OPERATIONS[op][1] is not _all_to_all and (algorithm in READS_SHARED or ORDINARY not in requested)
    return [kind for kind in requested if kind == ORDINARY or can_share]


def contender(
    comm: Communicator, cell: CollectivesCell, algorithm: str, memory_kind: str, chosen: str = ""
) -> CollectivesContender:
    """Prepare ``algorithm`` for the benchmark of ``cell`` (collective, dtype and size). Collective over ``comm``.

    ``memory_kind``: "ordinary" or "shared" buffers. ``chosen``: algorithm to run if ``algorithm`` is "auto", else "".
    """
    prepare = _OPERATIONS[cell.op][1]
    run, expected = prepare(comm, cell, chosen or algorithm)
    return CollectivesContender(algorithm, memory_kind, run, tuple(expected), in_result=prepare is _all_to_all)


def references(comm: Communicator) -> list[CollectivesContender]:
    """Return a list of reference transfers: a memory copy and, with two nodes or more, an exchange. Collective."""
    contenders = [CollectivesContender(MEMCPY, ORDINARY, lambda buffer, result: np.copyto(result, buffer), None)]
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
    """Run ``contender`` once on ``buffer`` and ``result``. Return the reason why it is unsupported, or "".

    Collective over ``comm``.
    """
    # An unsupported algorithm raises on every rank before it sends anything.
    reason = ""
    try:
        contender.run(buffer, result)
    except (UsageError, BufferHandoverError, ConfigurationError, MissingCapabilityError) as error:
        reason = str(error) or type(error).__name__
    return next(filter(None, comm.allgather_object(reason)), "")


def chosen(comm: Communicator, dtype: np.dtype, memory_kind: str, max_bytes: int, mpi_library: str) -> AlgorithmTable:
    """Return a table of the fastest allreduce algorithm for each size up to ``max_bytes``, by measurement. Collective.

    ``memory_kind``: "ordinary" or "shared" buffers. ``mpi_library``: name of the MPI library.
    """
    request = autotune.TuningRequest(
        max_bytes=max_bytes,
        dtype=dtype,
        allocate=(lambda size: shared_memory.allocate(comm, size, dtype)) if memory_kind == SHARED else None,
    )
    return parse_algorithm(autotune.select(comm, comm, request, mpi_library, cached=False).text)
