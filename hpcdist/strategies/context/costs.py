"""Costs of attention and of routers over a context axis: what a layer sends, keeps, and has in scratch. Pure integers.

One place for the planner and for the tests that hold real runs against it. Bytes and elements are those of one rank,
for a micro-batch of ``samples``.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

PART_BYTES: Final = 1 << 20  # larger blocks travel in parts of their heads: less memory for what is on its way


@dataclass(frozen=True, kw_only=True)
class AttentionShare:
    """Attention of ``samples`` of ``tokens`` over ``ranks``: query heads and ``shared`` ones of keys, of ``size``."""

    ranks: int
    samples: int
    tokens: int
    heads: int
    shared: int
    size: int
    itemsize: int

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
    token = share.samples * share.size * share.itemsize * share.tokens * (share.ranks - 1) / share.ranks
    if method == "ring":
        return 2 * share.shared * token, 4 * share.shared * token
    each = 2 * (share.heads + max(share.shared, share.ranks)) / share.ranks * token
    return each, each


def counts_bytes(ranks: int, samples: int, experts: int) -> int:
    """Return the bytes of the choices of each expert in all pieces of ``samples``, int32, which a router gathers."""
    return 4 * 2 * ranks * samples * experts


def kept_elements(share: AttentionShare, method: str) -> int:
    """Return the elements that a layer keeps for its backward beyond those of local attention on as many tokens."""
    if method == "ring":
        return 0
    own = share.samples * share.most_tokens
    again = 2 * share.samples * share.tokens * share.size if share.shared < share.ranks else 0  # keys of others
    return own * share.heads * share.size + again  # the output, once by heads and once by tokens


def scratch_elements(share: AttentionShare, method: str) -> Mapping[str, int]:
    """Return the elements of scratch by name, beyond those of local attention on as many tokens."""
    own = share.samples * share.most_tokens
    if method == "ring":
        block = own * 2 * -(-share.shared // head_parts(share)) * share.size
        return {f"context.{name}": block for name in ("keys0", "keys1", "gradients0", "gradients1")}
    moved = own * share.ranks * share.exchanged_columns
    columns = (share.heads + 2 * share.shared) * share.size
    return {
        "context.send": moved,
        "context.receive": moved,
        "context.dy": own * share.heads * share.size,
        "context.dqkv": own * columns,
    }
