"""Launches of the CUDA kernels of the layers, for every float type; their sources lie in ``models/cuda``.

Elements may be 16-bit floats; whatever is a sum, a statistic or an angle is float32 then, and `accumulation_dtype` of
the elements in general. Nothing here waits for the GPU, and nothing sums in an order that differs between two runs.
Arrays are contiguous.
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

PACK: Final = 4  # elements that a thread has of a row in norms
SPAN: Final = 512 * 4 * PACK  # columns of which a block of a norm's backward keeps the sums at a time
ROWS: Final = 512  # blocks of a norm's backward: a constant, so that sums are the same on every GPU
PARTS: Final = 64  # of the rows, in a sum over columns


def gelu(x: Array, y: Array, bias: Array | None = None) -> None:
    """Write the GELU of x to y; a ``bias`` of its last dims is added to x before, in place."""
    _activate("gelu", x, y, bias)


def gelu_backward(x: Array, dy: Array) -> None:
    """Overwrite x with the gradient dy gelu'(x)."""
    _elementwise("gelu_backward", x, x, dy)


def relu(x: Array, y: Array, bias: Array | None = None) -> None:
    """Write max(x, 0) to y; a NaN stays one; ``bias`` as in `gelu`."""
    _activate("relu", x, y, bias)


def relu_backward(x: Array, dy: Array) -> None:
    """Overwrite x with dy where x > 0, with 0 elsewhere."""
    _elementwise("relu_backward", x, x, dy)


def swiglu(x: Array, y: Array, bias: Array | None = None) -> None:
    """Write silu(gate) value to y (rows, w) for x (rows, 2 w); ``bias`` (2 w) as in `gelu`."""
    _activate("swiglu", x, y, bias)


def swiglu_backward(x: Array, dy: Array) -> None:
    """Overwrite x (rows, 2 w) with the gradient for dy (rows, w)."""
    grid = elementwise(dy.size, width_of(dy.dtype))
    ACTIVATION.launch("swiglu_backward", *grid, x, dy, dy.size, dy.shape[1], REAL=x.dtype)


def add(y: Array, x: Array) -> None:
    """Add x to y, in place; x has the shape of y or of its last dims."""
    assert y.shape[y.ndim - x.ndim :] == x.shape, f"{x.shape} is no tail of {y.shape}"
    if y.size:
        grid = elementwise(y.size, width_of(y.dtype))
        ACTIVATION.launch("add_to", *grid, y, x, y.size, x.size, REAL=y.dtype)


def _activate(name: str, x: Array, y: Array, bias: Array | None) -> None:
    # Without a bias the kernel gets x in its place, and a flag that there is none.
    grid, addend = elementwise(y.size, width_of(y.dtype)), x if bias is None else bias
    ACTIVATION.launch(name, *grid, x, addend, y, y.size, y.shape[-1], int(bias is not None), REAL=x.dtype)


def _elementwise(name: str, x: Array, *args: Array) -> None:
    ACTIVATION.launch(name, *elementwise(x.size, width_of(x.dtype)), *args, x.size, REAL=x.dtype)


def norm(
    x: Array, scale: Array, bias: Array, epsilon: Any, y: Array, statistics: Array, residual: Array | None = None
) -> None:
    """Normalise the rows of x into y; statistics (rows, 2) are summed wide; see `hpcdist.models.layers.norm`.

    A ``residual`` is added to x before, in place.
    """
    _norm(x, residual, (scale, bias), epsilon, y, statistics, 1)


def rms(x: Array, scale: Array, epsilon: Any, y: Array, statistics: Array, residual: Array | None = None) -> None:
    """Divide the rows of x by the root of their mean square; statistics (rows, 1); ``residual`` as in `norm`."""
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
    """Write dx, or add to it; ``sums`` are (dscale, adds) and, of a norm that ``statistics`` show centred, of dbias."""
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
    """Write or add the sums of ``rows`` (n, columns) to ``into`` (columns,)."""
    count, columns = rows.shape
    parts = min(PARTS, max(1, count // 16), max(1, (1 << 22) // max(columns, 1)))
    partial = namespace(rows).empty((parts, columns), accumulation_dtype(rows.dtype))
    blocks, threads = elementwise(columns, threads=128)
    NORM.launch("sum_columns", (blocks, parts), threads, rows, partial, count, columns, REAL=rows.dtype)
    _join(partial, into, parts, columns, add)


def cross_entropy(logits: Array, targets: Array, statistics: Array) -> Array:
    """Return the summed losses, float64 (); keep maxima and sums in statistics (tokens, 2), and the logits.

    A target below 0 has no loss; one that is no class makes the sum NaN.
    """
    tokens, classes = logits.shape
    losses = namespace(logits).empty(tokens, np.float64)
    CROSS_ENTROPY.launch("cross_entropy", tokens, _threads(classes, logits), logits, targets, statistics, losses,
                         classes, REAL=logits.dtype)  # fmt: skip
    total: Array = losses.sum()
    return total


def cross_entropy_backward(logits: Array, targets: Array, statistics: Array, scale: float) -> None:
    """Overwrite the logits with (softmax - onehot) scale, with 0 where a target is below 0."""
    tokens, classes = logits.shape
    CROSS_ENTROPY.launch("cross_entropy_backward", tokens, _threads(classes, logits), logits, targets, statistics,
                         float(scale), classes, REAL=logits.dtype)  # fmt: skip


def _threads(columns: int, like: Array) -> int:
    return threads_for(-(-columns // width_of(like.dtype)))


def gather(table: Array, tokens: Array, y: Array, missing: float = math.nan) -> None:
    """Write the rows of ``table`` by token (int64) to y (n, hidden), ``missing`` for a token that it does not have."""
    vocabulary, hidden = table.shape
    grid = elementwise(y.size, width_of(y.dtype))
    EMBEDDING.launch("gather", *grid, table, tokens, y, tokens.size, hidden, vocabulary, missing,
                     REAL=table.dtype)  # fmt: skip


def scatter(rows: Array, tokens: Array, table: Array) -> None:
    """Add ``rows`` (n, hidden) to those of ``table`` by token (int64); sums are in order, and rounded once.

    A token is compared with those before it up to the first equal one, and with all n where there is none: reads of
    tokens grow with the square of n while new ones come, to n^2 for each 1024 columns if no two are equal.
    """
    vocabulary, hidden = table.shape
    EMBEDDING.launch("scatter", (tokens.size, -(-hidden // 1024)), 256, rows, tokens, table, tokens.size, hidden,
                     vocabulary, REAL=table.dtype)  # fmt: skip


def rotate(x: Array, rotated: int, turns: Array, sign: int) -> None:
    """Turn columns [0, rotated) of x (batch, context, columns) by turns (context, size); see `LocalRotary`."""
    batch, context, columns = x.shape
    n = batch * context * rotated // 2
    EMBEDDING.launch("turn", *elementwise(n, width_of(x.dtype)), x, turns, n, context, columns, rotated, turns.shape[1],
                     float(sign), REAL=x.dtype)  # fmt: skip


def dropout(x: Array, first: int, last: int, width: int, *place_and_counter: int, factor: float) -> None:
    """Drop elements of x in place, as the CPU loop of `hpcdist.models.layers.dropout`, whose arguments these are."""
    n = x.shape[0] * (last - first) * -(-width // 4)
    EMBEDDING.launch("drop", *elementwise(n), x, n, x.shape[1], x.shape[2], first, last, width, *place_and_counter,
                     float(factor), REAL=x.dtype)  # fmt: skip
