"""CUDA kernels from C++ source files: compiled at the first use, arguments checked at each launch.

A `KernelSource` is a file of kernels, written for element types that are chosen at the launch. cupy compiles it
(NVRTC) and keeps the machine code on disk. Arguments are checked here, since a kernel cannot: arrays are contiguous
memory of a GPU, an int arrives as ``long long``, a float in the type that the kernel computes in.
"""

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np

from hpcdist.arrays.backend import Array
from hpcdist.arrays.dtypes import accumulation_dtype, name_of
from hpcdist.arrays.gpu import device
from hpcdist.errors import UsageError

COMMON: Final = Path(__file__).parent / "cuda" / "common.cuh"
OPTIONS: Final = ("--std=c++17",)  # functions and lambdas are of the device without saying so: cupy adds that option
WARP: Final = 32
_TYPES: Final = {"float16": "float16", "bfloat16": "bfloat16", "float32": "float", "float64": "double"}

Size: TypeAlias = int | tuple[int, ...]  # of a grid in blocks, of a block in threads


class KernelSource:
    """The CUDA C++ source of several kernels: one file."""

    def __init__(self, path: Path, dtypes: tuple[str, ...] = tuple(_TYPES)) -> None:
        self.path = path
        self._dtypes = dtypes

    def takes(self, dtype: Any) -> bool:
        """Whether the kernels are written for elements of ``dtype``."""
        return name_of(dtype) in self._dtypes

    def code(self, **types: Any) -> str:
        """Return the text to compile, with the macros ``types`` (REAL=np.float32, say) in front."""
        lines = [f"#define {macro} {self._named(dtype)}\n" for macro, dtype in sorted(types.items())]
        # The types are structs of the common part, and macros are looked up where they are used.
        return "".join(lines) + COMMON.read_text() + self.path.read_text()

    def _named(self, dtype: Any) -> str:
        if isinstance(dtype, int):
            return str(dtype)
        if not self.takes(dtype):
            raise UsageError(
                f"{self.path.name} has no kernels for {name_of(dtype)}, only for {', '.join(self._dtypes)}"
            )
        return _TYPES[name_of(dtype)]

    def launch(self, name: str, grid: Size, block: Size, *args: Any, **types: Any) -> None:
        """Launch kernel ``name`` on the current stream, ``grid`` blocks of ``block`` threads. An empty grid is a no-op.

        ``types`` are the macros of the file: dtypes, or ints. Floats are passed in the type that REAL is computed in.
        """
        blocks, threads = _three_dims(grid), _three_dims(block)
        if not all(blocks):
            return
        real = accumulation_dtype(np.dtype(types["REAL"])).type
        kernel = _compiled(device.cupy(), self, name, _key(types))
        kernel(blocks, threads, tuple(_kernel_argument(name, arg, real) for arg in args))


def elementwise(n: int, width: int = 1, threads: int = 256) -> tuple[int, int]:
    """Return (blocks, threads) for ``n`` elements in packs of ``width``; kernels loop over what exceeds the grid."""
    return min(-(-n // (width * threads)), 1 << 20), threads


def threads_for(elements: int, most: int = 1024) -> int:
    """Return the number of threads of a block that share a row of ``elements``: whole warps, at most ``most``."""
    return min(max(-(-elements // WARP), 1) * WARP, most)


def width_of(dtype: Any) -> int:
    """Return the number of elements in 16 bytes, the widest load of a thread."""
    return 16 // np.dtype(dtype).itemsize


def _key(types: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
    return tuple((macro, kind if isinstance(kind, int) else np.dtype(kind)) for macro, kind in sorted(types.items()))


@functools.cache
def _compiled(module: Any, source: KernelSource, name: str, types: tuple[tuple[str, Any], ...]) -> Any:
    return module.RawKernel(source.code(**dict(types)), name, options=OPTIONS)


def _three_dims(size: Size) -> tuple[int, int, int]:
    dims = (size,) if isinstance(size, int) else size
    x, y, z = (*dims, *(1,) * (3 - len(dims)))
    return x, y, z


def _kernel_argument(name: str, arg: Any, real: Any) -> Any:
    """Return ``arg`` as a kernel takes it. Raises TypeError for one that it would misread."""
    if device.is_device_array(arg):
        array: Array = arg
        if not array.flags.c_contiguous:
            raise TypeError(f"{name} got an array of strides {array.strides}; pass contiguous memory")
        return array
    if isinstance(arg, bool | int | np.integer):
        return np.int64(arg)
    if isinstance(arg, float | np.floating):
        return real(arg)
    raise TypeError(f"{name} got {type(arg)}; a kernel takes arrays of a GPU, ints and floats")
