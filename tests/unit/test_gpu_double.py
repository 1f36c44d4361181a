"""The double of cupy is strict: what cupy refuses it refuses, what cupy does quietly it counts, and it has no more."""

import pickle
from types import ModuleType

import numpy as np
import pytest

from hpcdist.arrays import backend
from hpcdist.arrays.jit import jit

HOST = np.arange(6.0).reshape(2, 3)


@jit
def _doubled(values):
    for i in range(values.size):
        values[i] *= 2


def on_device(gpu: ModuleType) -> object:
    array = backend.place(HOST, "gpu")
    gpu.LOG.clear()
    return array


REFUSED = {
    "np.asarray": (TypeError, lambda a: np.asarray(a)),
    "np.array of a list": (TypeError, lambda a: np.array([a[0], a[1]])),
    "array + numpy": (TypeError, lambda a: a + HOST),
    "numpy + array": (TypeError, lambda a: HOST + a),
    "array += numpy": (TypeError, lambda a: a.__iadd__(HOST)),
    "numpy += array": (TypeError, lambda a: HOST.copy().__iadd__(a)),
    "array + list": (TypeError, lambda a: a.__add__([1.0, 2.0, 3.0])),
    "ufunc into numpy": (TypeError, lambda a: np.add(a, a, out=HOST.copy())),
    "cupy ufunc of numpy": (TypeError, lambda a: backend.namespace(a).sqrt(HOST)),
    "setitem of numpy": (ValueError, lambda a: a.__setitem__(Ellipsis, HOST)),
    "setitem into numpy": (TypeError, lambda a: HOST.copy().__setitem__(Ellipsis, a)),
    "an index of the host": (TypeError, lambda a: a[np.array([0, 1])]),
    "matmul of numpy": (TypeError, lambda a: backend.namespace(a).matmul(a, HOST.T)),
    "matmul by @": (TypeError, lambda a: a @ HOST.T),
    "a numpy function without a cupy one": (TypeError, lambda a: np.sinc(a)),
    "set of a list": (TypeError, lambda a: a.set([1.0])),
    "set of another dtype": (TypeError, lambda a: a.set(HOST.astype(np.float32))),
    "set of another shape": (ValueError, lambda a: a.set(HOST[0])),
    "set of a part in steps": (RuntimeError, lambda a: a[:, ::2].set(HOST[:, ::2].copy())),
    "memoryview": (TypeError, lambda a: memoryview(a)),
    "hash": (TypeError, lambda a: hash(a)),
    "flags.writeable": (AttributeError, lambda a: a.flags.writeable),
    "ctypes": (AttributeError, lambda a: a.ctypes),
    "__array_interface__": (AttributeError, lambda a: a.__array_interface__),
    "a kernel of the CPU": (TypeError, lambda a: _doubled(a.reshape(-1))),
    "pickle": (TypeError, lambda a: pickle.dumps(a)),
}


@pytest.mark.parametrize("name", REFUSED)
def test_it_refuses(gpu: ModuleType, name: str) -> None:
    error, use = REFUSED[name]
    array = on_device(gpu)
    with pytest.raises(error):
        use(array)
    assert gpu.LOG.events == []


def test_the_refusal_of_a_kernel_says_what_to_do(gpu: ModuleType) -> None:
    with pytest.raises(TypeError, match=r"_doubled is a loop of the CPU, and got an array on a GPU; ask .*is_device"):
        _doubled(backend.zeros(3, np.dtype("float32"), "gpu"))
    with pytest.raises(Exception, match="annot determine Numba type"):  # other misuse keeps its own message
        _doubled(object())


COUNTED = {
    "float": (8, lambda a: float(a[0, 1])),
    "int": (8, lambda a: int(a[0, 1])),
    "bool": (1, lambda a: bool((a == a).all())),
    "if": (8, lambda a: 1 if a[0, 1] else 0),
    "item": (8, lambda a: a[0, 1].item()),
    "tolist": (48, lambda a: a.tolist()),
    "get": (48, lambda a: a.get()),
    "asnumpy": (48, lambda a: backend.to_host(a)),
    "a comparison that decides": (1, lambda a: max(a[0, 1], 0)),
}


@pytest.mark.parametrize("name", COUNTED)
def test_ways_to_the_host_are_counted_at_their_site(gpu: ModuleType, name: str) -> None:
    nbytes, use = COUNTED[name]
    use(on_device(gpu))
    (event,) = gpu.LOG.events
    assert (event.kind, event.nbytes) == (gpu.D2H, nbytes)
    assert event.site == "test_gpu_double.<lambda>" and event.thread == "MainThread"


def test_ways_to_the_device_and_waits_are_counted(gpu: ModuleType) -> None:
    array = backend.place(HOST, "gpu")
    assert backend.place(array, "gpu") is array
    array.set(HOST + 1)
    array[array > 3]  # how many there are, only the device knows
    backend.synchronise(array)
    assert backend.is_device(array) and not backend.is_device(HOST) and not backend.is_device(None)
    backend.synchronise(HOST)
    kinds = [(event.kind, event.nbytes) for event in gpu.LOG.events]
    assert kinds == [(gpu.H2D, 48), (gpu.H2D, 48), (gpu.SYNCHRONISE, 0), (gpu.SYNCHRONISE, 0)]


def test_the_device_computes_without_the_host(gpu: ModuleType, rng: np.random.Generator) -> None:
    host = rng.standard_normal((4, 6)).astype(np.float32)
    array = backend.place(host, "gpu")
    gpu.LOG.clear()
    xp = backend.namespace(array)
    out = xp.empty((4, 6), np.float32)
    results = [
        (np.float32(2) * array, np.float32(2) * host),
        (np.add(array, 1.5), host + 1.5),
        (array.sum(axis=0), host.sum(axis=0)),
        (xp.where(array > 0, -xp.inf, array), np.where(host > 0, np.float32(-np.inf), host)),
        (xp.matmul(array, array.T), host @ host.T),
        (np.exp(array, out=out), np.exp(host)),
        (array.reshape(2, 12)[:, ::5].swapaxes(0, 1), host.reshape(2, 12)[:, ::5].swapaxes(0, 1)),
        (1 / (array * array), 1 / (host * host)),
        (array.view(np.uint32) >> np.uint32(16), host.view(np.uint32) >> np.uint32(16)),
        (xp.take(array, xp.arange(3), axis=0), host[:3]),
    ]
    assert gpu.LOG.events == []
    for got, want in results:
        assert type(got) is gpu.ndarray and got.dtype == want.dtype
        assert np.array_equal(got.get(), want)


def test_views_share_memory_and_writes_go_through(gpu: ModuleType) -> None:
    array = backend.zeros(8, np.dtype("float32"), "gpu")
    part = array[2:6].reshape(2, 2)
    part[...] = 3
    part += 1
    part[0] = array[:2]
    part[:, 1] -= part[:, 0]
    xp = backend.namespace(array)
    xp.add.at(array, xp.arange(2), xp.ones(2, np.float32))
    assert array.get().tolist() == [1, 1, 0, 0, 4, 0, 0, 0]
    assert xp.may_share_memory(part, array) and not xp.may_share_memory(part, array[6:])
    assert part.data.ptr == array.data.ptr + 8


def test_memory_that_was_not_written_shows(gpu: ModuleType) -> None:
    assert np.isnan(backend.empty(3, np.dtype("float64"), "gpu").get()).all()


def test_every_name_is_one_of_cupy(gpu: ModuleType) -> None:
    """Needs cupy, not a GPU."""
    cupy = pytest.importorskip("cupy")
    made = gpu.module()
    assert [name for name in gpu.__all__ if not hasattr(cupy, name)] == []
    hidden = {"_host", "_reduced"} | set(dir(object))
    members = {name for name in dir(made.ndarray) if name not in hidden and not name.startswith("__")}
    assert [name for name in sorted(members) if not hasattr(cupy.ndarray, name)] == []
    for group in ("cuda", "cuda.runtime", "cuda.Device", "cuda.Stream", "cuda.Event"):
        ours, theirs = made, cupy
        for part in group.split("."):
            ours, theirs = getattr(ours, part), getattr(theirs, part)
        assert [n for n in dir(ours) if not n.startswith("_") and not hasattr(theirs, n)] == [], group
