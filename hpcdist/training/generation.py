"""Generation of tokens with a language model: temperature, top-k, top-p, stop sequences, several texts at a time."""

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from typing import Protocol

import numpy as np

from hpcdist.arrays import rng


class Decoder(Protocol):
    """Source of the logits of the next token of each text."""

    def logits(self, texts: Mapping[int, Sequence[int]]) -> dict[int, np.ndarray]:
        """Return {number of a text: logits of its next token}. ``texts``: {number: all tokens of the text}."""


class WindowDecoder:
    """Decoder that computes the last ``context`` tokens of a text again for each new token."""

    def __init__(self, logits_of: Callable[[np.ndarray], np.ndarray], context: int) -> None:
        self._logits_of, self._context = logits_of, context  # (1, tokens) -> (1, tokens, vocabulary)

    def logits(self, texts: Mapping[int, Sequence[int]]) -> dict[int, np.ndarray]:
        windows = {text: np.array([tokens[-self._context :]], np.int64) for text, tokens in texts.items()}
        return {text: self._logits_of(window)[0, -1] for text, window in windows.items()}


def generate(
    decoder: Decoder,
    prompts: Sequence[Sequence[int]],
    count: int,
    *,
    temperature: float,
    top_k: int,
    seed: int,
    top_p: float = 1.0,
    stops: Sequence[Sequence[int]] = (),
    ended: Container[int] = (),
) -> Iterator[tuple[int, int]]:
    """Yield (index of a prompt, next token of its text), for at most ``count`` new tokens per prompt. Local.

    ``temperature`` 0 selects the most likely token. ``top_k`` limits the choice to the k most likely tokens; 0 sets no
    limit. ``top_p`` limits the choice to the smallest set of most likely tokens whose probabilities sum to at least
    ``top_p``. A text ends after one of the token sequences ``stops``, or when its index is in ``ended``, which
    the caller may change.
    """
    draws = [rng.stream(seed, index) if index else rng.stream(seed) for index in range(len(prompts))]
    texts = {index: list(map(int, prompt)) for index, prompt in enumerate(prompts)}
    lengths = {index: len(text) for index, text in texts.items()}
    for _ in range(count):
        for index, logits in sorted(decoder.logits(texts).items()):
            row, text = logits.astype(np.float64), texts[index]
            token = int(row.argmax())
            if temperature > 0:
                token = _draw_token(row / temperature, top_k, top_p, draws[index])
            text.append(token)
            yield index, token
            if index in ended or any(ends_with(text[lengths[index] :], stop) for stop in stops):
                del texts[index]


def ends_with(tokens: Sequence[int], stop: Sequence[int]) -> bool:
    """Return True if the sequence ``stop`` is the end of ``tokens``."""
    return len(tokens) >= len(stop) > 0 and list(tokens[-len(stop) :]) == list(stop)


def _draw_token(logits: np.ndarray, top_k: int, top_p: float, draw: np.random.Generator) -> int:
    if 0 < top_k < logits.size:
        least = np.partition(logits, -top_k)[-top_k]
        logits = np.where(logits < least, -np.inf, logits)
    weights = np.exp(logits - logits.max())
    weights /= weights.sum()
    if top_p < 1.0:
        order = np.argsort(-weights, kind="stable")
        before = np.cumsum(weights[order]) - weights[order]  # sums of the more likely tokens
        weights[order[before >= top_p]] = 0.0
        weights /= weights.sum()
    return int(draw.choice(logits.size, p=weights))
