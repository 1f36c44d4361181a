"""Token embeddings, learned positions, and the cross-entropy loss of predicted tokens.

Cross entropy returns the loss in float64, and writes the gradient over the logits. Forward and backward each take one
pass over the logits. With e = the machine epsilon of the dtype, the error of a gradient is at most ``32 e scale``. The
error of a loss is at most ``8 e`` per token, plus ``8 e`` times the range of the logits.
"""

from typing import Any

import numpy as np

from hpcdist.arrays.backend import Array, Scalar, is_device, namespace
from hpcdist.arrays.dtypes import accumulation_dtype
from hpcdist.arrays.jit import jit
from hpcdist.models.layers import cuda_kernels
from hpcdist.models.layers.linear import add_to_rows, column_sums
from hpcdist.models.layers.vector_math import REORDER, SAMPLE_DTYPES, exp, row_maximum
from hpcdist.models.stage import Gradients, Parameters, Saved, as_indices, check_tokens


class LocalEmbedding:
    """Token embedding with a table ``PREFIX.weight`` of shape (vocabulary, hidden)."""

    weight_reads = ("tokens",)

    def forward(self, parameters: Parameters, prefix: str, tokens: Array, saved: Saved) -> Array:
        table = parameters[f"{prefix}.weight"]
        check_tokens(tokens, table.shape[0], "token")
        y = saved.empty(f"{prefix}.y", (*tokens.shape, table.shape[1]), table.dtype)
        rows = y.reshape(-1, table.shape[1])
        (cuda_kernels.gather if is_device(table) else _gather)(table, as_indices(tokens, saved), rows)
        saved.keep(f"{prefix}.tokens", tokens)
        return y

    def backward(self, gradients: Gradients, prefix: str, dy: Array, saved: Saved) -> None:
        into, add = gradients.into(f"{prefix}.weight")
        if not add:
            into[...] = 0
        rows = dy.reshape(-1, dy.shape[-1])
        indices = as_indices(saved[f"{prefix}.tokens"], saved)
        (cuda_kernels.scatter if is_device(dy) else _add_rows)(rows, indices, into)


class LocalPositions:
    """Learned position embedding. A packed sample has several documents, and positions start at 0 in each document."""

    def forward(self, parameters: Parameters, prefix: str, y: Array, context: int, saved: Saved) -> Array:
        if saved.documents is not None:
            y += namespace(y).take(parameters[f"{prefix}.weight"], saved.documents.places, axis=0)
            return y
        rows = parameters[f"{prefix}.weight"][:context]
        add_to_rows(y.reshape(y.shape[0], -1), rows.reshape(-1))
        return y

    def backward(self, gradients: Gradients, prefix: str, dy: Array, saved: Saved) -> None:
        into, add = gradients.into(f"{prefix}.weight")
        if saved.documents is not None:
            add_to_positions(dy, saved.documents.places, into, add)
            return
        context = dy.shape[1]
        if not add:
            into[context:] = 0
        column_sums(dy.reshape(dy.shape[0], -1), into[:context].reshape(-1), add)


def add_to_positions(dy: Array, places: Array, into: Array, add: bool) -> None:
    """Add row i of dy to row ``places[i]`` of ``into``, for each token i. If ``add`` is False, first zero ``into``."""
    if not add:
        into[...] = 0
    rows = dy.reshape(-1, dy.shape[-1])
    (cuda_kernels.scatter if is_device(dy) else _add_rows)(rows, places.reshape(-1), into)


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


class LocalCrossEntropy:
    """Cross-entropy loss, in nats, of logits for target classes."""

    def forward(self, logits: Array, targets: Array, saved: Saved) -> Scalar:
        """Return the float64 sum of the losses. Invalid targets raise DataError on a CPU, and give NaN on a GPU."""
        tokens, classes = logits.shape
        check_tokens(targets, classes, "target", ignored=True)
        saved.keep("cross_entropy.exponentials", logits)  # on a GPU, still the logits
        saved.keep("cross_entropy.targets", targets)
        targets = as_indices(targets, saved)
        if is_device(logits):
            statistics = saved.empty("cross_entropy.sums", (tokens, 2), accumulation_dtype(logits.dtype))
            return cuda_kernels.cross_entropy(logits, targets, statistics)
        loss: float = _forward(logits, targets, saved.empty("cross_entropy.sums", (tokens,), logits.dtype))
        return loss

    def backward(self, scale: float, saved: Saved) -> Array:
        logits: Array = saved["cross_entropy.exponentials"]
        targets, sums = as_indices(saved["cross_entropy.targets"], saved), saved["cross_entropy.sums"]
        if is_device(logits):
            cuda_kernels.cross_entropy_backward(logits, targets, sums, scale)
        else:
            _gradient(logits, targets, sums, logits.dtype.type(scale))
        return logits


@jit(fastmath=REORDER)
def _forward(logits: Any, targets: Any, sums: Any) -> Any:
    # Overwrites logits by exponentials; returns the loss in float64.
    loss = 0.0
    for token in range(logits.shape[0]):
        row, target = logits[token], targets[token]
        top = row_maximum(row)
        chosen = np.float64(row[target] - top) if target >= 0 else 0.0
        total = exp(row[0] - top)
        row[0] = total
        for j in range(1, row.shape[0]):
            e = exp(row[j] - top)
            row[j] = e
            total += e
        sums[token] = total
        if target >= 0:
            loss += np.log(np.float64(total)) - chosen
    return loss


@jit(fastmath=REORDER)
def _gradient(exponentials: Any, targets: Any, sums: Any, scale: Any) -> None:
    # Multiply ignored tokens by 0 instead of writing 0, so that NaN stays visible.
    zero = scale - scale
    for token in range(exponentials.shape[0]):
        row, target = exponentials[token], targets[token]
        share = exponentials.dtype.type(scale / sums[token]) if target >= 0 else zero
        for j in range(row.shape[0]):
            row[j] *= share
        if target >= 0:
            row[target] -= scale


for _dtype in SAMPLE_DTYPES:
    _block = np.ones((1, 2), _dtype)
    _forward.sample(lambda x=_block: (x.copy(), np.zeros(1, np.int64), x[0].copy()))
    _gradient.sample(lambda x=_block: (x.copy(), np.zeros(1, np.int64), x[0], x.dtype.type(1)))
