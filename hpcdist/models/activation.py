"""Elementwise functions: GELU in its tanh form (Hendrycks, Gimpel 2016), ReLU, and SwiGLU (Shazeer 2020)."""

from typing import Any, Final

import numpy as np

from hpcdist.arrays.backend import Array, is_device
from hpcdist.arrays.jit import jit
from hpcdist.models import device
from hpcdist.models.kernels import REORDER, SAMPLE_DTYPES
from hpcdist.models.stage import Saved

ROOT: Final = 0.7978845608028654  # sqrt(2 / pi)
CUBIC: Final = 0.044715
BLOCK: Final = 16384  # elements: three blocks of float64 stay in a second-level cache


KINDS: Final = ("gelu", "relu", "swiglu")


class LocalActivation:
    """GELU, ReLU or SwiGLU of contiguous arrays, by the kind "gelu", "relu" or "swiglu".

    SwiGLU takes x (..., 2 w), first the gates, then the values, and gives silu(gate) value (..., w).
    """

    def forward(self, x: Array, kind: str, saved: Saved, name: str = "activation") -> Array:
        """Return the function ``kind`` of x; x is kept and must stay unchanged until backward."""
        assert kind in KINDS, f"{name} is of the kind {kind!r}; there are {', '.join(KINDS)}"
        width = x.shape[-1] // 2 if kind == "swiglu" else x.shape[-1]
        y = saved.empty(f"{name}.y", (*x.shape[:-1], width), x.dtype)
        saved.keep(f"{name}.x", x)
        saved.keep(f"{name}.kind", kind)
        if kind == "relu":
            device.relu(x, y) if is_device(x) else np.maximum(x, 0, out=y)
        elif kind == "swiglu":
            (device.swiglu if is_device(x) else swiglu)(x.reshape(-1, 2 * width), y.reshape(-1, width))
        elif is_device(x):
            device.gelu(x, y)
        else:
            gelu(x.reshape(-1), y.reshape(-1))
        return y

    def backward(self, dy: Array, saved: Saved, name: str = "activation") -> Array:
        """Return dx, written over the x that was kept."""
        x: Array = saved[f"{name}.x"]
        kind = saved[f"{name}.kind"]
        if kind == "relu":
            device.relu_backward(x, dy) if is_device(x) else np.multiply(dy, x > 0, out=x)
        elif kind == "swiglu":
            rows, drows = x.reshape(-1, x.shape[-1]), dy.reshape(-1, dy.shape[-1])
            if is_device(x):
                device.swiglu_backward(rows, drows)
            else:
                block = saved.scratch("swiglu.tanh", (_rows_of_a_block(drows), drows.shape[1]), x.dtype)
                swiglu_backward(rows, drows, block)
        elif is_device(x):
            device.gelu_backward(x, dy)
        else:
            block = saved.scratch("gelu.tanh", (min(BLOCK, x.size),), x.dtype)
            gelu_backward(x.reshape(-1), dy.reshape(-1), block)
        return x


def gelu(x: Array, y: Array) -> None:
    """Write the GELU of x to y, both 1-D and contiguous."""
    # numpy's own tanh is vector code (0.2 ns an element in float32), the one inside a numba loop a scalar call (28 ns):
    # so the loop is cut around it, in blocks that stay in cache.
    root, cubic = x.dtype.type(ROOT), x.dtype.type(CUBIC)
    half, one = x.dtype.type(0.5), x.dtype.type(1)
    for start in range(0, x.size, BLOCK):
        part, t = x[start : start + BLOCK], y[start : start + BLOCK]
        _argument(part, t, root, cubic)
        np.tanh(t, out=t)
        _finish(part, t, half, one)


def gelu_backward(x: Array, dy: Array, block: Array) -> None:
    """Overwrite x with the gradient dy gelu'(x); ``block`` is a temporary of BLOCK elements."""
    root, cubic = x.dtype.type(ROOT), x.dtype.type(CUBIC)
    half, one, slope = x.dtype.type(0.5), x.dtype.type(1), x.dtype.type(3 * CUBIC)
    for start in range(0, x.size, BLOCK):
        part = x[start : start + BLOCK]
        t = block[: part.size]
        _argument(part, t, root, cubic)
        np.tanh(t, out=t)
        _finish_backward(part, t, dy[start : start + BLOCK], root, slope, half, one)


def swiglu(x: Array, y: Array) -> None:
    """Write silu(gate) value to y (rows, w) for x (rows, 2 w)."""
    # The logistic function as (1 + tanh(gate / 2)) / 2: no exponential that overflows.
    half, one = x.dtype.type(0.5), x.dtype.type(1)
    step = _rows_of_a_block(y)
    for start in range(0, y.shape[0], step):
        part, t = x[start : start + step], y[start : start + step]
        _half_gate(part, t, half)
        np.tanh(t, out=t)
        _gated(part, t, half, one)


def swiglu_backward(x: Array, dy: Array, block: Array) -> None:
    """Overwrite x (rows, 2 w) with the gradient for dy (rows, w); ``block`` (rows of a block, w) is a temporary."""
    half, one = x.dtype.type(0.5), x.dtype.type(1)
    for start in range(0, dy.shape[0], block.shape[0]):
        part = x[start : start + block.shape[0]]
        t = block[: part.shape[0]]
        _half_gate(part, t, half)
        np.tanh(t, out=t)
        _gated_backward(part, t, dy[start : start + block.shape[0]], half, one)


def _rows_of_a_block(y: Array) -> int:
    return max(1, min(y.shape[0], BLOCK // max(1, y.shape[1])))


@jit(fastmath=REORDER)
def _argument(x: Any, t: Any, root: Any, cubic: Any) -> None:
    for i in range(x.size):
        t[i] = root * (x[i] + cubic * x[i] * x[i] * x[i])


@jit(fastmath=REORDER)
def _finish(x: Any, t: Any, half: Any, one: Any) -> None:
    for i in range(x.size):
        t[i] = half * x[i] * (one + t[i])


@jit(fastmath=REORDER)
def _finish_backward(x: Any, t: Any, dy: Any, root: Any, slope: Any, half: Any, one: Any) -> None:
    for i in range(x.size):
        inner = root * (one + slope * x[i] * x[i])
        x[i] = dy[i] * half * ((one + t[i]) + x[i] * (one - t[i] * t[i]) * inner)


@jit(fastmath=REORDER)
def _half_gate(x: Any, t: Any, half: Any) -> None:
    for row in range(t.shape[0]):
        for j in range(t.shape[1]):
            t[row, j] = half * x[row, j]


@jit(fastmath=REORDER)
def _gated(x: Any, t: Any, half: Any, one: Any) -> None:
    width = t.shape[1]
    for row in range(t.shape[0]):
        gates, values = x[row, :width], x[row, width:]
        for j in range(width):
            t[row, j] = half * gates[j] * (one + t[row, j]) * values[j]


@jit(fastmath=REORDER)
def _gated_backward(x: Any, t: Any, dy: Any, half: Any, one: Any) -> None:
    width = t.shape[1]
    for row in range(t.shape[0]):
        gates, values = x[row, :width], x[row, width:]
        for j in range(width):
            gate, share = gates[j], half * (one + t[row, j])
            gates[j] = dy[row, j] * values[j] * share * (one + gate * (one - share))
            values[j] = dy[row, j] * gate * share


for _dtype in SAMPLE_DTYPES:
    _one, _line = np.dtype(_dtype).type(1), np.ones(2, _dtype)
    _argument.sample(lambda x=_line, s=_one: (x, x.copy(), s, s))
    _finish.sample(lambda x=_line, s=_one: (x, x.copy(), s, s))
    _finish_backward.sample(lambda x=_line, s=_one: (x.copy(), x, x, s, s, s, s))
    _pair = np.ones((1, 2), _dtype)
    _half_gate.sample(lambda x=_pair, s=_one: (x, x[:, :1].copy(), s))
    _gated.sample(lambda x=_pair, s=_one: (x, x[:, :1].copy(), s, s))
    _gated_backward.sample(lambda x=_pair, s=_one: (x.copy(), x[:, :1].copy(), x[:, :1].copy(), s, s))
