"""Softmax over the rows of (batch, rows, columns) arrays, in place; causal or over all columns."""

from typing import Any

import numpy as np

from hpcdist.arrays.backend import Array, is_device
from hpcdist.arrays.jit import jit
from hpcdist.models import device
from hpcdist.models.kernels import REORDER, REORDER_MAXIMUM, SAMPLE_DTYPES


def shift(x: Array, first: int, last: int, width: int, ahead: int, scale: float) -> None:
    """Subtract the maximum from rows [first, last) of x and multiply by ``scale`` (> 0): the exponents of a softmax.

    Row i has ``min(width, i + 1 + ahead)`` valid columns; the others below ``width`` become -inf. ``ahead`` is 0 in a
    causal softmax and ``width`` in one over all columns. Columns from ``width`` on are not touched.
    """
    if is_device(x):
        device.shift(x, first, last, width, ahead, scale)
    else:
        _shift(x, first, last, width, ahead, x.dtype.type(scale), x.dtype.type(-np.inf))


def normalise(x: Array, first: int, last: int, width: int, sums: Array) -> None:
    """Divide rows [first, last) of x by their sums over the first ``width`` columns; write those to ``sums``.

    ``sums`` is (batch, rows) of the dtype of x.
    """
    if is_device(x):
        device.normalise(x, first, last, width, sums)
    else:
        _normalise(x, first, last, width, sums)


def softmax_backward(p: Array, d: Array, first: int, last: int, width: int, scale: float) -> None:
    """Overwrite the gradient d of rows [first, last) of the probabilities p with that of the scores before `shift`."""
    if is_device(p):
        device.softmax_backward(p, d, first, last, width, scale)
    else:
        _backward(p, d, first, last, width, p.dtype.type(scale))


@jit(fastmath=REORDER_MAXIMUM)
def _shift(x: Any, first: int, last: int, width: int, ahead: int, scale: Any, masked: Any) -> None:
    for b in range(x.shape[0]):
        for i in range(first, last):
            valid = min(width, i + 1 + ahead)
            top = x[b, i, 0]
            for j in range(1, valid):
                top = max(top, x[b, i, j])
            for j in range(valid):
                x[b, i, j] = (x[b, i, j] - top) * scale
            for j in range(valid, width):
                x[b, i, j] = masked


@jit(fastmath=REORDER)
def _normalise(x: Any, first: int, last: int, width: int, sums: Any) -> None:
    for b in range(x.shape[0]):
        for i in range(first, last):
            total = x[b, i, 0]
            for j in range(1, width):
                total += x[b, i, j]
            sums[b, i] = total
            share = x.dtype.type(1.0 / total)
            for j in range(width):
                x[b, i, j] *= share


@jit(fastmath=REORDER)
def _backward(p: Any, d: Any, first: int, last: int, width: int, scale: Any) -> None:
    for b in range(p.shape[0]):
        for i in range(first, last):
            total = p[b, i, 0] * d[b, i, 0]
            for j in range(1, width):
                total += p[b, i, j] * d[b, i, j]
            for j in range(width):
                d[b, i, j] = p[b, i, j] * (d[b, i, j] - total) * scale


for _dtype in SAMPLE_DTYPES:
    _one, _cube = np.dtype(_dtype).type(1), np.ones((1, 2, 2), _dtype)
    _shift.sample(lambda x=_cube, s=_one: (x.copy(), 0, 2, 2, 0, s, s))
    _normalise.sample(lambda x=_cube: (x.copy(), 0, 2, 2, x[0].copy()))
    _backward.sample(lambda x=_cube, s=_one: (x, x.copy(), 0, 2, 2, s))
