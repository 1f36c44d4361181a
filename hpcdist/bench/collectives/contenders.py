"""Contenders of a benchmark of collectives: our algorithms, the MPI library's own, and two yardsticks.

References are measured beside the algorithms in every round:

    memcpy   every rank copies the buffer to other memory once, all at the same time. On one node that is about what an
             allreduce must cost; one that works in place can be a little faster, since it touches less memory
    wire     where there are several nodes, the first ranks of two of them send each other the buffer at the same time
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from hpcdist import collectives
from hpcdist.arrays.dtypes import dtype_of
from hpcdist.arrays.ranges import Range
from hpcdist.bench.collectives.buffers import ExpectedResult
from hpcdist.bench.collectives.plan import ORDINARY, SHARED, CollectivesCell
from hpcdist.collectives.algorithms.all_to_all import ALL_TO_ALL, all_to_all
from hpcdist.collectives.algorithms.broadcast import BROADCAST, broadcast
from hpcdist.collectives.dispatch import AlgorithmTable, parse_algorithm
from hpcdist.collectives.node import shared_memory
from hpcdist.collectives.tuning import autotune
from hpcdist.comm.communicator import Communicator
from hpcdist.errors import BufferHandoverError, ConfigurationError, MissingCapabilityError, UsageError

NATIVE: Final = "native"
AUTO: Final = (
    "auto"  # what `hpcdist.collectives.tuning.autotune` chooses for the size, as it does at the start of a training
)
MEMCPY: Final = "memcpy"
WIRE: Final = "wire"
REFERENCES: Final = (MEMCPY, WIRE)
# Those that read the buffers of other ranks where they lie, if they can: only these are measured on shared memory too.
READS_SHARED: Final = ("node_shared", "hierarchical", AUTO)

# (buffer, result) -> nothing; a result is only written by what cannot work in place
Run = Callable[[np.ndarray, np.ndarray], None]


@dataclass(frozen=True)
class CollectivesContender:
    """One way to do what a cell asks for; ``expected`` is None for a reference, whose result nobody needs."""

    algorithm: str
    buffers: str
    run: Run
    expected: tuple[ExpectedResult, ...] | None
    takes_part: bool = True  # False on ranks that a reference has nothing to do for
    in_result: bool = False  # what is expected is not left in the buffer, but in the result

    @property
    def label(self) -> str:
        """Name in tables and plots."""
        return self.algorithm if self.buffers == ORDINARY else f"{self.algorithm} ({self.buffers})"


def algorithms(op: str) -> tuple[str, ...]:
    """Return the names of what there is for ``op``, the MPI library's own first (local)."""
    return (*_BY_NAME[op], AUTO) if op == "allreduce" else tuple(_BY_NAME[op])


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
    run, expected = make[cell.op](comm, cell, chosen or algorithm)
    return CollectivesContender(algorithm, buffers, run, tuple(expected), in_result=cell.op == "all_to_all")


def references(comm: Communicator, cell: CollectivesCell) -> list[CollectivesContender]:
    """Return what bounds every algorithm on this machine. Collective over ``comm``."""

    def copy(buffer: np.ndarray, result: np.ndarray) -> None:
        np.copyto(result, buffer)

    found = [CollectivesContender(MEMCPY, ORDINARY, copy, None)]
    members = comm.nodes().members
    if len(members) > 1:
        pair = [members[0][0], members[1][0]]
        peer = pair[1 - pair.index(comm.rank)] if comm.rank in pair else None

        def exchange(buffer: np.ndarray, result: np.ndarray) -> None:
            if peer is not None:
                comm.sendrecv(buffer, peer, result, peer)

        found.append(CollectivesContender(WIRE, ORDINARY, exchange, None, takes_part=peer is not None))
    return found


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


def kinds(algorithm: str, op: str, wanted: Sequence[str]) -> list[str]:
    """Return the kinds of memory on which ``algorithm`` is measured (local).

    Beside ordinary memory, shared memory is for those that make use of it; alone it is for all but native.
    """
    if algorithm == NATIVE:
        return [ORDINARY]
    fits = op != "all_to_all" and (algorithm in READS_SHARED or ORDINARY not in wanted)
    return [kind for kind in wanted if kind == ORDINARY or fits]


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
    each = cell.size // comm.size
    rows = [Range(each * peer, each * (peer + 1)) for peer in range(comm.size)]

    def run(buffer: np.ndarray, result: np.ndarray) -> None:
        all_to_all(comm, buffer, result[: each * comm.size], rows, rows, algorithm)

    return run, [ExpectedResult(row, peer, each * comm.rank) for peer, row in enumerate(rows)]


_BY_NAME: Final[dict[str, Mapping[str, Any]]] = {
    "allreduce": collectives.ALLREDUCE,
    "reduce_scatter": collectives.SHARDED,
    "all_gather": collectives.SHARDED,
    "broadcast": BROADCAST,
    "all_to_all": ALL_TO_ALL,
}
