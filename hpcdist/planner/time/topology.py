"""Link topology of a group: the levels of a cluster that an axis of a layout crosses, as tiers.

A group of an axis is ``size`` devices, ``stride`` apart (`hpcdist.strategies.core.grid`: tensor fastest, then
context, data, pipeline). Its *tiers* are the levels of links that it crosses: each box of a tier joins ``fan`` boxes
of the tier below, and the fans multiply to ``size``.

A level's ``bytes_per_s`` is that of a device while all of its box sends. A flat ring has one sender for each group in
a box, so it is slowed only by other groups (``single``); where all devices send at once it is ``crowded``. With
``channels``, as NCCL does, as many rings or trees as a box has members of the group leave it, each by another link:
one after the other they are a single ring with the links of all members.
"""

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, NamedTuple

from hpcdist.errors import UsageError
from hpcdist.planner.cluster.hardware import Cluster, LinkLevel
from hpcdist.planner.layout import ParallelLayout

AXES: Final = ("tensor", "context", "data", "replicas", "expert", "expert_replicas", "pipeline", "all")


class LinkTier(NamedTuple):
    """One level of links as a group uses it; ``crowded`` and ``single`` in seconds a byte, see above.

    ``lanes`` are the members of the group in a box below: so many of its devices have a link out of it. ``outer`` is
    the place of the level in its cluster, 0 for the fastest.
    """

    outer: int
    fan: int
    lanes: int
    latency_s: float
    crowded: float
    single: float


@dataclass(frozen=True, eq=False)
class GroupSpan:
    """A group of an axis: its tiers from the fastest outwards, none where the group is one device."""

    size: int
    stride: int
    tiers: tuple[LinkTier, ...]
    channels: bool = False
    flags: tuple[str, ...] = ()

    @property
    def slow(self) -> float:
        """The seconds a byte of the tier that a flat ring or tree waits for."""
        if self.channels:
            return max(tier.crowded / tier.lanes for tier in self.tiers)
        return max(tier.single for tier in self.tiers)

    @property
    def latency_s(self) -> float:
        """Seconds of the slowest message."""
        return max(tier.latency_s for tier in self.tiers)

    def tier_at(self, distance: int) -> LinkTier:
        """Return the tier between members whose numbers differ in the bit ``distance``."""
        for tier in self.tiers[:-1]:
            if tier.lanes * tier.fan % (2 * distance) == 0:
                return tier
        return self.tiers[-1]


def span(layout: ParallelLayout, axis: str, cluster: Cluster) -> GroupSpan:
    """Return the group of an ``axis`` of `AXES`.

    "all" are all that compute, "replicas" have the same parameters: the data and the context axis together; of these
    "expert_replicas" have the same experts, and are taken to be equally far apart.
    Raises UsageError for another name, and where no level of the cluster joins all devices.
    """
    inner = layout.tensor * layout.context
    total = inner * layout.data * layout.pipeline
    if axis == "tensor":
        size, stride = layout.tensor, 1
    elif axis == "context":
        size, stride = layout.context, layout.tensor
    elif axis == "data":
        size, stride = layout.data, inner
    elif axis == "replicas":
        size, stride = layout.data * layout.context, layout.tensor
    elif axis == "expert":
        size, stride = layout.expert, inner
    elif axis == "expert_replicas":
        size, stride = layout.data // layout.expert * layout.context, layout.tensor * layout.expert
    elif axis == "pipeline":
        size, stride = layout.pipeline, inner * layout.data
    elif axis == "all":
        size, stride = total, 1
    else:
        raise UsageError(f"axis {axis!r}; choose one of {', '.join(AXES)}")
    return group(size, stride, total, cluster.levels, layout.channels)


@lru_cache(maxsize=1 << 16)
def group(size: int, stride: int, total: int, levels: tuple[LinkLevel, ...], channels: bool = False) -> GroupSpan:
    """Return the span of ``size`` devices, ``stride`` apart, where all of ``total`` are grouped so, over ``levels``.

    Where boxes cut groups unevenly, each is taken to be cut into the equal parts that fit in all of them (flagged).
    Raises UsageError where no level joins them.
    """
    tiers: list[LinkTier] = []
    flags: list[str] = []
    below = box_below = 1
    for outer, level in enumerate(levels):
        box = level.devices or max(total, box_below)
        inside = size if total <= box else _inside(size, stride, box, below)
        if total > box > stride and (box % stride or inside < min(size, box // stride)):
            flags.append(f"groups of {size} devices, {stride} apart, do not fill boxes of {box} evenly")
        if inside > below:
            groups = min(stride, box_below, total)
            most = level.alone_bytes_per_s or level.bytes_per_s
            single = 1 / min(most, level.bytes_per_s * box_below / groups)
            tiers.append(LinkTier(outer, inside // below, below, level.latency_s, 1 / level.bytes_per_s, single))
            below = inside
        box_below = box
    if below < size:
        raise UsageError(
            f"{total} devices, but the levels of the cluster join only {levels[-1].devices if levels else 1} of them; "
            "give its outermost level devices = 0: all there are"
        )
    return _span(size, stride, tuple(tiers), channels, tuple(flags))


@lru_cache(maxsize=1 << 14)
def _span(size: int, stride: int, tiers: tuple[LinkTier, ...], channels: bool, flags: tuple[str, ...]) -> GroupSpan:
    """Return the one span of these links: what is known of it holds for all groups that lie so, of any total."""
    return GroupSpan(size, stride, tiers, channels, flags)


def _inside(size: int, stride: int, box: int, below: int) -> int:
    """Return how many neighbours of a group share a box of ``box`` devices, ``below`` of them the box below it."""
    room = max(1, box // stride)
    return below * math.gcd(size // below, max(1, room // below))
