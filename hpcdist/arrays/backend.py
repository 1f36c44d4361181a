"""Array functions for numpy and cupy arrays alike: placement, allocation, and conversion of foreign tensors.

The library is found from the array itself (`namespace`), never from a module global, so arrays in host memory and on a
GPU can be used side by side in one process.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import prod
from types import ModuleType
from typing import Any, Final, TypeAlias

import numpy as np

from hpcdist.arrays.gpu import device, graphs
from hpcdist.arrays.ranges import ALIGN_BYTES
from hpcdist.errors import UsageError

Array: TypeAlias = np.ndarray  # or cupy.ndarray: the part of the interface that both have
MOST_BYTES: Final = 1 << 47  # the address space of a process on x86-64; numpy refuses larger sizes with a ValueError
Scalar: TypeAlias = float | Array  # a number of the host, or an array () that is still to be computed on a GPU


@dataclass(frozen=True)
class ArrayGroup:
    """Several arrays (samples, ...) that form one batch, such as tokens and their mask: indexed and placed as one.

    ``names`` are the keys where they came as a dict, None where they came as a tuple.
    """

    arrays: tuple[Any, ...]
    names: tuple[str, ...] | None = None

    def __len__(self) -> int:
        return len(self.arrays[0])

    def __getitem__(self, samples: Any) -> "ArrayGroup":
        return self.map(lambda array: array[samples])

    def map(self, function: Callable[[Any], Any]) -> "ArrayGroup":
        """Return the group of ``function(array)`` for each array."""
        return replace(self, arrays=tuple(map(function, self.arrays)))

    @property
    def given(self) -> tuple[Any, ...] | dict[str, Any]:
        """The arrays in the form in which they came: a tuple, or a dict."""
        return self.arrays if self.names is None else dict(zip(self.names, self.arrays, strict=True))


def arrays_in(values: Any) -> tuple[Any, ...]:
    """Return the arrays in ``values``: all of an `ArrayGroup`, else the one array itself."""
    return values.arrays if isinstance(values, ArrayGroup) else (values,)


def is_device(array: Any) -> bool:
    """Whether ``array`` lives on a GPU."""
    return not isinstance(array, np.ndarray) and device.is_device_array(array)


def namespace(array: Any) -> ModuleType:
    """Return the module (numpy or cupy) whose functions take ``array`` without a copy."""
    return device.cupy() if is_device(array) else np


def address(array: Any) -> int:
    """Return the address of the first element of ``array``, on either side."""
    return int(array.data.ptr if is_device(array) else array.ctypes.data)


def matmul(a: Array, b: Array, out: Array) -> None:
    """Write the product of two arrays, which have 2 dims or more, to ``out``, on either side."""
    if is_device(a):
        graphs.matmul(a, b, out)
    else:
        np.matmul(a, b, out=out)


def synchronise(array: Any) -> None:
    """Wait until the kernels that write ``array`` are done; nothing to do for host memory."""
    if is_device(array):
        device.synchronise()


def to_host(array: Any) -> np.ndarray:
    """Return ``array`` as numpy: itself on the host, an explicit copy from a GPU."""
    return device.cupy().asnumpy(array) if is_device(array) else array


def place(array: Any, on: str) -> Array:
    """Return ``array`` on ``"cpu"`` or ``"gpu"``: itself where it is there already, else an explicit copy."""
    if isinstance(array, ArrayGroup):
        return array.map(lambda member: place(member, on))  # type: ignore[return-value]
    if on == "gpu":
        return array if is_device(array) else device.cupy().asarray(array)
    return to_host(array)


def as_array(values: Any) -> Array:
    """Return ``values``, an array or tensor of any library, as an array over the same memory, on either side.

    A tuple or a dict of them becomes an `ArrayGroup`, whose arrays must have equally many samples. Raises UsageError
    for anything else, such as a masked array, or a tensor that another library still differentiates.
    """
    if type(values) is np.ndarray:
        return values
    if isinstance(values, np.ma.MaskedArray):
        raise UsageError("a masked array would lose its mask; pass array.filled(value), or array.data")
    if isinstance(values, np.ndarray):
        return values.view(np.ndarray)  # a matrix would stay 2-D
    if isinstance(values, tuple | Mapping) and len(values):
        inputs = values.values() if isinstance(values, Mapping) else values
        names = tuple(map(str, values)) if isinstance(values, Mapping) else None
        if any(isinstance(member, tuple | Mapping) for member in inputs):
            raise UsageError(f"a {type(values).__name__} of tuples or dicts; several arrays go together in one of them")
        several = ArrayGroup(tuple(map(as_array, inputs)), names)
        members = dict(zip(names or range(len(values)), several.arrays, strict=True))
        if single := [str(name) for name, array in members.items() if not array.ndim]:
            raise UsageError(
                f"{', '.join(single)} of a {type(values).__name__} is a single number; expected an array whose first "
                "dim is the samples"
            )
        sizes = {name: len(array) for name, array in members.items()}
        if len(set(sizes.values())) > 1:
            counts = ", ".join(f"{name}: {size}" for name, size in sizes.items())
            raise UsageError(f"what goes together has unequally many samples ({counts}); the first dim is theirs")
        return several  # type: ignore[return-value]
    try:
        # Ask the object, not its type: PyTorch's tensor type has the attribute, its tensors on the host do not.
        if hasattr(values, "__cuda_array_interface__"):
            return device.cupy().asarray(values)
        array = np.asarray(values)
    except (TypeError, ValueError, RuntimeError, AttributeError) as error:
        raise UsageError(f"a {type(values).__name__} cannot be read as an array: {error}") from error
    if not array.ndim or array.dtype.hasobject:
        raise UsageError(f"a {type(values).__name__} is no array of numbers; give one, or a tensor")
    return array


def empty(shape: int | tuple[int, ...], dtype: np.dtype, on: str = "cpu") -> Array:
    """Return uninitialised memory on ``"cpu"`` or ``"gpu"``."""
    return device.cupy().empty(shape, dtype) if on == "gpu" else np.empty(shape, dtype)


def zeros(shape: int | tuple[int, ...], dtype: np.dtype, on: str = "cpu") -> Array:
    """Return zeroed memory on ``"cpu"`` or ``"gpu"``, aligned to a cache line: JAX shares only such memory.

    On the host the owner of the memory is the ``base`` of the returned array.
    """
    if on == "gpu":
        return device.cupy().zeros(shape, dtype)
    nbytes = prod(shape if isinstance(shape, tuple) else (shape,)) * np.dtype(dtype).itemsize
    if nbytes > MOST_BYTES:
        raise MemoryError(f"an array of shape {shape} and type {np.dtype(dtype)} has {nbytes:.3g} bytes")
    owner = np.zeros(nbytes + ALIGN_BYTES, np.uint8)  # numpy itself aligns to 16 bytes
    start = -owner.ctypes.data % ALIGN_BYTES
    array: Array = owner[start : start + nbytes].view(dtype).reshape(shape)
    return array
