"""Seconds and bytes of gradients that are summed compressed: over all ranks, or between nodes only.

With n values, p ranks, c bytes of payload a value (`hpcdist.planner.payloads`), a rank sends

    owned       2 (p-1)/p c n    shares to their owners and sums back, between all pairs; half in a reduce-scatter
    gathered    (p-1) c n        payloads of all to everybody
    summed      2 (p-1)/p c n    an allreduce of payloads

as in `hpcdist.strategies.compressed.reduction`. Where a node has l > 1 of the ranks, the first two may also go
between nodes only (`hpcdist.strategies.compressed.reduction`): float32 sums in the node, 8 n (l-1)/l bytes of its
fast links, and n / l values for p / l ranks outside. The faster of both is taken, as a recipe would.
"""

from typing import Final, NamedTuple

from hpcdist.planner import payloads
from hpcdist.planner.cluster import Cluster
from hpcdist.planner.layout import Layout
from hpcdist.planner.network import Cost, collective, times
from hpcdist.planner.network_span import Span, group, span
from hpcdist.planner.payloads import Matrices, Payload

_FLOAT32: Final = 4


class Gradients(NamedTuple):
    """``values`` of one device, in ``units``; ``matrices`` as in `payloads.payload`."""

    values: float
    units: int
    matrices: Matrices


def summed(operation: str, given: Gradients, layout: Layout, axis: str, cluster: Cluster, messages: int = 1) -> Cost:
    """Return what the compressed sum takes in so many ``messages``, with encoding and decoding.

    ``operation`` is allreduce or reduce_scatter.
    """
    whole = span(layout, axis, cluster)
    flat = _over(operation, given, layout, whole, cluster, messages)
    inside = _inside(whole, cluster)
    if inside in (1, whole.size) or flat.algorithm.endswith("allreduce"):
        return flat
    total = layout.devices - layout.servers
    near = group(inside, whole.stride, total, cluster.levels, layout.channels)
    far = group(whole.size // inside, whole.stride * inside, total, cluster.levels, layout.channels)
    halves = ("reduce_scatter", "all_gather") if operation == "allreduce" else ("reduce_scatter",)
    sums = [times(collective(half, _FLOAT32 * given.values / messages, near, cluster), messages) for half in halves]
    between = _over(operation, given._replace(values=given.values / inside), layout, far, cluster, messages)
    nodes = Cost(
        between.seconds + sum(one.seconds for one in sums),
        between.nbytes + sum(one.nbytes for one in sums),
        f"{between.algorithm} between nodes",
        between.flags,
    )
    return min(flat, nodes, key=lambda cost: cost.seconds)


def _inside(whole: Span, cluster: Cluster) -> int:
    """Return how many ranks of the group share a node."""
    inside = 1
    for tier in whole.tiers:
        box = cluster.levels[tier.outer].devices
        if box and box <= cluster.node.devices:
            inside = tier.lanes * tier.fan
    return inside


def _over(operation: str, given: Gradients, layout: Layout, ranks: Span, cluster: Cluster, messages: int) -> Cost:
    payload = payloads.payload(layout.compression, given.values, ranks.size, given.units, given.matrices)
    assert payload is not None, "there is something to compress"
    each = payload._replace(nbytes=payload.nbytes / messages)
    cost = times(_sent(operation, each, ranks, layout, cluster), messages)
    return Cost(
        cost.seconds + payload.seconds(cluster),
        cost.nbytes,
        f"{layout.compression} {'allreduce' if payload.way == 'summed' else payload.way}",
        (*cost.flags, *payload.flags),
    )


def _sent(operation: str, payload: Payload, ranks: Span, layout: Layout, cluster: Cluster) -> Cost:
    if payload.way == "gathered":
        return collective("all_gather", ranks.size * payload.nbytes, ranks, cluster, layout.algorithm)
    if payload.way == "summed":
        return collective("allreduce", payload.nbytes, ranks, cluster, layout.algorithm)
    there = collective("all_to_all", payload.nbytes, ranks, cluster, layout.algorithm)
    often = 2 if operation == "allreduce" else 1
    return there._replace(seconds=often * there.seconds, nbytes=often * there.nbytes)
