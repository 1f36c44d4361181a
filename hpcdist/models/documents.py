"""Documents that are packed into samples: where they begin, and the place of each token in its own.

Attention stays inside of a document, and positions count from its first token. `PackedTokens` is the input of a packed
micro-batch; a model makes `Documents` of it, which travel to its operations in ``Saved.documents``.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from hpcdist.arrays import backend
from hpcdist.arrays.backend import Array, ArrayGroup
from hpcdist.errors import DataError


class PackedTokens(ArrayGroup):
    """Tokens (samples, context), where they are computed with, and on the host their places in their documents.

    The third array (samples,) says how many of the places documents fill: those in front.
    """

    @classmethod
    def of(cls, tokens: Array, places: np.ndarray, filled: np.ndarray | None = None) -> "PackedTokens":
        """Return the group of these; None: documents fill all places. A document begins where the place is 0.

        So does the padding behind the last one.
        """
        assert tokens.shape == places.shape
        return cls((tokens, places, np.full(len(places), places.shape[1]) if filled is None else filled))


@dataclass(frozen=True)
class Documents:
    """Documents of the samples of a micro-batch. Local.

    ``whole`` (samples, context), on the host, has the places of all tokens of the samples in their documents, and
    ``places`` (samples, own tokens) those of the tokens that are computed here, where they are. ``filled`` (samples,)
    are the tokens of a sample that are no padding.
    """

    whole: np.ndarray
    places: Array = field(repr=False)
    filled: np.ndarray

    @cached_property
    def borders(self) -> list[list[int]]:
        """Of each sample the places at which its documents begin, and its end."""
        context = self.whole.shape[1]
        return [[*np.flatnonzero(row == 0).tolist(), context] for row in self.whole]

    @cached_property
    def longest(self) -> int:
        """The number of places in the longest document."""
        return int(self.whole.max(initial=0)) + 1

    def spans(self, sample: int, pieces: Sequence[tuple[int, int, int]]) -> list[tuple[int, int]]:
        """Return the rows that each document of ``sample`` has in an array, as first row and the one behind the last.

        The ``pieces`` of the sample that the array has are those of `hpcdist.models.attention.tiles`.
        """
        rows = [_row(place, pieces) for place in self.borders[sample]]
        return list(zip(rows, rows[1:], strict=False))

    @cached_property
    def ranges(self) -> Array:
        """(samples, context, 2) int64 where ``places`` are: the first key of each row, and the one behind its last."""
        ranges = np.empty((*self.whole.shape, 2), np.int64)
        for row, borders in zip(ranges, self.borders, strict=True):
            sizes = np.diff(borders)
            row[:, 0], row[:, 1] = np.repeat(borders[:-1], sizes), np.repeat(borders[1:], sizes)
        return backend.place(ranges, "gpu" if backend.is_device(self.places) else "cpu")


def _row(place: int, pieces: Sequence[tuple[int, int, int]]) -> int:
    """Return how many rows of ``pieces`` are in front of ``place``."""
    return sum(min(max(place - first, 0), end - start) for start, end, first in pieces)


def unpacked(x: Array, cut: Callable[[Array], Array] = lambda samples: samples) -> tuple[Array, Documents | None]:
    """Return the tokens of a micro-batch, and its documents, None where samples are not packed.

    ``cut`` takes what is computed here of (samples, context). Raises DataError on a sample that does not begin with a
    document.
    """
    if not isinstance(x, PackedTokens):
        return cut(x), None
    tokens, places, filled = x.arrays
    if places.shape[1] and places[:, 0].any():
        raise DataError(
            "a packed sample begins in the midst of a document: the place of its first token is not 0; count the "
            "places of each document from 0"
        )
    on = "gpu" if backend.is_device(tokens) else "cpu"
    return cut(tokens), Documents(places, backend.place(cut(places), on), filled)
