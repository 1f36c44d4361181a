"""Softmax cross entropy: loss in float64, gradient in place of the logits.

Forward and backward each take one pass over the logits. With machine epsilon e of the dtype, the error of a gradient is
at most ``32 e scale``. The error of a loss is at most ``8 e`` per token, plus ``8 e`` times the range of the logits.
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
    """Cross-entropy loss of target classes, in nats."""

    def forward(self, logits: Array, targets: Array, saved: Saved) -> Scalar:
        """Return the float64 sum of the losses. Overwrite the contiguous logits, kept in ``saved``, by exponentials.

        Targets of -1 are ignored. Other invalid targets raise DataError on the host; on a GPU, the sum becomes NaN.
        """
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
