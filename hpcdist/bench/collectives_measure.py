"""The timing of one cell: its contenders take turns, every call from a barrier on, every rank's time kept.

The time of an iteration is that of the slowest rank. A rank that leaves the barrier early waits for the others within
its own time, so the figure includes the skew of the barrier; on one node, where the ranks read one clock, the skew is
kept beside it.
"""

import gc
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from hpcdist.bench.collectives_buffers import Contents, Pool
from hpcdist.bench.collectives_contenders import Contender
from hpcdist.comm.communicator import Communicator

MOST: Final = 5000
_FIRST: Final = 3  # rounds before the first look at the clock
_TAG: Final = 7001


@dataclass(frozen=True)
class Limits:
    """How long a cell is measured: ``iterations`` of each contender; for None about ``seconds`` in all.

    In those seconds ``least`` iterations are made, however long they take.
    """

    seconds: float
    iterations: int | None
    warmup: int
    least: int


@dataclass(frozen=True)
class Samples:
    """Raw times of one contender, on rank 0 (elsewhere empty): (iteration, rank).

    ``start_s`` is when a rank began after the first rank did; NaN where ranks have no common clock. ``wrong`` says what
    was wrong first with a result, "" for nothing; ``verified`` is how many iterations' results were compared.
    """

    time_s: np.ndarray
    start_s: np.ndarray
    wrong: str
    verified: int


class Timing:
    """One cell under way on one rank. Making it is collective over ``comm``."""

    def __init__(
        self,
        comm: Communicator,
        contenders: Sequence[Contender],
        pools: dict[str, Pool],
        contents: Contents,
        check: bool,
    ) -> None:
        self._comm, self._contenders = comm, contenders
        used = {contender.buffers for contender in contenders}
        self._pools = {kind: pool for kind, pool in pools.items() if kind in used}
        self._contents, self._check = contents, check
        self._one_clock = comm.nodes().count == 1  # here, on every rank: the first call is collective
        self._wrong: dict[int, str] = {}
        self._rows: list[tuple[list[float], list[float]]] = []  # per round: begin and duration of each contender

    def run(self, limits: Limits, seed: Sequence[int]) -> list[Samples]:
        """Measure and return the samples of each contender. Collective over the communicator."""
        order = np.random.default_rng(list(seed))  # the same on every rank
        for pool in self._pools.values():
            pool.fill(self._contents, self._comm.rank)
        collecting = gc.isenabled()
        gc.disable()
        try:
            self._rounds(limits.warmup, order)
            self._rows.clear()
            self._until_enough(limits, order)
        finally:
            if collecting:
                gc.enable()
        for name in self._pools:
            self._verify(name)
        return self._gather()

    def _until_enough(self, limits: Limits, order: np.random.Generator) -> None:
        if limits.iterations is not None:
            self._rounds(limits.iterations, order)
            return
        begin, count = time.perf_counter(), min(_FIRST, limits.least)
        while count:
            self._rounds(count, order)
            # Rank 0 decides by its clock, refills and checks included.
            done, spent_s = len(self._rows), time.perf_counter() - begin
            fits = int((limits.seconds - spent_s) / spent_s * done)
            count = self._comm.broadcast_object(min(max(fits, limits.least - done), MOST - done, 4 * done))
            count = max(0, count)

    def _rounds(self, count: int, order: np.random.Generator) -> None:
        for _ in range(count):
            turns = order.permutation(len(self._contenders))
            begins, times = [0.0] * len(turns), [0.0] * len(turns)
            for turn in turns:
                contender = self._contenders[turn]
                buffer, result = self._next(contender.buffers, int(turn))
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
        for index, one in enumerate(self._contenders):
            if self._check and one.buffers == kind and one.expected is not None and index not in self._wrong:
                pool = self._pools[kind]
                what = pool.first_wrong(self._contents, index, one.expected, in_result=one.in_result)
                if what:
                    self._wrong[index] = what

    def _gather(self) -> list[Samples]:
        """Bring all times to rank 0. Collective."""
        said = self._comm.allgather_object(self._wrong)
        own = np.array(self._rows, np.float64)  # (rounds, begin and duration, contenders)
        if self._comm.rank > 0:
            self._comm.send(own.reshape(-1), 0, _TAG)
            return []
        ranks = np.empty((self._comm.size, *own.shape))
        ranks[0] = own
        for peer in range(1, self._comm.size):
            self._comm.recv(ranks[peer].reshape(-1), peer, _TAG)
        begin_s, time_s = ranks[:, :, 0], ranks[:, :, 1]  # (ranks, rounds, contenders)
        start_s = begin_s - begin_s.min(axis=0)
        if not self._one_clock:
            start_s[...] = np.nan
        return [
            Samples(
                np.ascontiguousarray(time_s[:, :, index].T),
                np.ascontiguousarray(start_s[:, :, index].T),
                _first_wrong(said, index),
                len(own) if self._check and contender.expected is not None else 0,
            )
            for index, contender in enumerate(self._contenders)
        ]


def _first_wrong(said: Sequence[dict[int, str]], contender: int) -> str:
    return next((f"rank {rank}: {wrong[contender]}" for rank, wrong in enumerate(said) if contender in wrong), "")
