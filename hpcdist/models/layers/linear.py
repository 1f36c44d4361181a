"""Dense layers, and their activation functions: GELU, ReLU, and SwiGLU (Shazeer 2020).

Matrix products are written directly to their destination.

GELU in its tanh form (Hendrycks, Gimpel 2016) is ``x (1 + tanh u) / 2`` with ``u = sqrt(2 / pi) (x + 0.044715 x^3)``.
Errors in machine epsilons of the dtype: GELU ``2 |x|``, gradient of GELU ``4 |dy|``; SwiGLU ``3 |gate value|``,
gradients of SwiGLU ``4 |dy value|`` (gates) and ``3 |dy gate|`` (values).
"""

from collections.abc import Callable
from typing import Any, Final

import numpy as np

from hpcdist.arrays.backend import Array, is_device, matmul, namespace
from hpcdist.arrays.jit import jit
from hpcdist.models.config import ACTIVATIONS
from hpcdist.models.layers import cuda_kernels
from hpcdist.models.layers.low_rank import KEPT, LowRank
from hpcdist.models.layers.vector_math import REORDER, SAMPLE_DTYPES, exp
from hpcdist.models.stage import Gradients, Parameters, Saved


class LocalLinear:
    """Linear layer ``y = x weight^T + bias`` without communication, for a weight of shape (outputs, inputs).

    ``low_rank``: adapters of the model's linear layers, or None.
    """

    def __init__(self, low_rank: LowRank | None = None) -> None:
        self.low_rank = low_rank
        self.weight_reads = ("x",) if low_rank is None else ("x", KEPT)

    def forward(self, parameters: Parameters, prefix: str, x: Array, saved: Saved, *, biased: bool = True) -> Array:
        saved.keep(f"{prefix}.x", x)
        return affine(parameters, prefix, x, saved, self.low_rank, biased=biased)

    def backward(self, parameters: Parameters, gradients: Gradients, prefix: str, dy: Array, saved: Saved) -> Array:
        begin_backward(parameters, prefix, dy, saved, self.low_rank)
        self.backward_weight(parameters, gradients, prefix, dy, saved)
        return gradient_of_input(parameters, prefix, dy, saved, self.low_rank)

    def backward_input(self, parameters: Parameters, prefix: str, dy: Array, saved: Saved) -> Array:
        begin_backward(parameters, prefix, dy, saved, self.low_rank)
        return gradient_of_input(parameters, prefix, dy, saved, self.low_rank)

    def backward_weight(
        self, parameters: Parameters, gradients: Gradients, prefix: str, dy: Array, saved: Saved
    ) -> None:
        gradient_of_weight(gradients, prefix, dy, saved[f"{prefix}.x"], saved, self.low_rank)
        gradient_of_bias(gradients, prefix, dy)


def affine(
    parameters: Parameters,
    prefix: str,
    x: Array,
    saved: Saved,
    low_rank: LowRank | None = None,
    *,
    biased: bool = True,
    product: Callable[[Array, Array, Array], None] = matmul,
) -> Array:
    """Return ``x weight^T + bias`` for contiguous x, in an array from ``saved``. Omit the bias unless ``biased``.

    ``product``: function with the arguments and the result of `matmul`.
    """
    weight = as_matrix(parameters[f"{prefix}.weight"])
    outputs, inputs = weight.shape
    y = saved.empty(f"{prefix}.y", (*x.shape[:-1], outputs), x.dtype)
    rows = y.reshape(-1, outputs)
    product(x.reshape(-1, inputs), weight.T, rows)
    if low_rank is not None:
        low_rank.forward(parameters, prefix, x, rows, saved)
    bias = parameters.get(f"{prefix}.bias")
    if bias is not None and biased:
        add_to_rows(rows, bias.reshape(-1))
    return y


def begin_backward(parameters: Parameters, prefix: str, dy: Array, saved: Saved, low_rank: LowRank | None) -> None:
    """Compute what both gradients of a layer with adapters need. Call it before `gradient_of_input` and others."""
    if low_rank is not None:
        low_rank.begin_backward(parameters, prefix, dy, saved)


def gradient_of_input(
    parameters: Parameters, prefix: str, dy: Array, saved: Saved, low_rank: LowRank | None = None
) -> Array:
    """Return the input gradient ``dy weight``. The next call for any layer overwrites the returned array."""
    weight = as_matrix(parameters[f"{prefix}.weight"])
    outputs, inputs = weight.shape
    dx = saved.scratch("linear.dx", (*dy.shape[:-1], inputs), dy.dtype)
    assert not namespace(dy).may_share_memory(dx, dy), f"{prefix}: dy lies in the scratch array of dx of another linear"
    matmul(dy.reshape(-1, outputs), weight, dx.reshape(-1, inputs))
    if low_rank is not None:
        low_rank.backward_input(parameters, prefix, dy, dx, saved)
    return dx


def gradient_of_weight(
    gradients: Gradients, prefix: str, dy: Array, x: Array, saved: Saved, low_rank: LowRank | None = None
) -> None:
    """Write the weight gradient ``dy^T x``, or add ``dy^T x`` to the gradients of earlier calls in this step.

    Also the gradients of the adapters. A frozen weight has no gradient.
    """
    if low_rank is not None:
        low_rank.backward_weight(gradients, prefix, dy, x, saved)
    if not gradients.wants(f"{prefix}.weight"):
        return
    dweight, add = gradients.into(f"{prefix}.weight")
    into = as_matrix(dweight)
    outputs, inputs = into.shape
    product = saved.scratch("linear.dweight", into.shape, into.dtype) if add else into
    matmul(dy.reshape(-1, outputs).T, x.reshape(-1, inputs), product)
    if add:
        into += product


def gradient_of_bias(gradients: Gradients, prefix: str, dy: Array) -> None:
    """Write the column sums of dy as bias gradient, or add them to the gradients of earlier calls in this step.

    Without a bias, or with a frozen one, do nothing.
    """
    if not gradients.wants(f"{prefix}.bias"):
        return
    dbias, add = gradients.into(f"{prefix}.bias")
    into = dbias.reshape(-1)
    column_sums(dy.reshape(-1, into.size), into, add)


def as_matrix(weight: Array) -> Array:
    """Return a view of ``weight``, of shape (..., inputs), as a matrix (outputs, inputs)."""
    return weight.reshape(-1, weight.shape[-1])


def add_to_rows(rows: Array, row: Array) -> None:
    """Add ``row``, of shape (columns,), to each row of ``rows``, of shape (n, columns), in place."""
    (cuda_kernels.add if is_device(rows) else _add_row)(rows, row)


def column_sums(rows: Array, into: Array, add: bool) -> None:
    """Write the column sums of ``rows`` (n, columns) to ``into``. If ``add`` is True, add them to ``into`` instead."""
    if is_device(rows):
        cuda_kernels.column_sums(rows, into, add)
        return
    if not add:
        into[...] = 0
    _add_columns(rows, into)


@jit
def _add_row(rows: Any, row: Any) -> None:
    # numpy would allocate a buffer.
    for i in range(rows.shape[0]):
        for j in range(rows.shape[1]):
            rows[i, j] += row[j]


@jit(fastmath=REORDER)
def _add_columns(rows: Any, into: Any) -> None:
    # As fast as a product with a vector of ones. Adding eight rows first reduces rounding.
    count, columns = rows.shape
    whole = count // 8 * 8
    for i in range(0, whole, 8):
        a, b, c, d = rows[i], rows[i + 1], rows[i + 2], rows[i + 3]
        e, f, g, h = rows[i + 4], rows[i + 5], rows[i + 6], rows[i + 7]
        for j in range(columns):
            into[j] += ((a[j] + b[j]) + (c[j] + d[j])) + ((e[j] + f[j]) + (g[j] + h[j]))
    for i in range(whole, count):
        for j in range(columns):
            into[j] += rows[i, j]


for _dtype in SAMPLE_DTYPES:
    _block = np.ones((1, 2), _dtype)
    _add_row.sample(lambda x=_block: (x.copy(), x[0]))
    _add_columns.sample(lambda x=_block: (x, x[0].copy()))


ROOT: Final = 0.7978845608028654  # sqrt(2 / pi)
CUBIC: Final = 0.044715
_LINEAR, _CUBE = -2 * ROOT, -2 * ROOT * CUBIC  # coefficients of -2 u
_BOUND: Final = 32.0  # for |x| above, exp(-2 |u|) is 0 in both precisions
IN_ORDER: Final[Any] = REORDER - {"reassoc"}  # multiply by a zero gate before a product that may overflow


class LocalActivation:
    """Activation functions "gelu", "relu" and "swiglu", for contiguous arrays."""

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
