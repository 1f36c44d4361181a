"""User-level fault mitigation (ULFM) of MPI, as Open MPI 5 has it under ``mpirun --with-ft ulfm``.

Other libraries export the same functions, and end the process in them: nothing here is called before `is_enabled`.

`objects` and `confirm` replace a gather that hides failures. Open MPI 5.0 chooses for few bytes an allgatherv, of a
gather and a broadcast, that forgets their errors: when a rank dies in it, most of the others are told that it is
complete, and have in their buffers what was there before. mpi4py's allgather of objects is made of it, too. Its
allgather, allreduce and broadcast report the failure.
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


@functools.cache  # asked in every gather
def is_enabled(mpi: Any) -> bool:
    """Whether the communicators of ``mpi`` (mpi4py.MPI, started) survive the death of a rank (local).

    The launcher's variable asks for it, and the library's own says whether it is so.
    """
    if not mpi.Get_library_version().startswith("Open MPI") or os.environ.get(VARIABLE, "0") in ("", "0", "false"):
        return False
    try:
        loaded = ctypes.CDLL(_LIBRARY, mode=os.RTLD_NOLOAD | os.RTLD_NOW)
        return bool(ctypes.c_bool.in_dll(loaded, _SYMBOL).value)
    except (OSError, ValueError):
        return False  # a library without it, or by another name: nobody can tell, so nothing is risked


def failed(mpi: Any, comm: Any) -> tuple[int, ...]:
    """Return the ranks of ``comm`` that are known to be dead, ascending (local)."""
    dead, members = comm.Get_failed(), comm.Get_group()
    ranks = mpi.Group.Translate_ranks(dead, range(dead.Get_size()), members)
    dead.Free()
    members.Free()
    return tuple(sorted(ranks))


def is_given_up(mpi: Any, comm: Any) -> bool:
    """Whether ``comm`` was revoked, or freed: what is collective over it would never end (local)."""
    return not comm or (is_enabled(mpi) and bool(comm.Is_revoked()))


def agree(mpi: Any, comm: Any, flag: bool) -> bool:
    """Return whether all living members brought true. Collective over them."""
    while True:
        # Deaths that somebody has not acknowledged are an error, on all alike: then all acknowledge, and ask again.
        comm.Ack_failed()
        try:
            return bool(comm.Agree(flag))
        except mpi.Exception as error:
            if error.Get_error_class() != mpi.ERR_PROC_FAILED:
                raise


def shrink(mpi: Any, comm: Any) -> Any:
    """Return a communicator of the living members. Collective over them."""
    while True:
        # Open MPI 5 forgets, when a death interrupts the making of a communicator, that it is over: what is made next
        # from one with a larger number than that one's waits for ever. A new one made from COMM_SELF puts it right.
        mpi.COMM_SELF.Dup().Free()
        smaller, told = None, None
        try:
            smaller = comm.Shrink()
        except mpi.Exception as error:
            told = error
        # Somebody may have died in the midst: either all have the new communicator, or all try again.
        if agree(mpi, comm, smaller is not None):
            return smaller
        if smaller is not None:
            smaller.Free()
        elif told is not None and told.Get_error_class() not in (mpi.ERR_PROC_FAILED, mpi.ERR_PROC_FAILED_PENDING):
            raise told


def grow(mpi: Any, comm: Any, count: int, arguments: Sequence[str], environment: Mapping[str, str]) -> Any:
    """Return a communicator of ``comm`` and ``count`` new processes of this Python. Collective over both."""
    # By the command `env`: daemons on other hosts have an environment of their own, and a value of MPI's information is
    # of a few hundred characters at most.
    variables = [f"{name}={value}" for name, value in environment.items()]
    where = _where(mpi, comm, os.environ)
    between = comm.Spawn("env", [*variables, sys.executable, *arguments], count, info=where)
    where.Free()
    return _merged(mpi, between, late=False)


def _where(mpi: Any, comm: Any, environment: Mapping[str, str]) -> Any:
    """Return the hint that puts new processes on the node with the fewest living members. Collective over them.

    Open MPI chooses any node, but a process can only join from one that has a living member already. Under Slurm alone:
    elsewhere nobody here knows the name that the launcher has for a node.
    """
    hint = mpi.Info.Create()
    names = comm.allgather(environment.get("SLURMD_NODENAME", ""))
    if all(names):
        hint.Set("host", min(sorted(set(names)), key=names.count))
    return hint


def joined(mpi: Any) -> Any | None:
    """Return, in a process that `grow` started, the same communicator; None in others. Collective over both."""
    between = mpi.Comm.Get_parent()
    return None if between == mpi.COMM_NULL else _merged(mpi, between, late=True)


def _merged(mpi: Any, between: Any, late: bool) -> Any:
    between.Set_errhandler(mpi.ERRORS_RETURN)
    merged = between.Merge(late)
    merged.Set_errhandler(mpi.ERRORS_RETURN)
    between.Free()
    return merged


def objects(mpi: Any, comm: Any, value: Any) -> list[Any]:
    """Return the picklable values of all members of ``comm`` in rank order. Collective.

    Where ranks may die, all send as many bytes as the longest value has: `MPI_Allgather` will do then.
    """
    if not is_enabled(mpi):
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
    if is_enabled(mpi):
        comm.Allreduce(mpi.IN_PLACE, np.zeros(1))
