"""Softmax cross entropy: loss in float64, gradient in place of the logits."""

import numpy as np

from hpcdist.arrays.backend import Array, Scalar, namespace
from hpcdist.models.softmax import normalise, shift
from hpcdist.models.stage import Saved
from hpcdist.models.tokens import check_tokens


class LocalCrossEntropy:
    """Negative log likelihood of the target classes in nats."""

    def forward(self, logits: Array, targets: Array, saved: Saved, name: str = "cross_entropy") -> Scalar:
        """Return the sum over tokens, as float64. Contiguous logits (tokens, classes) become probabilities.

        ``targets`` are integers (tokens,). Raises DataError on one that is no class. A GPU is not waited for: its sum
        stays there, as an array ().
        """
        xp = namespace(logits)
        tokens, classes = logits.shape
        targets = check_tokens(targets.reshape(-1), classes, "target")
        cube = logits.reshape(1, tokens, classes)
        sums = saved.empty(f"{name}.sums", (1, tokens), logits.dtype)
        shift(cube, 0, tokens, classes, classes, 1.0)
        chosen = logits[xp.arange(tokens), targets]
        xp.exp(logits, out=logits)
        normalise(cube, 0, tokens, classes, sums)
        saved.keep(f"{name}.p", logits)
        saved.keep(f"{name}.targets", targets)
        total: Scalar = xp.log(sums.astype(np.float64)).sum() - chosen.sum(dtype=np.float64)
        return total

    def backward(self, scale: float, saved: Saved, name: str = "cross_entropy") -> Array:
        """Return dlogits (tokens, classes) = (softmax - onehot) scale, in the memory of the logits."""
        targets = saved[f"{name}.targets"]
        p: Array = saved[f"{name}.p"]
        p *= scale
        p[namespace(p).arange(p.shape[0]), targets] -= scale
        return p
