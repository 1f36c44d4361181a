"""Order between PyTorch's streams and operations on tensors in GPU memory, as ProcessGroupNCCL keeps it.

    stream of the program   kernels -> mark                         hold_back -> kernels that use the result
    communication stream                   wait -> operation -> mark

An operation waits for what was on the stream of the program when it was asked for; the program's stream waits for the
operation. The host waits for neither over NCCL, if the group has a thread; otherwise the thread that runs the operation
waits. Each thread that runs operations has a communication stream, which is current for PyTorch and for cupy while it
runs one: so scratch and pinned blocks, which are the thread's, are used in one order.

The only module that calls `torch.cuda` for a group.
"""

import threading
from collections import defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import cuda

from hpcdist.arrays.gpu import device as gpu
from hpcdist.errors import MissingCapabilityError

HAS_GPU: Final = cuda.is_available()


class _CommunicationStream:
    """A stream of cupy, and the same one as PyTorch sees it. Another thread takes it when this object is gone."""

    def __init__(self, device: torch.device) -> None:
        self._free = _free[device]
        try:
            self._pair = self._free.pop()
        except IndexError:
            made = gpu.new_stream()
            self._pair = made, cuda.ExternalStream(made.ptr, device=device)
        self.cupy, self.torch = self._pair

    def __del__(self) -> None:
        self._free.append(self._pair)


# Streams are never destroyed: PyTorch asks them when memory that they have used is freed.
_free: Final[defaultdict[torch.device, deque[tuple[Any, Any]]]] = defaultdict(deque)


class _Local(threading.local):
    """Communication streams of a thread, by device."""

    def __init__(self) -> None:
        self.streams: dict[torch.device, _CommunicationStream] = {}


_here: Final = _Local()


class Streams:
    """Streams of the GPU ``device``. Raises MissingCapabilityError, with what to do, without cupy or a driver."""

    def __init__(self, device: torch.device) -> None:
        try:
            gpu.cupy()
        except MissingCapabilityError as error:
            major = (torch.version.cuda or "12").partition(".")[0]
            raise MissingCapabilityError(
                f"tensors on {device} need cupy ({error.__cause__}): pip install 'hpcdist[cuda{major}x]', or "
                "communicate tensor.cpu()"
            ) from error
        gpu.count()
        self.device = device

    def mark(self) -> cuda.Event:
        """Return the place behind all that is on the current stream of this thread (local)."""
        event = cuda.Event()
        event.record(cuda.current_stream(self.device))
        return event

    def hold_back(self, mark: cuda.Event) -> None:
        """Let what comes on the current stream from now on wait for what is before ``mark`` (local)."""
        mark.wait(cuda.current_stream(self.device))

    @contextmanager
    def communicating(self, *marks: cuda.Event | None) -> Iterator[None]:
        """Make the communication stream of this thread current, behind ``marks`` (local)."""
        with cuda.device(self.device):
            own = _here.streams.get(self.device)
            if own is None:
                own = _here.streams[self.device] = _CommunicationStream(self.device)
            with cuda.stream(own.torch), own.cupy:
                for mark in marks:
                    if mark is not None:
                        own.torch.wait_event(mark)
                yield

    def future(self) -> Any:
        """Return a future whose callbacks, and those who wait for it, come behind the stream that completes it."""
        return torch.futures.Future(devices=[self.device])


def mark_current() -> cuda.Event | None:
    """Return the place behind what is on the current stream, None where PyTorch has used no GPU (local)."""
    if not (HAS_GPU and cuda.is_initialized()):
        return None
    event = cuda.Event()
    event.record(cuda.current_stream())
    return event


def record_use(tensor: torch.Tensor) -> None:
    """Let the memory of ``tensor`` be given to others only behind what is on the current stream (local)."""
    tensor.record_stream(cuda.current_stream(tensor.device))
