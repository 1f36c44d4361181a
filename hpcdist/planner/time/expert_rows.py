"""Route and cost of token rows sent to experts: in node memory, or in messages.

hpcdist chooses as `hpcdist.strategies.expert.axis.algorithm_for`: ranks of one node without GPUs read the rows in
shared memory; ranks of several nodes send one message between two nodes; all others send pairwise. An exchange in node
memory has the latency of a message. Megatron-LM sends pairwise, without counts and copies.

A rank has n bytes of rows (k N rows of width h, for N tokens with k of the E experts each). They travel to e ranks and
back in the forward and in the backward pass. For equal loads:

                through memory of the node            by messages
                (`hpcdist.strategies.expert.shared`)  (`hpcdist.strategies.expert.model.TravellingRows`)
    sent        nothing                               (e-1)/e n four times, (e-1)/e 8 E for int64 counts once
    copied      n each time, and gradients once more  n each time
    kept        as on one rank                        n more: sent rows and received rows
    scratch     n more: received gradients            4 n more: received and sent rows, gradients, results
    shared      5/2 n: rows and results, plus 1/4     nothing
"""

from typing import Final, NamedTuple

from hpcdist.collectives.node.flow import part_bytes
from hpcdist.planner.cluster.hardware import Cluster
from hpcdist.planner.layout import ParallelLayout
from hpcdist.planner.time.network import MessageCost, collective, group, members_inside, span

# Number of copies of a turn's bytes, in addition to sending: (through memory of the node, by messages).
COPIES: Final = {"counts": (0, 0), "rows": (1, 1), "gradients": (2, 1), "results": (1, 1)}
SHARED: Final = "node memory"
HIERARCHICAL: Final = "hierarchical"
PAIRS: Final = "pairs"
EVEN_LOADS_FLAG: Final = (
    "expert loads are assumed to be balanced: ranks with more rows take longer, and the other ranks wait for them"
)


class RowRoute(NamedTuple):
    """Method that sends tokens to experts on other ranks, and numbers of nodes and of ranks per node."""

    # "node memory" (shared memory), "hierarchical" (a message from node to node), "pairs" (a message from rank to
    # rank), or "" without expert parallelism
    method: str = ""
    nodes: int = 1
    ranks_per_node: int = 1  # expert-parallel ranks


def row_route(layout: ParallelLayout, cluster: Cluster) -> RowRoute:
    """Return the method that hpcdist or Megatron-LM uses to send tokens to the experts on other ranks."""
    if layout.expert == 1:
        return RowRoute()
    total, node_devices = layout.devices - layout.servers, cluster.node.devices
    each = layout.expert if total <= node_devices else members_inside(layout.expert, layout.tensor, node_devices)
    nodes, way = layout.expert // each, PAIRS
    if layout.kernels.routes_rows:
        if nodes > 1 and layout.algorithm in ("auto", HIERARCHICAL):
            way = HIERARCHICAL
        elif nodes == 1 and layout.algorithm == "auto" and not cluster.device.is_accelerator:
            way = SHARED
    return RowRoute(way, nodes, each)


def row_turn(content: str, nbytes: float, layout: ParallelLayout, cluster: Cluster) -> MessageCost:
    """Return the cost of one all-to-all between the ranks of the expert axis.

    ``content``: kind of data to send, such as "gradients". ``nbytes``: bytes in the send buffer of a rank.
    """
    reach, route = span(layout, "expert", cluster), row_route(layout, cluster)
    if not layout.kernels.routes_rows:
        return collective("all_to_all", nbytes, reach, cluster)
    if route.method == SHARED:
        cost = MessageCost(reach.latency_s, 0.0, SHARED)
    elif route.method == PAIRS:
        cost = collective("all_to_all", nbytes, reach, cluster)
    else:
        cost = _between_nodes(nbytes, route, layout, cluster)
    moves = cluster.device.memory_bytes_per_s * cluster.device.memory_share
    copied_s = 2 * COPIES[content][route.method != SHARED] * nbytes / moves
    return cost._replace(seconds=cost.seconds + copied_s, flags=(*cost.flags, EVEN_LOADS_FLAG))


def _between_nodes(nbytes: float, route: RowRoute, layout: ParallelLayout, cluster: Cluster) -> MessageCost:
    reach, traffic = span(layout, "expert", cluster), node_traffic(nbytes, route.nodes, route.ranks_per_node)
    far = reach.tiers[-1]
    # If fewer ranks of a node send than it has, each gets a larger share of the link, up to a single sender's rate.
    senders = min(1.0, (route.nodes - 1) / route.ranks_per_node)
    between_s = traffic.messages * far.latency_s + traffic.most * max(far.single, far.crowded * senders)
    near = group(route.ranks_per_node, reach.stride, layout.devices - layout.servers, cluster.levels, layout.channels)
    # `collective` counts a device's part as well, which is not sent.
    inside = traffic.inside * route.ranks_per_node / max(1, route.ranks_per_node - 1)
    inside_s = collective("all_to_all", inside, near, cluster).seconds
    return MessageCost(between_s + inside_s, traffic.between + traffic.inside, HIERARCHICAL, reach.flags)


def row_buffers(nbytes: float, route: RowRoute) -> float:
    """Return the bytes of the buffers that a device needs to send ``nbytes`` bytes of tokens to experts.

    ``route``: result of `row_route`.
    """
    if route.method == SHARED:
        return published_bytes(round(nbytes)) + nbytes  # plus received gradients
    return node_traffic(nbytes, route.nodes, route.ranks_per_node).workspace if route.method == HIERARCHICAL else 0.0


def published_bytes(nbytes: int) -> int:
    """Return the bytes of shared memory in which a rank shares ``nbytes`` bytes of tokens with its node."""
    return 2 * part_bytes(nbytes)


class NodeTraffic(NamedTuple):
    """Traffic of one rank in a hierarchical all-to-all over several nodes."""

    between: float  # mean bytes sent to other nodes
    inside: float  # mean bytes sent within the node
    messages: int  # from the busiest rank to other nodes
    most: float  # bytes from the busiest rank to other nodes
    workspace: float  # bytes of scratch memory on the busiest rank


def node_traffic(nbytes: float, nodes: int, ranks_per_node: int) -> NodeTraffic:
    """Return the traffic of a hierarchical all-to-all. ``nbytes``: bytes in the send buffer of a rank."""
    messages = -(-(nodes - 1) // ranks_per_node)  # number of nodes for which the busiest rank acts
    away, most = (nodes - 1) / nodes * nbytes, messages * ranks_per_node * nbytes / nodes
    inside = (ranks_per_node - 1) / ranks_per_node * (nbytes / nodes + 2 * away)
    # 2 away: to and from the acting ranks. 4 most: their buffers of incoming, outgoing, arrived and forwarded data.
    return NodeTraffic(away, inside, messages, most, 2 * away + 4 * most)
