"""Exception classes by cause, and the exit codes that scripts and Slurm test.

Each message states what happened, what was expected and what to change. Invalid user input raises a ``ValueError``.
"""

from collections.abc import Sequence
from typing import Final

OK: Final = 0
FAILURE: Final = 1
USAGE: Final = 2
MISSING_CAPABILITY: Final = 69  # sysexits EX_UNAVAILABLE
STORAGE: Final = 74  # sysexits EX_IOERR
REQUEUE: Final = 75  # sysexits EX_TEMPFAIL: a checkpoint was saved, or no work was done yet; start the job again
CONFIGURATION: Final = 78  # sysexits EX_CONFIG
INTERRUPTED: Final = 130  # 128 + SIGINT


class HpcdistError(Exception):
    """Base class of all hpcdist errors; ``exit_code`` is the exit code of the process."""

    exit_code: int = FAILURE


class UsageError(HpcdistError, ValueError):
    """Invalid command line or invalid arguments of a call."""

    exit_code = USAGE


class ConfigurationError(HpcdistError, ValueError):
    """A recipe, an environment variable or a process grid has an invalid value."""

    exit_code = CONFIGURATION


class DataError(HpcdistError, ValueError):
    """The training data is missing, empty, too short or unreadable."""

    exit_code = CONFIGURATION


class MissingCapabilityError(HpcdistError, RuntimeError):
    """This machine, MPI library or installation lacks a required capability."""

    exit_code = MISSING_CAPABILITY


class StorageError(HpcdistError, OSError):
    """A file could not be written, read or verified."""

    exit_code = STORAGE


class CommunicationError(HpcdistError, RuntimeError):
    """A message could not be sent, received or matched."""


class RankDiedError(CommunicationError):
    """A rank has died, or the communicator was revoked after a death. ``ranks`` lists the ranks known to be dead.

    The MPI library reports a death by its own exceptions: see `hpcdist.comm.failure.rank_failures`.
    """

    def __init__(self, message: str, ranks: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)


class TooFewRanksError(CommunicationError):
    """Too few ranks are alive to continue. The job must be restarted."""


class DeadlineError(CommunicationError):
    """A communication operation did not finish before its deadline."""


class BufferHandoverError(HpcdistError, ValueError):
    """A buffer passed to a communicator is not contiguous, not writable, or has an unsupported dtype."""


class DivergenceError(HpcdistError, RuntimeError):
    """Parameters that must be identical on all replicas differ."""


class ScheduleError(HpcdistError, ValueError):
    """The operation lists of a pipeline schedule would deadlock, or do not compute a complete training step."""


class NonFiniteError(HpcdistError, ArithmeticError):
    """A loss or gradient is NaN or infinite."""
