"""Activation functions: GELU in its tanh form (Hendrycks, Gimpel 2016), ReLU, and SwiGLU (Shazeer 2020).

GELU is ``x (1 + tanh u) / 2`` with ``u = sqrt(2 / pi) (x + 0.044715 x^3)``. Errors in machine epsilons of the dtype:
GELU ``2 |x|``, gradient of GELU ``4 |dy|``; SwiGLU ``3 |gate value|``, gradients of SwiGLU ``4 |dy value|`` (gates) and
``3 |dy gate|`` (values).
"""

from typing import Any, Final

import numpy as np

from hpcdist.arrays.backend import Array, is_device
from hpcdist.arrays.jit import jit
from hpcdist.models.config import ACTIVATIONS
from hpcdist.models.layers import cuda_kernels
from hpcdist.models.layers.linear import add_to_rows
from hpcdist.models.layers.vector_math import REORDER, SAMPLE_DTYPES, exp
from hpcdist.models.stage import Saved

ROOT: Final = 0.7978845608028654  # sqrt(2 / pi)
CUBIC: Final = 0.044715
_LINEAR, _CUBE = -2 * ROOT, -2 * ROOT * CUBIC  # coefficients of -2 u
_BOUND: Final = 32.0  # for |x| above, exp(-2 |u|) is 0 in both precisions
IN_ORDER: Final[Any] = REORDER - {"reassoc"}  # multiply by a zero gate before a product that may overflow


class LocalActivation:
    """Activation functions of contiguous arrays: "gelu", "relu" or "swiglu"."""

    def forward(
        self, x: Array, kind: str, saved: Saved, *, name: str = "activation", bias: Array | None = None
    ) -> Array:
        assert kind in ACTIVATIONS, f"unknown activation {kind!r}; choose one of {', '.join(ACTIVATIONS)}"
        # swiglu: w gates, then w values; silu(gate) * value
        width = x.shape[-1] // 2 if kind == "swiglu" else x.shape[-1]
        y = saved.empty(f"{name}.y", (*x.shape[:-1], width), x.dtype)
        saved.keep(f"{name}.x", x)
        saved.keep(f"{name}.kind", kind)
        if is_device(x):
            run = {"relu": cuda_kernels.relu, "swiglu": cuda_kernels.swiglu, "gelu": cuda_kernels.gelu}[kind]
            run(x.reshape(-1, x.shape[-1]), y.reshape(-1, width), bias)
            return y
        if bias is not None:
            add_to_rows(x.reshape(-1, x.shape[-1]), bias)
        if kind == "relu":
            np.maximum(x, 0, out=y)
        elif kind == "swiglu":
            _swiglu(x.reshape(-1, 2 * width), y.reshape(-1, width))
        else:
            _gelu(x.reshape(-1), y.reshape(-1), x.dtype.type(_LINEAR), x.dtype.type(_CUBE))
        return y

    def backward(self, dy: Array, saved: Saved, *, name: str = "activation") -> Array:
        x: Array = saved[f"{name}.x"]
        kind = saved[f"{name}.kind"]
        if kind == "relu":
            (cuda_kernels.relu_backward if is_device(x) else _relu_backward)(x.reshape(-1), dy.reshape(-1))
        elif kind == "swiglu":
            rows, drows = x.reshape(-1, x.shape[-1]), dy.reshape(-1, dy.shape[-1])
            (cuda_kernels.swiglu_backward if is_device(x) else _swiglu_backward)(rows, drows)
        elif is_device(x):
            cuda_kernels.gelu_backward(x, dy)
        else:
            of = x.dtype.type
            _gelu_backward(x.reshape(-1), dy.reshape(-1), of(_LINEAR), of(_CUBE), of(3 * _CUBE), of(_BOUND))
        return x


def _swiglu(x: Array, y: Array) -> None:
    flat, width = x.reshape(-1), y.shape[1]
    _swiglu_rows(flat, flat[width:], y.reshape(-1), width)


def _swiglu_backward(x: Array, dy: Array) -> None:
    flat, width = x.reshape(-1), dy.shape[1]
    _swiglu_rows_backward(flat, flat[width:], dy.reshape(-1), width)


# Constants are typed arguments: a Python float would turn float32 arithmetic into float64.
@jit(fastmath=REORDER)
def _gelu(x: Any, y: Any, linear: Any, cube: Any) -> None:
    one = x.dtype.type(1)
    for i in range(x.size):
        v = x[i]
        y[i] = v / (one + exp(v * (linear + cube * v * v)))


@jit(fastmath=REORDER)
def _gelu_backward(x: Any, dy: Any, linear: Any, cube: Any, slope: Any, bound: Any) -> None:
    one = x.dtype.type(1)
    for i in range(x.size):
        v = x[i]
        e = exp(v * (linear + cube * v * v))
        share = one / (one + e)
        rest = one - share if e > one else e * share  # 1 - share, without the rounding of a share near 1
        # Beyond the bound `rest` or `share` is 0, and the square of v must not overflow. NaN is preserved.
        v = bound if v > bound else v
        v = -bound if v < -bound else v
        x[i] = dy[i] * share * (one - v * rest * (linear + slope * v * v))


@jit(fastmath=REORDER)
def _relu_backward(x: Any, dy: Any) -> None:
    # Multiply by 0 instead of writing 0, so that NaN and infinity of dy stay visible.
    one, zero = x.dtype.type(1), x.dtype.type(0)
    for i in range(x.size):
        x[i] = dy[i] * (one if x[i] > zero else zero)


# Arrays are 1-D: `gates` and `values` start at the first element of their kind in the same memory, rows are 2 width
# apart. With two views of a row, the compiler would have to assume that they overlap.
@jit(fastmath=IN_ORDER)
def _swiglu_rows(gates: Any, values: Any, y: Any, width: int) -> None:
    one = y.dtype.type(1)
    for first in range(0, y.size, width):
        gate, value, out = gates[2 * first :][:width], values[2 * first :][:width], y[first:][:width]
        for j in range(width):
            out[j] = gate[j] / (one + exp(-gate[j])) * value[j]


@jit(fastmath=IN_ORDER)
def _swiglu_rows_backward(gates: Any, values: Any, dy: Any, width: int) -> None:
    one = dy.dtype.type(1)
    for first in range(0, dy.size, width):
        gate, value, drow = gates[2 * first :][:width], values[2 * first :][:width], dy[first:][:width]
        for j in range(width):
            g, d = gate[j], drow[j]
            e = exp(-g)
            share = one / (one + e)
            rest = one - share if e > one else e * share  # 1 - share
            gate[j] = d * value[j] * share * (one + g * rest)
            value[j] = d * (g * share)


for _dtype in SAMPLE_DTYPES:
    _one, _line = np.dtype(_dtype).type(1), np.ones(2, _dtype)
    _gelu.sample(lambda x=_line, s=_one: (x, x.copy(), s, s))
    _gelu_backward.sample(lambda x=_line, s=_one: (x.copy(), x, s, s, s, s))
    _relu_backward.sample(lambda x=_line: (x.copy(), x))
    _swiglu_rows.sample(lambda x=_line: (x, x[1:], x[1:].copy(), 1))
    _swiglu_rows_backward.sample(lambda x=_line: (x.copy(), x[1:].copy(), x[1:], 1))
