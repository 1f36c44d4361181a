"""Entropies compared with counting in plain Python."""

import math
from collections import Counter

import numpy as np
import pytest

from hpcdist.training.data import entropy


def _plain(tokens, order):
    grams = [tuple(tokens[i : i + order]) for i in range(len(tokens) - order + 1)]
    counts, contexts = Counter(grams), Counter(gram[:-1] for gram in grams)
    return -sum(n / len(grams) * math.log(n / contexts[gram[:-1]]) for gram, n in counts.items())


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "uint32"])
@pytest.mark.parametrize("scale", [1, 200, 100_000])
def test_entropies_match_counting(rng, dtype, scale):
    if scale * 20 > np.iinfo(dtype).max and scale > 1:
        scale = np.iinfo(dtype).max // 20
    state = np.cumsum(rng.integers(0, 3, 3000)) % 20
    tokens = (state * scale).astype(dtype)
    got = entropy.conditional_entropies(tokens)
    for order, name in enumerate(entropy.NGRAM_NAMES, start=1):
        assert got[name] == pytest.approx(_plain(tokens.tolist(), order), abs=1e-12)


def test_entropies_of_known_texts():
    got = entropy.conditional_entropies(np.tile(np.array([3, 200], np.uint8), 500))
    assert got["unigram"] == pytest.approx(math.log(2))
    assert got["bigram"] == got["trigram"] == 0.0
    assert entropy.conditional_entropies(np.zeros(1, np.uint8)) == {"unigram": 0.0, "bigram": 0.0, "trigram": 0.0}


def test_chunks_do_not_change_the_counts(rng, monkeypatch):
    tokens = rng.integers(0, 9, 1000).astype(np.uint8)
    whole = entropy.conditional_entropies(tokens)
    for size in (1, 2, 3, 7, 333, 999, 1000):
        monkeypatch.setattr(entropy, "CHUNK_TOKENS", size)
        assert entropy.conditional_entropies(tokens) == pytest.approx(whole, abs=1e-12)


def test_entropies_of_every_length(rng):
    for length in range(1, 12):
        tokens = rng.integers(5, 8, length).astype(np.uint8)
        got = entropy.conditional_entropies(tokens)
        for order, name in enumerate(entropy.NGRAM_NAMES, start=1):
            assert got[name] == pytest.approx(_plain(tokens.tolist(), order) if length >= order else 0.0, abs=1e-12)


def test_entropies_of_too_many_kinds_are_omitted(rng):
    tokens = rng.permutation(np.arange(6000)).astype(np.uint16)
    got = entropy.conditional_entropies(tokens)
    assert got["unigram"] == pytest.approx(math.log(6000))
    assert got["bigram"] is None
    assert got["trigram"] is None


def test_long_texts_are_sampled_evenly(rng, monkeypatch):
    monkeypatch.setattr(entropy, "SAMPLE_TOKENS", 8000)
    monkeypatch.setattr(entropy, "BLOCK_TOKENS", 1000)
    tokens = np.repeat(np.array([1, 2], np.uint8), 50_000)
    assert entropy.conditional_entropies(tokens)["unigram"] == pytest.approx(math.log(2))
    blocks = entropy._sampled_blocks(rng.integers(0, 256, 50_000).astype(np.uint8))
    assert [len(block) for block in blocks] == [1000] * 8
