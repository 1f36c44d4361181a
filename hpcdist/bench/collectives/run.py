"""Run the benchmark of collectives: measure every contender on every cell, and return the results on rank 0.

In a cell the contenders take turns. Every call begins after a barrier, and every rank records its time. The time of an
iteration is the time of the slowest rank. A rank that leaves the barrier early waits for the others within its timed
call, so the time includes the skew of the barrier. On one node, where all ranks read the same clock, the skew is
recorded too.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Final

import numpy as np

from hpcdist.arrays.dtypes import dtype_of
from hpcdist.arrays.ranges import ALIGN_BYTES, align_up
from hpcdist.bench.collectives import contenders, results
from hpcdist.bench.collectives.contenders import BufferContents, BufferPool, CollectivesContender
from hpcdist.bench.collectives.results import ORDINARY, SHARED, CellLimits, CollectivesCell, CollectivesConfiguration
from hpcdist.bench.timing import without_collection
from hpcdist.collectives.autotune import NATIVE
from hpcdist.collectives.dispatch import AlgorithmTable
from hpcdist.collectives.node import shared_memory
from hpcdist.comm.communicator import Communicator
from hpcdist.errors import UsageError
from hpcdist.reporting.units import format_bytes

MOST_ITERATIONS: Final = 5000
_FIRST: Final = 3  # rounds before the first estimate of the number of rounds
_TAG: Final = 7001
Print = Callable[[str], None]
Save = Callable[[Sequence[CollectivesConfiguration]], None]


@dataclass(frozen=True)
class CellSamples:
    """Measured durations of one algorithm on rank 0: arrays of shape (iteration, rank), in seconds."""

    time_s: np.ndarray
    start_s: np.ndarray  # delay after the first rank's start; NaN without a common clock
    wrong: str  # text on the first wrong result, or ""
    verified: int  # number of checked iterations


class CellTiming:
    """Measurement of several algorithms for one collective, dtype and size. Construction is collective."""

    def __init__(
        self,
        comm: Communicator,
        cell_contenders: Sequence[CollectivesContender],
        pools: dict[str, BufferPool],
        contents: BufferContents,
        check: bool,
    ) -> None:
        self._comm, self._contenders, self._contents, self._check = comm, cell_contenders, contents, check
        used_kinds = {contender.buffers for contender in cell_contenders}
        self._pools = {kind: pool for kind, pool in pools.items() if kind in used_kinds}
        self._one_clock = comm.nodes().count == 1  # on every rank: the first call of nodes() is collective
        self._wrong: dict[int, str] = {}
        self._rows: list[tuple[list[float], list[float]]] = []  # per round: begin and duration of each contender

    def run(self, limits: CellLimits, seed: Sequence[int]) -> list[CellSamples]:
        """Time all algorithms in random order. Return a `CellSamples` per algorithm on rank 0, else []. Collective."""
        order = np.random.default_rng(list(seed))  # the same on every rank
        for pool in self._pools.values():
            pool.fill(self._contents, self._comm.rank)
        with without_collection():
            self._rounds(limits.warmup, order)
            self._rows.clear()
            self._rounds_within(limits, order)
        for kind in self._pools:
            self._verify(kind)
        return self._gather()

    def _rounds_within(self, limits: CellLimits, order: np.random.Generator) -> None:
        if limits.iterations is not None:
            self._rounds(limits.iterations, order)
            return
        begin, count = time.perf_counter(), min(_FIRST, limits.least)
        while count > 0:
            self._rounds(count, order)
            # Rank 0 decides with its clock, including refills and checks: ranks with different numbers of rounds would
            # deadlock. At most 4 times as many rounds as so far, because the first rounds can be slow or fast.
            done, spent_s = len(self._rows), time.perf_counter() - begin
            fits = int((limits.seconds - spent_s) / spent_s * done)
            count = self._comm.broadcast_object(min(max(fits, limits.least - done), MOST_ITERATIONS - done, 4 * done))

    def _rounds(self, count: int, order: np.random.Generator) -> None:
        for _ in range(count):
            turns = order.permutation(len(self._contenders))
            begins, times = [0.0] * len(turns), [0.0] * len(turns)
            for turn in turns:
                contender = self._contenders[turn]
                buffer, result = self._next(contender.buffers, int(turn))
                # Only the call follows the barrier. Its skew is in the time, and in start_s if clocks can be compared.
                self._comm.barrier()
                begin = time.perf_counter()
                contender.run(buffer, result)
                end = time.perf_counter()
                begins[turn], times[turn] = begin, end - begin if contender.takes_part else np.nan
            self._rows.append((begins, times))

    def _next(self, kind: str, contender: int) -> tuple[np.ndarray, np.ndarray]:
        pool = self._pools[kind]
        if pool.is_used_up:
            self._verify(kind)
            self._comm.barrier()  # other ranks may still read shared buffers
            pool.fill(self._contents, self._comm.rank)
            self._comm.barrier()
        return pool.take(contender)

    def _verify(self, kind: str) -> None:
        for index, contender in enumerate(self._contenders) if self._check else ():
            if contender.buffers == kind and contender.expected is not None and index not in self._wrong:
                wrong = self._pools[kind].first_wrong(
                    self._contents, index, contender.expected, in_result=contender.in_result
                )
                if wrong:
                    self._wrong[index] = f"rank {self._comm.rank}: {wrong}"

    def _gather(self) -> list[CellSamples]:
        wrong_by_rank = self._comm.allgather_object(self._wrong)
        local_rows = np.array(self._rows, np.float64)  # (rounds, begin and duration, contenders)
        if self._comm.rank > 0:
            self._comm.send(local_rows.reshape(-1), 0, _TAG)
            return []
        rows = np.empty((self._comm.size, *local_rows.shape))
        rows[0] = local_rows
        for peer in range(1, self._comm.size):
            self._comm.recv(rows[peer].reshape(-1), peer, _TAG)
        # The ranks of one node read the same monotonic clock. Clocks of several nodes cannot be compared.
        begin_s, time_s = rows[:, :, 0], rows[:, :, 1]  # (ranks, rounds, contenders)
        start_s = begin_s - begin_s.min(axis=0) if self._one_clock else np.full_like(begin_s, np.nan)
        return [
            CellSamples(
                np.ascontiguousarray(time_s[:, :, index].T),
                np.ascontiguousarray(start_s[:, :, index].T),
                next((wrong[index] for wrong in wrong_by_rank if index in wrong), ""),
                len(local_rows) if self._check and contender.expected is not None else 0,
            )
            for index, contender in enumerate(self._contenders)
        ]


@dataclass(frozen=True)
class PoolMemory:
    """Memory for the buffers of a benchmark, which several runs can share."""

    pieces: dict[str, np.ndarray]  # buffers, by kind of memory
    result: np.ndarray  # memory of the results
    cache_bytes: int
    hot: bool
    chosen: dict[tuple[str, str], AlgorithmTable] = field(default_factory=dict)

    def slots(self, nbytes: int) -> int:
        """Return the number of buffers of ``nbytes`` bytes to use in turn."""
        available = self.result.nbytes // align_up(nbytes, ALIGN_BYTES)
        return min(available, contenders.slots(nbytes, self.cache_bytes, self.result.nbytes, self.hot))


def take_memory(comm: Communicator, request: results.CollectivesRequest, notes: list[str]) -> PoolMemory:
    """Allocate the buffers of the benchmark ``request``. Collective over ``comm``.

    Appends warnings to the list ``notes``. Raises UsageError if a buffer does not fit into memory.
    """
    kinds = dict.fromkeys([ORDINARY, *request.buffers])
    limit = int(contenders.MEMORY_SHARE * contenders.available_bytes()) // comm.nodes().intra.size // (1 + len(kinds))
    # All ranks need the same number of slots: use the minimum of the memory and the maximum of the cache.
    cache = contenders.last_level_cache_bytes() or contenders.UNKNOWN_CACHE_BYTES
    limits, caches = zip(*comm.allgather_object((limit, cache)), strict=True)
    limit, cache_bytes = min(limits), max(caches)
    sizes = {cell.bytes for cell in results.cells(request, comm.size)[0]}  # rounded, up to more than the request
    if max(sizes) > limit:
        raise UsageError(
            f"a buffer of {format_bytes(max(sizes))} does not fit into memory: the buffers of a rank may take "
            f"{format_bytes(limit)}; choose smaller --bytes, or fewer ranks per node"
        )
    counts = {nbytes: contenders.slots(nbytes, cache_bytes, limit, request.hot) for nbytes in sizes}
    if not request.hot and any(nbytes * count <= cache_bytes for nbytes, count in counts.items()):
        notes.append("the free memory is too small: the buffers of some sizes fit into the last-level cache")
    total = max(align_up(nbytes, ALIGN_BYTES) * count for nbytes, count in counts.items())
    pieces = {ORDINARY: np.empty(total, np.uint8)}  # the first fill of the pool touches its pages
    if SHARED in kinds:
        pieces[SHARED] = shared_memory.allocate(comm, total, np.dtype(np.uint8))
    return PoolMemory(pieces, np.full(total, 0, np.uint8), cache_bytes, request.hot)


@dataclass(frozen=True)
class _ContenderChoice:
    comm: Communicator
    request: results.CollectivesRequest
    tables: dict[tuple[str, str], AlgorithmTable]
    mpi_library: str
    print_line: Print

    def contenders(
        self, cell: CollectivesCell, pools: dict[str, BufferPool], contents: BufferContents
    ) -> list[CollectivesContender]:
        """Return a list of the supported algorithms for ``cell``, and of the reference transfers. Collective.

        ``pools``: {kind of memory: pool}. Each algorithm is tried on slot 0 of a pool. ``contents``: test inputs.
        """
        names = contenders.algorithms(cell.op)
        named = [name for name in self.request.algorithms if name in names]
        runnable = []
        for name in dict.fromkeys([NATIVE, *(named if self.request.algorithms else names)]):
            for kind in contenders.kinds(name, cell.op, self.request.buffers):
                chosen = self._auto(cell, kind) if name == contenders.AUTO else ""
                contender = contenders.contender(self.comm, cell, name, kind, chosen)
                contents.fill(pools[kind].buffer(0), self.comm.rank, 0)
                reason = contenders.refusal(self.comm, contender, pools[kind].buffer(0), pools[kind].result(0))
                if not reason:
                    runnable.append(contender)
                elif name in named:
                    raise UsageError(f"{name} does not run {cell.op} of {cell.dtype} here: {reason}")
                else:
                    self.print_line(f"{name} is left out of {cell.op} of {cell.dtype}: {reason}")
        return [*runnable, *contenders.references(self.comm)] if runnable else []

    def _auto(self, cell: CollectivesCell, kind: str) -> str:
        key = cell.dtype, kind
        if key not in self.tables:
            dtype, max_bytes = dtype_of(cell.dtype), max(self.request.bytes)
            self.tables[key] = contenders.chosen(self.comm, dtype, kind, max_bytes, self.mpi_library)
            self.print_line(f"auto is {self.tables[key]} for {cell.dtype} in {kind} memory")
        return self.tables[key].at(cell.bytes)


def run(
    comm: Communicator,
    request: results.CollectivesRequest,
    mpi_library: str,
    save: Save,
    print_line: Print,
    memory: PoolMemory | None = None,
) -> None:
    """Run the benchmark ``request``. Raises UsageError if an algorithm cannot run. Collective over ``comm``.

    ``mpi_library``: name of the MPI library. ``save``: function that stores results on rank 0. ``print_line``:
    function that prints on rank 0. ``memory``: buffers to use, or None to allocate new buffers.
    """
    order, notes = results.cells(request, comm.size)
    memory = memory or take_memory(comm, request, notes)
    contents = {name: BufferContents(comm.size, dtype_of(name)) for name in request.dtypes}
    printed: set[str] = set()

    def print_once(text: str) -> None:
        if comm.rank == 0 and text not in printed:
            printed.add(text)
            print_line(text)

    if comm.size == 1:
        notes.append("one rank: nothing is exchanged, and no bandwidth is shown")
    for note in notes:
        print_once(note)
    has_measured = False
    choice = _ContenderChoice(comm, request, memory.chosen, mpi_library, print_once)
    for number, cell in enumerate(order):
        dtype, slots = dtype_of(cell.dtype), memory.slots(cell.bytes)
        # Only contenders on ordinary memory write to the results.
        pools = {
            kind: BufferPool(piece, memory.result, cell.size, dtype, slots) for kind, piece in memory.pieces.items()
        }
        chosen = choice.contenders(cell, pools, contents[cell.dtype])
        if not chosen:
            continue
        has_measured = True
        timing = CellTiming(comm, chosen, pools, contents[cell.dtype], request.check)
        samples = timing.run(request, (request.seed, number))
        if comm.rank == 0:
            common = {**asdict(cell), "ranks": comm.size, "nodes": comm.nodes().count, "mpi_library": mpi_library}
            common |= {"cache": results.HOT if request.hot else results.COLD, "implementation": results.OURS}
            configurations = []
            for contender, item in zip(chosen, samples, strict=True):
                key = results.ConfigurationKey(**common, algorithm=contender.algorithm, buffers=contender.buffers)
                session, is_reference = np.zeros(len(item.time_s), np.int32), contender.expected is None
                values = item.verified, item.wrong, item.time_s, item.start_s, session
                configurations.append(CollectivesConfiguration(key, is_reference, slots, *values))
            save(configurations)
    if not has_measured:
        raise UsageError("no algorithm runs this request, for the reasons above; choose another --op or --dtype")
