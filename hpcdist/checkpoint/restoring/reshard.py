"""Reshard a state in memory: each rank receives its requested slices from the ranks that hold them, with any sharding.

All ranks gather descriptions of all slices: 8 (3 + 2 d) bytes for a tensor of d dimensions. A rank first uses its local
elements. Messages have 4 MiB. At most 16 MiB are in flight per pair of ranks, and 128 MiB per direction.
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

SHARE_BYTES: Final = 256 << 10  # smaller requests are not divided among holders (empirical)


@dataclass(frozen=True)
class PieceOffer:
    """Description of a tensor slice that rank ``rank`` can send. ``number``: index of the slice on that rank."""

    rank: int
    number: int
    dtype: str
    shape: tuple[int, ...]
    box: Box
    flat: Range

    def runs(self) -> Runs:
        return runs(self.shape, self.box, self.flat)


@dataclass(frozen=True)
class CopyRuns:
    """Copied runs: ``size[i]`` elements from index ``at[i]`` of a source array to index ``to[i]`` of a target array."""

    to: np.ndarray  # first index in the target, ascending
    at: np.ndarray  # first index in the source
    size: np.ndarray  # number of elements

    def covers(self, start: np.ndarray) -> np.ndarray:
        """Return a bool array: item i is True if these runs fill element ``start[i]`` of the target array."""
        if not self.to.size:
            return np.zeros(start.size, bool)
        # Index of the last range that begins at ``start`` or before, or -1.
        inside = np.searchsorted(self.to, start, "right") - 1
        return (inside >= 0) & (start < (self.to + self.size)[inside])

    def only(self, start: np.ndarray, size: np.ndarray) -> "CopyRuns":
        """Return runs that fill only the target elements ``start[i]`` to ``start[i] + size[i] - 1``, for all i."""
        inside = np.searchsorted(self.to, start, "right") - 1
        at = self.at[inside] + start - self.to[inside]
        # A new run starts if the interval before ends elsewhere, in the requested or in the held array.
        begins = np.concatenate([[True], (start[1:] != (start + size)[:-1]) | (at[1:] != (at + size)[:-1])])
        return CopyRuns(start[begins], at[begins], np.add.reduceat(size, np.flatnonzero(begins)))


class GapError(Exception):
    """Error: no rank has the element with index ``element`` of a flattened tensor."""

    def __init__(self, element: int) -> None:
        super().__init__(element)
        self.element = element


def cover(piece: Piece, offers: Sequence[PieceOffer], rank: int, loads: list[int]) -> list[tuple[PieceOffer, CopyRuns]]:
    """Return a list of (offer, runs to copy from it) that fills the tensor slice ``piece``. Raises `GapError`. Local.

    ``offers``: slices of this tensor on all ranks. ``rank``: this rank. ``loads``: bytes requested from each rank
    so far, to which this call adds.
    """
    mine = runs(piece.global_shape, piece.box, piece.flat)
    itemsize = piece.array.dtype.itemsize
    shares = max(1, piece.flat.size * itemsize // SHARE_BYTES)  # the largest useful number of offers of the whole piece
    # Local offers first, then the least loaded ranks, then the next in the ring, so that not all ranks ask rank 0.
    offers = sorted(offers, key=lambda offer: (offer.rank != rank, loads[offer.rank], (offer.rank - rank) % len(loads)))
    num_own = sum(offer.rank == rank for offer in offers)
    overlaps: list[CopyRuns] = []
    for offer in offers:
        overlaps.append(CopyRuns(*intersect_runs(mine, offer.runs())))
        if overlaps[-1].size.sum() == piece.flat.size:
            if len(overlaps) <= num_own:
                return [(offer, overlaps[-1])]  # the usual case of an unchanged sharding
            shares -= 1
            if not shares:
                break
    # The ends of all runs split the piece into intervals. An offer has an interval entirely or not at all.
    ends = [stretches.to + stretches.size for stretches in overlaps]
    cuts = np.unique(np.concatenate([[0, piece.flat.size], *(stretches.to for stretches in overlaps), *ends]))
    start, size = cuts[:-1], np.diff(cuts)
    # (offers, intervals), in the order of ``offers``: argmax is the preferred offer of each interval.
    covers = np.array([stretches.covers(start) for stretches in overlaps], bool).reshape(len(overlaps), start.size)
    held = covers.any(axis=0)
    if not held.all():
        raise GapError(_element(mine, int(start[~held][0])))
    who = covers.argmax(axis=0)
    # Intervals that this rank lacks and several others hold are divided among them.
    several = (who >= num_own) & (covers.sum(axis=0) > 1)
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
    # ``covers[s, i]``: slice s contains interval i. Returns arrays (a, b, c, d): slice ``a[k]`` provides ``d[k]``
    # elements of interval ``b[k]``, from its element number ``c[k]``.
    patterns, belongs = np.unique(covers, axis=1, return_inverse=True)
    parts = []
    for pattern in range(patterns.shape[1]):
        who = sorted(np.flatnonzero(patterns[:, pattern]).tolist(), key=lambda k: loads[ranks[k]])
        # Concatenate all intervals with the same offers and split the result into equal shares. A part ends at the end
        # of an interval or of a share.
        intervals = np.flatnonzero(belongs.reshape(-1) == pattern)
        ends = np.cumsum(size[intervals])
        shares = max(1, min(len(who), int(ends[-1]) * itemsize // SHARE_BYTES))
        limits = ends[-1] * np.arange(1, shares + 1) // shares
        bounds = np.unique(np.concatenate([[0], ends, limits]))
        inside = np.searchsorted(ends, bounds[:-1], "right")
        share = np.searchsorted(limits, bounds[:-1], "right")
        begin = bounds[:-1] - (ends - size[intervals])[inside]  # offset within the interval
        parts.append((np.array(who)[share], intervals[inside], begin, np.diff(bounds)))
    who_, interval, begin, length = (np.concatenate(column) for column in zip(*parts, strict=True))
    return who_, interval, begin, length


def _element(mine: Runs, local: int) -> int:
    # From an index in this rank's slice to an index in the flattened tensor.
    run = int(np.searchsorted(mine.local, local, "right")) - 1
    return int(mine.start[run]) + local - int(mine.local[run])


Offers = dict[tuple[str, str], list[PieceOffer]]  # by kind and tensor


@dataclass(frozen=True)
class _Transfer:
    number: int  # index of the sender's slice
    target: int  # index of this rank's slice
    stretches: CopyRuns


def reshard(comm: Communicator, held: Sequence[Piece], pieces: Sequence[Piece], optional: Collection[str] = ()) -> int:
    """Fill the tensor slices ``pieces`` from the slices ``held`` of all ranks. Return the bytes received. Collective.

    ``optional``: tensor kinds that may be missing, such as "optimizer.m". Raises StorageError on all ranks, before any
    change, if elements are missing or a shape or dtype differs.
    """
    chosen, problem = _choose_offers(comm, _gather_offers(comm, held), pieces, optional)
    requests = [_encode_request(parts) for parts in chosen]
    counts = _agree_on_counts(comm, problem, [request.size for request in requests])
    received_requests = _exchange_requests(comm, requests, counts)
    for part in chosen[comm.rank]:  # pieces of this rank need no message
        to, at, size = part.stretches.to, part.stretches.at, part.stretches.size
        moves.copy(held[part.number].array, pieces[part.target].array, at, to, size)
    outgoing = [
        [ElementRuns(held[number].array, at, size) for number, at, size in _decode_request(numbers)]
        for numbers in received_requests
    ]
    incoming = [
        [ElementRuns(pieces[part.target].array, part.stretches.to, part.stretches.size) for part in parts]
        for parts in chosen
    ]
    outgoing[comm.rank], incoming[comm.rank] = [], []
    return moves.exchange(comm, outgoing, incoming)


def _agree_on_counts(comm: Communicator, problem: str, counts: list[int]) -> list[list[int]]:
    rows = comm.allgather_object((problem, counts))
    for rank, (reason, _) in enumerate(rows):
        if reason:
            raise StorageError(f"rank {rank} cannot fill its tensors: {reason}")
    return [row for _, row in rows]


def _announcement(held: Sequence[Piece]) -> tuple[list[tuple[Any, ...]], np.ndarray]:
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
    offers: Offers = {}
    for rank, (heads, table) in enumerate(comm.allgather_object(_announcement(held))):
        numbers, at, number = table.tolist(), 0, 0
        while at < len(numbers):
            kind, tensor, dtype, shape = heads[numbers[at]]
            flat = at + 1 + 2 * len(shape)  # index of the range, after two numbers of the box per dimension
            box = tuple(zip(numbers[at + 1 : flat : 2], numbers[at + 2 : flat : 2], strict=True))
            at = flat + 2
            offer = PieceOffer(rank, number, dtype, shape, box, Range(numbers[flat], numbers[flat + 1]))
            if offer.flat:
                offers.setdefault((kind, tensor), []).append(offer)
            number += 1
    return offers


def _choose_offers(
    comm: Communicator, offers: Offers, requested: Sequence[Piece], optional: Collection[str]
) -> tuple[list[list[_Transfer]], str]:
    absent = set(optional) - {kind for kind, _ in offers}
    parts: list[list[_Transfer]] = [[] for _ in range(comm.size)]
    loads = [0] * comm.size
    for index, piece in enumerate(requested):
        if not piece.flat or piece.kind in absent:
            continue  # empty pieces are not announced
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
    shape, dtype = tuple(piece.global_shape), name_of(piece.array.dtype)
    for offer in offers:
        if offer.dtype != dtype or not grouped_alike(offer.shape, shape):
            return (
                f"rank {offer.rank} holds {piece.name} as {offer.dtype}{list(offer.shape)}, expected "
                f"{dtype}{list(shape)}; resume with the recipe that made the held state"
            )
    return ""


def _encode_request(parts: Sequence[_Transfer]) -> np.ndarray:
    numbers = [np.zeros(0, np.int64)]
    for part in parts:
        at, size = part.stretches.at, part.stretches.size
        numbers += np.array([part.number, at.size]), at, size
    return np.concatenate(numbers)


def _decode_request(numbers: np.ndarray) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
    at = 0
    while at < numbers.size:
        count = int(numbers[at + 1])
        sizes = at + 2 + count
        yield int(numbers[at]), numbers[at + 2 : sizes], numbers[sizes : sizes + count]
        at = sizes + count


def _exchange_requests(
    comm: Communicator, requests: Sequence[np.ndarray], counts: Sequence[Sequence[int]]
) -> list[np.ndarray]:
    sent = consecutive(request.size for request in requests)
    received = consecutive(row[comm.rank] for row in counts)
    numbers = np.empty(received[-1].stop, np.int64)
    comm.all_to_all(np.concatenate(requests), numbers, sent, received)
    return [numbers[part.slice] for part in received]
