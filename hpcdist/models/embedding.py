"""Embedding: rows of a table by token, and the sums back into them."""

from typing import Any

import numpy as np

from hpcdist.arrays.backend import Array, is_device
from hpcdist.arrays.jit import jit
from hpcdist.models import device
from hpcdist.models.kernels import SAMPLE_DTYPES
from hpcdist.models.stage import Gradients, Parameters, Saved
from hpcdist.models.tokens import check_tokens


class LocalEmbedding:
    """A table ``PREFIX.weight`` (vocabulary, hidden)."""

    weight_reads = ("indices",)

    def forward(self, parameters: Parameters, prefix: str, tokens: Array, saved: Saved) -> Array:
        """Return (..., hidden) for integer tokens (...). Raises DataError on a token outside the table."""
        table = parameters[f"{prefix}.weight"]
        indices = check_tokens(tokens.reshape(-1), table.shape[0], "token")
        y = saved.empty(f"{prefix}.y", (*tokens.shape, table.shape[1]), table.dtype)
        rows = y.reshape(-1, table.shape[1])
        if is_device(table):
            device.gather(table, indices, rows)
        else:  # the indices are checked: "clip" only keeps numpy from buffering `out`
            np.take(table, indices, axis=0, out=rows, mode="clip")
        saved.keep(f"{prefix}.indices", indices)
        return y

    def backward(self, gradients: Gradients, prefix: str, dy: Array, saved: Saved) -> None:
        """Add the rows of contiguous dy (..., hidden) to the gradient of the table."""
        into, add = gradients.into(f"{prefix}.weight")
        if not add:
            into[...] = 0
        rows = dy.reshape(-1, dy.shape[-1])
        if is_device(dy):
            device.scatter(rows, saved[f"{prefix}.indices"], into)
        else:
            _add_rows(rows, saved[f"{prefix}.indices"], into)


class LocalPositions:
    """A table ``PREFIX.weight`` (positions, hidden), of which every sample gets the first rows."""

    def forward(self, parameters: Parameters, prefix: str, y: Array, context: int, saved: Saved) -> Array:
        """Add the rows of the first ``context`` positions to y (batch, context, hidden), in place."""
        rows = parameters[f"{prefix}.weight"][:context]
        if is_device(y):
            device.add(y, rows)
        else:
            y += rows
        return y

    def backward(self, gradients: Gradients, prefix: str, dy: Array, saved: Saved) -> None:
        """Add dy (batch, context, hidden), summed over samples, to the gradient of the table."""
        into, add = gradients.into(f"{prefix}.weight")
        context = dy.shape[1]
        if not add:
            into[context:] = 0
        if is_device(dy):
            device.column_sums(dy.reshape(dy.shape[0], -1), into[:context].reshape(-1), add)
        elif not add:
            dy.sum(axis=0, out=into[:context])
        else:
            into[:context] += dy.sum(axis=0)


@jit
def _add_rows(rows: Any, indices: Any, table: Any) -> None:
    for i in range(rows.shape[0]):
        target = table[indices[i]]
        for j in range(rows.shape[1]):
            target[j] += rows[i, j]


for _dtype in SAMPLE_DTYPES:
    _block = np.ones((1, 2), _dtype)
    _add_rows.sample(lambda x=_block: (x, np.zeros(1, np.int64), x.copy()))
