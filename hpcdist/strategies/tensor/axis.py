"""The tensor axis: what its ranks sum and gather with, and how long that takes."""

import time
from collections.abc import Callable, Sequence
from typing import Final

from hpcdist import collectives
from hpcdist.arrays.backend import Array, is_device
from hpcdist.arrays.ranges import Range
from hpcdist.collectives import ON_GPUS, SHARDED, SHARDED_ON_GPUS, Sharding, node_shared
from hpcdist.collectives.selection import parse
from hpcdist.comm.communicator import Communicator
from hpcdist.strategies.schedule.watch import Watch

ONE_NODE: Final = "node_shared"


def algorithm_on(comm: Communicator, chosen: str, *, settled: bool, on: str) -> str:
    """Return what sums activations over ``comm``: ``chosen``; where that is not ``settled``, a node's shared memory.

    Collective over ``comm``. Activations are large, and summed many times a step: what was chosen for gradients over
    another axis says little about them.
    """
    if not settled and on == "cpu" and node_shared.is_available(comm):
        return ONE_NODE
    return suited(comm, chosen)


def suited(comm: Communicator, algorithm: str) -> str:
    """Return ``algorithm`` if it can sum over ``comm``, the MPI library's own if not. Collective over ``comm``."""
    if comm.size > 1 and ONE_NODE in algorithm and comm.nodes().count > 1:
        return "native"
    return algorithm


class TensorAxis:
    """Collectives over ``comm`` by ``algorithm``, or by what comes closest where it cannot. All of it is collective.

    ``watch`` looks for this rank's own bad values: where those of another rank come in by a sum, it stops.
    """

    def __init__(self, comm: Communicator, algorithm: str) -> None:
        self.comm, self.algorithm = comm, suited(comm, algorithm)
        self.rank, self.size = comm.rank, comm.size
        self._spent_s = 0.0
        self.watch = Watch()

    def allreduce(self, buffer: Array, op: str = "sum") -> None:
        """Reduce ``buffer``, 1-D, in place."""
        self._timed(buffer, buffer, buffer, lambda: collectives.allreduce(self.comm, buffer, self.algorithm, op))

    def reduce_scatter(self, buffer: Array, shares: Sequence[Range]) -> None:
        """Sum in place; afterwards the own share of ``shares``, in rank order, is defined."""
        own, halves = buffer[shares[self.rank].slice], self._sharding(buffer, shares)
        self._timed(buffer, buffer, own, lambda: halves.reduce_scatter(self.comm, buffer, shares))

    def all_gather(self, buffer: Array, shares: Sequence[Range]) -> None:
        """Give the own share to all and fill the others, in place."""
        own, halves = buffer[shares[self.rank].slice], self._sharding(buffer, shares)
        self._timed(buffer, own, buffer, lambda: halves.all_gather(self.comm, buffer, shares))

    def taken_s(self) -> float:
        """Return the seconds that this rank has given to these calls since the last time it asked (local).

        Buffers on a GPU are left out: a call on them waits for the computation before it.
        """
        spent_s, self._spent_s = self._spent_s, 0.0
        return spent_s

    def _timed(self, buffer: Array, given: Array, taken: Array, call: Callable[[], None]) -> None:
        """Make ``call``, to which this rank gives some of ``buffer``, and from which it takes some."""
        innocent = self.watch.sees_only_finite(given)
        begin = time.perf_counter()
        call()
        if not is_device(buffer):
            self._spent_s += time.perf_counter() - begin
        if innocent:
            self.watch.distrust(taken)

    def _sharding(self, buffer: Array, shares: Sequence[Range]) -> Sharding:
        """Return the two halves of the allreduce that is wanted, or of the ring where it has none for these shares."""
        name = parse(self.algorithm).at(buffer.nbytes)
        if name in ON_GPUS:
            return SHARDED_ON_GPUS[name] if len({part.size for part in shares}) == 1 else SHARDED["ring"]
        in_order = name in SHARDED and not (name == "hierarchical" and self.comm.nodes().count > 1)
        return SHARDED[name if in_order else "ring"]
