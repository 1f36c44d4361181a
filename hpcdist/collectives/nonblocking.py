"""Collectives that go on while the caller computes: started now, waited for later.

    with nonblocking.begin(comm, "thread") as progress:
        handle = progress.iallreduce(gradients, "ring")
        ...  # compute something else
        handle.wait()

`Progress.ireduce_scatter` and `Progress.iall_gather` are the two halves, by the algorithms of `collectives.SHARDED`.

MPI alone promises no progress outside of its calls, so something has to make them (ompi#8436, mpich#6836):

- "thread": one thread for the communicator runs the blocking algorithms, any of them, in the order of the calls. It
  needs MPI_THREAD_MULTIPLE, and a core to run on: where ranks fill all cores, it takes from them what it computes.
- "poll": nothing happens but within `Progress.progress`, `Handle.test` and `Handle.wait`; who computes calls
  `progress` in between. The algorithms are those that come in steps: `resumable.RESUMABLE`, by operation.

With n bytes in t seconds of communication and a seconds of other work, the best case is max(a, t) instead of a + t.

All ranks start their operations on one `Progress` in the same order, as blocking collectives on a communicator; they
may wait for them in any order. From start to `Handle.wait` (or a true `Handle.test`) the buffer belongs to the
operation: nobody else reads or writes it. Afterwards it holds the result, the same bits on all ranks.
"""

from collections.abc import Callable
from typing import Final

from hpcdist.collectives.background import ThreadProgress
from hpcdist.collectives.polled import PollProgress
from hpcdist.collectives.progress import Handle, Progress
from hpcdist.comm.communicator import Communicator
from hpcdist.errors import UsageError

__all__ = ["KINDS", "Handle", "PollProgress", "Progress", "ThreadProgress", "begin"]

KINDS: Final[dict[str, Callable[[Communicator], Progress]]] = {"thread": ThreadProgress, "poll": PollProgress}


def begin(comm: Communicator, kind: str) -> Progress:
    """Return the progress of ``kind`` ("thread" or "poll") for ``comm``, to be closed. Collective over ``comm``.

    Raises UsageError for another kind, MissingCapabilityError where there cannot be a thread.
    """
    if kind not in KINDS:
        raise UsageError(f"progress {kind!r} is unknown; choose one of {', '.join(KINDS)}")
    return KINDS[kind](comm)
