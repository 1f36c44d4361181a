"""Attention over a context axis: the token positions of each rank, and its messages as operation lists.

`axis.Ring` and `all_to_all.AllToAllAttention` run the lists. `proof.prove_messages` proves them before anything runs.
"""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from typing import Final, TypeAlias

from hpcdist.arrays.ranges import split
from hpcdist.models.attention.tiles import Pieces, consecutive_positions
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
    """Return a tuple of each rank's token ranges in a sample of ``context`` tokens: one early and one late range."""
    assert context > PIECE_TOKENS * (ranks - 1), "every rank needs a token; the rules check this"
    if ranks == 1:
        return (consecutive_positions(context),)
    # Range sizes differ by up to `PIECE_TOKENS` tokens. The late ranges of the last ranks may be empty.
    parts = split(context, 2 * ranks, itemsize=1, align_bytes=PIECE_TOKENS)
    rank_pieces = []
    for rank in range(ranks):
        head, tail = parts[rank], parts[2 * ranks - 1 - rank]
        rank_pieces.append(((0, head.size, head.start), (head.size, head.size + tail.size, tail.start)))
    return tuple(rank_pieces)


def tokens(rank_pieces: Pieces) -> int:
    """Return the number of tokens in ``rank_pieces``, the token ranges of one rank."""
    return rank_pieces[-1][1]


def visits(token_ranges: tuple[Pieces, ...], rank: int, *, causal: bool) -> tuple[Visit, ...]:
    """Return a tuple with a `Visit` for the keys and values of each other rank, in order of arrival at ``rank``.

    ``token_ranges``: token ranges of each rank in a sample.
    """
    ranks, visited = len(token_ranges), []
    for step in range(1, ranks):
        source = (rank - step) % ranks
        keys, from_row = token_ranges[source], 0
        if causal and source < rank:
            keys = keys[:1]
        elif causal:
            from_row = token_ranges[rank][0][1]
            keys = keys if tokens(token_ranges[rank]) > from_row else ()
        visited.append(Visit(source, from_row, keys))
    return tuple(visited)


@lru_cache(maxsize=256)
def paths(token_ranges: tuple[Pieces, ...], window: int = 0) -> tuple[tuple[int, ...], ...]:
    """Return a tuple. Item r is a tuple of the ranks that use the keys and values of rank r, in ring order from r.

    ``token_ranges``: token ranges of each rank. ``window``: sliding-window size in tokens, or 0.
    """
    ranks = len(token_ranges)
    numbers = [(rank, 2 * ranks - 1 - rank) for rank in range(ranks)]  # piece numbers
    reach = _reach(token_ranges, window) if window else 2 * ranks

    def sees(rank: int, source: int) -> bool:
        return any(0 <= number - other <= reach for number in numbers[rank] for other in numbers[source])

    others = [[(source + step) % ranks for step in range(1, ranks)] for source in range(ranks)]
    return tuple((source, *(rank for rank in row if sees(rank, source))) for source, row in enumerate(others))


def _reach(placed: tuple[Pieces, ...], window: int) -> int:
    every = [rank_pieces[0] for rank_pieces in placed] + [rank_pieces[-1] for rank_pieces in reversed(placed)]
    starts = [first for start, end, first in every if end > start]
    return max(number - bisect_right(starts, max(0, first - window + 1)) + 1 for number, first in enumerate(starts))


def pairs(token_ranges: tuple[Pieces, ...], rank: int, *, causal: bool, window: int = 0) -> int:
    """Return the number of visible (query, key) pairs in one sample, counting only queries on ``rank``.

    ``token_ranges``: token ranges of each rank.
    """
    if not causal:
        return tokens(token_ranges[rank]) * sum(map(tokens, token_ranges))
    # For each piece: the pairs of the sequence up to its end minus the pairs of the sequence up to its start.
    return sum(
        attention_pairs(position + end - start, causal=True, window=window)
        - attention_pairs(position, causal=True, window=window)
        for start, end, position in token_ranges[rank]
    )


KEYS, GRADIENTS = range(2)  # tags
# Memory of blocks -> message tag. One keys block is used while the next arrives. One gradients block is computed, one
# sent and one received: with one block less, tiles would wait for the previous send.
MEMORY: Final = {"keys0": KEYS, "keys1": KEYS, **dict.fromkeys(("gradients0", "gradients1", "gradients2"), GRADIENTS)}
HOME: Final = "gradients2"  # memory of received gradients, in the end the gradients of the local block


class Action(Enum):
    """Type of a ring operation. A SEND or RECEIVE is in flight until the next WAIT for the same buffer."""

    RECEIVE = "receive"  # from the peer
    SEND = "send"  # to the peer
    WAIT = "wait"  # for the message that uses the memory
    TILES = "tiles"  # attention of the local queries over the keys in the memory; key gradients overwrite ``into``
    ADD = "add"  # add received gradients to the gradients in ``into``


@dataclass(frozen=True, slots=True)
class RingOperation:
    """Operation of one rank in ring attention: an ``action``, such as a send, on the buffer ``memory``."""

    # The buffer has the keys of rank ``source``, or gradients of these keys. Ranks are ranks of the context axis.
    # Before the first operation, the local keys are in buffer "keys0".

    action: Action
    memory: str
    source: int
    peer: int = -1
    into: str = ""

    def __str__(self) -> str:
        ends = {Action.SEND: f" to {self.peer}", Action.RECEIVE: f" from {self.peer}"}.get(self.action, "")
        return f"{self.action.name}({self.memory} of {self.source}{ends})"


@dataclass(frozen=True, slots=True)
class HeadExchange:
    """Numbers of tokens per sample that this rank sends to each rank, and receives from each rank, in an all-to-all."""

    sends: tuple[int, ...]
    receives: tuple[int, ...]


def ring_operations(visited: Sequence[Sequence[int]], rank: int, *, back: bool) -> tuple[RingOperation, ...]:
    """Return a tuple of the sends, receives and computations of ``rank`` in one ring attention, in order of execution.

    ``visited``: for each rank r, the ranks that use the keys of r.
    """
    # A rank sends keys to the next rank while it computes with them. In a backward pass, gradients follow the keys from
    # rank to rank, and return to the owner of the keys.
    steps: list[RingOperation] = []
    count = len(visited)
    sources = [source for turn in range(count) if rank in visited[source := (rank - turn) % count]]
    # This rank receives gradients of blocks that other ranks saw before it, and in the end of its own block.
    awaited = [
        (source, visited[source][position - 1]) for source in sources if (position := visited[source].index(rank)) > 1
    ]
    awaited += [(rank, visited[rank][-1])] if len(visited[rank]) > 1 else []
    for turn, source in enumerate(sources):
        path, position, last = visited[source], visited[source].index(rank), turn + 1 == len(sources)
        held, coming, part = f"keys{turn % 2}", f"keys{(turn + 1) % 2}", f"gradients{(turn + 1) % 2}"
        goes_on, contributes = position + 1 < len(path), back and turn > 0  # contributes to another rank's gradients
        if not last:
            after = sources[turn + 1]
            steps.append(RingOperation(Action.RECEIVE, coming, after, visited[after][visited[after].index(rank) - 1]))
        if goes_on:
            steps.append(RingOperation(Action.SEND, held, source, path[position + 1]))
        if back and awaited and turn == 0:
            steps.append(RingOperation(Action.RECEIVE, HOME, *awaited.pop(0)))
        if contributes and turn > 2:
            steps.append(RingOperation(Action.WAIT, part, sources[turn - 2]))  # its earlier send
        steps.append(RingOperation(Action.TILES, held, source, into=part if contributes else ""))
        if contributes:
            if position > 1:
                steps.append(RingOperation(Action.WAIT, HOME, source))
                steps.append(RingOperation(Action.ADD, HOME, source, into=part))
                steps += [RingOperation(Action.RECEIVE, HOME, *awaited.pop(0))] if awaited else []
            steps.append(RingOperation(Action.SEND, part, source, path[(position + 1) % len(path)]))
        if not last:
            steps.append(RingOperation(Action.WAIT, coming, sources[turn + 1]))
        if goes_on:
            steps.append(RingOperation(Action.WAIT, held, source))
    if back:
        steps += [RingOperation(Action.WAIT, HOME, rank)] if len(visited[rank]) > 1 else []
        last_parts = range(max(1, len(sources) - 2), len(sources))
        steps += [RingOperation(Action.WAIT, f"gradients{(turn + 1) % 2}", sources[turn]) for turn in last_parts]
    return tuple(steps)


def head_exchanges(token_ranges: tuple[Pieces, ...], rank: int, *, back: bool) -> tuple[HeadExchange, ...]:
    """Return a tuple with a `HeadExchange` for each all-to-all of ``rank`` in one attention pass, in execution order.

    ``token_ranges``: token ranges of each rank in each sample.
    """
    local_counts, rank_counts = (tokens(token_ranges[rank]),) * len(token_ranges), tuple(map(tokens, token_ranges))
    # First each rank receives all tokens of some heads. The last all-to-all returns the results.
    to_heads, to_tokens = HeadExchange(local_counts, rank_counts), HeadExchange(rank_counts, local_counts)
    return (to_heads, to_heads, to_tokens) if back else (to_heads, to_tokens)


Messages: TypeAlias = tuple[RingOperation, ...] | tuple[HeadExchange, ...]
# Method -> function (pieces, window or 0, rank, back) -> messages of one attention.
MESSAGES: Final[dict[str, Callable[[tuple[Pieces, ...], int, int, bool], Messages]]] = {
    "ring": lambda placed, window, rank, back: ring_operations(paths(placed, window), rank, back=back),
    "all_to_all": lambda placed, window, rank, back: head_exchanges(placed, rank, back=back),
}
