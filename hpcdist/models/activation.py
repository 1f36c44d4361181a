"""Elementwise functions: GELU in its tanh form (Hendrycks, Gimpel 2016) and ReLU."""

from typing import Any, Final

import numpy as np

from hpcdist.arrays.backend import Array, is_device, namespace
from hpcdist.arrays.jit import jit
from hpcdist.models import device
from hpcdist.models.device import CUBIC, ROOT
from hpcdist.models.kernels import REORDER, SAMPLE_DTYPES
from hpcdist.models.stage import Saved

BLOCK: Final = 16384  # elements: three blocks of float64 stay in a second-level cache


class LocalActivation:
    """GELU or ReLU of contiguous arrays, by the kind "gelu" or "relu"."""

    def forward(self, x: Array, kind: str, saved: Saved, name: str = "activation") -> Array:
        """Return the function ``kind`` of x; x is kept and must stay unchanged until backward."""
        y = saved.empty(f"{name}.y", x.shape, x.dtype)
        saved.keep(f"{name}.x", x)
        saved.keep(f"{name}.kind", kind)
        if kind == "relu":
            namespace(x).maximum(x, 0, out=y)
        elif is_device(x):
            device.gelu(x, y)
        else:
            gelu(x.reshape(-1), y.reshape(-1))
        return y

    def backward(self, dy: Array, saved: Saved, name: str = "activation") -> Array:
        """Return dx, written over the x that was kept."""
        x: Array = saved[f"{name}.x"]
        if saved[f"{name}.kind"] == "relu":
            namespace(x).multiply(dy, x > 0, out=x)
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


for _dtype in SAMPLE_DTYPES:
    _one, _line = np.dtype(_dtype).type(1), np.ones(2, _dtype)
    _argument.sample(lambda x=_line, s=_one: (x, x.copy(), s, s))
    _finish.sample(lambda x=_line, s=_one: (x, x.copy(), s, s))
    _finish_backward.sample(lambda x=_line, s=_one: (x.copy(), x, x, s, s, s, s))
