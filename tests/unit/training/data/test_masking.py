"""Masks: an exact number of tokens per sample, determined by seed, epoch and sample only."""

import numpy as np
import pytest

from hpcdist.models.stage import IGNORED
from hpcdist.models.transformer import masked_predictions
from hpcdist.training.data.sampler import Sampler, in_order
from hpcdist.training.data.samples import MaskedSamples, TokenWindows

MASK = 255


def make_masked_samples(
    rng, context=20, length=2001, dtype=np.uint8, vocabulary=256, mask=MASK, shifting=True, high=255
):
    tokens = rng.integers(0, high, length).astype(dtype)  # no mask among them
    return tokens, MaskedSamples(TokenWindows(tokens, context, shifting), mask, vocabulary)


@pytest.mark.parametrize(("context", "expected"), [(1, 1), (3, 1), (7, 1), (10, 2), (20, 3), (128, 19), (256, 38)])
def test_each_sample_has_the_exact_number_of_targets(context, expected, rng):
    assert masked_predictions(context) == expected
    tokens, samples = make_masked_samples(rng, context, length=20 * context + 30)
    x, targets = samples.in_epoch(5, 3).take(np.array([4, 0, 11]), 1)
    assert x.shape == targets.shape == (3, context)
    assert ((targets != IGNORED).sum(axis=1) == expected).all()
    whole = np.array([tokens[1 + index * context :][:context] for index in (4, 0, 11)])
    chosen = targets != IGNORED
    assert (targets[chosen] == whole[chosen]).all()
    assert (x[~chosen] == whole[~chosen]).all()
    assert x.flags.c_contiguous and targets.flags.c_contiguous


def test_chosen_tokens_are_masked_replaced_or_kept_by_shares(rng):
    _, samples = make_masked_samples(rng, 100, length=600_001)
    x, targets = samples.in_epoch(int(rng.integers(1 << 40)), 0).take(np.arange(5000), 0)
    chosen = targets != IGNORED
    count = chosen.sum()
    assert count == 5000 * 15
    masks, same = (x == MASK)[chosen].mean(), (x == targets)[chosen].mean()
    other = 1 - masks - same
    # Five deviations of shares of so many draws. Another token is by chance the same one in 255.
    for got, want in ((masks, 0.8), (same, 0.1 + 0.1 / 255), (other, 0.1 - 0.1 / 255)):
        assert abs(got - want) < 5 * np.sqrt(want * (1 - want) / count)
    places = chosen.mean(axis=0)  # every place is chosen as often as any other
    assert (abs(places - 0.15) < 5 * np.sqrt(0.15 * 0.85 / 5000)).all()
    drawn = np.bincount(x[chosen & (x != targets) & (x != MASK)], minlength=256)
    assert drawn[MASK] == 0 and (drawn[:255] > 0).all()


def test_masks_do_not_depend_on_the_batch_but_on_the_epoch(rng):
    _, samples = make_masked_samples(rng)
    first = samples.in_epoch(9, 2)
    whole = first.take(np.arange(50), 0)
    for part in (slice(0, 7), slice(7, 8), slice(8, 50)):
        for got, want in zip(first.take(np.arange(50)[part], 0), whole, strict=True):
            assert (got == want[part]).all()
    for seed, epoch in ((9, 3), (8, 2), (9 + (1 << 33), 2)):
        other = samples.in_epoch(seed, epoch).take(np.arange(50), 0)[1]
        assert ((other != IGNORED) != (whole[1] != IGNORED)).any(axis=1).mean() > 0.9
    large = first._words(np.array([1, 1 + (1 << 32)]), 8)
    assert (large[0] != large[1]).any()


def test_sampler_changes_the_masks_every_epoch(rng):
    _, samples = make_masked_samples(rng, 20, 1001, shifting=False)
    sampler = Sampler(samples, 3)
    epochs = [sampler.batch(epoch * samples.count, samples.count)[1] for epoch in range(3)]
    ordered = [np.sort(epoch[epoch != IGNORED]) for epoch in epochs]
    assert not any((ordered[0].size == other.size) and (ordered[0] == other).all() for other in ordered[1:])
    across = sampler.batch(samples.count - 5, 10)
    assert (across[1][:5] == epochs[0][-5:]).all() and (across[1][5:] == epochs[1][:5]).all()


def test_validation_masks_are_constant(rng):
    _, samples = make_masked_samples(rng, shifting=False)
    looks = [np.concatenate([y for _, y in in_order(samples, 0, parts, 0, 4)]) for parts in (1, 1)]
    assert (looks[0] == looks[1]).all()
    halves = [np.concatenate([y for _, y in in_order(samples, 0, 2, part, 4)]) for part in range(2)]
    assert (np.concatenate(halves) == looks[0]).all()


def test_input_dtype_can_hold_the_mask_token(rng):
    for dtype, vocabulary, mask, wide in (
        (np.uint8, 256, 255, np.uint8),
        (np.uint8, 257, 256, np.uint16),
        (np.uint16, 300, 3, np.uint16),
        (np.uint16, 70_000, 69_999, np.uint32),
    ):
        tokens, samples = make_masked_samples(rng, 40, 401, dtype, vocabulary, mask, shifting=False)
        x, targets = samples.take(np.arange(10), 0)
        assert x.dtype == wide and targets.dtype == np.int64
        chosen = targets != IGNORED
        assert (x[chosen] == mask).sum() > 20
        assert (x[~chosen] == tokens[:400].reshape(10, 40)[~chosen]).all()


def test_masking_of_no_samples(rng):
    _, samples = make_masked_samples(rng)
    x, targets = samples.take(np.empty(0, np.int64), 0)
    assert x.shape == targets.shape == (0, 20)


def test_masks_match_recorded_values():
    # A change here changes every run of an encoder: what was trained before cannot be resumed bit-equal.
    tokens = np.arange(200, dtype=np.uint8)
    x, targets = (
        MaskedSamples(TokenWindows(tokens, 20, shifting=False), MASK, 256).in_epoch(1, 2).take(np.array([0, 8]), 0)
    )
    places = [np.flatnonzero(row != IGNORED).tolist() for row in targets]
    assert places == [[1, 5, 18], [2, 5, 16]]
    assert [x[row, result].tolist() for row, result in enumerate(places)] == [[95, 255, 255], [254, 255, 255]]
