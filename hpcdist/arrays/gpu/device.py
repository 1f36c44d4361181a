"""Access to cupy, which only this module imports: streams, events, pinned memory, NCCL, and the choice of a GPU."""

import functools
import importlib
from collections import deque
from types import ModuleType
from typing import Any

import numpy as np

from hpcdist.errors import MissingCapabilityError


@functools.cache
def cupy() -> ModuleType:
    """Import and return the cupy module. Raises MissingCapabilityError, with the reason, if the import fails."""
    try:
        return importlib.import_module("cupy")
    except ImportError as error:
        raise MissingCapabilityError(
            f"cupy cannot be imported ({error}); install hpcdist[cuda12x] or hpcdist[cuda13x], "
            "or set run.device = 'cpu'"
        ) from error


def nccl() -> Any:
    """Return cupy's NCCL module. Raises MissingCapabilityError, with the reason, if NCCL is missing."""
    cuda = cupy().cuda
    try:
        module = getattr(cuda, "nccl", None) or importlib.import_module("cupy.cuda.nccl")
        if not getattr(module, "available", False):  # an empty stub of cupy: import the real module for the reason
            module = importlib.import_module("cupy_backends.cuda.libs.nccl")
    except ImportError as error:
        raise MissingCapabilityError(
            f"cupy cannot use NCCL ({error}); pip install nvidia-nccl-cu12 (or -cu13), or choose another "
            "communication.algorithm than nccl"
        ) from error
    return module


def is_device_array(array: Any) -> bool:
    """Return True if ``array`` is in GPU memory (has the CUDA array interface). Does not need cupy."""
    # Test the type: reading the attribute of an array builds a description, and from version 2 on waits for the stream.
    return hasattr(type(array), "__cuda_array_interface__")


def check_bfloat16() -> None:
    """Raise MissingCapabilityError if the installed cupy does not support bfloat16 (versions before 14)."""
    from hpcdist.arrays.dtypes import BFLOAT16

    module = cupy()
    try:
        module.zeros(1, BFLOAT16)
    except (TypeError, ValueError) as error:
        version = getattr(module, "__version__", "of an unknown version")
        raise MissingCapabilityError(
            f"cupy {version} has no bfloat16 ({error}); install cupy 14 or newer, or set precision.mode = 'float16'"
        ) from error


def check_tensor_cores(feature: str, advice: str) -> None:
    """Raise MissingCapabilityError, with ``advice``, if the current GPU has a compute capability below 8.0.

    ``feature``: name of the feature that needs the tensor cores of such a GPU.
    """
    properties = cupy().cuda.runtime.getDeviceProperties(index())
    major, minor = int(properties["major"]), int(properties["minor"])
    if (major, minor) < (8, 0):
        raise MissingCapabilityError(
            f"GPU {index()} is a {properties['name'].decode()} of compute capability {major}.{minor}; {feature} needs "
            f"compute capability 8.0 or newer; {advice}"
        )


def count() -> int:
    """Return the number of visible GPUs. Raises MissingCapabilityError if there is no driver."""
    module = cupy()
    try:
        return int(module.cuda.runtime.getDeviceCount())
    except module.cuda.runtime.CUDARuntimeError as error:
        raise MissingCapabilityError(
            f"no GPU is usable ({error}); check nvidia-smi and CUDA_VISIBLE_DEVICES, or set run.device = 'cpu'"
        ) from error


def choose(local_rank: int) -> int:
    """Make GPU ``local_rank`` modulo number of GPUs the current GPU. Return its index. Call before MPI starts."""
    devices = count()
    if devices == 0:
        raise MissingCapabilityError("CUDA sees 0 GPUs; check CUDA_VISIBLE_DEVICES, or set run.device = 'cpu'")
    index = local_rank % devices
    cupy().cuda.Device(index).use()
    return index


def index() -> int:
    """Return the CUDA index of the current GPU in this process."""
    return int(cupy().cuda.runtime.getDevice())


def bus_id() -> str:
    """Return the PCI address of the current GPU. Unlike a CUDA index, this address is equal in all processes."""
    runtime = cupy().cuda.runtime
    return str(runtime.deviceGetPCIBusId(runtime.getDevice()))


def synchronise() -> None:
    """Wait for all work on the current stream."""
    cupy().cuda.get_current_stream().synchronize()


def current_stream() -> Any:
    """Return the CUDA stream that this thread's kernels use."""
    return cupy().cuda.get_current_stream()


def new_stream() -> Any:
    """Return a new non-blocking stream, which does not synchronise with the default stream."""
    return cupy().cuda.Stream(non_blocking=True)


class Event:
    """CUDA event recorded in a stream. Deleting this object returns the CUDA event to a pool for reuse."""

    def __init__(self, event: Any) -> None:
        self._event = event

    def __del__(self) -> None:
        # A stream that waits for the event has captured its state already; nobody else can use the event.
        _free_events.append(self._event)

    @property
    def done(self) -> bool:
        """True if the GPU has finished all work that was queued before this event."""
        return bool(self._event.done)

    def synchronize(self) -> None:
        """Block the host until the GPU has finished all work that was queued before this event."""
        self._event.synchronize()

    def hold_back(self, stream: Any) -> None:
        """Make all work queued from now on in the CUDA stream ``stream`` wait for this event."""
        stream.wait_event(self._event)


_free_events: deque[Any] = deque()  # shared by all threads: append and pop are atomic


def record(stream: Any = None) -> Event:
    """Record and return an event after the work queued so far on ``stream``, by default the current stream."""
    try:
        event = _free_events.pop()
    except IndexError:
        event = cupy().cuda.Event(disable_timing=True)
    event.record(stream if stream is not None else current_stream())
    return Event(event)


def produced() -> None:
    """Block the host until the work already queued on the current stream has finished."""
    record().synchronize()


def pinned(nbytes: int) -> Any:
    """Return a cupy pointer to ``nbytes`` bytes of pinned host memory. Raises MissingCapabilityError if refused."""
    module = cupy()
    try:
        return module.cuda.alloc_pinned_memory(nbytes)
    except module.cuda.runtime.CUDARuntimeError as error:
        raise MissingCapabilityError(
            f"the driver refused {nbytes} bytes of pinned memory ({error}); raise the locked-memory limit (ulimit -l)"
        ) from error


def to_host_on(stream: Any, source: Any, target: np.ndarray) -> None:
    """Queue, on ``stream``, a copy of the GPU array ``source`` to the host array ``target``. Does not wait."""
    source.get(stream=stream, out=target, blocking=False)
