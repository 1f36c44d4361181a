"""The ranks that divide the experts, and their all-to-alls with uneven counts.

Of the data x context ranks (context neighbours first), e consecutive ones form a group that holds all experts. A rank
sends the rows of each layer in two all-to-alls forward and two backward, each of (e-1)/e of the rows for equal loads.
"""

import time

import numpy as np

from hpcdist import collectives
from hpcdist.arrays.backend import Array
from hpcdist.arrays.dtypes import name_of
from hpcdist.arrays.ranges import Range
from hpcdist.collectives.algorithms.all_to_all import ALL_TO_ALL
from hpcdist.collectives.node.flow import PublishedMemory
from hpcdist.comm.communicator import Communicator
from hpcdist.strategies.schedule.step import NanFinder
from hpcdist.strategies.tensor.axis import NODE_SHARED


def expert_replicas(replicas: Communicator, degree: int) -> Communicator:
    """Return the communicator of the ranks with the same experts as this rank. Collective over ``replicas``.

    ``degree``: number of ranks that divide the experts.
    """
    same_experts = replicas.split(replicas.rank % degree, replicas.rank, "expert replicas")
    assert same_experts is not None
    return same_experts


class ExpertAxis:
    """All-to-alls over ``comm``, the ranks that divide the experts. Methods are collective unless marked local."""

    def __init__(self, comm: Communicator, algorithm: str, watch: NanFinder) -> None:
        self.comm, self.algorithm, self.watch = comm, algorithm, watch
        self.rank, self.size = comm.rank, comm.size
        self._spent_s = 0.0

    def counts(self, sent: np.ndarray) -> np.ndarray:
        """Return an array of shape (ranks, local experts): number of token rows that a rank sends to a local expert.

        ``sent``: array of this shape, with the number of token rows for each expert of each rank. Collective.
        """
        begin = time.perf_counter()
        received = np.empty_like(sent)
        shares = _ranges(np.full(self.size, 1), sent.shape[1])
        collectives.all_to_all(self.comm, sent.reshape(-1), received.reshape(-1), shares, shares, self.algorithm)
        self._spent_s += time.perf_counter() - begin
        return received

    def exchange(self, rows: Array, arrived: Array, sent: np.ndarray, received: np.ndarray) -> None:
        """Send token ``rows`` to all ranks, and receive token rows in ``arrived``, both in rank order. Collective.

        ``sent``: number of rows for each rank. ``received``: number of rows from each rank.
        """
        # Both arrays have shape (rows, width), are contiguous, and must not overlap.
        was_finite = self.watch.sees_only_finite(rows)
        begin = time.perf_counter()
        buffers = rows.reshape(-1), arrived.reshape(-1)
        send_ranges, receive_ranges = _ranges(sent, rows.shape[1]), _ranges(received, rows.shape[1])
        collectives.all_to_all(self.comm, *buffers, send_ranges, receive_ranges, self.algorithm)
        self._spent_s += time.perf_counter() - begin
        if was_finite:
            self.watch.distrust(arrived)

    def wait(self, memory: PublishedMemory, like: Array) -> None:
        """Wait until all ranks have written the shared ``memory``, and log this exchange as an all-to-all.

        ``like``: array with the size and dtype to log.
        """
        begin = time.perf_counter()
        events, dtype = self.comm.events, name_of(like.dtype)
        token = events.begin(self.comm.name, f"{NODE_SHARED}_all_to_all", dtype, like.size, 0, -1, 0)
        memory.wait()
        events.end(token)
        self._spent_s += time.perf_counter() - begin

    def taken_s(self) -> float:
        """Return the seconds spent in all-to-alls since the last call. Local."""
        spent_s, self._spent_s = self._spent_s, 0.0
        return spent_s


def _ranges(counts: np.ndarray, width: int) -> list[Range]:
    ends = np.concatenate([[0], np.cumsum(counts)]) * width
    return [Range(int(start), int(stop)) for start, stop in zip(ends, ends[1:], strict=False)]


def algorithm_for(comm: Communicator, gradient_algorithm: str, *, settled: bool, on: str) -> str:
    """Return the name of the all-to-all algorithm to use over ``comm``. Collective.

    ``gradient_algorithm``: allreduce algorithm in the recipe.
    """
    is_one_node = comm.nodes().count == 1
    if settled and not (gradient_algorithm == NODE_SHARED and is_one_node and on == "cpu"):
        return gradient_algorithm if gradient_algorithm in ALL_TO_ALL else "pairwise"
    if not is_one_node:
        return "hierarchical"
    return NODE_SHARED if on == "cpu" else "native"
