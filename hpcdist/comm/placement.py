"""Where this rank runs: its node, its place in the node, and the GPU that follows from it."""

import os
import socket
from dataclasses import dataclass

from hpcdist.arrays import device
from hpcdist.comm.communicator import Communicator
from hpcdist.comm.launcher import Announced
from hpcdist.errors import ConfigurationError


@dataclass(frozen=True)
class Placement:
    """Node and local rank as MPI sees them, the host name, and the cores this process may use."""

    node: int
    nodes: int
    local_rank: int
    local_size: int
    host: str
    cores: tuple[int, ...]


def choose_gpu(said: Announced | None) -> int:
    """Make a GPU current by the launcher's local rank, before MPI starts; return its index (local).

    A CUDA-aware MPI opens its context on the current device during MPI_Init, when no communicator exists yet.
    """
    if said is not None and said.local_rank is None and said.size > 1:
        raise ConfigurationError(
            f"{said.launcher} announces {said.size} ranks but no local rank, so no GPU can be chosen before MPI "
            "starts; export MPI_LOCALRANKID for each rank"
        )
    return device.choose(0 if said is None or said.local_rank is None else said.local_rank)


def locate(comm: Communicator, said: Announced | None) -> Placement:
    """Return the placement of this rank; raise ConfigurationError when MPI and the launcher contradict. Collective."""
    nodes = comm.nodes()
    local_rank = nodes.intra.rank
    declared = getattr(comm, "declared_node", None) is not None
    if said is not None and said.local_rank is not None and not declared and said.local_rank != local_rank:
        raise ConfigurationError(
            f"rank {comm.rank}: MPI finds local rank {local_rank} on this node, {said.launcher} announced "
            f"{said.local_rank}; start the job with one launcher, the one that belongs to the MPI library"
        )
    return Placement(
        node=nodes.index,
        nodes=nodes.count,
        local_rank=local_rank,
        local_size=nodes.intra.size,
        host=socket.gethostname(),
        cores=tuple(sorted(os.sched_getaffinity(0))),
    )


def alone() -> Placement:
    """Return the placement of a process that knows of no other (local)."""
    return Placement(0, 1, 0, 1, socket.gethostname(), tuple(sorted(os.sched_getaffinity(0))))
