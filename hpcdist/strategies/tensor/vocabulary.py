"""Embedding and cross entropy with the vocabulary cut over the tensor axis. No logits are gathered."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from hpcdist.arrays.backend import Array, Scalar, is_device, namespace
from hpcdist.arrays.jit import jit
from hpcdist.arrays.ranges import Range
from hpcdist.models.kernels import SAMPLE_DTYPES
from hpcdist.models.stage import Gradients, Parameters, Saved
from hpcdist.models.tokens import check_tokens
from hpcdist.strategies.tensor.borders import Borders


class VocabularyEmbedding:
    """The rows ``own`` of a table of ``vocabulary`` rows. Collective over the tensor axis."""

    weight_reads = ("indices",)

    def __init__(self, borders: Borders, own: Range, vocabulary: int) -> None:
        self.borders, self.own, self.vocabulary = borders, own, vocabulary

    def forward(self, parameters: Parameters, prefix: str, tokens: Array, saved: Saved) -> Array:
        """Return what this rank has of (..., hidden) for integer tokens (...). Raises DataError, on all ranks alike."""
        table = parameters[f"{prefix}.weight"]
        xp = namespace(table)
        indices = check_tokens(tokens.reshape(-1), self.vocabulary, "token")
        indices -= self.own.start
        partial = self.borders.partial((*tokens.shape, table.shape[1]), table.dtype, f"{prefix}.y", saved)
        rows = partial.reshape(-1, table.shape[1])
        near = _nearest(indices, self.own.size)
        if is_device(table):
            xp.take(table, near, axis=0, out=rows)
        else:
            np.take(table, near, axis=0, out=rows, mode="clip")
        rows *= (near == indices)[:, None]
        saved.keep(f"{prefix}.indices", indices)
        return self.borders.leave(partial, f"{prefix}.y", saved)

    def backward(self, gradients: Gradients, prefix: str, dy: Array, saved: Saved) -> None:
        """Add the rows of dy to the gradient of the own rows of the table."""
        into, add = gradients.into(f"{prefix}.weight")
        if not add:
            into[...] = 0
        whole = self.borders.leave_backward(dy, saved)
        rows, indices = whole.reshape(-1, whole.shape[-1]), saved[f"{prefix}.indices"]
        if is_device(dy):
            near = _nearest(indices, self.own.size)
            namespace(dy).add.at(into, near, rows * (near == indices)[:, None])
        else:
            _add_own_rows(rows, indices, into)


class RowPositions:
    """The positions of the own rows of activations that are cut by tokens (local).

    The gradient of the table is that of the own rows: the ranks' parts are summed once a step.
    """

    def __init__(self, borders: Borders) -> None:
        self.borders = borders

    def forward(self, parameters: Parameters, prefix: str, y: Array, context: int, saved: Saved) -> Array:
        """Add to each of the own rows of y (rows, hidden) that of its position, in place."""
        saved.keep(f"{prefix}.context", context)
        for rows, places in self._stretches(y, context):
            y[rows] += parameters[f"{prefix}.weight"][places]
        return y

    def backward(self, gradients: Gradients, prefix: str, dy: Array, saved: Saved) -> None:
        """Add the own rows dy (rows, hidden) to the gradient of the table."""
        into, add = gradients.into(f"{prefix}.weight")
        if not add:
            into[...] = 0
        for rows, places in self._stretches(dy, saved[f"{prefix}.context"]):
            into[places] += dy[rows]

    def _stretches(self, y: Array, context: int) -> Iterator[tuple[slice, slice]]:
        """Yield the own rows of one sample after the other, and their positions."""
        first, row = self.borders.first_token(y), 0
        while row < y.shape[0]:
            place = (first + row) % context
            size = min(context - place, y.shape[0] - row)
            yield slice(row, row + size), slice(place, place + size)
            row += size


class VocabularyCrossEntropy:
    """Softmax and negative log likelihood over the logits of all ranks. Collective over the tensor axis.

    Three numbers a token travel: the largest logit, the sum of the exponentials, and the logit of the target. Targets
    of -1 do not count.
    """

    def __init__(self, borders: Borders, own: Range, vocabulary: int) -> None:
        self.axis, self.own, self.vocabulary = borders.axis, own, vocabulary

    def forward(self, logits: Array, targets: Array, saved: Saved, name: str = "cross_entropy") -> Scalar:
        """Return the sum over tokens on the first rank, 0 on the others: a sum over all ranks counts it once.

        Contiguous logits (tokens, own classes) become probabilities; ``targets`` are integers (tokens,) of all classes.
        """
        xp = namespace(logits)
        tokens = logits.shape[0]
        indices = check_tokens(targets.reshape(-1), self.vocabulary, "target", ignored=True)
        counted = indices >= 0
        indices -= self.own.start
        near = _nearest(indices, self.own.size)
        inside = near == indices  # never where it is not counted
        saved.keep(f"{name}.near", near)
        saved.keep(f"{name}.inside", inside)
        saved.keep(f"{name}.counted", counted)
        sums = saved.empty(f"{name}.sums", (2, tokens), logits.dtype)  # exponentials; the target's logit
        top = saved.scratch("cross_entropy.top", (tokens,), logits.dtype)
        logits.max(axis=1, out=top)
        self.axis.allreduce(top, "max")
        logits -= top[:, None]
        sums[1] = logits[xp.arange(tokens), near] * inside
        xp.exp(logits, out=logits)
        logits.sum(axis=1, out=sums[0])
        self.axis.allreduce(sums.reshape(-1))
        logits /= sums[0][:, None]
        saved.keep(f"{name}.p", logits)
        if self.axis.rank:
            return 0.0
        logarithms = xp.where(counted, xp.log(sums[0].astype(np.float64)), 0.0)
        total: Scalar = logarithms.sum() - sums[1].sum(dtype=np.float64)
        return total

    def backward(self, scale: float, saved: Saved, name: str = "cross_entropy") -> Array:
        """Return dlogits (tokens, own classes) = (softmax - onehot) scale, in the memory of the logits (local)."""
        p: Array = saved[f"{name}.p"]
        p *= (saved[f"{name}.counted"] * p.dtype.type(scale))[:, None]
        p[namespace(p).arange(p.shape[0]), saved[f"{name}.near"]] -= saved[f"{name}.inside"] * p.dtype.type(scale)
        return p


def _nearest(indices: Array, count: int) -> Array:
    """Return ``indices`` with those outside of [0, count) moved to its ends: equal where they are inside."""
    xp = namespace(indices)
    near: Array = xp.minimum(xp.maximum(indices, 0), count - 1)
    return near


@jit
def _add_own_rows(rows: Any, indices: Any, table: Any) -> None:
    for i in range(rows.shape[0]):
        if 0 <= indices[i] < table.shape[0]:
            target = table[indices[i]]
            for j in range(rows.shape[1]):
                target[j] += rows[i, j]


for _dtype in SAMPLE_DTYPES:
    _block = np.ones((1, 2), _dtype)
    _add_own_rows.sample(lambda x=_block: (x, np.zeros(1, np.int64), x.copy()))
