"""Cross entropy against the plain float64 formula."""

import numpy as np
import pytest

from hpcdist.errors import DataError
from hpcdist.models.arena import Arena
from hpcdist.models.cross_entropy import LocalCrossEntropy


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("integers", [np.uint8, np.uint16, np.uint32, np.int64])
@pytest.mark.parametrize(("tokens", "classes"), [(1, 1), (1, 13), (37, 256), (64, 3)])
@pytest.mark.parametrize("spread", [1.0, 40.0])
def test_against_the_formula(tokens, classes, integers, spread, dtype, rng):
    logits = (spread * rng.standard_normal((tokens, classes))).astype(dtype)
    targets = rng.integers(0, classes, tokens).astype(integers)
    wide = logits.astype(np.float64)
    top = wide.max(1, keepdims=True)
    logarithms = wide - top - np.log(np.exp(wide - top).sum(1, keepdims=True))
    loss = -logarithms[np.arange(tokens), targets.astype(int)].sum()
    gradient = np.exp(logarithms)
    gradient[np.arange(tokens), targets.astype(int)] -= 1
    saved = Arena().saved(0)
    got = LocalCrossEntropy().forward(logits, targets, saved)
    limit = 2e-6 if dtype == "float32" else 1e-13
    assert isinstance(got, float) and abs(got - loss) <= limit * (tokens + abs(loss))
    dlogits = LocalCrossEntropy().backward(0.125, saved)
    assert dlogits is logits or np.may_share_memory(dlogits, logits)
    assert np.abs(dlogits - 0.125 * gradient).max() <= 4 * limit


@pytest.mark.parametrize("bad", [7, -1])
def test_a_target_that_is_no_class_is_refused(bad):
    with pytest.raises(DataError, match=f"target {bad} is outside \\[0, 7\\)"):
        LocalCrossEntropy().forward(np.zeros((2, 7)), np.array([0, bad]), Arena().saved(0))


def test_a_nan_logit_makes_the_loss_nan(rng):
    logits = rng.standard_normal((5, 50)).astype(np.float32)
    logits[3, 20] = np.nan
    assert np.isnan(LocalCrossEntropy().forward(logits, np.zeros(5, np.uint8), Arena().saved(0)))
