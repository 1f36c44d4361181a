"""User-level failure mitigation (ULFM) of MPI: revoke, shrink, agree and acknowledge, with Open MPI 5.

Open MPI has it under ``mpirun --with-ft ulfm``. Other libraries export the same functions, and end the process in
them: call nothing here unless `is_enabled`.

`allgather_objects` and `check_completed` work around a gather that hides failures. For few bytes Open MPI 5.0 chooses
an allgatherv, made of a gather and a broadcast, that drops their errors: when a rank fails in it, most of the others
return success with stale data in their buffers. mpi4py's allgather of objects uses it, too. MPI_Allgather,
MPI_Allreduce and MPI_Bcast report the failure.
"""

import ctypes
import functools
import os
import pickle
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

VARIABLE: Final = "OMPI_MCA_mpi_ft_enable"  # in the environment of every rank started with --with-ft
_LIBRARY: Final = "libmpi.so.40"  # of Open MPI 4 and 5
_SYMBOL: Final = "ompi_ftmpi_enabled"


@functools.cache  # called in every gather
def is_enabled(mpi: Any) -> bool:
    """Whether communicators of ``mpi`` (mpi4py.MPI, initialised) survive the failure of a rank (local).

    The launcher's variable requests it, and a variable of the library says whether it is enabled.
    """
    if not mpi.Get_library_version().startswith("Open MPI") or os.environ.get(VARIABLE, "0") in ("", "0", "false"):
        return False
    try:
        loaded = ctypes.CDLL(_LIBRARY, mode=os.RTLD_NOLOAD | os.RTLD_NOW)
        return bool(ctypes.c_bool.in_dll(loaded, _SYMBOL).value)
    except (OSError, ValueError):
        return False  # no such symbol, or a library of another name: not known, and a wrong yes ends the process


def failed(mpi: Any, comm: Any) -> tuple[int, ...]:
    """Return the ranks of ``comm`` that are known to have failed, ascending (local)."""
    # Get_failed returns a group, whose ranks are not those of the communicator.
    dead, members = comm.Get_failed(), comm.Get_group()
    ranks = mpi.Group.Translate_ranks(dead, range(dead.Get_size()), members)
    dead.Free()
    members.Free()
    return tuple(sorted(ranks))


def is_revoked(mpi: Any, comm: Any) -> bool:
    """Whether ``comm`` was revoked or freed: collective calls on it, such as freeing a window, would hang (local)."""
    return not comm or (is_enabled(mpi) and bool(comm.Is_revoked()))


def agree(mpi: Any, comm: Any, flag: bool) -> bool:
    """Return whether all survivors passed true. Collective over the survivors."""
    while True:
        # MPI_Comm_agree returns ERR_PROC_FAILED, the same on all, while any participant has not acknowledged a failure
        # that another knows of. So each acknowledges what it knows, and all repeat: every round learns of more.
        comm.Ack_failed()
        try:
            return bool(comm.Agree(flag))
        except mpi.Exception as error:
            if error.Get_error_class() != mpi.ERR_PROC_FAILED:
                raise


def shrink(mpi: Any, comm: Any) -> Any:
    """Return a communicator of the survivors. Collective over the survivors."""
    while True:
        # When a failure interrupts the creation of a communicator, Open MPI 5 does not mark its allocation of a context
        # id as ended: a later creation from a communicator with a larger id then waits for ever. Creating one from
        # COMM_SELF, which needs no other rank, resets that state.
        mpi.COMM_SELF.Dup().Free()
        survivors, failure = None, None
        try:
            survivors = comm.Shrink()
        except mpi.Exception as error:
            failure = error
        # A rank may fail during the shrink, which then succeeds on some and raises on others: either all survivors have
        # the new communicator, or all repeat.
        if agree(mpi, comm, survivors is not None):
            return survivors
        if survivors is not None:
            survivors.Free()
        elif failure is not None and failure.Get_error_class() not in (
            mpi.ERR_PROC_FAILED,
            mpi.ERR_PROC_FAILED_PENDING,
        ):
            raise failure


def grow(mpi: Any, comm: Any, count: int, arguments: Sequence[str], environment: Mapping[str, str]) -> Any:
    """Return a communicator of ``comm`` and ``count`` new processes of this Python. Collective over both."""
    # Pass variables by the command `env`: daemons on other hosts have an environment of their own, and a value of
    # MPI_Info holds a few hundred characters at most.
    variables = [f"{name}={value}" for name, value in environment.items()]
    hint = _least_used_node(mpi, comm, os.environ)
    intercomm = comm.Spawn("env", [*variables, sys.executable, *arguments], count, info=hint)
    hint.Free()
    return _merge(mpi, intercomm, late=False)


def _least_used_node(mpi: Any, comm: Any, environment: Mapping[str, str]) -> Any:
    """Return an MPI_Info that places new processes on the node with the fewest survivors. Collective over them.

    Open MPI chooses any node, but a process can only join from a node that has a survivor. Only under Slurm: elsewhere
    the launcher's names of the nodes are not known.
    """
    hint = mpi.Info.Create()
    names = comm.allgather(environment.get("SLURMD_NODENAME", ""))
    if all(names):
        hint.Set("host", min(sorted(set(names)), key=names.count))
    return hint


def join_parent(mpi: Any) -> Any | None:
    """Return, in a process that `grow` started, the same communicator; None in others. Collective over both."""
    intercomm = mpi.Comm.Get_parent()
    return None if intercomm == mpi.COMM_NULL else _merge(mpi, intercomm, late=True)


def _merge(mpi: Any, intercomm: Any, late: bool) -> Any:
    # Whatever they have inherited: with the default error handler a rank failure would abort the job.
    intercomm.Set_errhandler(mpi.ERRORS_RETURN)
    merged = intercomm.Merge(late)
    merged.Set_errhandler(mpi.ERRORS_RETURN)
    intercomm.Free()
    return merged


def allgather_objects(mpi: Any, comm: Any, value: Any) -> list[Any]:
    """Return the picklable values of all members of ``comm`` in rank order. Collective.

    With ULFM all send as many bytes as the longest value has, so that MPI_Allgather can be used: see the top.
    """
    if not is_enabled(mpi):
        return list(comm.allgather(value))
    own = np.frombuffer(pickle.dumps(value), np.uint8)
    sizes = np.empty(comm.size, np.int64)
    comm.Allgather(np.array([own.size]), sizes)
    padded = np.zeros(sizes.max(), np.uint8)
    padded[: own.size] = own
    gathered = np.empty((comm.size, padded.size), np.uint8)
    comm.Allgather(padded, gathered)
    return [pickle.loads(row[:size].data) for row, size in zip(gathered, sizes, strict=True)]


def check_completed(mpi: Any, comm: Any) -> None:
    """Raise the error of a rank failure that the allgatherv before has dropped. Collective."""
    if is_enabled(mpi):
        comm.Allreduce(mpi.IN_PLACE, np.zeros(1))
