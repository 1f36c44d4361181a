"""Compression between nodes only: the ranks of a node sum in float32, and what leaves the node is compressed.

Each of the l ranks of a node has its share of the sum of the node, and exchanges it with the ranks of the same number
in the other nodes. With n values on k nodes a rank sends 2 n 4 (l-1)/l bytes within its node, and what the way between
nodes sends of n/l values for k ranks. Links within a node are fast, and a float32 sum there costs no error.
"""

from itertools import pairwise

import numpy as np

from hpcdist.arrays.backend import Array
from hpcdist.arrays.ranges import Range
from hpcdist.collectives.sharded import SHARDED
from hpcdist.comm.communicator import Communicator
from hpcdist.errors import ConfigurationError
from hpcdist.strategies.compressed.low_rank import LowRank
from hpcdist.strategies.compressed.ways import Way


def between_nodes(data: Communicator) -> Communicator:
    """Return the ranks that stand for the same share, one of each node. Collective over ``data``.

    Raises ConfigurationError, on every rank, where nodes have different numbers of ranks.
    """
    nodes = data.nodes()
    if not nodes.uniform:
        raise ConfigurationError(
            f"compression.across_nodes = true with {', '.join(str(len(own)) for own in nodes.members)} data ranks on "
            f"{nodes.count} nodes: each needs as many as the others; start equally many ranks on each node, or set it "
            "to false"
        )
    return nodes.peers


class AcrossNodes:
    """See `hpcdist.strategies.compressed.ways.Way`; ``way`` is that over `between_nodes`."""

    def __init__(self, data: Communicator, way: Way) -> None:
        self._way = way
        self._node, self._sharding = data.nodes().intra, SHARDED["ring"]

    def _shares(self, part: Range) -> list[Range]:
        """Return what each rank of the node stands for, from the start of ``part``: whole tensors for factors."""
        shares = self._sharding.shares(self._node, part.size, np.dtype(np.float32).itemsize)
        if not isinstance(self._way, LowRank):
            return shares
        starts = [where.start - part.start for _, where in self._way.layout.within(part)]
        edges = [0, *(min([*starts, part.size], key=lambda at: abs(at - share.stop)) for share in shares[:-1])]
        return [Range(start, stop) for start, stop in pairwise([*edges, part.size])]

    @property
    def passes(self) -> tuple[float, float]:
        """Those of the way between nodes, for a share."""
        encodes, decodes = self._way.passes
        return encodes / self._node.size, decodes / self._node.size

    def kept(self, part: Range) -> list[Range]:
        """Return what the way between nodes keeps of this rank's share."""
        own = self._shares(part)[self._node.rank].shift(part.start)
        return self._way.kept(own) if own else []

    def allreduce(self, values: Array, part: Range) -> None:
        """Sum ``values`` (part.size,) in place. Collective over the data axis."""
        shares = self._shares(part)
        own = shares[self._node.rank]
        self._sharding.reduce_scatter(self._node, values, shares)
        if own:
            self._way.allreduce(values[own.slice], own.shift(part.start))
        self._sharding.all_gather(self._node, values, shares)
