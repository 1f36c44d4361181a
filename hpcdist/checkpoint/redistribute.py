"""Restoring from memory: what ranks want is taken from what ranks hold, in whatever cuts either is.

    announce   all ranks learn which pieces each holds: names once, and a few numbers for each piece
    cover      each rank finds what covers what it wants: its own first, then that of others in equal shares
    ask        all learn whether something is lacking, which ends it, and each is told what is asked of it
    move       messages of at most 4 MiB, 16 MiB of them under way at a time between each two ranks in each direction

A rank receives the bytes that it wants and does not hold, each once, and sends what is asked of it; it needs memory for
the messages under way, 128 MiB in either direction at most. Where the cuts are those of
before, only the ranks that lack something receive anything. The numbers of all pieces reach every rank: 8 (3 + 2 d)
bytes for a piece of a tensor of d dims.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np

from hpcdist.arrays.dtypes import name_of
from hpcdist.arrays.piece import Piece, grouped_alike
from hpcdist.arrays.ranges import Range
from hpcdist.checkpoint import redistribute_moves as moves
from hpcdist.checkpoint.redistribute_moves import Line
from hpcdist.checkpoint.redistribute_plan import GapError, Offer, Stretches, cover
from hpcdist.comm.communicator import Communicator
from hpcdist.errors import StorageError

Offers = dict[tuple[str, str], list[Offer]]  # by kind and tensor


@dataclass(frozen=True)
class _Part:
    """What is taken of the holder's piece ``number`` for the own piece ``wanted``."""

    number: int
    wanted: int
    stretches: Stretches


def redistribute(
    comm: Communicator, held: Sequence[Piece], wanted: Sequence[Piece], optional: Collection[str] = ()
) -> int:
    """Fill the arrays of ``wanted`` with what any rank holds of them; return the bytes received from others.

    Collective. Pieces of a kind in ``optional`` stay as they are where nobody holds anything of that kind. Arrays of
    ``held`` and ``wanted`` may be the same memory where they are the same elements. Raises StorageError on all ranks,
    naming a tensor and an element, when something is held by nobody, or in another shape or dtype: no array has been
    touched then.
    """
    chosen, problem = _chosen(comm, _offers(comm, held), wanted, optional)
    requests = [_request(parts) for parts in chosen]
    counts = _agreed(comm, problem, [request.size for request in requests])
    asked = _asked(comm, requests, counts)
    for part in chosen[comm.rank]:
        to, at, size = part.stretches.to, part.stretches.at, part.stretches.size
        moves.copy(held[part.number].array, wanted[part.wanted].array, at, to, size)
    given = [[Line(held[number].array, at, size) for number, at, size in _parts(numbers)] for numbers in asked]
    taken = [
        [Line(wanted[part.wanted].array, part.stretches.to, part.stretches.size) for part in parts] for parts in chosen
    ]
    given[comm.rank], taken[comm.rank] = [], []
    return moves.exchange(comm, given, taken)


def lacking(comm: Communicator, held: Sequence[Piece], wanted: Sequence[Piece], optional: Collection[str] = ()) -> str:
    """Return why `redistribute` would raise, the same on all ranks; "" when it would not. Collective."""
    _, problem = _chosen(comm, _offers(comm, held), wanted, optional)
    return _first(comm.allgather_object(problem))


def _first(problems: Sequence[str]) -> str:
    return next((f"{problem} (wanted by rank {rank})" for rank, problem in enumerate(problems) if problem), "")


def _agreed(comm: Communicator, problem: str, counts: list[int]) -> list[list[int]]:
    """Return how many numbers each rank asks each with. Raises StorageError on all ranks where one has a problem."""
    told = comm.allgather_object((problem, counts))
    problem = _first([text for text, _ in told])
    if problem:
        raise StorageError(problem)
    return [row for _, row in told]


def _announced(held: Sequence[Piece]) -> tuple[list[tuple[Any, ...]], np.ndarray]:
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


def _offers(comm: Communicator, held: Sequence[Piece]) -> Offers:
    """Return what all ranks hold. Collective."""
    offers: Offers = {}
    for rank, (heads, table) in enumerate(comm.allgather_object(_announced(held))):
        numbers, place, number = table.tolist(), 0, 0
        while place < len(numbers):
            kind, tensor, dtype, shape = heads[numbers[place]]
            flat = place + 1 + 2 * len(shape)
            box = tuple(zip(numbers[place + 1 : flat : 2], numbers[place + 2 : flat : 2], strict=True))
            place = flat + 2
            found = Offer(rank, number, dtype, shape, box, Range(numbers[flat], numbers[flat + 1]))
            if found.flat:
                offers.setdefault((kind, tensor), []).append(found)
            number += 1
    return offers


def _chosen(
    comm: Communicator, offers: Offers, wanted: Sequence[Piece], optional: Collection[str]
) -> tuple[list[list[_Part]], str]:
    """Return what this rank takes of each rank, and why it cannot have all that it wants, or "" (local)."""
    absent = set(optional) - {kind for kind, _ in offers}
    parts: list[list[_Part]] = [[] for _ in range(comm.size)]
    loads = [0] * comm.size
    for index, piece in enumerate(wanted):
        if not piece.flat or piece.kind in absent:
            continue  # nobody holds what has no elements
        found = offers.get((piece.kind, piece.tensor), [])
        problem = _unlike(piece, found)
        if problem:
            return parts, problem
        try:
            for offer, stretches in cover(piece, found, comm.rank, loads):
                parts[offer.rank].append(_Part(offer.number, index, stretches))
        except GapError as gap:
            return parts, f"element {gap.element} of {piece.name} is held by none of the {comm.size} ranks"
    return parts, ""


def _unlike(piece: Piece, offers: Sequence[Offer]) -> str:
    """Return what differs between ``piece`` and what is held under its name, or ""."""
    shape, dtype = tuple(piece.global_shape), name_of(piece.array.dtype)
    for offer in offers:
        if offer.dtype != dtype or not grouped_alike(offer.shape, shape):
            return (
                f"rank {offer.rank} holds {piece.name} as {offer.dtype}{list(offer.shape)}, expected "
                f"{dtype}{list(shape)}; go on with the recipe of before"
            )
    return ""


def _request(parts: Sequence[_Part]) -> np.ndarray:
    """Return what is asked of a rank, as numbers: its piece, how many stretches, where they begin, and their sizes."""
    numbers = [np.zeros(0, np.int64)]
    for part in parts:
        at, size = part.stretches.at, part.stretches.size
        numbers += np.array([part.number, at.size]), at, size
    return np.concatenate(numbers)


def _parts(numbers: np.ndarray) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
    """Yield what `_request` has put into numbers."""
    place = 0
    while place < numbers.size:
        count = int(numbers[place + 1])
        sizes = place + 2 + count
        yield int(numbers[place]), numbers[place + 2 : sizes], numbers[sizes : sizes + count]
        place = sizes + count


def _asked(comm: Communicator, requests: Sequence[np.ndarray], counts: Sequence[Sequence[int]]) -> list[np.ndarray]:
    """Return what each rank asks of this one. Collective."""
    ends = list(accumulate((request.size for request in requests), initial=0))
    sent = [Range(start, stop) for start, stop in zip(ends, ends[1:], strict=False)]
    ends = list(accumulate((row[comm.rank] for row in counts), initial=0))
    received = [Range(start, stop) for start, stop in zip(ends, ends[1:], strict=False)]
    numbers = np.empty(ends[-1], np.int64)
    comm.all_to_all(np.concatenate(requests), numbers, sent, received)
    return [numbers[part.slice] for part in received]
