"""Cross entropy compared with the plain float64 formula."""

import numpy as np
import pytest

from hpcdist.errors import DataError
from hpcdist.models.arena import Arena
from hpcdist.models.layers.embedding import LocalCrossEntropy


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("integers", [np.uint8, np.uint16, np.uint32, np.int64])
@pytest.mark.parametrize(("tokens", "classes"), [(1, 1), (1, 13), (170, 256), (64, 3), (2, 16385), (0, 5)])
@pytest.mark.parametrize("spread", [1.0, 40.0])
def test_cross_entropy_matches_the_formula(tokens, classes, integers, spread, dtype, rng):
    logits = (spread * rng.standard_normal((tokens, classes))).astype(dtype)
    targets = rng.integers(0, min(classes, 256), tokens).astype(integers)
    wide = logits.astype(np.longdouble)
    top = wide.max(1, keepdims=True)
    logarithms = wide - top - np.log(np.exp(wide - top).sum(1, keepdims=True))
    loss = -logarithms[np.arange(tokens), targets.astype(int)].sum()
    gradient = np.exp(logarithms)
    gradient[np.arange(tokens), targets.astype(int)] -= 1
    saved = Arena().saved(0)
    got = LocalCrossEntropy().forward(logits, targets, saved)
    eps = np.finfo(dtype).eps
    assert isinstance(got, float) and abs(got - loss) <= 8 * eps * (tokens + (top - wide).max(1).sum())
    dlogits = LocalCrossEntropy().backward(0.125, saved)
    assert dlogits is logits or np.may_share_memory(dlogits, logits)
    assert (np.abs(dlogits - 0.125 * gradient) <= 32 * eps * 0.125).all()


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_target_minus_one_has_no_loss_and_no_gradient(dtype, rng):
    logits = rng.standard_normal((300, 200)).astype(dtype)
    targets = np.where(rng.random(300) < 0.15, rng.integers(0, 200, 300), -1)
    targets[[0, -1]] = -1
    counted = targets >= 0
    alone, saved = Arena().saved(0), Arena().saved(1)
    want = LocalCrossEntropy().forward(logits[counted], targets[counted], alone)
    got = LocalCrossEntropy().forward(logits, targets, saved)
    np.testing.assert_allclose(got, want, rtol=1e-6 if dtype == "float32" else 1e-14)
    dlogits = LocalCrossEntropy().backward(0.5, saved)
    assert not dlogits[~counted].any()
    np.testing.assert_allclose(dlogits[counted], LocalCrossEntropy().backward(0.5, alone), rtol=1e-6)


@pytest.mark.parametrize("bad", [7, -2])
def test_target_out_of_range_is_rejected(bad):
    with pytest.raises(DataError, match=f"target {bad} is outside \\[0, 7\\)"):
        LocalCrossEntropy().forward(np.zeros((2, 7)), np.array([0, bad]), Arena().saved(0))


def test_nan_logit_makes_the_loss_nan(rng):
    logits = rng.standard_normal((5, 50)).astype(np.float32)
    logits[3, 20] = np.nan
    assert np.isnan(LocalCrossEntropy().forward(logits, np.zeros(5, np.uint8), Arena().saved(0)))


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_non_finite_logit_stays_visible_in_the_gradient(value, rng):
    logits = rng.standard_normal((5, 50)).astype(np.float32)
    logits[3, 20] = value
    saved = Arena().saved(0)
    with np.errstate(invalid="ignore"):
        assert np.isnan(LocalCrossEntropy().forward(logits, np.zeros(5, np.uint8), saved))
    gradient = LocalCrossEntropy().backward(1.0, saved)
    assert np.isnan(gradient[3]).any() and np.isfinite(gradient[[0, 1, 2, 4]]).all()
