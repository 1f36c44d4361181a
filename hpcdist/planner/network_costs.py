"""Seconds and bytes of collectives in closed form, over the tiers of a group (`hpcdist.planner.network_span`).

p devices, n bytes of the whole buffer, alpha and beta of a tier, h = the sum over the tiers of ceil(log2 fan):

    ring            2 (p-1) alpha + 2 (p-1)/p n beta                   allreduce; half of it reduce_scatter, all_gather
    tree            2 n beta + 4 h alpha + 2 sqrt(8 h alpha n beta)    allreduce, double binary; half of it broadcast
    hierarchical    by tier 2 (fan-1) alpha + 2 (fan-1)/fan n' beta    n' = n / (fans of the tiers below)
    recursive_doubling    log2 p (alpha + n beta)                      allreduce
    rabenseifner    2 log2 p alpha + 2 (p-1)/p n beta                  allreduce
    circulant       2 ceil(log2 p) alpha + 2 (p-1)/p n beta            as the ring
    pairs           (p-1) alpha + (p-1)/p n beta                       all_to_all
    binomial        ceil(log2 p) (alpha + n beta)                      broadcast

Ring, doubling, Rabenseifner, binomial: R. Thakur, R. Rabenseifner, W. Gropp, "Optimization of collective communication
operations in MPICH", IJHPCA 19 (2005) 49-66, without its gamma: bandwidths are those that collectives reach, sums
included. That 2 (p-1)/p n is the least an allreduce can send: P. Patarasuk, X. Yuan, JPDC 69 (2009) 117-124. Tree: P.
Sanders, J. Speck, J. L. Träff, Parallel Computing 35 (2009) 581-594: k segments of either half of the buffer down trees
of depth h take 2 h + 2 k turns of alpha + n / (2 k) beta, least for k = sqrt(h n beta / (2 alpha)); once up, once down.
Hierarchical: H. Mikami et al., arXiv:1811.05233. The others: `hpcdist.collectives`.

A flat ring goes at the pace of its slowest link, `Span.slow`; doubling and its kin have all devices of a box send at
once. The tiers of a hierarchical allreduce work at the same time, on segments: the slowest one counts, and what a
segment takes in the others. Its halves, reduce_scatter and all_gather, are segmented with channels only; else tiers
add up.
"""

import math
from collections.abc import Callable, Iterator
from typing import Final

from hpcdist.collectives.rabenseifner import HALVES_BYTES
from hpcdist.planner.network_span import Span

SEGMENT_BYTES: Final = 256 << 10  # of a message of the hierarchy, as in `hpcdist.collectives.hierarchical`

Formula = Callable[[float, Span], tuple[float, float]]  # (n bytes, span) -> (seconds, the most bytes that one sends)


def _ring(passes: int) -> Formula:
    def cost(n: float, span: Span) -> tuple[float, float]:
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
    def cost(n: float, span: Span) -> tuple[float, float]:
        depth_s = sum((tier.fan - 1).bit_length() * tier.latency_s for tier in span.tiers)
        beta_s = n * span.slow
        sent = n / 2 * min(span.size, 4) if passes == 2 else n
        return passes * (beta_s + 2 * depth_s + math.sqrt(8 * depth_s * beta_s)), sent

    return cost


def _hierarchical(passes: int) -> Formula:
    def cost(n: float, span: Span) -> tuple[float, float]:
        p = span.size
        latency_s = passes * sum((tier.fan - 1) * tier.latency_s for tier in span.tiers)
        parts = [passes * (tier.fan - 1) / tier.fan * n / tier.lanes * tier.crowded for tier in span.tiers]
        seconds = sum(parts)
        if passes == 2 or span.channels:
            longest = max(parts)
            first = min(1.0, SEGMENT_BYTES * span.tiers[-1].lanes / n)  # the share of a segment of all streams
            seconds = longest + first * (seconds - longest)
        return latency_s + seconds, passes * (p - 1) / p * n

    return cost


def _recursive_doubling(n: float, span: Span) -> tuple[float, float]:
    seconds, sent = _fold(n, span)
    for distance in _bits(span.size):
        tier = span.tier_at(distance)
        seconds += tier.latency_s + n * tier.crowded
        sent += n
    return seconds, sent


def _rabenseifner(n: float, span: Span) -> tuple[float, float]:
    seconds, sent = _fold(n, span)
    if sent and n >= HALVES_BYTES:  # pairs exchange halves
        tier = span.tier_at(1)
        seconds, sent = 2 * tier.latency_s + n * tier.crowded, n
    distances = list(_bits(span.size))
    cube = 2 * distances[-1]
    for distance in distances:
        tier, part = span.tier_at(distance), 2 * n * distance / cube
        seconds += 2 * tier.latency_s + part * tier.crowded
        sent += part
    return seconds, sent


def _fold(n: float, span: Span) -> tuple[float, float]:
    """Return what pairs do first and last where p is no power of two: one sends and waits, the other the reverse."""
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
    def cost(n: float, span: Span) -> tuple[float, float]:
        p = span.size
        sent = passes * (p - 1) / p * n
        crowded = max(tier.crowded for tier in span.tiers)
        return passes * (p - 1).bit_length() * span.latency_s + sent * crowded, sent

    return cost


def _pairs(n: float, span: Span) -> tuple[float, float]:
    p, near, seconds = span.size, 1, 0.0
    for tier in span.tiers:
        peers = tier.lanes * tier.fan - near
        seconds += peers * (tier.latency_s + n / p * tier.crowded)
        near += peers
    return seconds, (p - 1) / p * n


def _binomial(n: float, span: Span) -> tuple[float, float]:
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
