"""Collective operations for strategies: allreduce, reduce-scatter, all-gather, broadcast and all-to-all.

Begin with `allreduce` and `Sharding`. Functions for users are in `arrays`. Floor 2: imports comm, arrays and errors.

Costs in docstrings are for n bytes on p ranks. α: latency of a message in s. β and γ: transfer time and reduction time
in s/byte.
"""

from hpcdist.collectives import nccl, peer_memory, segments
from hpcdist.collectives.algorithms.all_to_all import ALL_TO_ALL, AllToAllFunction, all_to_all, all_to_all_allreduce
from hpcdist.collectives.algorithms.broadcast import BROADCAST, BroadcastFunction, broadcast
from hpcdist.collectives.algorithms.circulant import circulant_allreduce
from hpcdist.collectives.algorithms.double_tree import double_tree_allreduce
from hpcdist.collectives.algorithms.fixed_tree import FixedTree
from hpcdist.collectives.algorithms.hierarchical import hierarchical, hierarchical_allreduce
from hpcdist.collectives.algorithms.hypercube import rabenseifner_allreduce, recursive_doubling_allreduce
from hpcdist.collectives.algorithms.ring import all_gather, reduce_scatter, ring_allreduce, ring_bidirectional_allreduce
from hpcdist.collectives.dispatch import ALLREDUCE, ON_GPUS, allreduce
from hpcdist.collectives.node import flow, shared_memory
from hpcdist.collectives.node.shared_memory import node_shared_allreduce
from hpcdist.collectives.reduction import AllreduceFunction, native_allreduce
from hpcdist.collectives.segments import account
from hpcdist.collectives.sharded import SHARDED, SHARDED_ON_GPUS, Sharding
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
    """Free this thread's scratch buffers, and the shared memory and NCCL communicator of ``comm``. Collective."""
    flow.release(comm)
    shared_memory.release(comm)
    peer_memory.release(comm)
    nccl.release(comm)
    segments.release()
