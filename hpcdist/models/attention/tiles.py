"""Memory layout of attention heads, and the chunks of samples and heads that are computed at a time.

Rows of an array are tokens in the order of their places in the sample: all of them, or some `Pieces`. Pairs of a
sample and a query head are numbered by sample, then by head; the query heads of a group, which share a key and value
head, follow one another. Arrays of statistics have a row for each pair.
"""

import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from hpcdist.arrays.backend import Array, is_device, namespace
from hpcdist.errors import UsageError
from hpcdist.models.documents import Documents
from hpcdist.models.layers.dropout import WORDS_PER_COUNTER, Mask

QUERY_BLOCK: Final = 64  # smaller blocks skip more of the masked half, larger ones are faster matrix products
LONG: Final = 512  # the other side of a tile: a multiple of QUERY_BLOCK
TILE: Final = 4 * 64 * 256  # scores at a time on a CPU: three tiles of float32 stay in a second-level cache


Span: TypeAlias = tuple[int, int]  # rows of an array, or places: the first, and the one behind the last
EVERYTHING: Final[Span] = (0, sys.maxsize)
BEYOND: Final = 1 << 40  # any place


@dataclass(frozen=True)
class Heads:
    """Numbers and places of heads. ``group`` query heads share one of the ``shared`` key and value heads."""

    batch: int
    context: int
    shared: int
    group: int
    size: int

    @property
    def queries(self) -> int:
        """The number of query heads."""
        return self.shared * self.group

    def view(self, x: Array, part: int, *, of_queries: bool) -> Array:
        """View a part of x (batch, context, columns), as wide as its heads, as (batch, shared, group, context, size).

        Keys and values have a group of 1.
        """
        group = self.group if of_queries else 1
        width = self.shared * group * self.size
        own = x[:, :, part * width : (part + 1) * width]
        return own.reshape(self.batch, self.context, self.shared, group, self.size).transpose(0, 2, 3, 1, 4)

    @property
    def scale(self) -> float:
        """The factor of the scores."""
        return 1 / math.sqrt(self.size)

    def most_pairs(self, like: Array) -> int:
        """Return the most pairs of a sample and a query head that a chunk has, in the memory that ``like`` lies in."""
        return max((chunk.pairs for chunk in self.chunks(everything=is_device(like))), default=0)

    def chunks(
        self, everything: bool, first_head: int = 0, last_head: int | None = None, *, apart: bool = False
    ) -> Iterator["HeadChunk"]:
        """Cut samples, and shared heads [first, last), so that a tile has about TILE scores, or not at all.

        ``apart``: no chunk has two samples, as where each has documents of its own.
        """
        last_head = self.shared if last_head is None else last_head
        tile = min(QUERY_BLOCK, self.context) * min(LONG, self.context)  # scores of one pair
        samples = self.batch if everything else TILE // (tile * self.queries)
        if apart:
            samples = min(samples, 1)
        if last_head - first_head < self.shared:  # pairs of a chunk are numbered without gaps
            assert not everything
            samples = 0
        if samples:  # whole samples, with all their heads
            for first in range(0, self.batch, samples):
                yield HeadChunk(self, first, min(first + samples, self.batch), first_head, last_head)
        else:  # not one sample fits: some of its shared heads, each with its group of query heads
            step = max(1, TILE // (tile * self.group))
            for sample in range(self.batch):
                for first in range(first_head, last_head, step):
                    yield HeadChunk(self, sample, sample + 1, first, min(first + step, last_head))


@dataclass(frozen=True)
class HeadChunk:
    """All heads of some samples, or some of one."""

    heads: Heads
    first_sample: int
    last_sample: int
    first_head: int
    last_head: int

    @property
    def outer(self) -> tuple[int, int, int]:
        """Numbers of samples, of shared heads, and of query heads for each of those."""
        return self.last_sample - self.first_sample, self.last_head - self.first_head, self.heads.group

    @property
    def pairs(self) -> int:
        """The number of pairs of a sample and a query head."""
        samples, shared, group = self.outer
        return samples * shared * group

    @property
    def pair(self) -> int:
        """The number of the first pair of a sample and a query head."""
        return (self.first_sample * self.heads.shared + self.first_head) * self.heads.group

    def of(self, view: Array, skipped: int = 0) -> Array:
        """Return what this chunk has of a view that `Heads.view` made of all but the first ``skipped`` heads."""
        return view[self.first_sample : self.last_sample, self.first_head - skipped : self.last_head - skipped]

    def spans(self, documents: Documents | None, pieces: "Pieces") -> Sequence[Span]:
        """Return the rows of each document of the one sample in an array with ``pieces``; all rows without documents.

        Of documents of which no token is here, they are none.
        """
        return (EVERYTHING,) if documents is None else documents.spans(self.first_sample, pieces)

    def drop(self, tile: Array, dropped: Mask | None, first: int, start: int) -> None:
        """Drop what ``dropped`` says of a tile (pairs, rows, columns) from row ``first`` and column ``start`` on.

        Both are places in the sample.
        """
        if dropped is not None and (skipped := start % WORDS_PER_COUNTER):  # as at the beginning of a document
            wide = namespace(tile).empty((*tile.shape[:2], skipped + tile.shape[2]), tile.dtype)
            wide[..., skipped:] = tile
            wide[..., :skipped] = 0
            self.drop(wide, dropped, first, start - skipped)
            tile[...] = wide[..., skipped:]
        elif dropped is not None:
            # Rows of the mask in front of this chunk: whole samples, then whole query heads of `pitch` rows each.
            above = self.first_sample * dropped.rows_per_sample + self.first_head * self.heads.group * dropped.pitch
            dropped.drop(tile, 0, tile.shape[1], tile.shape[2], above=above + first, left=start)


def heads_of(qkv: Array, kv: Array | None, head_size: int) -> Heads:
    """Return the heads of what attention is given: query, key and value, or queries and ``kv``. Raises UsageError."""
    batch, context, columns = qkv.shape
    if kv is None:
        if head_size < 1 or columns % (3 * head_size):
            raise UsageError(
                f"attention got {columns} columns for query, key and value, in heads of {head_size}; give a multiple "
                f"of {3 * head_size}, or pass keys and values as kv"
            )
        return Heads(batch, context, columns // (3 * head_size), 1, head_size)
    shared = kv.shape[2] // (2 * head_size)
    if kv.shape != (batch, context, 2 * shared * head_size) or not shared or columns % (shared * head_size):
        raise UsageError(
            f"attention got queries of shape {qkv.shape} and kv of shape {kv.shape}, in heads of {head_size}; give kv "
            f"(batch, context, 2 k {head_size}) of the same batch and context, and queries of a multiple of k heads"
        )
    return Heads(batch, context, shared, columns // (shared * head_size), head_size)


Pieces: TypeAlias = tuple[tuple[int, int, int], ...]  # first row, last row, place of the first in its sample; ascending


def one_piece(rows: int) -> Pieces:
    """Return the pieces of an array that has the first ``rows`` tokens of each sample."""
    return ((0, rows, 0),)


def blocks(
    pieces: Pieces, long: int = QUERY_BLOCK, first: int = 0, last: int | None = None, places: Span = EVERYTHING
) -> Iterator[tuple[int, int, int]]:
    """Yield (start, end, place of the start) of blocks of ``long`` rows in [first, last), none over a border.

    Of each piece rows in front of and behind ``places`` are left out in steps of QUERY_BLOCK.
    """
    for begin, end, place in pieces:
        low, stop = max(begin, first), end if last is None else min(end, last)
        here = place + low - begin
        stop = min(stop, low - (here - places[1]) // QUERY_BLOCK * QUERY_BLOCK)
        low += max(0, places[0] - here) // QUERY_BLOCK * QUERY_BLOCK
        for start in range(low, stop, long):
            yield start, min(start + long, stop), place + start - begin


def band(distance: int, window: int, *, causal: bool) -> Span:
    """Return the columns (keys) that the first row (query) of a tile sees; row i sees them i further on.

    The place of the query is ``distance`` behind that of the first key. ``causal``: it sees no key behind itself. With
    a ``window`` it sees no more than so many keys up to its own place.
    """
    return distance + 1 - min(window or BEYOND, BEYOND), distance + 1 if causal else BEYOND
