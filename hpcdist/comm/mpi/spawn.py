"""Spawned ranks: processes that the survivors of a job start, and spares that sleep until they are needed.

A new process should import all it needs before it calls `start.start_joined`, which starts MPI: the others wait for it
in `spawn`. Only for an MPI with fault tolerance (`Communicator.supports("ulfm")`).
"""

import os
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from hpcdist.comm.communicator import Communicator, Message
from hpcdist.comm.endpoint import Endpoint
from hpcdist.comm.failure import failfast
from hpcdist.comm.handover import Handover
from hpcdist.comm.mpi import ulfm
from hpcdist.comm.mpi.communicator import MpiCommunicator
from hpcdist.errors import UsageError

_INHERITED: Final = ("HPCDIST_", "PYTHONPATH", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_")


@dataclass(frozen=True)
class SpawnMember:
    """Properties that a rank announces in a grown communicator; a new rank knows only its host."""

    host: str
    name: str = ""
    checked: bool = False
    pointers: frozenset[str] = frozenset()
    declared_node: int | None = None


def spawn(comm: Communicator, count: int, arguments: Sequence[str], label: str = "world") -> Communicator:
    """Start ``count`` processes of this Python (`python -P`) with ``arguments``; return a communicator with them.

    Collective over ``comm``, and over the new processes by `join_parent`: their ranks follow those of ``comm``. They
    get the variables of this job from rank 0. Raises an error for which `rank_failures.is_rank_failure` is true where
    a rank dies meanwhile; new processes that cannot join end by themselves.
    """
    assert isinstance(comm, Endpoint)
    if count < 1:
        raise UsageError(f"{count} processes cannot be started; ask for one or more")
    larger = comm.grow(count, ("-P", *arguments), inherited_variables(os.environ), label)
    pointers = frozenset(comm.handover.pointers)
    try:
        larger.allgather_object(SpawnMember(socket.gethostname(), label, comm.checked, pointers, comm.declared_node))
    except Exception:
        larger.revoke()  # releases new processes that wait here for others
        raise
    return larger


def join_parent(mpi: Any) -> Communicator | None:
    """Return, in a process that `spawn` started, the communicator that `spawn` returns to the others; None elsewhere.

    Collective over both. ``mpi`` is mpi4py.MPI, started.
    """
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
    """Return the variables of ``environment`` that new processes get (local)."""
    return {
        name: value
        for name, value in environment.items()
        if name.startswith(_INHERITED) and value and "\n" not in value
    }


def declared_nodes(members: Sequence[SpawnMember]) -> list[int | None]:
    """Return the declared node of each rank; a new rank gets the node with the fewest ranks (local)."""
    nodes = [member.declared_node for member in members]
    known = [node for node in nodes if node is not None]
    for rank, node in enumerate(nodes):
        if node is None and known:
            nodes[rank] = min(sorted(set(known)), key=known.count)
            known.append(nodes[rank] or 0)
    return nodes


def sleep_until_message(comm: Communicator, every_s: float) -> Message:
    """Return the first message, polled for every ``every_s`` seconds: a waiting spare costs little (local).

    Raises an error for which `rank_failures.is_rank_failure` is true when a rank dies or the communicator is revoked.
    """
    failfast.set_recovery_limit(None)
    while (message := comm.poll()) is None:
        time.sleep(every_s)
    return message
