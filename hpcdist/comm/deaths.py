"""Was it the death of a rank? An error tells, by its class or by those that led to it."""

import sys
import time
from collections.abc import Iterator
from typing import Any, Final

from hpcdist.comm.communicator import Communicator
from hpcdist.errors import RankDiedError

PATIENCE_S: Final = 1.0  # a connection may break before the MPI library is told of the death (empirical: see below)
_PAUSE_S: Final = 1e-3
_NOBODYS: Final = 32766  # a tag without messages


def is_death(error: BaseException, comm: Communicator | None = None, patience_s: float = PATIENCE_S) -> bool:
    """Whether ``error`` is the death of a rank, the revocation that follows one, or came of either (local).

    With ``comm`` also any other error of the MPI library counts when, within ``patience_s`` seconds, a member of
    ``comm`` is known to be dead: a broken connection may be told before its cause. An interrupt is none, whatever it
    interrupted.
    """
    if not isinstance(error, Exception):
        return False
    of_mpi = False
    for each in _chain(error):
        if isinstance(each, RankDiedError):
            return True
        code = _error_class(each)
        if code is not None:
            if code in _classes():
                return True
            of_mpi = True
    return of_mpi and comm is not None and comm.supports("ulfm") and _has_failed(comm, patience_s)


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield ``error``, and those that it was raised from or while handling."""
    seen: set[int] = set()
    front: list[BaseException | None] = [error]
    while front:
        each = front.pop()
        if each is not None and id(each) not in seen:
            seen.add(id(each))
            yield each
            front += [each.__context__, each.__cause__]


def _mpi() -> Any:
    """Return mpi4py.MPI if anybody has loaded it: without it no error is one of MPI."""
    return sys.modules.get("mpi4py.MPI")


def _error_class(error: BaseException) -> int | None:
    mpi = _mpi()
    return int(error.Get_error_class()) if mpi is not None and isinstance(error, mpi.Exception) else None


def _classes() -> set[int]:
    mpi = _mpi()
    # Where a library knows none of them, mpi4py gives them the class of unknown errors.
    return {mpi.ERR_PROC_FAILED, mpi.ERR_PROC_FAILED_PENDING, mpi.ERR_REVOKED} - {mpi.ERR_UNKNOWN}


def _has_failed(comm: Communicator, patience_s: float) -> bool:
    limit = time.monotonic() + patience_s
    while not comm.failed():
        if time.monotonic() > limit:
            return False
        try:
            comm.poll(tag=_NOBODYS)  # the MPI library learns of a death while it progresses
        except Exception as error:  # noqa: BLE001 - asked for what it is
            return is_death(error)
        time.sleep(_PAUSE_S)
    return True
