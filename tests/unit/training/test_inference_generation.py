"""Sampling from logits: greedy, temperature, top-k, window, and the same text for the same seed."""

import numpy as np

from hpcdist.training.inference import generate


def successor(tokens):
    """Return the logits of a model that always predicts the last token plus one (mod 10)."""
    logits = np.zeros((1, tokens.shape[1], 10))
    logits[0, np.arange(tokens.shape[1]), (tokens[0] + 1) % 10] = 2.0
    return logits


PROMPT = np.array([3], np.uint8)


def test_greedy_sampling_selects_the_most_likely_token():
    assert list(generate(successor, PROMPT, 8, 4, temperature=0.0, top_k=0, seed=0)) == [4, 5, 6, 7, 8, 9, 0, 1]


def test_top_1_is_greedy_at_any_temperature():
    assert list(generate(successor, PROMPT, 5, 4, temperature=5.0, top_k=1, seed=0)) == [4, 5, 6, 7, 8]


def test_sampled_text_depends_on_the_seed():
    def text(seed):
        return list(generate(successor, PROMPT, 50, 4, temperature=1.0, top_k=0, seed=seed))

    assert text(1) == text(1) != text(2)


def test_sampled_tokens_follow_the_softmax(rng):
    fixed = rng.standard_normal(6)
    draws = list(
        generate(lambda _: fixed[None, None], PROMPT, 5000, 4, temperature=0.7, top_k=0, seed=int(rng.integers(1e9)))
    )
    expected = np.exp(fixed / 0.7) / np.exp(fixed / 0.7).sum()
    assert np.abs(np.bincount(draws, minlength=6) / len(draws) - expected).max() < 0.04


def test_generation_limits_inputs_to_the_context():
    seen = []

    def watch(tokens):
        seen.append(tokens.shape[1])
        return successor(tokens)

    list(generate(watch, np.arange(6, dtype=np.uint8), 4, 3, temperature=0.0, top_k=0, seed=0))
    assert seen == [3, 3, 3, 3]
