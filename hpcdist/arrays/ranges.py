"""Integer arithmetic of half-open ranges of one flat address space.

Ranges name everything that is a part of a model's flat space: bucket, shard, chunk of a ring, key of a parameter
server, piece of a checkpoint. The arithmetic is here, in pure functions, so that the awkward cases (fewer elements than
ranks, empty parts, a ragged tail) are decided and tested once.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate, pairwise

ALIGN_BYTES = 64  # a cache line, and the widest vector register: no line is shared by two owners


@dataclass(frozen=True, order=True, slots=True)
class Range:
    """Elements ``start <= i < stop``; empty when ``start == stop``."""

    start: int
    stop: int

    def __post_init__(self) -> None:
        assert 0 <= self.start <= self.stop, f"not a range: [{self.start}, {self.stop})"

    @property
    def size(self) -> int:
        """Number of elements."""
        return self.stop - self.start

    @property
    def slice(self) -> slice:
        """The same range as a ``slice``."""
        return slice(self.start, self.stop)

    def __bool__(self) -> bool:
        return self.stop > self.start

    def __contains__(self, index: int) -> bool:
        return self.start <= index < self.stop

    def shift(self, by: int) -> "Range":
        """Return the range moved by ``by`` elements."""
        return Range(self.start + by, self.stop + by)

    def intersect(self, other: "Range") -> "Range":
        """Return the common part; where there is none, an empty range at the later start."""
        start = max(self.start, other.start)
        return Range(start, max(start, min(self.stop, other.stop)))


def split(size: int, parts: int, itemsize: int, align_bytes: int = ALIGN_BYTES) -> list[Range]:
    """Cut ``size`` elements of ``itemsize`` bytes into ``parts`` ranges, balanced in aligned blocks.

    Every boundary but the last lies on a multiple of ``align_bytes``, so parts differ by at most one block. The first
    parts are the longer ones; with fewer blocks than parts the last parts are empty.
    """
    assert size >= 0 and parts >= 1 and itemsize >= 1 and align_bytes >= 1
    block = max(1, align_bytes // itemsize)
    blocks = -(-size // block)
    # The first `longer` parts have one block more; the last boundary is cut to the size, which need not be aligned.
    shortest, longer = divmod(blocks, parts)
    bounds = [min(size, block * (part * shortest + min(part, longer))) for part in range(parts + 1)]
    return [Range(start, stop) for start, stop in zip(bounds, bounds[1:], strict=False)]


def consecutive(sizes: Iterable[int]) -> list[Range]:
    """Return the ranges of ``sizes`` elements, one behind the other from 0 on."""
    return [Range(start, stop) for start, stop in pairwise(accumulate(sizes, initial=0))]


def cut(whole: Range, longest: int) -> Iterator[Range]:
    """Yield consecutive ranges of at most ``longest`` elements that cover ``whole``."""
    assert longest >= 1
    for start in range(whole.start, whole.stop, longest):
        yield Range(start, min(whole.stop, start + longest))


def coverage(whole: Range, parts: Iterable[Range]) -> list[tuple[Range, int]]:
    """Cut ``whole`` where any of ``parts`` begins or ends; return each piece and how many of them cover it."""
    within = [part for part in (part.intersect(whole) for part in parts) if part]
    bounds = sorted({whole.start, whole.stop, *(p.start for p in within), *(p.stop for p in within)})
    pieces = [Range(start, stop) for start, stop in zip(bounds, bounds[1:], strict=False)]
    return [(piece, sum(piece.start in part for part in within)) for piece in pieces]


def gaps(whole: Range, parts: Iterable[Range]) -> list[Range]:
    """Return the stretches of ``whole`` that none of ``parts`` covers, in order."""
    uncovered, reached = [], whole.start
    for part in sorted(part for part in parts if part):
        if part.start > reached:
            uncovered.append(Range(reached, min(part.start, whole.stop)))
        reached = max(reached, part.stop)
        if reached >= whole.stop:
            return uncovered
    return [*uncovered, Range(reached, whole.stop)] if reached < whole.stop else uncovered


def align_up(size: int, multiple: int) -> int:
    """Return the least multiple of ``multiple`` that is not below ``size``."""
    return -(-size // multiple) * multiple
