"""Token positions on the ranks of a context axis, and the path of keys and values round its ring."""

from bisect import bisect_right
from dataclasses import dataclass
from functools import lru_cache

from hpcdist.arrays.ranges import split
from hpcdist.models.attention.tiles import Pieces, one_piece
from hpcdist.models.counts import attention_pairs
from hpcdist.models.layers.dropout import WORDS_PER_COUNTER
from hpcdist.strategies.config import PIECE_TOKENS

assert PIECE_TOKENS % WORDS_PER_COUNTER == 0, "tiles of a dropout mask begin at whole counters"


@dataclass(frozen=True)
class Visit:
    """Keys and values of rank ``source`` that another rank receives in ring attention."""

    source: int
    from_row: int  # queries of the receiver before this row see none of the keys
    keys: Pieces  # token ranges that later queries see, unless a sliding window hides them


def pieces(context: int, ranks: int) -> tuple[Pieces, ...]:
    """Return, for each of ``ranks`` ranks, an early and a late token range of a sample of ``context`` tokens."""
    assert context > PIECE_TOKENS * (ranks - 1), "every rank needs a token; the rules check this"
    if ranks == 1:
        return (one_piece(context),)
    # Range sizes differ by up to `PIECE_TOKENS` tokens. The late ranges of the last ranks may be empty.
    parts = split(context, 2 * ranks, itemsize=1, align_bytes=PIECE_TOKENS)
    rank_pieces = []
    for rank in range(ranks):
        head, tail = parts[rank], parts[2 * ranks - 1 - rank]
        rank_pieces.append(((0, head.size, head.start), (head.size, head.size + tail.size, tail.start)))
    return tuple(rank_pieces)


def tokens(rank_pieces: Pieces) -> int:
    """Return the number of tokens in ``rank_pieces``, one rank's token ranges of a sample."""
    return rank_pieces[-1][1]


def visits(placed: tuple[Pieces, ...], rank: int, *, causal: bool) -> tuple[Visit, ...]:
    """Return a `Visit` for each other rank's keys and values, in the order of arrival at ``rank``.

    ``placed``: each rank's token ranges. Keyword-only ``causal``: queries see only earlier tokens.
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
    """Return, for each rank r, the ranks that use its keys and values: r first, then in ring order.

    ``placed``: each rank's token ranges. ``window``: sliding window in tokens, or 0.
    """
    ranks = len(placed)
    numbers = [(rank, 2 * ranks - 1 - rank) for rank in range(ranks)]  # piece numbers
    reach = _reach(placed, window) if window else 2 * ranks

    def sees(rank: int, source: int) -> bool:
        return any(0 <= number - other <= reach for number in numbers[rank] for other in numbers[source])

    others = [[(source + step) % ranks for step in range(1, ranks)] for source in range(ranks)]
    return tuple((source, *(rank for rank in row if sees(rank, source))) for source, row in enumerate(others))


def _reach(placed: tuple[Pieces, ...], window: int) -> int:
    every = [rank_pieces[0] for rank_pieces in placed] + [rank_pieces[-1] for rank_pieces in reversed(placed)]
    starts = [first for start, end, first in every if end > start]
    return max(number - bisect_right(starts, max(0, first - window + 1)) + 1 for number, first in enumerate(starts))


def pairs(placed: tuple[Pieces, ...], rank: int, *, causal: bool, window: int = 0) -> int:
    """Return the number of visible query-key pairs of one sample whose query is on ``rank``.

    ``placed``: each rank's token ranges. Keyword-only ``causal``: queries see only earlier tokens; keyword-only
    ``window``: sliding window in tokens, or 0.
    """
    if not causal:
        return tokens(placed[rank]) * sum(map(tokens, placed))
    # For each piece: the pairs of the sequence up to its end minus the pairs of the sequence up to its start.
    return sum(
        attention_pairs(position + end - start, causal=True, window=window)
        - attention_pairs(position, causal=True, window=window)
        for start, end, position in placed[rank]
    )
