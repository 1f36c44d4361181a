"""Logical shards of a step: the same bits of all sums on any number of ranks.

A step is cut into L logical shards of equal size, whatever the number of ranks; each is a micro-batch of its own, so
that every matrix product has the same shape everywhere. What is summed over them, or over parts of the model, is

    gradients   in the order of the tree of `hpcdist.collectives.algorithms.fixed_tree`
    losses      in the same order
    squares     exactly, see `hpcdist.optim.update.exact`: the norm that clips, and those of layer-wise rates

All else in a step is elementwise. So exchanges that cut a model differently have the same bits as well.

Every rank has as many micro-batches as the one with the most shards; where it has a shard less, the last is empty.
The price is that of gradient accumulation: smaller matrix products, and one more pass over the gradients of each
shard; and exact squares, which take 3 times as long as rounded ones in float32 (0.8 ns an element), 12 times in
float64.

The same program gives other bits with another BLAS, with another number of BLAS threads, or on a processor for which
libraries and compilers choose other instructions. `fp_fingerprint` names the bits that a processor and its libraries
compute, so that ranks and checkpoints can check that they agree: equal names have multiplied, summed and
exponentiated the same numbers to the same bits.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, Final

import numpy as np

from hpcdist.arrays.backend import Array
from hpcdist.arrays.ranges import Range
from hpcdist.collectives.algorithms.fixed_tree import FixedTree, shards_of, tree_sum
from hpcdist.errors import ConfigurationError
from hpcdist.optim.update import kernels
from hpcdist.strategies.core.rank_context import RankContext

# (rows, inner, columns): large enough for threads, and one with a ragged edge in every dim
FINGERPRINT_SHAPES: Final = ((512, 128, 384), (512, 512, 128), (67, 1001, 259))
FINGERPRINT_BYTES: Final = 4


@cache
def fp_fingerprint(dtype: "np.dtype[Any]") -> str:
    """Return eight hexadecimal digits, equal where ``dtype`` is computed to equal bits (local; tens of ms, once)."""
    digest = hashlib.blake2b(digest_size=FINGERPRINT_BYTES)
    for rows, inner, columns in FINGERPRINT_SHAPES:
        a, b = _numbers(rows, inner, dtype), _numbers(columns, inner, dtype)
        product = a @ b.T  # a linear layer forward, then its two gradients and that of its bias
        for values in (product, product @ b, product.T @ a, np.ones((1, rows), dtype) @ product):
            digest.update(values.tobytes())
    values = _numbers(1, 10_007, dtype).reshape(-1)
    for result in (np.exp(values), np.tanh(values), np.log(np.exp(values)), values.sum()):
        digest.update(np.asarray(result).tobytes())
    digest.update(np.float64(kernels.sum_of_squares(values)).tobytes())
    return digest.hexdigest()


def _numbers(rows: int, columns: int, dtype: "np.dtype[Any]") -> np.ndarray:  # (rows, columns)
    """Return numbers between -1 and 1 without a pattern, made of integers: no random generator changes them."""
    mixed = np.arange(rows * columns, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) >> np.uint64(40)
    return ((mixed.astype(np.float64) / (1 << 23)) - 1.0).astype(dtype).reshape(rows, columns)


ALGORITHM: Final = "fixed_tree"  # the name of these sums where others name an algorithm
CURE: Final = "Give every rank the same OMP_NUM_THREADS, the same kind of processor and the same numpy"


class LogicalShards:
    """The ``count`` logical shards of each step; ``own`` are those of this rank, none where it only serves.

    Construction is collective over the world. ``arithmetic`` names the bits that the ranks compute; construction and
    `check` raise ConfigurationError, on all of them, where it is not the same on all ranks or not that of the run so
    far.
    """

    def __init__(self, context: RankContext, count: int) -> None:
        self.count = count
        self.arithmetic = _common(context)
        self.own = shards_of(count, context.data.size)[context.data.rank] if context.computes else Range(0, 0)
        self._data = context.data

    def tree(self) -> FixedTree:
        """Return a tree for buffers of one size, each of which `add` gives to it (local)."""
        return FixedTree(self._data, self.count)

    def add(self, tree: FixedTree, microbatch: int, gradients: Array, *, copy: bool) -> None:
        """Give ``gradients`` of a micro-batch to ``tree``, unless it is empty here (local). See `FixedTree.add`."""
        if microbatch < self.own.size:
            tree.add(self.own.start + microbatch, gradients, copy=copy)

    def agree_losses(
        self, losses: Sequence[float], values: np.ndarray, agree: Callable[[np.ndarray], np.ndarray]
    ) -> tuple[float, np.ndarray]:
        """Sum ``losses``, one of each own shard, in the order of the tree, and ``values`` by ``agree``.

        Collective, as ``agree`` is.
        """
        of_shards = np.zeros(self.count)
        # Other ranks add zeros, which is exact in any order. An evaluation may have fewer losses than own shards.
        of_shards[self.own.start : self.own.start + len(losses)] = losses
        sums = agree(np.concatenate([of_shards, values]))
        return tree_sum(sums[: self.count].tolist()), sums[self.count :]

    def state(self) -> dict[str, Any]:
        """Return the name of the arithmetic, for a checkpoint (local)."""
        return {"arithmetic": self.arithmetic}

    def check(self, state: Mapping[str, Any]) -> None:
        """Raise ConfigurationError unless the run that left ``state`` can go on with the same bits (local)."""
        before = state.get("arithmetic", self.arithmetic)
        if before != self.arithmetic:
            raise ConfigurationError(
                f"run.logical_shards = {self.count}: this run was computed with the arithmetic {before}, and here it "
                f"is {self.arithmetic}, so it cannot go on with the same bits. {CURE}; or set run.logical_shards = 0 "
                "to go on without that promise"
            )


def _common(context: RankContext) -> str:
    """Return the arithmetic of all ranks. Collective over the world."""
    names = context.world.allgather_object(fp_fingerprint(np.dtype(context.dtype)))
    other = [rank for rank, name in enumerate(names) if name != names[0]]
    if other:
        raise ConfigurationError(
            f"run.logical_shards: rank {other[0]} and {len(other) - 1} others compute other bits than rank 0 "
            f"(arithmetic {names[other[0]]}, not {names[0]}). {CURE}"
        )
    return str(names[0])
