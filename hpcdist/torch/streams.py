"""Order between PyTorch's CUDA streams and operations on GPU tensors, as in ProcessGroupNCCL.

    program's stream        kernels -> mark                         hold_back -> kernels that use the result
    communication stream                   wait -> operation -> mark

With NCCL and a thread in the process group, the host does not wait. Otherwise the thread that runs the operation waits.
Each thread has its own communication stream.
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
    # CUDA stream of one thread. After the thread ends, another thread may reuse it.
    def __init__(self, device: torch.device) -> None:
        self._free = _free[device]
        try:
            self._pair = self._free.pop()
        except IndexError:
            stream = gpu.new_stream()
            self._pair = stream, cuda.ExternalStream(stream.ptr, device=device)
        self.cupy, self.torch = self._pair

    def __del__(self) -> None:
        self._free.append(self._pair)


# Streams are never destroyed: PyTorch uses them when it frees memory that they have used.
_free: Final[defaultdict[torch.device, deque[tuple[Any, Any]]]] = defaultdict(deque)


class _Local(threading.local):
    def __init__(self) -> None:
        self.streams: dict[torch.device, _CommunicationStream] = {}


_here: Final = _Local()


class Streams:
    """CUDA streams for operations on the GPU ``device``. Raises MissingCapabilityError without cupy or a GPU driver."""

    def __init__(self, device: torch.device) -> None:
        try:
            gpu.cupy()
        except MissingCapabilityError as error:
            major = (torch.version.cuda or "12").partition(".")[0]
            raise MissingCapabilityError(
                f"tensors on {device} need the package cupy ({error.__cause__}); run pip install "
                f"'hpcdist[cuda{major}x]', or communicate tensor.cpu()"
            ) from error
        gpu.count()
        self.device = device

    def mark(self) -> cuda.Event:
        """Return a CUDA event that completes after all work on this thread's current stream. Local."""
        event = cuda.Event()
        event.record(cuda.current_stream(self.device))
        return event

    def hold_back(self, mark: cuda.Event) -> None:
        """Make the current CUDA stream wait for the event ``mark`` before it starts later work. Local."""
        mark.wait(cuda.current_stream(self.device))

    @contextmanager
    def communicating(self, *marks: cuda.Event | None) -> Iterator[None]:
        """Run the body of ``with`` on this thread's communication stream, after the CUDA events in ``marks``."""
        with cuda.device(self.device):
            stream = _here.streams.get(self.device)
            if stream is None:
                stream = _here.streams[self.device] = _CommunicationStream(self.device)
            with cuda.stream(stream.torch), stream.cupy:
                for mark in marks:
                    if mark is not None:
                        stream.torch.wait_event(mark)
                yield

    def future(self) -> Any:
        """Return a new PyTorch future for tensors on this GPU. The caller sets its result."""
        return torch.futures.Future(devices=[self.device])


def mark_current() -> cuda.Event | None:
    """Return a CUDA event that completes after the work on the current stream, or None before CUDA is used. Local."""
    if not (HAS_GPU and cuda.is_initialized()):
        return None
    event = cuda.Event()
    event.record(cuda.current_stream())
    return event


def record_use(tensor: torch.Tensor) -> None:
    """Keep PyTorch from reusing the memory of ``tensor`` before the work on the current stream has ended. Local."""
    tensor.record_stream(cuda.current_stream(tensor.device))
