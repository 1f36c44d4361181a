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
from typing import Any, Final

import numpy as np

from hpcdist.arrays.dtypes import name_of
from hpcdist.arrays.piece import Box, Piece, Runs, grouped_alike, intersect_runs, runs
from hpcdist.arrays.ranges import Range, consecutive
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
    """Runs to copy: ``size`` elements from ``at`` of a held array to ``to`` of a wanted one (int64, ascending)."""

    to: np.ndarray
    at: np.ndarray
    size: np.ndarray

    def covers(self, start: np.ndarray) -> np.ndarray:
        """Return which intervals of the wanted array lie in a run: they begin at ``start`` and cross no end of one."""
        if not self.to.size:
            return np.zeros(start.size, bool)
        inside = (
            np.searchsorted(self.to, start, "right") - 1
        )  # the last run that begins at ``start`` or before; -1: none
        return (inside >= 0) & (start < (self.to + self.size)[inside])

    def only(self, start: np.ndarray, size: np.ndarray) -> "CopyRuns":
        """Return the runs of these intervals of the wanted array, each inside a run, joined where they are adjacent."""
        inside = np.searchsorted(self.to, start, "right") - 1
        at = self.at[inside] + start - self.to[inside]
        # A new run begins where the interval before ends elsewhere, in the wanted array or in the held one.
        begins = np.concatenate([[True], (start[1:] != (start + size)[:-1]) | (at[1:] != (at + size)[:-1])])
        return CopyRuns(start[begins], at[begins], np.add.reduceat(size, np.flatnonzero(begins)))


class GapError(Exception):
    """Gap in what all ranks hold: none has ``element``, counted in the tensor."""

    def __init__(self, element: int) -> None:
        super().__init__(element)
        self.element = element


def cover(piece: Piece, offers: Sequence[PieceOffer], rank: int, loads: list[int]) -> list[tuple[PieceOffer, CopyRuns]]:
    """Return runs of ``offers`` that cover ``piece``, each element once (local). Raises `GapError`.

    What ``rank`` offers itself is preferred. What several others offer is taken from them in shares of equal bytes, or
    where it is little from the one with the least of ``loads``, the bytes that are taken of each rank so far (updated).
    """
    mine = runs(piece.global_shape, piece.box, piece.flat)
    itemsize = piece.array.dtype.itemsize
    shares = max(1, piece.flat.size * itemsize // SHARE_BYTES)  # offers of the whole piece beyond these are not needed
    # Own offers first, then the least loaded ranks; among equals the next in the ring, so that not all ask rank 0.
    offers = sorted(offers, key=lambda offer: (offer.rank != rank, loads[offer.rank], (offer.rank - rank) % len(loads)))
    own = sum(offer.rank == rank for offer in offers)
    overlaps: list[CopyRuns] = []
    for offer in offers:
        overlaps.append(CopyRuns(*intersect_runs(mine, offer.runs())))
        if overlaps[-1].size.sum() == piece.flat.size:
            if len(overlaps) <= own:
                return [(offer, overlaps[-1])]  # as nearly always where the cut is that of before
            shares -= 1
            if not shares:
                break
    # The ends of all runs cut the piece into intervals, each of which an offer has entirely or not at all.
    ends = [stretches.to + stretches.size for stretches in overlaps]
    cuts = np.unique(np.concatenate([[0, piece.flat.size], *(stretches.to for stretches in overlaps), *ends]))
    start, size = cuts[:-1], np.diff(cuts)
    # (offers, intervals); in the order of ``offers``, so that argmax is the preferred one that has the interval.
    covers = np.array([stretches.covers(start) for stretches in overlaps], bool).reshape(len(overlaps), start.size)
    held = covers.any(axis=0)
    if not held.all():
        raise GapError(_element(mine, int(start[~held][0])))
    who = covers.argmax(axis=0)
    # What is not this rank's own, and more than one other has, is divided among those.
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
    taken = [(offers[k], overlaps[k].only(start[who == k], size[who == k])) for k in np.unique(who).tolist()]
    for offer, stretches in taken:
        loads[offer.rank] += int(stretches.size.sum()) * itemsize
    return taken


def _divided(
    covers: np.ndarray, ranks: Sequence[int], size: np.ndarray, itemsize: int, loads: Sequence[int]
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Divide intervals of ``size`` elements among the offers that have them; ``covers`` is (offers, intervals).

    Returns for each part the offer, the interval, the first element in that, and the number of elements.
    """
    patterns, belongs = np.unique(covers, axis=1, return_inverse=True)
    parts = []
    for pattern in range(patterns.shape[1]):
        who = sorted(np.flatnonzero(patterns[:, pattern]).tolist(), key=lambda k: loads[ranks[k]])
        # All intervals that the same offers have are laid end to end, and that line is cut into equal shares. A part
        # ends where an interval does or a share does.
        intervals = np.flatnonzero(belongs.reshape(-1) == pattern)
        ends = np.cumsum(size[intervals])
        shares = max(1, min(len(who), int(ends[-1]) * itemsize // SHARE_BYTES))
        limits = ends[-1] * np.arange(1, shares + 1) // shares
        bounds = np.unique(np.concatenate([[0], ends, limits]))
        inside = np.searchsorted(ends, bounds[:-1], "right")
        share = np.searchsorted(limits, bounds[:-1], "right")
        begin = bounds[:-1] - (ends - size[intervals])[inside]  # place on the line minus that of its interval
        parts.append((np.array(who)[share], intervals[inside], begin, np.diff(bounds)))
    who_, interval, begin, length = (np.concatenate(column) for column in zip(*parts, strict=True))
    return who_, interval, begin, length


def _element(mine: Runs, local: int) -> int:
    """Return the number in the tensor of element ``local`` of a piece with the runs ``mine``."""
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

    Collective. Pieces of a kind in ``optional`` stay as they are where no rank holds any of that kind. Arrays of
    ``held`` and ``wanted`` may be the same memory where they are the same elements. Raises StorageError on all ranks,
    naming a tensor and an element, when something is held by no rank, or in another shape or dtype: no array has been
    touched then.
    """
    chosen, problem = _choose_offers(comm, _gather_offers(comm, held), wanted, optional)
    requests = [_encode_request(parts) for parts in chosen]
    counts = _agree_on_counts(comm, problem, [request.size for request in requests])
    received_requests = _exchange_requests(comm, requests, counts)
    for part in chosen[comm.rank]:  # what this rank holds itself needs no message
        to, at, size = part.stretches.to, part.stretches.at, part.stretches.size
        moves.copy(held[part.number].array, wanted[part.wanted].array, at, to, size)
    outgoing = [
        [ElementRuns(held[number].array, at, size) for number, at, size in _decode_request(numbers)]
        for numbers in received_requests
    ]
    incoming = [
        [ElementRuns(wanted[part.wanted].array, part.stretches.to, part.stretches.size) for part in parts]
        for parts in chosen
    ]
    outgoing[comm.rank], incoming[comm.rank] = [], []
    return moves.exchange(comm, outgoing, incoming)


def _agree_on_counts(comm: Communicator, problem: str, counts: list[int]) -> list[list[int]]:
    """Return the length of the request of each rank to each. Raises StorageError on all ranks where one has a problem.

    Collective.
    """
    rows = comm.allgather_object((problem, counts))
    for rank, (text, _) in enumerate(rows):
        if text:
            raise StorageError(f"{text} (wanted by rank {rank})")
    return [row for _, row in rows]


def _announcement(held: Sequence[Piece]) -> tuple[list[tuple[Any, ...]], np.ndarray]:
    """Return (names, numbers): each kind, tensor, dtype and shape once, and all pieces in one array.

    A piece is the index of its name, start and stop of its box in each dim, and start and stop of its range in that.
    """
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
    """Return all pieces that any rank holds. Collective."""
    offers: Offers = {}
    for rank, (heads, table) in enumerate(comm.allgather_object(_announcement(held))):
        numbers, place, number = table.tolist(), 0, 0
        while place < len(numbers):
            kind, tensor, dtype, shape = heads[numbers[place]]
            flat = place + 1 + 2 * len(shape)  # where the range is, behind the box of 2 numbers a dim
            box = tuple(zip(numbers[place + 1 : flat : 2], numbers[place + 2 : flat : 2], strict=True))
            place = flat + 2
            offer = PieceOffer(rank, number, dtype, shape, box, Range(numbers[flat], numbers[flat + 1]))
            if offer.flat:
                offers.setdefault((kind, tensor), []).append(offer)
            number += 1
    return offers


def _choose_offers(
    comm: Communicator, offers: Offers, wanted: Sequence[Piece], optional: Collection[str]
) -> tuple[list[list[_Transfer]], str]:
    """Return what this rank takes from each rank, and the reason where something is lacking, else "" (local)."""
    absent = set(optional) - {kind for kind, _ in offers}
    parts: list[list[_Transfer]] = [[] for _ in range(comm.size)]
    loads = [0] * comm.size
    for index, piece in enumerate(wanted):
        if not piece.flat or piece.kind in absent:
            continue  # pieces without elements are not announced
        candidates = offers.get((piece.kind, piece.tensor), [])
        problem = _mismatch(piece, candidates)
        if problem:
            return parts, problem
        try:
            for offer, stretches in cover(piece, candidates, comm.rank, loads):
                parts[offer.rank].append(_Transfer(offer.number, index, stretches))
        except GapError as gap:
            return parts, f"element {gap.element} of {piece.name} is held by none of the {comm.size} ranks"
    return parts, ""


def _mismatch(piece: Piece, offers: Sequence[PieceOffer]) -> str:
    """Return how what is held under the name of ``piece`` differs in dtype or shape, else ""."""
    shape, dtype = tuple(piece.global_shape), name_of(piece.array.dtype)
    for offer in offers:
        if offer.dtype != dtype or not grouped_alike(offer.shape, shape):
            return (
                f"rank {offer.rank} holds {piece.name} as {offer.dtype}{list(offer.shape)}, expected "
                f"{dtype}{list(shape)}; go on with the recipe of before"
            )
    return ""


def _encode_request(parts: Sequence[_Transfer]) -> np.ndarray:
    """Return the request to one rank as numbers, for each piece: its number, the count of runs, their begins, sizes."""
    numbers = [np.zeros(0, np.int64)]
    for part in parts:
        at, size = part.stretches.at, part.stretches.size
        numbers += np.array([part.number, at.size]), at, size
    return np.concatenate(numbers)


def _decode_request(numbers: np.ndarray) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
    """Yield (piece, begins, sizes) from what `_encode_request` has made."""
    place = 0
    while place < numbers.size:
        count = int(numbers[place + 1])
        sizes = place + 2 + count
        yield int(numbers[place]), numbers[place + 2 : sizes], numbers[sizes : sizes + count]
        place = sizes + count


def _exchange_requests(
    comm: Communicator, requests: Sequence[np.ndarray], counts: Sequence[Sequence[int]]
) -> list[np.ndarray]:
    """Return the request of each rank to this one. Collective."""
    sent = consecutive(request.size for request in requests)
    received = consecutive(row[comm.rank] for row in counts)
    numbers = np.empty(received[-1].stop, np.int64)
    comm.all_to_all(np.concatenate(requests), numbers, sent, received)
    return [numbers[part.slice] for part in received]
