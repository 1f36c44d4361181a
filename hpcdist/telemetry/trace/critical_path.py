"""Critical path of a step over the ranks, waits between ranks, and communication hidden by computation.

The path is walked backwards from the last end. If a rank waited for something that another rank sent after the wait
began, the path continues on that rank at the time of the send. The time between is a transfer.
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
    """Segment of the critical path: an operation of ``rank``, or (if ``travels``) a message transfer to ``rank``."""

    rank: int
    phase: str
    name: str
    begin_ns: int
    end_ns: int
    travels: bool = False

    @property
    def took_ns(self) -> int:
        return self.end_ns - self.begin_ns


def critical_path(pieces: Mapping[int, Sequence[TimelinePiece]]) -> list[PathSegment]:
    """Return the critical path over all ranks as a list of segments in time order. ``pieces``: {rank: timeline}."""
    ends = {rank: [piece.end_ns for piece in row] for rank, row in pieces.items()}
    last = max(((row[-1].end_ns, rank) for rank, row in pieces.items() if row), default=None)
    if last is None:
        return []
    at, rank = last
    segments: list[PathSegment] = []
    # Ranks visited at the time ``at``: if clocks disagree, causes could form a circle without going back in time. A
    # segment of positive length starts a new set.
    been = {rank}
    while row := pieces.get(rank, ()):
        # The piece that covers the time just before ``at``: the first that ends at ``at`` or later. If that piece
        # begins at ``at`` or later, there is a gap, and the previous piece is used.
        place = min(bisect_left(ends[rank], at), len(row) - 1)
        if row[place].begin_ns >= at:
            place -= 1
        if place < 0:
            break
        piece = row[place]
        # A piece ended by another rank leads to that rank, if the path reached the end of the piece.
        begin, to, travels = piece.begin_ns, rank, piece.by != -1 and piece.end_ns == at
        if piece.end_ns < at:  # a gap in the records of this rank
            segments.append(PathSegment(rank, "other", UNKNOWN, piece.end_ns, at))
            at, been = piece.end_ns, {rank}
            continue
        if travels and piece.by in pieces:
            since = min(piece.since_ns, at)  # never forward in time, even if clocks disagree
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
    """Communication time of one rank in ns, split into time that computation hides and exposed time."""

    hidden_ns: int  # overlaps with computation; an upper bound, because messages seem in flight until noticed
    exposed_ns: int  # does not overlap with computation
    waited_ns: int  # time in ``exposed_ns`` in which the rank waits for late ranks

    @property
    def hidden_share(self) -> float | None:
        """Fraction of the communication time, waits excluded, that computation hides. None without communication."""
        total_ns = self.hidden_ns + self.exposed_ns - self.waited_ns
        return self.hidden_ns / total_ns if total_ns > 0 else None


def path_shares(path: Sequence[PathSegment]) -> tuple[Counter[int], Counter[str], Counter[str]]:
    """Return three dicts of the time in ns on ``path``: per rank (-1: transfers), per phase, per operation. Local."""
    of_rank: Counter[int] = Counter()
    of_phase: Counter[str] = Counter()
    of_name: Counter[str] = Counter()
    for link in path:
        of_rank[-1 if link.travels else link.rank] += link.took_ns
        of_phase[link.phase] += link.took_ns
        of_name[link.name] += link.took_ns
    return of_rank, of_phase, of_name


def waited_for(pieces: Mapping[int, Sequence[TimelinePiece]]) -> dict[tuple[int, int], int]:
    """Return a dict {(waiting rank, awaited rank): total wait in ns}. ``pieces``: {rank: time intervals}. Local."""
    waited: Counter[tuple[int, int]] = Counter()
    for row in pieces.values():
        for piece in row:
            if piece.waited_ns:
                waited[piece.rank, piece.by] += piece.waited_ns
    return dict(waited)


def longest_waits(
    pieces: Mapping[int, Sequence[TimelinePiece]], ranks: Collection[int]
) -> list[tuple[TimelinePiece, str]]:
    """Return a list of pairs (wait, main operation of the awaited rank) with the five longest waits of ``ranks``."""
    waiting = [piece for rank in ranks for piece in pieces.get(rank, ()) if piece.waited_ns]
    waiting.sort(key=lambda piece: (-piece.waited_ns, piece.begin_ns, piece.rank))
    return [(wait, _main_activity(pieces.get(wait.by, ()), wait)) for wait in waiting[:5]]


def _main_activity(row: Sequence[TimelinePiece], waiting: TimelinePiece) -> str:
    spent: Counter[str] = Counter()
    begin, end = waiting.begin_ns, waiting.begin_ns + waiting.waited_ns
    for piece in row[bisect_left([candidate.end_ns for candidate in row], begin) :]:
        if piece.begin_ns >= end:
            break
        spent[piece.name] += max(0, min(piece.end_ns, end) - max(piece.begin_ns, begin))
    return spent.most_common(1)[0][0] if spent else UNKNOWN


def communication_overlap(
    timeline: Sequence[TimelinePiece], transfers: Sequence[tuple[int, int]]
) -> CommunicationOverlap:
    """Return the hidden and the exposed communication time of a rank. ``timeline``: time intervals of the rank."""
    computing = union([(piece.begin_ns, piece.end_ns) for piece in timeline if piece.phase in COMPUTES])
    exposed = sum(piece.end_ns - piece.begin_ns for piece in timeline if piece.phase == "communication")
    waited = sum(piece.waited_ns for piece in timeline if piece.phase == "communication")
    return CommunicationOverlap(intersection_ns(computing, union(transfers)), exposed, waited)


def union(intervals: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Merge overlapping (begin, end) intervals. Return an ascending list of disjoint intervals. Local."""
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
    """Return the total overlap of ``a`` and ``b`` in ns. Both are sorted lists of disjoint (begin, end) intervals."""
    total = i = j = 0
    while i < len(a) and j < len(b):
        total += max(0, min(a[i][1], b[j][1]) - max(a[i][0], b[j][0]))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return total
