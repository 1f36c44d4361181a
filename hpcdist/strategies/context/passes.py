"""Places of tokens on the ranks of a context axis, and the passes of keys and values round its ring.

Pure integers: the same functions place samples, run attention, and count pairs and bytes for the planner.
"""

from bisect import bisect_right
from dataclasses import dataclass
from functools import lru_cache

from hpcdist.arrays.ranges import split
from hpcdist.models.attention.tiles import Pieces, one_piece
from hpcdist.models.counts import attention_pairs
from hpcdist.models.layers.dropout import WORDS_PER_COUNTER
from hpcdist.strategies.config import PIECE_TOKENS

assert PIECE_TOKENS % WORDS_PER_COUNTER == 0, "tiles of a mask of dropout begin at whole counters"


@dataclass(frozen=True)
class Visit:
    """The block of keys and values of rank ``source`` on another rank.

    Queries from the local row ``from_row`` on see ``keys``, pieces of the block, without a window all of it; no query
    sees the rest.
    """

    source: int
    from_row: int
    keys: Pieces


def pieces(context: int, ranks: int) -> tuple[Pieces, ...]:
    """Return the pieces of a sample of ``context`` tokens that each of ``ranks`` has, its head and its tail.

    Sizes differ by up to `PIECE_TOKENS`; the last tails may be empty.
    """
    assert context > PIECE_TOKENS * (ranks - 1), "a rank would have no token: the rules refuse it"
    if ranks == 1:
        return (one_piece(context),)
    parts = split(context, 2 * ranks, itemsize=1, align_bytes=PIECE_TOKENS)
    placed = []
    for rank in range(ranks):
        head, tail = parts[rank], parts[2 * ranks - 1 - rank]
        placed.append(((0, head.size, head.start), (head.size, head.size + tail.size, tail.start)))
    return tuple(placed)


def tokens(own: Pieces) -> int:
    """Return how many tokens of a sample the pieces have."""
    return own[-1][1]


def visits(placed: tuple[Pieces, ...], rank: int, *, causal: bool) -> tuple[Visit, ...]:
    """Return the blocks of the other ranks in the order in which the ring brings them to ``rank``.

    Causal queries see all keys at earlier places: of an earlier rank its head, of a later one, for the tail of this
    rank, both. No piece is seen in part.
    """
    ranks, visited = len(placed), []
    for step in range(1, ranks):
        source = (rank - step) % ranks
        keys, from_row = placed[source], 0
        if causal and source < rank:
            keys = keys[:1]
        elif causal:
            from_row = placed[rank][0][1]
            keys = keys if tokens(placed[rank]) > from_row else ()
        visited.append(Visit(source, from_row, keys))
    return tuple(visited)


@lru_cache(maxsize=256)
def paths(placed: tuple[Pieces, ...], window: int = 0) -> tuple[tuple[int, ...], ...]:
    """Return the ranks that each rank's block visits, in the order of the ring: its own, then the others.

    With a ``window`` those alone that see it: queries of a piece see keys of so many pieces before it as those of any
    piece do, which leaves a pattern in which no ranks wait in a circle, also where pieces are uneven.
    """
    ranks = len(placed)
    numbers = [(rank, 2 * ranks - 1 - rank) for rank in range(ranks)]  # of the pieces
    reach = _reach(placed, window) if window else 2 * ranks

    def sees(rank: int, source: int) -> bool:
        return any(0 <= own - other <= reach for own in numbers[rank] for other in numbers[source])

    others = [[(source + step) % ranks for step in range(1, ranks)] for source in range(ranks)]
    return tuple((source, *(rank for rank in row if sees(rank, source))) for source, row in enumerate(others))


def _reach(placed: tuple[Pieces, ...], window: int) -> int:
    """Return how many pieces before its own a query sees at most."""
    every = [own[0] for own in placed] + [own[-1] for own in reversed(placed)]
    starts = [place for start, end, place in every if end > start]
    return max(number - bisect_right(starts, max(0, place - window + 1)) + 1 for number, place in enumerate(starts))


def pairs(placed: tuple[Pieces, ...], rank: int, *, causal: bool, window: int = 0) -> int:
    """Return how many pairs of a query and a key that it sees a sample has on ``rank``; ``window`` 0: there is none."""
    if not causal:
        return tokens(placed[rank]) * sum(map(tokens, placed))
    # Of a piece, what samples have that end with it, less what those have that end in front of it.
    return sum(
        attention_pairs(place + end - start, causal=True, window=window)
        - attention_pairs(place, causal=True, window=window)
        for start, end, place in placed[rank]
    )
