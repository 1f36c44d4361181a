"""Costs of sending a layer's rows to experts on other ranks and back: bytes sent, copied and kept.

A rank has n bytes of rows (k N rows of width h, for N tokens with k of the E experts each). They travel there and back
in the forward and in the backward pass over e ranks. For equal loads:

                through memory of the node            by messages
                (`hpcdist.strategies.expert.shared`)  (`hpcdist.strategies.expert.model.TravellingRows`)
    sent        nothing                               (e-1)/e n four times, (e-1)/e 8 E for int64 counts once
    copied      n each time, and gradients once more  n each time
    kept        as on one rank                        n more: sent rows and received rows
    scratch     n more: received gradients            4 n more: received and sent rows, gradients, results
    shared      5/2 n: rows and results, plus 1/4     nothing
"""

from typing import Final, NamedTuple

from hpcdist.collectives.node.published import part_bytes

# Number of copies of a turn's bytes, in addition to sending: (through memory of the node, by messages).
COPIES: Final = {"counts": (0, 0), "rows": (1, 1), "gradients": (2, 1), "results": (1, 1)}


def counts_bytes(experts: int) -> int:
    """Return the bytes of the row counts (int64) that a rank sends, one count for each expert."""
    return 8 * experts


def published_bytes(nbytes: int) -> int:
    """Return the bytes of a rank's shared memory for ``nbytes`` of token rows and for results of the same size."""
    return 2 * part_bytes(nbytes)


class NodeTraffic(NamedTuple):
    """Traffic of a rank in `hpcdist.collectives.algorithms.hierarchical_all_to_all` between several nodes.

    ``between`` and ``inside`` are the bytes sent to other nodes and within the node, as means over the ranks. The
    busiest rank sends ``messages`` messages to other nodes, of ``most`` bytes in total, and needs ``workspace`` bytes.
    """

    between: float
    inside: float
    messages: int
    most: float
    workspace: float


def node_traffic(nbytes: float, nodes: int, ranks_per_node: int) -> NodeTraffic:
    """Return the traffic of a rank in one all-to-all between nodes. ``nbytes``: size of the whole send buffer."""
    messages = -(-(nodes - 1) // ranks_per_node)  # number of nodes for which the busiest rank acts
    away, most = (nodes - 1) / nodes * nbytes, messages * ranks_per_node * nbytes / nodes
    inside = (ranks_per_node - 1) / ranks_per_node * (nbytes / nodes + 2 * away)
    # 2 away: to and from the acting ranks. 4 most: their buffers of incoming, outgoing, arrived and forwarded data.
    return NodeTraffic(away, inside, messages, most, 2 * away + 4 * most)
