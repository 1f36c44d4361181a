"""Memory of layers that are whole for a moment: gathered to be used, or filled by a backward to be reduced."""

from collections import Counter
from collections.abc import Callable, Collection

import numpy as np

from hpcdist.arrays import backend
from hpcdist.arrays.backend import Array
from hpcdist.arrays.store import FlatStore
from hpcdist.comm.communicator import Communicator
from hpcdist.strategies.seat import Seat


class Transient:
    """Whole layers that come and go in memory taken once: at most as many at a time as were ever alive together.

    Layers that only their own stage uses share blocks as long as the longest of them. One that others are tied to lives
    long, may be far longer, and has a block of its own. ``units`` are those that ever come; ``over`` joins the ranks
    that sum or hand round what lies there, once ``drain`` has returned: then nothing else goes on there.
    """

    def __init__(
        self,
        seat: Seat,
        category: str,
        units: Collection[int],
        over: Communicator | None,
        drain: Callable[[], None] | None = None,
    ) -> None:
        self._seat, self._category, self._over, self._drain = seat, category, over, drain
        users = Counter(unit for used in seat.model.needs.values() for unit in used)
        sizes = {seat.model.stages[unit].layer: (seat.ranges[unit].size, users[unit]) for unit in units}
        longest = max((size for size, count in sizes.values() if count == 1), default=0)
        self._block_size = {layer: longest if count == 1 else size for layer, (size, count) in sizes.items()}
        self._free: dict[int, list[Array]] = {}  # by size
        self._blocks: dict[int, Array] = {}
        self._stores: dict[int, FlatStore] = {}

    def at(self, layer: int) -> FlatStore:
        """Return the store of ``layer``; its memory is uninitialised when it was not there (local)."""
        if layer not in self._stores:
            size = self._block_size[layer]
            free = self._free.setdefault(size, [])
            block = free.pop() if free else self._new(size)
            self._blocks[layer] = block
            whole = self._seat.layout.units[layer]
            self._stores[layer] = self._seat.store(self._category, whole, lambda count, dtype: block[:count])
        return self._stores[layer]

    def free(self, layer: int) -> None:
        """Give the memory of ``layer`` back (local)."""
        del self._stores[layer]
        self._free[self._block_size[layer]].append(self._blocks.pop(layer))

    def _new(self, size: int) -> Array:
        allocate = self._seat.for_replicas(self._category, self._over)
        if allocate is not None:  # all of ``over`` need a new block at the same place of their lists
            if self._drain is not None:
                self._drain()
            return allocate(size, np.dtype(self._seat.dtype))
        block = backend.zeros(size, np.dtype(self._seat.dtype), self._seat.on)
        return block if self._seat.ledger is None else self._seat.ledger.track(block, self._category)
