"""Memory that the ranks of a node share: an anonymous mapping, or an MPI window where processes cannot see each other.

The mapping has no name: nothing is left behind after SIGKILL, and it stays readable for the survivors of a dead rank.
Ordering of reads and writes is the caller's affair: barriers, or the flags of an algorithm.
"""

import mmap
import os
from typing import Any

import numpy as np

from hpcdist.arrays.ranges import ALIGN_BYTES, align_up
from hpcdist.errors import MissingCapabilityError

_PAGE = mmap.PAGESIZE


class MappedBlock:
    """One anonymous mapping of the node, cut into a part for each rank."""

    def __init__(self, mapping: mmap.mmap, stride: int, sizes: list[int]) -> None:
        whole = np.frombuffer(mapping, np.uint8)
        self.views = [whole[rank * stride : rank * stride + size] for rank, size in enumerate(sizes)]

    def close(self) -> None:
        """Drop the views; the mapping goes when the last array over it does."""
        self.views = []


class WindowBlock:
    """An MPI shared-memory window of the node."""

    def __init__(self, mpi: Any, comm: Any, sizes: list[int]) -> None:
        self._window = mpi.Win.Allocate_shared(max(1, sizes[comm.rank]), 1, comm=comm)
        self._window.Lock_all(mpi.MODE_NOCHECK)  # MPICH lets nobody synchronise outside an epoch
        self.views = []
        for rank, size in enumerate(sizes):
            memory, _ = self._window.Shared_query(rank)
            self.views.append(np.frombuffer(memory, np.uint8)[:size])
        self.views[comm.rank][...] = 0
        comm.Barrier()

    def close(self) -> None:
        """Free the window. Collective."""
        self.views = []
        self._window.Unlock_all()
        self._window.Free()


def allocate(mpi: Any, comm: Any, nbytes: int) -> MappedBlock | WindowBlock:
    """Return zeroed shared memory, ``nbytes`` for each rank of ``comm``. Collective.

    ``comm`` is an mpi4py communicator of one node.
    """
    sizes = comm.allgather(nbytes)
    stride = align_up(max(sizes), max(_PAGE, ALIGN_BYTES))
    mapping = _map(comm, stride * comm.size)
    if all(comm.allgather(mapping is not None)):
        assert mapping is not None
        return MappedBlock(mapping, stride, sizes)
    try:
        return WindowBlock(mpi, comm, sizes)
    except mpi.Exception as error:
        raise MissingCapabilityError(
            f"neither an anonymous mapping nor an MPI window of {nbytes} bytes a rank can be shared on this node "
            f"({error}); enlarge /dev/shm or choose another communication.algorithm than node_shared"
        ) from error


def _map(comm: Any, total: int) -> mmap.mmap | None:
    """Map memory of the node's first rank into every rank; None where this one cannot open it."""
    descriptor, failure = -1, ""
    if comm.rank == 0:
        try:
            descriptor = os.memfd_create("hpcdist", os.MFD_CLOEXEC)
            os.ftruncate(descriptor, max(total, _PAGE))
        except OSError as error:
            failure = str(error)
    owner, number, failure = comm.bcast((os.getpid(), descriptor, failure), root=0)
    mapping = None
    if not failure:
        try:
            # The descriptor is reached through /proc, which needs one pid namespace and the same user.
            own = descriptor if comm.rank == 0 else os.open(f"/proc/{owner}/fd/{number}", os.O_RDWR | os.O_CLOEXEC)
            mapping = mmap.mmap(own, max(total, _PAGE))
            if comm.rank != 0:
                os.close(own)
        except OSError:
            mapping = None  # told to the others by the caller's vote, which then takes the window
    comm.Barrier()  # nobody closes the owner's descriptor before all have mapped it
    if descriptor >= 0:
        os.close(descriptor)
    return mapping
