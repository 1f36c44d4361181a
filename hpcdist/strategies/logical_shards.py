"""The logical shards of a step: how all that is summed gets the same bits on any number of ranks.

A step is cut into L logical shards of equal size, whatever the number of ranks; each is a micro-batch of its own, so
that every matrix product has the same shape everywhere. What is summed over them, or over parts of the model, is

    gradients   in the order of the tree of `hpcdist.collectives.fixed_tree`
    losses      in the same order
    squares     exactly, see `hpcdist.optim.exact`: the norm that clips, and those of layer-wise rates

All else in a step is elementwise. So exchanges that cut a model differently have the same bits as well.

Every rank has as many micro-batches as the one with the most shards; where it has a shard less, the last is empty. The
price is that of gradient accumulation: smaller matrix products, and one more pass over the gradients of each shard; and
exact squares, which take 3 times as long as rounded ones in float32 (0.8 ns an element), 12 times in float64.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np

from hpcdist.arrays.backend import Array
from hpcdist.arrays.ranges import Range
from hpcdist.collectives.fixed_tree import FixedTree, shards_of, tree_sum
from hpcdist.errors import ConfigurationError
from hpcdist.strategies.arithmetic import arithmetic
from hpcdist.strategies.seat import Seat

ALGORITHM: Final = "fixed_tree"  # the name of these sums where others name an algorithm
CURE: Final = "Give every rank the same OMP_NUM_THREADS, the same kind of processor and the same numpy"


class LogicalShards:
    """The ``count`` logical shards of each step; ``own`` are those that this rank computes, none where it only serves.

    Construction is collective over the world. ``arithmetic`` names the bits that the ranks compute; construction and
    `check` raise ConfigurationError, on all of them, where it is not the same on all ranks or not that of the run so
    far.
    """

    def __init__(self, seat: Seat, count: int) -> None:
        self.count = count
        self.arithmetic = _common(seat)
        self.own = shards_of(count, seat.data.size)[seat.data.rank] if seat.computes else Range(0, 0)
        self._data = seat.data

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
        """Sum ``losses``, one of each own shard, in the order of the tree, and ``values`` by ``agree``, as they come.

        Collective, as ``agree`` is.
        """
        of_shards = np.zeros(self.count)
        of_shards[self.own.slice] = losses  # all others add zeros to them, which is exact in any order
        sums = agree(np.concatenate([of_shards, values]))
        return tree_sum(sums[: self.count].tolist()), sums[self.count :]

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps: the name of the arithmetic (local)."""
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


def _common(seat: Seat) -> str:
    """Return the arithmetic of all ranks. Collective over the world."""
    names = seat.world.allgather_object(arithmetic(np.dtype(seat.dtype)))
    other = [rank for rank, name in enumerate(names) if name != names[0]]
    if other:
        raise ConfigurationError(
            f"run.logical_shards: rank {other[0]} and {len(other) - 1} others compute other bits than rank 0 "
            f"(arithmetic {names[other[0]]}, not {names[0]}). {CURE}"
        )
    return str(names[0])
