"""Layer normalisation (Ba, Kiros, Hinton 2016) and RMS normalisation (Zhang, Sennrich 2019).

Upper bounds of the errors for up to a few thousand tokens, with e = machine epsilon, n = a normalised row, far = 1 +
|mean| / deviation (1 for RMS), and g = dy scale:

    y        ``4 e far (1 + |n|) |scale| + 2 e |bias|``
    dx       ``4 e far (|g| + (1 + |n|) rms(g)) / deviation``
    dscale   ``4 e sum(|dy| far (1 + |n|))``
    dbias    ``4 e sum |dy|``

Layer norm is ``y = (x - mean) / sqrt(variance + epsilon) * scale + bias``. RMS norm is ``y = x / sqrt(mean of squares +
epsilon) * scale``.
"""

from typing import Any

import numpy as np

from hpcdist.arrays.backend import Array, is_device
from hpcdist.arrays.dtypes import accumulation_dtype
from hpcdist.arrays.jit import jit
from hpcdist.models.config import EPSILON, NORMS
from hpcdist.models.layers import cuda_kernels
from hpcdist.models.layers.vector_math import REORDER, SAMPLE_DTYPES
from hpcdist.models.stage import Gradients, Parameters, Saved


class LocalNorm:
    """Layer norm ("layer") or RMS norm ("rms") over the last dimension. RMS norm has no bias."""

    def forward(
        self,
        parameters: Parameters,
        prefix: str,
        x: Array,
        saved: Saved,
        kind: str = "layer",
        epsilon: float = EPSILON,
        residual: Array | None = None,
    ) -> Array:
        assert kind in NORMS, f"{prefix} is a norm of the kind {kind!r}; there are {', '.join(NORMS)}"
        scale = parameters[f"{prefix}.scale"]
        y = saved.empty(f"{prefix}.y", x.shape, x.dtype)
        saved.keep(f"{prefix}.x", x)
        saved.keep(f"{prefix}.kind", kind)
        rows, out, added = _rows(x), _rows(y), x.dtype.type(epsilon)
        shape = rows.shape[0], 1 if kind == "rms" else 2
        statistics = saved.empty(f"{prefix}.statistics", shape, accumulation_dtype(x.dtype))
        bias = None if kind == "rms" else parameters[f"{prefix}.bias"]
        if is_device(x):
            addend = None if residual is None else _rows(residual)
            if bias is None:
                cuda_kernels.rms(rows, scale, added, out, statistics, addend)
            else:
                cuda_kernels.norm(rows, scale, bias, added, out, statistics, addend)
            return y
        if residual is not None:
            x += residual
        if bias is None:
            _rms(rows, scale, added, out, statistics)
        else:
            _forward(rows, scale, bias, added, out, statistics)
        return y

    def backward(
        self, parameters: Parameters, gradients: Gradients, prefix: str, dy: Array, saved: Saved, residual: Array | None
    ) -> Array:
        x, scale = saved[f"{prefix}.x"], parameters[f"{prefix}.scale"]
        dx = saved.scratch(f"{prefix}.dx", x.shape, x.dtype) if residual is None else residual
        centred, adds = saved[f"{prefix}.kind"] == "layer", residual is not None
        targets = [gradients.into(f"{prefix}.{name}") for name in ("scale", "bias")[: 1 + centred]]
        arrays = _rows(dy), _rows(x), scale, saved[f"{prefix}.statistics"], _rows(dx)
        if is_device(x):
            cuda_kernels.norm_backward(*arrays, adds, *targets)
            return dx
        for array, add in ((dx, adds), *targets):
            if not add:
                array[...] = 0
        (_backward if centred else _rms_backward)(*arrays, *(into for into, _ in targets))
        return dx


def _rows(x: Array) -> Array:
    return x.reshape(-1, x.shape[-1])


@jit(fastmath=REORDER)
def _forward(x: Any, scale: Any, bias: Any, epsilon: Any, y: Any, statistics: Any) -> None:
    # x, y (tokens, hidden); statistics (tokens, 2): mean and 1 / standard deviation. Constants derive from `epsilon`:
    # a Python float would turn float32 arithmetic into float64.
    hidden = x.shape[1]
    zero = epsilon - epsilon
    share = x.dtype.type(1.0 / hidden)
    for token in range(x.shape[0]):
        total = zero
        for j in range(hidden):
            total += x[token, j]
        mean = total * share
        total = zero
        for j in range(hidden):
            total += (x[token, j] - mean) * (x[token, j] - mean)
        inverse = x.dtype.type(1.0 / np.sqrt(total * share + epsilon))
        for j in range(hidden):
            y[token, j] = (x[token, j] - mean) * inverse * scale[j] + bias[j]
        statistics[token, 0] = mean
        statistics[token, 1] = inverse


@jit(fastmath=REORDER)
def _backward(dy: Any, x: Any, scale: Any, statistics: Any, dx: Any, dscale: Any, dbias: Any) -> None:
    # Adds to dx (tokens, hidden), dscale (hidden,) and dbias (hidden,).
    hidden = x.shape[1]
    share = x.dtype.type(1.0 / hidden)
    for token in range(x.shape[0]):
        mean, inverse = statistics[token, 0], statistics[token, 1]
        sum_g = x.dtype.type(0.0)
        sum_gx = x.dtype.type(0.0)
        for j in range(hidden):
            g = dy[token, j] * scale[j]
            sum_g += g
            sum_gx += g * (x[token, j] - mean)
        offset = sum_g * share
        slope = sum_gx * share * inverse * inverse
        for j in range(hidden):
            centred = x[token, j] - mean
            dx[token, j] += (dy[token, j] * scale[j] - offset - centred * slope) * inverse
            dscale[j] += dy[token, j] * centred * inverse
            dbias[j] += dy[token, j]


@jit(fastmath=REORDER)
def _rms(x: Any, scale: Any, epsilon: Any, y: Any, statistics: Any) -> None:
    # x, y (tokens, hidden); statistics (tokens, 1): 1 / root mean square.
    hidden = x.shape[1]
    share = x.dtype.type(1.0 / hidden)
    for token in range(x.shape[0]):
        total = epsilon - epsilon
        for j in range(hidden):
            total += x[token, j] * x[token, j]
        inverse = x.dtype.type(1.0 / np.sqrt(total * share + epsilon))
        for j in range(hidden):
            y[token, j] = x[token, j] * inverse * scale[j]
        statistics[token, 0] = inverse


@jit(fastmath=REORDER)
def _rms_backward(dy: Any, x: Any, scale: Any, statistics: Any, dx: Any, dscale: Any) -> None:
    # Adds to dx (tokens, hidden) and dscale (hidden,).
    hidden = x.shape[1]
    share = x.dtype.type(1.0 / hidden)
    for token in range(x.shape[0]):
        inverse = statistics[token, 0]
        total = x.dtype.type(0.0)
        for j in range(hidden):
            total += dy[token, j] * scale[j] * x[token, j]
        slope = total * share * inverse * inverse
        for j in range(hidden):
            dx[token, j] += (dy[token, j] * scale[j] - x[token, j] * slope) * inverse
            dscale[j] += dy[token, j] * x[token, j] * inverse


def _sample(dtype: str) -> tuple[Any, ...]:
    row, block = np.ones(2, dtype), np.ones((1, 2), dtype)
    return row, block


for _dtype in SAMPLE_DTYPES:
    _row, _block = _sample(_dtype)
    _forward.sample(lambda r=_row, b=_block: (b, r, r, r.dtype.type(1), b.copy(), b.copy()))
    _backward.sample(lambda r=_row, b=_block: (b, b, r, b, b.copy(), r.copy(), r.copy()))
    _rms.sample(lambda r=_row, b=_block: (b, r, r.dtype.type(1), b.copy(), b.copy()))
    _rms_backward.sample(lambda r=_row, b=_block: (b, b, r, b, b.copy(), r.copy()))
