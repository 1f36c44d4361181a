"""Sampling from logits: greedy, temperature, top-k, top-p, stops, window, and the same text for the same seed."""

import numpy as np
import pytest

from hpcdist.training.generation import WindowDecoder, generate
from hpcdist.training.text import BYTE_CODEC, TextStream


def successor(tokens):
    """Return the logits of a model that always predicts the last token plus one (mod 10)."""
    logits = np.zeros((1, tokens.shape[1], 10))
    logits[0, np.arange(tokens.shape[1]), (tokens[0] + 1) % 10] = 2.0
    return logits


def drawn(logits_of, count, context=4, *, prompts=((3,),), temperature=1.0, top_k=0, seed=0, **options):
    """Return the generated tokens of each prompt."""
    texts = [[] for _ in prompts]
    decoder = WindowDecoder(logits_of, context)
    for index, token in generate(decoder, prompts, count, temperature=temperature, top_k=top_k, seed=seed, **options):
        texts[index].append(token)
    return texts if len(texts) > 1 else texts[0]


def test_greedy_sampling_selects_the_most_likely_token():
    assert drawn(successor, 8, temperature=0.0) == [4, 5, 6, 7, 8, 9, 0, 1]


def test_top_1_is_greedy_at_any_temperature():
    assert drawn(successor, 5, temperature=5.0, top_k=1) == [4, 5, 6, 7, 8]


def test_sampled_text_depends_on_the_seed():
    assert drawn(successor, 50, seed=1) == drawn(successor, 50, seed=1) != drawn(successor, 50, seed=2)


def test_sampled_tokens_follow_the_softmax(rng):
    fixed = rng.standard_normal(6)
    draws = drawn(lambda _: fixed[None, None], 5000, temperature=0.7, seed=int(rng.integers(1e9)))
    expected = np.exp(fixed / 0.7) / np.exp(fixed / 0.7).sum()
    assert np.abs(np.bincount(draws, minlength=6) / len(draws) - expected).max() < 0.04


@pytest.mark.parametrize(("top_p", "kept"), [(0.45, [2]), (0.6, [2, 0]), (0.88, [2, 0, 3]), (1.0, [2, 0, 3, 1])])
def test_top_p_keeps_the_smallest_set_with_this_probability(top_p, kept, rng):
    chances = np.array([0.25, 0.1, 0.5, 0.15])
    draws = drawn(lambda _: np.log(chances)[None, None], 4000, top_p=top_p, seed=int(rng.integers(1e9)))
    shares = np.bincount(draws, minlength=4) / len(draws)
    expected = np.where(np.isin(np.arange(4), kept), chances, 0) / chances[kept].sum()
    assert np.abs(shares - expected).max() < 0.04 and not shares[expected == 0].any()


def test_texts_end_after_their_own_stop():
    texts = drawn(successor, 8, prompts=[(3,), (6, 7), (9,)], temperature=0.0, stops=[(6, 7), (1,)])
    assert texts == [[4, 5, 6, 7], [8, 9, 0, 1], [0, 1]]
    assert drawn(successor, 3, prompts=[(6, 7)], temperature=0.0, stops=[(7, 8)]) == [8, 9, 0], "a prompt is no stop"


def test_generation_limits_inputs_to_the_context():
    seen = []

    def watch(tokens):
        seen.append(tokens.shape[1])
        return successor(tokens)

    drawn(watch, 4, 3, prompts=[range(6)], temperature=0.0)
    assert seen == [3, 3, 3, 3]


def test_text_stream_holds_back_the_begin_of_a_stop():
    text = TextStream(BYTE_CODEC.decode, ["STOP", "\n\n"])
    assert [text.add(byte) for byte in "aS\u00e9STxSTOP".encode()] == [
        "a",
        "",
        "",
        "S\u00e9",
        "",
        "",
        "STx",
        "",
        "",
        "",
        "",
    ]
    assert text.finish() == ""
    text = TextStream(BYTE_CODEC.decode, ["STOP"])
    assert "".join(text.add(byte) for byte in b"aSTO") + text.finish() == "aSTO"
