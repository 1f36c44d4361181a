"""Which layouts of an order fit into memory, asking for as few of them as will do.

Two things are known of memory, whatever its formulas are. What a device needs never shrinks as micro-batches grow,
where there are several, alike and in groups of one size: what fits with a larger one fits with a smaller one, and
where the smallest one is too much, all are. And activations of a stage are the same under each strategy: where they
alone are too much, no strategy helps.
"""

from collections.abc import Sequence
from operator import attrgetter
from typing import Final

from hpcdist.planner.cluster import Cluster
from hpcdist.planner.description import Description
from hpcdist.planner.estimate import Memory
from hpcdist.planner.layout import Layout
from hpcdist.planner.memory import memory
from hpcdist.planner.search_space import Way, with_way

ALIKE: Final = ("activations", "reserved")  # terms that no strategy changes
_STEM: Final = attrgetter(
    "data",
    "pipeline",
    "tensor",
    "context",
    "expert",
    "recompute",
    "sequence_parallel",
    "schedule",
    "chunks",
)
_NEVER: Final = 1 << 62


class Room:
    """The memory of a device: ``limit_bytes`` of it, or all (0). ``leanest`` is what came nearest to fitting."""

    def __init__(self, description: Description, cluster: Cluster, global_batch: int, limit_bytes: float) -> None:
        self.leanest: tuple[float, Layout, Memory] | None = None
        self._description, self._cluster, self._global_batch = description, cluster, global_batch
        self._limit_bytes = limit_bytes
        self._fits: dict[object, int] = {}  # the largest micro-batch that is known to fit
        self._fails: dict[object, int] = {}  # the smallest that is known not to

    def fitting(self, order: Layout, ways: Sequence[Way], sizes: Sequence[int]) -> tuple[Way, ...]:
        """Return those of ``ways`` with which ``order`` fits (local).

        ``sizes`` of micro-batch are those that the order could have, the smallest first: the smallest that this one may
        be compared with is asked for where this one is too much.
        """
        stem: tuple[object, ...] = _STEM(order)
        if self._is_apart(order, order.microbatch):
            stem, least = (*stem, order.microbatch), order.microbatch
        else:
            least = next(size for size in sizes if not self._is_apart(order, size))
        found = []
        for way in ways:
            if order.microbatch >= self._fails.get(stem, _NEVER):
                return ()
            if self._has_room(order, stem, way, least):
                found.append(way)
        return tuple(found)

    def _is_apart(self, order: Layout, microbatch: int) -> bool:
        """Whether nothing follows from other sizes: nothing to add up, a smaller one at the end, or odd groups."""
        many = -(-self._global_batch // (order.data * microbatch))
        is_uneven = self._global_batch % (order.data * microbatch) != 0
        return many == 1 or is_uneven or (order.schedule == "interleaved" and many % order.pipeline != 0)

    def _has_room(self, order: Layout, stem: tuple[object, ...], way: Way, least: int) -> bool:
        key, size = (stem, way), order.microbatch
        if size <= self._fits.get(key, 0):
            return True
        if size >= self._fails.get(key, _NEVER):
            return False
        if size > least and least > self._fits.get(key, 0) and not self._ask(order, stem, way, least):
            return False
        return self._ask(order, stem, way, size)

    def _ask(self, order: Layout, stem: tuple[object, ...], way: Way, microbatch: int) -> bool:
        """Look at one layout, and remember what follows from it."""
        layout = with_way(order, way, microbatch)
        needed = memory(self._description, layout, self._cluster, self._global_batch)
        limit = min(needed.limit_bytes, self._limit_bytes or needed.limit_bytes)
        over = needed.bytes - limit
        key = (stem, way)
        if over <= 0:
            self._fits[key] = max(microbatch, self._fits.get(key, 0))
            return True
        self._fails[key] = min(microbatch, self._fails.get(key, _NEVER))
        if sum(needed.terms.get(name, 0.0) for name in ALIKE) > limit:
            self._fails[stem] = min(microbatch, self._fails.get(stem, _NEVER))
        if self.leanest is None or over < self.leanest[0]:
            self.leanest = over, layout, needed
        return False
