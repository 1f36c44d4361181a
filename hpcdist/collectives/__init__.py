"""Collective algorithms: functions of a communicator and a buffer, one file each.

`allreduce` is what strategies call. The algorithms behind its names can be called by themselves, and so can the two
halves of the ring: `reduce_scatter` and `all_gather`. `SHARDED` has the two halves by algorithm, for shards.

Costs in the docstrings are for n bytes on p ranks: α is the latency of a message in s, β the time on the wire in
s/byte, γ the time to reduce in s/byte.
"""

from hpcdist.collectives import node_flow_shared, node_shared, on_device, workspace
from hpcdist.collectives.all_to_all import ALL_TO_ALL, AllToAllFunction, all_to_all, all_to_all_allreduce
from hpcdist.collectives.broadcast import BROADCAST, BroadcastFunction, broadcast
from hpcdist.collectives.calls import ALLREDUCE, ON_GPUS, allreduce
from hpcdist.collectives.circulant import circulant_allreduce
from hpcdist.collectives.double_tree import double_tree_allreduce
from hpcdist.collectives.fixed_tree import FixedTree
from hpcdist.collectives.hierarchical import hierarchical, hierarchical_allreduce
from hpcdist.collectives.native import native_allreduce
from hpcdist.collectives.node_shared import node_shared_allreduce
from hpcdist.collectives.rabenseifner import rabenseifner_allreduce
from hpcdist.collectives.recursive_doubling import recursive_doubling_allreduce
from hpcdist.collectives.reduction import AllreduceFunction
from hpcdist.collectives.ring import all_gather, reduce_scatter, ring_allreduce, ring_bidirectional_allreduce
from hpcdist.collectives.sharded import SHARDED, SHARDED_ON_GPUS, Sharding
from hpcdist.collectives.workspace import account
from hpcdist.comm.communicator import Communicator

__all__ = [
    "ALLREDUCE",
    "ALL_TO_ALL",
    "BROADCAST",
    "ON_GPUS",
    "SHARDED",
    "SHARDED_ON_GPUS",
    "AllToAllFunction",
    "AllreduceFunction",
    "BroadcastFunction",
    "FixedTree",
    "Sharding",
    "account",
    "all_gather",
    "all_to_all",
    "all_to_all_allreduce",
    "allreduce",
    "broadcast",
    "circulant_allreduce",
    "double_tree_allreduce",
    "hierarchical",
    "hierarchical_allreduce",
    "native_allreduce",
    "node_shared_allreduce",
    "rabenseifner_allreduce",
    "recursive_doubling_allreduce",
    "reduce_scatter",
    "release",
    "ring_allreduce",
    "ring_bidirectional_allreduce",
]


def release(comm: Communicator) -> None:
    """Give back the scratch memory of this thread and what was shared for ``comm``. Collective over ``comm``.

    Only needed where the memory is wanted for something else: later calls take it again.
    """
    node_flow_shared.release(comm)
    node_shared.release(comm)
    on_device.release(comm)
    workspace.release()
