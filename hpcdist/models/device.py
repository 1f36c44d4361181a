"""What the operations of a model compute on a GPU: the same functions as beside their loops for the CPU."""

from typing import Any, Final

from hpcdist.arrays.backend import Array, namespace

ROOT: Final = 0.7978845608028654  # sqrt(2 / pi)
CUBIC: Final = 0.044715


def gelu(x: Array, y: Array) -> None:
    """Write the GELU of x to y."""
    y[...] = 0.5 * x * (1 + namespace(x).tanh(ROOT * (x + CUBIC * x * x * x)))


def gelu_backward(x: Array, dy: Array) -> None:
    """Overwrite x with the gradient dy gelu'(x)."""
    t = namespace(x).tanh(ROOT * (x + CUBIC * x * x * x))
    x[...] = dy * 0.5 * ((1 + t) + x * (1 - t * t) * ROOT * (1 + 3 * CUBIC * x * x))


def norm(x: Array, scale: Array, bias: Array, epsilon: Any, y: Array, statistics: Array) -> None:
    """Normalise the rows of x into y; see `hpcdist.models.norm`."""
    xp = namespace(x)
    statistics[:, 0] = x.mean(axis=1)
    centred = x - statistics[:, :1]
    statistics[:, 1] = 1 / xp.sqrt((centred * centred).mean(axis=1) + epsilon)
    y[...] = centred * statistics[:, 1:] * scale + bias


def norm_backward(dy: Array, x: Array, scale: Array, statistics: Array, dx: Array, dscale: Array, dbias: Array) -> None:
    """Add to dx, dscale and dbias; see `hpcdist.models.norm`."""
    normal = (x - statistics[:, :1]) * statistics[:, 1:]
    g = dy * scale
    dx += (g - g.mean(axis=1, keepdims=True) - normal * (g * normal).mean(axis=1, keepdims=True)) * statistics[:, 1:]
    dscale += (dy * normal).sum(axis=0)
    dbias += dy.sum(axis=0)


def shift(x: Array, first: int, last: int, width: int, ahead: int, scale: float) -> None:
    """As `hpcdist.models.softmax.shift`."""
    xp = namespace(x)
    rows = x[:, first:last, :width]
    if first + 1 + ahead < width:  # a row has hidden columns
        hidden = xp.arange(width)[None, :] > xp.arange(first, last)[:, None] + ahead
        rows[...] = xp.where(hidden, -xp.inf, rows)
    rows -= rows.max(axis=2, keepdims=True)
    rows *= scale


def normalise(x: Array, first: int, last: int, width: int, sums: Array) -> None:
    """As `hpcdist.models.softmax.normalise`."""
    rows = x[:, first:last, :width]
    sums[:, first:last] = rows.sum(axis=2)
    rows /= sums[:, first:last, None]


def softmax_backward(p: Array, d: Array, first: int, last: int, width: int, scale: float) -> None:
    """As `hpcdist.models.softmax.softmax_backward`."""
    rows, gradient = p[:, first:last, :width], d[:, first:last, :width]
    gradient -= (rows * gradient).sum(axis=2, keepdims=True)
    gradient *= rows
    gradient *= scale
