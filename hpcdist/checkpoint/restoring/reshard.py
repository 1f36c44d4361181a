"""Reshard a state from memory: each rank receives what it wants from what all ranks hold, whatever the cuts.

    announce   all ranks learn which pieces each holds: names once, and a few numbers for each piece
    cover      each rank finds what covers what it wants: its own first, then that of others in equal shares
    ask        all learn whether something is lacking, which ends it, and each gets the requests to it
    move       messages of at most 4 MiB, 16 MiB of them under way at a time between each two ranks in each direction

A rank receives the bytes that it wants and does not hold, each once, and sends what is asked of it; it needs memory
for the messages under way, 128 MiB in either direction at most. Where the cuts are the same as before, only ranks
that lack something receive anything. The numbers of all pieces reach every rank: 8 (3 + 2 d) bytes for a piece of a
tensor of d dims. The cover (`cover`) is pure and local.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Final

import numpy as np

from hpcdist.arrays.dtypes import name_of
from hpcdist.arrays.piece import Box, Piece, Runs, grouped_alike, intersect_runs, runs
from hpcdist.arrays.ranges import Range
from hpcdist.checkpoint.restoring import messages as moves
from hpcdist.checkpoint.restoring.messages import ElementRuns
from hpcdist.comm.communicator import Communicator
from hpcdist.errors import StorageError

SHARE_BYTES: Final = 256 << 10  # less is not divided among those who hold it: a message has its price (empirical)


@dataclass(frozen=True)
class PieceOffer:
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
class CopyRuns:
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

    def only(self, start: np.ndarray, size: np.ndarray) -> "CopyRuns":
        """Return those intervals of the wanted array, each of which is inside, joined where neighbours meet."""
        inside = np.searchsorted(self.to, start, "right") - 1
        at = self.at[inside] + start - self.to[inside]
        begins = np.concatenate([[True], (start[1:] != (start + size)[:-1]) | (at[1:] != (at + size)[:-1])])
        return CopyRuns(start[begins], at[begins], np.add.reduceat(size, np.flatnonzero(begins)))


class GapError(Exception):
    """Nobody offers ``element``, counted in the tensor."""

    def __init__(self, element: int) -> None:
        super().__init__(element)
        self.element = element


def cover(piece: Piece, offers: Sequence[PieceOffer], rank: int, loads: list[int]) -> list[tuple[PieceOffer, CopyRuns]]:
    """Return stretches of ``offers`` that are all of ``piece``, each element once. Raises `GapError`.

    What ``rank`` offers itself is preferred. What several others offer is taken from them in shares of equal bytes, or
    where it is little from the one with the least of ``loads``, the bytes that are taken of each rank so far.
    """
    mine = runs(piece.global_shape, piece.box, piece.flat)
    itemsize = piece.array.dtype.itemsize
    shares = max(1, piece.flat.size * itemsize // SHARE_BYTES)  # as many whole ones are enough
    offers = sorted(offers, key=lambda offer: (offer.rank != rank, loads[offer.rank], (offer.rank - rank) % len(loads)))
    own = sum(offer.rank == rank for offer in offers)
    found: list[CopyRuns] = []
    for offer in offers:
        found.append(CopyRuns(*intersect_runs(mine, offer.runs())))
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


Offers = dict[tuple[str, str], list[PieceOffer]]  # by kind and tensor


@dataclass(frozen=True)
class _Transfer:
    """Part of the holder's piece ``number`` that is taken for the own piece ``wanted``."""

    number: int
    wanted: int
    stretches: CopyRuns


def reshard(comm: Communicator, held: Sequence[Piece], wanted: Sequence[Piece], optional: Collection[str] = ()) -> int:
    """Fill the arrays of ``wanted`` with what any rank holds of them; return the bytes received from others.

    Collective. Pieces of a kind in ``optional`` stay as they are where nobody holds anything of that kind. Arrays of
    ``held`` and ``wanted`` may be the same memory where they are the same elements. Raises StorageError on all ranks,
    naming a tensor and an element, when something is held by nobody, or in another shape or dtype: no array has been
    touched then.
    """
    chosen, problem = _choose_offers(comm, _gather_offers(comm, held), wanted, optional)
    requests = [_encode_request(parts) for parts in chosen]
    counts = _agree_on_counts(comm, problem, [request.size for request in requests])
    asked = _exchange_requests(comm, requests, counts)
    for part in chosen[comm.rank]:
        to, at, size = part.stretches.to, part.stretches.at, part.stretches.size
        moves.copy(held[part.number].array, wanted[part.wanted].array, at, to, size)
    given = [
        [ElementRuns(held[number].array, at, size) for number, at, size in _decode_request(numbers)]
        for numbers in asked
    ]
    taken = [
        [ElementRuns(wanted[part.wanted].array, part.stretches.to, part.stretches.size) for part in parts]
        for parts in chosen
    ]
    given[comm.rank], taken[comm.rank] = [], []
    return moves.exchange(comm, given, taken)


def why_unavailable(
    comm: Communicator, held: Sequence[Piece], wanted: Sequence[Piece], optional: Collection[str] = ()
) -> str:
    """Return why `redistribute` would raise, the same on all ranks; "" when it would not. Collective."""
    _, problem = _choose_offers(comm, _gather_offers(comm, held), wanted, optional)
    return _first(comm.allgather_object(problem))


def _first(problems: Sequence[str]) -> str:
    return next((f"{problem} (wanted by rank {rank})" for rank, problem in enumerate(problems) if problem), "")


def _agree_on_counts(comm: Communicator, problem: str, counts: list[int]) -> list[list[int]]:
    """Return how many numbers each rank asks each with. Raises StorageError on all ranks where one has a problem."""
    told = comm.allgather_object((problem, counts))
    problem = _first([text for text, _ in told])
    if problem:
        raise StorageError(problem)
    return [row for _, row in told]


def _announcement(held: Sequence[Piece]) -> tuple[list[tuple[Any, ...]], np.ndarray]:
    """Return names once, and for each piece which it has, its box and its range, one behind the other."""
    heads: dict[tuple[Any, ...], int] = {}
    numbers: list[int] = []
    for piece in held:
        head = piece.kind, piece.tensor, name_of(piece.array.dtype), tuple(piece.global_shape)
        numbers.append(heads.setdefault(head, len(heads)))
        for bounds in piece.box:
            numbers += bounds
        numbers += piece.flat.start, piece.flat.stop
    return list(heads), np.array(numbers, np.int64)


def _gather_offers(comm: Communicator, held: Sequence[Piece]) -> Offers:
    """Return what all ranks hold. Collective."""
    offers: Offers = {}
    for rank, (heads, table) in enumerate(comm.allgather_object(_announcement(held))):
        numbers, place, number = table.tolist(), 0, 0
        while place < len(numbers):
            kind, tensor, dtype, shape = heads[numbers[place]]
            flat = place + 1 + 2 * len(shape)
            box = tuple(zip(numbers[place + 1 : flat : 2], numbers[place + 2 : flat : 2], strict=True))
            place = flat + 2
            found = PieceOffer(rank, number, dtype, shape, box, Range(numbers[flat], numbers[flat + 1]))
            if found.flat:
                offers.setdefault((kind, tensor), []).append(found)
            number += 1
    return offers


def _choose_offers(
    comm: Communicator, offers: Offers, wanted: Sequence[Piece], optional: Collection[str]
) -> tuple[list[list[_Transfer]], str]:
    """Return what this rank takes of each rank, and why it cannot have all that it wants, or "" (local)."""
    absent = set(optional) - {kind for kind, _ in offers}
    parts: list[list[_Transfer]] = [[] for _ in range(comm.size)]
    loads = [0] * comm.size
    for index, piece in enumerate(wanted):
        if not piece.flat or piece.kind in absent:
            continue  # nobody holds what has no elements
        found = offers.get((piece.kind, piece.tensor), [])
        problem = _mismatch(piece, found)
        if problem:
            return parts, problem
        try:
            for offer, stretches in cover(piece, found, comm.rank, loads):
                parts[offer.rank].append(_Transfer(offer.number, index, stretches))
        except GapError as gap:
            return parts, f"element {gap.element} of {piece.name} is held by none of the {comm.size} ranks"
    return parts, ""


def _mismatch(piece: Piece, offers: Sequence[PieceOffer]) -> str:
    """Return what differs between ``piece`` and what is held under its name, or ""."""
    shape, dtype = tuple(piece.global_shape), name_of(piece.array.dtype)
    for offer in offers:
        if offer.dtype != dtype or not grouped_alike(offer.shape, shape):
            return (
                f"rank {offer.rank} holds {piece.name} as {offer.dtype}{list(offer.shape)}, expected "
                f"{dtype}{list(shape)}; go on with the recipe of before"
            )
    return ""


def _encode_request(parts: Sequence[_Transfer]) -> np.ndarray:
    """Return what is asked of a rank, as numbers: its piece, how many stretches, where they begin, and their sizes."""
    numbers = [np.zeros(0, np.int64)]
    for part in parts:
        at, size = part.stretches.at, part.stretches.size
        numbers += np.array([part.number, at.size]), at, size
    return np.concatenate(numbers)


def _decode_request(numbers: np.ndarray) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
    """Yield what `_request` has put into numbers."""
    place = 0
    while place < numbers.size:
        count = int(numbers[place + 1])
        sizes = place + 2 + count
        yield int(numbers[place]), numbers[place + 2 : sizes], numbers[sizes : sizes + count]
        place = sizes + count


def _exchange_requests(
    comm: Communicator, requests: Sequence[np.ndarray], counts: Sequence[Sequence[int]]
) -> list[np.ndarray]:
    """Return what each rank asks of this one. Collective."""
    ends = list(accumulate((request.size for request in requests), initial=0))
    sent = [Range(start, stop) for start, stop in zip(ends, ends[1:], strict=False)]
    ends = list(accumulate((row[comm.rank] for row in counts), initial=0))
    received = [Range(start, stop) for start, stop in zip(ends, ends[1:], strict=False)]
    numbers = np.empty(ends[-1], np.int64)
    comm.all_to_all(np.concatenate(requests), numbers, sent, received)
    return [numbers[part.slice] for part in received]
