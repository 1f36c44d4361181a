"""Text from a trained model: what people look at first."""

from collections.abc import Callable, Iterator

import numpy as np

from hpcdist.arrays import rng


def generate(
    logits_of: Callable[[np.ndarray], np.ndarray],
    prompt: np.ndarray,
    count: int,
    context: int,
    *,
    temperature: float,
    top_k: int,
    seed: int,
) -> Iterator[int]:
    """Yield ``count`` tokens that continue ``prompt`` (tokens,), seeing at most the last ``context`` of them (local).

    ``logits_of`` maps tokens (1, length) to logits (1, length, vocabulary), both on the host.
    ``temperature`` 0 takes the likeliest token; ``top_k`` keeps only the k likeliest (0: all). The draws come from
    the stream of ``seed``, so the same checkpoint, prompt and seed give the same text.
    """
    draw = rng.stream(seed)
    window = list(prompt[-context:])
    for _ in range(count):
        logits = logits_of(np.array([window], prompt.dtype))[0, -1].astype(np.float64)
        token = int(logits.argmax()) if temperature == 0 else _choose(logits / temperature, top_k, draw)
        yield token
        window = [*window, token][-context:]


def _choose(logits: np.ndarray, top_k: int, draw: np.random.Generator) -> int:
    """Draw a token by the softmax of ``logits`` (vocabulary,)."""
    if 0 < top_k < logits.size:
        least = np.partition(logits, -top_k)[-top_k]
        logits = np.where(logits < least, -np.inf, logits)
    weights = np.exp(logits - logits.max())
    return int(draw.choice(logits.size, p=weights / weights.sum()))
