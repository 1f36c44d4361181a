"""Costs of the rows of a layer that go to the experts of other ranks and come back: bytes sent, copied, and in memory.

One place for the planner and for the tests that hold real runs against it. Of n bytes of rows on a rank (k N numbers
of width h, for N tokens with k of the E experts each), which go out and come back in the forward and in the backward,
with e ranks and even loads, so that no expert is lent:

                through memory of the node            by messages
                (`hpcdist.strategies.expert.shared`)  (`hpcdist.strategies.expert.model.TravellingRows`)
    sent        nothing                               (e-1)/e n four times, (e-1)/e 8 E for int64 counts once
    copied      n each time, and gradients that go    n each time, between the order of the experts and of the ranks
                out once more
    kept        as on one rank                        n more: rows that leave are kept beside those that come
    scratch     n more: gradients that come           4 n more: what arrives or leaves, gradients, results
    shared      5/2 n: rows and results, each with    nothing
                a quarter more

Between nodes messages go by way of ranks that stand for their nodes (`NodeTraffic`), which takes workspaces.
"""

from typing import Final, NamedTuple

from hpcdist.collectives.node.published import part_bytes

# Times that the bytes of a turn are copied beside it: through memory of the node, and by messages.
COPIES: Final = {"counts": (0, 0), "rows": (1, 1), "gradients": (2, 1), "results": (1, 1)}


def counts_bytes(experts: int) -> int:
    """Return the bytes of how many rows a rank has for each of all experts, int64, its own included."""
    return 8 * experts


def published_bytes(nbytes: int) -> int:
    """Return the memory of the node that a rank takes for rows and results of ``nbytes`` each."""
    return 2 * part_bytes(nbytes)


class NodeTraffic(NamedTuple):
    """All-to-all of a rank between nodes, as `hpcdist.collectives.algorithms.hierarchical_all_to_all` makes it.

    ``between`` and ``inside`` are bytes that it sends to other nodes and within its own, in the mean over the ranks.
    The busiest one sends ``messages`` to other nodes, of ``most`` bytes in all, and has ``workspace``.
    """

    between: float
    inside: float
    messages: int
    most: float
    workspace: float


def node_traffic(nbytes: float, nodes: int, each: int) -> NodeTraffic:
    """Return the traffic of a rank with ``nbytes``, its own part included, on ``nodes`` with ``each`` ranks."""
    messages = -(-(nodes - 1) // each)  # to so many nodes the busiest rank stands for its own
    away, most = (nodes - 1) / nodes * nbytes, messages * each * nbytes / nodes
    inside = (each - 1) / each * (nbytes / nodes + 2 * away)
    # To those that stand for the node and from them; with these, what comes, leaves, arrives and is handed out.
    return NodeTraffic(away, inside, messages, most, 2 * away + 4 * most)
