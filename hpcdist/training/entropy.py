"""Entropies of the n-grams of a text: what a model knows that looks at no, one or two tokens of context."""

from collections.abc import Iterator
from typing import Final

import numpy as np

from hpcdist.training.data import Source
from hpcdist.training.data.samples import Sliceable

NAMES: Final = ("unigram", "bigram", "trigram")
SAMPLE_TOKENS: Final = 1 << 25
BLOCK_TOKENS: Final = 1 << 20
CHUNK_TOKENS: Final = 1 << 21
# Counting more kinds of n-grams than this takes too much memory, and a text too short to show them all says too little.
MOST_KINDS: Final = 1 << 24


def of(source: Source) -> dict[str, float | None]:
    """Return the entropies of the training split in nats a token by name; empty for data that is no text (local)."""
    return {} if source.tokens is None else conditional_entropies(source.tokens)


def conditional_entropies(tokens: Sliceable) -> dict[str, float | None]:
    """Return the entropy of a token given the 0, 1 and 2 tokens before it, in nats.

    Longer texts than SAMPLE_TOKENS are sampled: blocks of BLOCK_TOKENS at even distances. None stands for n-grams of
    which there are too many kinds to be counted.
    """
    blocks = _sample(tokens)
    chunks = (block[start : start + CHUNK_TOKENS] for block in blocks for start in range(0, len(block), CHUNK_TOKENS))
    used = np.unique(np.concatenate([_kinds_in(chunk) for chunk in chunks]))
    kinds = used.size
    order = max((n for n in range(1, len(NAMES) + 1) if kinds**n <= MOST_KINDS), default=0)
    found: dict[str, float | None] = dict.fromkeys(NAMES)
    if order == 0:
        return found
    # The longest n-grams are counted; dropping their last tokens gives the counts of the shorter ones.
    counts = np.zeros(kinds**order, np.int64)
    for code in _codes(blocks, used, order):
        counts += np.bincount(code, minlength=counts.size)
    while order:
        contexts = counts.reshape(-1, kinds).sum(axis=1)
        found[NAMES[order - 1]] = _conditional(counts, contexts)
        order -= 1
        if order:
            for block in blocks:  # the last n-gram of a block begins no longer one
                for code in _codes([block[-order:]], used, order):
                    contexts[code] += 1
        counts = contexts
    return found


def _sample(tokens: Sliceable) -> list[np.ndarray]:
    if len(tokens) <= SAMPLE_TOKENS:
        return [np.asarray(tokens[:])]
    count = SAMPLE_TOKENS // BLOCK_TOKENS
    starts = (index * (len(tokens) - BLOCK_TOKENS) // (count - 1) for index in range(count))
    return [np.asarray(tokens[start : start + BLOCK_TOKENS]) for start in starts]


def _kinds_in(chunk: np.ndarray) -> np.ndarray:
    return np.flatnonzero(np.bincount(chunk)) if chunk.dtype.itemsize <= 2 else np.unique(chunk)


def _codes(blocks: list[np.ndarray], used: np.ndarray, order: int) -> Iterator[np.ndarray]:
    """Yield the n-grams that lie within a block as numbers below ``len(used) ** order``, a chunk at a time."""
    # Tokens numbered without gaps make the table of counts as small as it can be.
    table = np.searchsorted(used, np.arange(1 << 16)).astype(np.int32) if used[-1] < 1 << 16 else None
    for block in blocks:
        for start in range(0, len(block) - order + 1, CHUNK_TOKENS):
            chunk = block[start : start + CHUNK_TOKENS + order - 1]
            ranks = table[chunk] if table is not None else np.searchsorted(used, chunk).astype(np.int32)
            size = len(ranks) - order + 1
            code = ranks[:size]
            for place in range(1, order):
                code = code * np.int32(used.size) + ranks[place : size + place]
            yield code


def _conditional(counts: np.ndarray, contexts: np.ndarray) -> float:
    """Return the sum over n-grams of -p ln(p / p(context)), with the counts left undivided to the end."""
    total = int(counts.sum())
    return max(0.0, (_n_log_n(contexts) - _n_log_n(counts)) / total) if total else 0.0


def _n_log_n(counts: np.ndarray) -> float:
    seen = counts[counts > 0].astype(np.float64)
    return float((seen * np.log(seen)).sum())
