"""CUDA graphs: capture the kernels of a call once, and launch them together from then on.

cupy refuses to call cuBLAS during a capture, so `matmul` then calls cuBLAS directly, with cupy's choice of layouts,
types and algorithm.
"""

import ctypes
import gc
import os
import re
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from math import prod
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

import numpy as np

from hpcdist.arrays.gpu import device
from hpcdist.errors import MissingCapabilityError

T = TypeVar("T")

WORKSPACE_BYTES: Final = 32 << 20  # cuBLAS's default on Hopper; it uses less on older GPUs
# CUDA constants: element types, accumulation types, and the default algorithm.
_ELEMENTS: Final = {"float32": 0, "float64": 1, "float16": 2, "bfloat16": 14}
_SUMS: Final = {"float64": 70}  # all other types accumulate in float32
_SUMS_IN_FLOAT32, _SUMS_IN_TF32, _BEST = 68, 77, -1


class Matrices(NamedTuple):
    """One matrix, or a batch of matrices of equal shape, in one GPU array."""

    array: Any
    leading: int  # elements from one row (column if `by_columns`) to the next
    by_columns: bool = False
    pitch: int = 0  # elements from one matrix to the next


class Cublas:
    """A cuBLAS handle on ``stream``, with a workspace. Raises MissingCapabilityError if cuBLAS is not loaded."""

    def __init__(self, stream: Any) -> None:
        device.cupy().cuda.get_cublas_handle()  # loads the library
        self._library, self._handle = ctypes.CDLL(_loaded("libcublas")), ctypes.c_void_p()
        self._workspace = device.cupy().empty(WORKSPACE_BYTES, np.uint8)
        self._call("cublasCreate_v2", ctypes.byref(self._handle))
        weakref.finalize(self, self._library.cublasDestroy_v2, self._handle).atexit = False
        self._call("cublasSetStream_v2", self._handle, ctypes.c_void_p(stream.ptr))  # resets the workspace
        workspace = ctypes.c_void_p(self._workspace.data.ptr)
        self._call("cublasSetWorkspace_v2", self._handle, workspace, ctypes.c_size_t(WORKSPACE_BYTES))

    def multiply(self, sizes: tuple[int, int, int], a: Matrices, b: Matrices, out: Matrices, count: int) -> None:
        """Write ``count`` products ``a[i] @ b[i]``, (m, k) times (k, n), to ``out``. ``sizes``: (m, n, k)."""
        (m, n, k), name = sizes, np.dtype(out.array.dtype).name
        number = ctypes.c_double if name == "float64" else ctypes.c_float
        tf32 = name == "float32" and int(os.environ.get("CUPY_TF32") or 0) > 0
        sums = _SUMS.get(name, _SUMS_IN_TF32 if tf32 else _SUMS_IN_FLOAT32)

        def place(matrices: Matrices) -> tuple[Any, ...]:
            pitch = (ctypes.c_longlong(matrices.pitch),) if count > 1 else ()
            return ctypes.c_void_p(matrices.array.data.ptr), _ELEMENTS[name], matrices.leading, *pitch

        # cuBLAS is column-major, and a row-major matrix is its own transpose there: out^T = b^T a^T.
        self._call(
            "cublasGemmStridedBatchedEx" if count > 1 else "cublasGemmEx",
            self._handle, int(b.by_columns), int(a.by_columns), n, m, k,
            ctypes.byref(number(1)), *place(b), *place(a), ctypes.byref(number(0)), *place(out),
            *((count,) if count > 1 else ()), sums, _BEST,
        )  # fmt: skip

    def _call(self, name: str, *args: Any) -> None:
        if status := getattr(self._library, name)(*args):
            raise MissingCapabilityError(
                f"the cuBLAS function {name} returned status {status}; set run.cuda_graph = false"
            )


def _loaded(library: str) -> str:
    maps = Path("/proc/self/maps").read_text()
    match = re.search(rf"\s(/\S*/{library}\.so\S*)$", maps, re.MULTILINE)
    if match is None:
        raise MissingCapabilityError(f"the library {library} is not loaded in this process; set run.cuda_graph = false")
    return match[1]


class GraphRecorder:
    """Recorder of GPU kernels as CUDA graphs. All graphs share memory, so they must be launched on one stream."""

    def __init__(self) -> None:
        self._stream, self._pool = device.new_stream(), device.cupy().cuda.MemoryPool()
        self._cublas = Cublas(self._stream)

    @property
    def nbytes(self) -> int:
        """Total size of the graphs' memory pool and the cuBLAS workspace in bytes."""
        return int(self._pool.total_bytes()) + WORKSPACE_BYTES

    def capture(self, call: Callable[[], T]) -> tuple[Any, T]:
        """Call ``call()`` and capture its GPU kernels in a CUDA graph. Return (graph, result of ``call``).

        ``call`` must not synchronise or copy between host and GPU. It must compute matrix products by `matmul`.
        """
        # `graph.launch()` uses the same arrays and scalars as ``call``.
        with _no_collection(), device.cupy().cuda.using_allocator(self._pool.malloc), self._stream:
            # cupy's default relaxed mode: other modes forbid the pool to allocate device memory during the capture.
            # Calls of other threads are not captured in this mode, and do not end the capture.
            self._stream.begin_capture()
            _local.cublas = self._cublas
            try:
                result = call()
            except BaseException:
                with suppress(Exception):  # the error may have ended the capture
                    self._stream.end_capture()
                raise
            finally:
                _local.cublas = None
            return self._stream.end_capture(), result


_lock = threading.Lock()
_captures, _collects = 0, True  # captures in flight in all threads; True if the collector was enabled before


@contextmanager
def _no_collection() -> Iterator[None]:
    global _captures, _collects
    with _lock:
        if not _captures:
            _collects = gc.isenabled()
            gc.disable()
        _captures += 1
    try:
        yield
    finally:
        with _lock:
            _captures -= 1
            if not _captures and _collects:
                gc.enable()


class _Local(threading.local):
    cublas: Cublas | None = None  # handle of the capture in flight in this thread


_local = _Local()


def matmul(a: Any, b: Any, out: Any) -> None:
    """Write the matrix product of the GPU arrays ``a`` and ``b`` to ``out``. A `GraphRecorder` can record this call."""
    cublas, xp = _local.cublas, device.cupy()
    if cublas is None:
        xp.matmul(a, b, out=out)
        return
    target = out if out.flags.c_contiguous else xp.empty(out.shape, out.dtype)
    (m, k), n, outer = a.shape[-2:], b.shape[-1], out.shape[:-2]
    if outer:
        a, b = (_contiguous(xp, array, outer) for array in (a, b))
        left, right = Matrices(a, k, pitch=m * k), Matrices(b, n, pitch=k * n)
    else:
        left, right = _matrix(xp, a), _matrix(xp, b)
    if target.size and k:
        cublas.multiply((m, n, k), left, right, Matrices(target, n, pitch=m * n), prod(outer))
    else:
        target.fill(0)
    if target is not out:
        out[...] = target


def _matrix(xp: Any, array: Any) -> Matrices:
    (rows, columns), (down, across), size = array.shape, array.strides, array.itemsize
    if across == size and down % size == 0:
        return Matrices(array, max(down // size, columns))
    if down == size and across % size == 0:
        return Matrices(array, max(across // size, rows), by_columns=True)
    return Matrices(_contiguous(xp, array, ()), columns)


def _contiguous(xp: Any, array: Any, outer: tuple[int, ...]) -> Any:
    shape = (*outer, *array.shape[-2:])
    if array.shape == shape and array.flags.c_contiguous:
        return array
    copy = xp.empty(shape, array.dtype)
    copy[...] = array
    return copy
