"""Any number of ranks for algorithms that pair ranks by the bits of their number.

With q the largest power of two in p, the first 2 (p-q) ranks form pairs. The even one of a pair gives its buffer to the
odd one before the algorithm and gets the result back after it: 2 (α + n β) + n γ more than for q ranks.
(R. Thakur, R. Rabenseifner, W. Gropp, "Optimization of collective communication operations in MPICH", Int. J. High
Perform. Comput. Appl. 19 (2005) 49-66.)
"""

from dataclasses import dataclass

from hpcdist.arrays.backend import Array
from hpcdist.collectives.reduction import Combine
from hpcdist.collectives.workspace import scratch
from hpcdist.comm.communicator import Communicator


@dataclass(frozen=True, slots=True)
class Hypercube:
    """The 2^k ranks that take part, numbered anew; ``rank`` is None on a rank that stands by."""

    size: int
    rank: int | None
    pairs: int

    @classmethod
    def of(cls, comm: Communicator) -> "Hypercube":
        """Return the hypercube inside ``comm`` (local)."""
        size = 1 << (comm.size.bit_length() - 1)
        pairs = comm.size - size
        if comm.rank >= 2 * pairs:
            return cls(size, comm.rank - pairs, pairs)
        return cls(size, comm.rank // 2 if comm.rank % 2 else None, pairs)

    def is_paired(self, comm: Communicator) -> bool:
        """Whether this rank of ``comm`` stands by or acts for one that does (local)."""
        return comm.rank < 2 * self.pairs

    def outer(self, rank: int) -> int:
        """Return the number in the communicator of ``rank`` of the hypercube."""
        return 2 * rank + 1 if rank < self.pairs else rank + self.pairs


def fold(comm: Communicator, buffer: Array, combine: Combine) -> Hypercube:
    """Reduce the buffers of all ranks into those of a hypercube, which is returned. Collective; `unfold` undoes it."""
    cube = Hypercube.of(comm)
    if cube.is_paired(comm):
        if cube.rank is None:
            comm.send(buffer, comm.rank + 1)
        else:
            received = scratch("fold", buffer.size, buffer.dtype, buffer)
            comm.recv(received, comm.rank - 1)
            combine(received, buffer, buffer)
    return cube


def unfold(comm: Communicator, cube: Hypercube, buffer: Array) -> None:
    """Overwrite the buffers of the ranks that stood by with the result of their partners. Collective."""
    if cube.is_paired(comm):
        if cube.rank is None:
            comm.recv(buffer, comm.rank + 1)
        else:
            comm.send(buffer, comm.rank - 1)
