"""Samples that are filled with whole documents, so that little of a context is padding.

Documents are the files of a directory, and end behind each token ``data.document_end``. They are packed once, at the
start, from the longest to the shortest, each into the sample that it fills best ("best fit decreasing"; Ding et al.,
arXiv:2404.10830): what a sample holds follows from the data, the context and nothing else. A rank keeps 28 bytes a
document and 16 a sample.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from hpcdist.arrays.jit import jit
from hpcdist.errors import DataError
from hpcdist.models.config import ModelConfig
from hpcdist.models.counts import DocumentPairs, attention_pairs
from hpcdist.models.documents import PackedTokens
from hpcdist.models.stage import IGNORED
from hpcdist.training.data.samples import Batch, FilledSamples, MaskedSamples, Sliceable
from hpcdist.training.recipe.config import DataConfig

SCANNED_TOKENS = 1 << 22  # read at a time in search of ends


def document_ends(tokens: Sliceable, files: np.ndarray | None, config: DataConfig, what: str) -> np.ndarray:
    """Return the place behind the last token of each document, ascending int64; ``files`` are those of files, if any.

    Raises DataError where nothing says where documents end.
    """
    found = [np.array([len(tokens)], np.int64)] if files is None else [files.astype(np.int64)]
    token = config.document_end
    if token >= 0:
        for start in range(0, len(tokens), SCANNED_TOKENS):
            block = np.asarray(tokens[start : start + SCANNED_TOKENS])
            found.append(np.flatnonzero(block == token) + start + 1)
    elif files is None:
        raise DataError(
            f"data.packed = true: {what} does not say where its documents end; set data.document_end to the token at "
            "the end of each (10, a new line, in a text or JSONL file), or give a directory, whose files are documents"
        )
    ends = np.unique(np.concatenate(found))
    if files is None and len(ends) == 1:
        raise DataError(
            f"data.document_end = {token}: {what} holds one document alone; name the token at the end of each, or set "
            "data.packed = false"
        )
    return ends[ends > 0]


@jit
def _best_fit(sizes: Any, order: Any, context: Any, sample_of: Any) -> Any:
    """Write the sample of each document, taken in ``order``, from long to short; return how many samples there are."""
    newest = np.full(context + 1, -1)  # by free places: the sample that was left with so many last
    older = np.empty(sizes.size, np.int64)  # the one before it
    count, low, before = 0, context + 1, context + 1  # no sample has [before, low) places free
    for i in range(order.size):
        document = order[i]
        size = sizes[document]
        for free in range(size, before):
            if newest[free] >= 0:
                low = min(low, free)
                break
        before = size
        while low <= context and newest[low] < 0:
            low += 1
        if low > context:
            sample, free = count, context
            count += 1
        else:
            sample, free = newest[low], low
            newest[low] = older[sample]
        sample_of[document] = sample
        rest = free - size
        older[sample] = newest[rest]
        newest[rest] = sample
        if rest >= size:
            low = min(low, rest)
    return count


_best_fit.sample(lambda: (np.ones(1, np.int64), np.zeros(1, np.int64), 1, np.zeros(1, np.int64)))


def best_fit(sizes: np.ndarray, context: int) -> tuple[np.ndarray, int]:
    """Return the sample of each document, and the number of samples of ``context``; ``sizes`` int64 from 1 to that."""
    sample_of = np.empty(sizes.size, np.int64)
    return sample_of, int(_best_fit(sizes, np.argsort(-sizes, kind="stable"), context, sample_of))


class PackedSamples:
    """Samples of ``context`` tokens, each of some whole documents, which end at ``ends``, and padding behind them.

    With ``predicting`` the targets are the next tokens: a document of n tokens takes n - 1 places, and none predicts
    the first token of another. Else there are no targets, and it takes n. With ``cut`` a longer one is cut into
    documents of ``context`` places and what is left; without, it raises DataError. The document before the first begins
    at ``start``.
    """

    shifts = 1

    def __init__(
        self, tokens: Sliceable, start: int, ends: np.ndarray, context: int, *, predicting: bool, cut: bool
    ) -> None:
        self._tokens, self._context, self._next = tokens, context, int(predicting)
        begins = np.concatenate([[start], ends[:-1]])
        sizes = ends - begins - self._next
        longest = int(sizes.max(initial=0))
        if longest > context and not cut:
            raise DataError(
                f"data.packed = true: a document of {longest + self._next:,} tokens is longer than a packed sample of "
                f"data.context = {context}; set data.context to at least {longest}, or data.cut_documents = true, "
                "which makes several documents of it"
            )
        parts = -(-np.maximum(sizes, 0) // context)
        within = context * (np.arange(parts.sum()) - np.repeat(np.cumsum(parts) - parts, parts))
        self._starts = np.repeat(begins, parts) + within
        self._sizes = np.minimum(np.repeat(sizes, parts) - within, context)
        sample_of, self.count = best_fit(self._sizes, context)
        if not self.count:
            raise DataError("data.packed = true: no document has a token to predict; give more data")
        self._documents = np.argsort(sample_of, kind="stable")
        self._firsts = np.concatenate([[0], np.cumsum(np.bincount(sample_of))])
        self._filled = np.bincount(sample_of, self._sizes).astype(np.int64)

    @property
    def documents(self) -> int:
        """The number of documents; those that were cut count several times."""
        return len(self._sizes)

    @property
    def padding(self) -> float:
        """The share of all places that hold no document."""
        return 1 - float(self._filled.sum()) / (self.count * self._context)

    def pairs(self, *, causal: bool, window: int) -> DocumentPairs:
        """Return the pairs of tokens in the documents of a sample, in the mean; padding is computed as one more."""
        lengths, often = np.unique(np.append(self._sizes, self._context - self._filled), return_counts=True)
        every = seen = 0
        for length, count in zip(lengths.tolist(), often.tolist(), strict=True):
            every += count * length * min(window or length, length)
            seen += count * attention_pairs(length, causal=causal, window=window)
        return DocumentPairs(every / self.count, seen / self.count)

    def filled(self, indices: np.ndarray) -> np.ndarray:
        """Return how many places of each sample hold documents, those in front."""
        filled: np.ndarray = self._filled[indices]
        return filled

    def targets(self, indices: np.ndarray) -> int:
        """Return the number of targets of samples."""
        return int(self.filled(indices).sum())

    def take(self, indices: np.ndarray, shift: int) -> Batch:
        """Return inputs, `PackedTokens`, and targets (n, context) int64, `IGNORED` in the padding."""
        shape = len(indices), self._context
        tokens, targets = np.zeros(shape, self._tokens.dtype), np.full(shape, IGNORED, np.int64)
        places = np.empty(shape, np.int64)
        numbers = np.arange(self._context)
        for row, sample in enumerate(indices.tolist()):
            at = 0
            for document in self._documents[self._firsts[sample] : self._firsts[sample + 1]].tolist():
                start, size = int(self._starts[document]), int(self._sizes[document])
                block = self._tokens[start : start + size + self._next]
                own = np.s_[row, at : at + size]
                tokens[own], places[own] = block[:size], numbers[:size]
                if self._next:
                    targets[own] = block[1:]
                at += size
            places[row, at:] = numbers[: self._context - at]
        return PackedTokens.of(tokens, places, self.filled(indices)), targets  # type: ignore[return-value]


@dataclass(frozen=True)
class PackedSplit:
    """Packed samples to train on, of the tokens in front of ``stop``, and to validate with, None for none.

    ``padding`` is the share of the places to train on that hold no document, ``pairs`` are `PackedSamples.pairs`.
    """

    training: FilledSamples
    validation: FilledSamples | None
    stop: int
    padding: float
    pairs: DocumentPairs
    described: str


def split_documents(
    tokens: Sliceable, ends: np.ndarray, config: DataConfig, model: ModelConfig, what: str
) -> PackedSplit:
    """Return samples of the documents that end at ``ends``, of which the last validate. Raises DataError."""
    number, border = len(ends), len(tokens) - round(len(tokens) * config.validation_fraction)
    if config.validation_fraction > 0:
        if number < 2:
            raise DataError(f"{what}: one document, and one to train on and one to validate are needed; give more data")
        number = min(max(1, int(np.searchsorted(ends, border, "right"))), number - 1)
    predicting, stop = model.kind != "encoder", int(ends[number - 1])

    def packed(start: int, ends: np.ndarray) -> PackedSamples:
        return PackedSamples(tokens, start, ends, config.context, predicting=predicting, cut=config.cut_documents)

    def samples(packed: PackedSamples) -> FilledSamples:
        return packed if predicting else MaskedSamples(packed, model.mask, model.vocabulary)

    training = packed(0, ends[:number])
    return PackedSplit(
        samples(training),
        samples(packed(stop, ends[number:])) if number < len(ends) else None,
        stop,
        training.padding,
        training.pairs(causal=predicting, window=model.window),
        f"{training.documents:,} documents in {training.count:,} samples of {config.context}, of which "
        f"{training.padding:.1%} is padding",
    )
