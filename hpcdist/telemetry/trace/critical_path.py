"""Critical path of a step over the ranks, waits between ranks, and communication hidden behind computation.

The path is walked back from the last end. As long as a rank worked, the path stays on it. Where a rank waited for
something that another rank sent later than the wait began, the path changes to that rank at the time of the send, and
what lies between is the transfer. So the path has no gap, and shortening anything beside it does not shorten the step.
All functions take `hpcdist.telemetry.trace.timeline.TimelinePiece`s in one time, of any origin.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from hpcdist.telemetry.trace.timeline import TimelinePiece

UNKNOWN: Final = "unknown"
COMPUTES: Final = ("compute", "update")


@dataclass(frozen=True)
class PathSegment:
    """Segment of the critical path: what ``rank`` did, or a transfer to it (``travels``)."""

    rank: int
    phase: str
    name: str
    begin_ns: int
    end_ns: int
    travels: bool = False

    @property
    def took_ns(self) -> int:
        """Its duration."""
        return self.end_ns - self.begin_ns


def critical_path(pieces: Mapping[int, Sequence[TimelinePiece]]) -> list[PathSegment]:
    """Return the chain that ends with the last piece of all, from its beginning on (local).

    ``pieces`` of a rank are in the order of time and do not overlap. Each link ends where the next begins.
    """
    ends = {rank: [piece.end_ns for piece in row] for rank, row in pieces.items()}
    last = max(((row[-1].end_ns, rank) for rank, row in pieces.items() if row), default=None)
    if last is None:
        return []
    at, rank = last
    segments: list[PathSegment] = []
    # Ranks visited at the time ``at``: where clocks disagree, causes could lead round in a circle without going back in
    # time. A segment of positive length starts a new set.
    been = {rank}
    while row := pieces.get(rank, ()):
        # The piece that covers the time just before ``at``: the first that ends there or later. Where that one begins
        # at ``at`` or later, there is a gap, and the piece before it is taken.
        place = min(bisect_left(ends[rank], at), len(row) - 1)
        if row[place].begin_ns >= at:
            place -= 1
        if place < 0:
            break
        piece = row[place]
        # A piece that ended by what another rank did brings the path to that rank, if the path came to its very end.
        begin, to, travels = piece.begin_ns, rank, piece.by != -1 and piece.end_ns == at
        if piece.end_ns < at:  # a gap in the records of this rank
            segments.append(PathSegment(rank, "other", UNKNOWN, piece.end_ns, at))
            at, been = piece.end_ns, {rank}
            continue
        if travels and piece.by in pieces:
            since = min(piece.since_ns, at)  # never forward in time, whatever the clocks say
            if (since < at or piece.by not in been) and (piece.by != rank or since < begin):
                begin, to = since, piece.by
        if begin < at:
            segments.append(PathSegment(rank, piece.phase, piece.name, begin, at, travels))
            been = set()
        at, rank = begin, to
        been.add(rank)
    return segments[::-1]


@dataclass(frozen=True)
class CommunicationOverlap:
    """Overlap of one rank: communication ``hidden_ns`` beside its computation, and ``exposed_ns`` without any.

    Of the exposed part it waited ``waited_ns`` for other ranks, which had not come yet. The hidden part is an upper
    bound: the arrival of a message is known when the rank tests for it, not when it came.
    """

    hidden_ns: int
    exposed_ns: int
    waited_ns: int

    @property
    def hidden_share(self) -> float | None:
        """The hidden share of all that is not waiting; None where nothing was communicated."""
        whole = self.hidden_ns + self.exposed_ns - self.waited_ns
        return self.hidden_ns / whole if whole > 0 else None


def path_shares(path: Sequence[PathSegment]) -> tuple[Counter[int], Counter[str], Counter[str]]:
    """Return the ns of the path by rank (transfers belong to none: -1), by phase, and by operation (local)."""
    of_rank: Counter[int] = Counter()
    of_phase: Counter[str] = Counter()
    of_name: Counter[str] = Counter()
    for link in path:
        of_rank[-1 if link.travels else link.rank] += link.took_ns
        of_phase[link.phase] += link.took_ns
        of_name[link.name] += link.took_ns
    return of_rank, of_phase, of_name


def waited_for(pieces: Mapping[int, Sequence[TimelinePiece]]) -> dict[tuple[int, int], int]:
    """Return the ns of waiting by (rank that waited, rank that it waited for) (local)."""
    waited: Counter[tuple[int, int]] = Counter()
    for row in pieces.values():
        for piece in row:
            if piece.waited_ns:
                waited[piece.rank, piece.by] += piece.waited_ns
    return dict(waited)


def longest_waits(
    pieces: Mapping[int, Sequence[TimelinePiece]], ranks: Collection[int]
) -> list[tuple[TimelinePiece, str]]:
    """Return the five longest waits of ``ranks``, and what the other rank was at for most of each (local)."""
    waiting = [piece for rank in ranks for piece in pieces.get(rank, ()) if piece.waited_ns]
    waiting.sort(key=lambda piece: (-piece.waited_ns, piece.begin_ns, piece.rank))
    return [(wait, _main_activity(pieces.get(wait.by, ()), wait)) for wait in waiting[:5]]


def _main_activity(row: Sequence[TimelinePiece], waiting: TimelinePiece) -> str:
    """Return the name of the piece at which the rank of ``row`` was for most of the time of ``waiting``."""
    spent: Counter[str] = Counter()
    begin, end = waiting.begin_ns, waiting.begin_ns + waiting.waited_ns
    for piece in row[bisect_left([candidate.end_ns for candidate in row], begin) :]:
        if piece.begin_ns >= end:
            break
        spent[piece.name] += max(0, min(piece.end_ns, end) - max(piece.begin_ns, begin))
    return spent.most_common(1)[0][0] if spent else UNKNOWN


def communication_overlap(row: Sequence[TimelinePiece], transfers: Sequence[tuple[int, int]]) -> CommunicationOverlap:
    """Return the overlap of the ``transfers`` (begin, end) of a rank with the computing pieces of its ``row`` (local).

    Transfers at the same time count once.
    """
    computing = union([(piece.begin_ns, piece.end_ns) for piece in row if piece.phase in COMPUTES])
    exposed = sum(piece.end_ns - piece.begin_ns for piece in row if piece.phase == "communication")
    waited = sum(piece.waited_ns for piece in row if piece.phase == "communication")
    return CommunicationOverlap(intersection_ns(computing, union(transfers)), exposed, waited)


def union(intervals: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the union of ``intervals`` as disjoint intervals, ascending (local)."""
    merged: list[list[int]] = []
    for begin, end in sorted(intervals):
        if end <= begin:
            continue
        if merged and begin <= merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], end)
        else:
            merged.append([begin, end])
    return [(begin, end) for begin, end in merged]


def intersection_ns(a: Sequence[tuple[int, int]], b: Sequence[tuple[int, int]]) -> int:
    """Return the length of the intersection of two `union`s (local)."""
    total = i = j = 0
    while i < len(a) and j < len(b):
        total += max(0, min(a[i][1], b[j][1]) - max(a[i][0], b[j][0]))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return total
