"""Placement of a rank: its node, local rank and cores, and the GPU chosen by the local rank."""

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
    """Location of a rank: node (found by MPI), local rank (announced by the launcher), host name and cores."""

    node: int
    nodes: int
    local_rank: int
    host: str
    cores: tuple[int, ...]


def choose_gpu(announced: LaunchEnvironment | None) -> int:
    """Select the GPU with this process's local rank, before MPI_Init. Return the index of the GPU. Local."""
    if announced is not None and announced.local_rank is None and announced.size > 1:
        raise ConfigurationError(
            f"the launcher {announced.launcher} announces {announced.size} ranks but no local rank, so no GPU can be "
            "chosen before MPI starts; export MPI_LOCALRANKID for each rank"
        )
    return device.choose(0 if announced is None or announced.local_rank is None else announced.local_rank)


def locate(comm: Communicator, announced: LaunchEnvironment | None) -> Placement:
    """Return this rank's placement. Raises ConfigurationError if the launcher's local ranks are invalid. Collective."""
    nodes = comm.nodes()
    local_rank = nodes.intra.rank
    declared = getattr(comm, "declared_node", None) is not None
    if announced is not None and not declared:
        local_ranks = nodes.intra.allgather_object(announced.local_rank)
        if None not in local_ranks:
            # The announced local ranks may have any order.
            if not is_permutation(local_ranks):
                raise ConfigurationError(
                    f"rank {comm.rank}: MPI finds {len(local_ranks)} ranks on this node, to which the launcher "
                    f"{announced.launcher} announced the local ranks {shown(local_ranks)}; expected each number from 0 "
                    f"to {len(local_ranks) - 1} once; start the job with only the launcher of this MPI library"
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
    """Return True if ``local_ranks`` are 0 .. n - 1 in any order."""
    return sorted(local_ranks) == list(range(len(local_ranks)))


def shown(local_ranks: Sequence[int]) -> str:
    """Return ``local_ranks`` as text for error messages: at most `MOST_SHOWN` numbers."""
    return " ".join(map(str, local_ranks[:MOST_SHOWN])) + (" ..." if len(local_ranks) > MOST_SHOWN else "")


def alone() -> Placement:
    """Return the placement of a process that is the only rank of its job. Local."""
    return Placement(0, 1, 0, socket.gethostname(), tuple(sorted(os.sched_getaffinity(0))))
