"""Matrix products in a CUDA graph: the layouts passed to cuBLAS, and the results."""

import ctypes

import numpy as np
import pytest

from hpcdist.arrays import backend
from hpcdist.arrays.gpu import graphs
from stubs.gpu import cupy_double

PRODUCTS = {  # shapes of a and b, T: transposed
    "by rows": ("3 5", "5 4"),
    "a turned": ("5 3 T", "5 4"),
    "b turned": ("3 5", "4 5 T"),
    "both turned": ("5 3 T", "4 5 T"),
    "one row": ("1 5", "1 5 T"),
    "one term": ("3 1", "1 4"),
    "several": ("2 3 5", "2 5 4"),
    "some repeated": ("2 3 2 3 5", "2 3 1 4 5 T"),
}
DTYPES = {0: np.float32, 1: np.float64, 2: np.float16}


class Library:
    """A host version of cuBLAS according to its manual: matrices are column-major with leading dimension ``ld``."""

    def cublasGemmEx(
        self, handle, transa, transb, m, n, k, alpha, a, at, lda, b, bt, ldb, beta, c, ct, ldc, sums, algo
    ):
        self._multiply(transa, transb, m, n, k, (a, at, lda), (b, bt, ldb), (c, ct, ldc), sums)
        return 0

    def cublasGemmStridedBatchedEx(
        self,
        handle,
        transa,
        transb,
        m,
        n,
        k,
        alpha,
        a,
        at,
        lda,
        pa,
        b,
        bt,
        ldb,
        pb,
        beta,
        c,
        ct,
        ldc,
        pc,
        count,
        sums,
        algo,
    ):
        for index in range(count):
            places = [
                (ctypes.c_void_p(of.value + index * pitch.value * np.dtype(DTYPES[kind]).itemsize), kind, ld)
                for of, kind, ld, pitch in ((a, at, lda, pa), (b, bt, ldb, pb), (c, ct, ldc, pc))
            ]
            self._multiply(transa, transb, m, n, k, *places, sums)
        return 0

    def _multiply(self, transa, transb, m, n, k, a, b, c, sums):
        assert sums == {np.float64: 70}.get(DTYPES[c[1]], 68)
        left = self._matrix(a, k, m).T if transa else self._matrix(a, m, k)
        right = self._matrix(b, n, k).T if transb else self._matrix(b, k, n)
        self._matrix(c, m, n)[...] = left.astype(float) @ right.astype(float)

    def _matrix(self, place, rows, columns):
        address, kind, ld = place
        assert ld >= max(1, rows)
        dtype = np.dtype(DTYPES[kind])
        nbytes = ((columns - 1) * ld + rows) * dtype.itemsize
        memory = np.frombuffer((ctypes.c_uint8 * nbytes).from_address(address.value), dtype)
        return np.lib.stride_tricks.as_strided(memory, (rows, columns), (dtype.itemsize, ld * dtype.itemsize))


def host_and_device_arrays(text, rng, dtype):
    """Return a view into a larger array, and the same view on the device."""
    *sizes, last = map(int, text.removesuffix(" T").split())
    wide = rng.integers(-9, 9, (*sizes, last + 3)).astype(dtype)
    views = wide[..., 1:-2], backend.place(wide, "gpu")[..., 1:-2]
    return [view.swapaxes(-1, -2) if text.endswith("T") else view for view in views]


@pytest.mark.parametrize("library", ["of the double", "by its manual"])
@pytest.mark.parametrize("dtype", list(DTYPES.values()), ids=lambda dtype: dtype.__name__)
@pytest.mark.parametrize("product", PRODUCTS)
def test_captured_product_matches_numpy(gpu, rng, monkeypatch, product, dtype, library):
    recorder = graphs.GraphRecorder()
    if library == "by its manual":  # runs immediately: nothing is captured
        cublas = object.__new__(REAL)
        cublas._library, cublas._handle = Library(), None
        monkeypatch.setattr(graphs._local, "cublas", cublas)
    (left, a), (right, b) = (host_and_device_arrays(text, rng, dtype) for text in PRODUCTS[product])
    want = np.matmul(left.astype(float), right.astype(float))
    for wide in (gpu.empty(want.shape, dtype), gpu.empty((*want.shape[:-1], 9), dtype)):
        out = wide[..., : want.shape[-1]]
        if library == "of the double":
            recorder.capture(lambda out=out: backend.matmul(a, b, out))[0].launch()
        else:
            backend.matmul(a, b, out)
        assert np.array_equal(out.get(), want)


REAL = graphs.Cublas  # the fixture replaces it by the double


def test_cupy_rejects_matmul_during_capture(gpu):
    array = cupy_double.ones((2, 2))
    with pytest.raises(NotImplementedError, match="cuBLAS API during stream capture"):
        graphs.GraphRecorder().capture(lambda: cupy_double.matmul(array, array, out=array))


def test_missing_library_is_reported():
    with pytest.raises(graphs.MissingCapabilityError, match=r"libnothing is not loaded .*set run.cuda_graph = false"):
        graphs._loaded("libnothing")
    assert graphs._loaded("libc").startswith("/")
