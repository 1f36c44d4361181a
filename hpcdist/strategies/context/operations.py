"""The messages within one attention over a context axis, as data: what each rank sends, receives and waits for.

`ring_operations` are the passes of keys, values and gradients round the ring, between the tiles of attention;
`head_exchanges` those of heads for tokens. `axis.Ring` and `all_to_all.AllToAllAttention` carry these lists out, and
`proof.prove_messages` proves those of all ranks of the axis, before anything runs.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final, TypeAlias

from hpcdist.models.attention.tiles import Pieces
from hpcdist.strategies.context.passes import paths, tokens

KEYS, GRADIENTS = range(2)  # tags
# Memory of blocks, whatever the number of ranks -> tag of its messages. Of keys one is used and one comes; of gradients
# one is made, one goes, and one comes: with a block less, the tiles would wait until the gradients before have gone.
MEMORY: Final = {"keys0": KEYS, "keys1": KEYS, **dict.fromkeys(("gradients0", "gradients1", "gradients2"), GRADIENTS)}
HOME: Final = "gradients2"  # where gradients come, in the end those of the own block


class Action(Enum):
    """Kind of an entry of a ring's list; SEND and RECEIVE go on beside what follows, until WAIT."""

    RECEIVE = "receive"  # from the peer
    SEND = "send"  # to the peer
    WAIT = "wait"  # for the message that the memory takes part in
    TILES = "tiles"  # own queries over the keys in the memory; gradients of these overwrite ``into``
    ADD = "add"  # gradients that came to those in ``into``


@dataclass(frozen=True, slots=True)
class RingOperation:
    """Entry of a ring's list: what is done with the block of rank ``source``, in which memory.

    Ranks are those of the context axis. The own keys begin in "keys0".
    """

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
    """One exchange with all ranks of the axis: tokens of a sample that go to, and come from, each of them."""

    sends: tuple[int, ...]
    receives: tuple[int, ...]


def ring_operations(visited: Sequence[Sequence[int]], rank: int, *, back: bool) -> tuple[RingOperation, ...]:
    """Return the passes of one attention on ``rank``, forward or ``back``: they end with nothing under way.

    ``visited`` are the `passes.paths` of all blocks. Every block is on its way to the next rank of its path during the
    tiles over it. Its gradients, of all ranks that it has visited, follow it during the tiles over the next one, and
    come home with the last pass.
    """
    steps: list[RingOperation] = []
    count = len(visited)
    sources = [source for turn in range(count) if rank in visited[source := (rank - turn) % count]]
    # Gradients come to this rank of the blocks that others have seen before it, and in the end of its own.
    awaited = [(source, visited[source][place - 1]) for source in sources if (place := visited[source].index(rank)) > 1]
    awaited += [(rank, visited[rank][-1])] if len(visited[rank]) > 1 else []
    for turn, source in enumerate(sources):
        path, place, last = visited[source], visited[source].index(rank), turn + 1 == len(sources)
        held, coming, part = f"keys{turn % 2}", f"keys{(turn + 1) % 2}", f"gradients{(turn + 1) % 2}"
        goes_on, contributes = place + 1 < len(path), back and turn > 0  # to the gradients of another rank's block
        if not last:
            after = sources[turn + 1]
            steps.append(RingOperation(Action.RECEIVE, coming, after, visited[after][visited[after].index(rank) - 1]))
        if goes_on:
            steps.append(RingOperation(Action.SEND, held, source, path[place + 1]))
        if back and awaited and turn == 0:
            steps.append(RingOperation(Action.RECEIVE, HOME, *awaited.pop(0)))
        if contributes and turn > 2:
            steps.append(RingOperation(Action.WAIT, part, sources[turn - 2]))  # it was sent, and is free again
        steps.append(RingOperation(Action.TILES, held, source, into=part if contributes else ""))
        if contributes:
            if place > 1:
                steps.append(RingOperation(Action.WAIT, HOME, source))
                steps.append(RingOperation(Action.ADD, HOME, source, into=part))
                steps += [RingOperation(Action.RECEIVE, HOME, *awaited.pop(0))] if awaited else []
            steps.append(RingOperation(Action.SEND, part, source, path[(place + 1) % len(path)]))
        if not last:
            steps.append(RingOperation(Action.WAIT, coming, sources[turn + 1]))
        if goes_on:
            steps.append(RingOperation(Action.WAIT, held, source))
    if back:
        steps += [RingOperation(Action.WAIT, HOME, rank)] if len(visited[rank]) > 1 else []
        last_parts = range(max(1, len(sources) - 2), len(sources))  # turns
        steps += [RingOperation(Action.WAIT, f"gradients{(turn + 1) % 2}", sources[turn]) for turn in last_parts]
    return tuple(steps)


def head_exchanges(placed: tuple[Pieces, ...], rank: int, *, back: bool) -> tuple[HeadExchange, ...]:
    """Return the exchanges of one attention, forward or ``back``: own tokens for heads of all, and the way back.

    Back, products of rows of the output and its gradient come before the gradient.
    """
    own, of_ranks = (tokens(placed[rank]),) * len(placed), tuple(map(tokens, placed))
    to_heads, to_tokens = HeadExchange(own, of_ranks), HeadExchange(of_ranks, own)
    return (to_heads, to_heads, to_tokens) if back else (to_heads, to_tokens)


Messages: TypeAlias = tuple[RingOperation, ...] | tuple[HeadExchange, ...]
# By method: of one attention with a window (0: without) on a rank, forward or back.
MESSAGES: Final[dict[str, Callable[[tuple[Pieces, ...], int, int, bool], Messages]]] = {
    "ring": lambda placed, window, rank, back: ring_operations(paths(placed, window), rank, back=back),
    "all_to_all": lambda placed, window, rank, back: head_exchanges(placed, rank, back=back),
}
