"""Progress engines of nonblocking collectives, by a thread or by polling, and `begin`, which starts one.

MPI alone promises no progress outside of its calls, so an engine has to make them (ompi#8436, mpich#6836):

- "thread": one thread for the communicator runs the blocking algorithms, any of them, in the order of the calls. It
  needs MPI_THREAD_MULTIPLE, and a core to run on: where ranks fill all cores, it competes with their computation.
- "poll": nothing happens but within `progress`, `Handle.test` and `Handle.wait`; the computation calls `progress` in
  between. The algorithms are those that come in steps: `RESUMABLE` of `progress`, by operation.

With n bytes in t seconds of communication and a seconds of other work, the best case is max(a, t) instead of a + t.

All ranks start their operations on one engine in the same order, as blocking collectives on a communicator; they may
wait for them in any order. From start to `Handle.wait` (or a true `Handle.test`) the buffer belongs to the operation:
nobody else reads or writes it. Afterwards it holds the result, the same bits on all ranks.
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
from hpcdist.arrays.backend import Array
from hpcdist.arrays.dtypes import accumulation_dtype, is_16bit_float, name_of
from hpcdist.arrays.memory import Ledger
from hpcdist.collectives import segments
from hpcdist.collectives.nonblocking.progress import (
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
from hpcdist.comm.communicator import Communicator, Request
from hpcdist.errors import BufferHandoverError, CommunicationError, HpcdistError, MissingCapabilityError, UsageError

TAGS: Final = 1 << 15  # MPI promises tags up to 32767


class _Operation:
    """Lanes under way, each with the requests that it waits for."""

    def __init__(self, owner: "PollEngine", slot: int, lanes: Sequence[Lane], finish: Callable[[], None]) -> None:
        self._owner, self.slot, self._finish = owner, slot, finish
        self._lanes: list[tuple[Lane, Sequence[Request]]] = [(lane, ()) for lane in lanes]
        self._over = False

    def advance(self) -> bool:
        """Take each lane as far as it goes without waiting; whether all are at their end (local)."""
        lanes = []
        for lane, pending in self._lanes:
            following: Sequence[Request] | None = pending
            # A lane whose requests are all complete is resumed: it posts the next ones, or ends (None).
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
        """Return, for each lane, the requests that are not complete (local)."""
        return [[request for request in pending if not request.test()] for _, pending in self._lanes]

    def wait(self) -> None:
        """Move everything that is under way until this is complete."""
        while not self.test():
            self._owner.wait_for_more()

    def test(self) -> bool:
        """Move everything that is under way; whether this is complete."""
        if not self._over:
            self._owner.progress()
        return self._over


class PollEngine(ProgressEngine):
    """Moves its operations within `progress`, `Handle.test` and `Handle.wait`, and nowhere else.

    After a failure nothing moves any more: the ranks may be out of step. "ring" gives the bits of the blocking ring,
    "native" those of MPI_Iallreduce, which may add in another order than MPI_Allreduce: in Open MPI 5, on 3 ranks, a
    fifth of 30,000 floats differ.
    """

    algorithms: ClassVar = {operation: tuple(known) for operation, known in RESUMABLE.items()}

    def __init__(self, comm: Communicator) -> None:
        super().__init__(comm, "polled")
        self._active: list[_Operation] = []
        self._kept: Buffers = {}  # own scratch, by slots: other collectives of this thread run between two polls
        self._tag = 0
        self._failed: BaseException | None = None

    def _start(self, task: Task, ended: Callable[[], None]) -> Handle:
        self._check()
        if task.operation == REDUCE_SCATTER and is_16bit_float(task.buffer.dtype):
            raise MissingCapabilityError(
                f"a reduce-scatter of {name_of(task.buffer.dtype)} has no steps to be polled in: its addends go to the "
                "owner of a share at once; set communication.overlap = 'thread', or 'none'"
            )
        if self.own.checked:
            with self._in_step():
                checks.compare_calls(self.own, call_of(task), self.wait_a_little)
        # The lowest slot that no operation under way has: its scratch is free.
        slots = {operation.slot for operation in self._active}
        slot = next(number for number in range(len(slots) + 1) if number not in slots)
        buffer = wide = task.buffer
        if is_16bit_float(buffer.dtype) and task.operation != ALL_GATHER:
            # Summed in float32 and rounded once, as by the blocking algorithms.
            wide = scratch_in(self._kept, f"{slot} widened", buffer.size, accumulation_dtype(buffer.dtype), buffer)
            wide[...] = buffer

        def arrivals(size: int) -> Array:
            return scratch_in(self._kept, f"{slot}", size, wide.dtype, wide)

        def finish() -> None:
            if wide is not buffer:
                with np.errstate(over="ignore"):  # infinity is the message: loss scaling looks for it
                    buffer[...] = wide
            ended()

        lanes = RESUMABLE[task.operation][task.algorithm](
            self.own, replace(task, buffer=wide), arrivals, self._next_tag
        )
        operation = _Operation(self, slot, lanes, finish)
        self._active.append(operation)
        self.progress()  # the first messages leave now
        return operation

    def _refuse(self, call: checks.CollectiveCall, error: HpcdistError) -> None:
        checks.announce_refusal(self.own, call, error, self.wait_a_little)

    def _next_tag(self) -> int:
        # All ranks start the same operations in the same order, so they draw the same tags.
        self._tag = (self._tag + 1) % TAGS
        return self._tag

    def progress(self) -> None:
        """Take every operation as far as it goes without waiting (local)."""
        self._check()
        with self._in_step():
            self._active = [operation for operation in self._active if not operation.advance()]

    def wait_a_little(self, *others: Request) -> None:
        """Move what can move, and wait until one more message, or one of ``others``, is complete (local)."""
        self.progress()
        self.wait_for_more(*others)

    def wait_for_more(self, *others: Request) -> None:
        """Wait until one more message, or one of ``others``, is complete, unless one is by now (local)."""
        with self._in_step():
            lanes = [lane for operation in self._active for lane in operation.waits_for()]
            lanes += [[] if request.test() else [request] for request in others]
            # Not where some lane could be resumed by now (nothing pending): other ranks may wait for its next message.
            if lanes and all(lanes):
                self.own.wait_any([request for lane in lanes for request in lane])

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
                f"a nonblocking collective failed before ({self._failed!r}): nothing is moved any more"
            ) from self._failed

    def _finish(self) -> None:
        for operation in list(self._active):
            operation.wait()
        self._kept.clear()


END_S: Final = 1.0  # a thread that is still in a collective when the process ends is not waited for any longer


def _run_blocking(comm: Communicator, task: Task) -> None:
    if task.operation == ALLREDUCE:
        collectives.allreduce(comm, task.buffer, task.algorithm, task.op)
    elif task.operation == REDUCE_SCATTER:
        SHARDED[task.algorithm].reduce_scatter(comm, task.buffer, task.shares, task.op)
    else:
        SHARDED[task.algorithm].all_gather(comm, task.buffer, task.shares)


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
        return before or self._error  # the first failure is the one that later jobs report

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
    """Time that the thread of an engine has worked."""

    busy_s = 0.0


def _serve(jobs: "queue.SimpleQueue[_Job | None]", clock: _Clock, ledger: Ledger | None) -> None:
    """Run jobs in their order until None comes; after a failure none is run, for the ranks may be out of step."""
    segments.account(ledger)
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


class ThreadEngine(ProgressEngine):
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
            args=(self._jobs, self._clock, segments.ledger()),
            name=f"collectives of {self.own.name}",
            daemon=True,
        )
        self._thread.start()
        # Neither the thread nor this finalizer refers to the engine, so that an engine that is dropped is collected.
        self._abandoned = weakref.finalize(self, _end, self._jobs, self._thread)

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
        return self._put(lambda: _run_blocking(own, task), ended)

    def _refuse(self, call: checks.CollectiveCall, error: HpcdistError) -> None:
        own = self.own
        self._put(lambda: checks.announce_refusal(own, call, error), lambda: None)

    def _put(self, call: Callable[[], None], ended: Callable[[], None]) -> _Job:
        job = _Job(call, ended)
        self._jobs.put(job)
        return job

    def progress(self) -> None:
        """Nothing to do: the thread goes on by itself."""

    def _finish(self) -> None:
        # In the thread, whose scratch is its own, and behind all operations.
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


__all__ = ["KINDS", "Handle", "PollEngine", "ProgressEngine", "ThreadEngine", "begin"]

KINDS: Final[dict[str, Callable[[Communicator], ProgressEngine]]] = {"thread": ThreadEngine, "poll": PollEngine}


def begin(comm: Communicator, kind: str) -> ProgressEngine:
    """Return the progress of ``kind`` ("thread" or "poll") for ``comm``, to be closed. Collective over ``comm``.

    Raises UsageError for another kind, MissingCapabilityError where there cannot be a thread.
    """
    if kind not in KINDS:
        raise UsageError(f"progress {kind!r} is unknown; choose one of {', '.join(KINDS)}")
    return KINDS[kind](comm)
