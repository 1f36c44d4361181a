"""Packed documents: their boundaries in a sample, and the position of each token in its document.

Attention stays within a document. Operations read the `Documents` of a micro-batch from ``Saved.documents``.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from hpcdist.arrays import backend
from hpcdist.arrays.backend import Array, ArrayGroup
from hpcdist.errors import DataError


class PackedTokens(ArrayGroup):
    """Micro-batch of packed documents: tokens on the compute device, and each token's position in its document."""

    @classmethod
    def of(cls, tokens: Array, places: np.ndarray, filled: np.ndarray | None = None) -> "PackedTokens":
        """Return a packed micro-batch of ``tokens``, whose positions in their documents are ``places``.

        ``filled``: number of tokens before the padding in each sample, or None if no sample is padded.
        """
        # both (samples, context); numbers of tokens: (samples,)
        assert tokens.shape == places.shape
        return cls((tokens, places, np.full(len(places), places.shape[1]) if filled is None else filled))


@dataclass(frozen=True)
class Documents:
    """Documents of a packed micro-batch, made from the position of each token in its document."""

    whole: np.ndarray  # of every token, (samples, context), on the host
    places: Array = field(repr=False)  # of this rank's tokens, (samples, local tokens), on the compute device
    filled: np.ndarray  # number of tokens of each sample before the padding

    @cached_property
    def borders(self) -> list[list[int]]:
        """Document borders of each sample: the start position of each document, then the length of the sample."""
        context = self.whole.shape[1]
        return [[*np.flatnonzero(row == 0).tolist(), context] for row in self.whole]

    @cached_property
    def longest(self) -> int:
        """Number of tokens in the longest document of the micro-batch."""
        return int(self.whole.max(initial=0)) + 1

    def spans(self, sample: int, pieces: Sequence[tuple[int, int, int]]) -> list[tuple[int, int]]:
        """Return a list of this rank's row ranges [first, end), one per document of sample number ``sample``."""
        rows = [_row(place, pieces) for place in self.borders[sample]]
        # A document without tokens on this rank has an empty range.
        return list(zip(rows, rows[1:], strict=False))

    @cached_property
    def ranges(self) -> Array:
        """Range [first, end) of each token's document in the sample, as int64 array (samples, context, 2)."""
        ranges = np.empty((*self.whole.shape, 2), np.int64)
        for row, borders in zip(ranges, self.borders, strict=True):
            sizes = np.diff(borders)
            row[:, 0], row[:, 1] = np.repeat(borders[:-1], sizes), np.repeat(borders[1:], sizes)
        return backend.place(ranges, "gpu" if backend.is_device(self.places) else "cpu")


def _row(position: int, pieces: Sequence[tuple[int, int, int]]) -> int:
    return sum(min(max(position - first, 0), end - start) for start, end, first in pieces)


def unpacked(x: Array, cut: Callable[[Array], Array] = lambda samples: samples) -> tuple[Array, Documents | None]:
    """Return (this rank's tokens of ``x``, their `Documents` or None if not packed). ``cut(array)`` selects tokens."""
    if not isinstance(x, PackedTokens):
        return cut(x), None
    tokens, places, filled = x.arrays
    if places.shape[1] and places[:, 0].any():
        raise DataError(
            "a packed sample starts inside a document: the position of its first token is not 0; count the positions "
            "of each document from 0"
        )
    on = "gpu" if backend.is_device(tokens) else "cpu"
    return cut(tokens), Documents(places, backend.place(cut(places), on), filled)
