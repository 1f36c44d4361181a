"""Ordered operations of a process group, and their handles.

All ranks must start operations in the same order. Operations run in this order, in the queue's thread (needs
MPI_THREAD_MULTIPLE) or in a thread that waits. An operation on GPU tensors is done for the host once it is queued;
`wait` then makes the current stream wait.
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

from hpcdist.collectives import nccl, segments
from hpcdist.comm.failure.exits import before_finalize
from hpcdist.comm.transport import CallSite, EventSink, attribute
from hpcdist.errors import DeadlineError
from hpcdist.torch import activity
from hpcdist.torch.activity import waiting
from hpcdist.torch.streams import Streams

NO_TIMEOUT: Final = timedelta(0)
NO_SIZE: Final = "uint8", 0  # (dtype name, element count) of an operation whose sizes may differ between ranks
_guard: Final = threading.Lock()  # guards the state of all handles; held briefly
END_S: Final = 1.0  # maximum wait at exit for a thread that waits for another rank
LOOK_S: Final = 0.001  # polling interval for NCCL work


class _Failed:
    # Value of a PyTorch future for a failed operation: Python cannot set an error in a C++ future.
    def __init__(self, error: BaseException) -> None:
        self._error = error

    def result(self) -> NoReturn:
        raise self._error

    def __reduce__(self) -> NoReturn:
        raise self._error


class Work(dist.Work):
    """Base class for handles of asynchronous operations. ``result``: tensors that the operation writes."""

    streams: Streams | None = None  # CUDA streams of GPU tensors; None: host tensors
    end_event: cuda.Event | None = None
    done = False  # True: the operation has ended or, for GPU tensors, is in a CUDA stream
    _error: BaseException | None = None
    _future: Any = None
    _unsettled: Any = None
    _ended: threading.Event | None = None  # for threads that wait with a timeout

    def __init__(self, result: Sequence[torch.Tensor], streams: Streams | None = None) -> None:
        super().__init__()
        if streams is not None:
            self.streams = streams
        self._result = result

    def _complete(self, timeout: timedelta) -> None:
        raise NotImplementedError

    def _let_end(self) -> None:
        raise NotImplementedError

    def end(self, error: BaseException | None = None) -> None:
        """Record that the operation has ended. ``error``: exception that it raised, or None. Call `settle` next."""
        self._error = error
        self.done = True  # set before `settle` checks for a future: a future requested later is completed at once
        if self._ended is not None:
            self._ended.set()

    def wait_for_end(self, seconds: float) -> bool:
        """Wait up to ``seconds`` until another thread has ended the operation. Return True if it has ended. Local."""
        with _guard:
            self._ended = ended = self._ended or threading.Event()
        return self.done or ended.wait(seconds)  # read `done` after setting `_ended`: `end` uses the opposite order

    def settle(self) -> None:
        """Give the result or error of the ended operation to the PyTorch future that `get_future` returned, if any."""
        if self._unsettled is None:
            return
        with _guard:
            future, self._unsettled = self._unsettled, None
        if future is None:
            return
        if self._error is not None:
            future._set_unwrap_func(_Failed.result)
            future.set_result(_Failed(self._error))
        else:
            with nullcontext() if self.streams is None else self.streams.communicating(self.end_event):
                future.set_result(list(self._result))
        if (activities := activity.current()) is not None:
            activities.end_future(id(self))

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        """Wait for the operation, and return True. Raises the operation's error, or DeadlineError after ``timeout``."""
        # The timeout of collectives needs MPI_THREAD_MULTIPLE, and is ignored otherwise.
        if not self.done:
            self._complete(timeout)
        if self._error is not None:
            raise self._error
        if self.streams is not None:
            self.hold_back()
        return True

    def hold_back(self) -> None:
        """Make the current CUDA stream wait for the end of this operation before it starts later work. Local."""
        if self.streams is not None and self.end_event is not None:
            self.streams.hold_back(self.end_event)

    def is_completed(self) -> bool:
        return self.done and (self.end_event is None or self.end_event.query())

    def is_success(self) -> bool:
        return self.is_completed() and self._error is None

    def exception(self) -> BaseException | None:
        return self._error

    def result(self) -> list[torch.Tensor]:
        return list(self._result)

    def synchronize(self) -> None:
        self.wait()

    def get_future(self) -> Any:
        """Return a PyTorch future whose value is the list of result tensors."""
        if (activities := activity.current()) is not None and self._future is None:
            activities.await_future(id(self))
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
    """Handle of a collective in an `OperationQueue`. The queue calls ``run`` to perform the collective."""

    # On a GPU, the collective starts after the earlier work on the current CUDA stream. Event records need
    # ``name`` (such as "all_reduce"), ``site`` (source line of the call) and ``size``: dtype name and element
    # count, which are equal on all ranks, or ("uint8", 0) if unknown.
    def __init__(
        self,
        queue: "OperationQueue",
        run: Callable[[], object],
        result: Sequence[torch.Tensor],
        site: CallSite | None = None,
        streams: Streams | None = None,
        name: str = "",
        size: tuple[str, int] = NO_SIZE,
    ) -> None:
        super().__init__(result, streams)
        self.name, self.size = name, size
        self.default_timeout = NO_TIMEOUT  # of `wait`; newer versions of PyTorch have a read-only attribute `timeout`
        self._queue = queue
        if streams is not None:
            self._start_event = streams.mark()
        self.site = site
        self._run: Callable[[], object] | None = run

    def perform(self, record: Callable[..., None]) -> None:
        """Perform the collective by ``record``. If it fails, store the error for `wait`. Only the queue calls this."""
        assert self._run is not None
        run = self._run if self.streams is None else partial(self._enqueue, self._run, self.streams)
        error = None
        try:
            record(self.name, self.size, run, self.site)
        except BaseException as raised:  # noqa: BLE001 (raised again by `wait`)
            error = raised
        self._run = None
        self.end(error)

    def _enqueue(self, run: Callable[[], object], streams: Streams) -> None:
        queue = self._queue
        # With a watcher thread, the host does not wait for NCCL.
        with streams.communicating(self._start_event, queue.last_event), nccl.enqueuing(queue.has_thread):
            try:
                run()
            finally:  # kernels enqueued before a failure are in flight
                self.end_event = queue.last_event = streams.mark()
                if nccl.enqueued():
                    queue.watch(self.end_event)

    def _complete(self, timeout: timedelta) -> None:
        self._queue.complete(self, timeout or self.default_timeout)

    def _let_end(self) -> None:
        if not self._queue.has_thread:
            self._queue.complete(self, NO_TIMEOUT)  # waiting for a future would not run the queue


class BatchWork(Work):
    """Handle of a list of operations. `wait` waits for all operations, and raises the first error in list order."""

    def __init__(self, works: Sequence[Work]) -> None:
        all_streams = (work.streams for work in works if work.streams is not None)
        super().__init__([tensor for work in works for tensor in work.result()], next(all_streams, None))
        self._works = works

    def is_completed(self) -> bool:
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
        self._complete(NO_TIMEOUT)  # the single operations do not know their batch


class OperationQueue:
    """Queue that runs the collectives of one process group in the order in which the program calls them."""

    def __init__(self, name: str, has_thread: bool, events: Callable[[], EventSink]) -> None:
        self.name, self.has_thread, self._events = name, has_thread, events
        self._turn = threading.Lock()  # held by the thread that runs operations
        self._runner: int | None = None  # id of this thread
        self._waiting: deque[CollectiveWork] = deque()
        self._calls: SimpleQueue[bool] = SimpleQueue()  # True: an operation is queued; False: end
        self._thread: threading.Thread | None = None
        self.last_event: cuda.Event | None = None  # event after the last GPU operation, on any stream
        # Events after NCCL work, with open events of the recorder; None: end.
        self._computing: SimpleQueue[tuple[cuda.Event, int] | None] = SimpleQueue()
        self._watcher: threading.Thread | None = None

    def run(self, name: str, size: tuple[str, int], run: Callable[[], object], site: CallSite | None) -> None:
        """Run the queued collectives, then the collective ``run`` on host tensors, in this thread."""
        if self._runner == threading.get_ident():
            self._record(name, size, run, site)  # called by a callback of an operation: runs directly after it
            return
        activities = activity.current()  # not `waiting`: for 8 bytes each extra call is measurable
        if activities is not None:
            activities.begin_wait(name or "operation")
        self._turn.acquire()
        self._runner = threading.get_ident()
        try:
            while self._waiting:
                self._perform(self._waiting.popleft())
            self._record(name, size, run, site)
        finally:
            self._runner = None
            self._turn.release()
            if activities is not None:
                activities.end_wait(name or "operation")

    def start(self, work: CollectiveWork, *, wake: bool = True) -> CollectiveWork:
        """Queue the collective ``work``, and return ``work``. If ``wake`` is False, a waiting thread performs it."""
        if self._runner == threading.get_ident():
            self._perform(work)  # called by a callback of an operation: runs directly after this operation
            return work
        self._waiting.append(work)
        if wake and self.has_thread:
            self._wake()
        return work

    def watch(self, end_event: cuda.Event) -> None:
        """Report an NCCL operation to the watchdog as in flight until the CUDA event ``end_event`` has completed."""
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
        """Wait until the collective ``work`` has ended. Raises DeadlineError after ``timeout``, unless it is 0."""
        # Without a limit, this thread runs the queued operations up to ``work``. With a limit, the queue's thread runs
        # them.
        if self._runner == threading.get_ident():
            while not work.done:
                self._perform(self._waiting.popleft())
            return
        seconds = timeout.total_seconds()
        with waiting(work.name or "operation"):
            if seconds > 0 and self.has_thread:
                if not work.wait_for_end(seconds):
                    raise DeadlineError(
                        f"{work.name or 'operation'} on the communicator {self.name} has not ended within "
                        f"{seconds:g} s; check that all ranks have called this operation, or increase the timeout"
                    )
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
        # Operations started by callbacks run directly afterwards in the same thread: all ranks have one order.
        work.perform(self._record)
        work.settle()

    def _record(self, name: str, size: tuple[str, int], run: Callable[[], object], site: CallSite | None) -> None:
        events = self._events()
        attribute(site)
        try:
            if not name:
                run()
                return
            token = events.begin(self.name, name, *size, 0, -1, 0)
            run()
            events.end(token)  # a failed operation stays open
        finally:
            attribute(None)

    def _serve(self) -> None:
        while self._calls.get():
            with self._turn:
                self._runner = threading.get_ident()
                if self._waiting:
                    self._perform(self._waiting.popleft())
                self._runner = None
        segments.release()  # waits for copies that read pinned memory

    def close(self) -> None:
        """Run all queued operations, and end the queue's threads."""
        if self._waiting:
            self.complete(self._waiting[-1], NO_TIMEOUT)
        if self.last_event is not None:
            self.last_event.synchronize()  # includes all earlier operations, since each waits for the previous one
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
    # Before MPI_Finalize, wait at most `END_S` seconds for queued operations, then drop the others. Local.
    operations, limit = queue(), time.monotonic() + END_S
    while operations is not None and operations._waiting and time.monotonic() < limit:
        time.sleep(LOOK_S)
    if operations is not None and operations._turn.acquire(timeout=END_S):
        operations._waiting.clear()
        operations._turn.release()


# Holders keep a Python Work alive while PyTorch's C++ code refers to it: if the Python object were freed, the C++ part
# would lose the overridden methods, and its ``wait`` would never return. PyTorch creates a holder for each Work that an
# overridden collective returns to C++; `install` adds a holder wherever a program passes a Work to C++.
_bindings: Final = torch._C._distributed_c10d
_Reducer: Final[Any] = _bindings.Reducer
# All functions of the bindings that store a Work, except the method `Work.boxed`, which is overridden below.
STORES: Final = ((_Reducer, "_set_forward_pass_work_handle"), (_bindings, "_register_work"))
_ProcessGroup: Any = dist.ProcessGroup  # untyped in PyTorch


class _Holder(_ProcessGroup):
    def __init__(self, work: Work) -> None:
        super().__init__(0, 1)
        self._work = work

    def barrier(self, *_: Any) -> Work:
        return self._work


def hold(work: Any) -> Any:
    """Return a C++ Work that forwards ``wait`` and ``get_future`` to the Python `Work` ``work`` and keeps it alive."""
    return _ProcessGroup.barrier(_Holder(work), dist.BarrierOptions()) if isinstance(work, Work) else work


def _boxed(work: Work) -> Any:
    return hold(work).boxed()


def install() -> None:
    """Wrap PyTorch's C++ functions that store a `Work`, so that the Python object of the `Work` stays alive."""
    for owner, name in STORES:
        if hasattr(owner, name):  # may be missing in later PyTorch versions
            setattr(owner, name, _with_holders(getattr(owner, name)))
    setattr(Work, "boxed", _boxed)  # noqa: B010 - another signature than the base


def _with_holders(store: Any) -> Any:
    def stored(*arguments: Any) -> Any:
        return store(*map(hold, arguments))

    return stored
