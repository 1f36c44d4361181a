"""Cost model of the allreduces (latency, bandwidth, reduction), and the measurement of its constants.

The formulas are those in the docstrings of the algorithms:

    time = sum over link classes of (messages α + bytes β)  +  reduced bytes γ

along the path of the busiest rank. Links are of three classes: "node" inside a node with all pairs of ranks at work,
"wire" between nodes with one message each way at a time for a node, "crowded" between nodes with all its ranks
sending at once. (R. Thakur, R. Rabenseifner, W. Gropp, "Optimization of collective communication operations in
MPICH", Int. J. High Perform. Comput. Appl. 19 (2005) 49-66.) The model only ranks algorithms, to say which are worth
measuring. One without a formula is measured wherever it runs; the MPI library's has none, because its algorithm is
unknown.

`measure_machine` finds the constants by a few exchanges over each class of links and a few sums, while all ranks do
the same: pairs exchange side by side, as they do inside an algorithm. It takes some hundred messages, the longest of
a megabyte. A time is the shortest of several, on the slowest rank: the model describes the machine, not its other
load.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np

from hpcdist.arrays import backend
from hpcdist.arrays.backend import Array
from hpcdist.collectives.algorithms.hypercube import HALVES_BYTES
from hpcdist.collectives.reduction import ufunc
from hpcdist.comm.communicator import Communicator

NODE, WIRE, CROWDED = "node", "wire", "crowded"


@dataclass(frozen=True, slots=True)
class Topology:
    """Numbers of ranks of the nodes, in the order of their first rank; ranks of a node are consecutive."""

    ranks_per_node: tuple[int, ...]

    @classmethod
    def of(cls, comm: Communicator) -> "Topology":
        """Return the topology of ``comm``. Collective: it is cut by node."""
        return cls(tuple(len(members) for members in comm.nodes().members))

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return sum(self.ranks_per_node)

    @property
    def nodes(self) -> int:
        """Number of nodes."""
        return len(self.ranks_per_node)

    def neighbours(self) -> str:
        """Return the slowest link among those from each rank to the next, of which a node sends on one."""
        return NODE if self.nodes == 1 else WIRE

    def across(self, distance: int) -> str:
        """Return the link of ranks whose numbers differ in the bit ``distance``, all pairs at work."""
        inside = all(ranks % (2 * distance) == 0 for ranks in self.ranks_per_node)
        return NODE if self.nodes == 1 or inside else CROWDED


@dataclass(frozen=True, slots=True)
class LinkParameters:
    """One class of links as measured: α in s a message, β in s a byte."""

    latency_s: float
    s_per_byte: float


@dataclass(frozen=True, slots=True)
class MachineCosts:
    """Costs of messages and sums; a class of links that the topology does not have is not there."""

    links: dict[str, LinkParameters]
    reduce_s_per_byte: float


@dataclass(frozen=True, slots=True)
class LinkTraffic:
    """Messages over one class of links: their number, and their bytes together."""

    link: str
    messages: int
    nbytes: float


@dataclass(frozen=True, slots=True)
class AllreduceCost:
    """Work of the busiest rank, one after the other; a send and a receive at the same time count as one message."""

    parts: tuple[LinkTraffic, ...]
    reduced_bytes: float

    @property
    def messages(self) -> int:
        """Number of messages over all classes of links."""
        return sum(part.messages for part in self.parts)

    @property
    def nbytes(self) -> float:
        """Bytes over all classes of links."""
        return sum(part.nbytes for part in self.parts)

    def seconds(self, machine: MachineCosts) -> float:
        """Return the time that the model predicts."""
        links = [(machine.links[part.link], part) for part in self.parts if part.messages]
        sent = sum(part.messages * link.latency_s + part.nbytes * link.s_per_byte for link, part in links)
        return sent + self.reduced_bytes * machine.reduce_s_per_byte


Formula = Callable[[Topology, float], AllreduceCost]


def ring_cost(topology: Topology, nbytes: float) -> AllreduceCost:
    """Return the cost of 2 (p-1) steps, each as slow as the slowest link of the ring."""
    p = topology.ranks
    share = (p - 1) / p * nbytes
    return AllreduceCost((LinkTraffic(topology.neighbours(), 2 * (p - 1), 2 * share),), share)


def all_to_all_cost(topology: Topology, nbytes: float) -> AllreduceCost:
    """Return the cost of p-1 chunks to all others, over crowded links to other nodes, and the ring's all-gather."""
    p, widest = topology.ranks, max(topology.ranks_per_node)
    chunk = nbytes / p
    inside, outside = widest - 1, p - widest
    spread = [LinkTraffic(NODE, inside, inside * chunk), LinkTraffic(CROWDED, outside, outside * chunk)]
    gathered = LinkTraffic(topology.neighbours(), p - 1, (p - 1) * chunk)
    return AllreduceCost((*spread, gathered), (p - 1) * chunk)


def recursive_doubling_cost(topology: Topology, nbytes: float) -> AllreduceCost:
    """Return the cost of sending all bytes to the partner in every bit."""
    folded, reduced = _fold(topology, nbytes)
    steps = [LinkTraffic(topology.across(distance), 1, nbytes) for distance in _bits(topology.ranks)]
    return AllreduceCost((*folded, *steps), reduced + len(steps) * nbytes)


def rabenseifner_cost(topology: Topology, nbytes: float) -> AllreduceCost:
    """Return the cost of half, a quarter, ... to the partner in every bit, and back; pairs first where p is no 2^k."""
    paired = topology.ranks & (topology.ranks - 1) != 0
    folded, reduced = _fold(topology, nbytes)
    if paired and nbytes >= HALVES_BYTES:
        folded, reduced = (LinkTraffic(topology.across(1), 2, nbytes),), nbytes / 2
    distances = list(_bits(topology.ranks))
    cube = 2 * max(distances, default=0) or 1
    steps = [LinkTraffic(topology.across(distance), 2, 2 * nbytes * distance / cube) for distance in distances]
    return AllreduceCost((*folded, *steps), reduced + nbytes * sum(distances) / cube)


def circulant_cost(topology: Topology, nbytes: float) -> AllreduceCost:
    """Return the cost of the ring's bytes in 2 ceil(log2 p) steps; a second message in a step is not counted."""
    p = topology.ranks
    share = (p - 1) / p * nbytes
    across = NODE if topology.nodes == 1 else CROWDED
    return AllreduceCost((LinkTraffic(across, 2 * (p - 1).bit_length(), 2 * share),), share)


def ring_bidirectional_cost(topology: Topology, nbytes: float) -> AllreduceCost:
    """Return the cost of the ring's bytes in twice as many messages, as if no two of them travelled at once."""
    part, share = ring_cost(topology, nbytes).parts[0], ring_cost(topology, nbytes).reduced_bytes
    return AllreduceCost((LinkTraffic(part.link, 2 * part.messages, part.nbytes),), share)


def _bits(ranks: int) -> Iterator[int]:
    """Yield 1, 2, 4, ... below the largest power of two in ``ranks``."""
    distance = 1
    while 2 * distance <= ranks:
        yield distance
        distance *= 2


def _fold(topology: Topology, nbytes: float) -> tuple[tuple[LinkTraffic, ...], float]:
    """Return what `hypercube.fold` adds where the number of ranks is no power of two: messages, and bytes reduced."""
    if topology.ranks & (topology.ranks - 1) == 0:
        return (), 0.0
    return (LinkTraffic(topology.across(1), 2, 2 * nbytes),), nbytes


FORMULAS: Final[dict[str, Formula]] = {
    "ring": ring_cost,
    "ring_bidirectional": ring_bidirectional_cost,
    "circulant": circulant_cost,
    "all_to_all": all_to_all_cost,
    "recursive_doubling": recursive_doubling_cost,
    "rabenseifner": rabenseifner_cost,
}


Clock = Callable[[], float]

SHORT_BYTES: Final = 8
LONG_BYTES: Final = 1 << 20
SHORT_TIMES, LONG_TIMES, SUM_TIMES = 30, 4, 5


def measure_machine(
    comm: Communicator, everyone: Communicator, topology: Topology, like: Array, clock: Clock = time.perf_counter
) -> MachineCosts:
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
    return MachineCosts(links, slowest_rank(everyone, _sum_s(on, clock)) / LONG_BYTES)


def slowest_rank(everyone: Communicator, *seconds: float) -> float:
    """Return the greatest of ``seconds`` of all ranks. Collective."""
    longest = np.array([max(seconds)])
    everyone.allreduce(longest, "max")
    return float(longest[0])


def _link(comm: Communicator | None, everyone: Communicator, on: str, clock: Clock) -> LinkParameters:
    """Return the link between the ranks 2i and 2i+1 of ``comm``, all pairs at once. With None only synchronise."""
    partner = None if comm is None else comm.rank ^ 1
    if comm is None or partner is None or partner >= comm.size:
        comm = None
    measured_s = []
    for nbytes, times in ((SHORT_BYTES, SHORT_TIMES), (LONG_BYTES, LONG_TIMES)):
        everyone.barrier()
        seconds = 0.0
        if comm is not None and partner is not None:
            out, into = (backend.zeros(nbytes, np.dtype(np.uint8), on) for _ in range(2))
            seconds = _shortest_s(lambda: comm.sendrecv(out, partner, into, partner), times, clock)  # noqa: B023
        measured_s.append(slowest_rank(everyone, seconds))
    latency_s, long_s = measured_s
    return LinkParameters(latency_s, max(0.0, long_s - latency_s) / LONG_BYTES)


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
