"""What messages and sums take here: a few exchanges over each class of links, and a few sums.

Everything is measured while all do the same: pairs of ranks exchange side by side, as they do inside an algorithm. It
takes some hundred messages, the longest of a megabyte. A time is the shortest of several, on the slowest rank: the
model is about the machine, not about what else runs on it.
"""

import time
from collections.abc import Callable
from typing import Final

import numpy as np

from hpcdist.arrays import backend
from hpcdist.arrays.backend import Array
from hpcdist.collectives.costs import CROWDED, NODE, WIRE, Link, Machine, Topology
from hpcdist.collectives.reduction import ufunc
from hpcdist.comm.communicator import Communicator

Clock = Callable[[], float]

SHORT_BYTES: Final = 8
LONG_BYTES: Final = 1 << 20
SHORT_TIMES, LONG_TIMES, SUM_TIMES = 30, 4, 5


def probe(
    comm: Communicator, everyone: Communicator, topology: Topology, like: Array, clock: Clock = time.perf_counter
) -> Machine:
    """Return the machine as ``comm`` sees it, the same on all ranks of ``everyone``. Collective over both.

    ``topology`` says which classes of links are of interest, the same on all ranks. ``like`` is an array that lives
    where the buffers to be reduced will live.
    """
    nodes = comm.nodes()
    on = "gpu" if backend.is_device(like) else "cpu"
    links = {}
    if max(topology.ranks_per_node) > 1:
        links[NODE] = _link(nodes.intra, everyone, on, clock)
    if topology.nodes > 1:
        across = nodes.peers if nodes.uniform else nodes.leaders
        links[CROWDED] = _link(across, everyone, on, clock)
        links[WIRE] = _link(nodes.leaders, everyone, on, clock)
    return Machine(links, slowest(everyone, _sum_s(on, clock)) / LONG_BYTES)


def slowest(everyone: Communicator, *seconds: float) -> float:
    """Return the greatest of ``seconds`` of all ranks. Collective."""
    found = np.array([max(seconds)])
    everyone.allreduce(found, "max")
    return float(found[0])


def _link(comm: Communicator | None, everyone: Communicator, on: str, clock: Clock) -> Link:
    """Return the link between the ranks 2i and 2i+1 of ``comm``, all pairs at once; None looks on."""
    partner = None if comm is None else comm.rank ^ 1
    if comm is None or partner is None or partner >= comm.size:
        comm = None
    found = []
    for nbytes, times in ((SHORT_BYTES, SHORT_TIMES), (LONG_BYTES, LONG_TIMES)):
        everyone.barrier()
        seconds = 0.0
        if comm is not None and partner is not None:
            out, into = (backend.zeros(nbytes, np.dtype(np.uint8), on) for _ in range(2))
            seconds = _shortest_s(lambda: comm.sendrecv(out, partner, into, partner), times, clock)  # noqa: B023
        found.append(slowest(everyone, seconds))
    latency_s, long_s = found
    return Link(latency_s, max(0.0, long_s - latency_s) / LONG_BYTES)


def _sum_s(on: str, clock: Clock) -> float:
    """Return the time of adding a megabyte to another."""
    left, right = (backend.zeros(LONG_BYTES // 4, np.dtype(np.float32), on) for _ in range(2))
    add = ufunc(left, "sum")

    def once() -> None:
        add(left, right, right)
        backend.synchronise(right)

    return _shortest_s(once, SUM_TIMES, clock)


def _shortest_s(call: Callable[[], None], times: int, clock: Clock) -> float:
    call()  # opens the connection, touches the memory
    seconds = []
    for _ in range(times):
        began = clock()
        call()
        seconds.append(clock() - began)
    return min(seconds)
