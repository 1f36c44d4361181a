"""User-level failure mitigation (ULFM) of MPI: revoke, shrink, agree and acknowledge, with Open MPI 5.

Call these functions only if `is_enabled`: other MPI libraries end the process. After a rank failure, a small allgatherv
of Open MPI 5.0 may return stale data without an error (see `check_completed`).
"""

import ctypes
import functools
import os
import pickle
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from hpcdist.comm.launch.environment import FAULT_TOLERANCE

_LIBRARY: Final = "libmpi.so.40"  # of Open MPI 4 and 5
_SYMBOL: Final = "ompi_ftmpi_enabled"


@functools.cache  # called in every gather
def is_enabled(mpi: Any) -> bool:
    """Return True if MPI continues after a rank failure. ``mpi``: the initialised module mpi4py.MPI. Local."""
    is_requested = os.environ.get(FAULT_TOLERANCE, "0") not in ("", "0", "false")
    if not is_requested or not mpi.Get_library_version().startswith("Open MPI"):
        return False
    try:
        loaded = ctypes.CDLL(_LIBRARY, mode=os.RTLD_NOLOAD | os.RTLD_NOW)
        return bool(ctypes.c_bool.in_dll(loaded, _SYMBOL).value)
    except (OSError, ValueError):
        return False  # no such symbol or library: unknown, and a wrong yes would end the process


def failed(mpi: Any, comm: Any) -> tuple[int, ...]:
    """Return an ascending tuple of the failed ranks of ``comm`` that this rank has detected. Local."""
    # Get_failed returns a group, whose ranks differ from the ranks of the communicator.
    dead, members = comm.Get_failed(), comm.Get_group()
    ranks = mpi.Group.Translate_ranks(dead, range(dead.Get_size()), members)
    dead.Free()
    members.Free()
    return tuple(sorted(ranks))


def is_revoked(mpi: Any, comm: Any) -> bool:
    """Return True if the mpi4py communicator ``comm`` was revoked or freed, so that collectives must not use it."""
    return not comm or (is_enabled(mpi) and bool(comm.Is_revoked()))


def agree(mpi: Any, comm: Any, flag: bool) -> bool:
    """Return True if every surviving rank passed ``flag`` = True. Collective over the survivors."""
    while True:
        # MPI_Comm_agree returns ERR_PROC_FAILED on all ranks while any rank has not acknowledged a failure that another
        # rank knows of. So each rank acknowledges the failures that it knows, and all repeat.
        comm.Ack_failed()
        try:
            return bool(comm.Agree(flag))
        except mpi.Exception as error:
            if error.Get_error_class() != mpi.ERR_PROC_FAILED:
                raise


def shrink(mpi: Any, comm: Any) -> Any:
    """Return a new mpi4py communicator of the surviving ranks of ``comm``. Collective over the survivors."""
    while True:
        # If a failure interrupts the creation of a communicator, Open MPI 5 does not mark its allocation of a context
        # id as ended: a later creation from a communicator with a larger id then waits for ever. Creating a
        # communicator from COMM_SELF, which needs no other rank, resets that state.
        mpi.COMM_SELF.Dup().Free()
        survivors, failure = None, None
        try:
            survivors = comm.Shrink()
        except mpi.Exception as error:
            failure = error
        # A rank may fail during the shrink, which then succeeds on some ranks and raises on others: either all
        # survivors have the new communicator, or all repeat.
        if agree(mpi, comm, survivors is not None):
            return survivors
        if survivors is not None:
            survivors.Free()
        elif failure and failure.Get_error_class() not in (mpi.ERR_PROC_FAILED, mpi.ERR_PROC_FAILED_PENDING):
            raise failure


def grow(mpi: Any, comm: Any, count: int, arguments: Sequence[str], environment: Mapping[str, str]) -> Any:
    """Start ``count`` Python processes that call `join_parent`. Return the communicator of all ranks. Collective."""
    # Pass variables by the command `env`, because daemons on other hosts have another environment, and a value of
    # MPI_Info holds a few hundred characters at most.
    variables = [f"{name}={value}" for name, value in environment.items()]
    hint = _least_used_node(mpi, comm, os.environ)
    intercomm = comm.Spawn("env", [*variables, sys.executable, *arguments], count, info=hint)
    hint.Free()
    return _merge(mpi, intercomm, late=False)


def _least_used_node(mpi: Any, comm: Any, environment: Mapping[str, str]) -> Any:
    hint = mpi.Info.Create()
    names = comm.allgather(environment.get("SLURMD_NODENAME", ""))
    if all(names):
        hint.Set("host", min(sorted(set(names)), key=names.count))
    return hint


def join_parent(mpi: Any) -> Any | None:
    """Return the MPI communicator of the old and new ranks if `grow` spawned this process, else None."""
    intercomm = mpi.Comm.Get_parent()
    return None if intercomm == mpi.COMM_NULL else _merge(mpi, intercomm, late=True)


def _merge(mpi: Any, intercomm: Any, late: bool) -> Any:
    # With an inherited default error handler, a rank failure would abort the job.
    intercomm.Set_errhandler(mpi.ERRORS_RETURN)
    merged = intercomm.Merge(late)
    merged.Set_errhandler(mpi.ERRORS_RETURN)
    intercomm.Free()
    return merged


def allgather_objects(mpi: Any, comm: Any, value: Any) -> list[Any]:
    """Return the list of all ranks' ``value``. With ULFM, a rank failure raises an error on every rank. Collective."""
    if not is_enabled(mpi):
        return list(comm.allgather(value))
    pickled = np.frombuffer(pickle.dumps(value), np.uint8)
    sizes = np.empty(comm.size, np.int64)
    comm.Allgather(np.array([pickled.size]), sizes)
    padded = np.zeros(sizes.max(), np.uint8)
    padded[: pickled.size] = pickled
    gathered = np.empty((comm.size, padded.size), np.uint8)
    comm.Allgather(padded, gathered)
    return [pickle.loads(row[:size].data) for row, size in zip(gathered, sizes, strict=True)]


def check_completed(mpi: Any, comm: Any) -> None:
    """Raise an error on every rank if any rank has failed. Does nothing without ULFM. Collective."""
    if is_enabled(mpi):
        comm.Allreduce(mpi.IN_PLACE, np.zeros(1))
