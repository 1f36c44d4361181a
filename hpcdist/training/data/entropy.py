"""N-gram entropies of a text: the losses of models with a context of 0, 1 or 2 tokens."""

from typing import Any, Final

import numpy as np

from hpcdist.arrays.jit import jit
from hpcdist.training.data.samples import Sliceable

NGRAM_NAMES: Final = ("unigram", "bigram", "trigram")
SAMPLE_TOKENS: Final = 1 << 25
BLOCK_TOKENS: Final = 1 << 20
CHUNK_TOKENS: Final = 1 << 21
# More n-gram kinds take too much memory, and their counts would say little about a short text.
MOST_NGRAM_KINDS: Final = 1 << 24


def conditional_entropies(tokens: Sliceable) -> dict[str, float | None]:
    """Return {n-gram name: entropy in nats, or None} of the text ``tokens``, for unigrams, bigrams and trigrams.

    The entropy is the entropy of the last token of an n-gram, given the tokens before. A text longer than SAMPLE_TOKENS
    is sampled evenly. An entropy is None if there are too many distinct n-grams.
    """
    blocks = _sampled_blocks(tokens)
    chunks = (block[start : start + CHUNK_TOKENS] for block in blocks for start in range(0, len(block), CHUNK_TOKENS))
    small = tokens.dtype.itemsize <= 2
    used = np.unique(
        np.concatenate([np.flatnonzero(np.bincount(chunk)) if small else np.unique(chunk) for chunk in chunks])
    )
    kinds = used.size
    order = max((n for n in range(1, len(NGRAM_NAMES) + 1) if kinds**n <= MOST_NGRAM_KINDS), default=0)
    entropies: dict[str, float | None] = dict.fromkeys(NGRAM_NAMES)
    if order == 0:
        return entropies
    # Only the longest n-grams are counted; dropping their last tokens gives the counts of the shorter n-grams.
    counts = np.zeros(kinds**order, np.int64)
    _count_ngrams(blocks, used, order, counts)
    while order:
        contexts = counts.reshape(-1, kinds).sum(axis=1)
        # The sum over n-grams of -p ln(p / q): p is the relative frequency of an n-gram (``counts``), q of the n-gram
        # without its last token (``contexts``).
        total = int(counts.sum())
        entropy = max(0.0, (_n_log_n(contexts) - _n_log_n(counts)) / total) if total else 0.0
        entropies[NGRAM_NAMES[order - 1]] = entropy
        order -= 1
        if order:  # the last (n-1)-gram of a block is not a prefix of any n-gram
            _count_ngrams([block[-order:] for block in blocks], used, order, contexts)
        counts = contexts
    return entropies


def _sampled_blocks(tokens: Sliceable) -> list[np.ndarray]:
    if len(tokens) <= SAMPLE_TOKENS:
        return [np.asarray(tokens[:])]
    count = SAMPLE_TOKENS // BLOCK_TOKENS
    starts = (index * (len(tokens) - BLOCK_TOKENS) // (count - 1) for index in range(count))
    return [np.asarray(tokens[start : start + BLOCK_TOKENS]) for start in starts]


def _count_ngrams(blocks: list[np.ndarray], used: np.ndarray, order: int, counts: np.ndarray) -> None:
    # Consecutive token numbers make the table of counts as small as possible.
    narrow = used[0] >= 0 and used[-1] < 1 << 16
    numbers = np.searchsorted(used, np.arange(1 << 16)) if narrow else np.arange(used.size)
    for block in blocks:
        for start in range(0, len(block) - order + 1, CHUNK_TOKENS):
            chunk = block[start : start + CHUNK_TOKENS + order - 1]
            positions = chunk.astype(np.uint16) if narrow else np.searchsorted(used, chunk)
            _count(positions, numbers, used.size, order, counts)


@jit
def _count(positions: Any, numbers: Any, kinds: Any, order: Any, counts: Any) -> Any:
    # Token i of the text has the id numbers[positions[i]], of ``kinds`` distinct ids. The n-gram of ids a, b, c has the
    # index (a * kinds + b) * kinds + c in ``counts``.
    third, second = kinds * kinds if order == 3 else 0, kinds if order >= 2 else 0
    two_before, before = 0, 0
    for i in range(len(positions)):
        number = numbers[positions[i]]
        if i >= order - 1:
            counts[two_before * third + before * second + number] += 1
        two_before, before = before, number


_count.sample(lambda: (np.zeros(1, np.uint16), np.zeros(1, np.int64), 1, 1, np.zeros(1, np.int64)))
_count.sample(lambda: (np.zeros(1, np.int64), np.zeros(1, np.int64), 1, 1, np.zeros(1, np.int64)))


def _n_log_n(counts: np.ndarray) -> float:
    seen = counts[counts > 0].astype(np.float64)
    return float((seen * np.log(seen)).sum())
