"""Measured peak of the array library: the flop/s of a large matrix product, and the BLAS that computes it.

The peak is measured rather than declared; model flop utilisation (MFU) is reported as a fraction of it.
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

# Rows of the square matrices: large enough for full speed, short enough that few products are interrupted.
SIDE: Final = {"cpu": 512, "gpu": 8192}
ROWS: Final = 64  # random rows drawn on the host and repeated: a GPU's matrix is too large to draw, or to hold, there
LEAST: Final = 3  # products that are timed at least
_VARIABLES: Final = ("OPENBLAS_", "MKL_", "OMP_")


class MatrixProduct:
    """A product of two square matrices, with all its memory: `run` allocates nothing."""

    def __init__(self, dtype: np.dtype, on: str = "cpu", side: int = 0) -> None:
        side = side or SIDE[on]
        drawn = np.random.default_rng(0).standard_normal((2, min(ROWS, side), side)).astype(dtype)
        self._a, self._b = (_repeated(backend.place(rows, on), side, on) for rows in drawn)
        self._into = backend.empty((side, side), dtype, on)
        self.flops = 2 * side**3

    def run(self) -> float:
        """Multiply once; return the seconds it took, kernels on a GPU included."""
        backend.synchronise(self._into)
        begin_s = time.perf_counter()
        namespace(self._a).matmul(self._a, self._b, out=self._into)
        backend.synchronise(self._into)
        return time.perf_counter() - begin_s


def _repeated(rows: Array, side: int, on: str) -> Array:
    """Return a square matrix that repeats ``rows``, on the device ``on``, where they are."""
    matrix = backend.empty((side, side), rows.dtype, on)
    for first in range(0, side, len(rows)):
        matrix[first : first + len(rows)] = rows[: side - first]
    return matrix


def matmul_flops_per_s(dtype: np.dtype, on: str = "cpu", seconds: float = 0.1, side: int = 0) -> float:
    """Return the flop/s of the fastest product of those that fit into ``seconds``, of 3 at least (local).

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
    """Return the kernels that numpy's OpenBLAS uses on this processor, and the variables that configure it.

    Both change the speed of a matrix product by factors. The kernels of another BLAS, or of one that did not come with
    numpy, are not known.
    """
    names = [f"kernels {core}" for core in map(_core, _bundled()) if core]
    variables = [f"{name}={value}" for name, value in sorted(environment.items()) if name.startswith(_VARIABLES)]
    return ", ".join([*names, *variables]) or "not known"


def _bundled() -> list[Path]:
    """Return the OpenBLAS libraries that numpy's wheel contains."""
    return sorted(Path(np.__file__).parents[1].glob("numpy.libs/lib*openblas*"))


def _core(library: Path) -> str:
    """Return OpenBLAS's name for the kernels that it uses; "" where the library has no such query."""
    loaded = ctypes.CDLL(str(library))
    for name in ("scipy_openblas_get_corename64_", "openblas_get_corename64_", "openblas_get_corename"):
        if hasattr(loaded, name):
            ask = getattr(loaded, name)
            ask.restype = ctypes.c_char_p
            return str(ask().decode())
    return ""
