"""Access to cupy: device arrays, streams and events, pinned memory, NCCL, and the choice of a GPU.

The only importer of cupy. It is imported at the first use, never at import of this module; the reason why it is
missing is kept for `hpcdist doctor`.
"""

import functools
import importlib
from collections import deque
from types import ModuleType
from typing import Any

import numpy as np

from hpcdist.errors import MissingCapabilityError


@functools.cache
def cupy() -> ModuleType:
    """Return the cupy module. Raises MissingCapabilityError, with the reason, where it cannot be imported."""
    try:
        return importlib.import_module("cupy")
    except ImportError as error:
        raise MissingCapabilityError(
            f"cupy cannot be imported ({error}); install hpcdist[cuda12x] or hpcdist[cuda13x], "
            "or set run.device = 'cpu'"
        ) from error


def nccl() -> Any:
    """Return cupy's NCCL module. Raises MissingCapabilityError, with the reason, where the library is missing."""
    cuda = cupy().cuda
    try:
        module = getattr(cuda, "nccl", None) or importlib.import_module("cupy.cuda.nccl")
        if not getattr(module, "available", False):  # cupy puts an empty module there, and keeps the reason to itself
            module = importlib.import_module("cupy_backends.cuda.libs.nccl")
    except ImportError as error:
        raise MissingCapabilityError(
            f"cupy finds no NCCL ({error}); pip install nvidia-nccl-cu12 (or -cu13), or choose another "
            "communication.algorithm than nccl"
        ) from error
    return module


def is_device_array(array: Any) -> bool:
    """Whether ``array`` lives on a GPU, by its CUDA array interface: cupy need not be installed."""
    # Ask the type: reading the attribute of an array builds a description, and from version 2 on waits for the stream.
    return hasattr(type(array), "__cuda_array_interface__")


def check_bfloat16() -> None:
    """Raise MissingCapabilityError where this cupy has no bfloat16, as versions before 14."""
    from hpcdist.arrays.dtypes import BFLOAT16

    module = cupy()
    try:
        module.zeros(1, BFLOAT16)
    except (TypeError, ValueError) as error:
        version = getattr(module, "__version__", "of an unknown version")
        raise MissingCapabilityError(
            f"cupy {version} has no bfloat16 ({error}); install cupy 14 or newer, or set precision.mode = 'float16'"
        ) from error


def check_tensor_cores(needs: str, instead: str) -> None:
    """Raise MissingCapabilityError where the current GPU is older than compute capability 8.0, that of Ampere.

    It has no tensor cores for bfloat16 then, and not the instruction of the kernels of attention. ``needs`` says what
    is asked for, ``instead`` what to set.
    """
    properties = cupy().cuda.runtime.getDeviceProperties(index())
    major, minor = int(properties["major"]), int(properties["minor"])
    if (major, minor) < (8, 0):
        raise MissingCapabilityError(
            f"GPU {index()} is {properties['name'].decode()} of compute capability {major}.{minor}, and {needs} needs "
            f"8.0 or newer; {instead}"
        )


def count() -> int:
    """Return the number of GPUs that this process may use. Raises MissingCapabilityError without a driver."""
    module = cupy()
    try:
        return int(module.cuda.runtime.getDeviceCount())
    except module.cuda.runtime.CUDARuntimeError as error:
        raise MissingCapabilityError(
            f"no GPU is usable ({error}); check nvidia-smi and CUDA_VISIBLE_DEVICES, or set run.device = 'cpu'"
        ) from error


def choose(local_rank: int) -> int:
    """Make one GPU current for this process, round robin by local rank, and return its index.

    Called before MPI starts, since a CUDA-aware MPI opens its context on the device that is then current.
    """
    devices = count()
    if devices == 0:
        raise MissingCapabilityError("CUDA sees 0 GPUs; check CUDA_VISIBLE_DEVICES, or set run.device = 'cpu'")
    index = local_rank % devices
    cupy().cuda.Device(index).use()
    return index


def index() -> int:
    """Return the index of the current GPU, as this process counts them."""
    return int(cupy().cuda.runtime.getDevice())


def bus_id() -> str:
    """Return the PCI address of the current GPU, its name outside of CUDA (CUDA's indices differ by process)."""
    runtime = cupy().cuda.runtime
    return str(runtime.deviceGetPCIBusId(runtime.getDevice()))


def synchronise() -> None:
    """Wait for everything on the current stream."""
    cupy().cuda.get_current_stream().synchronize()


def current_stream() -> Any:
    """Return the stream on which this thread's kernels are launched."""
    return cupy().cuda.get_current_stream()


def new_stream() -> Any:
    """Return a stream that waits for no other unless it is told to, not even for the default one."""
    return cupy().cuda.Stream(non_blocking=True)


class Event:
    """A place in a stream. Its event of CUDA is recorded anew once the last reference to this object is gone."""

    def __init__(self, event: Any) -> None:
        self._event = event

    def __del__(self) -> None:
        # A stream that was told to wait has taken the place down; nobody else can ask for it any more.
        _free_events.append(self._event)

    @property
    def done(self) -> bool:
        """Whether the work in front of this place is done."""
        return bool(self._event.done)

    def synchronize(self) -> None:
        """Wait for the work in front of this place."""
        self._event.synchronize()

    def hold_back(self, stream: Any) -> None:
        """Let what is enqueued on ``stream`` from now on wait for the work in front of this place."""
        stream.wait_event(self._event)


_free_events: deque[Any] = deque()  # of all threads: its two ends are taken and given atomically


def record(stream: Any = None) -> Event:
    """Record and return an event behind all work that is enqueued on ``stream`` (None: the current one) so far."""
    try:
        event = _free_events.pop()
    except IndexError:
        event = cupy().cuda.Event(disable_timing=True)
    event.record(stream if stream is not None else current_stream())
    return Event(event)


def produced() -> None:
    """Wait for the work that is on the current stream so far, and for nothing later: its results may then be read."""
    record().synchronize()


def pinned(nbytes: int) -> Any:
    """Return page-locked memory of the host as an object with a buffer. Raises MissingCapabilityError if refused."""
    module = cupy()
    try:
        return module.cuda.alloc_pinned_memory(nbytes)
    except module.cuda.runtime.CUDARuntimeError as error:
        raise MissingCapabilityError(
            f"{nbytes} bytes of pinned memory were refused ({error}); raise the limit of locked memory (ulimit -l)"
        ) from error


def to_host_on(stream: Any, source: Any, target: np.ndarray) -> None:
    """Begin to copy ``source`` into ``target`` of the host on ``stream``; read it after an event behind the copy."""
    source.get(stream=stream, out=target, blocking=False)
