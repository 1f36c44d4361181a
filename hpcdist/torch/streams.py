"""Order between PyTorch's CUDA streams and operations on GPU tensors, as in ProcessGroupNCCL.

    program's stream        kernels -> mark                         hold_back -> kernels that use the result
    communication stream                   wait -> operation -> mark

With NCCL and a thread in the process group, the host does not wait. Otherwise the thread that runs the operation waits.
Each thread has its own communication stream.
"""

import functools
import threading
from collections import defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, Final

import torch
from torch import cuda

from hpcdist.arrays.gpu import device as gpu
from hpcdist.errors import MissingCapabilityError

HAS_GPU: Final = cuda.is_available()


@functools.cache
def has_cupy() -> bool:
    """Return True if cupy can be imported. Without cupy, operations copy GPU tensors to the host. Local."""
    try:
        gpu.cupy()
    except MissingCapabilityError:
        return False
    return True


def check_cupy(feature: str) -> None:
    """Raise MissingCapabilityError if cupy cannot be imported. ``feature``: the feature that uses cupy. Local."""
    if not has_cupy():
        major = (torch.version.cuda or "12").partition(".")[0]
        raise MissingCapabilityError(f"{feature} needs the package cupy; run pip install 'hpcdist[cuda{major}x]'")


def pinned_like(tensor: torch.Tensor) -> torch.Tensor:
    """Return a new contiguous tensor in pinned host memory, with the shape and dtype of the GPU ``tensor``. Local."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)


class _CommunicationStream:
    # CUDA stream of one thread. After the thread ends, another thread may reuse it.
    def __init__(self, device: torch.device) -> None:
        self._free = _free[device]
        try:
            self._pair = self._free.pop()
        except IndexError:
            if has_cupy():
                stream = gpu.new_stream()
                self._pair = stream, cuda.ExternalStream(stream.ptr, device=device)
            else:
                self._pair = nullcontext(), cuda.Stream(device)
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
    """CUDA streams for operations on the GPU ``device``."""

    def __init__(self, device: torch.device) -> None:
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
