"""Dropout: masks compared with an independent Philox, independent of how the work is split; gradients; evaluation."""

from dataclasses import replace

import numpy as np
import pytest

from harness.devices import MODELS, ModelRun, batches_of
from hpcdist.models.arena import Arena
from hpcdist.models.attention.flash import LocalAttention
from hpcdist.models.attention.tiles import LONG
from hpcdist.models.layers.dropout import ATTENTION, MAX_SITES, LocalDropout, mask
from hpcdist.models.model import Model
from hpcdist.models.stage import Draw

SEED = 0x123456789ABCDEF
SITE = 2
DROPPING = [case for case, (config, _) in MODELS.items() if config.dropout]


def _philox(counter, key):
    """Compute the Philox cipher as its authors define it, one round and one Python integer at a time."""
    c, k = list(counter), list(key)
    for _ in range(10):
        high0, low0 = divmod(0xD2511F53 * c[0], 1 << 32)
        high1, low1 = divmod(0xCD9E8D57 * c[2], 1 << 32)
        c = [high1 ^ c[1] ^ k[0], low1, high0 ^ c[3] ^ k[1], low0]
        k = [(k[0] + 0x9E3779B9) % (1 << 32), (k[1] + 0xBB67AE85) % (1 << 32)]
    return tuple(c)


def _kept(draw, layer, site, rate, sample, rows, columns):
    """Return the expected mask of sample ``sample`` of the batch, shape (rows, columns)."""
    kept = np.empty((rows, columns), bool)
    blocks = -(-columns // 4)
    key = draw.seed % (1 << 32), draw.seed >> 32
    for row, column in np.ndindex(rows, columns):
        counter = row * blocks + column // 4, sample, layer * MAX_SITES + site, draw.step
        kept[row, column] = _philox(counter, key)[column % 4] >= round(rate * 2**32)
    return kept


def _saved(draw, layer=3):
    saved = Arena().saved(layer)
    saved.draw = draw
    return saved


def test_reference_philox_matches_a_published_vector():
    counter, key = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0)
    assert _philox(counter, key) == (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)


@pytest.mark.parametrize("shape", [(3, 2, 7), (2, 5, 4), (3, 6)])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_masks_match_the_reference(shape, dtype, rng):
    draw, rate = Draw(SEED, 17, 5), 0.3
    x = rng.standard_normal(shape).astype(dtype)
    rows = shape[1] if len(shape) > 2 else 1
    kept = np.stack([_kept(draw, 3, SITE, rate, 5 + i, rows, shape[-1]) for i in range(shape[0])]).reshape(shape)
    want = np.where(kept, x * x.dtype.type(1 / 0.7), 0)
    assert 0 < kept.sum() < kept.size
    saved = _saved(draw)
    assert (LocalDropout().backward(x, rate, SITE, saved) == want).all()
    y = x.copy()
    assert LocalDropout().forward(y, rate, SITE, saved) is y and (y == want).all()


@pytest.mark.parametrize("context", [1, 70, LONG + 66])
@pytest.mark.full_except("70", "1")
@pytest.mark.matrix_except("70", "1")
def test_attention_mask_matches_the_reference(context, rng):
    draw, rate, batch, heads, size = Draw(SEED, 2, 9), 0.4, 2, 3, 2
    qkv = rng.standard_normal((batch, context, 3 * heads * size))
    saved = _saved(draw)
    got = LocalAttention().forward(qkv, size, saved, dropout=rate)
    q, k, v = qkv.reshape(batch, context, 3, heads, size).transpose(2, 0, 3, 1, 4)
    p = np.tril(np.exp(q @ k.swapaxes(2, 3) / np.sqrt(size)))
    p /= p.sum(-1, keepdims=True)
    kept = np.stack([_kept(draw, 3, ATTENTION, rate, 9 + i, heads * context, context) for i in range(batch)])
    factors = kept.reshape(p.shape) / (1 - rate)
    want = (p * factors) @ v
    np.testing.assert_allclose(got, want.swapaxes(1, 2).reshape(got.shape), rtol=1e-11, atol=1e-13)
    dy = rng.standard_normal(got.shape)
    do = dy.reshape(batch, context, heads, size).swapaxes(1, 2)
    dp = (do @ v.swapaxes(2, 3)) * factors
    ds = p * (dp - (p * dp).sum(-1, keepdims=True)) / np.sqrt(size)
    parts = ds @ k, ds.swapaxes(2, 3) @ q, (p * factors).swapaxes(2, 3) @ do
    want = np.stack(parts).transpose(1, 3, 0, 2, 4).reshape(qkv.shape)
    np.testing.assert_allclose(LocalAttention().backward(dy, saved), want, rtol=1e-10, atol=1e-12)


def test_subset_of_heads_has_the_mask_of_the_whole_layer(rng):
    draw, size, heads = Draw(1, 1, 4), 3, 5
    qkv = rng.standard_normal((2, 66, 3, heads, size))
    dy = rng.standard_normal((2, 66, heads, size))
    whole = _saved(draw)
    y = LocalAttention().forward(qkv.reshape(2, 66, -1), size, whole, dropout=0.5)
    dqkv = LocalAttention().backward(dy.reshape(2, 66, -1), whole).reshape(qkv.shape)
    for first, last in ((0, 2), (2, 5)):
        saved = _saved(draw)
        local_data = np.ascontiguousarray(qkv[..., first:last, :]).reshape(2, 66, -1)
        part = LocalAttention().forward(local_data, size, saved, dropout=0.5, part=(first, heads))
        want = y.reshape(2, 66, heads, size)[:, :, first:last].reshape(part.shape)
        np.testing.assert_allclose(part, want, rtol=1e-12)
        got = LocalAttention().backward(np.ascontiguousarray(dy[:, :, first:last]).reshape(part.shape), saved)
        np.testing.assert_allclose(got.reshape(2, 66, 3, -1, size), dqkv[..., first:last, :], rtol=1e-10, atol=1e-14)


def test_rows_of_a_micro_batch_have_the_mask_of_the_whole_batch(rng):
    x = rng.standard_normal((4, 6, 9))
    draw = Draw(8, 3, 11)
    want = LocalDropout().forward(x.copy(), 0.3, SITE, _saved(draw))
    for parts in ([(0, 4)], [(0, 1), (1, 4)], [(0, 2), (2, 3), (3, 4)]):
        for first, last in parts:
            y = LocalDropout().forward(x[first:last].copy(), 0.3, SITE, _saved(replace(draw, first_sample=11 + first)))
            assert (y == want[first:last]).all()
    flat, dropped = x.reshape(24, 9), mask(_saved(draw), 0.3, SITE, rows_per_sample=6, columns=9)
    for first, last in ((0, 5), (5, 17), (17, 24)):
        y = flat[first:last].copy()
        dropped.drop(y.reshape(1, -1, 9), 0, last - first, 9, above=first)
        assert (y == want.reshape(24, 9)[first:last]).all()


def test_dropout_rate_is_met_and_streams_differ():
    ones = np.ones((8, 512, 256), np.float32)
    seen = []
    for draw, layer, site in [
        (Draw(0, 1, 0), 1, 0),
        (Draw(0, 1, 0), 1, 1),
        (Draw(0, 1, 0), 2, 0),
        (Draw(0, 2, 0), 1, 0),
        (Draw(1, 1, 0), 1, 0),
        (Draw(1 << 32, 1, 0), 1, 0),
    ]:
        y = LocalDropout().forward(ones.copy(), 0.1, site, _saved(draw, layer))
        seen.append(y == 0)
        deviation = (0.1 * 0.9 / y.size) ** 0.5
        assert abs((y == 0).mean() - 0.1) < 6 * deviation
        assert abs(y.mean() - 1) < 6 * deviation / 0.9
    for i, one in enumerate(seen):  # of two independent masks, one element in a hundred is dropped in both
        for other in seen[:i]:
            assert abs((one & other).mean() - 0.01) < 6 * (0.01 * 0.99 / one.size) ** 0.5


@pytest.mark.parametrize("rate", [0.0, 1e-12, 1 - 1e-12])
def test_extreme_rates_drop_all_or_nothing(rate):
    y = LocalDropout().forward(np.ones((3, 40)), rate, SITE, _saved(Draw(0, 1, 0)))
    np.testing.assert_allclose(y, 0 if rate > 0.5 else 1, rtol=1e-9)


def test_dropped_non_finite_values_stay_visible():
    y = LocalDropout().forward(np.full((4, 64), np.nan, np.float32), 0.5, SITE, _saved(Draw(0, 1, 0)))
    assert np.isnan(y).all()


@pytest.mark.parametrize("case", DROPPING)
@pytest.mark.full_except("convnet rms, dropout")
def test_gradients_with_dropout_match_finite_differences(case, rng):
    (x, targets), seed = batches_of(case, rng)[0], 3
    run = ModelRun(case, "float64", "cpu", seed)
    model = run.model
    run.step([(x, targets)])

    def loss():
        logits = model.forward(run.parameters, x, run.arena, 0, run.draw(0))
        total = model.loss.forward(logits, targets, model.operations, run.arena.saved(model.stages[-1].layer))
        for stage in model.stages:
            run.arena.saved(stage.layer).release()
        return 0.25 * total

    step = 1e-6
    for segment in model.layout.segments:
        flat, got = run.store.range(segment.range), run.gradient.range(segment.range)
        for i in rng.choice(flat.size, min(flat.size, 12), replace=False):
            value, losses = flat[i], []
            for sign in (1, -1):
                flat[i] = value + sign * step
                losses.append(loss())
            flat[i] = value
            want = (losses[0] - losses[1]) / (2 * step)
            assert abs(got[i] - want) <= 1e-6 * (1 + abs(want)), (segment.key, i)


@pytest.mark.parametrize("case", DROPPING)
def test_gradients_do_not_depend_on_the_micro_batches(case, rng):
    batches = [batch for _ in range(2) for batch in batches_of(case, rng)]
    x, targets = (np.concatenate(parts)[:8] for parts in zip(*batches, strict=True))
    results = []
    for size in (8, 4, 2, 3):
        run = ModelRun(case, "float64", "cpu", 7)
        losses = run.step([(x[first : first + size], targets[first : first + size]) for first in range(0, 8, size)])
        results.append((sum(losses), run.gradient.array.copy()))
    other = ModelRun(case, "float64", "cpu", 7)
    other.number = 2
    other.step([(x, targets)])
    loss, gradient = results[0]
    for again, same in results[1:]:
        assert again == pytest.approx(loss, rel=1e-13)
        assert np.linalg.norm(same - gradient) <= 1e-13 * np.linalg.norm(gradient)
    assert np.linalg.norm(other.gradient.array - gradient) > 1e-3 * np.linalg.norm(gradient)  # another step


@pytest.mark.parametrize("case", DROPPING)
def test_evaluation_drops_nothing(case, rng):
    run = ModelRun(case, "float64", "cpu", 5)
    (batch,) = batches_of(case, rng)[:1]
    for stage in (plain := Model(run.model.stages, "float64", tokens_per_sample=1)).stages:
        stage.dropout = 0.0
    want = plain.evaluate(run.parameters, *batch, Arena())
    for stage in run.model.stages:
        stage.dropout = 0.5
    run.step([batch])
    assert run.model.evaluate(run.parameters, *batch, run.arena) == want
