"""Measured peak of the array library: the flop/s of a large matrix product, and the BLAS that computes it.

This is what a machine can do, measured rather than declared; utilisation (MFU) is given as a part of it.
"""

import ctypes
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import numpy as np

from hpcdist.arrays import backend
from hpcdist.arrays.backend import Array, namespace

# Of square matrices. A processor is at its best from here on, and a product short enough not to be interrupted often.
SIDE: Final = {"cpu": 512, "gpu": 8192}
ROWS: Final = 64  # that are drawn, on the host: a GPU's matrices have too many numbers to draw, or to hold, there
LEAST: Final = 3
_VARIABLES: Final = ("OPENBLAS_", "MKL_", "OMP_")


class MatrixProduct:
    """A product of square matrices in memory of its own: once made, `run` allocates nothing."""

    def __init__(self, dtype: np.dtype, on: str = "cpu", side: int = 0) -> None:
        side = side or SIDE[on]
        drawn = np.random.default_rng(0).standard_normal((2, min(ROWS, side), side)).astype(dtype)
        self._a, self._b = (_repeated(backend.place(rows, on), side, on) for rows in drawn)
        self._into = backend.empty((side, side), dtype, on)
        self.flops = 2 * side**3

    def run(self) -> float:
        """Multiply once; return the seconds it took. What a GPU computes is waited for."""
        backend.synchronise(self._into)
        begin_s = time.perf_counter()
        namespace(self._a).matmul(self._a, self._b, out=self._into)
        backend.synchronise(self._into)
        return time.perf_counter() - begin_s


def _repeated(rows: Array, side: int, on: str) -> Array:
    """Return a square matrix of ``rows`` again and again, made where they are."""
    matrix = backend.empty((side, side), rows.dtype, on)
    for first in range(0, side, len(rows)):
        matrix[first : first + len(rows)] = rows[: side - first]
    return matrix


def matmul_flops_per_s(dtype: np.dtype, on: str = "cpu", seconds: float = 0.1, side: int = 0) -> float:
    """Return the operations a second of the fastest of the products that fit into ``seconds``, of 3 at least (local).

    A product of n x n matrices is 2 n^3 operations. All cores that the library uses take part: where other ranks share
    them, let all measure at the same time.
    """
    product = MatrixProduct(dtype, on, side)
    product.run()  # pages are touched, threads started
    begin_s, best_s, count = time.perf_counter(), float("inf"), 0
    while count < LEAST or time.perf_counter() - begin_s < seconds:
        best_s = min(best_s, product.run())
        count += 1
    return product.flops / best_s


def blas(environment: Mapping[str, str] = os.environ) -> str:
    """Return which kernels numpy's OpenBLAS has chosen for this processor, and the variables that it was told by.

    Both change what a matrix product reaches by factors. The kernels are not known of another BLAS, or of one that did
    not come with numpy.
    """
    names = [f"kernels {core}" for core in map(_core, _bundled()) if core]
    told = [f"{name}={value}" for name, value in sorted(environment.items()) if name.startswith(_VARIABLES)]
    return ", ".join([*names, *told]) or "not known"


def _bundled() -> list[Path]:
    """Return the libraries that a wheel of numpy brings along."""
    return sorted(Path(np.__file__).parents[1].glob("numpy.libs/lib*openblas*"))


def _core(library: Path) -> str:
    """Return what an OpenBLAS, which numpy has loaded, calls the kernels that it uses; "" where it does not say."""
    loaded = ctypes.CDLL(str(library))
    for name in ("scipy_openblas_get_corename64_", "openblas_get_corename64_", "openblas_get_corename"):
        if hasattr(loaded, name):
            ask = getattr(loaded, name)
            ask.restype = ctypes.c_char_p
            return str(ask().decode())
    return ""
