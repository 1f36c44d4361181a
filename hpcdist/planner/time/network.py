"""Cost of a collective or message on a cluster: from measured fits, else by formula over the links that it crosses.

**Links.** A group of an axis is ``size`` devices, ``stride`` apart (`hpcdist.strategies.core.grid`: tensor fastest,
then context, data, pipeline). `span` finds its *tiers*, the levels of links that it crosses: each box of a tier joins
``fan`` boxes of the tier below, and the fans multiply to ``size``. A level's ``bytes_per_s`` is that of a device while
all of its box sends. A flat ring has one sender for each group in a box, so it is slowed only by other groups
(``single``); where all devices send at once it is ``crowded``. With ``channels``, as NCCL does, as many rings or trees
as a box has members of the group leave it, each by another link: together they are one ring with the links of all
members.

**Measurements** (`hpcdist.planner.cluster.hardware.MeasuredFit`) come first, where they are of the same algorithm of
the same library, on as many ranks in the same places: neighbours, over links of the same level. Below the smallest
measured size the formula holds, and nothing takes longer than that size did. Bytes are those of the whole buffer, in
fits too.

**Formulas.** p devices, n bytes of the whole buffer, alpha and beta of a tier, h = the sum over the tiers of
ceil(log2 fan):

    ring            2 (p-1) alpha + 2 (p-1)/p n beta                   allreduce; half of it reduce_scatter, all_gather
    tree            2 n beta + 4 h alpha + 2 sqrt(8 h alpha n beta)    allreduce, double binary; half of it broadcast
    hierarchical    by tier 2 (fan-1) alpha + 2 (fan-1)/fan n' beta    n' = n / (fans of the tiers below)
    recursive_doubling    log2 p (alpha + n beta)                      allreduce
    rabenseifner    2 log2 p alpha + 2 (p-1)/p n beta                  allreduce
    circulant       2 ceil(log2 p) alpha + 2 (p-1)/p n beta            as the ring
    pairs           (p-1) alpha + (p-1)/p n beta                       all_to_all
    binomial        ceil(log2 p) (alpha + n beta)                      broadcast

Ring, doubling, Rabenseifner, binomial: R. Thakur, R. Rabenseifner, W. Gropp, "Optimization of collective
communication operations in MPICH", IJHPCA 19 (2005) 49-66, without its gamma: bandwidths are those that collectives
reach, sums included. That 2 (p-1)/p n is the least an allreduce can send: P. Patarasuk, X. Yuan, JPDC 69 (2009)
117-124. Tree: P. Sanders, J. Speck, J. L. Träff, Parallel Computing 35 (2009) 581-594: k segments of either half of
the buffer down trees of depth h take 2 h + 2 k turns of alpha + n / (2 k) beta, least for k = sqrt(h n beta / (2
alpha)); once up, once down. Hierarchical: H. Mikami et al., arXiv:1811.05233. The others: `hpcdist.collectives`.

A flat ring goes at the pace of its slowest link, `GroupSpan.slow`; doubling and its kin have all devices of a box
send at once. The tiers of a hierarchical allreduce work at the same time, on segments: the slowest one counts, and
what a segment takes in the others. Its halves, reduce_scatter and all_gather, are segmented with channels only; else
tiers add up.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, NamedTuple

from hpcdist.collectives.algorithms.hypercube import HALVES_BYTES
from hpcdist.errors import UsageError
from hpcdist.planner.cluster.hardware import Cluster, LinkLevel, MeasuredFit
from hpcdist.planner.layout import ALGORITHMS, ParallelLayout

AXES: Final = ("tensor", "context", "data", "replicas", "expert", "expert_replicas", "pipeline", "all")


class LinkTier(NamedTuple):
    """One level of links as a group uses it; ``crowded`` and ``single`` in seconds a byte (module docstring).

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
        # Partners share an aligned block of 2 distance members: the first tier whose boxes are whole such blocks.
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
        size, stride = layout.expert, layout.tensor
    elif axis == "expert_replicas":
        size, stride = layout.data * layout.context // layout.expert, layout.tensor * layout.expert
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
        inside = size if total <= box else members_inside(size, stride, box, below)
        if total > box > stride and (box % stride or inside < min(size, box // stride)):
            flags.append(f"groups of {size} devices, {stride} apart, do not fill boxes of {box} evenly")
        if inside > below:
            # A box below has a member of so many groups; in a flat ring each sends once through the links of the box.
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
    """Return the one object for these links: groups that lie so share its cached costs, whatever their total."""
    return GroupSpan(size, stride, tiers, channels, flags)


def members_inside(size: int, stride: int, box: int, below: int = 1) -> int:
    """Return how many neighbours of a group share a box of ``box`` devices, ``below`` of them the box below it."""
    # Boxes nest: a multiple of those in the box below, and one that cuts the group into equal parts.
    room = max(1, box // stride)
    return below * math.gcd(size // below, max(1, room // below))


SEGMENT_BYTES: Final = 256 << 10  # of a message of the hierarchy, as in `hpcdist.collectives.algorithms.hierarchical`

Formula = Callable[
    [float, GroupSpan], tuple[float, float]
]  # (n bytes, span) -> (seconds, the most bytes that one sends)


def _ring(passes: int) -> Formula:
    def cost(n: float, span: GroupSpan) -> tuple[float, float]:
        p = span.size
        sent = passes * (p - 1) / p * n
        if not span.channels:  # every turn is as slow as the slowest link of the circle
            return passes * (p - 1) * span.latency_s + sent * span.slow, sent
        # NCCL's: nobody waits for a turn, so a chunk meets each link once.
        hops, latency_s = p, 0.0
        for tier in span.tiers:
            left = p // (tier.lanes * tier.fan)  # boxes of this tier, between which the ring has as many hops
            latency_s += (hops - left) * tier.latency_s
            hops = left
        return passes * latency_s + sent * span.slow, sent

    return cost


def _tree(passes: int) -> Formula:
    def cost(n: float, span: GroupSpan) -> tuple[float, float]:
        depth_s = sum((tier.fan - 1).bit_length() * tier.latency_s for tier in span.tiers)
        # k segments of each half take 2 h alpha + n beta + 2 k alpha + h n beta / k: with the best k, the root below.
        beta_s = n * span.slow
        # Halves of the buffer: one up as a leaf of one tree; one up and two down as an inner node of the other.
        sent = n / 2 * min(span.size, 4) if passes == 2 else n
        return passes * (beta_s + 2 * depth_s + math.sqrt(8 * depth_s * beta_s)), sent

    return cost


def _hierarchical(passes: int) -> Formula:
    def cost(n: float, span: GroupSpan) -> tuple[float, float]:
        p = span.size
        latency_s = passes * sum((tier.fan - 1) * tier.latency_s for tier in span.tiers)
        # Of a tier each of the ``lanes`` members in a box below carries its own part of the buffer.
        parts = [passes * (tier.fan - 1) / tier.fan * n / tier.lanes * tier.crowded for tier in span.tiers]
        seconds = sum(parts)
        if passes == 2 or span.channels:
            # Segments overlap: the slowest tier is busy throughout, the others show with the first segment alone.
            longest = max(parts)
            first = min(1.0, SEGMENT_BYTES * span.tiers[-1].lanes / n)  # the share of a segment of all streams
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
    # Halving sends n/2 over the largest distance, n/4 over the next, ...; doubling brings as much back.
    distances = list(_bits(span.size))
    cube = 2 * distances[-1]
    for distance in distances:
        tier, part = span.tier_at(distance), 2 * n * distance / cube
        seconds += 2 * tier.latency_s + part * tier.crowded
        sent += part
    return seconds, sent


def _fold(n: float, span: GroupSpan) -> tuple[float, float]:
    """Return the cost of folding p to a power of two: pairs sum into one rank first, and share the result last."""
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
    for tier in span.tiers:  # peers in the same box of this tier, and in another one of the tier below
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
# Of libraries whose rings have channels: what else there is sends all from every device at once, as MPI's may.
WITH_CHANNELS: Final = ("ring", "tree", "binomial", "pairs")

OPERATIONS: Final = tuple(FORMULAS)
_NAMES: Final = frozenset(ALGORITHMS) | {name for formulas in FORMULAS.values() for name in formulas}


class MessageCost(NamedTuple):
    """Cost of a message or collective: seconds, the most bytes that a device sends, the algorithm, assumptions."""

    seconds: float
    nbytes: float
    algorithm: str
    flags: tuple[str, ...] = ()


NO_COST: Final = MessageCost(0.0, 0.0, "none")


def repeated_cost(cost: MessageCost, often: float) -> MessageCost:
    """Return the cost of ``often`` such operations, one after the other (local)."""
    return MessageCost(cost.seconds * often, cost.nbytes * often, cost.algorithm, cost.flags)


def collective(
    operation: str, nbytes: float, span: GroupSpan, cluster: Cluster, algorithm: str = "auto"
) -> MessageCost:
    """Return the cost of ``operation`` on a buffer of ``nbytes`` over ``span``.

    ``nbytes`` is the whole buffer: what reduce_scatter begins with, what all_gather ends with, and all that a device
    has in all_to_all, its own part included. "auto" is what was measured, else the fastest formula; where an
    operation has no such algorithm as is asked for (a tree cannot scatter) it is done as the fastest one, too: flagged.
    Raises UsageError for names that are none.
    """
    if span.size <= 1 or nbytes <= 0:
        return NO_COST
    if cluster.fits and span.stride == 1:  # measured on neighbours: a strided group has other links
        for fit in cluster.fits:
            known = (fit.operation, fit.ranks, fit.algorithm) == (operation, span.size, algorithm)
            if known and _on(fit, span, cluster):
                sent = _least_bytes(operation, nbytes, span.size)
                measured = MessageCost(_fitted(fit, nbytes), sent, f"measured {algorithm}")
                return _within(fit, nbytes, measured, _cost(operation, nbytes, span, algorithm))
    return _cost(operation, nbytes, span, algorithm)


def message(nbytes: float, layout: ParallelLayout, axis: str, cluster: Cluster) -> MessageCost:
    """Return the cost of a message to the next along ``axis`` while all groups send one, between the slowest links."""
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
    """Return whether the outermost links of ``span``, and its library, are those that were measured."""
    if fit.library and (fit.library == "nccl") != span.channels:
        return False
    return not fit.level or fit.level == cluster.levels[span.tiers[-1].outer].name


def _within(fit: MeasuredFit, nbytes: float, measured: MessageCost, formula: MessageCost) -> MessageCost:
    """Return ``measured``, flagged beyond the sizes of the fit; below them the ``formula`` (module docstring)."""
    if fit.from_bytes <= nbytes <= fit.until_bytes[-1]:
        return measured
    sizes = f"measured from {fit.from_bytes:.3g} to {fit.until_bytes[-1]:.3g} bytes"
    if nbytes > fit.until_bytes[-1]:
        return measured._replace(flags=(f"extrapolated: {fit.operation} over {fit.ranks} ranks, {sizes}",))
    flag = f"extrapolated by formula: {fit.operation} over {fit.ranks} ranks, {sizes}"
    return formula._replace(seconds=min(formula.seconds, _fitted(fit, fit.from_bytes)), flags=(*formula.flags, flag))


def _fitted(fit: MeasuredFit, nbytes: float) -> float:
    """Return the seconds of the line that ``nbytes`` lie on."""
    pieces = len(fit.until_bytes)
    piece = next((piece for piece in range(pieces) if nbytes <= fit.until_bytes[piece]), pieces - 1)
    return fit.latency_s[piece] + nbytes * fit.s_per_byte[piece]


def _least_bytes(operation: str, nbytes: float, p: int) -> float:
    """Return the bytes that a device sends at least (Patarasuk and Yuan 2009); all that is known of a measured one."""
    if operation == "broadcast":
        return nbytes
    return (2 if operation == "allreduce" else 1) * (p - 1) / p * nbytes


@lru_cache(maxsize=1 << 16)
def _cost(operation: str, nbytes: float, span: GroupSpan, algorithm: str) -> MessageCost:
    if operation not in FORMULAS:
        raise UsageError(f"collective {operation!r}; choose one of {', '.join(OPERATIONS)}")
    if algorithm not in _NAMES:
        raise UsageError(f"algorithm {algorithm!r}; choose one of {', '.join(sorted(_NAMES))}")
    known = FORMULAS[operation]
    if algorithm in known:
        return _named(operation, algorithm, nbytes, span)
    names = [name for name in known if not span.channels or name in WITH_CHANNELS]
    best = min((_named(operation, name, nbytes, span) for name in names), key=lambda cost: cost.seconds)
    if algorithm == "auto":
        return best
    return best._replace(flags=(*best.flags, substituted(algorithm, operation, best.algorithm)))


def substituted(algorithm: str, operation: str, taken: str) -> str:
    """Return the flag of an ``operation`` that goes by ``taken``, since it has no such ``algorithm``."""
    return f"algorithm = {algorithm}: {operation} has none of that name, and goes by {taken}"


def _named(operation: str, name: str, nbytes: float, span: GroupSpan) -> MessageCost:
    seconds, sent = FORMULAS[operation][name](nbytes, span)
    return MessageCost(seconds, sent, name, span.flags)
