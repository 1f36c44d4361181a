"""Way of the rows of experts on a cluster, and what their turns cost: in memory of a node, or in messages.

This toolkit chooses as `hpcdist.strategies.expert.axis.algorithm_for` does: with `algorithm = auto` ranks of one node
without GPUs read rows where others have written them, and send nothing; ranks of several nodes send one message
between two nodes; all others send pair by pair. Bytes, memory and copies: `hpcdist.strategies.expert.costs`. What is
copied is read and written at the speed of the memory. A turn in memory of the node has the latency of a message, for
all wait for all. The published implementation sends pair by pair, and is timed without counts and copies.
"""

from typing import Final, NamedTuple

from hpcdist.planner.cluster.hardware import Cluster
from hpcdist.planner.layout import ParallelLayout
from hpcdist.planner.time.network import MessageCost, collective, group, members_inside, span
from hpcdist.strategies.expert.costs import COPIES, node_traffic, published_bytes

SHARED: Final = "node memory"
HIERARCHICAL: Final = "hierarchical"
PAIRS: Final = "pairs"
EVEN_LOADS_FLAG: Final = (
    "loads of experts are taken to be even: a rank that gets more rows keeps them, and the others wait for it"
)


class RowRoute(NamedTuple):
    """Way of the rows of a group of expert ranks, which lie on ``nodes`` with ``each`` of them; "" where none go."""

    way: str = ""
    nodes: int = 1
    each: int = 1


def row_route(layout: ParallelLayout, cluster: Cluster) -> RowRoute:
    """Return the way of the rows of experts (local)."""
    if layout.expert == 1:
        return RowRoute()
    total, box = layout.devices - layout.servers, cluster.node.devices
    each = layout.expert if total <= box else members_inside(layout.expert, layout.tensor, box)
    nodes, way = layout.expert // each, PAIRS
    if layout.implementation == "hpcdist":
        if nodes > 1 and layout.algorithm in ("auto", HIERARCHICAL):
            way = HIERARCHICAL
        elif nodes == 1 and layout.algorithm == "auto" and not cluster.device.is_accelerator:
            way = SHARED
    return RowRoute(way, nodes, each)


def row_turn(turn: str, nbytes: float, layout: ParallelLayout, cluster: Cluster) -> MessageCost:
    """Return the cost of a ``turn``, one of `COPIES`, of a rank with ``nbytes``, its own part included (local)."""
    reach, route = span(layout, "expert", cluster), row_route(layout, cluster)
    if layout.implementation != "hpcdist":
        return collective("all_to_all", nbytes, reach, cluster)
    if route.way == SHARED:
        cost = MessageCost(reach.latency_s, 0.0, SHARED)
    elif route.way == PAIRS:
        cost = collective("all_to_all", nbytes, reach, cluster)
    else:
        cost = _between_nodes(nbytes, route, layout, cluster)
    moves = cluster.device.memory_bytes_per_s * cluster.device.memory_share
    copied_s = 2 * COPIES[turn][route.way != SHARED] * nbytes / moves
    return cost._replace(seconds=cost.seconds + copied_s, flags=(*cost.flags, EVEN_LOADS_FLAG))


def _between_nodes(nbytes: float, route: RowRoute, layout: ParallelLayout, cluster: Cluster) -> MessageCost:
    """Return the cost of an all-to-all by way of ranks that stand for their nodes."""
    reach, traffic = span(layout, "expert", cluster), node_traffic(nbytes, route.nodes, route.each)
    far = reach.tiers[-1]
    # Where fewer ranks of a node send than it has, each has more of the node's link, up to what one alone gets.
    senders = min(1.0, (route.nodes - 1) / route.each)
    between_s = traffic.messages * far.latency_s + traffic.most * max(far.single, far.crowded * senders)
    near = group(route.each, reach.stride, layout.devices - layout.servers, cluster.levels, layout.channels)
    # An all-to-all of so many bytes, its own part included, sends what stays within the node.
    inside = traffic.inside * route.each / max(1, route.each - 1)
    inside_s = collective("all_to_all", inside, near, cluster).seconds
    return MessageCost(between_s + inside_s, traffic.between + traffic.inside, HIERARCHICAL, reach.flags)


def row_buffers(nbytes: float, route: RowRoute) -> float:
    """Return the bytes of memory that rows of ``nbytes`` take on their way, beside what is kept of them (local)."""
    if route.way == SHARED:
        return published_bytes(round(nbytes)) + nbytes  # and the gradients that come
    return node_traffic(nbytes, route.nodes, route.each).workspace if route.way == HIERARCHICAL else 0.0
