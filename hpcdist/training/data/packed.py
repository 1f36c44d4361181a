"""Packed samples: whole documents are combined in a sample, to avoid padding.

Packing by "best fit decreasing" (Ding et al., arXiv:2404.10830), once at the start: the longest document first, each
into the fullest sample with enough room. Memory: 28 bytes per document, 16 per sample.
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

SCANNED_TOKENS = 1 << 22  # tokens read at a time in the search for document ends


def document_ends(tokens: Sliceable, file_ends: np.ndarray | None, config: DataConfig, what: str) -> np.ndarray:
    """Return a sorted int64 array with the end offset of each document in ``tokens``. Raises DataError.

    ``file_ends``: end offsets of the files in ``tokens``, or None. ``what``: name of the data for messages.
    """
    parts = [np.array([len(tokens)], np.int64)] if file_ends is None else [file_ends.astype(np.int64)]
    token = config.document_end
    if token >= 0:
        for start in range(0, len(tokens), SCANNED_TOKENS):
            block = np.asarray(tokens[start : start + SCANNED_TOKENS])
            parts.append(np.flatnonzero(block == token) + start + 1)
    elif file_ends is None:
        raise DataError(
            f"data.packed = true: the ends of documents in {what} are unknown; set data.document_end to the token at "
            "the end of each document (10, the line feed, in text or JSONL), or set data.path to a directory, where "
            "each file is one document"
        )
    ends = np.unique(np.concatenate(parts))
    if file_ends is None and len(ends) == 1:
        raise DataError(
            f"data.document_end = {token}: with this token, {what} has only one document; set data.document_end to the "
            "token at the end of each document, or set data.packed = false"
        )
    return ends[ends > 0]


def _trained_in(trained: Sliceable, starts: np.ndarray, stops: np.ndarray) -> np.ndarray:
    # Return the number of trained tokens in each range [start, stop). The ranges ascend and do not overlap.
    counts = np.zeros(len(starts), np.int64)
    for first in range(0, len(trained), SCANNED_TOKENS):
        sums = np.append(0, np.cumsum(trained[first : first + SCANNED_TOKENS], dtype=np.int64))
        end = len(sums) - 1
        inside = slice(*np.searchsorted(stops, [first], "right"), *np.searchsorted(starts, [first + end]))
        counts[inside] += sums[np.minimum(stops[inside] - first, end)] - sums[np.maximum(starts[inside] - first, 0)]
    return counts


@jit
def _best_fit(sizes: Any, order: Any, context: Any, sample_of: Any) -> Any:
    newest = np.full(context + 1, -1)  # by free positions: the sample that reached this number last
    older = np.empty(sizes.size, np.int64)  # the previous sample in its list
    count, low, before = 0, context + 1, context + 1  # no sample has a number of free positions in [before, low)
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
        remaining = free - size
        older[sample] = newest[remaining]
        newest[remaining] = sample
        if remaining >= size:
            low = min(low, remaining)
    return count


_best_fit.sample(lambda: (np.ones(1, np.int64), np.zeros(1, np.int64), 1, np.zeros(1, np.int64)))


def best_fit(sizes: np.ndarray, context: int) -> tuple[np.ndarray, int]:
    """Assign documents of ``sizes`` tokens to samples of ``context`` tokens. No document may be longer than a sample.

    Return (array with the sample index of each document, number of samples).
    """
    sample_of = np.empty(sizes.size, np.int64)
    return sample_of, int(_best_fit(sizes, np.argsort(-sizes, kind="stable"), context, sample_of))


class PackedSamples:
    """Samples of ``context`` tokens. Each sample has whole documents, followed by padding."""

    # ``start``: offset of the first document. ``ends``: end offsets of all documents. With ``predicting``, targets are
    # the next tokens, and a document of n tokens takes n - 1 positions. With ``cut``, too long documents are split.
    # ``trained``: 1 for each token that is a target, or None if all are. Parts without a target are left out.
    shifts = 1

    def __init__(
        self,
        tokens: Sliceable,
        start: int,
        ends: np.ndarray,
        context: int,
        *,
        predicting: bool,
        cut: bool,
        trained: Sliceable | None = None,
    ) -> None:
        self._tokens, self._context, self._next, self._trained = tokens, context, int(predicting), trained
        begins = np.concatenate([[start], ends[:-1]])
        sizes = ends - begins - self._next
        longest = int(sizes.max(initial=0))
        if longest > context and not cut:
            raise DataError(
                f"data.packed = true: a document of {longest + self._next:,} tokens is longer than a packed sample of "
                f"data.context = {context}; set data.context to at least {longest}, or set data.cut_documents = "
                "true to split documents that are too long"
            )
        parts = -(-np.maximum(sizes, 0) // context)
        within = context * (np.arange(parts.sum()) - np.repeat(np.cumsum(parts) - parts, parts))
        self._starts = np.repeat(begins, parts) + within
        self._sizes = np.minimum(np.repeat(sizes, parts) - within, context)
        targets = self._sizes
        if trained is not None:
            targets = _trained_in(trained, self._starts + 1, self._starts + 1 + self._sizes)
            kept = targets > 0
            self._starts, self._sizes, targets = self._starts[kept], self._sizes[kept], targets[kept]
        sample_of, self.count = best_fit(self._sizes, context)
        if not self.count:
            raise DataError(
                "data.packed = true: every document has only one token; give documents with at least two tokens"
                if trained is None
                else "data.packed = true: no token of the documents is trained; tokenize chats with answers"
            )
        self._documents = np.argsort(sample_of, kind="stable")
        self._firsts = np.concatenate([[0], np.cumsum(np.bincount(sample_of))])
        self._filled = np.bincount(sample_of, self._sizes).astype(np.int64)
        self._targets = np.bincount(sample_of, targets).astype(np.int64)

    @property
    def documents(self) -> int:
        """Number of documents. A document that was split counts as several documents."""
        return len(self._sizes)

    @property
    def padding(self) -> float:
        """Fraction of padding among the token positions of all samples."""
        return 1 - float(self._filled.sum()) / (self.count * self._context)

    def pairs(self, *, causal: bool, window: int) -> DocumentPairs:
        """Return the mean number of query-key pairs per packed sample, as `DocumentPairs`.

        Only pairs within a document are counted. Keywords: ``causal``: True with a causal mask. ``window``: size of the
        sliding attention window, or 0 without a window.
        """
        lengths, counts = np.unique(np.append(self._sizes, self._context - self._filled), return_counts=True)
        every = seen = 0
        for length, count in zip(lengths.tolist(), counts.tolist(), strict=True):
            every += count * length * min(window or length, length)
            seen += count * attention_pairs(length, causal=causal, window=window)
        return DocumentPairs(every / self.count, seen / self.count)

    def filled(self, indices: np.ndarray) -> np.ndarray:
        filled: np.ndarray = self._filled[indices]
        return filled

    def targets(self, indices: np.ndarray) -> int:
        return int(self._targets[indices].sum())

    def take(self, indices: np.ndarray, shift: int) -> Batch:
        shape = len(indices), self._context
        tokens, targets = np.zeros(shape, self._tokens.dtype), np.full(shape, IGNORED, np.int64)
        positions = np.empty(shape, np.int64)
        numbers = np.arange(self._context)
        for row, sample in enumerate(indices.tolist()):
            at = 0
            for document in self._documents[self._firsts[sample] : self._firsts[sample + 1]].tolist():
                start, size = int(self._starts[document]), int(self._sizes[document])
                block = self._tokens[start : start + size + self._next]
                span = np.s_[row, at : at + size]
                tokens[span], positions[span] = block[:size], numbers[:size]
                if self._next:
                    targets[span] = block[1:]
                    if self._trained is not None:
                        targets[span][self._trained[start + 1 : start + 1 + size] == 0] = IGNORED
                at += size
            positions[row, at:] = numbers[: self._context - at]
        return PackedTokens.of(tokens, positions, self.filled(indices)), targets  # type: ignore[return-value]


@dataclass(frozen=True)
class PackedSplit:
    """Training and validation samples, packed with whole documents."""

    training: FilledSamples
    validation: FilledSamples | None  # None: no validation
    stop: int  # training samples have the tokens before this offset
    padding: float  # fraction of padding in the training samples
    pairs: DocumentPairs  # mean number of query-key pairs per training sample
    described: str


def split_documents(
    tokens: Sliceable,
    ends: np.ndarray,
    config: DataConfig,
    model: ModelConfig,
    what: str,
    trained: Sliceable | None = None,
) -> PackedSplit:
    """Pack documents into training and validation samples, and return a `PackedSplit`. Raises DataError.

    ``ends``: end offsets of the documents in ``tokens``. ``what``: name of the data for messages. ``trained``: 1 for
    each token that is a target, or None if all are.
    """
    number, border = len(ends), len(tokens) - round(len(tokens) * config.validation_fraction)
    if config.validation_fraction > 0:
        if number < 2:
            raise DataError(
                f"{what}: only one document, but training and validation need one document each; give more documents, "
                "or set data.validation_fraction = 0"
            )
        number = min(max(1, int(np.searchsorted(ends, border, "right"))), number - 1)
    predicting, stop = model.kind != "encoder", int(ends[number - 1])

    def packed(start: int, ends: np.ndarray) -> PackedSamples:
        cut = config.cut_documents
        return PackedSamples(tokens, start, ends, config.context, predicting=predicting, cut=cut, trained=trained)

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
