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
from hpcdist.arrays.dtypes import BFLOAT16
from hpcdist.arrays.gpu import device
from hpcdist.errors import BufferHandoverError, MissingCapabilityError
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


_FLOAT8: Final = ("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz")
_NUMBERS: Final = (
    "float16", "float32", "float64", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64",
)  # fmt: skip


@functools.cache
def array_dtypes() -> dict[Any, np.dtype]:
    """Return {dtype of PyTorch: dtype of its elements in `flat_array`}. The first call imports PyTorch."""
    torch = library()
    eight_bits = {torch.bool, *(getattr(torch, name) for name in _FLOAT8 if hasattr(torch, name))}
    return {
        **{getattr(torch, name): np.dtype(name) for name in _NUMBERS},
        **dict.fromkeys(eight_bits, np.dtype(np.uint8)),
        torch.bfloat16: BFLOAT16,
        torch.complex64: np.dtype(np.float32),
        torch.complex128: np.dtype(np.float64),
    }


def check_memory(tensor: "torch.Tensor") -> None:
    """Raise BufferHandoverError unless ``tensor`` is a dense tensor in the memory of the host or of a GPU."""
    if tensor.is_quantized:
        raise BufferHandoverError("quantised tensors are not supported; pass tensor.dequantize()")
    if tensor.layout is not library().strided:
        kind = str(tensor.layout).removeprefix("torch.")
        raise BufferHandoverError(
            f"{kind} tensors are not supported; pass tensor.to_dense(). For the gradients of an embedding, set "
            "sparse=False in torch.nn.Embedding"
        )
    if not (tensor.is_cpu or tensor.is_cuda):
        raise BufferHandoverError(
            f"a tensor on the device {tensor.device} cannot be communicated; move the tensor to cpu or cuda"
        )


def contiguous(tensor: "torch.Tensor", *, copy: bool = False) -> "torch.Tensor":
    """Return ``tensor`` if `flat_array` can use its memory, else a contiguous copy. ``copy``: always copy."""
    is_aligned = tensor.is_cuda or tensor.data_ptr() % min(tensor.element_size(), 8) == 0
    if not copy and tensor.is_contiguous() and is_aligned and not tensor.is_conj() and not tensor.is_neg():
        return tensor
    plain = tensor.detach().resolve_conj().resolve_neg()
    return plain.clone(memory_format=library().contiguous_format)


def flat_array(tensor: "torch.Tensor") -> Array:
    """Return a 1-D array over the memory of a tensor from `contiguous`. Raises BufferHandoverError for other dtypes.

    The elements have a dtype of `array_dtypes`: bools and 8-bit floats are bytes, complex numbers are pairs of floats.
    """
    dtype = array_dtypes().get(tensor.dtype)
    if dtype is None:
        raise BufferHandoverError(f"tensors of {tensor.dtype} cannot be communicated; pass tensor.view(torch.uint8)")
    if tensor.is_cuda:
        view: Array = device.cupy().from_dlpack(tensor.detach().reshape(-1).view(library().uint8)).view(dtype)
        return view
    # Not `tensor.numpy()`: PyTorch then forbids resizing the storage, which FSDP needs to free parameters.
    block = (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
    block.tensor = tensor  # type: ignore[attr-defined]  # keeps the memory alive as long as the array
    return np.frombuffer(block, dtype)  # type: ignore[call-overload]


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
