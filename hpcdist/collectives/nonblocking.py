"""Progress engines of nonblocking collectives, by a thread or by polling.

MPI guarantees progress only inside MPI calls, so an engine has to make such calls (ompi#8436, mpich#6836). All ranks
must start the operations of an engine in the same order. Until `Handle.wait` (or a true `Handle.test`), nobody else may
read or write the buffer.
"""

import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import ClassVar, Final

import numpy as np

from hpcdist import collectives
from hpcdist.arrays import backend
from hpcdist.arrays.backend import Array, Ledger
from hpcdist.arrays.dtypes import accumulation_dtype, is_16bit_float, name_of
from hpcdist.collectives import segments
from hpcdist.collectives.progress import (
    ALL_GATHER,
    ALLREDUCE,
    REDUCE_SCATTER,
    RESUMABLE,
    Handle,
    Lane,
    ProgressEngine,
    Task,
    call_of,
)
from hpcdist.collectives.reduction import REFUSALS
from hpcdist.collectives.segments import Buffers, scratch_in
from hpcdist.collectives.sharded import SHARDED
from hpcdist.comm import checks
from hpcdist.comm.communicator import Communicator
from hpcdist.comm.transport import LARGEST_TAG, Request
from hpcdist.errors import BufferHandoverError, CommunicationError, HpcdistError, MissingCapabilityError, UsageError


class _Operation:
    def __init__(self, owner: "PollEngine", slot: int, lanes: Sequence[Lane], finish: Callable[[], None]) -> None:
        self._owner, self.slot, self._finish = owner, slot, finish
        self._lanes: list[tuple[Lane, Sequence[Request]]] = [(lane, ()) for lane in lanes]
        self._over = False

    def advance(self) -> bool:
        lanes = []
        for lane, pending in self._lanes:
            following: Sequence[Request] | None = pending
            # Resume a lane whose requests are all complete: it posts new requests, or ends (None).
            while following is not None and all(request.test() for request in following):
                following = next(lane, None)
            if following is not None:
                lanes.append((lane, following))
        self._lanes = lanes
        if not lanes and not self._over:
            self._finish()
            self._over = True
        return self._over

    def waits_for(self) -> list[list[Request]]:
        return [[request for request in pending if not request.test()] for _, pending in self._lanes]

    def wait(self) -> None:
        while not self.test():
            self._owner.wait_for_more()

    def test(self) -> bool:
        if not self._over:
            self._owner.progress()
        return self._over


class PollEngine(ProgressEngine):
    """Engine without a thread: nonblocking collectives advance only in `progress`, `Handle.test` and `Handle.wait`."""

    # "ring" gives the same bits as the blocking ring. "native" gives the same bits as MPI_Iallreduce, but not always as
    # MPI_Allreduce.
    algorithms: ClassVar = {operation: tuple(known) for operation, known in RESUMABLE.items()}

    def __init__(self, comm: Communicator) -> None:
        super().__init__(comm, "polled")
        self._active: list[_Operation] = []
        self._kept: Buffers = {}  # scratch buffers by slot, separate from this thread's other collectives
        self._tag = 0
        self._failed: BaseException | None = None

    def _start(self, task: Task, ended: Callable[[], None]) -> Handle:
        self._check()
        if task.operation == REDUCE_SCATTER and is_16bit_float(task.buffer.dtype):
            raise MissingCapabilityError(
                f"a reduce-scatter of {name_of(task.buffer.dtype)} cannot be polled: it is a single blocking "
                "all-to-all, without steps to advance between polls; set communication.overlap = 'thread' or 'none'"
            )
        if self.duplicate.checked:
            with self._in_step():
                checks.compare_calls(self.duplicate, call_of(task), self.wait_a_little)
        # The lowest slot that no operation in flight uses: its scratch buffers are free.
        slots = {operation.slot for operation in self._active}
        slot = next(number for number in range(len(slots) + 1) if number not in slots)
        buffer = wide = task.buffer
        if is_16bit_float(buffer.dtype) and task.operation != ALL_GATHER:
            # Sum in float32 and round once, like the blocking algorithms.
            wide = scratch_in(self._kept, f"{slot} widened", buffer.size, accumulation_dtype(buffer.dtype), buffer)
            wide[...] = buffer

        def arrivals(size: int) -> Array:
            return scratch_in(self._kept, f"{slot}", size, wide.dtype, wide)

        def finish() -> None:
            if wide is not buffer:
                with np.errstate(over="ignore"):  # loss scaling checks for infinity
                    buffer[...] = wide
            ended()

        lanes = RESUMABLE[task.operation][task.algorithm](
            self.duplicate, replace(task, buffer=wide), arrivals, self._next_tag
        )
        operation = _Operation(self, slot, lanes, finish)
        self._active.append(operation)
        self.progress()  # send the first messages
        return operation

    def _refuse(self, call: checks.CollectiveCall, error: HpcdistError) -> None:
        checks.announce_refusal(self.duplicate, call, error, self.wait_a_little)

    def _next_tag(self) -> int:
        # All ranks start the same operations in the same order, so they use the same tags.
        self._tag = (self._tag + 1) % (LARGEST_TAG + 1)
        return self._tag

    def progress(self) -> None:
        self._check()
        with self._in_step():
            self._active = [operation for operation in self._active if not operation.advance()]

    def wait_a_little(self, *others: Request) -> None:
        """Advance all operations, then wait until a request of this engine or one of ``*others`` completes. Local."""
        self.progress()
        self.wait_for_more(*others)

    def wait_for_more(self, *others: Request) -> None:
        """Wait until an MPI request of this engine, or one of the requests ``*others``, is complete. Local."""
        with self._in_step():
            lanes = [lane for operation in self._active for lane in operation.waits_for()]
            lanes += [[] if request.test() else [request] for request in others]
            # Do not wait if a lane can be resumed (nothing pending): other ranks may wait for its next message.
            if lanes and all(lanes):
                self.duplicate.wait_any([request for lane in lanes for request in lane])

    @contextmanager
    def _in_step(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            self._failed = error
            raise

    def _check(self) -> None:
        if self._failed is not None:
            raise CommunicationError(
                f"a nonblocking collective failed before ({self._failed!r}), and this progress engine runs no further "
                "collectives after a failure; fix the cause of the first failure"
            ) from self._failed

    def _finish(self) -> None:
        for operation in list(self._active):
            operation.wait()
        self._kept.clear()


END_S: Final = 1.0  # maximum wait for a thread that is in a collective when the process ends


def _run_blocking(comm: Communicator, task: Task) -> None:
    if task.operation == ALLREDUCE:
        collectives.allreduce(comm, task.buffer, task.algorithm, task.op)
    elif task.operation == REDUCE_SCATTER:
        SHARDED[task.algorithm].reduce_scatter(comm, task.buffer, task.shares, task.op)
    else:
        SHARDED[task.algorithm].all_gather(comm, task.buffer, task.shares)


class _Job:
    def __init__(self, call: Callable[[], None], ended: Callable[[], None]) -> None:
        self._call, self._ended = call, ended
        self._over = threading.Event()
        self._error: BaseException | None = None

    def run(self, before: BaseException | None) -> BaseException | None:
        try:
            if before is not None:
                raise CommunicationError(
                    f"this nonblocking collective was not started, because an earlier collective failed ({before!r}); "
                    "fix the cause of the first failure"
                ) from before
            self._call()
            self._ended()
        except BaseException as error:  # noqa: BLE001 (raised again by `wait`)
            self._error = error
            if isinstance(error, REFUSALS):
                self._ended()  # no rank waits in the call
        self._over.set()
        return before or self._error  # later jobs report the first failure

    def wait(self) -> None:
        self._over.wait()
        if self._error is not None:
            raise self._error

    def test(self) -> bool:
        if self._over.is_set():
            self.wait()
        return self._over.is_set()


class _Clock:
    busy_s = 0.0


def _serve(jobs: "queue.SimpleQueue[_Job | None]", clock: _Clock, ledger: Ledger | None) -> None:
    segments.account(ledger)
    failed: BaseException | None = None
    while (job := jobs.get()) is not None:
        start_s = time.perf_counter()
        failed = job.run(failed)
        clock.busy_s += time.perf_counter() - start_s
        del job  # frees the buffer


def _end(jobs: "queue.SimpleQueue[_Job | None]", thread: threading.Thread, limit_s: float | None = END_S) -> None:
    jobs.put(None)
    if thread is not threading.current_thread():
        thread.join(limit_s)


class ThreadEngine(ProgressEngine):
    """Engine with a thread for nonblocking collectives. Raises MissingCapabilityError without MPI_THREAD_MULTIPLE."""

    # The thread ends at `close`, when the engine is garbage-collected, or when the process ends.
    algorithms: ClassVar = {
        ALLREDUCE: tuple(collectives.ALLREDUCE),
        REDUCE_SCATTER: tuple(SHARDED),
        ALL_GATHER: tuple(SHARDED),
    }

    def __init__(self, comm: Communicator) -> None:
        if not comm.supports("thread_multiple"):
            raise MissingCapabilityError(
                "a progress thread needs MPI_THREAD_MULTIPLE, which the MPI library does not provide (see `hpcdist "
                "doctor`); set communication.overlap = 'poll', or 'none'"
            )
        super().__init__(comm, "background")
        self._clock = _Clock()
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._thread = threading.Thread(
            target=_serve,
            args=(self._jobs, self._clock, segments.ledger()),
            name=f"collectives of {self.duplicate.name}",
            daemon=True,
        )
        self._thread.start()
        # Neither the thread nor this finalizer refers to the engine, so an unused engine can be collected.
        self._abandoned = weakref.finalize(self, _end, self._jobs, self._thread)

    @property
    def busy_s(self) -> float:
        return self._clock.busy_s

    def _start(self, task: Task, ended: Callable[[], None]) -> Handle:
        if backend.is_device(task.buffer):
            raise BufferHandoverError(
                "the buffer is on a GPU, but a progress thread accepts only host buffers: the streams of a GPU belong "
                "to the computing thread; use the progress engine 'poll', or a blocking collective"
            )
        comm = self.duplicate
        return self._put(lambda: _run_blocking(comm, task), ended)

    def _refuse(self, call: checks.CollectiveCall, error: HpcdistError) -> None:
        comm = self.duplicate
        self._put(lambda: checks.announce_refusal(comm, call, error), lambda: None)

    def _put(self, call: Callable[[], None], ended: Callable[[], None]) -> _Job:
        job = _Job(call, ended)
        self._jobs.put(job)
        return job

    def progress(self) -> None:
        """Do nothing: the thread makes progress."""

    def _finish(self) -> None:
        # Run in the thread, which owns the scratch buffers, after all operations.
        last = self._put(lambda: collectives.release(self.duplicate), lambda: None)
        try:
            last.wait()
        except CommunicationError as error:
            raise error.__cause__ or error from None
        finally:
            self._abandoned.detach()
            _end(self._jobs, self._thread, None)

    def _abandon(self) -> None:
        self._abandoned()


__all__ = ["KINDS", "Handle", "PollEngine", "ProgressEngine", "ThreadEngine", "begin"]

KINDS: Final[dict[str, Callable[[Communicator], ProgressEngine]]] = {"thread": ThreadEngine, "poll": PollEngine}


def begin(comm: Communicator, kind: str) -> ProgressEngine:
    """Start a progress engine of ``kind`` "thread" or "poll". Raises MissingCapabilityError. Collective."""
    if kind not in KINDS:
        raise UsageError(f"progress engine {kind!r} is unknown; choose one of {', '.join(KINDS)}")
    return KINDS[kind](comm)
