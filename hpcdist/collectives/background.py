"""Nonblocking collectives by a thread, which runs the blocking algorithms one after the other."""

import queue
import threading
import time
import weakref
from collections.abc import Callable
from typing import ClassVar, Final

from hpcdist import collectives
from hpcdist.arrays import backend
from hpcdist.arrays.ledger import Ledger
from hpcdist.collectives import workspace
from hpcdist.collectives.progress import Handle, Progress
from hpcdist.collectives.reduction import REFUSALS
from hpcdist.collectives.resumable import ALL_GATHER, ALLREDUCE, REDUCE_SCATTER, Task
from hpcdist.collectives.sharded import SHARDED
from hpcdist.comm import checked
from hpcdist.comm.communicator import Communicator
from hpcdist.errors import BufferHandoverError, CommunicationError, HpcdistError, MissingCapabilityError

END_S: Final = 1.0  # a thread that is still in a collective when the process ends is not waited for any longer


def _allreduce(comm: Communicator, task: Task) -> None:
    collectives.allreduce(comm, task.buffer, task.algorithm, task.op)


def _reduce_scatter(comm: Communicator, task: Task) -> None:
    SHARDED[task.algorithm].reduce_scatter(comm, task.buffer, task.shares, task.op)


def _all_gather(comm: Communicator, task: Task) -> None:
    SHARDED[task.algorithm].all_gather(comm, task.buffer, task.shares)


BLOCKING: Final[dict[str, Callable[[Communicator, Task], None]]] = {
    ALLREDUCE: _allreduce,
    REDUCE_SCATTER: _reduce_scatter,
    ALL_GATHER: _all_gather,
}


class _Job:
    """A call that the thread makes, and how it ended."""

    def __init__(self, call: Callable[[], None], ended: Callable[[], None]) -> None:
        self._call, self._ended = call, ended
        self._over = threading.Event()
        self._error: BaseException | None = None

    def run(self, before: BaseException | None) -> BaseException | None:
        """Make the call, unless one ``before`` it failed; return what went wrong."""
        try:
            if before is not None:
                raise CommunicationError(
                    f"not started: a nonblocking collective before it failed ({before!r})"
                ) from before
            self._call()
            self._ended()
        except BaseException as error:  # noqa: BLE001 (raised again where the result is wanted)
            self._error = error
            if isinstance(error, REFUSALS):
                self._ended()  # no rank waits in it
        self._over.set()
        return before or self._error

    def wait(self) -> None:
        """Return when the call has been made."""
        self._over.wait()
        if self._error is not None:
            raise self._error

    def test(self) -> bool:
        """Whether the call has been made."""
        if self._over.is_set():
            self.wait()
        return self._over.is_set()


class _Clock:
    busy_s = 0.0


def _serve(jobs: "queue.SimpleQueue[_Job | None]", clock: _Clock, ledger: Ledger | None) -> None:
    """Run jobs in their order until None comes; after a failure none is run, for the ranks may be out of step."""
    workspace.account(ledger)
    failed: BaseException | None = None
    while (job := jobs.get()) is not None:
        begun = time.perf_counter()
        failed = job.run(failed)
        clock.busy_s += time.perf_counter() - begun
        del job  # and with it the buffer


def _end(jobs: "queue.SimpleQueue[_Job | None]", thread: threading.Thread, limit_s: float | None = END_S) -> None:
    jobs.put(None)
    if thread is not threading.current_thread():
        thread.join(limit_s)


class ThreadProgress(Progress):
    """One thread runs all operations, in their order. Raises MissingCapabilityError without MPI_THREAD_MULTIPLE.

    The thread has scratch memory of its own, counted in the ledger of the thread that makes this. It ends with `close`,
    and without it when this is collected or the process ends.
    """

    algorithms: ClassVar = {
        ALLREDUCE: tuple(collectives.ALLREDUCE),
        REDUCE_SCATTER: tuple(SHARDED),
        ALL_GATHER: tuple(SHARDED),
    }

    def __init__(self, comm: Communicator) -> None:
        if not comm.supports("thread_multiple"):
            raise MissingCapabilityError(
                "a progress thread needs MPI_THREAD_MULTIPLE, and the MPI library gives less (see `hpcdist doctor`); "
                "let who computes poll (communication.overlap = 'poll'), or do not overlap ('none')"
            )
        super().__init__(comm, "background")
        self._clock = _Clock()
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._thread = threading.Thread(
            target=_serve,
            args=(self._jobs, self._clock, workspace.ledger()),
            name=f"collectives of {self.own.name}",
            daemon=True,
        )
        self._thread.start()
        self._abandoned = weakref.finalize(self, _end, self._jobs, self._thread)  # holds no reference to this

    @property
    def busy_s(self) -> float:
        """Time in which the thread was at work, waiting for other ranks included."""
        return self._clock.busy_s

    def _start(self, task: Task, ended: Callable[[], None]) -> Handle:
        if backend.is_device(task.buffer):
            raise BufferHandoverError(
                "a progress thread takes host memory: the streams of a GPU belong to the thread that computes; "
                "use the progress 'poll', or a blocking collective"
            )
        own = self.own
        return self._put(lambda: BLOCKING[task.operation](own, task), ended)

    def _refuse(self, call: checked.Call, error: HpcdistError) -> None:
        own = self.own
        self._put(lambda: checked.refuse(own, call, error), lambda: None)

    def _put(self, call: Callable[[], None], ended: Callable[[], None]) -> _Job:
        job = _Job(call, ended)
        self._jobs.put(job)
        return job

    def progress(self) -> None:
        """Nothing to do: the thread goes on by itself."""

    def _finish(self) -> None:
        last = self._put(lambda: collectives.release(self.own), lambda: None)
        try:
            last.wait()
        except CommunicationError as error:
            raise error.__cause__ or error from None
        finally:
            self._abandoned.detach()
            _end(self._jobs, self._thread, None)

    def _abandon(self) -> None:
        self._abandoned()
