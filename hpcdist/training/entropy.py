"""Entropies of the n-grams of a text: what a model knows that looks at no, one or two tokens of context."""

from typing import Final

import numpy as np

from hpcdist.training.data import Source
from hpcdist.training.data.samples import Sliceable

NAMES: Final = ("unigram", "bigram", "trigram")
SAMPLE_TOKENS: Final = 1 << 24
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
    codes, kinds = _ranked(blocks)
    found: dict[str, float | None] = {}
    for order, name in enumerate(NAMES, start=1):
        found[name] = _conditional(codes, kinds, order) if kinds**order <= MOST_KINDS else None
    return found


def _sample(tokens: Sliceable) -> list[np.ndarray]:
    if len(tokens) <= SAMPLE_TOKENS:
        return [np.asarray(tokens[:])]
    count = SAMPLE_TOKENS // BLOCK_TOKENS
    starts = (index * (len(tokens) - BLOCK_TOKENS) // (count - 1) for index in range(count))
    return [np.asarray(tokens[start : start + BLOCK_TOKENS]) for start in starts]


def _ranked(blocks: list[np.ndarray]) -> tuple[list[np.ndarray], int]:
    """Return the blocks with tokens numbered 0, 1, ... without gaps, and how many kinds of tokens there are."""
    used = np.unique(np.concatenate([_kinds_in(block) for block in blocks]))
    if used[-1] < 1 << 16:
        table = np.zeros(int(used[-1]) + 1, np.int32)
        table[used] = np.arange(used.size, dtype=np.int32)
        return [table[block] for block in blocks], used.size
    return [np.searchsorted(used, block).astype(np.int32) for block in blocks], used.size


def _kinds_in(block: np.ndarray) -> np.ndarray:
    return np.flatnonzero(np.bincount(block)) if block.dtype.itemsize <= 2 else np.unique(block)


def _conditional(blocks: list[np.ndarray], kinds: int, order: int) -> float:
    """Return H(last token | the ``order - 1`` before it) over all n-grams that lie within a block."""
    counts = np.zeros(kinds**order, np.int64)
    for block in blocks:
        for start in range(0, len(block) - order + 1, CHUNK_TOKENS):
            chunk = block[start : start + CHUNK_TOKENS + order - 1]
            code = chunk[: len(chunk) - order + 1]
            for place in range(1, order):
                code = code * np.int32(kinds) + chunk[place : len(chunk) - order + 1 + place]
            counts += np.bincount(code, minlength=counts.size)
    total = int(counts.sum())
    if total == 0:
        return 0.0
    contexts = counts.reshape(-1, kinds).sum(axis=1)
    # The sum over n-grams of -p ln(p / p(context)), with the counts left undivided to the end.
    return max(0.0, (_n_log_n(contexts) - _n_log_n(counts)) / total)


def _n_log_n(counts: np.ndarray) -> float:
    seen = counts[counts > 0].astype(np.float64)
    return float((seen * np.log(seen)).sum())
