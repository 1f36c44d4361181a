"""Dense layers: matrix products of the array library, written directly to their destination."""

from typing import Any

import numpy as np

from hpcdist.arrays.backend import Array, is_device, matmul, namespace
from hpcdist.arrays.jit import jit
from hpcdist.models.layers import cuda_kernels
from hpcdist.models.layers.vector_math import REORDER, SAMPLE_DTYPES
from hpcdist.models.stage import Gradients, Parameters, Saved


class LocalLinear:
    """Linear layer ``y = x weight^T + bias`` without communication, for a weight of shape (outputs, inputs)."""

    weight_reads = ("x",)

    def forward(self, parameters: Parameters, prefix: str, x: Array, saved: Saved, *, biased: bool = True) -> Array:
        saved.keep(f"{prefix}.x", x)
        return affine(parameters, prefix, x, saved, biased=biased)

    def backward(self, parameters: Parameters, gradients: Gradients, prefix: str, dy: Array, saved: Saved) -> Array:
        self.backward_weight(parameters, gradients, prefix, dy, saved)
        return self.backward_input(parameters, prefix, dy, saved)

    def backward_input(self, parameters: Parameters, prefix: str, dy: Array, saved: Saved) -> Array:
        return gradient_of_input(parameters, prefix, dy, saved)

    def backward_weight(
        self, parameters: Parameters, gradients: Gradients, prefix: str, dy: Array, saved: Saved
    ) -> None:
        gradient_of_weight(gradients, prefix, dy, saved[f"{prefix}.x"], saved)
        if f"{prefix}.bias" in parameters:
            gradient_of_bias(gradients, prefix, dy)


def affine(parameters: Parameters, prefix: str, x: Array, saved: Saved, *, biased: bool = True) -> Array:
    """Return ``x weight^T + bias`` for contiguous x. It is stored in the activations ``saved`` as ``PREFIX.y``."""
    weight = as_matrix(parameters[f"{prefix}.weight"])
    outputs, inputs = weight.shape
    y = saved.empty(f"{prefix}.y", (*x.shape[:-1], outputs), x.dtype)
    rows = y.reshape(-1, outputs)
    matmul(x.reshape(-1, inputs), weight.T, rows)
    bias = parameters.get(f"{prefix}.bias")
    if bias is not None and biased:
        add_to_rows(rows, bias.reshape(-1))
    return y


def gradient_of_input(parameters: Parameters, prefix: str, dy: Array, saved: Saved) -> Array:
    """Return the input gradient ``dy weight``. It is in scratch memory of ``saved`` that all linear layers share."""
    weight = as_matrix(parameters[f"{prefix}.weight"])
    outputs, inputs = weight.shape
    dx = saved.scratch("linear.dx", (*dy.shape[:-1], inputs), dy.dtype)
    assert not namespace(dy).may_share_memory(dx, dy), f"{prefix}: dy lies in the scratch array of dx of another linear"
    matmul(dy.reshape(-1, outputs), weight, dx.reshape(-1, inputs))
    return dx


def gradient_of_weight(gradients: Gradients, prefix: str, dy: Array, x: Array, saved: Saved) -> None:
    """Write the weight gradient ``dy^T x``, or add it to an earlier gradient of this step. x: input of the layer."""
    dweight, add = gradients.into(f"{prefix}.weight")
    into = as_matrix(dweight)
    outputs, inputs = into.shape
    product = saved.scratch("linear.dweight", into.shape, into.dtype) if add else into
    matmul(dy.reshape(-1, outputs).T, x.reshape(-1, inputs), product)
    if add:
        into += product


def gradient_of_bias(gradients: Gradients, prefix: str, dy: Array) -> None:
    """Write the column sums of dy to the gradient of ``PREFIX.bias``, or add them to an earlier gradient."""
    dbias, add = gradients.into(f"{prefix}.bias")
    into = dbias.reshape(-1)
    column_sums(dy.reshape(-1, into.size), into, add)


def as_matrix(weight: Array) -> Array:
    """View ``weight``, of shape (..., inputs), as a matrix of shape (outputs, inputs)."""
    return weight.reshape(-1, weight.shape[-1])


def add_to_rows(rows: Array, row: Array) -> None:
    """Add ``row``, of shape (columns,), to each row of contiguous ``rows``, of shape (n, columns), in place."""
    (cuda_kernels.add if is_device(rows) else _add_row)(rows, row)


def column_sums(rows: Array, into: Array, add: bool) -> None:
    """Write the column sums of ``rows``, of shape (n, columns), to ``into``, or add them to ``into`` if ``add``."""
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
