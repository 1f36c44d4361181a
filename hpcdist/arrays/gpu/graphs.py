"""CUDA graphs: what a call launches on a GPU is captured once, and launched as one from then on.

cupy captures all of its kernels, but refuses to call cuBLAS meanwhile, in every version so far. cuBLAS itself can be
captured: so the products of a capture (`matmul`) are given to it here, with the layouts, types and algorithm that cupy
would choose, and with a workspace that is there before.
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

WORKSPACE_BYTES: Final = 32 << 20  # that of cuBLAS on Hopper; older GPUs take less by themselves
INSTEAD: Final = "set run.cuda_graph = false"
# Numbers of CUDA: the type of elements, that of sums, and the algorithm that it thinks best.
_ELEMENTS: Final = {"float32": 0, "float64": 1, "float16": 2, "bfloat16": 14}
_SUMS: Final = {"float64": 70}  # all others are summed in float32
_SUMS_IN_FLOAT32, _SUMS_IN_TF32, _BEST = 68, 77, -1


class Matrices(NamedTuple):
    """Matrices of an array, each ``pitch`` elements behind the one before: rows, or columns, are ``leading`` apart."""

    array: Any
    leading: int
    by_columns: bool = False
    pitch: int = 0


class Cublas:
    """cuBLAS on ``stream``, with a handle and a workspace of its own.

    Raises MissingCapabilityError where this process has none.
    """

    def __init__(self, stream: Any) -> None:
        device.cupy().cuda.get_cublas_handle()  # now it is loaded
        self._library, self._handle = ctypes.CDLL(_loaded("libcublas")), ctypes.c_void_p()
        self._workspace = device.cupy().empty(WORKSPACE_BYTES, np.uint8)
        self._call("cublasCreate_v2", ctypes.byref(self._handle))
        weakref.finalize(self, self._library.cublasDestroy_v2, self._handle).atexit = False
        self._call("cublasSetStream_v2", self._handle, ctypes.c_void_p(stream.ptr))  # would take a workspace back
        place = ctypes.c_void_p(self._workspace.data.ptr)
        self._call("cublasSetWorkspace_v2", self._handle, place, ctypes.c_size_t(WORKSPACE_BYTES))

    def multiply(self, sizes: tuple[int, int, int], a: Matrices, b: Matrices, out: Matrices, count: int) -> None:
        """Write ``count`` products (m, n) of a (m, k) and b (k, n), for ``sizes`` (m, n, k); out is by rows."""
        (m, n, k), name = sizes, np.dtype(out.array.dtype).name
        number = ctypes.c_double if name == "float64" else ctypes.c_float
        tf32 = name == "float32" and int(os.environ.get("CUPY_TF32") or 0) > 0
        sums = _SUMS.get(name, _SUMS_IN_TF32 if tf32 else _SUMS_IN_FLOAT32)

        def place(of: Matrices) -> tuple[Any, ...]:
            pitch = (ctypes.c_longlong(of.pitch),) if count > 1 else ()
            return ctypes.c_void_p(of.array.data.ptr), _ELEMENTS[name], of.leading, *pitch

        # By columns, as cuBLAS sees memory, a matrix by rows is its transpose: out^T = b^T a^T.
        self._call(
            "cublasGemmStridedBatchedEx" if count > 1 else "cublasGemmEx",
            self._handle, int(b.by_columns), int(a.by_columns), n, m, k,
            ctypes.byref(number(1)), *place(b), *place(a), ctypes.byref(number(0)), *place(out),
            *((count,) if count > 1 else ()), sums, _BEST,
        )  # fmt: skip

    def _call(self, name: str, *args: Any) -> None:
        if status := getattr(self._library, name)(*args):
            raise MissingCapabilityError(f"{name} of cuBLAS returned the status {status}; {INSTEAD}")


def _loaded(library: str) -> str:
    """Return the path of a library that this process has loaded."""
    maps = Path("/proc/self/maps").read_text()
    found = re.search(rf"\s(/\S*/{library}\.so\S*)$", maps, re.MULTILINE)
    if found is None:
        raise MissingCapabilityError(f"{library} is not loaded in this process; {INSTEAD}")
    return found[1]


class GraphRecorder:
    """Captures what calls launch as CUDA graphs.

    Captured on a stream of its own, since the default one cannot be, which waits for no other. Memory that a call
    takes comes from a pool of its own, and graphs go on using it: nobody else is given it, but all graphs may share
    it, since they are launched on one stream. Graphs that are launched elsewhere need another recorder.
    """

    def __init__(self) -> None:
        self._stream, self._pool = device.new_stream(), device.cupy().cuda.MemoryPool()
        self._cublas = Cublas(self._stream)

    @property
    def nbytes(self) -> int:
        """Bytes that the captured kernels need beside the arrays that they are given."""
        return int(self._pool.total_bytes()) + WORKSPACE_BYTES

    def capture(self, call: Callable[[], T]) -> tuple[Any, T]:
        """Return the graph of what ``call`` launches, and what it returns; nothing of it has run yet.

        It may not wait for the GPU, nor copy from or to the host; its products are those of `matmul`. ``launch()`` of
        the graph runs it on the current stream: kernels read and write the addresses, and have the numbers, of now.
        """
        with _no_collection(), device.cupy().cuda.using_allocator(self._pool.malloc), self._stream:
            # In the relaxed mode, cupy's default: no other would let the pool take memory from the driver meanwhile.
            # What other threads do is no part of the capture in this mode, and does not end it.
            self._stream.begin_capture()
            _local.cublas = self._cublas
            try:
                result = call()
            except BaseException:
                with suppress(Exception):  # what went wrong may have ended the capture
                    self._stream.end_capture()
                raise
            finally:
                _local.cublas = None
            return self._stream.end_capture(), result


_lock = threading.Lock()
_captures, _collects = 0, True  # under way in all threads; whether the collector was on before


@contextmanager
def _no_collection() -> Iterator[None]:
    """Keep the cyclic collector from running: finalizers may wait for the current stream, which ends a capture."""
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
    cublas: Cublas | None = None  # of the capture of this thread


_local = _Local()


def matmul(a: Any, b: Any, out: Any) -> None:
    """Write the product of arrays of a GPU to ``out``, as cupy.matmul does, also while it is captured."""
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
    """Return an array (rows, columns) as it lies in memory, a copy of it where neither rows nor columns do."""
    (rows, columns), (down, across), size = array.shape, array.strides, array.itemsize
    if across == size and down % size == 0:
        return Matrices(array, max(down // size, columns))
    if down == size and across % size == 0:
        return Matrices(array, max(across // size, rows), by_columns=True)
    return Matrices(_contiguous(xp, array, ()), columns)


def _contiguous(xp: Any, array: Any, outer: tuple[int, ...]) -> Any:
    """Return contiguous matrices for all ``outer`` dims, over which those of ``array`` may be repeated."""
    shape = (*outer, *array.shape[-2:])
    if array.shape == shape and array.flags.c_contiguous:
        return array
    copy = xp.empty(shape, array.dtype)
    copy[...] = array
    return copy
