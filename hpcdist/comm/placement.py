"""Placement of a rank: its node, its local rank, its cores, and the GPU that follows from the local rank."""

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from hpcdist.arrays.gpu import device
from hpcdist.comm.communicator import Communicator
from hpcdist.comm.launch.environment import LaunchEnvironment
from hpcdist.errors import ConfigurationError

MOST_SHOWN: Final = 8


@dataclass(frozen=True)
class Placement:
    """Node as MPI finds it, local rank as the launcher numbers it, host name, and the cores of this process."""

    node: int
    nodes: int
    local_rank: int
    host: str
    cores: tuple[int, ...]


def choose_gpu(announced: LaunchEnvironment | None) -> int:
    """Make a GPU current by the launcher's local rank, before MPI starts; return its index (local).

    A CUDA-aware MPI opens its context on the current device during MPI_Init, when no communicator exists yet.
    """
    if announced is not None and announced.local_rank is None and announced.size > 1:
        raise ConfigurationError(
            f"{announced.launcher} announces {announced.size} ranks but no local rank, so no GPU can be chosen before "
            "MPI starts; export MPI_LOCALRANKID for each rank"
        )
    return device.choose(0 if announced is None or announced.local_rank is None else announced.local_rank)


def locate(comm: Communicator, announced: LaunchEnvironment | None) -> Placement:
    """Return the placement of this rank. Collective over ``comm``.

    The local rank is the announced one, since the GPU was chosen by it, else the rank's index on the node. The two may
    differ: Open MPI numbers the ranks of a node by package or NUMA domain where it maps them so. Raises
    ConfigurationError where the announced numbers of a node are not 0 .. n - 1 in some order: then the launcher does
    not belong to this MPI.
    """
    nodes = comm.nodes()
    local_rank = nodes.intra.rank
    declared = getattr(comm, "declared_node", None) is not None
    if announced is not None and not declared:
        local_ranks = nodes.intra.allgather_object(announced.local_rank)
        if None not in local_ranks:
            if not is_permutation(local_ranks):
                raise ConfigurationError(
                    f"rank {comm.rank}: {announced.launcher} announced the local ranks {shown(local_ranks)} to the "
                    f"{len(local_ranks)} ranks that MPI finds on this node; expected each of 0 to "
                    f"{len(local_ranks) - 1} once; start the job with one launcher, the one that belongs to the MPI "
                    "library"
                )
            local_rank = local_ranks[nodes.intra.rank]
    return Placement(
        node=nodes.index,
        nodes=nodes.count,
        local_rank=local_rank,
        host=socket.gethostname(),
        cores=tuple(sorted(os.sched_getaffinity(0))),
    )


def is_permutation(local_ranks: Sequence[int]) -> bool:
    """Return whether the numbers are 0 .. n - 1 in some order."""
    return sorted(local_ranks) == list(range(len(local_ranks)))


def shown(local_ranks: Sequence[int]) -> str:
    """Return the first `MOST_SHOWN` numbers as text."""
    return " ".join(map(str, local_ranks[:MOST_SHOWN])) + (" ..." if len(local_ranks) > MOST_SHOWN else "")


def alone() -> Placement:
    """Return the placement of a process on its own (local)."""
    return Placement(0, 1, 0, socket.gethostname(), tuple(sorted(os.sched_getaffinity(0))))
