"""Run a benchmark of collectives: time every contender on every cell, and give rank 0's results as they come.

In a cell the contenders take turns, every call begins behind a barrier, and the time of every rank is recorded. The
time of an iteration is that of the slowest rank. A rank that leaves the barrier early waits for the others within its
own time, so the figure includes the skew of the barrier; on one node, where the ranks read one clock, the skew is
recorded beside it.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from hpcdist.arrays.dtypes import dtype_of
from hpcdist.arrays.ranges import ALIGN_BYTES, align_up
from hpcdist.bench.collectives import contenders
from hpcdist.bench.collectives.contenders import BufferContents, BufferPool, CollectivesContender
from hpcdist.bench.collectives.results import (
    COLD,
    HOT,
    ORDINARY,
    OURS,
    SHARED,
    CollectivesCell,
    CollectivesConfiguration,
    CollectivesRequest,
    ConfigurationKey,
    cells,
)
from hpcdist.bench.timing import without_collection
from hpcdist.collectives.dispatch import AlgorithmTable
from hpcdist.collectives.node import shared_memory
from hpcdist.comm.communicator import Communicator
from hpcdist.errors import UsageError
from hpcdist.reporting.units import format_bytes

MOST_ITERATIONS: Final = 5000
_FIRST: Final = 3  # rounds before the first look at the clock
_TAG: Final = 7001
Say = Callable[[str], None]
Keep = Callable[[Sequence[CollectivesConfiguration]], None]


@dataclass(frozen=True)
class CellLimits:
    """Length of the measurement of a cell: ``iterations`` of each contender; for None about ``seconds`` in all.

    In those seconds ``least`` iterations are made, however long they take.
    """

    seconds: float
    iterations: int | None
    warmup: int
    least: int


@dataclass(frozen=True)
class CellSamples:
    """Raw times of one contender, on rank 0 (elsewhere empty): (iteration, rank).

    ``start_s`` is when a rank began after the first rank did; NaN where ranks have no common clock. ``wrong`` says what
    was wrong first with a result, "" for nothing; ``verified`` is how many iterations' results were compared.
    """

    time_s: np.ndarray
    start_s: np.ndarray
    wrong: str
    verified: int


class CellTiming:
    """One cell under way on one rank. Making it is collective over ``comm``."""

    def __init__(
        self,
        comm: Communicator,
        taking_part: Sequence[CollectivesContender],
        pools: dict[str, BufferPool],
        contents: BufferContents,
        check: bool,
    ) -> None:
        self._comm, self._contenders = comm, taking_part
        used = {contender.buffers for contender in taking_part}
        self._pools = {kind: pool for kind, pool in pools.items() if kind in used}
        self._contents, self._check = contents, check
        self._one_clock = comm.nodes().count == 1  # here, on every rank: the first call is collective
        self._wrong: dict[int, str] = {}
        self._rows: list[tuple[list[float], list[float]]] = []  # per round: begin and duration of each contender

    def run(self, limits: CellLimits, seed: Sequence[int]) -> list[CellSamples]:
        """Measure and return the samples of each contender. Collective over the communicator."""
        order = np.random.default_rng(list(seed))  # the same on every rank
        for pool in self._pools.values():
            pool.fill(self._contents, self._comm.rank)
        with without_collection():
            self._rounds(limits.warmup, order)
            self._rows.clear()
            self._until_enough(limits, order)
        for name in self._pools:
            self._verify(name)
        return self._gather()

    def _until_enough(self, limits: CellLimits, order: np.random.Generator) -> None:
        if limits.iterations is not None:
            self._rounds(limits.iterations, order)
            return
        begin, count = time.perf_counter(), min(_FIRST, limits.least)
        while count:
            self._rounds(count, order)
            # Rank 0 decides by its clock, refills and checks included: ranks that made different numbers of rounds
            # would wait for each other forever. At most 4 times what was done, since the first rounds can mislead.
            done, spent_s = len(self._rows), time.perf_counter() - begin
            fits = int((limits.seconds - spent_s) / spent_s * done)
            count = self._comm.broadcast_object(min(max(fits, limits.least - done), MOST_ITERATIONS - done, 4 * done))
            count = max(0, count)

    def _rounds(self, count: int, order: np.random.Generator) -> None:
        for _ in range(count):
            turns = order.permutation(len(self._contenders))
            begins, times = [0.0] * len(turns), [0.0] * len(turns)
            for turn in turns:
                contender = self._contenders[turn]
                buffer, result = self._next(contender.buffers, int(turn))
                # Behind the barrier nothing but the call: its skew is in the time, and in start_s where it can be seen.
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
            self._comm.barrier()  # others may still read what is shared
            pool.fill(self._contents, self._comm.rank)
            self._comm.barrier()
        return pool.take(contender)

    def _verify(self, kind: str) -> None:
        for index, contender in enumerate(self._contenders):
            if (
                self._check
                and contender.buffers == kind
                and contender.expected is not None
                and index not in self._wrong
            ):
                pool = self._pools[kind]
                what = pool.first_wrong(self._contents, index, contender.expected, in_result=contender.in_result)
                if what:
                    self._wrong[index] = what

    def _gather(self) -> list[CellSamples]:
        """Bring all times to rank 0. Collective."""
        wrong_by_rank = self._comm.allgather_object(self._wrong)
        own = np.array(self._rows, np.float64)  # (rounds, begin and duration, contenders)
        if self._comm.rank > 0:
            self._comm.send(own.reshape(-1), 0, _TAG)
            return []
        ranks = np.empty((self._comm.size, *own.shape))
        ranks[0] = own
        for peer in range(1, self._comm.size):
            self._comm.recv(ranks[peer].reshape(-1), peer, _TAG)
        # Monotonic clocks of one node are one clock, so begins can be compared; those of several nodes cannot.
        begin_s, time_s = ranks[:, :, 0], ranks[:, :, 1]  # (ranks, rounds, contenders)
        start_s = begin_s - begin_s.min(axis=0)
        if not self._one_clock:
            start_s[...] = np.nan
        return [
            CellSamples(
                np.ascontiguousarray(time_s[:, :, index].T),
                np.ascontiguousarray(start_s[:, :, index].T),
                _first_wrong(wrong_by_rank, index),
                len(own) if self._check and contender.expected is not None else 0,
            )
            for index, contender in enumerate(self._contenders)
        ]


def _first_wrong(wrong_by_rank: Sequence[dict[int, str]], contender: int) -> str:
    """Return what was wrong first with a result of ``contender``, with the rank; "" for nothing."""
    return next(
        (f"rank {rank}: {wrong[contender]}" for rank, wrong in enumerate(wrong_by_rank) if contender in wrong), ""
    )


@dataclass(frozen=True)
class PoolMemory:
    """Memory of the pools of all cells, one piece of each kind, and one for results that do not fit in place.

    It also remembers what "auto" stands for, by dtype and kind of memory: runs that share it compare the same.
    """

    pieces: dict[str, np.ndarray]
    result: np.ndarray
    cache_bytes: int
    hot: bool
    chosen: dict[tuple[str, str], AlgorithmTable] = field(default_factory=dict)
    shared_result: np.ndarray | None = None  # for buffers that are shared: both kinds count slots of their own

    def slots(self, nbytes: int) -> int:
        """Return how many buffers of ``nbytes`` take turns in a piece."""
        most = self.result.nbytes // align_up(nbytes, ALIGN_BYTES)
        return min(most, contenders.slots(nbytes, self.cache_bytes, self.result.nbytes, self.hot))


def take_memory(comm: Communicator, wanted: CollectivesRequest, notes: list[str]) -> PoolMemory:
    """Take memory for all that is ``wanted`` at once, and touch it. Collective over ``comm``.

    ``notes`` gets what is to be said of it. Raises UsageError where there is too little.
    """
    kinds = dict.fromkeys([ORDINARY, *wanted.buffers])
    limit = int(contenders.MEMORY_SHARE * contenders.available_bytes()) // comm.nodes().intra.size // (2 * len(kinds))
    # All ranks need the same number of slots: the least memory and the largest cache of all decide.
    cache = contenders.last_level_cache_bytes()
    of_ranks = comm.allgather_object((limit, cache or contenders.UNKNOWN_CACHE_BYTES))
    limit, cache_bytes = min(value for value, _ in of_ranks), max(value for _, value in of_ranks)
    sizes = {cell.bytes for cell in cells(wanted, comm.size)[0]}  # of some operations, more than was asked for
    largest = max(sizes)
    if largest > limit:
        raise UsageError(
            f"a buffer of {format_bytes(largest)} does not fit: {format_bytes(limit)} are left for each kind of buffer "
            "of a rank on the fullest node; choose smaller --bytes, or fewer ranks on a node"
        )
    counts = {nbytes: contenders.slots(nbytes, cache_bytes, limit, wanted.hot) for nbytes in sizes}
    if not wanted.hot and any(nbytes * count <= cache_bytes for nbytes, count in counts.items()):
        notes.append("the memory left is too small for buffers beyond the last-level cache: some lie in it")
    total = max(align_up(nbytes, ALIGN_BYTES) * count for nbytes, count in counts.items())
    pieces = {ORDINARY: np.empty(total, np.uint8)}  # its pages are touched when it is filled, before it is used
    if SHARED in kinds:
        pieces[SHARED] = shared_memory.allocate(comm, total, np.dtype(np.uint8))
    result = np.empty(total, np.uint8)
    result.fill(0)
    other = np.zeros(total, np.uint8) if SHARED in kinds else None
    return PoolMemory(pieces, result, cache_bytes, wanted.hot, shared_result=other)


def _pools(memory: PoolMemory, cell: CollectivesCell) -> dict[str, BufferPool]:
    dtype, count = dtype_of(cell.dtype), memory.slots(cell.bytes)
    results = {ORDINARY: memory.result, SHARED: memory.shared_result}
    return {
        kind: BufferPool(piece, memory.result if (own := results[kind]) is None else own, cell.size, dtype, count)
        for kind, piece in memory.pieces.items()
    }


class _ContenderChoice:
    """Choice of the contenders of each cell; "auto" is measured once for each dtype and kind of memory."""

    def __init__(
        self,
        comm: Communicator,
        wanted: CollectivesRequest,
        chosen: dict[tuple[str, str], AlgorithmTable],
        mpi_library: str,
        say: Say,
    ) -> None:
        self._comm, self._wanted, self._chosen, self._library, self._say = comm, wanted, chosen, mpi_library, say

    def of(
        self, cell: CollectivesCell, pools: dict[str, BufferPool], contents: BufferContents
    ) -> list[CollectivesContender]:
        """Return the contenders, native first and references last; none where no algorithm runs. Collective."""
        known = contenders.algorithms(cell.op)
        named = [name for name in self._wanted.algorithms if name in known]
        runnable = []
        for name in dict.fromkeys([contenders.NATIVE, *(named if self._wanted.algorithms else known)]):
            for kind in contenders.kinds(name, cell.op, self._wanted.buffers):
                chosen = self._auto(cell, kind) if name == contenders.AUTO else ""
                contender = contenders.contender(self._comm, cell, name, kind, chosen)
                contents.fill(pools[kind].buffer(0), self._comm.rank, 0)
                reason = contenders.refusal(self._comm, contender, pools[kind].buffer(0), pools[kind].result(0))
                if not reason:
                    runnable.append(contender)
                elif name in named:
                    raise UsageError(f"{name} does not run {cell.op} of {cell.dtype} here: {reason}")
                else:
                    self._say(f"{name} is left out of {cell.op} of {cell.dtype}: {reason}")
        return [*runnable, *contenders.references(self._comm, cell)] if runnable else []

    def _auto(self, cell: CollectivesCell, kind: str) -> str:
        key = cell.dtype, kind
        if key not in self._chosen:
            dtype, most = dtype_of(cell.dtype), max(self._wanted.bytes)
            self._chosen[key] = contenders.chosen(self._comm, dtype, kind, most, self._library)
            self._say(f"auto is {self._chosen[key]} for {cell.dtype} in {kind} memory")
        return self._chosen[key].at(cell.bytes)


def run(
    comm: Communicator,
    wanted: CollectivesRequest,
    mpi_library: str,
    keep: Keep,
    say: Say,
    memory: PoolMemory | None = None,
) -> None:
    """Measure all that is ``wanted``; ``keep`` and ``say`` are called on rank 0. Collective over ``comm``.

    Buffers lie in ``memory``, which several runs may share (`take_memory`), or in some of this run. ``keep`` gets the
    configurations of a cell when it is done. An algorithm that was named and does not run here raises
    UsageError; one that was not named is left out, and ``say`` gets the reason.
    """
    order, notes = cells(wanted, comm.size)
    memory = memory or take_memory(comm, wanted, notes)
    contents = {name: BufferContents(comm.size, dtype_of(name)) for name in wanted.dtypes}
    printed: set[str] = set()

    def say_once(text: str) -> None:
        if comm.rank == 0 and text not in printed:
            printed.add(text)
            say(text)

    if comm.size == 1:
        notes.append("one rank: nothing is exchanged, and no bandwidth is shown")
    for note in notes:
        say_once(note)
    limits, measured = CellLimits(wanted.seconds, wanted.iterations, wanted.warmup, wanted.least), False
    choice = _ContenderChoice(comm, wanted, memory.chosen, mpi_library, say_once)
    for number, cell in enumerate(order):
        pools = _pools(memory, cell)
        taking_part = choice.of(cell, pools, contents[cell.dtype])
        if not taking_part:
            continue
        measured = True
        timing = CellTiming(comm, taking_part, pools, contents[cell.dtype], wanted.check)
        samples = timing.run(limits, (wanted.seed, number))
        if comm.rank == 0:
            pool = pools[ORDINARY]
            cache = HOT if wanted.hot else COLD
            keep(
                [
                    _configuration(comm, cell, contender, times, pool.count, cache, mpi_library)
                    for contender, times in zip(taking_part, samples, strict=True)
                ]
            )
    if not measured:
        raise UsageError(
            "no algorithm runs what was asked for here, for the reasons above; choose another --op or --dtype"
        )


def _configuration(
    comm: Communicator,
    cell: CollectivesCell,
    contender: CollectivesContender,
    samples: CellSamples,
    slots: int,
    cache: str,
    mpi_library: str,
) -> CollectivesConfiguration:
    key = ConfigurationKey(
        op=cell.op,
        dtype=cell.dtype,
        bytes=cell.bytes,
        ranks=comm.size,
        nodes=comm.nodes().count,
        algorithm=contender.algorithm,
        buffers=contender.buffers,
        cache=cache,
        implementation=OURS,
        mpi_library=mpi_library,
    )
    session = np.zeros(len(samples.time_s), np.int32)
    is_reference = contender.expected is None
    return CollectivesConfiguration(
        key, is_reference, slots, samples.verified, samples.wrong, samples.time_s, samples.start_s, session
    )
