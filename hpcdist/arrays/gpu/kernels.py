"""CUDA kernels from C++ files: compiled at the first use by cupy (NVRTC), which caches the machine code on disk."""

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
OPTIONS: Final = ("--std=c++17",)  # cupy adds the option that makes functions and lambdas __device__ by default
WARP: Final = 32
_TYPES: Final = {"float16": "float16", "bfloat16": "bfloat16", "float32": "float", "float64": "double"}

Size: TypeAlias = int | tuple[int, ...]  # a grid size in blocks, or a block size in threads


class KernelSource:
    """CUDA C++ source file ``path`` with several kernels, for arrays of the dtypes named in ``dtypes``."""

    def __init__(self, path: Path, dtypes: tuple[str, ...] = tuple(_TYPES)) -> None:
        self.path = path
        self._dtypes = dtypes

    def takes(self, dtype: Any) -> bool:
        """Return True if the kernels support elements of ``dtype``."""
        return name_of(dtype) in self._dtypes

    def code(self, **types: Any) -> str:
        """Return the source text to compile. The keyword arguments define macros, such as ``REAL=np.float32``."""
        lines = [f"#define {macro} {self._named(dtype)}\n" for macro, dtype in sorted(types.items())]
        # The macros come first, although the types are structs of COMMON: macros are expanded at their use.
        return "".join(lines) + COMMON.read_text() + self.path.read_text()

    def _named(self, dtype: Any) -> str:
        if isinstance(dtype, int):
            return str(dtype)
        if not self.takes(dtype):
            raise UsageError(
                f"the kernels of {self.path.name} do not support {name_of(dtype)}; use {' or '.join(self._dtypes)}"
            )
        return _TYPES[name_of(dtype)]

    def launch(self, name: str, grid: Size, block: Size, *args: Any, **types: Any) -> None:
        """Launch the GPU kernel ``name`` with the arguments ``*args`` on the current stream.

        ``grid``: number of blocks. ``block``: number of threads per block. Keyword arguments define macros of the
        source. The macro ``REAL``, the dtype of the elements, is required.
        """
        # Ints are passed as ``long long``; floats as REAL, or as float32 if REAL has 16 bits. Nothing is launched if a
        # dim of ``grid`` is 0.
        blocks, threads = _three_dims(grid), _three_dims(block)
        if not all(blocks):
            return
        real = accumulation_dtype(np.dtype(types["REAL"])).type
        kernel = _compiled(device.cupy(), self, name, _key(types))
        kernel(blocks, threads, tuple(_kernel_argument(name, arg, real) for arg in args))


def elementwise(n: int, width: int = 1, threads: int = 256) -> tuple[int, int]:
    """Return (blocks, threads per block) for a kernel whose threads loop over ``n`` elements, ``width`` at a time."""
    return min(-(-n // (width * threads)), 1 << 20), threads


def threads_for(elements: int, most: int = 1024) -> int:
    """Return the number of threads per block for ``elements`` elements: a multiple of 32, at most ``most``."""
    return min(max(-(-elements // WARP), 1) * WARP, most)


def width_of(dtype: Any) -> int:
    """Return the number of elements of ``dtype`` in 16 bytes, the widest memory access of a thread."""
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
    if device.is_device_array(arg):
        array: Array = arg
        if not array.flags.c_contiguous:
            raise TypeError(f"kernel {name} got an array with strides {array.strides}; pass a contiguous array")
        return array
    if isinstance(arg, bool | int | np.integer):
        return np.int64(arg)
    if isinstance(arg, float | np.floating):
        return real(arg)
    raise TypeError(f"kernel {name} got an argument of {type(arg)}; pass GPU arrays, ints or floats")
