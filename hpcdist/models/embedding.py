"""Embedding: rows of a table by token, and the sums back into them."""

from typing import Any

import numpy as np

from hpcdist.arrays.backend import Array, is_device
from hpcdist.arrays.jit import jit
from hpcdist.models import device
from hpcdist.models.kernels import SAMPLE_DTYPES
from hpcdist.models.linear import add_to_rows, column_sums
from hpcdist.models.stage import Gradients, Parameters, Saved
from hpcdist.models.tokens import as_indices, check_tokens


class LocalEmbedding:
    """A table ``PREFIX.weight`` (vocabulary, hidden)."""

    weight_reads = ("tokens",)

    def forward(self, parameters: Parameters, prefix: str, tokens: Array, saved: Saved) -> Array:
        """Return (..., hidden) for integer tokens (...). Raises DataError on a token outside the table."""
        table = parameters[f"{prefix}.weight"]
        check_tokens(tokens, table.shape[0], "token")
        y = saved.empty(f"{prefix}.y", (*tokens.shape, table.shape[1]), table.dtype)
        rows = y.reshape(-1, table.shape[1])
        (device.gather if is_device(table) else _gather)(table, as_indices(tokens, saved), rows)
        saved.keep(f"{prefix}.tokens", tokens)
        return y

    def backward(self, gradients: Gradients, prefix: str, dy: Array, saved: Saved) -> None:
        """Add the rows of contiguous dy (..., hidden) to the gradient of the table."""
        into, add = gradients.into(f"{prefix}.weight")
        if not add:
            into[...] = 0
        rows = dy.reshape(-1, dy.shape[-1])
        indices = as_indices(saved[f"{prefix}.tokens"], saved)
        (device.scatter if is_device(dy) else _add_rows)(rows, indices, into)


class LocalPositions:
    """A table ``PREFIX.weight`` (positions, hidden), of which every sample gets the first rows."""

    def forward(self, parameters: Parameters, prefix: str, y: Array, context: int, saved: Saved) -> Array:
        """Add the rows of the first ``context`` positions to y (batch, context, hidden), in place."""
        rows = parameters[f"{prefix}.weight"][:context]
        add_to_rows(y.reshape(y.shape[0], -1), rows.reshape(-1))
        return y

    def backward(self, gradients: Gradients, prefix: str, dy: Array, saved: Saved) -> None:
        """Add dy (batch, context, hidden), summed over samples, to the gradient of the table."""
        into, add = gradients.into(f"{prefix}.weight")
        context = dy.shape[1]
        if not add:
            into[context:] = 0
        column_sums(dy.reshape(dy.shape[0], -1), into[:context].reshape(-1), add)


@jit
def _gather(table: Any, indices: Any, rows: Any) -> None:
    for i in range(rows.shape[0]):
        source = table[indices[i]]
        for j in range(rows.shape[1]):
            rows[i, j] = source[j]


@jit
def _add_rows(rows: Any, indices: Any, table: Any) -> None:
    for i in range(rows.shape[0]):
        target = table[indices[i]]
        for j in range(rows.shape[1]):
            target[j] += rows[i, j]


for _dtype in SAMPLE_DTYPES:
    _block = np.ones((1, 2), _dtype)
    _gather.sample(lambda x=_block: (x, np.zeros(1, np.int64), x.copy()))
    _add_rows.sample(lambda x=_block: (x, np.zeros(1, np.int64), x.copy()))
