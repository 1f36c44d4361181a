"""Errors by audience, and the exit codes that scripts and Slurm branch on.

Every message says what was got, what was expected and what to change. User input raises the ``ValueError`` family;
``assert`` is for invariants of the code itself.
"""

from collections.abc import Sequence
from typing import Final

OK: Final = 0
FAILURE: Final = 1
USAGE: Final = 2
MISSING_CAPABILITY: Final = 69  # sysexits EX_UNAVAILABLE
STORAGE: Final = 74  # sysexits EX_IOERR
REQUEUE: Final = 75  # sysexits EX_TEMPFAIL: checkpointed, or nothing was done yet; start me again
CONFIGURATION: Final = 78  # sysexits EX_CONFIG
INTERRUPTED: Final = 130  # 128 + SIGINT


class HpcdistError(Exception):
    """Root of the tree; ``exit_code`` is what the process leaves with."""

    exit_code: int = FAILURE


class UsageError(HpcdistError, ValueError):
    """The command line or a call does not make sense."""

    exit_code = USAGE


class ConfigurationError(HpcdistError, ValueError):
    """A recipe, an environment variable or a grid cannot be run as written."""

    exit_code = CONFIGURATION


class DataError(HpcdistError, ValueError):
    """The training data is missing, empty, too short or unreadable."""

    exit_code = CONFIGURATION


class MissingCapabilityError(HpcdistError, RuntimeError):
    """Something this machine, MPI or installation does not have."""

    exit_code = MISSING_CAPABILITY


class StorageError(HpcdistError, OSError):
    """A file could not be written, read or verified."""

    exit_code = STORAGE


class CommunicationError(HpcdistError, RuntimeError):
    """A message could not be sent, received or matched."""


class RankDiedError(CommunicationError):
    """A rank has died, or the communicator was revoked because one had. ``ranks`` are those known to be dead, if any.

    See `hpcdist.comm.failure.rank_failures`: the MPI library tells of a death by errors of its own.
    """

    def __init__(self, message: str, ranks: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)


class TooFewRanksError(CommunicationError):
    """So many ranks have died that the others cannot go on; a new start can."""


class DeadlineError(CommunicationError):
    """A communication did not end within its deadline."""


class BufferHandoverError(HpcdistError, ValueError):
    """A buffer handed to a communicator is not contiguous, writable or of a supported dtype."""


class DivergenceError(HpcdistError, RuntimeError):
    """Replicas that must be identical are not."""


class ScheduleError(HpcdistError, ValueError):
    """Lists of operations that would hang, or compute something else than a training step."""


class NonFiniteError(HpcdistError, ArithmeticError):
    """A loss or gradient is NaN or infinite."""
