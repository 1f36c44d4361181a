"""Vocabulary parallelism: embedding and cross entropy with the vocabulary sharded over the tensor axis."""

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
    """Embedding whose table rows are sharded over the tensor axis. Collective over the tensor axis."""

    weight_reads = ("tokens",)

    def __init__(self, borders: Borders, rows: Range, vocabulary: int) -> None:
        self.borders, self.own, self.vocabulary = borders, rows, vocabulary

    def forward(self, parameters: Parameters, prefix: str, tokens: Array, saved: Saved) -> Array:
        """Return the embeddings of this rank's ``tokens``. Raises DataError on all ranks for an invalid token.

        ``prefix``: start of the tensor names. ``saved``: arrays kept for the backward pass.
        """
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
        """Add the gradient of this rank's table rows to ``gradients``. ``dy``: gradient of the embeddings.

        ``prefix``: start of the tensor names.
        """
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
    """Position embedding for sequence parallelism: each rank embeds the positions of its tokens. Local."""

    # The gradient of the position table covers only the local tokens; it is summed over the ranks once per step.
    def __init__(self, borders: SequenceBorders) -> None:
        self.borders = borders

    def forward(self, parameters: Parameters, prefix: str, y: Array, context: int, saved: Saved) -> Array:
        """Add position embeddings to ``y``, of shape (local tokens, hidden), and return ``y``.

        ``prefix``: start of the tensor names. ``context``: tokens per sample.
        """
        assert context == self.borders.context
        if saved.documents is not None:
            y += namespace(y).take(parameters[f"{prefix}.weight"], self._places(saved.documents, y), axis=0)
            return y
        for rows, _, position in self.borders.stretches(y):
            y[rows] += parameters[f"{prefix}.weight"][position : position + rows.stop - rows.start]
        return y

    def backward(self, gradients: Gradients, prefix: str, dy: Array, saved: Saved) -> None:
        """Add ``dy``, the output gradient of this rank's tokens, to the gradient of the position embeddings.

        ``prefix``: start of the tensor names. ``saved``: arrays that `forward` kept.
        """
        into, add = gradients.into(f"{prefix}.weight")
        if saved.documents is not None:
            add_to_positions(dy, self._places(saved.documents, dy), into, add)
            return
        if not add:
            into[...] = 0
        total = into
        if is_16bit_float(into.dtype):  # sum several samples in float32, and round once
            total = into.astype(accumulation_dtype(into.dtype))
        for rows, _, position in self.borders.stretches(dy):
            total[position : position + rows.stop - rows.start] += dy[rows]
        if total is not into:
            into[...] = total

    def _places(self, documents: Documents, rows: Array) -> Array:
        first = self.borders.first_token(rows)
        return documents.places.reshape(-1)[first : first + rows.shape[0]]


class VocabularyCrossEntropy:
    """Cross-entropy loss with classes sharded over the tensor axis. Collective over the tensor axis."""

    # Ranks exchange each token's largest logit, sum of exponentials and target logit. Targets of -1 do not count.
    def __init__(self, borders: Borders, classes: Range, vocabulary: int) -> None:
        self.axis, self.own, self.vocabulary = borders.axis, classes, vocabulary

    def forward(self, logits: Array, targets: Array, saved: Saved) -> Scalar:
        """On the first rank, return the loss summed over all tokens. On the other ranks, return 0.

        ``logits``: logits of this rank's classes. ``saved``: arrays kept for the backward pass.
        """
        check_tokens(targets, self.vocabulary, "target", ignored=True)
        saved.keep("cross_entropy.exponentials", logits)
        saved.keep("cross_entropy.targets", targets)
        indices, tokens = as_indices(targets, saved), logits.shape[0]
        # Row 0: sum of exponentials. Row 1: the target's logit minus the largest logit, 0 on ranks without the target.
        sums = saved.empty("cross_entropy.sums", (2, tokens), accumulation_dtype(logits.dtype))
        top = saved.scratch("cross_entropy.top", (tokens,), sums.dtype)
        if is_device(logits):
            return self._forward_device(logits, indices, top, sums, saved)
        _largest(logits, top)
        # First the largest logit of all ranks, so that no exponential overflows; then one sum for both rows.
        self.axis.allreduce(top, "max")
        _exponentials(logits, indices, self.own.start, top, sums)
        self.axis.allreduce(sums.reshape(-1))
        loss: float = 0.0 if self.axis.rank else _loss(indices, sums)
        return loss

    def _forward_device(self, logits: Array, indices: Array, top: Array, sums: Array, saved: Saved) -> Scalar:
        xp, tokens = namespace(logits), logits.shape[0]
        statistics = saved.empty("cross_entropy.statistics", (tokens, 2), sums.dtype)
        local_targets = saved.empty("cross_entropy.own", (tokens,), np.int64)
        near, inside = _nearest(indices, self.own)
        # A target of another rank gets an index beyond the local classes, which counts but matches no class.
        local_targets[...] = xp.where(inside, near, xp.where(indices < 0, -1, self.own.size))
        cuda_kernels.cross_entropy(logits, local_targets, statistics)
        top[...] = statistics[:, 0]
        self.axis.allreduce(top, "max")
        sums[0] = statistics[:, 1] * xp.exp(statistics[:, 0] - top)
        sums[1] = (logits[xp.arange(tokens), near].astype(sums.dtype) - top) * inside
        self.axis.allreduce(sums.reshape(-1))
        statistics[:, 0], statistics[:, 1] = top, sums[0]
        return 0.0 if self.axis.rank else _loss_device(indices, sums)

    def backward(self, scale: float, saved: Saved) -> Array:
        logits: Array = saved["cross_entropy.exponentials"]  # on a GPU: the logits
        if is_device(logits):
            local_targets, statistics = saved["cross_entropy.own"], saved["cross_entropy.statistics"]
            cuda_kernels.cross_entropy_backward(logits, local_targets, statistics, scale)
            return logits
        indices, sums = as_indices(saved["cross_entropy.targets"], saved), saved["cross_entropy.sums"]
        _gradient(logits, indices, self.own.start, sums, logits.dtype.type(scale))
        return logits


def _nearest(indices: Array, classes: Range) -> tuple[Array, Array]:
    xp = namespace(indices)
    # Gathers need valid indices: indices outside are clipped, and masked out afterwards.
    near = xp.minimum(xp.maximum(indices, classes.start), classes.stop - 1)
    return near - classes.start, near == indices


@jit
def _own_rows(table: Any, indices: Any, start: int, rows: Any) -> None:
    # Rows of tokens on other ranks are zero: the sum over the ranks fills them in.
    for i in range(rows.shape[0]):
        index = indices[i] - start
        if 0 <= index < table.shape[0]:
            source = table[index]
            for j in range(rows.shape[1]):
                rows[i, j] = source[j]
        else:
            for j in range(rows.shape[1]):
                rows[i, j] = 0


@jit
def _add_own_rows(rows: Any, indices: Any, start: int, table: Any) -> None:
    for i in range(rows.shape[0]):
        index = indices[i] - start
        if 0 <= index < table.shape[0]:
            target = table[index]
            for j in range(rows.shape[1]):
                target[j] += rows[i, j]


@jit
def _largest(logits: Any, top: Any) -> None:
    for token in range(logits.shape[0]):
        top[token] = row_maximum(logits[token])


@jit(fastmath=REORDER)
def _exponentials(logits: Any, targets: Any, start: int, top: Any, sums: Any) -> None:
    # A target of -1 is on no rank. ``row`` is replaced by its exponentials.
    zero = logits.dtype.type(0)
    for token in range(logits.shape[0]):
        row, column = logits[token], targets[token] - start
        sums[1, token] = row[column] - top[token] if 0 <= column < row.shape[0] else zero
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
    # A product with 0, instead of 0, for a token that does not count, so that NaN stays visible.
    zero = scale - scale
    for token in range(exponentials.shape[0]):
        row, column = exponentials[token], targets[token] - start
        share = exponentials.dtype.type(scale / sums[0, token]) if targets[token] >= 0 else zero
        for j in range(row.shape[0]):
            row[j] *= share
        if 0 <= column < row.shape[0]:
            row[column] -= scale


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
