"""Operations of a process group in their order: `OperationQueue` runs them, a `Work` is the handle of each.

A synchronous operation runs in the thread that calls it. An asynchronous one is put into the queue of its group, from
which a thread of the queue takes it, or whoever waits for it: then it is run there, after those before it, and no
thread has to be woken. All ranks start the operations of a group in the same order, so each queue has one order as
well; queues of several groups go on side by side.

A thread beside the one that computes needs MPI_THREAD_MULTIPLE. Without it an operation runs when it is waited for.

An operation on tensors in GPU memory is done for the host when it is enqueued; `wait` then lets the current stream wait
for it (`streams`). What NCCL still computes is an open event of the recorder, so that the deadline holds for it too.
"""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from datetime import timedelta
from queue import Empty, SimpleQueue
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import cuda

from hpcdist.collectives import segments
from hpcdist.collectives.gpu import nccl
from hpcdist.comm.events import CallSite, EventSink
from hpcdist.errors import DeadlineError
from hpcdist.torch.streams import Streams

NO_TIMEOUT: Final = timedelta(0)
_guard: Final = threading.Lock()  # of the states of all handles; held for moments
END_S: Final = 1.0  # a thread that waits for another rank when the process ends is not waited for any longer
LOOK_S: Final = 0.001  # between two looks at what NCCL computes


class Work(dist.Work):
    """A `torch.distributed.Work` of an operation that writes the tensors ``result``.

    ``done`` says that nothing is left to do for the host. ``streams`` are those of tensors in GPU memory, None for
    others, and ``behind`` is then the place behind the operation, once it is done.
    """

    streams: Streams | None = None
    behind: cuda.Event | None = None

    def __init__(self, result: Sequence[torch.Tensor], streams: Streams | None = None) -> None:
        super().__init__()
        self.done = False
        if streams is not None:
            self.streams = streams
        self._result = result
        self._error: BaseException | None = None
        self._future: Any = None
        self._unsettled: Any = None

    def _complete(self, timeout: timedelta) -> None:
        """Return when the operation has ended. Raises DeadlineError."""
        raise NotImplementedError

    def _let_end(self) -> None:
        """Take care that the operation ends although nobody waits for it."""
        raise NotImplementedError

    def end(self, error: BaseException | None = None) -> None:
        """Enter the end of the operation. `settle` comes after it."""
        self._error = error
        self.done = True  # before `settle` looks for a future: one that is asked for from now on is completed there

    def settle(self) -> None:
        """Complete the future, if one was asked for. Its callbacks may start operations."""
        if self._unsettled is None:
            return
        with _guard:
            future, self._unsettled = self._unsettled, None
        if future is None:
            return
        if self._error is not None:
            future.set_exception(self._error)
            return
        with nullcontext() if self.streams is None else self.streams.communicating(self.behind):
            future.set_result(list(self._result))

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        """Return true when the result is there for what comes on the current stream; raise what made it fail.

        Raises DeadlineError after a ``timeout`` in which it has not ended, or not been enqueued on the GPU.
        """
        if not self.done:
            self._complete(timeout)
        if self._error is not None:
            raise self._error
        if self.streams is not None:
            self.hold_back()
        return True

    def hold_back(self) -> None:
        """Let what comes on the current stream wait for the operation, which is enqueued (local)."""
        if self.streams is not None and self.behind is not None:
            self.streams.hold_back(self.behind)

    def is_completed(self) -> bool:
        """Whether the operation has ended, with a result or with an error."""
        return self.done and (self.behind is None or self.behind.query())

    def is_success(self) -> bool:
        """Whether the operation has ended with a result."""
        return self.is_completed() and self._error is None

    def exception(self) -> BaseException | None:
        """Return what made the operation fail, or None."""
        return self._error

    def result(self) -> list[torch.Tensor]:
        """Return the tensors that hold the result."""
        return list(self._result)

    def synchronize(self) -> None:
        """Do as `wait` does."""
        self.wait()

    def get_future(self) -> Any:
        """Return a torch.futures.Future of the list of tensors that hold the result."""
        with _guard:
            if self._future is not None:
                return self._future
            future = torch.futures.Future() if self.streams is None else self.streams.future()
            self._future = self._unsettled = future
            done = self.done
        if done:
            self.settle()
        else:
            self._let_end()
        return future


class CollectiveWork(Work):
    """A collective operation ``run`` of a queue; ``site`` is the line of the program that asked for it.

    With ``streams`` it comes behind what is on the current stream when this object is made.
    """

    def __init__(
        self,
        queue: "OperationQueue",
        run: Callable[[], object],
        result: Sequence[torch.Tensor],
        site: CallSite | None = None,
        streams: Streams | None = None,
    ) -> None:
        super().__init__(result, streams)
        self._queue = queue
        if streams is not None:
            self._asked = streams.mark()
        self.site = site
        self._run: Callable[[], object] | None = run

    def perform(self) -> None:
        """Run the operation; what it raises is raised by `wait`. Called by the queue, once."""
        assert self._run is not None
        error = None
        try:
            if self.streams is None:
                self._run()
            else:
                self._enqueue(self._run, self.streams)
        except BaseException as raised:  # noqa: BLE001 (raised again where the result is wanted)
            error = raised
        self._run = None
        self.end(error)

    def _enqueue(self, run: Callable[[], object], streams: Streams) -> None:
        queue = self._queue
        # With a thread that looks for its end, nobody waits on the host for what NCCL computes.
        with streams.communicating(self._asked, queue.behind), nccl.enqueuing(queue.has_thread) as calls:
            run()
            self.behind = queue.behind = streams.mark()
        if calls:
            queue.watch(self.behind)

    def _complete(self, timeout: timedelta) -> None:
        self._queue.complete(self, timeout)

    def _let_end(self) -> None:
        if not self._queue.has_thread:
            self._queue.complete(self, NO_TIMEOUT)  # a future waits for no queue


class BatchWork(Work):
    """Several operations, waited for together; the first that failed is what `wait` raises."""

    def __init__(self, works: Sequence[Work]) -> None:
        on_gpu = (work.streams for work in works if work.streams is not None)
        super().__init__([tensor for work in works for tensor in work.result()], next(on_gpu, None))
        self._works = works

    def is_completed(self) -> bool:
        """Whether all operations have ended."""
        if not self.done and all(work.is_completed() for work in self._works):
            self._complete(NO_TIMEOUT)
        return self.done

    def _complete(self, timeout: timedelta) -> None:
        for work in self._works:
            if not work.done:
                work._complete(timeout)
            work.hold_back()
        if self.streams is not None:
            self.behind = self.streams.mark()
        self.end(next((work.exception() for work in self._works if work.exception() is not None), None))
        self.settle()

    def _let_end(self) -> None:
        self._complete(NO_TIMEOUT)  # none of them knows that it belongs to a batch


class OperationQueue:
    """The operations of the group ``name``, which the sink that ``events`` returns is told of.

    Its thread, where one may communicate beside the one that computes (``has_thread``), starts with the first
    asynchronous operation, and ends with `close`.
    """

    def __init__(self, name: str, has_thread: bool, events: Callable[[], EventSink]) -> None:
        self.name, self.has_thread, self._events = name, has_thread, events
        self._turn = threading.Lock()  # held by whoever runs operations
        self._runner: int | None = None  # that thread
        self._waiting: deque[CollectiveWork] = deque()
        self._calls: SimpleQueue[bool] = SimpleQueue()  # true: something waits; false: the end
        self._thread: threading.Thread | None = None
        self.behind: cuda.Event | None = None  # the place behind the last operation on a GPU, on whichever stream
        self._computing: deque[tuple[cuda.Event, int]] = deque()  # places behind what NCCL computes, and open events

    def run(self, work: CollectiveWork) -> CollectiveWork:
        """Run ``work`` now, after all that was put in before (local, as far as the operation is)."""
        if self._runner == threading.get_ident():
            self._perform(work)  # called by the callback of an operation: it comes directly after that
            return work
        self._waiting.append(work)
        self.complete(work, NO_TIMEOUT)
        return work

    def start(self, work: CollectiveWork) -> CollectiveWork:
        """Let ``work`` be run after all that was put in before, by the thread or by who waits for it."""
        if self._runner == threading.get_ident():
            return self.run(work)
        self._waiting.append(work)
        if self.has_thread:
            self._wake()
        return work

    def watch(self, behind: cuda.Event) -> None:
        """Keep an event of the recorder open until the GPU has passed ``behind``: a rank that is missed has a name."""
        token = self._events().begin(self.name, "nccl", "uint8", 0, 0, -1, 0)
        self._computing.append((behind, token))
        self._wake()

    def _wake(self) -> None:
        if self._thread is None:
            with _guard:
                if self._thread is None:
                    name = f"collectives of {self.name}"
                    self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
                    self._thread.start()
        self._calls.put(True)

    def complete(self, work: CollectiveWork, timeout: timedelta) -> None:
        """Return when ``work`` has been run, by this thread if no other runs it. Raises DeadlineError."""
        if self._runner == threading.get_ident():
            while not work.done:
                self._perform(self._waiting.popleft())
            return
        seconds = timeout.total_seconds()
        if not self._turn.acquire(timeout=seconds if seconds > 0 else -1):
            raise DeadlineError(f"an operation of {self.name} has not ended within {seconds:g} s")
        self._runner = threading.get_ident()
        try:
            while not work.done:
                self._perform(self._waiting.popleft())
        finally:
            self._runner = None
            self._turn.release()

    def _perform(self, work: CollectiveWork) -> None:
        # With its callbacks: what they start comes directly after it, whichever thread runs it. So all ranks have one
        # order, also where a hook of DDP answers a sum with another one while the next bucket is put in.
        events = self._events()
        events.attribute(work.site)
        work.perform()
        events.attribute(None)
        work.settle()

    def _serve(self) -> None:
        while self._next_call():
            with self._turn:
                self._runner = threading.get_ident()
                if self._waiting:
                    self._perform(self._waiting.popleft())
                self._runner = None
        segments.release()  # a block of pinned memory is free only behind the copy that reads it

    def _next_call(self) -> bool:
        while True:
            while self._computing and self._computing[0][0].query():
                self._events().end(self._computing.popleft()[1])
            try:
                return self._calls.get(timeout=LOOK_S if self._computing else None)
            except Empty:
                continue

    def close(self) -> None:
        """Run what was put in, and end the thread."""
        if self._waiting:
            self.complete(self._waiting[-1], NO_TIMEOUT)
        if self.behind is not None:
            self.behind.synchronize()  # and all before it, each of which waits for the one before
        if self._thread is not None:
            self._calls.put(False)
            if self._thread is not threading.current_thread():
                self._thread.join(END_S)
            self._thread = None
        while self._computing:
            self._events().end(self._computing.popleft()[1])
