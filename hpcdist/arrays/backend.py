"""Functions for both numpy and cupy arrays: placement, allocation and conversion of foreign tensors."""

import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import prod
from types import ModuleType
from typing import Any, Final, TypeAlias

import numpy as np

from hpcdist.arrays.gpu import device, graphs
from hpcdist.arrays.ranges import ALIGN_BYTES
from hpcdist.errors import UsageError

Array: TypeAlias = np.ndarray  # or cupy.ndarray: only the interface that both share is used
MOST_BYTES: Final = 1 << 47  # the address space of a process on x86-64; numpy refuses larger sizes with a ValueError
Scalar: TypeAlias = float | Array  # a Python number, or a 0-d array that a GPU has yet to compute


@dataclass(frozen=True)
class ArrayGroup:
    """Batch that consists of several arrays, such as tokens and a mask. Each array has one row per sample."""

    arrays: tuple[Any, ...]
    names: tuple[str, ...] | None = None  # keys of the user's dict; None for a tuple

    def __len__(self) -> int:
        return len(self.arrays[0])

    def __getitem__(self, samples: Any) -> "ArrayGroup":
        return self.map(lambda array: array[samples])

    def map(self, function: Callable[[Any], Any]) -> "ArrayGroup":
        """Return an `ArrayGroup` with ``function`` applied to each array."""
        return replace(self, arrays=tuple(map(function, self.arrays)))

    @property
    def given(self) -> tuple[Any, ...] | dict[str, Any]:
        """The arrays in the form in which the user passed them: a dict if they have names, else a tuple."""
        return self.arrays if self.names is None else dict(zip(self.names, self.arrays, strict=True))


def arrays_in(values: Any) -> tuple[Any, ...]:
    """Return the arrays in ``values`` as a tuple: the members of an `ArrayGroup`, or a single array."""
    return values.arrays if isinstance(values, ArrayGroup) else (values,)


def is_device(array: Any) -> bool:
    """Return True if ``array`` is in GPU memory."""
    return not isinstance(array, np.ndarray) and device.is_device_array(array)


def namespace(array: Any) -> ModuleType:
    """Return the module that computes with ``array``: numpy or cupy."""
    return device.cupy() if is_device(array) else np


def address(array: Any) -> int:
    """Return the memory address of the first element of ``array``, on the host or a GPU."""
    return int(array.data.ptr if is_device(array) else array.ctypes.data)


def matmul(a: Array, b: Array, out: Array) -> None:
    """Write the matrix product ``a @ b`` to ``out``. The arrays must be on one device and have at least 2 dims."""
    if is_device(a):
        graphs.matmul(a, b, out)
    else:
        np.matmul(a, b, out=out)


def synchronise(array: Any) -> None:
    """Wait for the kernels that write ``array``. Does nothing if ``array`` is on the host."""
    if is_device(array):
        device.synchronise()


def to_host(array: Any) -> np.ndarray:
    """Return ``array`` itself if it is on the host, else a numpy array with a copy of the GPU array."""
    return device.cupy().asnumpy(array) if is_device(array) else array


def place(array: Any, on: str) -> Array:
    """Return ``array`` itself if it is on the device ``on`` ("cpu" or "gpu"), else a copy on that device."""
    if isinstance(array, ArrayGroup):
        return array.map(lambda member: place(member, on))  # type: ignore[return-value]
    if on == "gpu":
        return array if is_device(array) else device.cupy().asarray(array)
    return to_host(array)


def as_array(values: Any) -> Array:
    """Return a numpy or cupy array that shares the memory of ``values``, an array or tensor of another library.

    A tuple or dict becomes an `ArrayGroup`. Raises UsageError for masked arrays, tensors that require gradients, and
    arrays with different numbers of samples.
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
            raise UsageError(
                f"a {type(values).__name__} of tuples or dicts is not supported; pass a flat {type(values).__name__}"
            )
        several = ArrayGroup(tuple(map(as_array, inputs)), names)
        members = dict(zip(names or range(len(values)), several.arrays, strict=True))
        if single := [str(name) for name, array in members.items() if not array.ndim]:
            raise UsageError(
                f"member {', '.join(single)} of the batch (a {type(values).__name__}) is a single number; expected an "
                "array whose first dim is the number of samples"
            )
        sizes = {name: len(array) for name, array in members.items()}
        if len(set(sizes.values())) > 1:
            counts = ", ".join(f"{name}: {size}" for name, size in sizes.items())
            raise UsageError(
                f"the arrays of a batch have different numbers of samples ({counts}) along the first dim; pass arrays "
                "of equal length"
            )
        return several  # type: ignore[return-value]
    try:
        # Test the object, not its type: PyTorch's tensor type has the attribute, but a host tensor does not.
        if hasattr(values, "__cuda_array_interface__"):
            return device.cupy().asarray(values)
        array = np.asarray(values)
    except (TypeError, ValueError, RuntimeError, AttributeError) as error:
        raise UsageError(f"a {type(values).__name__} cannot be converted to an array: {error}") from error
    if not array.ndim or array.dtype.hasobject:
        raise UsageError(f"a {type(values).__name__} is not an array of numbers; pass a numeric array or a tensor")
    return array


def empty(shape: int | tuple[int, ...], dtype: np.dtype, on: str = "cpu") -> Array:
    """Return an uninitialised array on the device ``on``, "cpu" or "gpu"."""
    return device.cupy().empty(shape, dtype) if on == "gpu" else np.empty(shape, dtype)


def zeros(shape: int | tuple[int, ...], dtype: np.dtype, on: str = "cpu") -> Array:
    """Return an array of zeros on the device ``on`` ("cpu" or "gpu"), aligned to a cache line."""
    if on == "gpu":
        return device.cupy().zeros(shape, dtype)
    nbytes = prod(shape if isinstance(shape, tuple) else (shape,)) * np.dtype(dtype).itemsize
    if nbytes > MOST_BYTES:
        raise MemoryError(
            f"cannot allocate an array of shape {shape} and type {np.dtype(dtype)}: {nbytes:.3g} bytes exceed the "
            f"limit of {MOST_BYTES:.3g}"
        )
    owner = np.zeros(nbytes + ALIGN_BYTES, np.uint8)  # numpy itself aligns to 16 bytes
    start = -owner.ctypes.data % ALIGN_BYTES
    array: Array = owner[start : start + nbytes].view(dtype).reshape(shape)
    return array


# memory of a training step
CATEGORIES = (
    "parameters",
    "gradients",
    "optimizer",
    "activations",
    "communication",
    "checkpoint",
    "buddy_copies",  # copies of this rank's state
    "partner_copies",  # copies of another rank's state
)


class Ledger:
    """Thread-safe counter of the bytes of live arrays, by category. Views of other arrays must not be counted."""

    def __init__(self) -> None:
        self._current: defaultdict[str, int] = defaultdict(int)
        self._peak: defaultdict[str, int] = defaultdict(int)
        self._total = self._total_peak = 0
        self._lock = threading.RLock()  # reentrant: a finalizer may run inside `_add` of the same thread

    def track(self, array: Array, category: str, owner: Array | None = None) -> Array:
        """Count the bytes of ``array`` until ``owner``, by default ``array``, is deleted. Return ``array``."""
        assert category in CATEGORIES, f"category {category!r} is not one of {CATEGORIES}"
        self.add(category, array.nbytes)
        weakref.finalize(array if owner is None else owner, self.add, category, -array.nbytes).atexit = False
        return array

    def add(self, category: str, nbytes: int) -> None:
        """Add ``nbytes``, which may be negative, to the current byte count of ``category``. Update the peaks."""
        with self._lock:
            self._current[category] += nbytes
            self._peak[category] = max(self._peak[category], self._current[category])
            self._total += nbytes
            self._total_peak = max(self._total_peak, self._total)

    @property
    def current(self) -> dict[str, int]:
        """Dict {category: total bytes of the counted arrays that are alive now}."""
        return {category: self._current[category] for category in CATEGORIES}

    @property
    def peak(self) -> dict[str, int]:
        """Dict {category: largest value that `current` has had for this category}."""
        return {category: self._peak[category] for category in CATEGORIES}

    @property
    def peak_total(self) -> int:
        """Largest number of bytes, summed over all categories, of the arrays that were alive at the same time."""
        return self._total_peak
