"""The communicator of size 1: no MPI is started, and no caller needs an `if`.

It is a group of one thread, so messages to oneself and every collective work as they do among many.
"""

from hpcdist.comm.communicator import Communicator
from hpcdist.comm.threads import single


def solo() -> Communicator:
    """Return a communicator whose only rank is this process."""
    return single()
