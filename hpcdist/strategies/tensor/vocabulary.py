"""Vocabulary parallelism: embedding and cross entropy with the vocabulary cut over the tensor axis.

No logits are gathered: ranks exchange the largest logit, the sum of exponentials and the logit of the target for each
token. Indices of tokens and targets are those of the whole vocabulary; less the start of the own range they are rows,
or columns, of this rank, if they lie inside of it. Kernels for the host and the device stand below the classes.
"""

from typing import Any

import numpy as np

from hpcdist.arrays.backend import Array, Scalar, is_device, namespace
from hpcdist.arrays.dtypes import accumulation_dtype, is_16bit_float
from hpcdist.arrays.jit import jit
from hpcdist.arrays.ranges import Range
from hpcdist.models.documents import Documents
from hpcdist.models.layers import cuda_kernels
from hpcdist.models.layers.embedding import add_to_positions
from hpcdist.models.layers.vector_math import REORDER, SAMPLE_DTYPES, exp, row_maximum
from hpcdist.models.stage import Gradients, Parameters, Saved, as_indices, check_tokens
from hpcdist.strategies.tensor.axis import Borders, SequenceBorders


class VocabularyEmbedding:
    """Embedding of the rows ``own`` of a table of ``vocabulary`` rows. Collective over the tensor axis."""

    weight_reads = ("tokens",)

    def __init__(self, borders: Borders, own: Range, vocabulary: int) -> None:
        self.borders, self.own, self.vocabulary = borders, own, vocabulary

    def forward(self, parameters: Parameters, prefix: str, tokens: Array, saved: Saved) -> Array:
        """Return this rank's part of (..., hidden) for integer tokens (...). Raises DataError on all ranks alike."""
        table = parameters[f"{prefix}.weight"]
        check_tokens(tokens, self.vocabulary, "token")
        saved.keep(f"{prefix}.tokens", tokens)
        partial = self.borders.partial((*tokens.shape, table.shape[1]), table.dtype, f"{prefix}.y", saved)
        rows, indices = partial.reshape(-1, table.shape[1]), as_indices(tokens, saved)
        if is_device(table):
            cuda_kernels.gather(table, indices - self.own.start, rows, missing=0.0)
        else:
            _own_rows(table, indices, self.own.start, rows)
        return self.borders.leave(partial, f"{prefix}.y", saved)

    def backward(self, gradients: Gradients, prefix: str, dy: Array, saved: Saved) -> None:
        """Add the rows of dy to the gradient of the own rows of the table."""
        into, add = gradients.into(f"{prefix}.weight")
        if not add:
            into[...] = 0
        whole = self.borders.leave_backward(dy, saved)
        rows, indices = whole.reshape(-1, whole.shape[-1]), as_indices(saved[f"{prefix}.tokens"], saved)
        if is_device(dy):
            cuda_kernels.scatter(rows, indices - self.own.start, into)
        else:
            _add_own_rows(rows, indices, self.own.start, into)


class RowPositions:
    """Position embedding of the own rows of activations that are cut by tokens (local).

    The gradient of the table is that of the own rows: the ranks' parts are summed once a step.
    """

    def __init__(self, borders: SequenceBorders) -> None:
        self.borders = borders

    def forward(self, parameters: Parameters, prefix: str, y: Array, context: int, saved: Saved) -> Array:
        """Add to each of the own rows of y (rows, hidden) that of its position, in place."""
        assert context == self.borders.context
        if saved.documents is not None:
            y += namespace(y).take(parameters[f"{prefix}.weight"], self._places(saved.documents, y), axis=0)
            return y
        for rows, _, place in self.borders.stretches(y):
            y[rows] += parameters[f"{prefix}.weight"][place : place + rows.stop - rows.start]
        return y

    def backward(self, gradients: Gradients, prefix: str, dy: Array, saved: Saved) -> None:
        """Add the own rows dy (rows, hidden) to the gradient of the table."""
        into, add = gradients.into(f"{prefix}.weight")
        if saved.documents is not None:
            add_to_positions(dy, self._places(saved.documents, dy), into, add)
            return
        if not add:
            into[...] = 0
        total = into
        if is_16bit_float(into.dtype):  # of some samples: rounded once
            total = into.astype(accumulation_dtype(into.dtype))
        for rows, _, place in self.borders.stretches(dy):
            total[place : place + rows.stop - rows.start] += dy[rows]
        if total is not into:
            into[...] = total

    def _places(self, documents: Documents, rows: Array) -> Array:
        """Return the place of each of the own rows in its document."""
        first = self.borders.first_token(rows)
        return documents.places.reshape(-1)[first : first + rows.shape[0]]


class VocabularyCrossEntropy:
    """Softmax and negative log likelihood over the logits of all ranks. Collective over the tensor axis.

    Three numbers a token travel: the largest logit, the sum of the exponentials, and the logit of the target. Targets
    of -1 do not count.
    """

    def __init__(self, borders: Borders, own: Range, vocabulary: int) -> None:
        self.axis, self.own, self.vocabulary = borders.axis, own, vocabulary

    def forward(self, logits: Array, targets: Array, saved: Saved) -> Scalar:
        """Return the sum over tokens on the first rank, 0 on the others: a sum over all ranks counts it once.

        Contiguous logits (tokens, own classes) become their exponentials; ``targets`` are integers (tokens,) of all
        classes.
        """
        check_tokens(targets, self.vocabulary, "target", ignored=True)
        saved.keep("cross_entropy.exponentials", logits)
        saved.keep("cross_entropy.targets", targets)
        indices, tokens = as_indices(targets, saved), logits.shape[0]
        # Row 0: the sum of exponentials; row 1: the logit of the target, less the largest, 0 on ranks without it.
        sums = saved.empty("cross_entropy.sums", (2, tokens), accumulation_dtype(logits.dtype))
        top = saved.scratch("cross_entropy.top", (tokens,), sums.dtype)
        if is_device(logits):
            return self._forward_device(logits, indices, top, sums, saved)
        _largest(logits, top)
        # The largest logit of all ranks first, so that no exponential overflows anywhere; then one sum for both rows.
        self.axis.allreduce(top, "max")
        _exponentials(logits, indices, self.own.start, top, sums)
        self.axis.allreduce(sums.reshape(-1))
        loss: float = 0.0 if self.axis.rank else _loss(indices, sums)
        return loss

    def _forward_device(self, logits: Array, indices: Array, top: Array, sums: Array, saved: Saved) -> Scalar:
        """As the host does, but the logits stay: maximum and sum of all ranks are statistics of the kernels."""
        xp, tokens = namespace(logits), logits.shape[0]
        statistics = saved.empty("cross_entropy.statistics", (tokens, 2), sums.dtype)
        own = saved.empty("cross_entropy.own", (tokens,), np.int64)
        near, inside = _nearest(indices, self.own)
        own[...] = xp.where(inside, near, xp.where(indices < 0, -1, self.own.size))  # no class, but one that counts
        cuda_kernels.cross_entropy(logits, own, statistics)
        top[...] = statistics[:, 0]
        self.axis.allreduce(top, "max")
        sums[0] = statistics[:, 1] * xp.exp(statistics[:, 0] - top)
        sums[1] = (logits[xp.arange(tokens), near].astype(sums.dtype) - top) * inside
        self.axis.allreduce(sums.reshape(-1))
        statistics[:, 0], statistics[:, 1] = top, sums[0]
        return 0.0 if self.axis.rank else _loss_device(indices, sums)

    def backward(self, scale: float, saved: Saved) -> Array:
        """Return dlogits (tokens, own classes) = (softmax - onehot) scale, in the memory of the logits (local)."""
        logits: Array = saved["cross_entropy.exponentials"]  # on a GPU still the logits
        if is_device(logits):
            own, statistics = saved["cross_entropy.own"], saved["cross_entropy.statistics"]
            cuda_kernels.cross_entropy_backward(logits, own, statistics, scale)
            return logits
        indices, sums = as_indices(saved["cross_entropy.targets"], saved), saved["cross_entropy.sums"]
        _gradient(logits, indices, self.own.start, sums, logits.dtype.type(scale))
        return logits


def _nearest(indices: Array, own: Range) -> tuple[Array, Array]:
    """Return the indices clipped to ``own``, counted from its start, and which of them are inside of it."""
    xp = namespace(indices)
    # Gathers need indices within the table: those outside are clipped, and masked out afterwards.
    near = xp.minimum(xp.maximum(indices, own.start), own.stop - 1)
    return near - own.start, near == indices


@jit
def _own_rows(table: Any, indices: Any, start: int, rows: Any) -> None:
    # Rows of tokens that other ranks have are zero: the sum over the ranks fills them in.
    for i in range(rows.shape[0]):
        own = indices[i] - start
        if 0 <= own < table.shape[0]:
            source = table[own]
            for j in range(rows.shape[1]):
                rows[i, j] = source[j]
        else:
            for j in range(rows.shape[1]):
                rows[i, j] = 0


@jit
def _add_own_rows(rows: Any, indices: Any, start: int, table: Any) -> None:
    for i in range(rows.shape[0]):
        own = indices[i] - start
        if 0 <= own < table.shape[0]:
            target = table[own]
            for j in range(rows.shape[1]):
                target[j] += rows[i, j]


@jit
def _largest(logits: Any, top: Any) -> None:
    for token in range(logits.shape[0]):
        top[token] = row_maximum(logits[token])


@jit(fastmath=REORDER)
def _exponentials(logits: Any, targets: Any, start: int, top: Any, sums: Any) -> None:
    # A target of -1 is before any start: it is on no rank. ``row`` becomes its exponentials, in place.
    zero = logits.dtype.type(0)
    for token in range(logits.shape[0]):
        row, own = logits[token], targets[token] - start
        sums[1, token] = row[own] - top[token] if 0 <= own < row.shape[0] else zero
        total = zero
        for j in range(row.shape[0]):
            e = exp(row[j] - top[token])
            row[j] = e
            total += e
        sums[0, token] = total


@jit
def _loss(targets: Any, sums: Any) -> Any:
    loss = 0.0
    for token in range(targets.size):
        if targets[token] >= 0:
            loss += np.log(np.float64(sums[0, token])) - np.float64(sums[1, token])
    return loss


@jit(fastmath=REORDER)
def _gradient(exponentials: Any, targets: Any, start: int, sums: Any, scale: Any) -> None:
    # A product with 0 where a token does not count, instead of a plain 0: NaN stays visible.
    zero = scale - scale
    for token in range(exponentials.shape[0]):
        row, own = exponentials[token], targets[token] - start
        share = exponentials.dtype.type(scale / sums[0, token]) if targets[token] >= 0 else zero
        for j in range(row.shape[0]):
            row[j] *= share
        if 0 <= own < row.shape[0]:
            row[own] -= scale


def _loss_device(targets: Array, sums: Array) -> Array:
    xp = namespace(sums)
    wide = sums.astype(np.float64)
    total: Array = xp.where(targets >= 0, xp.log(wide[0]) - wide[1], 0.0).sum()
    return total


for _dtype in SAMPLE_DTYPES:
    _block, _zero = np.ones((1, 2), _dtype), np.zeros(1, np.int64)
    _own_rows.sample(lambda x=_block, i=_zero: (x, i, 0, x.copy()))
    _add_own_rows.sample(lambda x=_block, i=_zero: (x, i, 0, x.copy()))
    _largest.sample(lambda x=_block: (x, x[0, :1].copy()))
    _exponentials.sample(lambda x=_block, i=_zero: (x.copy(), i, 0, x[0, :1], x.T.copy()))
    _loss.sample(lambda x=_block, i=_zero: (i, x.T.copy()))
    _gradient.sample(lambda x=_block, i=_zero: (x.copy(), i, 0, x.T.copy(), x.dtype.type(1)))
