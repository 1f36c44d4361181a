"""Which levels of the cuts of ZeRO carry payloads: all of them or, across nodes only, those between the nodes.

Sums within a node and gathers within a node then are dense: a level whose ranks share a node has fast links. A level
that has several ranks of several nodes is neither, and is refused: with the ranks of a node as one of the degrees the
levels on either side of it are one or the other (hpZ of ZeRO++, Wang et al., arXiv:2306.10209).
"""

from typing import Final

import numpy as np

from hpcdist.arrays.store import FlatStore
from hpcdist.collectives.workspace import scratch
from hpcdist.comm.communicator import Communicator
from hpcdist.errors import ConfigurationError
from hpcdist.strategies.zero.levels import GRADIENTS, OPTIMIZER, PARAMETERS, WHOLE, Levels

FLOAT32: Final = np.dtype(np.float32)
REPLICAS: Final = OPTIMIZER  # the index, behind those of the levels, of those who own the same cuts
_NAMES: Final = {
    WHOLE: "zero.parameters",
    PARAMETERS: "zero.gradients within those of zero.parameters",
    GRADIENTS: "zero.optimizer within those of zero.gradients",
    REPLICAS: "the replicas of zero.optimizer",
}


def coded(data: Communicator, levels: Levels, *, across_nodes: bool) -> list[bool]:
    """Return whether payloads go over each level and, last, over the replicas. Collective over ``data``.

    Raises ConfigurationError, on every rank, where a level is neither within nodes nor between them.
    """
    comms = [*levels.comms, levels.replicas]
    if not across_nodes:
        return [comm is not None for comm in comms]
    own = [_kind(comm) for comm in comms]
    for index, kinds in enumerate(zip(*data.allgather_object(own), strict=True)):
        if "mixed" in kinds or len(set(kinds)) > 1:
            raise ConfigurationError(
                f"compression.across_nodes = true, but the ranks of {_NAMES[index]} are neither all on one node nor "
                "all on nodes of their own: set zero.parameters or zero.gradients to the data ranks of a node, so that "
                "one level lies within nodes and the next between them, or compression.across_nodes = false"
            )
    return [kind == "between" for kind in own]


def _kind(comm: Communicator | None) -> str:
    """Return where the ranks of a level are. Collective over ``comm``."""
    if comm is None:
        return "alone"
    nodes = comm.nodes()
    if nodes.count == 1:
        return "within"
    return "between" if all(len(members) == 1 for members in nodes.members) else "mixed"


def widened(store: FlatStore, layer: int, cut: int, levels: Levels) -> FlatStore:
    """Return float32 memory for cut ``cut`` of a layer of the 16-bit ``store``; the next call takes it back (local)."""
    like = store.array
    return FlatStore(
        store.layout,
        FLOAT32,
        levels.cuts[layer][cut],
        allocate=lambda size, dtype: scratch("compressed.widened", size, dtype, like),
    )
