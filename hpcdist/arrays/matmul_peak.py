"""Measured peak flop/s of a matrix product, the reference of model flop utilisation (MFU), and the BLAS in use."""

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
ROWS: Final = 64  # random rows, drawn on the host and repeated: a whole GPU matrix would take too long to draw
LEAST: Final = 3  # minimum number of timed products
_VARIABLES: Final = ("OPENBLAS_", "MKL_", "OMP_")


class MatrixProduct:
    """A product of two square matrices with preallocated memory, for time measurements."""

    def __init__(self, dtype: np.dtype, on: str = "cpu", side: int = 0) -> None:
        side = side or SIDE[on]
        drawn = np.random.default_rng(0).standard_normal((2, min(ROWS, side), side)).astype(dtype)
        self._a, self._b = (_repeated(backend.place(rows, on), side, on) for rows in drawn)
        self._into = backend.empty((side, side), dtype, on)
        self.flops = 2 * side**3

    def run(self) -> float:
        """Compute the product once and return its duration in seconds."""
        backend.synchronise(self._into)
        begin_s = time.perf_counter()
        namespace(self._a).matmul(self._a, self._b, out=self._into)
        backend.synchronise(self._into)
        return time.perf_counter() - begin_s


def _repeated(rows: Array, side: int, on: str) -> Array:
    matrix = backend.empty((side, side), rows.dtype, on)
    for first in range(0, side, len(rows)):
        matrix[first : first + len(rows)] = rows[: side - first]
    return matrix


def matmul_flops_per_s(dtype: np.dtype, on: str = "cpu", seconds: float = 0.1, side: int = 0) -> float:
    """Return the highest measured speed of a product of square matrices with ``side`` rows, in flop/s. Local.

    ``on``: "cpu" or "gpu". ``seconds``: minimum duration of the measurement. ``side`` 0: the value in `SIDE`.
    """
    # The fastest of at least 3 products. A product counts as 2 n^3 operations, n = ``side``.
    product = MatrixProduct(dtype, on, side)
    product.run()  # touch the pages, start the threads
    begin_s, best_s, count = time.perf_counter(), float("inf"), 0
    while count < LEAST or time.perf_counter() - begin_s < seconds:
        best_s = min(best_s, product.run())
        count += 1
    return product.flops / best_s


def blas(environment: Mapping[str, str] = os.environ) -> str:
    """Return a log text: names of OpenBLAS kernels, and the variables of ``environment`` that affect BLAS."""
    names = [f"kernels {core}" for core in map(_core, _bundled()) if core]
    variables = [f"{name}={value}" for name, value in sorted(environment.items()) if name.startswith(_VARIABLES)]
    return ", ".join([*names, *variables]) or "not known"


def _bundled() -> list[Path]:
    return sorted(Path(np.__file__).parents[1].glob("numpy.libs/lib*openblas*"))


def _core(library: Path) -> str:
    loaded = ctypes.CDLL(str(library))
    for name in ("scipy_openblas_get_corename64_", "openblas_get_corename64_", "openblas_get_corename"):
        if hasattr(loaded, name):
            ask = getattr(loaded, name)
            ask.restype = ctypes.c_char_p
            return str(ask().decode())
    return ""
