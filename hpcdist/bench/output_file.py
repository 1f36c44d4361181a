"""Check on rank 0 that results can be written, before anything is measured, and raise the error on all ranks."""

import sys
from collections.abc import Callable
from pathlib import Path

from hpcdist.comm.communicator import Communicator
from hpcdist.comm.start import Session
from hpcdist.errors import HpcdistError
from hpcdist.hdf5 import files


def check_on_all_ranks(comm: Communicator, check: Callable[[], object]) -> None:
    """Make ``check`` on rank 0 and raise on every rank the HpcdistError that it raised. Collective over ``comm``."""
    error: HpcdistError | None = None
    if comm.rank == 0:
        try:
            check()
        except HpcdistError as found:
            error = found
    error = comm.broadcast_object(error)
    if error is not None:
        raise error


def exit_unless_writable(session: Session, output: Path | None) -> None:
    """Leave, with the exit code of a StorageError, where no new file can be written at ``output``. Collective.

    For programs that have no command line of ours around them.
    """
    try:
        check_on_all_ranks(session.comm, lambda: None if output is None else files.check_place(output))
    except HpcdistError as error:
        if session.comm.rank == 0:
            print(error, file=sys.stderr)
        session.leave(error.exit_code)
