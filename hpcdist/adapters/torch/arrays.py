"""Arrays and tensors in the same memory, seen by two libraries; random states and streams of PyTorch."""

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

# PyTorch has one generator a device for the whole process: ranks that are threads of one take turns.
_GENERATORS: Final = threading.RLock()
_MALLOC: Final = {"MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_", "MALLOC_MMAP_MAX_"}
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of mallopt(3)


@functools.cache
def library() -> ModuleType:
    """Return the torch module. Raises MissingCapabilityError, with the reason, where it cannot be imported."""
    try:
        return importlib.import_module("torch")
    except ImportError as error:
        raise MissingCapabilityError(
            f"torch cannot be imported ({error}); install hpcdist[torch], or train a built-in model"
        ) from error


def keep_freed_memory() -> None:
    """Let the C library keep what a step gives back for the next one, unless the environment says how it should.

    PyTorch takes activations of the host from it and gives them back in each backward. glibc hands a heap that is free
    at its end to the system, and pages of it are faulted in again: 2 % of a step of a small GPT. For the whole process;
    up to 2 GiB stay with it that nobody uses.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None and not _MALLOC.intersection(os.environ):
        mallopt(_MMAP_THRESHOLD, 32 << 20)  # the most that glibc takes; beyond it a block is mapped, and unmapped
        mallopt(_TRIM_THRESHOLD, (1 << 31) - 1)


def tensor_of(array: Array) -> "torch.Tensor":
    """Return a tensor in the memory of ``array``; a copy of one that is read only, which a tensor cannot be."""
    if is_device(array):
        on_device: torch.Tensor = library().from_dlpack(array)
        return on_device
    tensor: torch.Tensor = library().from_numpy(array if array.flags.writeable else array.copy())
    return tensor


def array_of(tensor: "torch.Tensor") -> Array:
    """Return an array in the memory of ``tensor``, which it keeps alive; a copy of one that is not contiguous."""
    own = tensor.detach().contiguous()
    array: Array = device.cupy().from_dlpack(own) if own.is_cuda else own.numpy()
    return array


def as_computable(array: Array | ArrayGroup, dtype: "torch.dtype") -> Any:
    """Return data in a type that PyTorch computes with: integers as int64, real numbers as ``dtype``, truths as such.

    Data of that type already is not copied. Of several arrays, several tensors.
    """
    if isinstance(array, ArrayGroup):
        return array.map(lambda one: as_computable(one, dtype))
    if np.issubdtype(array.dtype, np.integer):
        return tensor_of(array.astype(np.int64, copy=False))
    tensor = tensor_of(array)
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


@contextlib.contextmanager
def share_stream(array: Array) -> Iterator[None]:
    """Let PyTorch launch its kernels on the stream on which ``array`` is written: then neither waits for the other."""
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
    """Return a context manager that counts the operations of products: ``get_total_flops()``."""

    def attention(q: tuple[int, ...], k: tuple[int, ...], v: tuple[int, ...], *_: Any, **__: Any) -> int:
        return 2 * math.prod(q[:-1]) * k[-2] * (q[-1] + v[-1])  # scores, and sums of values by them

    on_cpu = library().ops.aten._scaled_dot_product_flash_attention_for_cpu  # which the counter does not know
    counter = importlib.import_module("torch.utils.flop_counter")
    return counter.FlopCounterMode(display=False, custom_mapping={on_cpu: attention})


@contextlib.contextmanager
def restored_random(devices: "Sequence[torch.device]") -> Iterator[None]:
    """Leave the generators of the CPU and of ``devices`` as they were; other threads draw before or after."""
    with _GENERATORS, library().random.fork_rng(devices):
        yield


@contextlib.contextmanager
def seeded_random(draw: Draw, layer: int, where: "torch.device") -> Iterator[None]:
    """Draw from a stream of (seed, step, first sample of the micro-batch, layer), whatever was drawn before.

    So a forward that is computed again drops the same, and the generators of the user are left as they were.
    """
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
