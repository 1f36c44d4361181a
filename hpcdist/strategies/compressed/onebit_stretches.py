"""What is encoded by itself where momentum travels as signs: stretches of one tensor, or of many small ones.

Every chunk of a stretch, one for each rank, has a scale of its own: 4 bytes, and up to 63 to align its payload. With
`LEAST` elements in a chunk that is 576 bytes for 16384, 28 times fewer; with more, up to 32 times. Tensors of that many
elements for each rank are a stretch of their own. All smaller ones lie in packs, whose elements have one scale for each
chunk: matrices together, and biases and norm scales together, since their gradients differ most; tensors that all ranks
of the tensor axis have apart from those that it cuts, since they must come to the same bits there.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import Final

import numpy as np

from hpcdist.arrays.backend import Array
from hpcdist.arrays.layout import Layout, Segment
from hpcdist.arrays.piece import Piece
from hpcdist.arrays.ranges import Range
from hpcdist.arrays.store import FlatStore
from hpcdist.collectives.workspace import scratch
from hpcdist.compression.onebit import OneBitAdam

LEAST: Final = 1 << 12  # elements of a chunk


@dataclass(frozen=True)
class Stretch:
    """``tensors`` one behind the other, without gaps: each with its range of the flat space."""

    tensors: tuple[tuple[Segment, Range], ...]

    @property
    def size(self) -> int:
        """Number of elements."""
        return sum(where.size for _, where in self.tensors)

    @property
    def places(self) -> list[Range]:
        """Where in the stretch each tensor lies."""
        starts = accumulate((where.size for _, where in self.tensors), initial=0)
        return [where.shift(start - where.start) for (_, where), start in zip(self.tensors, starts, strict=False)]

    def gather(self, store: FlatStore) -> Array:
        """Return the elements of the stretch: a view, or a copy in scratch memory, which `scatter` brings back."""
        if len(self.tensors) == 1:
            return store.range(self.tensors[0][1])
        copy = scratch("compressed.stretch", self.size, np.dtype(store.dtype), store.array)
        for (_, where), place in zip(self.tensors, self.places, strict=True):
            copy[place.slice] = store.range(where)
        return copy

    def scatter(self, values: Array, store: FlatStore) -> None:
        """Write ``values``, which `gather` returned, where they came from."""
        if len(self.tensors) == 1:
            return
        for (_, where), place in zip(self.tensors, self.places, strict=True):
            store.range(where)[...] = values[place.slice]

    def pieces(self, kind: str, array: Array, within: Range, parts: Iterable[Range]) -> Iterator[Piece]:
        """Yield pieces, in ``parts`` of the flat space, of ``array``, which has the range ``within`` of the stretch."""
        ranges = list(parts)
        for (segment, where), place in zip(self.tensors, self.places, strict=True):
            held = place.intersect(within)
            flat = held.shift(where.start - place.start) if held else Range(where.start, where.start)
            for part in ranges:
                common = flat.intersect(part)
                if common:
                    at = common.shift(place.start - where.start).shift(-within.start)
                    yield Piece.of(kind, segment, common, array[at.slice])


def stretches(layout: Layout, part: Range, ranks: int) -> list[Stretch]:
    """Return the stretches of ``part`` of the flat space for so many ranks (local)."""
    found: list[Stretch] = []
    packs: dict[tuple[bool, bool], list[tuple[Segment, Range]]] = {}
    for segment, where in layout.within(part):
        if where.size >= LEAST * ranks:
            found.append(Stretch(((segment, where),)))
        else:
            packs.setdefault((bool(segment.spec.whole), segment.spec.adapted), []).append((segment, where))
    return found + [Stretch(tuple(packs[key])) for key in sorted(packs)]


@dataclass(frozen=True)
class Held:
    """A stretch and the state of its elements."""

    stretch: Stretch
    adam: OneBitAdam
