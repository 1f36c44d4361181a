"""A strict double of cupy: arrays whose memory the host reaches only by counted transfers.


The class wraps numpy memory and is not a subclass of numpy's array: numpy functions, numba kernels, message buffers and
`np.asarray` cannot access the data by accident. Calls that cupy rejects are rejected with the same type of error.
Silent actions of cupy (a copy to the host in `float(x)`, a transfer of an index) are either counted or rejected too.

Only names that cupy has exist here, listed in `__all__`. `tests/gpu` and
`tests/unit/collectives/gpu/test_cupy_double.py` compare the list with the real cupy.
"""

import operator
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from stubs.gpu import cuda_compiler, cuda_double, nccl_double

H2D, D2H, SYNCHRONISE = "to device", "to host", "synchronise"
# Frames that only pass a call on: the site is the one above them.
_QUIET = (
    __file__,
    cuda_double.__file__,
    "/arrays/backend.py",
    "/arrays/gpu/device.py",
    "/arrays/gpu/staging.py",
    "/numpy/",
)


@dataclass(frozen=True)
class Event:
    """A transfer or a wait: its kind, its bytes, the ``module.function`` that requested it, and the thread."""

    kind: str
    nbytes: int
    site: str
    thread: str


class Log:
    """Every event since the last `clear`, of all threads (ranks)."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def clear(self) -> None:
        self.events.clear()

    def kernels_pending(self) -> bool:
        """Return True if kernels of this thread may still run, because nobody waited for the last one."""
        return not cuda_double.current_stream().done

    def note(self, kind: str, nbytes: int = 0) -> None:
        frame = sys._getframe(1)
        while frame.f_back is not None and any(part in frame.f_code.co_filename for part in _QUIET):
            frame = frame.f_back
        site = f"{Path(frame.f_code.co_filename).stem}.{frame.f_code.co_name}"
        self.events.append(Event(kind, nbytes, site, threading.current_thread().name))

    def of(self, thread: str | None = None) -> list[Event]:
        """Return the events of one thread, or of all threads."""
        return [event for event in self.events if thread in (None, event.thread)]

    def sites(self, thread: str | None = None) -> Counter[tuple[str, str]]:
        """Return the number of events by (kind, site)."""
        return Counter((event.kind, event.site) for event in self.of(thread))

    def count(self, kind: str, thread: str | None = None) -> int:
        return sum(event.kind == kind for event in self.of(thread))

    def nbytes(self, kind: str, thread: str | None = None) -> int:
        return sum(event.nbytes for event in self.of(thread) if event.kind == kind)


LOG = Log()


def _waited(stream: cuda_double.Stream, number: int) -> None:
    LOG.note(SYNCHRONISE)
    _wait(stream, number)


_wait = cuda_double.WAITED
cuda_double.WAITED = _waited


def _wait_for_all() -> None:
    """Wait on the host, as cupy does when it returns a device value."""
    stream = cuda_double.current_stream()
    _wait(stream, stream._given)


class _Flags:
    def __init__(self, host: np.ndarray) -> None:
        self.c_contiguous, self.f_contiguous = host.flags.c_contiguous, host.flags.f_contiguous
        self.owndata = host.base is None


class _Pointer:
    def __init__(self, ptr: int, mem: Any) -> None:
        self.ptr, self.mem = ptr, mem


def _device(host: Any) -> "ndarray":
    """Show numpy memory as device memory, without a copy."""
    made = object.__new__(ndarray)
    made._raw = np.asarray(host)  # a ufunc gives a scalar where cupy has an array ()
    return made


def _operand(value: Any) -> Any:
    """Return the numpy form of a device operand. Rejects host arrays and sequences, which cupy would copy silently."""
    if isinstance(value, ndarray):
        return value._raw
    if isinstance(value, bool | int | float | complex | np.generic):
        return value
    raise TypeError(f"Unsupported type {type(value)}")


def _kernel(compute: Callable[..., Any], *operands: Any, out: Any = None) -> "ndarray":
    """Run ``compute`` on ``operands`` as a kernel. Return the result in new memory, or in ``out``.


    If ``out`` is given, ``compute`` gets it after the operands and writes to it.
    """
    given = [*map(_operand, operands)]
    places = [number for number, value in enumerate(given) if isinstance(value, np.ndarray)]
    arrays = [given[number] for number in places]
    for number in places:
        given[number] = None  # a graph does not keep the memory of its kernels

    def computed(arrays: Any, *more: Any) -> Any:
        values = list(given)
        for number, array in zip(places, arrays, strict=False):
            values[number] = array
        with np.errstate(all="ignore"):  # a GPU warns of nothing
            return compute(*values, *more)

    if out is not None:
        cuda_double.run(lambda *local_data: computed(local_data, local_data[-1]), [*arrays, out._raw], [len(arrays)])
        made: ndarray = out
        return made
    if cuda_double.current_stream().is_capturing():
        made = _memory_for(computed(arrays))
        cuda_double.run(
            lambda *local_data: np.copyto(local_data[-1], computed(local_data)), [*arrays, made._raw], [len(arrays)]
        )
        return made
    results: list[Any] = []
    cuda_double.run(lambda *local_data: results.append(computed(local_data)), arrays, ())
    made = _device(results[0])
    cuda_double.allocated(made._raw)
    cuda_double.wrote(made._raw)
    return made


def _memory_for(result: Any) -> "ndarray":
    """Return memory for a result of this shape, dtype and order of dimensions."""
    made = object.__new__(ndarray)
    made._raw = np.empty_like(np.asarray(result), subok=False)
    made._raw.reshape(-1, order="A").view(np.uint8)[...] = 0xFF
    cuda_double.allocated(made._raw)
    return made


def _index(key: Any) -> tuple[list["ndarray"], Callable[..., Any]]:
    """Return the device arrays in ``key``, and a function that returns the numpy index of their memory."""
    parts = key if isinstance(key, tuple) else (key,)
    for part in parts:
        if isinstance(part, ndarray) and part.dtype == bool:
            cuda_double.check_not_captured("a result whose size the host waits for")
            LOG.note(SYNCHRONISE)  # the size of the result is only known on the device
        elif not (part is None or part is Ellipsis or isinstance(part, ndarray | int | np.integer | slice)):
            raise TypeError(f"an index of {type(part)} is copied to the device quietly")

    several, rest = isinstance(key, tuple), [ndarray if isinstance(part, ndarray) else part for part in parts]

    def index(*local_data: np.ndarray) -> Any:
        arrays = iter(local_data)
        plain = tuple(next(arrays) if part is ndarray else part for part in rest)
        return plain if several else plain[0]

    return [part for part in parts if isinstance(part, ndarray)], index


def _check_out(out: Any) -> None:
    if not (out is None or isinstance(out, ndarray)):
        raise TypeError(f"return arrays must be of cupy.ndarray, not {type(out)}")


class ufunc:  # noqa: N801
    """An elementwise function over device arrays and scalars."""

    def __init__(self, name: str) -> None:
        self.name, self._function = name, getattr(np, name)

    def __call__(self, *args: Any, out: Any = None, dtype: Any = None) -> "ndarray":
        if not any(isinstance(arg, ndarray) for arg in args):
            raise TypeError(f"cupy.{self.name} needs an array of the device, got {[type(arg) for arg in args]}")
        _check_out(out)
        count = len(args)

        def compute(*local_data: Any) -> Any:
            return self._function(*local_data[:count], **_given(out=(*local_data[count:], None)[0], dtype=dtype))

        return _kernel(compute, *args, out=out)

    def at(self, array: "ndarray", indices: Any, values: Any = None) -> None:
        if self.name not in ("add", "subtract", "maximum", "minimum"):
            raise NotImplementedError(f"`{self.name}.at` is not supported yet")
        assert isinstance(indices, ndarray), "the rows of `at` are numbers on the device"

        def at(places: Any, added: Any, target: Any) -> None:
            self._function.at(target, places, added)

        _kernel(at, indices, values, out=array)


def _given(**keywords: Any) -> dict[str, Any]:
    return {name: value for name, value in keywords.items() if value is not None}


class ndarray:  # noqa: N801
    """Device memory. Every path to the host is explicit and counted, or raises."""

    __hash__ = None  # type: ignore[assignment]
    _raw: np.ndarray

    def __init__(self, shape: Any, dtype: Any = float, memptr: Any = None) -> None:
        if memptr is None:
            self._raw = np.empty(shape, dtype)
            cuda_double.allocated(self._raw)
            cuda_double.forget(self._raw)
            return
        nbytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
        self._raw = cuda_double.memory_at(memptr, nbytes).view(dtype).reshape(shape)
        self._mem = memptr.mem

    @property
    def _host(self) -> np.ndarray:
        """The memory for the host, after the deferred work of the stream has run."""
        cuda_double.check_not_captured("a value that the host reads")
        stream = cuda_double.current_stream()
        stream._run(stream._given)
        cuda_double.check_read(self._raw)
        return self._raw

    dtype = property(lambda self: self._raw.dtype)
    shape = property(lambda self: self._raw.shape)
    strides = property(lambda self: self._raw.strides)
    ndim = property(lambda self: self._raw.ndim)
    size = property(lambda self: self._raw.size)
    nbytes = property(lambda self: self._raw.nbytes)
    itemsize = property(lambda self: self._raw.itemsize)
    flags = property(lambda self: _Flags(self._raw))
    data = property(lambda self: _Pointer(self._raw.ctypes.data, getattr(self, "_mem", None)))
    T = property(lambda self: _device(self._raw.T))

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        LOG.note(SYNCHRONISE)  # as cupy does where version 2 is asked for
        pointer = (self._raw.ctypes.data, False)
        return {"shape": self.shape, "typestr": self.dtype.str, "version": 3, "data": pointer, "stream": 1}

    # The ways to the host
    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        raise TypeError(
            "Implicit conversion to a NumPy array is not allowed. "
            "Please use `.get()` to construct a NumPy array explicitly."
        )

    def __reduce__(self) -> Any:
        raise TypeError("pickling an array of the device copies it quietly")

    def get(self, stream: Any = None, order: str = "C", out: Any = None, blocking: bool = True) -> np.ndarray:
        cuda_double.check_not_captured("a copy to the host")
        LOG.note(D2H, self.nbytes)
        target = np.empty(self.shape, self.dtype) if out is None else out
        if not isinstance(target, np.ndarray):
            raise TypeError("Only numpy.ndarray can be obtained from cupy.ndarray")
        if (target.dtype, target.shape) != (self.dtype, self.shape):
            raise TypeError(f"{target.dtype} array {target.shape} cannot be obtained from {self.dtype} {self.shape}")
        cuda_double.copy_to_host(self._raw, target, stream or cuda_double.current_stream(), blocking)
        return target

    def set(self, values: Any, stream: Any = None) -> None:
        if not isinstance(values, np.ndarray):
            raise TypeError("Only numpy.ndarray can be set to cupy.ndarray")
        if values.dtype != self.dtype:
            raise TypeError(f"{values.dtype} array cannot be set to {self.dtype} array")
        if values.shape != self.shape:
            raise ValueError(f"Shape mismatch. Old shape: {self.shape}, new shape: {values.shape}")
        if not (self.flags.c_contiguous or self.flags.f_contiguous):
            raise RuntimeError("Cannot set to non-contiguous array")
        LOG.note(H2D, values.nbytes)
        cuda_double.copy_to_device(values, self._raw, stream or cuda_double.current_stream())

    def item(self) -> Any:
        return self._copied_to_host().item()

    def tolist(self) -> Any:
        return self._copied_to_host().tolist()

    def __bool__(self) -> bool:
        return bool(self._copied_to_host())

    def __int__(self) -> int:
        return int(self._copied_to_host())

    def __float__(self) -> float:
        return float(self._copied_to_host())

    def __index__(self) -> int:
        return operator.index(self._copied_to_host())

    def _copied_to_host(self) -> np.ndarray:
        LOG.note(D2H, self.nbytes)
        host = self._host
        _wait_for_all()
        return host

    def __repr__(self) -> str:  # of a failed test: no transfer
        return f"<array of the device, {self.shape} {self.dtype}>"

    # On the device
    def __len__(self) -> int:
        return len(self._raw)

    def __iter__(self) -> Iterator["ndarray"]:
        return (self[i] for i in range(len(self)))

    def __getitem__(self, key: Any) -> "ndarray":
        arrays, index = _index(key)
        if arrays:  # gathered, not a view
            return _kernel(lambda source, *local_data: source[index(*local_data)], self, *arrays)
        result = self._raw[index()]
        if isinstance(result, np.ndarray):
            return _device(result)
        parts = key if isinstance(key, tuple) else (key,)  # cupy has a view of () where numpy has a scalar
        return _device(self._raw[(*parts[:-1], slice(parts[-1], parts[-1] + 1 or None))].reshape(()))

    def __setitem__(self, key: Any, value: Any) -> None:
        if isinstance(value, np.ndarray):
            if value.ndim:
                raise ValueError("non-scalar numpy.ndarray cannot be used for fill")
            value = value[()]
        arrays, index = _index(key)

        def store(values: Any, *local_data: Any) -> None:
            *indices, target = local_data
            target[index(*indices)] = values

        _kernel(store, value, *arrays, out=self)

    def fill(self, value: Any) -> None:
        self[...] = value

    def copy(self) -> "ndarray":
        return _kernel(lambda local_data: local_data.copy(), self)

    def view(self, dtype: Any = None) -> "ndarray":
        return _device(self._raw.view() if dtype is None else self._raw.view(dtype))

    def astype(self, dtype: Any, copy: bool = True) -> "ndarray":
        return _kernel(lambda local_data: local_data.astype(dtype, copy=copy), self)

    def reshape(self, *shape: Any) -> "ndarray":
        return _device(self._raw.reshape(*shape))

    def ravel(self) -> "ndarray":
        return _device(self._raw.ravel())

    def transpose(self, *axes: Any) -> "ndarray":
        return _device(self._raw.transpose(*axes))

    def swapaxes(self, first: int, second: int) -> "ndarray":
        return _device(self._raw.swapaxes(first, second))

    def take(self, indices: Any, axis: int | None = None, out: Any = None) -> "ndarray":
        if out is not None and out.dtype != self.dtype:
            raise TypeError("Output dtype mismatch")
        if out is None:  # cupy checks no index, it wraps around
            return _kernel(lambda local_data, rows: local_data.take(rows, axis, mode="wrap"), self, indices)

        def store(local_data: Any, rows: Any, target: Any) -> None:
            target[...] = local_data.take(rows, axis, mode="wrap")

        return _kernel(store, self, indices, out=out)

    def sum(self, axis: Any = None, dtype: Any = None, out: Any = None, keepdims: bool = False) -> "ndarray":
        return self._reduced("sum", axis, out, keepdims, dtype)

    def mean(self, axis: Any = None, dtype: Any = None, out: Any = None, keepdims: bool = False) -> "ndarray":
        return self._reduced("mean", axis, out, keepdims, dtype)

    def max(self, axis: Any = None, out: Any = None, keepdims: bool = False) -> "ndarray":
        return self._reduced("max", axis, out, keepdims)

    def min(self, axis: Any = None, out: Any = None, keepdims: bool = False) -> "ndarray":
        return self._reduced("min", axis, out, keepdims)

    def all(self, axis: Any = None, out: Any = None, keepdims: bool = False) -> "ndarray":
        return self._reduced("all", axis, out, keepdims)

    def any(self, axis: Any = None, out: Any = None, keepdims: bool = False) -> "ndarray":
        return self._reduced("any", axis, out, keepdims)

    def _reduced(self, name: str, axis: Any, out: Any, keepdims: bool, dtype: Any = None) -> "ndarray":
        _check_out(out)
        given = _given(dtype=dtype)

        def reduce(local_data: Any, target: Any = None) -> Any:
            return getattr(local_data, name)(axis=axis, keepdims=keepdims, **given, **_given(out=target))

        return _kernel(reduce, self, out=out)

    def __array_ufunc__(self, function: np.ufunc, method: str, *inputs: Any, out: Any = (), **keywords: Any) -> Any:
        ours = _UFUNCS.get(function.__name__)
        if method not in ("__call__", "at") or ours is None:
            return NotImplemented
        if function is np.matmul:
            return matmul(*inputs, out=out[0] if out else None)
        return getattr(ours, method)(*inputs, **keywords, **({"out": out[0]} if out else {}))

    def __array_function__(self, function: Callable[..., Any], types: Any, args: Any, keywords: Any) -> Any:
        name = function.__name__
        return globals()[name](*args, **keywords) if name in __all__ else NotImplemented


_OPERATORS = (
    ("add", "add"), ("sub", "subtract"), ("mul", "multiply"), ("truediv", "true_divide"), ("floordiv", "floor_divide"),
    ("mod", "remainder"), ("pow", "power"), ("and", "bitwise_and"), ("or", "bitwise_or"), ("xor", "bitwise_xor"),
    ("lshift", "left_shift"), ("rshift", "right_shift"),
)  # fmt: skip
_COMPARISONS = (
    ("lt", "less"), ("le", "less_equal"), ("gt", "greater"), ("ge", "greater_equal"),
    ("eq", "equal"), ("ne", "not_equal"),
)  # fmt: skip
_FUNCTIONS = (
    "absolute", "cos", "exp", "floor", "invert", "isfinite", "isinf", "isnan", "log", "logical_and", "logical_not",
    "logical_or", "maximum", "minimum", "negative", "sign", "sin", "sqrt", "square", "tanh",
)  # fmt: skip
_UFUNCS = {name: ufunc(name) for name in (*dict(_OPERATORS).values(), *dict(_COMPARISONS).values(), *_FUNCTIONS)}
_UFUNCS["divide"] = _UFUNCS["true_divide"]
globals().update(_UFUNCS)


def _install() -> None:
    for short, name in _OPERATORS:
        function = _UFUNCS[name]
        setattr(ndarray, f"__{short}__", lambda self, other, f=function: f(self, other))
        setattr(ndarray, f"__r{short}__", lambda self, other, f=function: f(other, self))
        setattr(ndarray, f"__i{short}__", lambda self, other, f=function: f(self, other, out=self))
    for short, name in _COMPARISONS:
        setattr(ndarray, f"__{short}__", lambda self, other, f=_UFUNCS[name]: f(self, other))
    for short, name in (("neg", "negative"), ("abs", "absolute"), ("invert", "invert")):
        setattr(ndarray, f"__{short}__", lambda self, f=_UFUNCS[name]: f(self))
    ndarray.__matmul__ = lambda self, other: matmul(self, other)  # type: ignore[attr-defined]


_install()


RawKernel = cuda_compiler.RawKernel


# Functions of the module
inf, nan, newaxis, pi = np.inf, np.nan, None, np.pi


def empty(shape: Any, dtype: Any = float) -> ndarray:
    """Return uninitialised memory, filled with values that reveal a read before a write."""
    made = ndarray(shape, dtype)
    made._raw.reshape(-1).view(np.uint8)[...] = 0xFF  # NaN in every float, -1 in every integer
    return made


def zeros(shape: Any, dtype: Any = float) -> ndarray:
    return _kernel(lambda: np.zeros(shape, dtype))


def ones(shape: Any, dtype: Any = float) -> ndarray:
    return _kernel(lambda: np.ones(shape, dtype))


def arange(*bounds: Any, dtype: Any = None) -> ndarray:
    return _kernel(lambda: np.arange(*bounds, dtype=dtype))


def asarray(values: Any, dtype: Any = None) -> ndarray:
    """Copy explicitly to the device. A device array is returned unchanged."""
    if isinstance(values, ndarray):
        return values if dtype in (None, values.dtype) else values.astype(dtype)
    cuda_double.check_not_captured("a copy from the host")
    copied = np.array(values, dtype)
    LOG.note(H2D, copied.nbytes)
    return _kernel(lambda: copied)


def asnumpy(array: Any) -> np.ndarray:
    """Copy explicitly to the host."""
    return array.get() if isinstance(array, ndarray) else np.asarray(array)


def ascontiguousarray(array: Any) -> ndarray:
    return _kernel(np.ascontiguousarray, array)


def matmul(left: Any, right: Any, out: Any = None) -> ndarray:
    operands = (left, right) if out is None else (left, right, out)
    if cuda_double.current_stream().is_capturing():
        raise NotImplementedError("calling cuBLAS API during stream capture is currently unsupported")
    if not all(isinstance(operand, ndarray) for operand in operands):
        raise TypeError(f"cupy.matmul takes arrays of the device, got {[type(operand) for operand in operands]}")
    if out is None:
        return _kernel(_product, left, right)
    if left.ndim < 2 or right.ndim < 2:
        raise ValueError("Invalid shape for out: cupy 13 wants the dim that a vector lacks in it")

    def store(one: Any, other: Any, target: Any) -> None:
        target[...] = _product(one, other)

    return _kernel(store, left, right, out=out)


def _product(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Multiply as cuBLAS does: 16-bit floats are summed in float32 and rounded once."""
    kind = np.result_type(left, right)
    if max(left.ndim, right.ndim) > 2:  # cupy copies them
        left, right = np.ascontiguousarray(left), np.ascontiguousarray(right)
    if kind.itemsize != 2:
        return np.matmul(left, right)
    return np.matmul(left.astype(np.float32), right.astype(np.float32)).astype(kind)


class Cublas:
    """The double of `hpcdist.arrays.gpu.graphs.Cublas`: captured products of matrices described by addresses."""

    def __init__(self, stream: cuda_double.Stream) -> None:
        self._stream = stream

    def multiply(self, sizes: tuple[int, int, int], a: Any, b: Any, out: Any, count: int) -> None:
        assert cuda_double.current_stream() is self._stream and a.array.dtype == b.array.dtype == out.array.dtype
        m, n, k = sizes
        about = [(of[1:], shape) for of, shape in ((a, (m, k)), (b, (k, n)), (out, (m, n)))]

        def work(*local_data: np.ndarray) -> None:
            left, right, target = (
                _matrices_at(array, *how, count) for array, how in zip(local_data, about, strict=True)
            )
            target[...] = _product(left, right)

        cuda_double.run(work, [of.array._raw for of in (a, b, out)], [2])


def _matrices_at(array: np.ndarray, place: tuple[int, bool, int], shape: tuple[int, int], count: int) -> np.ndarray:
    """Return the matrices of ``shape`` that begin at the address of ``array``."""
    leading, by_columns, pitch = place
    assert leading >= shape[0 if by_columns else 1], "cuBLAS would refuse a leading dim below the length of a line"
    steps = (pitch, 1, leading) if by_columns else (pitch, leading, 1)
    whole = (count, *shape) if count > 1 else shape
    strides = [step * array.itemsize for step in steps][-len(whole) :]
    return np.lib.stride_tricks.as_strided(array, whole, strides)


def where(condition: Any, x: Any, y: Any) -> ndarray:
    return _kernel(np.where, condition, x, y)


def take(array: Any, indices: Any, axis: int | None = None, out: Any = None) -> ndarray:
    return array.take(indices, axis, out)


def concatenate(arrays: Any, axis: int = 0) -> ndarray:
    if not all(isinstance(array, ndarray) for array in arrays):
        raise TypeError("Only cupy arrays can be concatenated")
    return _kernel(lambda *parts: np.concatenate(parts, axis), *arrays)


def from_dlpack(array: Any) -> ndarray:
    """Show memory of another library, which orders its stream before the current stream."""
    return _device(np.from_dlpack(array))


def cumsum(array: Any, axis: int | None = None, dtype: Any = None) -> ndarray:
    return _kernel(lambda local_data: np.cumsum(local_data, axis, dtype), array)


def searchsorted(array: Any, values: Any, side: str = "left") -> ndarray:
    if not isinstance(array, ndarray) or not isinstance(values, ndarray):
        raise NotImplementedError("Only cupy.ndarray can be searched, and searched for")
    return _kernel(lambda local_data, expected: np.searchsorted(local_data, expected, side), array, values)


def may_share_memory(one: Any, other: Any) -> bool:
    return np.may_share_memory(_operand(one), _operand(other))


class cuda:  # noqa: N801
    """Devices, and the names of `cuda_double` and `nccl_double`."""

    Stream, Event = cuda_double.Stream, cuda_double.Event
    Memory, MemoryAsync = cuda_double.Memory, cuda_double.MemoryAsync
    MemoryPointer, UnownedMemory = cuda_double.MemoryPointer, cuda_double.UnownedMemory
    Graph, MemoryPool = cuda_double.Graph, cuda_double.MemoryPool
    using_allocator = staticmethod(cuda_double.using_allocator)
    set_allocator = staticmethod(lambda allocator: None)  # memory of the double is not taken from a pool anyway
    nccl = nccl_double

    class runtime:  # noqa: N801
        CUDARuntimeError = cuda_double.CUDARuntimeError
        streamCaptureModeGlobal, streamCaptureModeThreadLocal, streamCaptureModeRelaxed = range(3)  # noqa: N815
        ipcGetMemHandle = staticmethod(cuda_double.ipcGetMemHandle)  # noqa: N815
        ipcOpenMemHandle = staticmethod(cuda_double.ipcOpenMemHandle)  # noqa: N815
        ipcCloseMemHandle = staticmethod(cuda_double.ipcCloseMemHandle)  # noqa: N815

        @staticmethod
        def getDeviceCount() -> int:
            return 1

        @staticmethod
        def getDevice() -> int:
            return 0

        @staticmethod
        def deviceGetPCIBusId(device: int) -> str:
            return "0000:00:00.0"

        @staticmethod
        def getDeviceProperties(device: int) -> dict[str, Any]:
            return {"name": b"double", "major": 8, "minor": 0}

        @staticmethod
        def driverGetVersion() -> int:
            return 0

        @staticmethod
        def runtimeGetVersion() -> int:
            return 0

    class Device:
        def __init__(self, device: int = 0) -> None:
            self.id = device

        def use(self) -> None:
            if self.id >= cuda.runtime.getDeviceCount():
                raise cuda.runtime.CUDARuntimeError("cudaErrorInvalidDevice: invalid device ordinal")

    @staticmethod
    def get_current_stream() -> cuda_double.Stream:
        return cuda_double.current_stream()

    @staticmethod
    def alloc_pinned_memory(size: int) -> cuda_double.Pinned:
        return cuda_double.alloc_pinned_memory(size)

    @staticmethod
    def get_elapsed_time(start_event: cuda_double.Event, end_event: cuda_double.Event) -> float:
        """Return milliseconds."""
        return cuda_double.elapsed_ms(start_event, end_event)


__version__ = "0.double"

__all__ = [
    "__version__",
    "arange",
    "asarray",
    "ascontiguousarray",
    "asnumpy",
    "concatenate",
    "cuda",
    "cumsum",
    "empty",
    "from_dlpack",
    "inf",
    "matmul",
    "may_share_memory",
    "nan",
    "ndarray",
    "newaxis",
    "ones",
    "pi",
    "searchsorted",
    "take",
    "ufunc",
    "where",
    "zeros",
    "RawKernel",
    *_UFUNCS,
]


def module() -> ModuleType:
    """Return the double as the module that `hpcdist.arrays.gpu.device.cupy` imports, with cupy's names only."""
    made = ModuleType("cupy")
    vars(made).update({name: globals()[name] for name in __all__})
    return made
