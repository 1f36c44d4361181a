"""Launches of the CUDA kernels of the layers, for every float type.

Sums, statistics and angles have the `accumulation_dtype` of the elements. No function waits for the GPU. Sums have a
fixed order. Arrays are contiguous.
"""

import math
from pathlib import Path
from typing import Any, Final

import numpy as np

from hpcdist.arrays.backend import Array, namespace
from hpcdist.arrays.dtypes import accumulation_dtype
from hpcdist.arrays.gpu.kernels import KernelSource, elementwise, threads_for, width_of

_FOLDER: Final = Path(__file__).parents[1] / "cuda"
ACTIVATION: Final = KernelSource(_FOLDER / "activation.cu")
CROSS_ENTROPY: Final = KernelSource(_FOLDER / "cross_entropy.cu")
EMBEDDING: Final = KernelSource(_FOLDER / "embedding.cu")
NORM: Final = KernelSource(_FOLDER / "norm.cu")

PACK: Final = 4  # elements of a row per thread in norms
SPAN: Final = 512 * 4 * PACK  # columns whose sums a block of a norm's backward holds at a time
ROWS: Final = 512  # blocks of a norm's backward: constant, so that sums are equal on every GPU
PARTS: Final = 64  # largest number of parts of the rows in a sum over columns


def gelu(x: Array, y: Array, bias: Array | None = None) -> None:
    """Write the GELU of x to y. If ``bias`` is not None, first add ``bias`` to each row of x in place."""
    _activate("gelu", x, y, bias)


def gelu_backward(x: Array, dy: Array) -> None:
    """Overwrite x, the input of `gelu`, with the gradient of x. ``dy``: gradient of the GELU output."""
    _elementwise("gelu_backward", x, x, dy)


def relu(x: Array, y: Array, bias: Array | None = None) -> None:
    """Write max(x, 0) to y. If ``bias`` is not None, first add ``bias`` to each row of x in place. NaN stays NaN."""
    _activate("relu", x, y, bias)


def relu_backward(x: Array, dy: Array) -> None:
    """Overwrite x, the input of `relu`, with the gradient of x. ``dy``: gradient of the ReLU output."""
    _elementwise("relu_backward", x, x, dy)


def swiglu(x: Array, y: Array, bias: Array | None = None) -> None:
    """Write silu(gates) * values to y, where each row of x has all gates and then all values.

    ``bias``: array that is first added to each row of x in place, or None.
    """
    _activate("swiglu", x, y, bias)


def swiglu_backward(x: Array, dy: Array) -> None:
    """Overwrite x, the input of `swiglu`, with the gradient of x. ``dy``: gradient of the output."""
    grid = elementwise(dy.size, width_of(dy.dtype))
    ACTIVATION.launch("swiglu_backward", *grid, x, dy, dy.size, dy.shape[1], REAL=x.dtype)


def add(y: Array, x: Array) -> None:
    """Add x to y in place. x has the shape of y, or of y's last dimensions."""
    assert y.shape[y.ndim - x.ndim :] == x.shape, f"x has the shape {x.shape}; expected the last dims of {y.shape}"
    if y.size:
        grid = elementwise(y.size, width_of(y.dtype))
        ACTIVATION.launch("add_to", *grid, y, x, y.size, x.size, REAL=y.dtype)


def _activate(name: str, x: Array, y: Array, bias: Array | None) -> None:
    # Without a bias the kernel gets x instead, and a flag.
    grid, addend = elementwise(y.size, width_of(y.dtype)), x if bias is None else bias
    ACTIVATION.launch(name, *grid, x, addend, y, y.size, y.shape[-1], int(bias is not None), REAL=x.dtype)


def _elementwise(name: str, x: Array, *args: Array) -> None:
    ACTIVATION.launch(name, *elementwise(x.size, width_of(x.dtype)), *args, x.size, REAL=x.dtype)


def norm(
    x: Array, scale: Array, bias: Array, epsilon: Any, y: Array, statistics: Array, residual: Array | None = None
) -> None:
    """Write the layer norm of x, with ``scale``, ``bias`` and ``epsilon``, to y.

    ``residual``: array that is first added to x in place, or None. ``statistics``: output, the mean and 1 / (standard
    deviation) of each row.
    """
    _norm(x, residual, (scale, bias), epsilon, y, statistics, 1)


def rms(x: Array, scale: Array, epsilon: Any, y: Array, statistics: Array, residual: Array | None = None) -> None:
    """Write the RMS norm of x, with ``scale`` and ``epsilon``, to y. ``residual``: as for `norm`.

    ``statistics``: output, 1 / (root mean square) of each row.
    """
    _norm(x, residual, (scale, scale), epsilon, y, statistics, 0)


def _norm(
    x: Array,
    residual: Array | None,
    terms: tuple[Array, Array],
    epsilon: Any,
    y: Array,
    statistics: Array,
    centred: int,
) -> None:
    hidden = x.shape[1]
    NORM.launch("norm_rows", x.shape[0], threads_for(-(-hidden // PACK)), x, x if residual is None else residual,
                *terms, float(epsilon), y, statistics, hidden, int(residual is not None), centred, centred,
                REAL=x.dtype)  # fmt: skip


def norm_backward(
    dy: Array, x: Array, scale: Array, statistics: Array, dx: Array, adds: bool, *sums: tuple[Array, bool]
) -> None:
    """Write the gradient of x, the input of `norm` or `rms`, to dx. If ``adds`` is True, add the gradient to dx.

    ``scale``, ``statistics``: as for `norm`. ``*sums``: pairs (gradient array, add) for the scale and, after `norm`,
    for the bias. If ``add`` is False, the gradient overwrites the array.
    """
    rows, hidden = x.shape
    blocks, centred = min(max(1, rows), ROWS), statistics.shape[1] - 1
    partial = namespace(x).empty((blocks, 2, hidden), accumulation_dtype(x.dtype))
    threads = threads_for(-(-hidden // PACK), 512)
    for start in range(0, hidden, SPAN):
        NORM.launch("norm_rows_backward", blocks, threads, dy, x, scale, statistics, dx, partial, rows, hidden, start,
                    centred, int(adds), REAL=x.dtype)  # fmt: skip
    for number, (into, add) in enumerate(sums):
        _join(partial.reshape(-1)[number * hidden :], into, blocks, 2 * hidden, add)


def _join(partial: Array, into: Array, parts: int, pitch: int, add: bool) -> None:
    columns = into.size
    NORM.launch("join_columns", *elementwise(columns, threads=128), partial, into, parts, pitch, columns, int(add),
                REAL=into.dtype)  # fmt: skip


def column_sums(rows: Array, into: Array, add: bool) -> None:
    """Write the sums of the columns of ``rows`` to ``into``. If ``add`` is True, add the sums to ``into`` instead."""
    count, columns = rows.shape
    parts = min(PARTS, max(1, count // 16), max(1, (1 << 22) // max(columns, 1)))
    partial = namespace(rows).empty((parts, columns), accumulation_dtype(rows.dtype))
    blocks, threads = elementwise(columns, threads=128)
    NORM.launch("sum_columns", (blocks, parts), threads, rows, partial, count, columns, REAL=rows.dtype)
    _join(partial, into, parts, columns, add)


def cross_entropy(logits: Array, targets: Array, statistics: Array) -> Array:
    """Return the cross entropy of ``logits`` (tokens, classes), summed over tokens, as a 0-d float64 array.

    Negative targets have no loss. Targets that are not a class give NaN. ``statistics`` receives the softmax sums.
    """
    tokens, classes = logits.shape
    losses = namespace(logits).empty(tokens, np.float64)
    CROSS_ENTROPY.launch("cross_entropy", tokens, _threads(classes, logits), logits, targets, statistics, losses,
                         classes, REAL=logits.dtype)  # fmt: skip
    total: Array = losses.sum()
    return total


def cross_entropy_backward(logits: Array, targets: Array, statistics: Array, scale: float) -> None:
    """Overwrite the ``logits`` of `cross_entropy` with (softmax - onehot) * ``scale``, or 0 for a negative target."""
    tokens, classes = logits.shape
    CROSS_ENTROPY.launch("cross_entropy_backward", tokens, _threads(classes, logits), logits, targets, statistics,
                         float(scale), classes, REAL=logits.dtype)  # fmt: skip


def _threads(columns: int, like: Array) -> int:
    return threads_for(-(-columns // width_of(like.dtype)))


def gather(table: Array, tokens: Array, y: Array, missing: float = math.nan) -> None:
    """Copy row ``tokens[i]`` of ``table`` to row i of y. If that row does not exist, fill row i with ``missing``."""
    vocabulary, hidden = table.shape
    grid = elementwise(y.size, width_of(y.dtype))
    EMBEDDING.launch("gather", *grid, table, tokens, y, tokens.size, hidden, vocabulary, missing,
                     REAL=table.dtype)  # fmt: skip


def scatter(rows: Array, tokens: Array, table: Array) -> None:
    """Add row i of ``rows`` to row ``tokens[i]`` of ``table``, for each i in order. Round each final sum once."""
    vocabulary, hidden = table.shape
    EMBEDDING.launch("scatter", (tokens.size, -(-hidden // 1024)), 256, rows, tokens, table, tokens.size, hidden,
                     vocabulary, REAL=table.dtype)  # fmt: skip


def rotate(x: Array, rotated: int, turns: Array, sign: int) -> None:
    """Rotate the first ``rotated`` columns of x by the angles of the `rotary_table` ``turns``, in place."""
    batch, context, columns = x.shape
    n = batch * context * rotated // 2
    EMBEDDING.launch("turn", *elementwise(n, width_of(x.dtype)), x, turns, n, context, columns, rotated, turns.shape[1],
                     float(sign), REAL=x.dtype)  # fmt: skip


def dropout(x: Array, first: int, last: int, width: int, *place_and_counter: int, factor: float) -> None:
    """Apply dropout to ``x[:, first:last, :width]`` in place on a GPU. `Mask.drop` passes the other arguments."""
    n = x.shape[0] * (last - first) * -(-width // 4)
    EMBEDDING.launch("drop", *elementwise(n), x, n, x.shape[1], x.shape[2], first, last, width, *place_and_counter,
                     float(factor), REAL=x.dtype)  # fmt: skip
