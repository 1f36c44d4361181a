"""The messages within one attention over a context axis, as data: what each rank sends, receives and waits for.

`ring_operations` are the passes of keys, values and gradients round the ring, between the tiles of attention;
`head_exchanges` those of heads for tokens. `axis.Ring` and `all_to_all.AllToAllAttention` carry these lists out, and
`proof.prove_messages` proves those of all ranks of the axis, before anything runs.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Final, TypeAlias

from hpcdist.models.attention.tiles import Pieces
from hpcdist.strategies.context.passes import tokens

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


def ring_operations(ranks: int, rank: int, *, back: bool) -> tuple[RingOperation, ...]:
    """Return the passes of one attention on ``rank``, forward or ``back``: they end with nothing under way.

    Every block is on its way to the next rank during the tiles over it. Gradients of a block, of all ranks that it has
    visited, follow it during the tiles over the next one, and come home with the last pass.
    """
    after, before, steps = (rank + 1) % ranks, (rank - 1) % ranks, []
    for turn in range(ranks):
        source = (rank - turn) % ranks
        held, coming, last = f"keys{turn % 2}", f"keys{(turn + 1) % 2}", turn + 1 == ranks
        contributes = back and turn > 0  # to the gradients of another rank's block
        part = f"gradients{(turn + 1) % 2}"
        if not last:
            steps.append(RingOperation(Action.RECEIVE, coming, (source - 1) % ranks, before))
            steps.append(RingOperation(Action.SEND, held, source, after))
        if contributes and turn > 2:
            steps.append(RingOperation(Action.WAIT, part, (source + 2) % ranks))  # it was sent, and is free again
        steps.append(RingOperation(Action.TILES, held, source, into=part if contributes else ""))
        if contributes:
            if turn > 1:
                steps.append(RingOperation(Action.WAIT, HOME, source))
                steps.append(RingOperation(Action.ADD, HOME, source, into=part))
            steps.append(RingOperation(Action.RECEIVE, HOME, (source - 1) % ranks, before))
            steps.append(RingOperation(Action.SEND, part, source, after))
        if not last:
            steps.append(RingOperation(Action.WAIT, coming, (source - 1) % ranks))
            steps.append(RingOperation(Action.WAIT, held, source))
    if back and ranks > 1:
        steps.append(RingOperation(Action.WAIT, HOME, rank))
        last_parts = range(max(1, ranks - 2), ranks)  # turns
        steps += [
            RingOperation(Action.WAIT, f"gradients{(turn + 1) % 2}", (rank - turn) % ranks) for turn in last_parts
        ]
    return tuple(steps)


def head_exchanges(placed: tuple[Pieces, ...], rank: int) -> tuple[HeadExchange, ...]:
    """Return the exchanges of one attention, forward or back: own tokens for heads of all, and the way back."""
    own, of_ranks = (tokens(placed[rank]),) * len(placed), tuple(map(tokens, placed))
    return HeadExchange(own, of_ranks), HeadExchange(of_ranks, own)


Messages: TypeAlias = tuple[RingOperation, ...] | tuple[HeadExchange, ...]
# By method: of one attention on a rank, forward or back.
MESSAGES: Final[dict[str, Callable[[tuple[Pieces, ...], int, bool], Messages]]] = {
    "ring": lambda placed, rank, back: ring_operations(len(placed), rank, back=back),
    "all_to_all": lambda placed, rank, back: head_exchanges(placed, rank),
}
