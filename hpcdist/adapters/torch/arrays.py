"""Memory shared between arrays and PyTorch tensors, and PyTorch's random states and streams."""

import contextlib
import ctypes
import functools
import importlib
import math
import os
import threading
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from hpcdist.arrays.backend import Array, ArrayGroup, arrays_in, is_device
from hpcdist.arrays.gpu import device
from hpcdist.errors import MissingCapabilityError
from hpcdist.models.stage import Draw

if TYPE_CHECKING:
    import torch

# PyTorch has one generator per device and process: ranks that are threads must take turns.
_GENERATORS: Final = threading.RLock()
_MALLOC: Final = {"MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_", "MALLOC_MMAP_MAX_"}
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of mallopt(3)


@functools.cache
def library() -> ModuleType:
    """Import and return the torch module. Raises MissingCapabilityError, with the reason, if this fails."""
    try:
        return importlib.import_module("torch")
    except ImportError as error:
        raise MissingCapabilityError(
            f"torch cannot be imported ({error}); install hpcdist[torch], or train a built-in model"
        ) from error


def keep_freed_memory() -> None:
    """Make glibc keep up to 2 GiB of freed memory for later use, unless malloc is already configured."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None and not _MALLOC.intersection(os.environ):
        mallopt(_MMAP_THRESHOLD, 32 << 20)  # the maximum; larger blocks are mapped and unmapped
        mallopt(_TRIM_THRESHOLD, (1 << 31) - 1)


def tensor_of(array: Array) -> "torch.Tensor":
    """Return a PyTorch tensor that shares the memory of ``array``. If ``array`` is read-only, the tensor is a copy."""
    if is_device(array):
        on_device: torch.Tensor = library().from_dlpack(array)
        return on_device
    tensor: torch.Tensor = library().from_numpy(array if array.flags.writeable else array.copy())
    return tensor


def array_of(tensor: "torch.Tensor") -> Array:
    """Return a numpy or cupy array that shares the memory of ``tensor``, or a copy if ``tensor`` is not contiguous."""
    contiguous = tensor.detach().contiguous()
    array: Array = device.cupy().from_dlpack(contiguous) if contiguous.is_cuda else contiguous.numpy()
    return array


def as_computable(array: Array | ArrayGroup, dtype: "torch.dtype") -> Any:
    """Return ``array`` as a tensor: integers become int64, floats become ``dtype``, bools stay bools."""
    if isinstance(array, ArrayGroup):
        return array.map(lambda member: as_computable(member, dtype))
    if np.issubdtype(array.dtype, np.integer):
        return tensor_of(array.astype(np.int64, copy=False))
    tensor = tensor_of(array)
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


@contextlib.contextmanager
def share_stream(array: Array) -> Iterator[None]:
    """Context manager in which PyTorch uses hpcdist's CUDA stream. It does nothing if ``array`` is on the host."""
    if not is_device(arrays_in(array)[0]):
        yield
        return
    torch, pointer = library(), device.current_stream().ptr
    if pointer == torch.cuda.current_stream().cuda_stream:
        yield
        return
    with torch.cuda.stream(torch.cuda.ExternalStream(pointer)):
        yield


def flop_counter() -> Any:
    """Return a PyTorch `FlopCounterMode`, which counts the FLOPs of matrix products (``get_total_flops()``)."""

    def attention(q: tuple[int, ...], k: tuple[int, ...], v: tuple[int, ...], *_: Any, **__: Any) -> int:
        return 2 * math.prod(q[:-1]) * k[-2] * (q[-1] + v[-1])  # scores, and weighted sums of values

    on_cpu = library().ops.aten._scaled_dot_product_flash_attention_for_cpu  # not supported by the counter
    counter = importlib.import_module("torch.utils.flop_counter")
    return counter.FlopCounterMode(display=False, custom_mapping={on_cpu: attention})


@contextlib.contextmanager
def without_autocast(device: "torch.device") -> Iterator[None]:
    """Context manager that turns a ``torch.autocast`` of the script off, as PyTorch advises for a backward pass."""
    torch = library()
    if not torch.is_autocast_enabled(device.type):
        yield
        return
    with torch.autocast(device.type, enabled=False):
        yield


@contextlib.contextmanager
def fresh_casts() -> Iterator[None]:
    """Context manager in which ``torch.autocast`` casts each parameter again, and which frees the casts at exit."""
    # PyTorch keeps 16-bit copies of the parameters until the outermost autocast ends: after an update they are stale.
    library().clear_autocast_cache()
    try:
        yield
    finally:
        library().clear_autocast_cache()


@contextlib.contextmanager
def restored_random(devices: "Sequence[torch.device]") -> Iterator[None]:
    """Context manager that restores the random states of the CPU and ``devices`` at exit. Holds a global lock."""
    with _GENERATORS, library().random.fork_rng(devices):
        yield


@contextlib.contextmanager
def seeded_random(draw: Draw, layer: int, where: "torch.device") -> Iterator[None]:
    """Context manager that seeds PyTorch's random generators with ``draw`` and ``layer``, and restores them at exit."""
    torch = library()
    words = np.random.SeedSequence([draw.seed & (1 << 64) - 1, draw.step, draw.first_sample, layer])
    seed = int(words.generate_state(1, np.uint64)[0])
    generators = [torch.default_generator]
    if where.type == "cuda":
        index = torch.cuda.current_device() if where.index is None else where.index
        generators.append(torch.cuda.default_generators[index])
    with _GENERATORS:
        before = [generator.get_state() for generator in generators]
        try:
            for generator in generators:
                generator.manual_seed(seed)
            yield
        finally:
            for generator, state in zip(generators, before, strict=True):
                generator.set_state(state)
