"""The ranks that share out experts: who they are, their all-to-alls of uneven counts, and the time these take.

On p replicas (data x context ranks, those of a sample side by side), e consecutive ones are a group and have all
experts together, E / e each; ranks e apart have the same ones and are their replicas. A rank sends each layer's rows
(k N of width h for N tokens with k experts each) to the ranks that have their experts and gets the results back:
forward two all-to-alls and backward two, each of (e-1)/e of these rows where loads are even. When one rank calls a
method here, all of its group do, in the same order.
"""

import time
from typing import Final

import numpy as np

from hpcdist import collectives
from hpcdist.arrays.backend import Array
from hpcdist.arrays.dtypes import name_of
from hpcdist.arrays.ranges import Range
from hpcdist.collectives.algorithms.all_to_all import ALL_TO_ALL
from hpcdist.collectives.node.published import PublishedMemory
from hpcdist.comm.communicator import Communicator
from hpcdist.strategies.schedule.observers import NanFinder

NODE_SHARED: Final = "node_shared"  # no message: see `hpcdist.strategies.expert.shared`


def expert_replicas(replicas: Communicator, degree: int) -> Communicator:
    """Return the ranks of ``replicas`` that have the same experts as this one. Collective."""
    alike = replicas.split(replicas.rank % degree, replicas.rank, "expert replicas")
    assert alike is not None
    return alike


class ExpertAxis:
    """All-to-alls over ``comm``, the ranks that share out experts, by ``algorithm``. Collective.

    ``watch`` looks for this rank's own bad values: those of rows that come from another one are not its own.
    """

    def __init__(self, comm: Communicator, algorithm: str, watch: NanFinder) -> None:
        self.comm, self.algorithm, self.watch = comm, algorithm, watch
        self.rank, self.size = comm.rank, comm.size
        self._spent_s = 0.0

    def counts(self, sent: np.ndarray) -> np.ndarray:
        """Return how many rows each rank sends for each expert here (rank, own expert).

        ``sent`` (rank, expert there), int64, are those that this rank sends.
        """
        begin = time.perf_counter()
        received = np.empty_like(sent)
        shares = _ranges(np.full(self.size, 1), sent.shape[1])
        collectives.all_to_all(self.comm, sent.reshape(-1), received.reshape(-1), shares, shares, self.algorithm)
        self._spent_s += time.perf_counter() - begin
        return received

    def exchange(self, rows: Array, arrived: Array, sent: np.ndarray, received: np.ndarray) -> None:
        """Send ``rows``, so many of them to each rank in turn, and fill ``arrived`` with those of each rank in turn.

        Both are (rows, width), contiguous and apart in memory; ``sent`` and ``received`` are (ranks,).
        """
        was_finite = self.watch.sees_only_finite(rows)
        begin = time.perf_counter()
        buffers = rows.reshape(-1), arrived.reshape(-1)
        send_ranges, receive_ranges = _ranges(sent, rows.shape[1]), _ranges(received, rows.shape[1])
        collectives.all_to_all(self.comm, *buffers, send_ranges, receive_ranges, self.algorithm)
        self._spent_s += time.perf_counter() - begin
        if was_finite:
            self.watch.distrust(arrived)

    def wait(self, memory: PublishedMemory, like: Array) -> None:
        """Wait until all ranks have published in ``memory`` what goes with rows like ``like``."""
        begin = time.perf_counter()
        events, dtype = self.comm.events, name_of(like.dtype)
        token = events.begin(self.comm.name, f"{NODE_SHARED}_all_to_all", dtype, like.size, 0, -1, 0)
        memory.wait()
        events.end(token)
        self._spent_s += time.perf_counter() - begin

    def taken_s(self) -> float:
        """Return the seconds that this rank spent in these calls since the last query (local)."""
        spent_s, self._spent_s = self._spent_s, 0.0
        return spent_s


def _ranges(counts: np.ndarray, width: int) -> list[Range]:
    """Return the ranges of so many rows of ``width`` numbers, one behind the other."""
    ends = np.concatenate([[0], np.cumsum(counts)]) * width
    return [Range(int(start), int(stop)) for start, stop in zip(ends, ends[1:], strict=False)]


def algorithm_for(comm: Communicator, chosen: str, *, settled: bool, on: str) -> str:
    """Return the all-to-all over ``comm`` that goes with the algorithm ``chosen`` for gradients. Collective.

    That of its name, where it is ``settled`` by the recipe. Else memory of the node where there is one node, or on a
    GPU the MPI library's own, and one message between two nodes where there are several. Algorithms without an
    all-to-all send pair by pair.
    """
    one = comm.nodes().count == 1
    if settled and not (chosen == NODE_SHARED and one and on == "cpu"):
        return chosen if chosen in ALL_TO_ALL else "pairwise"
    if not one:
        return "hierarchical"
    return NODE_SHARED if on == "cpu" else "native"
