"""Cost of a collective or message on a cluster: from measured fits, or by formulas over the crossed links.

**Links.** A group crosses link levels, its *tiers* (`LinkTier`). With ``channels``, as in NCCL, as many rings or trees
leave a box as it has members.

**Measurements** (`hpcdist.planner.cluster.hardware.MeasuredFit`) have priority if algorithm, library, number of ranks
and link level match and the ranks are neighbours.

**Formulas.** p devices, n bytes of the whole buffer, alpha (latency) and beta (seconds per byte) of a tier, h = sum
over the tiers of ceil(log2 fan):

    ring            2 (p-1) alpha + 2 (p-1)/p n beta                   allreduce; half for reduce_scatter, all_gather
    tree            2 n beta + 4 h alpha + 2 sqrt(8 h alpha n beta)    allreduce, double binary; half for broadcast
    hierarchical    by tier 2 (fan-1) alpha + 2 (fan-1)/fan n' beta    n' = n / (fans of the tiers below)
    recursive_doubling    log2 p (alpha + n beta)                      allreduce
    rabenseifner    2 log2 p alpha + 2 (p-1)/p n beta                  allreduce
    circulant       2 ceil(log2 p) alpha + 2 (p-1)/p n beta            as the ring
    pairs           (p-1) alpha + (p-1)/p n beta                       all_to_all
    binomial        ceil(log2 p) (alpha + n beta)                      broadcast

Ring, doubling, Rabenseifner, binomial: R. Thakur et al., IJHPCA 19 (2005) 49-66, without gamma. Tree: P. Sanders et
al., Parallel Computing 35 (2009) 581-594, with the best number of segments. Hierarchical: arXiv:1811.05233. Its tiers
are pipelined over segments. Without channels the tiers of reduce_scatter and all_gather add up.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, NamedTuple

from hpcdist.collectives.algorithms.hierarchical import SEGMENT_BYTES
from hpcdist.collectives.algorithms.hypercube import HALVES_BYTES
from hpcdist.errors import UsageError
from hpcdist.planner.cluster.hardware import Cluster, LinkLevel, MeasuredFit
from hpcdist.planner.layout import ALGORITHMS, ParallelLayout

AXES: Final = ("tensor", "context", "data", "replicas", "expert", "expert_replicas", "pipeline", "all")


class LinkTier(NamedTuple):
    """Links of one level, such as the links between nodes, as a group of communicating devices uses them."""

    outer: int  # index of the level in the cluster; 0: the fastest level
    fan: int  # number of joined sets that contain members of the group
    lanes: int  # number of group members in each set
    latency_s: float
    crowded: float  # seconds per byte that a device sends, if all devices of the job send
    single: float  # seconds per byte that a device sends, if one group member per set sends


@dataclass(frozen=True, eq=False)
class GroupSpan:
    """Group of ``size`` devices that communicate, and links between them. The group has every ``stride``-th device."""

    size: int
    stride: int
    tiers: tuple[LinkTier, ...]  # fastest links first; () for one device
    channels: bool = False  # several rings or trees run in parallel
    flags: tuple[str, ...] = ()

    @property
    def slow(self) -> float:
        """Seconds per byte on the slowest links that a ring or tree of the group uses."""
        if self.channels:
            return max(tier.crowded / tier.lanes for tier in self.tiers)
        return max(tier.single for tier in self.tiers)

    @property
    def latency_s(self) -> float:
        """Largest latency of any link between devices of the group, in seconds."""
        return max(tier.latency_s for tier in self.tiers)

    def tier_at(self, distance: int) -> LinkTier:
        """Return the links between the ranks r and r XOR ``distance``. ``distance`` is a power of 2."""
        # Partners share an aligned block of 2 * distance members: the first tier whose boxes consist of such blocks.
        for tier in self.tiers[:-1]:
            if tier.lanes * tier.fan % (2 * distance) == 0:
                return tier
        return self.tiers[-1]


def span(layout: ParallelLayout, axis: str, cluster: Cluster) -> GroupSpan:
    """Return the group of devices that communicate on the parallel ``axis``, such as "tensor".

    Raises UsageError if ``axis`` is not one of `AXES`.
    """
    inner = layout.tensor * layout.context
    total = inner * layout.data * layout.pipeline
    # "all": all computing devices. "replicas": devices with the same parameters. "expert_replicas": devices with the
    # same experts.
    if axis == "tensor":
        size, stride = layout.tensor, 1
    elif axis == "context":
        size, stride = layout.context, layout.tensor
    elif axis == "data":
        size, stride = layout.data, inner
    elif axis == "replicas":
        size, stride = layout.data * layout.context, layout.tensor
    elif axis == "expert":
        size, stride = layout.expert, layout.tensor
    elif axis == "expert_replicas":
        size, stride = layout.data * layout.context // layout.expert, layout.tensor * layout.expert
    elif axis == "pipeline":
        size, stride = layout.pipeline, inner * layout.data
    elif axis == "all":
        size, stride = total, 1
    else:
        raise UsageError(f"unknown axis {axis!r}; choose one of {', '.join(AXES)}")
    return group(size, stride, total, cluster.levels, layout.channels)


@lru_cache(maxsize=1 << 16)
def group(size: int, stride: int, job_devices: int, levels: tuple[LinkLevel, ...], channels: bool = False) -> GroupSpan:
    """Return the group of ``size`` devices of a job, with a distance of ``stride`` devices between neighbours.

    ``job_devices``: number of devices of the job. ``levels``: link levels of the cluster. ``channels``: True if a
    collective uses all links of a node at once. Raises UsageError if no level joins all devices of the group.
    """
    # `flags` warns of nodes with unequal numbers of members.
    tiers: list[LinkTier] = []
    flags: list[str] = []
    below = box_below = 1
    for outer, level in enumerate(levels):
        box = level.devices or max(job_devices, box_below)
        inside = size if job_devices <= box else members_inside(size, stride, box, below)
        if job_devices > box > stride and (box % stride or inside < min(size, box // stride)):
            flags.append(f"groups of {size} devices, {stride} apart, do not fill boxes of {box} evenly")
        if inside > below:
            # In a flat ring each group with members in a box below sends once over the links of the box.
            groups = min(stride, box_below, job_devices)
            most = level.alone_bytes_per_s or level.bytes_per_s
            single = 1 / min(most, level.bytes_per_s * box_below / groups)
            tiers.append(LinkTier(outer, inside // below, below, level.latency_s, 1 / level.bytes_per_s, single))
            below = inside
        box_below = box
    if below < size:
        raise UsageError(
            f"the job has {job_devices} devices, but the link levels of the cluster join only "
            f"{levels[-1].devices if levels else 1} devices; set `devices` of the last level to 0 (all devices)"
        )
    return _span(size, stride, tuple(tiers), channels, tuple(flags))


@lru_cache(maxsize=1 << 14)
def _span(size: int, stride: int, tiers: tuple[LinkTier, ...], channels: bool, flags: tuple[str, ...]) -> GroupSpan:
    return GroupSpan(size, stride, tiers, channels, flags)


def members_inside(size: int, stride: int, box: int, inner_members: int = 1) -> int:
    """Return the number of devices of a group in each box of ``box`` consecutive devices, such as a node.

    The group has ``size`` devices, every ``stride``-th device of a job. ``inner_members``: result of this function for
    the next smaller boxes.
    """
    # The result divides `size`. Boxes nest: a multiple of `below`, which divides the group into equal parts.
    room = max(1, box // stride)
    return inner_members * math.gcd(size // inner_members, max(1, room // inner_members))


Formula = Callable[[float, GroupSpan], tuple[float, float]]  # (n bytes, span) -> (seconds, bytes sent by a device)


def _ring(passes: int) -> Formula:
    def cost(n: float, span: GroupSpan) -> tuple[float, float]:
        p = span.size
        sent = passes * (p - 1) / p * n
        if not span.channels:  # each round is as slow as the slowest link
            return passes * (p - 1) * span.latency_s + sent * span.slow, sent
        # NCCL does not synchronise rounds, so a chunk crosses each link once.
        hops, latency_s = p, 0.0
        for tier in span.tiers:
            left = p // (tier.lanes * tier.fan)  # boxes of this tier = ring hops between them
            latency_s += (hops - left) * tier.latency_s
            hops = left
        return passes * latency_s + sent * span.slow, sent

    return cost


def _tree(passes: int) -> Formula:
    def cost(n: float, span: GroupSpan) -> tuple[float, float]:
        depth_s = sum((tier.fan - 1).bit_length() * tier.latency_s for tier in span.tiers)
        # k segments of each half take 2 h alpha + n beta + 2 k alpha + h n beta / k; the best k gives the root below.
        beta_s = n * span.slow
        # A device sends half of the buffer up as a leaf of one tree, and once up and twice down in the other tree.
        sent = n / 2 * min(span.size, 4) if passes == 2 else n
        return passes * (beta_s + 2 * depth_s + math.sqrt(8 * depth_s * beta_s)), sent

    return cost


def _hierarchical(passes: int) -> Formula:
    def cost(n: float, span: GroupSpan) -> tuple[float, float]:
        p = span.size
        latency_s = passes * sum((tier.fan - 1) * tier.latency_s for tier in span.tiers)
        # Each of the ``lanes`` members in a box below carries a part of the buffer.
        parts = [passes * (tier.fan - 1) / tier.fan * n / tier.lanes * tier.crowded for tier in span.tiers]
        seconds = sum(parts)
        if passes == 2 or span.channels:
            # Segments overlap: the slowest tier is always busy, the other tiers add only their first segment.
            longest = max(parts)
            first = min(1.0, SEGMENT_BYTES * span.tiers[-1].lanes / n)  # share of one segment of all streams
            seconds = longest + first * (seconds - longest)
        return latency_s + seconds, passes * (p - 1) / p * n

    return cost


def _recursive_doubling(n: float, span: GroupSpan) -> tuple[float, float]:
    seconds, sent = _fold(n, span)
    for distance in _bits(span.size):
        tier = span.tier_at(distance)
        seconds += tier.latency_s + n * tier.crowded
        sent += n
    return seconds, sent


def _rabenseifner(n: float, span: GroupSpan) -> tuple[float, float]:
    seconds, sent = _fold(n, span)
    if sent and n >= HALVES_BYTES:  # pairs exchange halves
        tier = span.tier_at(1)
        seconds, sent = 2 * tier.latency_s + n * tier.crowded, n
        # Halving sends n/2 over the largest distance, n/4 over the next, ...; doubling returns the same.
    distances = list(_bits(span.size))
    cube = 2 * distances[-1]
    for distance in distances:
        tier, part = span.tier_at(distance), 2 * n * distance / cube
        seconds += 2 * tier.latency_s + part * tier.crowded
        sent += part
    return seconds, sent


def _fold(n: float, span: GroupSpan) -> tuple[float, float]:
    if span.size & (span.size - 1) == 0:
        return 0.0, 0.0
    tier = span.tier_at(1)
    return 2 * tier.latency_s + 2 * n * tier.crowded, n


def _bits(p: int) -> Iterator[int]:
    distance = 1
    while 2 * distance <= p:
        yield distance
        distance *= 2


def _circulant(passes: int) -> Formula:
    def cost(n: float, span: GroupSpan) -> tuple[float, float]:
        p = span.size
        sent = passes * (p - 1) / p * n
        crowded = max(tier.crowded for tier in span.tiers)
        return passes * (p - 1).bit_length() * span.latency_s + sent * crowded, sent

    return cost


def _pairs(n: float, span: GroupSpan) -> tuple[float, float]:
    p, near, seconds = span.size, 1, 0.0
    for tier in span.tiers:  # peers in the same box of this tier, but in another box of the tier below
        peers = tier.lanes * tier.fan - near
        seconds += peers * (tier.latency_s + n / p * tier.crowded)
        near += peers
    return seconds, (p - 1) / p * n


def _binomial(n: float, span: GroupSpan) -> tuple[float, float]:
    turns = [((tier.fan - 1).bit_length(), tier) for tier in span.tiers]
    return sum(turn * (tier.latency_s + n * tier.single) for turn, tier in turns), n * sum(turn for turn, _ in turns)


FORMULAS: Final[dict[str, dict[str, Formula]]] = {
    "allreduce": {
        "ring": _ring(2),
        "tree": _tree(2),
        "hierarchical": _hierarchical(2),
        "recursive_doubling": _recursive_doubling,
        "rabenseifner": _rabenseifner,
        "circulant": _circulant(2),
    },
    "reduce_scatter": {"ring": _ring(1), "hierarchical": _hierarchical(1), "circulant": _circulant(1)},
    "all_gather": {"ring": _ring(1), "hierarchical": _hierarchical(1), "circulant": _circulant(1)},
    "broadcast": {"tree": _tree(1), "binomial": _binomial},
    "all_to_all": {"pairs": _pairs},
}
# Algorithms of libraries with channels; in the others every device sends at once, as in MPI.
WITH_CHANNELS: Final = ("ring", "tree", "binomial", "pairs")

OPERATIONS: Final = tuple(FORMULAS)
_NAMES: Final = frozenset(ALGORITHMS) | {name for formulas in FORMULAS.values() for name in formulas}


class MessageCost(NamedTuple):
    """Cost of a message or collective: seconds, largest number of bytes that a device sends, algorithm, warnings."""

    seconds: float
    nbytes: float
    algorithm: str
    flags: tuple[str, ...] = ()


NO_COST: Final = MessageCost(0.0, 0.0, "none")


def repeated_cost(cost: MessageCost, count: float) -> MessageCost:
    """Return the total cost of ``count`` operations, one after another, with the cost ``cost`` per operation."""
    return MessageCost(cost.seconds * count, cost.nbytes * count, cost.algorithm, cost.flags)


def collective(
    operation: str, nbytes: float, span: GroupSpan, cluster: Cluster, algorithm: str = "auto"
) -> MessageCost:
    """Return the cost of the collective ``operation`` on a buffer of ``nbytes`` bytes. Raises UsageError.

    ``nbytes``: size before scatter or after gather. ``span``: devices of the collective. ``algorithm``: name of the
    algorithm, or "auto" for the fastest algorithm.
    """
    if span.size <= 1 or nbytes <= 0:
        return NO_COST
    if cluster.fits and span.stride == 1:  # fits are measured on neighbours; strided groups use other links
        for fit in cluster.fits:
            is_match = (fit.operation, fit.ranks, fit.algorithm) == (operation, span.size, algorithm)
            if is_match and _on(fit, span, cluster):
                sent = _least_bytes(operation, nbytes, span.size)
                measured = MessageCost(_fitted(fit, nbytes), sent, f"measured {algorithm}")
                return _within(fit, nbytes, measured, _cost(operation, nbytes, span, algorithm))
    # The fastest algorithm is used for "auto" and, with a warning, if ``algorithm`` does not support the operation.
    return _cost(operation, nbytes, span, algorithm)


def message(nbytes: float, layout: ParallelLayout, axis: str, cluster: Cluster) -> MessageCost:
    """Return the cost of a message of ``nbytes`` bytes to the next rank on ``axis``, if all ranks send at once."""
    reach = span(layout, axis, cluster)
    if reach.size <= 1 or nbytes <= 0:
        return NO_COST
    tier = reach.tiers[-1]
    formula = MessageCost(tier.latency_s + nbytes * tier.single, nbytes, "message", reach.flags)
    for fit in cluster.fits:
        if fit.operation == "message" and _on(fit, reach, cluster) and (fit.level or tier.outer == 0):
            return _within(fit, nbytes, MessageCost(_fitted(fit, nbytes), nbytes, "measured"), formula)
    return formula


def _on(fit: MeasuredFit, span: GroupSpan, cluster: Cluster) -> bool:
    if fit.library and (fit.library == "nccl") != span.channels:
        return False
    return not fit.level or fit.level == cluster.levels[span.tiers[-1].outer].name


def _within(fit: MeasuredFit, nbytes: float, measured: MessageCost, formula: MessageCost) -> MessageCost:
    if fit.from_bytes <= nbytes <= fit.until_bytes[-1]:
        return measured
    sizes = f"measured from {fit.from_bytes:.3g} to {fit.until_bytes[-1]:.3g} bytes"
    if nbytes > fit.until_bytes[-1]:
        return measured._replace(flags=(f"extrapolated: {fit.operation} over {fit.ranks} ranks, {sizes}",))
    flag = f"extrapolated by formula: {fit.operation} over {fit.ranks} ranks, {sizes}"
    return formula._replace(seconds=min(formula.seconds, _fitted(fit, fit.from_bytes)), flags=(*formula.flags, flag))


def _fitted(fit: MeasuredFit, nbytes: float) -> float:
    pieces = len(fit.until_bytes)
    piece = next((piece for piece in range(pieces) if nbytes <= fit.until_bytes[piece]), pieces - 1)
    return fit.latency_s[piece] + nbytes * fit.s_per_byte[piece]


def _least_bytes(operation: str, nbytes: float, p: int) -> float:
    # Minimum bytes that one of p ranks sends (Patarasuk and Yuan 2009).
    if operation == "broadcast":
        return nbytes
    return (2 if operation == "allreduce" else 1) * (p - 1) / p * nbytes


@lru_cache(maxsize=1 << 16)
def _cost(operation: str, nbytes: float, span: GroupSpan, algorithm: str) -> MessageCost:
    if operation not in FORMULAS:
        raise UsageError(f"unknown collective {operation!r}; choose one of {', '.join(OPERATIONS)}")
    if algorithm not in _NAMES:
        raise UsageError(f"unknown algorithm {algorithm!r}; choose one of {', '.join(sorted(_NAMES))}")
    formulas = FORMULAS[operation]
    if algorithm in formulas:
        return _named(operation, algorithm, nbytes, span)
    names = [name for name in formulas if not span.channels or name in WITH_CHANNELS]
    best = min((_named(operation, name, nbytes, span) for name in names), key=lambda cost: cost.seconds)
    if algorithm == "auto":
        return best
    return best._replace(flags=(*best.flags, substitute_warning(algorithm, operation, best.algorithm)))


def substitute_warning(algorithm: str, operation: str, substitute: str) -> str:
    """Return a warning: ``operation`` does not support ``algorithm``, and uses the algorithm ``substitute``."""
    return f"algorithm = {algorithm}: {operation} does not have this algorithm and uses {substitute}"


def _named(operation: str, name: str, nbytes: float, span: GroupSpan) -> MessageCost:
    seconds, sent = FORMULAS[operation][name](nbytes, span)
    return MessageCost(seconds, sent, name, span.flags)
