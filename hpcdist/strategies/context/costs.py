"""Costs of attention and of routers over a context axis: what a layer sends, waits for, keeps, and has in scratch.

One place for the planner and for the tests that hold real runs against it. Bytes and elements are those of one rank,
for a micro-batch of ``samples``.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from hpcdist.strategies.config import PIECE_TOKENS
from hpcdist.strategies.context.operations import MEMORY
from hpcdist.strategies.context.passes import paths, pieces, tokens

SUM_BYTES: Final = 4  # of a sum of 16-bit floats
PART_BYTES: Final = 1 << 20  # larger blocks travel in parts of their heads: less memory for what is on its way


@dataclass(frozen=True, kw_only=True)
class AttentionShare:
    """Attention of ``samples`` of ``tokens`` over ``ranks``: query heads and ``shared`` ones of keys, of ``size``.

    With a ``window``, 0 for none, blocks travel round a ring no further than they are seen.
    """

    ranks: int
    samples: int
    tokens: int
    heads: int
    shared: int
    size: int
    itemsize: int
    window: int = 0

    @property
    def most_tokens(self) -> int:
        """The tokens of a sample on a rank, rounded up."""
        return -(-self.tokens // self.ranks)

    @property
    def exchanged_columns(self) -> int:
        """The columns of queries, keys and values that one rank gets in an exchange of heads."""
        return (self.heads // self.ranks + 2 * max(1, self.shared // self.ranks)) * self.size


def head_parts(share: AttentionShare) -> int:
    """Return in how many parts the shared heads travel round the ring, one after the other, on CPUs."""
    nbytes = share.samples * share.most_tokens * 2 * share.shared * share.size * share.itemsize
    return min(share.shared, -(-nbytes // PART_BYTES))


def sent_bytes(share: AttentionShare, method: str) -> tuple[float, float]:
    """Return the bytes that a rank sends forward and backward, the mean over the ranks."""
    if method == "all_to_all":
        forward, back = exchanged_bytes(share)
        return sum(forward), sum(back)
    each_token = share.samples * share.size * share.itemsize / share.ranks
    token = each_token * share.tokens * (share.ranks - 1)
    if share.window:
        placed = pieces(share.tokens, share.ranks)
        passed = zip(placed, paths(placed, share.window), strict=True)
        token = each_token * sum(tokens(own) * (len(path) - 1) for own, path in passed)
    return 2 * share.shared * token, 4 * share.shared * token


def exchanged_bytes(share: AttentionShare) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return the bytes that a rank sends in each exchange of heads forward and backward, the mean over the ranks."""
    token = share.samples * share.tokens * (share.ranks - 1) / share.ranks**2  # numbers, of one a token
    number = token * share.size * share.itemsize
    output = share.heads * number
    inputs = output + 2 * max(share.shared, share.ranks) * number
    dots = token * share.heads * max(share.itemsize, SUM_BYTES)
    return (inputs, output), (dots, output, inputs)


def ring_passes(share: AttentionShare) -> int:
    """Return how many blocks of other ranks the rank that gets most of them sees."""
    if not share.window:
        return share.ranks - 1
    visited = paths(pieces(share.tokens, share.ranks), share.window)
    return max(sum(rank in path for path in visited) for rank in range(share.ranks)) - 1


def ring_exposed_s(ranks: int, tile_s: float, pass_s: float, *, back: bool) -> float:
    """Return what the passes of one attention take beyond its tiles: ``tile_s`` those over a block, of each rank.

    ``pass_s`` is a block on its way to the next rank, whose tiles go on meanwhile. Forward the passes of keys run
    beside all tiles but the last ones. Back gradients follow, from the third block on two blocks beside the tiles of
    one, and the last pass brings them home beside none.
    """
    if ranks == 1:
        return 0.0
    behind_s, both_behind_s = max(0.0, pass_s - tile_s), max(0.0, 2 * pass_s - tile_s)
    if not back:
        return (ranks - 1) * behind_s
    if ranks == 2:
        return behind_s + pass_s
    return 3 * behind_s + (ranks - 3) * both_behind_s + pass_s


def counts_bytes(ranks: int, samples: int, experts: int) -> int:
    """Return the bytes of the choices of each expert in all pieces of ``samples``, int32, which a router gathers."""
    return 4 * 2 * ranks * samples * experts


def kept_elements(share: AttentionShare, method: str) -> int:
    """Return the elements that a layer keeps for its backward beyond those of local attention on as many tokens."""
    # Keys of others, where several ranks get the same.
    takes_keys = method == "all_to_all" and share.shared < share.ranks
    return 2 * share.samples * share.tokens * share.size if takes_keys else 0


def scratch_elements(share: AttentionShare, method: str) -> Mapping[str, int]:
    """Return the elements of scratch by name, beyond those of local attention on as many tokens."""
    own = share.samples * share.most_tokens
    if method == "ring":
        block = own * 2 * -(-share.shared // head_parts(share)) * share.size
        return {f"context.{name}": block for name in MEMORY if name != "gradients1" or share.ranks > 2}
    moved = own * share.ranks * share.exchanged_columns
    # What comes takes the memory of what was sent before, where query, key and value are one array and pieces are even.
    even = share.tokens % (2 * share.ranks * PIECE_TOKENS) == 0
    return {"context.moved": moved if even and share.heads == share.shared else 2 * moved}
