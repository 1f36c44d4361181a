"""Costs of sending a layer's rows to experts on other ranks and back: bytes sent, copied and kept.

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

# Number of copies of a turn's bytes, in addition to sending: (through memory of the node, by messages).
COPIES: Final = {"counts": (0, 0), "rows": (1, 1), "gradients": (2, 1), "results": (1, 1)}


def counts_bytes(experts: int) -> int:
    """Return the bytes of the token counts that a rank sends: one int64 count for each expert."""
    return 8 * experts


def published_bytes(nbytes: int) -> int:
    """Return the bytes of shared memory that a rank needs to send ``nbytes`` bytes of token rows to experts."""
    return 2 * part_bytes(nbytes)


class NodeTraffic(NamedTuple):
    """Traffic of a rank in one hierarchical all-to-all between several nodes."""

    between: float  # mean bytes sent to other nodes
    inside: float  # mean bytes sent within the node
    messages: int  # from the busiest rank to other nodes
    most: float  # bytes from the busiest rank to other nodes
    workspace: float  # bytes of scratch memory on the busiest rank


def node_traffic(nbytes: float, nodes: int, ranks_per_node: int) -> NodeTraffic:
    """Return the `NodeTraffic` of one all-to-all over several nodes. ``nbytes``: size of a rank's whole send buffer."""
    messages = -(-(nodes - 1) // ranks_per_node)  # number of nodes for which the busiest rank acts
    away, most = (nodes - 1) / nodes * nbytes, messages * ranks_per_node * nbytes / nodes
    inside = (ranks_per_node - 1) / ranks_per_node * (nbytes / nodes + 2 * away)
    # 2 away: to and from the acting ranks. 4 most: their buffers of incoming, outgoing, arrived and forwarded data.
    return NodeTraffic(away, inside, messages, most, 2 * away + 4 * most)
