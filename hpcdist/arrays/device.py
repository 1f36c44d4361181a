"""The one door to cupy: device arrays, the current stream, and the choice of a GPU.

cupy is imported at the first use, never at import; the reason why it is missing is kept for `hpcdist doctor`.
"""

import functools
import importlib
from types import ModuleType
from typing import Any

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


def is_device_array(array: Any) -> bool:
    """Whether ``array`` lives on a GPU: judged by its interface, so that no cupy is needed to say no."""
    # Asked of the type: the property of an array makes a description, and in its second version waits for the stream.
    return hasattr(type(array), "__cuda_array_interface__")


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


def bus_id() -> str:
    """Return the PCI address of the current GPU: what it is called outside of CUDA, whose indices are its own."""
    runtime = cupy().cuda.runtime
    return str(runtime.deviceGetPCIBusId(runtime.getDevice()))


def synchronise() -> None:
    """Wait for the current stream: the one that produced the buffer which is about to be handed to MPI."""
    cupy().cuda.get_current_stream().synchronize()
