"""The double of cupy compared with the real cupy: the same names, errors and types."""

import inspect

import numpy as np
import pytest

from hpcdist.arrays.dtypes import dtype_of
from hpcdist.arrays.gpu import device, graphs
from stubs.gpu import cupy_double

HOST = np.arange(6.0, dtype=np.float32).reshape(2, 3)
REFUSED = {
    "np.asarray": lambda a, xp: np.asarray(a),
    "array + numpy": lambda a, xp: a + HOST,
    "numpy + array": lambda a, xp: HOST + a,
    "array += numpy": lambda a, xp: a.__iadd__(HOST),
    "ufunc into numpy": lambda a, xp: np.add(a, a, out=HOST.copy()),
    "cupy ufunc of numpy": lambda a, xp: xp.sqrt(HOST),
    "setitem of numpy": lambda a, xp: a.__setitem__(Ellipsis, HOST),
    "setitem into numpy": lambda a, xp: HOST.copy().__setitem__(Ellipsis, a),
    "matmul of numpy": lambda a, xp: xp.matmul(a, HOST.T),
    "set of a list": lambda a, xp: a.set([1.0]),
    "set of another dtype": lambda a, xp: a.set(HOST.astype(np.float64)),
    "set of another shape": lambda a, xp: a.set(HOST[0]),
    "set of a part in steps": lambda a, xp: a[:, ::2].set(HOST[:, ::2].copy()),
    "memoryview": lambda a, xp: memoryview(a),
    "hash": lambda a, xp: hash(a),
    "flags.writeable": lambda a, xp: a.flags.writeable,
    "__array_interface__": lambda a, xp: a.__array_interface__,
    "view of another size": lambda a, xp: a.T.view(np.float64),
}
COMPUTED = {
    "numpy scalar on the left": lambda a, xp: np.float32(2) * a,
    "python float": lambda a, xp: 0.5 * a,
    "python float over a sum": lambda a, xp: 1 / (a.sum() + 1),
    "numpy ufunc": lambda a, xp: np.add(a, 1.5),
    "numpy ufunc with out": lambda a, xp: np.exp(a, out=a.copy()),
    "mean": lambda a, xp: a.mean(axis=1),
    "sum in float64": lambda a, xp: a.sum(dtype=np.float64),
    "maximum with keepdims": lambda a, xp: a.max(axis=1, keepdims=True),
    "where with infinity": lambda a, xp: xp.where(a > 2, -xp.inf, a),
    "comparison of ranges": lambda a, xp: xp.arange(3)[None, :] > xp.arange(1, 3)[:, None] + 0,
    "matmul": lambda a, xp: xp.matmul(a, a.T),
    "matmul of one row, out": lambda a, xp: xp.matmul(xp.ones((1, 2), np.float32), a, out=xp.empty((1, 3), np.float32)),
    "take with out": lambda a, xp: xp.take(a, xp.arange(2), axis=0, out=xp.empty((2, 3), np.float32)),
    "gather by two indices": lambda a, xp: a[xp.arange(2), xp.arange(2)],
    "bits": lambda a, xp: (a.view(np.uint32) >> np.uint32(16)) & np.uint32(1),
    "integers to float": lambda a, xp: a.astype(np.uint8).astype(np.float32) / np.float32(255),
    "bool times float": lambda a, xp: xp.multiply(a, a > 2),
    "isfinite, all": lambda a, xp: xp.isfinite(a).all(),
    "sums so far of a mask": lambda a, xp: xp.cumsum(a.reshape(-1) > 2, dtype=np.int32),
    "places in sums so far": lambda a, xp: xp.searchsorted(
        xp.cumsum(a.reshape(-1) > 2, dtype=np.int32), xp.arange(1, 4)
    ),
    "where of numbers of the device": lambda a, xp: xp.where((a > 2).sum() >= 2, xp.zeros((), np.uint32), np.uint32(3)),
    "five dims": lambda a, xp: a.reshape(1, 2, 3, 1, 1).transpose(2, 0, 3, 1, 4),
}


def test_every_name_and_argument_of_the_double_exists_in_cupy(cupy):
    assert [name for name in cupy_double.__all__ if not hasattr(cupy, name)] == []
    theirs = {local_data: vars(getattr(cupy.cuda, local_data)) for local_data in ("Graph", "MemoryPool")}
    assert "launch" in theirs["Graph"] and {"malloc", "total_bytes"} <= theirs["MemoryPool"].keys()
    for name in ("empty", "zeros", "ones", "asarray", "take", "where", "concatenate"):
        theirs = inspect.signature(getattr(cupy, name)).parameters
        assert set(inspect.signature(getattr(cupy_double, name)).parameters) <= {*theirs, "values", "array", "arrays"}


@pytest.mark.parametrize("name", REFUSED)
def test_cupy_rejects_every_call_that_the_double_rejects(cupy, name):
    for xp in (cupy_double.module(), cupy):
        with pytest.raises((TypeError, ValueError, AttributeError, RuntimeError)):
            REFUSED[name](xp.asarray(HOST), xp)


@pytest.mark.parametrize("name", COMPUTED)
def test_cupy_and_the_double_compute_the_same_values(cupy, name):
    want, got = (COMPUTED[name](xp.asarray(HOST), xp) for xp in (cupy_double.module(), cupy))
    assert isinstance(got, cupy.ndarray)
    assert (got.dtype, got.shape) == (want.dtype, want.shape)
    np.testing.assert_allclose(got.get(), want.get(), rtol=1e-6)


def test_views_share_memory(cupy):
    for xp in (cupy_double.module(), cupy):
        array = xp.zeros(8, np.float32)
        part = array[2:6].reshape(2, 2)
        part[...] = 3
        part += 1
        part[0] = array[:2]
        part[:, 1] -= part[:, 0]
        xp.add.at(array, xp.asarray(np.array([0, 1, 1])), xp.ones(3, np.float32))
        assert array.get().tolist() == [1, 2, 0, 0, 4, 0, 0, 0]
        assert xp.may_share_memory(part, array) and not xp.may_share_memory(part, array[6:])
        assert part.data.ptr == array.data.ptr + 8


def test_graph_runs_only_at_launch_and_on_the_captured_memory(cupy, monkeypatch):
    for xp, cublas in ((cupy_double.module(), cupy_double.Cublas), (cupy, graphs.Cublas)):
        monkeypatch.setattr(device, "cupy", lambda xp=xp: xp)
        monkeypatch.setattr(graphs, "Cublas", cublas)
        array, right, recorder = xp.asarray(HOST), xp.ones((3, 4), np.float32), graphs.GraphRecorder()
        product = xp.empty((2, 4), np.float32)

        def call(array=array, right=right, product=product):
            array.__iadd__(1.0)
            graphs.matmul(array * 2.0, right, product)
            return product.sum(dtype=np.float64)

        call()  # kernels are compiled
        graph, total = recorder.capture(call)
        assert (array.get() == HOST + 1).all()
        others = []
        for launch in (2, 3):
            graph.launch()
            others.append(xp.zeros(1 << 10, np.float32))  # memory that is given to others meanwhile
            assert total.get() == 8 * (HOST + launch).sum() and not others[-1].get().any()
        assert recorder.nbytes > 0


@pytest.mark.parametrize("wait", [device.synchronise, lambda: float(device.cupy().ones(1, np.float32)[0])])
def test_capture_of_a_wait_raises_and_later_captures_work(cupy, wait, monkeypatch):
    for xp, cublas in ((cupy_double.module(), cupy_double.Cublas), (cupy, graphs.Cublas)):
        monkeypatch.setattr(device, "cupy", lambda xp=xp: xp)
        monkeypatch.setattr(graphs, "Cublas", cublas)
        array, recorder = xp.zeros(3, np.float32), graphs.GraphRecorder()
        with pytest.raises(xp.cuda.runtime.CUDARuntimeError, match="cudaErrorStreamCapture"):
            recorder.capture(wait)
        graph, _ = recorder.capture(lambda array=array: array.fill(7.0))
        graph.launch()
        assert (array.get() == 7).all()


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
@pytest.mark.parametrize(
    ("left", "right", "turned"),
    [((33, 40), (40, 24), False), ((33, 40), (24, 40), True), ((2, 3, 33, 40), (2, 1, 24, 40), True)],
)
def test_captured_matmul_is_bit_identical_to_cupy(cupy, rng, left, right, turned, dtype):
    kind = dtype_of(dtype)
    a, b = (cupy.asarray(rng.standard_normal(shape).astype(np.float32)).astype(kind) for shape in (left, right))
    b = b.swapaxes(-1, -2) if turned else b
    want, out = (cupy.empty((*left[:-1], 24), kind) for _ in range(2))
    graphs.matmul(a, b, want)
    graph, _ = graphs.GraphRecorder().capture(lambda: graphs.matmul(a, b, out))
    graph.launch()
    np.testing.assert_allclose(out.get().astype(np.float64), want.get().astype(np.float64), rtol=1e-2, atol=1e-2)
    assert out.get().tobytes() == want.get().tobytes()
