"""Logical shards of a step: every sum has the same bits on any number of ranks.

Each shard is one micro-batch of equal size. Gradients and losses are summed in the order of
`hpcdist.collectives.algorithms.fixed_tree`. Other BLAS libraries, thread counts or processors give other bits.

The cost: smaller matrix products, one more pass over the gradients per shard, and exact squares for norms. These take 3
times as long as rounded squares in float32, 12 times in float64.
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
from hpcdist.optim import kernels
from hpcdist.strategies.core.rank_context import RankContext

# (rows, inner, columns): large enough for threads, and one with a ragged edge in every dim
FINGERPRINT_SHAPES: Final = ((512, 128, 384), (512, 512, 128), (67, 1001, 259))
FINGERPRINT_BYTES: Final = 4


@cache
def fp_fingerprint(dtype: "np.dtype[Any]") -> str:
    """Return a hash of test computations in ``dtype``. Ranks with different rounding get different hashes. Local."""
    # Ranks with equal hashes are expected to compute equal bits. The first call takes tens of milliseconds.
    digest = hashlib.blake2b(digest_size=FINGERPRINT_BYTES)
    for rows, inner, columns in FINGERPRINT_SHAPES:
        a, b = _numbers(rows, inner, dtype), _numbers(columns, inner, dtype)
        product = a @ b.T  # a linear layer forward, then its two gradients and its bias gradient
        for values in (product, product @ b, product.T @ a, np.ones((1, rows), dtype) @ product):
            digest.update(values.tobytes())
    values = _numbers(1, 10_007, dtype).reshape(-1)
    for result in (np.exp(values), np.tanh(values), np.log(np.exp(values)), values.sum()):
        digest.update(np.asarray(result).tobytes())
    digest.update(np.float64(kernels.sum_of_squares(values)).tobytes())
    return digest.hexdigest()


def _numbers(rows: int, columns: int, dtype: "np.dtype[Any]") -> np.ndarray:  # (rows, columns)
    mixed = np.arange(rows * columns, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) >> np.uint64(40)
    return ((mixed.astype(np.float64) / (1 << 23)) - 1.0).astype(dtype).reshape(rows, columns)


ALGORITHM: Final = "fixed_tree"  # name of these sums among the reduction algorithms
CURE: Final = "Give every rank the same OMP_NUM_THREADS, the same kind of processor and the same numpy"


class LogicalShards:
    """Fixed division of the global batch into ``count`` shards, for equal bits on any number of ranks."""

    def __init__(self, context: RankContext, count: int) -> None:
        self.count = count
        self.arithmetic = _common(context)
        # Indices of the parts that this rank computes; empty on a server.
        self.own = shards_of(count, context.data.size)[context.data.rank] if context.computes else Range(0, 0)
        self._data = context.data

    def tree(self) -> FixedTree:
        """Return a new `FixedTree`, which sums the gradients of the shards in a fixed order. Local."""
        return FixedTree(self._data, self.count)

    def add(self, tree: FixedTree, microbatch: int, gradients: Array, *, copy: bool) -> None:
        """Add ``gradients``, of this rank's micro-batch number ``microbatch``, to the summation ``tree``. Local."""
        # Micro-batch i is logical shard i of this rank. Further micro-batches are ignored.
        if microbatch < self.own.size:
            tree.add(self.own.start + microbatch, gradients, copy=copy)

    def agree_losses(
        self, losses: Sequence[float], values: np.ndarray, agree: Callable[[np.ndarray], np.ndarray]
    ) -> tuple[float, np.ndarray]:
        """Return (sum of the losses of all ranks, array with the sum of ``values`` over all ranks). Collective.

        ``agree``: function that sums an array over all ranks.
        """
        shard_losses = np.zeros(self.count)
        # Other ranks add zeros, which is exact in any order. An evaluation may have fewer losses than local shards.
        shard_losses[self.own.start : self.own.start + len(losses)] = losses
        sums = agree(np.concatenate([shard_losses, values]))
        # The loss sum has the same bits on any number of ranks.
        return tree_sum(sums[: self.count].tolist()), sums[self.count :]

    def state(self) -> dict[str, Any]:
        """Return a dict of scalars to store in a checkpoint: a fingerprint of floating-point rounding. Local."""
        return {"arithmetic": self.arithmetic}

    def check(self, state: Mapping[str, Any]) -> None:
        """Raise ConfigurationError if floating-point rounding was different on the ranks that saved ``state``."""
        before = state.get("arithmetic", self.arithmetic)
        if before != self.arithmetic:
            raise ConfigurationError(
                f"run.logical_shards = {self.count}: the checkpoint has the floating-point fingerprint {before}, but "
                f"the ranks now have the fingerprint {self.arithmetic}, so the run cannot resume with the same bits. "
                f"{CURE}; or set run.logical_shards = 0 to resume with different rounding"
            )


def _common(context: RankContext) -> str:
    names = context.world.allgather_object(fp_fingerprint(np.dtype(context.dtype)))
    other = [rank for rank, name in enumerate(names) if name != names[0]]
    if other:
        raise ConfigurationError(
            f"run.logical_shards needs equal bits on all ranks, but rank {other[0]} and {len(other) - 1} other ranks "
            f"compute different bits than rank 0 (fingerprint {names[other[0]]}, not {names[0]}). {CURE}"
        )
    return str(names[0])
