"""The allreduce of the MPI library."""

from hpcdist.arrays.backend import Array
from hpcdist.comm.communicator import Communicator


def native_allreduce(comm: Communicator, buffer: Array, op: str = "sum") -> None:
    """Reduce ``buffer`` in place by MPI_Allreduce. Collective over ``comm``.

    The library chooses the algorithm by size and topology, so neither cost nor bytes sent are known here. The
    MPI standard requires that all ranks receive identical results.
    """
    comm.allreduce(buffer, op)  # which refuses what every other algorithm does
