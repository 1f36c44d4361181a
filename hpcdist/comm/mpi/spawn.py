"""Spawned ranks: processes that the survivors of a job start, and spares that sleep until they are needed.

Only for an MPI with fault tolerance (`Communicator.supports("ulfm")`). A new process should import all modules before
it calls `start.start_joined`, because the other ranks wait for it in `spawn`.
"""

import os
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from hpcdist.comm.communicator import Communicator
from hpcdist.comm.failure import failfast
from hpcdist.comm.handover import Handover
from hpcdist.comm.mpi import ulfm
from hpcdist.comm.mpi.communicator import MpiCommunicator
from hpcdist.comm.transport import Message
from hpcdist.constants import THREAD_VARIABLES
from hpcdist.errors import UsageError

_INHERITED: Final = ("HPCDIST_", "PYTHONPATH", *THREAD_VARIABLES, "NUMBA_")


@dataclass(frozen=True)
class SpawnMember:
    """Host of a rank, and its communicator's name and settings. All ranks exchange these after new ranks joined."""

    host: str
    name: str = ""
    checked: bool = False  # ranks compare their collective calls
    pointers: frozenset[str] = frozenset()  # operations that accept GPU pointers
    declared_node: int | None = None  # number of the simulated node, or None


def spawn(comm: Communicator, count: int, arguments: Sequence[str], label: str = "world") -> Communicator:
    """Start ``count`` Python processes. Return the communicator of the old and the new ranks. Collective.

    ``arguments``: Python command line, whose program must call `join_parent`. ``label``: name of the new communicator.
    """
    assert isinstance(comm, Communicator)
    if count < 1:
        raise UsageError(f"the number of processes to start must be at least 1, got {count}")
    larger = comm.grow(count, ("-P", *arguments), inherited_variables(os.environ), label)
    pointers = frozenset(comm.handover.pointers)
    try:
        larger.allgather_object(SpawnMember(socket.gethostname(), label, comm.checked, pointers, comm.declared_node))
    # `rank_failures.is_rank_failure` is true for the error after a rank failure.
    except Exception:
        larger.revoke()  # releases new processes that wait here for others
        raise
    return larger


def join_parent(mpi: Any) -> Communicator | None:
    """Return the communicator of the old and new ranks if `spawn` started this process, else None. Collective."""
    bare = ulfm.join_parent(mpi)
    if bare is None:
        return None
    handover = Handover(device_pointers=False)
    comm = MpiCommunicator(mpi, bare, "world", handover)
    members = comm.allgather_object(SpawnMember(socket.gethostname()))
    first = members[0]
    comm.name, comm.checked, handover.pointers = first.name, first.checked, first.pointers
    comm.declared_node = declared_nodes(members)[comm.rank]
    return comm


def inherited_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of ``environment`` to pass to new processes, such as PYTHONPATH and HPCDIST_*. Local."""
    return {
        name: value
        for name, value in environment.items()
        if name.startswith(_INHERITED) and value and "\n" not in value
    }


def declared_nodes(members: Sequence[SpawnMember]) -> list[int | None]:
    """Return a list of the simulated node number of each rank in ``members``, all None without simulation. Local."""
    nodes = [member.declared_node for member in members]
    declared = [node for node in nodes if node is not None]
    for rank, node in enumerate(nodes):
        # A new rank gets the node with the fewest ranks.
        if node is None and declared:
            nodes[rank] = min(sorted(set(declared)), key=declared.count)
            declared.append(nodes[rank] or 0)
    return nodes


def sleep_until_message(comm: Communicator, every_s: float) -> Message:
    """Poll every ``every_s`` seconds until a message arrives. Return a `Message` to receive its data. Local."""
    failfast.set_recovery_limit(None)
    while (message := comm.poll()) is None:
        time.sleep(every_s)
    return message
