"""Half-open ranges of one flat address space, and pure functions to split, intersect and align them."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate, pairwise

ALIGN_BYTES = 64  # a cache line, and the widest vector register: two owners never share a line


@dataclass(frozen=True, order=True, slots=True)
class Range:
    """Range of integers i with ``start <= i < stop``. It is empty if ``start == stop``."""

    start: int
    stop: int

    def __post_init__(self) -> None:
        assert 0 <= self.start <= self.stop, f"not a range: [{self.start}, {self.stop})"

    @property
    def size(self) -> int:
        return self.stop - self.start

    @property
    def slice(self) -> slice:
        """This range as a Python ``slice`` object."""
        return slice(self.start, self.stop)

    def __bool__(self) -> bool:
        return self.stop > self.start

    def __contains__(self, index: int) -> bool:
        return self.start <= index < self.stop

    def shift(self, by: int) -> "Range":
        """Return this range moved by ``by`` elements."""
        return Range(self.start + by, self.stop + by)

    def intersect(self, other: "Range") -> "Range":
        """Return the range of elements in this range and in ``other``, or an empty range if they are disjoint."""
        start = max(self.start, other.start)
        return Range(start, max(start, min(self.stop, other.stop)))


def split(size: int, parts: int, itemsize: int, align_bytes: int = ALIGN_BYTES) -> list[Range]:
    """Split ``size`` elements of ``itemsize`` bytes into a list of ``parts`` ranges of nearly equal size.

    All inner boundaries are multiples of ``align_bytes`` bytes. With too few elements, the last ranges are empty.
    """
    assert size >= 0 and parts >= 1 and itemsize >= 1 and align_bytes >= 1
    block = max(1, align_bytes // itemsize)
    blocks = -(-size // block)
    # The first `longer` parts have one block more; the last boundary is limited to the size, which may be unaligned.
    shortest, longer = divmod(blocks, parts)
    bounds = [min(size, block * (part * shortest + min(part, longer))) for part in range(parts + 1)]
    return [Range(start, stop) for start, stop in zip(bounds, bounds[1:], strict=False)]


def consecutive(sizes: Iterable[int]) -> list[Range]:
    """Return a list of adjacent ranges with the lengths ``sizes``. The first range starts at 0."""
    return [Range(start, stop) for start, stop in pairwise(accumulate(sizes, initial=0))]


def cut(whole: Range, longest: int) -> Iterator[Range]:
    """Yield adjacent ranges, of at most ``longest`` elements each, that together cover the range ``whole``."""
    assert longest >= 1
    for start in range(whole.start, whole.stop, longest):
        yield Range(start, min(whole.stop, start + longest))


def coverage(whole: Range, parts: Iterable[Range]) -> list[tuple[Range, int]]:
    """Cut ``whole`` at all boundaries of ``parts``. Return a list of (range, number of parts that cover the range)."""
    within = [part for part in (part.intersect(whole) for part in parts) if part]
    bounds = sorted({whole.start, whole.stop, *(p.start for p in within), *(p.stop for p in within)})
    pieces = [Range(start, stop) for start, stop in zip(bounds, bounds[1:], strict=False)]
    return [(piece, sum(piece.start in part for part in within)) for piece in pieces]


def gaps(whole: Range, parts: Iterable[Range]) -> list[Range]:
    """Return an ascending list of the subranges of ``whole`` that no range in ``parts`` covers."""
    uncovered, reached = [], whole.start
    for part in sorted(part for part in parts if part):
        if part.start > reached:
            uncovered.append(Range(reached, min(part.start, whole.stop)))
        reached = max(reached, part.stop)
        if reached >= whole.stop:
            return uncovered
    return [*uncovered, Range(reached, whole.stop)] if reached < whole.stop else uncovered


def align_up(size: int, multiple: int) -> int:
    """Return the smallest multiple of ``multiple`` that is at least ``size``."""
    return -(-size // multiple) * multiple
