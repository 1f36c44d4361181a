"""Convolution of pictures (channels last), by matrix products over unfolded neighbourhoods (im2col).

Backward unfolds again, to save memory. Symbols: n samples, h x w input pixels, p x q output pixels, c channels.
"""

from collections.abc import Iterator
from typing import Any, Final

import numpy as np

from hpcdist.arrays.backend import Array, is_device, matmul, namespace
from hpcdist.arrays.jit import jit
from hpcdist.models.layers.linear import add_to_rows, gradient_of_bias
from hpcdist.models.layers.vector_math import SAMPLE_DTYPES
from hpcdist.models.stage import Gradients, Parameters, Saved

SIZE: Final = 3  # side of the window, with zero padding of one pixel
CACHE_BYTES: Final = 1 << 20  # of rows at a time on a CPU
DEVICE_BYTES: Final = 1 << 28  # of rows at a time on a GPU, which is faster with a few large products


def output_side(side: int, stride: int) -> int:
    """Return the output height (or width) of a convolution whose input height (or width) is ``side``."""
    return (side - 1) // stride + 1


def convolve(parameters: Parameters, prefix: str, x: Array, stride: int, saved: Saved) -> Array:
    """Convolve n pictures x (n, height, width, inputs). Return (n, output height, output width, outputs)."""
    # x must not change until backward. `PREFIX.weight` has the shape (outputs, SIZE, SIZE, inputs).
    weight = _as_matrix(parameters[f"{prefix}.weight"])
    samples, height, width, _ = x.shape
    shape = samples, output_side(height, stride), output_side(width, stride), weight.shape[0]
    y = saved.empty(f"{prefix}.y", shape, x.dtype)
    saved.keep(f"{prefix}.x", x)
    saved.keep(f"{prefix}.stride", stride)
    for part, rows in _unfolded(x, shape, stride, saved):
        matmul(rows, weight.T, out=y[part].reshape(-1, weight.shape[0]))
    add_to_rows(y.reshape(-1, weight.shape[0]), parameters[f"{prefix}.bias"])
    return y


def convolve_backward(
    parameters: Parameters, gradients: Gradients, prefix: str, dy: Array, saved: Saved, wants_dx: bool = True
) -> Array | None:
    """Compute the weight and bias gradients. Return the gradient of x, or None if ``wants_dx`` is False."""
    x, stride = saved[f"{prefix}.x"], saved[f"{prefix}.stride"]
    weight = _as_matrix(parameters[f"{prefix}.weight"])
    dweight, add = gradients.into(f"{prefix}.weight")
    into = _as_matrix(dweight)
    outputs = dy.shape[-1]
    product = saved.scratch("convolution.dweight", into.shape, into.dtype)
    dx = saved.scratch("convolution.dx", x.shape, x.dtype) if wants_dx else None
    if dx is not None:
        assert not namespace(x).may_share_memory(dx, dy), (
            f"{prefix}: dy lies in the scratch array of dx; put another operation between the convolutions"
        )
        dx[...] = 0
    if not add and not len(x):
        into[...] = 0
    for part, rows in _unfolded(x, dy.shape, stride, saved):
        d = dy[part].reshape(-1, outputs)
        if add or part.start:
            matmul(d.T, rows, out=product)
            into += product
        else:
            matmul(d.T, rows, out=into)
        if dx is not None:
            matmul(d, weight, out=rows)  # reuse the memory of the rows
            _fold(rows, dx[part], dy.shape[1], dy.shape[2], stride)
    gradient_of_bias(gradients, prefix, dy)
    return dx


def _as_matrix(weight: Array) -> Array:
    return weight.reshape(weight.shape[0], -1)


def _unfolded(x: Array, shape: tuple[int, ...], stride: int, saved: Saved) -> Iterator[tuple[slice, Array]]:
    samples, high, wide = shape[:3]
    columns = SIZE * SIZE * x.shape[-1]
    room = (DEVICE_BYTES if is_device(x) else CACHE_BYTES) // x.dtype.itemsize
    at_a_time = min(samples, max(1, room // (high * wide * columns)))
    for first in range(0, samples, max(1, at_a_time)):
        part = slice(first, min(first + at_a_time, samples))
        rows = saved.scratch("convolution.rows", ((part.stop - first) * high * wide, columns), x.dtype)
        if is_device(x):
            _unfold_device(x[part], rows, high, wide, stride)
        else:
            _unfold_rows(x[part], rows, high, wide, stride)
        # slice of samples, and their im2col array: a row per output pixel
        yield part, rows


def _fold(rows: Array, dx: Array, high: int, wide: int, stride: int) -> None:
    if is_device(rows):
        _fold_device(rows, dx, high, wide, stride)
    else:
        _fold_rows(rows, dx, high, wide, stride)


@jit
def _unfold_rows(x: Any, rows: Any, high: Any, wide: Any, stride: Any) -> None:
    # x (n, h, w, c), rows (n p q, SIZE SIZE c). A row of a window is contiguous in both.
    samples, height, width, channels = x.shape
    lines = x.reshape(samples, height, width * channels)
    length = SIZE * channels
    zero = x.dtype.type(0)
    for n in range(samples):
        for p in range(high):
            for q in range(wide):
                row = rows[(n * high + p) * wide + q]
                left = (q * stride - SIZE // 2) * channels
                for i in range(SIZE):
                    above = p * stride + i - SIZE // 2
                    into = row[i * length : (i + 1) * length]
                    if above < 0 or above >= height:
                        for k in range(length):
                            into[k] = zero
                    elif left >= 0 and left + length <= width * channels:
                        line = lines[n, above, left : left + length]
                        for k in range(length):
                            into[k] = line[k]
                    else:
                        for k in range(length):
                            inside = 0 <= left + k < width * channels
                            into[k] = lines[n, above, left + k] if inside else zero


@jit
def _fold_rows(rows: Any, dx: Any, high: Any, wide: Any, stride: Any) -> None:
    # Adds to dx (n, h, w, c).
    samples, height, width, channels = dx.shape
    lines = dx.reshape(samples, height, width * channels)
    length = SIZE * channels
    for n in range(samples):
        for p in range(high):
            for q in range(wide):
                row = rows[(n * high + p) * wide + q]
                left = (q * stride - SIZE // 2) * channels
                first, last = max(0, -left), min(length, width * channels - left)
                for i in range(SIZE):
                    above = p * stride + i - SIZE // 2
                    if above < 0 or above >= height:
                        continue
                    line = lines[n, above, left + first : left + last]
                    addend = row[i * length + first : i * length + last]
                    for k in range(last - first):
                        line[k] += addend[k]


def _shifted(high: int, wide: int, height: int, width: int, stride: int) -> Iterator[tuple[int, Any, Any]]:
    # Kernel pixel k times the inputs is added to the outputs. Output size `high` x `wide`, input size `height` x
    # `width`.
    for i in range(SIZE):
        for j in range(SIZE):
            outputs, inputs = [slice(None)], [slice(None)]
            for index, count, side in ((i, high, height), (j, wide, width)):
                before = index - SIZE // 2
                first = -(before // stride) if before < 0 else 0
                last = min(count, (side - 1 - before) // stride + 1)
                outputs.append(slice(first, last))
                inputs.append(slice(first * stride + before, (last - 1) * stride + before + 1, stride))
            if all(part.stop > part.start for part in outputs[1:]):
                yield i * SIZE + j, tuple(outputs), tuple(inputs)


def _unfold_device(x: Array, rows: Array, high: int, wide: int, stride: int) -> None:
    samples, height, width, channels = x.shape
    windows = rows.reshape(samples, high, wide, SIZE * SIZE, channels)
    windows[...] = 0
    for index, outputs, inputs in _shifted(high, wide, height, width, stride):
        windows[(*outputs, index)] = x[inputs]


def _fold_device(rows: Array, dx: Array, high: int, wide: int, stride: int) -> None:
    samples, height, width, channels = dx.shape
    windows = rows.reshape(samples, high, wide, SIZE * SIZE, channels)
    for index, outputs, inputs in _shifted(high, wide, height, width, stride):
        dx[inputs] += windows[(*outputs, index)]


for _dtype in SAMPLE_DTYPES:
    _pixels, _row = np.ones((1, 1, 1, 1), _dtype), np.ones((1, SIZE * SIZE), _dtype)
    _unfold_rows.sample(lambda x=_pixels, r=_row: (x, r.copy(), 1, 1, 1))
    _fold_rows.sample(lambda x=_pixels, r=_row: (r, x.copy(), 1, 1, 1))
