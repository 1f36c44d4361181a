"""Operations of a process group in their order: `OperationQueue` runs them, a `Work` is the handle of each.

A synchronous operation runs in the thread that calls it. An asynchronous one is put into the queue of its group, from
which a thread of the queue takes it, or whoever waits for it: then it is run there, after those before it, and no
thread has to be woken. All ranks start the operations of a group in the same order, so each queue has one order as
well; queues of several groups go on side by side.

A thread beside the one that computes needs MPI_THREAD_MULTIPLE. Without it an operation runs when it is waited for.

An operation on tensors in GPU memory is done for the host when it is enqueued; `wait` then lets the current stream wait
for it (`streams`). What NCCL still computes is an open event of the recorder, so that the deadline holds for it too: a
second thread of the queue ends it, whatever the operations behind it wait for.
"""

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from queue import SimpleQueue
from typing import Any, Final, NoReturn

import torch
import torch.distributed as dist
from torch import cuda

from hpcdist.collectives import segments
from hpcdist.collectives.gpu import nccl
from hpcdist.comm.events import CallSite, EventSink, attribute
from hpcdist.comm.failure.exits import before_finalize
from hpcdist.errors import DeadlineError
from hpcdist.torch.streams import Streams

NO_TIMEOUT: Final = timedelta(0)
_guard: Final = threading.Lock()  # of the states of all handles; held for moments
END_S: Final = 1.0  # a thread that waits for another rank when the process ends is not waited for any longer
ONE_SIZE: Final = ("all_reduce", "broadcast", "reduce")  # with as many elements on all ranks
LOOK_S: Final = 0.001  # between two looks at what NCCL computes


class _Failed:
    """Value of a future whose operation failed with ``error``: whoever reads it raises that.

    The futures that Python can make have no error for C++. The reducer of DDP takes the tensors out of any value by
    pickling it, and would take the first of none out of an exception.
    """

    def __init__(self, error: BaseException) -> None:
        self._error = error

    def result(self) -> NoReturn:
        """Raise the error: for `torch.futures.Future`."""
        raise self._error

    def __reduce__(self) -> NoReturn:
        raise self._error


class Work(dist.Work):
    """A `torch.distributed.Work` of an operation that writes the tensors ``result``.

    ``done`` says that nothing is left to do for the host. ``streams`` are those of tensors in GPU memory, None for
    others, and ``end_event`` is then the place behind the operation, once it is done.
    """

    streams: Streams | None = None
    end_event: cuda.Event | None = None

    def __init__(self, result: Sequence[torch.Tensor], streams: Streams | None = None) -> None:
        super().__init__()
        self.done = False
        if streams is not None:
            self.streams = streams
        self._result = result
        self._error: BaseException | None = None
        self._future: Any = None
        self._unsettled: Any = None
        self._ended: threading.Event | None = None  # of threads that wait with a timeout

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
        if self._ended is not None:
            self._ended.set()

    def wait_for_end(self, seconds: float) -> bool:
        """Wait for another thread to end the operation; return False after ``seconds`` (local)."""
        with _guard:
            self._ended = ended = self._ended or threading.Event()
        return self.done or ended.wait(seconds)  # `done` after `_ended`: `end` sets them in the other order

    def settle(self) -> None:
        """Complete the future, if one was asked for. Its callbacks may start operations."""
        if self._unsettled is None:
            return
        with _guard:
            future, self._unsettled = self._unsettled, None
        if future is None:
            return
        if self._error is not None:
            future._set_unwrap_func(_Failed.result)
            future.set_result(_Failed(self._error))
            return
        with nullcontext() if self.streams is None else self.streams.communicating(self.end_event):
            future.set_result(list(self._result))

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        """Return true when the result is there for what comes on the current stream; raise what made it fail.

        Raises DeadlineError after a ``timeout`` in which it has not ended, or not been enqueued on the GPU. Without
        MPI_THREAD_MULTIPLE a collective runs in this call and ``timeout`` is not enforced.
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
        if self.streams is not None and self.end_event is not None:
            self.streams.hold_back(self.end_event)

    def is_completed(self) -> bool:
        """Whether the operation has ended, with a result or with an error."""
        return self.done and (self.end_event is None or self.end_event.query())

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
    """A collective operation ``run`` of a queue; ``site`` is the line of the program that asked for it, by ``name``.

    With ``streams`` it comes behind what is on the current stream when this object is made.
    """

    def __init__(
        self,
        queue: "OperationQueue",
        run: Callable[[], object],
        result: Sequence[torch.Tensor],
        site: CallSite | None = None,
        streams: Streams | None = None,
        name: str = "",
    ) -> None:
        super().__init__(result, streams)
        self.name = name
        self.timeout = NO_TIMEOUT  # of a `wait` without a timeout
        self._queue = queue
        if streams is not None:
            self._start_event = streams.mark()
        self.site = site
        self._run: Callable[[], object] | None = run

    def size(self) -> tuple[str, int]:
        """Return type and number of the elements of an operation of which they are the same on all ranks (local)."""
        if self.name not in ONE_SIZE or not self._result:
            return "uint8", 0
        return str(self._result[0].dtype).removeprefix("torch."), sum(tensor.numel() for tensor in self._result)

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
        with streams.communicating(self._start_event, queue.last_event), nccl.enqueuing(queue.has_thread):
            try:
                run()
            finally:  # what was enqueued before it failed is under way
                self.end_event = queue.last_event = streams.mark()
                if nccl.enqueued():
                    queue.watch(self.end_event)

    def _complete(self, timeout: timedelta) -> None:
        self._queue.complete(self, timeout or self.timeout)

    def _let_end(self) -> None:
        if not self._queue.has_thread:
            self._queue.complete(self, NO_TIMEOUT)  # a future waits for no queue


class BatchWork(Work):
    """Several operations, waited for together; the first that failed is what `wait` raises."""

    def __init__(self, works: Sequence[Work]) -> None:
        all_streams = (work.streams for work in works if work.streams is not None)
        super().__init__([tensor for work in works for tensor in work.result()], next(all_streams, None))
        self._works = works

    def is_completed(self) -> bool:
        """Whether all operations have ended."""
        if not all(work.is_completed() for work in self._works):
            return False
        if not self.done:
            self._complete(NO_TIMEOUT)
        return True

    def _complete(self, timeout: timedelta) -> None:
        limit = time.monotonic() + timeout.total_seconds()
        for work in self._works:
            if not work.done:
                rest = timedelta(seconds=max(limit - time.monotonic(), 1e-6))
                work._complete(rest if timeout > NO_TIMEOUT else NO_TIMEOUT)
            work.hold_back()
        if self.streams is not None:
            self.end_event = self.streams.mark()
        self.end(next((work.exception() for work in self._works if work.exception() is not None), None))
        self.settle()

    def _let_end(self) -> None:
        self._complete(NO_TIMEOUT)  # none of them knows that it belongs to a batch


class OperationQueue:
    """The operations of the group ``name``, which the sink that ``events`` returns is told of.

    Its thread, where one may communicate beside the one that computes (``has_thread``), starts with the first
    asynchronous operation, that of `watch` with the first operation over NCCL; both end with `close`.
    """

    def __init__(self, name: str, has_thread: bool, events: Callable[[], EventSink]) -> None:
        self.name, self.has_thread, self._events = name, has_thread, events
        self._turn = threading.Lock()  # held by whoever runs operations
        self._runner: int | None = None  # that thread
        self._waiting: deque[CollectiveWork] = deque()
        self._calls: SimpleQueue[bool] = SimpleQueue()  # true: something waits; false: the end
        self._thread: threading.Thread | None = None
        self.last_event: cuda.Event | None = None  # the place behind the last operation on a GPU, on whichever stream
        # Places behind what NCCL computes, and open events of the recorder; None: the end.
        self._computing: SimpleQueue[tuple[cuda.Event, int] | None] = SimpleQueue()
        self._watcher: threading.Thread | None = None

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

    def watch(self, end_event: cuda.Event) -> None:
        """Keep an event of the recorder open until the GPU has passed ``end_event``: a missed rank has a name.

        Called by who runs operations.
        """
        token = self._events().begin(self.name, "nccl", "uint8", 0, 0, -1, 0)
        self._computing.put((end_event, token))
        if self._watcher is None:
            name = f"NCCL of {self.name}"
            self._watcher = threading.Thread(target=self._end_events, name=name, daemon=True)
            self._watcher.start()

    def _end_events(self) -> None:
        while (item := self._computing.get()) is not None:
            end_event, token = item
            while not end_event.query():
                time.sleep(LOOK_S)  # `synchronize` would keep a core busy
            self._events().end(token)

    def _wake(self) -> None:
        if self._thread is None:
            with _guard:
                if self._thread is None:
                    name = f"collectives of {self.name}"
                    self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
                    self._thread.start()
                    before_finalize(partial(_settle, weakref.ref(self)))
        self._calls.put(True)

    def complete(self, work: CollectiveWork, timeout: timedelta) -> None:
        """Return when ``work`` has been run.

        This thread runs ``work`` if no other does. MPI does not interrupt an operation, so with a ``timeout`` the
        thread of the queue runs ``work``. Raises DeadlineError after ``timeout``.
        """
        if self._runner == threading.get_ident():
            while not work.done:
                self._perform(self._waiting.popleft())
            return
        seconds = timeout.total_seconds()
        if seconds > 0 and self.has_thread:
            if not work.wait_for_end(seconds):
                raise DeadlineError(f"{work.name or 'operation'} of {self.name} has not ended within {seconds:g} s")
            return
        self._turn.acquire()
        self._runner = threading.get_ident()
        try:
            while not work.done:
                self._perform(self._waiting.popleft())
        finally:
            self._runner = None
            self._turn.release()

    def _perform(self, work: CollectiveWork) -> None:
        # With its callbacks: their operations follow directly, whichever thread runs it, so all ranks have one order.
        events = self._events()
        attribute(work.site)
        token = events.begin(self.name, work.name, *work.size(), 0, -1, 0) if work.name else None
        work.perform()
        if token is not None and work.exception() is None:
            events.end(token)
        attribute(None)
        work.settle()

    def _serve(self) -> None:
        while self._calls.get():
            with self._turn:
                self._runner = threading.get_ident()
                if self._waiting:
                    self._perform(self._waiting.popleft())
                self._runner = None
        segments.release()  # a block of pinned memory is free only behind the copy that reads it

    def close(self) -> None:
        """Run what was put in, and end the threads."""
        if self._waiting:
            self.complete(self._waiting[-1], NO_TIMEOUT)
        if self.last_event is not None:
            self.last_event.synchronize()  # and all before it, each of which waits for the one before
        if self._thread is not None:
            self._calls.put(False)
            if self._thread is not threading.current_thread():
                self._thread.join(END_S)
            self._thread = None
        if self._watcher is not None:
            self._computing.put(None)
            self._watcher.join(END_S)
            self._watcher = None


def _settle(queue: "weakref.ref[OperationQueue]") -> None:
    """Give the operations of ``queue`` `END_S` seconds to end before MPI_Finalize, and drop the others (local)."""
    of, limit = queue(), time.monotonic() + END_S
    while of is not None and of._waiting and time.monotonic() < limit:
        time.sleep(LOOK_S)
    if of is not None and of._turn.acquire(timeout=END_S):
        of._waiting.clear()
        of._turn.release()


# Holders keep a Work of Python alive while C++ code of PyTorch refers to it. If the Python object is freed, the C++
# object has lost every method that Python overrides: its ``wait`` never returns. PyTorch puts each Work that an
# overridden collective returns to C++ into a holder; `install` adds one wherever a program passes a Work to C++.
_bindings: Final = torch._C._distributed_c10d
_Reducer: Final[Any] = _bindings.Reducer
# Every function of the bindings that stores a Work. `Work.boxed`, which is a method, is overridden below.
STORES: Final = ((_Reducer, "_set_forward_pass_work_handle"), (_bindings, "_register_work"))
_ProcessGroup: Any = dist.ProcessGroup  # untyped in PyTorch


class _Holder(_ProcessGroup):
    """A process group whose barrier returns ``work``: the C++ method of this name puts it into a holder."""

    def __init__(self, work: Work) -> None:
        super().__init__(0, 1)
        self._work = work

    def barrier(self, *_: Any) -> Work:
        """Return the Work to hold."""
        return self._work


def hold(work: Any) -> Any:
    """Return a C++ Work that forwards ``wait`` and ``get_future`` to ``work`` and keeps it alive (local)."""
    return _ProcessGroup.barrier(_Holder(work), dist.BarrierOptions()) if isinstance(work, Work) else work


def _boxed(work: Work) -> Any:
    return hold(work).boxed()


def install() -> None:
    """Let the bindings hold each `Work` that they store (local)."""
    for owner, name in STORES:
        if hasattr(owner, name):  # a later PyTorch may have removed it
            setattr(owner, name, _with_holders(getattr(owner, name)))
    setattr(Work, "boxed", _boxed)  # noqa: B010 - another signature than the base


def _with_holders(store: Any) -> Any:
    def stored(*arguments: Any) -> Any:
        return store(*map(hold, arguments))

    return stored
