"""A double of torch.cuda over the streams of `cuda_double`, and host tensors that act as GPU tensors.


Work of a user's program is deferred on its stream (`compute`), as late as a GPU may run it. An operation that does not
wait for it reads old data, and so does a program that does not wait for the operation. PyTorch computations on such
tensors inside a group run on the current stream, after its deferred work.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from harness.jobs import LIMIT_S
from stubs.gpu import cuda_double
from stubs.gpu.cuda_double import Stream


class Event(cuda_double.Event):
    """An event with PyTorch's names."""

    def wait(self, stream: Stream) -> None:
        stream.wait_event(self)

    def query(self) -> bool:
        return self.done


class _Local(threading.local):
    def __init__(self) -> None:
        self.streams = [DEFAULT]
        self.devices = [0]


DEFAULT = Stream(null=True)  # the default stream of PyTorch is the same one in all threads
_local = _Local()


def is_available() -> bool:
    return True


def is_initialized() -> bool:
    return True


def current_stream(device: Any = None) -> Stream:
    """The stream on which PyTorch computes in this thread."""
    return _local.streams[-1]


@contextmanager
def stream(chosen: Stream) -> Iterator[None]:
    """Compute on the ``chosen`` stream."""
    _local.streams.append(chosen)
    try:
        yield
    finally:
        assert _local.streams.pop() is chosen


@contextmanager
def device(chosen: torch.device) -> Iterator[None]:
    """Make a device current."""
    _local.devices.append(chosen.index)
    try:
        yield
    finally:
        _local.devices.pop()


def ExternalStream(pointer: int, device: torch.device) -> Stream:
    """Return the stream that another library has created."""
    assert device.index == _local.devices[-1], "a stream belongs to the device that is current when it is made"
    return cuda_double.STREAMS[pointer]


def compute(call: Callable[[], Any]) -> None:
    """Defer ``call``, a kernel of the program, on the current stream."""
    current_stream()._give(call)


def read(tensor: "Played") -> torch.Tensor:
    """Return the values of ``tensor`` that the program sees after all work of the current stream."""
    current_stream().synchronize()
    return tensor.as_subclass(torch.Tensor).clone()


class Played(torch.Tensor):
    """A host tensor that claims to be on a GPU."""

    is_cuda, is_cpu = True, False
    number = 0

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("cuda", self.number)

    def record_stream(self, used: Stream) -> None:
        RECORDED.append((self.data_ptr(), used))

    def __dlpack__(self, *, stream: Any = None, max_version: Any = None, **_: Any) -> Any:  # type: ignore[override]
        assert cuda_double.current_stream() is current_stream(), "the memory is given to a stream that does not wait"
        return self.as_subclass(torch.Tensor).__dlpack__(max_version=max_version)

    def __dlpack_device__(self) -> Any:
        return self.as_subclass(torch.Tensor).__dlpack_device__()

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(function, "__name__", "") in ("clone", "copy_"):
            running = current_stream()
            running._run(running._given)
        return super().__torch_function__(function, types, args, kwargs or {})


class OnAnother(Played):
    """A tensor on another GPU."""

    number = 1


class Future:
    """A future of a GPU: waits for it and its callbacks are ordered after the stream that completed it."""

    def __init__(self) -> None:
        self._done = threading.Event()
        self._lock = threading.Lock()
        self._callbacks: list[Callable[[], None]] = []

    def set_result(self, result: Any) -> None:
        self._result, self._behind = result, Event()
        self._behind.record(current_stream())
        with self._lock:
            self._done.set()
        for callback in self._callbacks:
            callback()

    def value(self) -> Any:
        return self._result

    def wait(self) -> Any:
        assert self._done.wait(LIMIT_S)
        current_stream().wait_event(self._behind)
        return self._result

    def then(self, call: "Callable[[Future], Any]") -> "Future":
        after = Future()

        def callback() -> None:
            with stream(Stream(non_blocking=True)):
                current_stream().wait_event(self._behind)
                after.set_result(call(self))

        with self._lock:
            if not self._done.is_set():
                self._callbacks.append(callback)
                return after
        callback()
        return after


RECORDED: list[tuple[int, Stream]] = []  # memory, and a stream that uses it
