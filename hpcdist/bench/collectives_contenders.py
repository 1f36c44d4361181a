"""Who takes part in a benchmark of collectives: our algorithms, the MPI library's own, and what no one can beat.

References are measured beside the algorithms in every round:

    memcpy   every rank copies the buffer once, all at the same time: on one node no algorithm that leaves a result on
             every rank in memory of its own can be faster
    wire     where there are several nodes, the first ranks of two of them send each other the buffer at the same time
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from hpcdist import collectives
from hpcdist.arrays.dtypes import dtype_of
from hpcdist.arrays.ranges import Range, split
from hpcdist.bench.collectives_buffers import Expected
from hpcdist.bench.collectives_plan import ORDINARY, SHARED, Cell
from hpcdist.comm.communicator import Communicator
from hpcdist.errors import BufferHandoverError, ConfigurationError, MissingCapabilityError, UsageError

NATIVE: Final = "native"
MEMCPY: Final = "memcpy"
WIRE: Final = "wire"
REFERENCES: Final = (MEMCPY, WIRE)
BOTH_WAYS: Final = "ring_both_ways"
# Those that read the buffers of other ranks where they lie, if they can: only these are measured on shared memory too.
READS_SHARED: Final = ("node_shared", "hierarchical", "auto")

# (buffer, result) -> nothing; a result is only written by what cannot work in place
Run = Callable[[np.ndarray, np.ndarray], None]


@dataclass(frozen=True)
class Contender:
    """One way to do what a cell asks for; ``expected`` is None for a reference, whose result nobody needs."""

    algorithm: str
    buffers: str
    run: Run
    expected: tuple[Expected, ...] | None
    takes_part: bool = True  # False on ranks that a reference has nothing to do for

    @property
    def label(self) -> str:
        """Name in tables and plots."""
        return self.algorithm if self.buffers == ORDINARY else f"{self.algorithm} ({self.buffers})"


def algorithms(op: str) -> tuple[str, ...]:
    """Return the names of what there is for ``op``, the MPI library's own first (local)."""
    if op == "allreduce":
        return (*collectives.ALLREDUCE, BOTH_WAYS)
    if op in ("reduce_scatter", "all_gather"):
        return tuple(collectives.SHARDED)
    return (NATIVE,)


def contenders(comm: Communicator, cell: Cell, algorithm: str, buffers: str) -> Contender:
    """Return ``algorithm`` for ``cell`` on memory of the kind ``buffers``. Collective over ``comm``."""
    make: dict[str, Callable[[Communicator, Cell, str], tuple[Run, list[Expected]]]] = {
        "allreduce": _allreduce,
        "reduce_scatter": _reduce_scatter,
        "all_gather": _all_gather,
        "broadcast": _broadcast,
        "all_to_all": _all_to_all,
    }
    run, expected = make[cell.op](comm, cell, algorithm)
    return Contender(algorithm, buffers, run, tuple(expected))


def references(comm: Communicator, cell: Cell) -> list[Contender]:
    """Return what bounds every algorithm on this machine. Collective over ``comm``."""

    def copy(buffer: np.ndarray, result: np.ndarray) -> None:
        np.copyto(result[: buffer.size], buffer)

    found = [Contender(MEMCPY, ORDINARY, copy, None)]
    members = comm.nodes().members
    if len(members) > 1:
        pair = [members[0][0], members[1][0]]
        peer = pair[1 - pair.index(comm.rank)] if comm.rank in pair else None

        def exchange(buffer: np.ndarray, result: np.ndarray) -> None:
            if peer is not None:
                comm.sendrecv(buffer, peer, result[: buffer.size], peer)

        found.append(Contender(WIRE, ORDINARY, exchange, None, takes_part=peer is not None))
    return found


def refusal(comm: Communicator, contender: Contender, buffer: np.ndarray, result: np.ndarray) -> str:
    """Run ``contender`` once and return why any rank refused it, "" where it runs. Collective over ``comm``.

    Algorithms refuse on every rank and before they send anything.
    """
    reason = ""
    try:
        contender.run(buffer, result)
    except (UsageError, BufferHandoverError, ConfigurationError, MissingCapabilityError) as error:
        reason = str(error) or type(error).__name__
    return next(filter(None, comm.allgather_object(reason)), "")


def allocator() -> Callable[[Communicator, int, np.dtype], np.ndarray] | None:
    """Return what takes memory that the other ranks of a node can read; None where there is no such thing."""
    found: Callable[[Communicator, int, np.dtype], np.ndarray] | None = getattr(
        collectives.node_shared, "allocate", None
    )
    return found


def kinds(algorithm: str, op: str, wanted: Sequence[str], *, by_name: bool) -> list[str]:
    """Return the kinds of memory on which ``algorithm`` is measured; all that are wanted if it was named itself."""
    fits = algorithm in READS_SHARED or (by_name and algorithm != NATIVE)
    if op == "all_to_all" or not fits:
        return [ORDINARY] if ORDINARY in wanted or algorithm == NATIVE else []
    return [kind for kind in (ORDINARY, SHARED) if kind in wanted]


def _allreduce(comm: Communicator, cell: Cell, algorithm: str) -> tuple[Run, list[Expected]]:
    def run(buffer: np.ndarray, result: np.ndarray) -> None:
        if algorithm == BOTH_WAYS:
            collectives.ring_allreduce(comm, buffer, bidirectional=True)
        else:
            collectives.allreduce(comm, buffer, algorithm)

    return run, [Expected(Range(0, cell.size), None, 0)]


def _shares(comm: Communicator, cell: Cell, algorithm: str) -> list[Range]:
    return collectives.SHARDED[algorithm].shares(comm, cell.size, dtype_of(cell.dtype).itemsize)


def _reduce_scatter(comm: Communicator, cell: Cell, algorithm: str) -> tuple[Run, list[Expected]]:
    shares, reduce_scatter = _shares(comm, cell, algorithm), collectives.SHARDED[algorithm].reduce_scatter
    own = shares[comm.rank]
    return lambda buffer, result: reduce_scatter(comm, buffer, shares), [Expected(own, None, own.start)]


def _all_gather(comm: Communicator, cell: Cell, algorithm: str) -> tuple[Run, list[Expected]]:
    shares, all_gather = _shares(comm, cell, algorithm), collectives.SHARDED[algorithm].all_gather
    expected = [Expected(part, rank, part.start) for rank, part in enumerate(shares)]
    return lambda buffer, result: all_gather(comm, buffer, shares), expected


def _broadcast(comm: Communicator, cell: Cell, algorithm: str) -> tuple[Run, list[Expected]]:
    return lambda buffer, result: comm.broadcast(buffer), [Expected(Range(0, cell.size), 0, 0)]


def _all_to_all(comm: Communicator, cell: Cell, algorithm: str) -> tuple[Run, list[Expected]]:
    parts = split(cell.size, comm.size, dtype_of(cell.dtype).itemsize)
    own = parts[comm.rank]
    rows = [Range(own.size * peer, own.size * (peer + 1)) for peer in range(comm.size)]

    def run(buffer: np.ndarray, result: np.ndarray) -> None:
        comm.all_to_all(buffer, result, parts, rows)

    return run, [Expected(row, peer, own.start) for peer, row in enumerate(rows)]
