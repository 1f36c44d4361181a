"""Who gives which elements: a wanted piece is covered by the pieces that ranks hold (pure, local)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from hpcdist.arrays.piece import Box, Piece, Runs, common, runs
from hpcdist.arrays.ranges import Range

SHARE_BYTES: Final = 256 << 10  # less is not divided among those who hold it: a message has its price (empirical)


@dataclass(frozen=True)
class Offer:
    """Piece ``number`` among those that ``rank`` holds."""

    rank: int
    number: int
    dtype: str
    shape: tuple[int, ...]
    box: Box
    flat: Range

    def runs(self) -> Runs:
        """Return its runs in the tensor."""
        return runs(self.shape, self.box, self.flat)


@dataclass(frozen=True)
class Stretches:
    """Elements from ``at`` on of a held array for those from ``to`` on of a wanted one: int64 arrays, ascending."""

    to: np.ndarray
    at: np.ndarray
    size: np.ndarray

    def covers(self, start: np.ndarray) -> np.ndarray:
        """Return whether each interval of the wanted array that begins at ``start``, and crosses no end, is inside."""
        if not self.to.size:
            return np.zeros(start.size, bool)
        inside = np.searchsorted(self.to, start, "right") - 1
        return (inside >= 0) & (start < (self.to + self.size)[inside])

    def only(self, start: np.ndarray, size: np.ndarray) -> "Stretches":
        """Return those intervals of the wanted array, each of which is inside, joined where neighbours meet."""
        inside = np.searchsorted(self.to, start, "right") - 1
        at = self.at[inside] + start - self.to[inside]
        begins = np.concatenate([[True], (start[1:] != (start + size)[:-1]) | (at[1:] != (at + size)[:-1])])
        return Stretches(start[begins], at[begins], np.add.reduceat(size, np.flatnonzero(begins)))


class GapError(Exception):
    """Nobody offers ``element``, counted in the tensor."""

    def __init__(self, element: int) -> None:
        super().__init__(element)
        self.element = element


def cover(piece: Piece, offers: Sequence[Offer], rank: int, loads: list[int]) -> list[tuple[Offer, Stretches]]:
    """Return stretches of ``offers`` that are all of ``piece``, each element once. Raises `GapError`.

    What ``rank`` offers itself is preferred. What several others offer is taken from them in shares of equal bytes, or
    where it is little from the one with the least of ``loads``, the bytes that are taken of each rank so far.
    """
    mine = runs(piece.global_shape, piece.box, piece.flat)
    itemsize = piece.array.dtype.itemsize
    shares = max(1, piece.flat.size * itemsize // SHARE_BYTES)  # as many whole ones are enough
    offers = sorted(offers, key=lambda offer: (offer.rank != rank, loads[offer.rank], (offer.rank - rank) % len(loads)))
    own = sum(offer.rank == rank for offer in offers)
    found: list[Stretches] = []
    for offer in offers:
        found.append(Stretches(*common(mine, offer.runs())))
        if found[-1].size.sum() == piece.flat.size:
            if len(found) <= own:
                return [(offer, found[-1])]  # as nearly always where the cut is that of before
            shares -= 1
            if not shares:
                break
    ends = [stretches.to + stretches.size for stretches in found]
    cuts = np.unique(np.concatenate([[0, piece.flat.size], *(stretches.to for stretches in found), *ends]))
    start, size = cuts[:-1], np.diff(cuts)
    covers = np.array([stretches.covers(start) for stretches in found], bool).reshape(len(found), start.size)
    held = covers.any(axis=0)
    if not held.all():
        raise GapError(_element(mine, int(start[~held][0])))
    who = covers.argmax(axis=0)
    several = (who >= own) & (covers.sum(axis=0) > 1)
    if several.any():
        divided = _divided(covers[:, several], [offer.rank for offer in offers], size[several], itemsize, loads)
        inside = np.flatnonzero(several)[divided[1]]
        who = np.concatenate([who[~several], divided[0]])
        start, size = (
            np.concatenate([start[~several], start[inside] + divided[2]]),
            np.concatenate([size[~several], divided[3]]),
        )
        order = np.argsort(start)
        who, start, size = who[order], start[order], size[order]
    taken = [(offers[k], found[k].only(start[who == k], size[who == k])) for k in np.unique(who).tolist()]
    for offer, stretches in taken:
        loads[offer.rank] += int(stretches.size.sum()) * itemsize
    return taken


def _divided(
    covers: np.ndarray, ranks: Sequence[int], size: np.ndarray, itemsize: int, loads: Sequence[int]
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Divide intervals of ``size`` elements among those that cover them, (offers, intervals).

    Returns of each part which offer, which interval, where in it, and how many elements.
    """
    patterns, belongs = np.unique(covers, axis=1, return_inverse=True)
    parts = []
    for pattern in range(patterns.shape[1]):
        who = sorted(np.flatnonzero(patterns[:, pattern]).tolist(), key=lambda k: loads[ranks[k]])
        intervals = np.flatnonzero(belongs.reshape(-1) == pattern)
        ends = np.cumsum(size[intervals])
        shares = max(1, min(len(who), int(ends[-1]) * itemsize // SHARE_BYTES))
        limits = ends[-1] * np.arange(1, shares + 1) // shares
        bounds = np.unique(np.concatenate([[0], ends, limits]))
        inside = np.searchsorted(ends, bounds[:-1], "right")
        share = np.searchsorted(limits, bounds[:-1], "right")
        begin = bounds[:-1] - (ends - size[intervals])[inside]
        parts.append((np.array(who)[share], intervals[inside], begin, np.diff(bounds)))
    who_, interval, begin, length = (np.concatenate(column) for column in zip(*parts, strict=True))
    return who_, interval, begin, length


def _element(mine: Runs, local: int) -> int:
    """Return which element of the tensor is element ``local`` of a piece with the runs ``mine``."""
    run = int(np.searchsorted(mine.local, local, "right")) - 1
    return int(mine.start[run]) + local - int(mine.local[run])
