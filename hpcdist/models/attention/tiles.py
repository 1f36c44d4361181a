"""Memory layout of attention heads, and chunks of samples and heads that are computed at a time.

Rows of an array are tokens in sample order: all tokens of a sample, or the ranges in `Pieces`. Pairs (sample, query
head) are numbered by sample, then head; query heads that share a key and value head are adjacent.
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

QUERY_BLOCK: Final = 64  # smaller blocks skip more masked scores, larger ones have faster matrix products
LONG: Final = 512  # the other side of a tile: a multiple of QUERY_BLOCK
TILE: Final = 4 * 64 * 256  # scores in a CPU tile: three float32 tiles fit in a second-level cache


Span: TypeAlias = tuple[int, int]  # range [first, end) of rows of an array, or of token positions
EVERYTHING: Final[Span] = (0, sys.maxsize)
BEYOND: Final = 1 << 40  # larger than any token position


@dataclass(frozen=True)
class Heads:
    """Number, size and layout of attention heads. Each of the ``shared`` key heads serves ``group`` query heads."""

    batch: int
    context: int
    shared: int
    group: int
    size: int

    @property
    def queries(self) -> int:
        """Number of query heads."""
        return self.shared * self.group

    def view(self, x: Array, part: int, *, of_queries: bool) -> Array:
        """Return a view of the queries, keys or values (``part`` 0, 1 or 2) in the columns of the array x.

        Axes of the view: samples, key heads, query heads per key head, tokens, columns of a head.
        """
        # keys and values: 1 head per key head
        group = self.group if of_queries else 1
        width = self.shared * group * self.size
        columns = x[:, :, part * width : (part + 1) * width]
        return columns.reshape(self.batch, self.context, self.shared, group, self.size).transpose(0, 2, 3, 1, 4)

    @property
    def scale(self) -> float:
        """Factor by which scores q k^T are multiplied: 1 / sqrt(head size)."""
        return 1 / math.sqrt(self.size)

    def most_pairs(self, like: Array) -> int:
        """Return the largest number of (sample, query head) pairs in a `HeadChunk` on the device of ``like``."""
        return max((chunk.pairs for chunk in self.chunks(everything=is_device(like))), default=0)

    def chunks(
        self, everything: bool, first_head: int = 0, last_head: int | None = None, *, apart: bool = False
    ) -> Iterator["HeadChunk"]:
        """Yield `HeadChunk` objects that cover all samples and the key heads ``first_head`` to ``last_head`` - 1."""
        last_head = self.shared if last_head is None else last_head
        tile = min(QUERY_BLOCK, self.context) * min(LONG, self.context)  # scores of one pair
        samples = self.batch if everything else TILE // (tile * self.queries)
        if apart:
            samples = min(samples, 1)
        if last_head - first_head < self.shared:  # pairs of a chunk are numbered consecutively
            assert not everything
            samples = 0
        if samples:  # whole samples with all heads
            for first in range(0, self.batch, samples):
                yield HeadChunk(self, first, min(first + samples, self.batch), first_head, last_head)
        else:  # less than a sample: some shared heads, each with its group of query heads
            step = max(1, TILE // (tile * self.group))
            for sample in range(self.batch):
                for first in range(first_head, last_head, step):
                    yield HeadChunk(self, sample, sample + 1, first, min(first + step, last_head))


@dataclass(frozen=True)
class HeadChunk:
    """Samples and heads that one attention kernel call computes: all heads of some samples, or some heads of one."""

    heads: Heads
    first_sample: int
    last_sample: int
    first_head: int
    last_head: int

    @property
    def outer(self) -> tuple[int, int, int]:
        """Sizes of this chunk: (samples, key heads, query heads per key head)."""
        return self.last_sample - self.first_sample, self.last_head - self.first_head, self.heads.group

    @property
    def pairs(self) -> int:
        """Number of (sample, query head) pairs."""
        samples, shared, group = self.outer
        return samples * shared * group

    @property
    def pair(self) -> int:
        """Index of the first (sample, query head) pair: sample * query heads + head."""
        return (self.first_sample * self.heads.shared + self.first_head) * self.heads.group

    def of(self, view: Array, skipped: int = 0) -> Array:
        """Return this chunk's elements of ``view``. ``skipped``: index of the first key head in ``view``."""
        return view[self.first_sample : self.last_sample, self.first_head - skipped : self.last_head - skipped]

    def spans(self, documents: Documents | None, pieces: "Pieces") -> Sequence[Span]:
        """Return this rank's row ranges [first, end): one per document, or one for all rows without documents."""
        return (EVERYTHING,) if documents is None else documents.spans(self.first_sample, pieces)

    def drop(self, tile: Array, dropped: Mask | None, first: int, start: int) -> None:
        """Apply dropout to a ``tile`` of scores that starts at query ``first`` and key ``start``."""
        if dropped is not None and (skipped := start % WORDS_PER_COUNTER):  # e.g. at the start of a document
            wide = namespace(tile).empty((*tile.shape[:2], skipped + tile.shape[2]), tile.dtype)
            wide[..., skipped:] = tile
            wide[..., :skipped] = 0
            self.drop(wide, dropped, first, start - skipped)
            tile[...] = wide[..., skipped:]
        elif dropped is not None:
            # Rows of the mask before this chunk: whole samples, then whole query heads of `pitch` rows each.
            above = self.first_sample * dropped.rows_per_sample + self.first_head * self.heads.group * dropped.pitch
            dropped.drop(tile, 0, tile.shape[1], tile.shape[2], above=above + first, left=start)


def heads_of(qkv: Array, kv: Array | None, head_size: int) -> Heads:
    """Return the `Heads` of attention inputs. If ``kv`` is None, ``qkv`` has queries, keys and values."""
    batch, context, columns = qkv.shape
    if kv is None:
        if head_size < 1 or columns % (3 * head_size):
            raise UsageError(
                f"attention got {columns} columns in the last dimension of qkv, with heads of size {head_size}; "
                f"expected a multiple of {3 * head_size}, or keys and values in the argument kv"
            )
        return Heads(batch, context, columns // (3 * head_size), 1, head_size)
    shared = kv.shape[2] // (2 * head_size)
    if kv.shape != (batch, context, 2 * shared * head_size) or not shared or columns % (shared * head_size):
        raise UsageError(
            f"attention got queries of shape {qkv.shape} and kv of shape {kv.shape}; with k key heads of size "
            f"{head_size}, kv must have k * {2 * head_size} columns, and the queries a multiple of k * {head_size}"
        )
    return Heads(batch, context, shared, columns // (shared * head_size), head_size)


Pieces: TypeAlias = tuple[tuple[int, int, int], ...]  # (first row, end row, token position of the first row), ascending


def consecutive_positions(rows: int) -> Pieces:
    """Return the `Pieces` of an array with ``rows`` rows, whose row i is the token at position i."""
    return ((0, rows, 0),)


def blocks(
    pieces: Pieces, longest: int = QUERY_BLOCK, first: int = 0, last: int | None = None, places: Span = EVERYTHING
) -> Iterator[tuple[int, int, int]]:
    """Yield blocks of at most ``longest`` rows as tuples (start, end, token position of the start).

    ``pieces``: token positions of all rows. ``first``, ``last``: range of rows. ``places``: range of token positions.
    Blocks outside the range ``places`` may be left out.
    """
    for begin, end, position in pieces:
        low, stop = max(begin, first), end if last is None else min(end, last)
        here = position + low - begin
        stop = min(stop, low - (here - places[1]) // QUERY_BLOCK * QUERY_BLOCK)
        low += max(0, places[0] - here) // QUERY_BLOCK * QUERY_BLOCK
        for start in range(low, stop, longest):
            yield start, min(start + longest, stop), position + start - begin


def band(distance: int, window: int, *, causal: bool) -> Span:
    """Return (low, high): query i of a tile of scores sees the keys from low + i to high + i - 1 of the tile.

    ``distance``: position of the first query minus position of the first key. ``window``: sliding window, or 0.
    """
    # Without a limit (window 0, not causal), -low and high are very large.
    return distance + 1 - min(window or BEYOND, BEYOND), distance + 1 if causal else BEYOND
