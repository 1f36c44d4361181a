"""Gathers that tell of a death, for an MPI that outlives it.

Open MPI 5.0 chooses for few bytes an allgatherv, of a gather and a broadcast, that forgets their errors: when a rank
dies in it, most of the others are told that it is complete, and have in their buffers what was there before. mpi4py's
allgather of objects is made of it, too. Its allgather, allreduce and broadcast tell.
"""

import pickle
from typing import Any

import numpy as np

from hpcdist.comm import ulfm


def objects(mpi: Any, comm: Any, value: Any) -> list[Any]:
    """Return the picklable values of all members of ``comm`` in rank order. Collective.

    Where ranks may die, all send as many bytes as the longest value has: `MPI_Allgather` will do then.
    """
    if not ulfm.is_enabled(mpi):
        return list(comm.allgather(value))
    own = np.frombuffer(pickle.dumps(value), np.uint8)
    sizes = np.empty(comm.size, np.int64)
    comm.Allgather(np.array([own.size]), sizes)
    padded = np.zeros(sizes.max(), np.uint8)
    padded[: own.size] = own
    found = np.empty((comm.size, padded.size), np.uint8)
    comm.Allgather(padded, found)
    return [pickle.loads(row[:size].data) for row, size in zip(found, sizes, strict=True)]


def confirm(mpi: Any, comm: Any) -> None:
    """Raise the error of a death that happened in an allgatherv before. Collective."""
    if ulfm.is_enabled(mpi):
        comm.Allreduce(mpi.IN_PLACE, np.zeros(1))
