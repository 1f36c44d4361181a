"""Costs of attention and of routers over a context axis, per rank and micro-batch, for the planner and tests."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from hpcdist.strategies.config import PIECE_TOKENS
from hpcdist.strategies.context.operations import MEMORY, paths, pieces, tokens

SUM_BYTES: Final = 4  # bytes of a sum of 16-bit floats
PART_BYTES: Final = 1 << 20  # larger blocks travel in parts of their heads, to use less memory in flight


@dataclass(frozen=True, kw_only=True)
class AttentionShare:
    """Sizes of one attention layer, which ``ranks`` context ranks compute together."""

    ranks: int
    samples: int
    tokens: int
    heads: int  # query heads
    shared: int  # key heads
    size: int  # elements per head and token
    itemsize: int  # bytes per element
    window: int = 0  # sliding window in tokens, or 0

    @property
    def most_tokens(self) -> int:
        """Maximum number of tokens of one sample on a rank."""
        return -(-self.tokens // self.ranks)

    @property
    def exchanged_columns(self) -> int:
        """Number of query, key and value elements per token on a rank after the all-to-all."""
        return (self.heads // self.ranks + 2 * max(1, self.shared // self.ranks)) * self.size


def head_parts(share: AttentionShare) -> int:
    """Return the number of messages into which ring attention on CPUs splits the key heads of a rank.

    ``share``: sizes of the attention layer.
    """
    nbytes = share.samples * share.most_tokens * 2 * share.shared * share.size * share.itemsize
    return min(share.shared, -(-nbytes // PART_BYTES))


def sent_bytes(share: AttentionShare, method: str) -> tuple[float, float]:
    """Return a pair (forward, backward): the mean number of bytes that a rank sends in one attention layer.

    ``share``: sizes of the layer. ``method``: "ring" or "all_to_all".
    """
    if method == "all_to_all":
        forward, back = exchanged_bytes(share)
        return sum(forward), sum(back)
    token_bytes = share.samples * share.size * share.itemsize / share.ranks
    sent = token_bytes * share.tokens * (share.ranks - 1)
    if share.window:
        placed = pieces(share.tokens, share.ranks)
        passed = zip(placed, paths(placed, share.window), strict=True)
        sent = token_bytes * sum(tokens(rank_pieces) * (len(path) - 1) for rank_pieces, path in passed)
    return 2 * share.shared * sent, 4 * share.shared * sent


def exchanged_bytes(share: AttentionShare) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return (forward, backward): tuples of the mean number of bytes that a rank sends in each all-to-all of the pass.

    ``share``: sizes of the attention layer.
    """
    token = share.samples * share.tokens * (share.ranks - 1) / share.ranks**2  # numbers, at one number per token
    number = token * share.size * share.itemsize
    output = share.heads * number
    inputs = output + 2 * max(share.shared, share.ranks) * number
    dots = token * share.heads * max(share.itemsize, SUM_BYTES)
    # Backward first sends one number per token and head (dots), then the gradients of output and inputs.
    return (inputs, output), (dots, output, inputs)


def ring_passes(share: AttentionShare) -> int:
    """Return the maximum number of key blocks that one rank receives in the ring attention layer ``share``."""
    if not share.window:
        return share.ranks - 1
    visited = paths(pieces(share.tokens, share.ranks), share.window)
    return max(sum(rank in path for path in visited) for rank in range(share.ranks)) - 1


def ring_exposed_s(ranks: int, tile_s: float, pass_s: float, *, back: bool) -> float:
    """Return the seconds of communication that computation does not hide in one pass of ring attention.

    ``tile_s``: seconds to compute attention over one rank's keys. ``pass_s``: seconds to send one rank's keys.
    """
    if ranks == 1:
        return 0.0
    exposed_s, both_exposed_s = max(0.0, pass_s - tile_s), max(0.0, 2 * pass_s - tile_s)
    # A backward pass also sends the keys' gradients.
    if not back:
        return (ranks - 1) * exposed_s
    if ranks == 2:
        return exposed_s + pass_s
    return 3 * exposed_s + (ranks - 3) * both_exposed_s + pass_s


def counts_bytes(ranks: int, samples: int, experts: int) -> int:
    """Return the bytes of the int32 token counts that a mixture-of-experts router gathers from ``ranks`` context ranks.

    ``samples``: samples per micro-batch. ``experts``: number of experts.
    """
    # A rank has two token ranges of each sample, and one count for each range and expert.
    return 4 * 2 * ranks * samples * experts


def kept_elements(share: AttentionShare, method: str) -> int:
    """Return the number of elements of other ranks' keys and values that a rank keeps for the backward pass.

    ``share``: sizes of the attention layer. ``method``: "ring" or "all_to_all".
    """
    # Keys of other ranks, if several ranks get the same key heads.
    takes_keys = method == "all_to_all" and share.shared < share.ranks
    return 2 * share.samples * share.tokens * share.size if takes_keys else 0


def scratch_elements(share: AttentionShare, method: str) -> Mapping[str, int]:
    """Return a dict {buffer name: number of elements} of a rank's scratch buffers for context parallelism.

    ``share``: sizes of the attention layer. ``method``: "ring" or "all_to_all".
    """
    local_tokens = share.samples * share.most_tokens
    if method == "ring":
        block = local_tokens * 2 * -(-share.shared // head_parts(share)) * share.size
        return {f"context.{name}": block for name in MEMORY if name != "gradients1" or share.ranks > 2}
    moved = local_tokens * share.ranks * share.exchanged_columns
    # Received arrays use the memory of sent ones if query, key and value are one array and pieces are even.
    even = share.tokens % (2 * share.ranks * PIECE_TOKENS) == 0
    return {"context.moved": moved if even and share.heads == share.shared else 2 * moved}
