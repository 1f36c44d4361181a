"""Softmax cross entropy: loss in float64, gradient in place of the logits."""

from typing import Any, Final

import numpy as np

from hpcdist.arrays.backend import Array, Scalar, is_device
from hpcdist.arrays.dtypes import accumulation_dtype
from hpcdist.arrays.jit import jit
from hpcdist.models import device
from hpcdist.models.kernels import REORDER, REORDER_MAXIMUM, SAMPLE_DTYPES
from hpcdist.models.stage import Saved
from hpcdist.models.tokens import check_tokens

BLOCK: Final = 16384  # elements: a block of float64 stays in a second-level cache from its maxima to its sums


class LocalCrossEntropy:
    """Negative log likelihood of the target classes in nats. Targets of -1 do not count."""

    def forward(self, logits: Array, targets: Array, saved: Saved, name: str = "cross_entropy") -> Scalar:
        """Return the sum over tokens, as float64. Contiguous logits (tokens, classes) become their exponentials.

        ``targets`` are integers (tokens,), -1 where a token has no loss. Raises DataError on any other that is no
        class. A GPU is not waited for: its sum stays there, as an array ().
        """
        tokens, classes = logits.shape
        targets = check_tokens(targets.reshape(-1), classes, "target", ignored=True)
        saved.keep(f"{name}.exponentials", logits)  # on a GPU still the logits
        saved.keep(f"{name}.targets", targets)
        if is_device(logits):
            statistics = saved.empty(f"{name}.sums", (tokens, 2), accumulation_dtype(logits.dtype))
            return device.cross_entropy(logits, targets, statistics)
        return _forward(logits, targets, saved.empty(f"{name}.sums", (tokens,), logits.dtype))

    def backward(self, scale: float, saved: Saved, name: str = "cross_entropy") -> Array:
        """Return dlogits (tokens, classes) = (softmax - onehot) scale, in the memory of the logits."""
        logits: Array = saved[f"{name}.exponentials"]
        targets, sums = saved[f"{name}.targets"], saved[f"{name}.sums"]
        if is_device(logits):
            device.cross_entropy_backward(logits, targets, sums, scale)
        else:
            _gradient(logits, targets, sums, logits.dtype.type(scale))
        return logits


def _forward(logits: Array, targets: Array, sums: Array) -> float:
    # numpy's own exp is vector code, so the loop over a row is cut around it, in blocks of rows that stay in cache.
    tokens, classes = logits.shape
    step = max(1, BLOCK // classes)
    total = 0.0
    for start in range(0, tokens, step):
        part, chosen = logits[start : start + step], targets[start : start + step]
        total -= _shift(part, chosen)
        np.exp(part, out=part)
        total += _sums(part, chosen, sums[start : start + step])
    return total


@jit(fastmath=REORDER_MAXIMUM)
def _shift(logits: Any, targets: Any) -> Any:
    # Subtracts the maximum of each row; returns the sum of the targets' logits after that.
    total = 0.0
    for token in range(logits.shape[0]):
        row = logits[token]
        top = row[0]
        for j in range(1, row.shape[0]):
            top = max(top, row[j])
        for j in range(row.shape[0]):
            row[j] -= top
        if targets[token] >= 0:
            total += row[targets[token]]
    return total


@jit(fastmath=REORDER)
def _sums(exponentials: Any, targets: Any, sums: Any) -> Any:
    # Returns the sum of the logarithms of the sums, in float64.
    logarithms = 0.0
    for token in range(exponentials.shape[0]):
        row = exponentials[token]
        total = row[0]
        for j in range(1, row.shape[0]):
            total += row[j]
        sums[token] = total
        if targets[token] >= 0:
            logarithms += np.log(np.float64(total))
    return logarithms


@jit(fastmath=REORDER)
def _gradient(exponentials: Any, targets: Any, sums: Any, scale: Any) -> None:
    # A product with 0 where a token does not count, instead of a plain 0: NaN stays visible.
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
    _shift.sample(lambda x=_block: (x.copy(), np.zeros(1, np.int64)))
    _sums.sample(lambda x=_block: (x, np.zeros(1, np.int64), x[0].copy()))
    _gradient.sample(lambda x=_block: (x.copy(), np.zeros(1, np.int64), x[0], x.dtype.type(1)))
