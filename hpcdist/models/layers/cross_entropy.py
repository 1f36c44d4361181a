"""Softmax cross entropy: loss in float64, gradient in place of the logits.

One pass over the logits in each direction. With e the distance of 1 to the next number of the dtype, the error of a
gradient is at most ``32 e scale``, and that of a loss ``8 e`` a token and as much of the logits' range.
"""

from typing import Any

import numpy as np

from hpcdist.arrays.backend import Array, Scalar, is_device
from hpcdist.arrays.dtypes import accumulation_dtype
from hpcdist.arrays.jit import jit
from hpcdist.models.layers import cuda_kernels
from hpcdist.models.layers.vector_math import REORDER, SAMPLE_DTYPES, exp, row_maximum
from hpcdist.models.stage import Saved, as_indices, check_tokens


class LocalCrossEntropy:
    """Negative log likelihood of the target classes in nats. Targets of -1 do not count."""

    def forward(self, logits: Array, targets: Array, saved: Saved) -> Scalar:
        """Return the sum over tokens, as float64. Contiguous logits (tokens, classes) become their exponentials.

        ``targets`` are integers (tokens,), -1 where a token has no loss. Raises DataError on any other that is no
        class. A GPU is not waited for: its sum stays there, as an array ().
        """
        tokens, classes = logits.shape
        check_tokens(targets, classes, "target", ignored=True)
        saved.keep("cross_entropy.exponentials", logits)  # on a GPU still the logits
        saved.keep("cross_entropy.targets", targets)
        targets = as_indices(targets, saved)
        if is_device(logits):
            statistics = saved.empty("cross_entropy.sums", (tokens, 2), accumulation_dtype(logits.dtype))
            return cuda_kernels.cross_entropy(logits, targets, statistics)
        loss: float = _forward(logits, targets, saved.empty("cross_entropy.sums", (tokens,), logits.dtype))
        return loss

    def backward(self, scale: float, saved: Saved) -> Array:
        """Return dlogits (tokens, classes) = (softmax - onehot) scale, in the memory of the logits."""
        logits: Array = saved["cross_entropy.exponentials"]
        targets, sums = as_indices(saved["cross_entropy.targets"], saved), saved["cross_entropy.sums"]
        if is_device(logits):
            cuda_kernels.cross_entropy_backward(logits, targets, sums, scale)
        else:
            _gradient(logits, targets, sums, logits.dtype.type(scale))
        return logits


@jit(fastmath=REORDER)
def _forward(logits: Any, targets: Any, sums: Any) -> Any:
    # Makes exponentials of the logits; returns the loss in float64.
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
    _forward.sample(lambda x=_block: (x.copy(), np.zeros(1, np.int64), x[0].copy()))
    _gradient.sample(lambda x=_block: (x.copy(), np.zeros(1, np.int64), x[0], x.dtype.type(1)))
