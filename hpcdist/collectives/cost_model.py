"""Cost model of the allreduces (latency, bandwidth, reduction), and the measurement of its constants.

The predicted time, along the path of the busiest rank, is

    time = sum over link classes of (messages α + bytes β)  +  reduced bytes γ

Link classes: "node" is inside a node with all pairs of ranks active; "wire" is between nodes with one message each way
at a time per node; "crowded" is between nodes with all ranks sending (R. Thakur et al., Int. J. High Perform. Comput.
Appl. 19 (2005) 49-66).
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
    """Number of ranks on each node. The ranks of a node are consecutive. Nodes are sorted by their lowest rank."""

    ranks_per_node: tuple[int, ...]

    @classmethod
    def of(cls, comm: Communicator) -> "Topology":
        """Return the topology of ``comm``. Collective over ``comm``."""
        return cls(tuple(len(members) for members in comm.nodes().members))

    @property
    def ranks(self) -> int:
        """Total number of ranks."""
        return sum(self.ranks_per_node)

    @property
    def nodes(self) -> int:
        return len(self.ranks_per_node)

    def neighbours(self) -> str:
        """Return the slowest link class in a ring of all ranks: NODE (inside a node) or WIRE (between nodes)."""
        return NODE if self.nodes == 1 else WIRE

    def across(self, distance: int) -> str:
        """Return the link class of an exchange in which every rank r sends to rank r XOR ``distance``.

        The link class is NODE if all messages stay within nodes, else CROWDED: all ranks of a node send to other nodes.
        """
        inside = all(ranks % (2 * distance) == 0 for ranks in self.ranks_per_node)
        return NODE if self.nodes == 1 or inside else CROWDED


@dataclass(frozen=True, slots=True)
class LinkParameters:
    """Measured costs of one link class: seconds per message (latency α) and seconds per byte (β)."""

    latency_s: float
    s_per_byte: float


@dataclass(frozen=True, slots=True)
class MachineCosts:
    """Measured costs for `AllreduceCost`: message costs of each link class, and the seconds to sum one byte."""

    links: dict[str, LinkParameters]
    reduce_s_per_byte: float


@dataclass(frozen=True, slots=True)
class LinkTraffic:
    """Traffic over one link class: number of messages and their total bytes."""

    link: str
    messages: int
    nbytes: float


@dataclass(frozen=True, slots=True)
class AllreduceCost:
    """Cost of an allreduce: the messages and reduced bytes of the busiest rank. A send-receive is one message."""

    parts: tuple[LinkTraffic, ...]
    reduced_bytes: float

    @property
    def messages(self) -> int:
        """Number of messages of the busiest rank, over all link classes."""
        return sum(part.messages for part in self.parts)

    @property
    def nbytes(self) -> float:
        """Number of bytes in the messages of the busiest rank, over all link classes."""
        return sum(part.nbytes for part in self.parts)

    def seconds(self, machine: MachineCosts) -> float:
        """Return the predicted time of the allreduce on ``machine`` in seconds."""
        links = [(machine.links[part.link], part) for part in self.parts if part.messages]
        sent = sum(part.messages * link.latency_s + part.nbytes * link.s_per_byte for link, part in links)
        return sent + self.reduced_bytes * machine.reduce_s_per_byte


Formula = Callable[[Topology, float], AllreduceCost]


def ring_cost(topology: Topology, nbytes: float) -> AllreduceCost:
    """Return the cost of a ring allreduce on p ranks: 2 (p - 1) messages over the slowest link."""
    p = topology.ranks
    share = (p - 1) / p * nbytes
    return AllreduceCost((LinkTraffic(topology.neighbours(), 2 * (p - 1), 2 * share),), share)


def all_to_all_cost(topology: Topology, nbytes: float) -> AllreduceCost:
    """Return the cost (messages and bytes) of an allreduce by an all-to-all reduce-scatter and a ring all-gather."""
    p, widest = topology.ranks, max(topology.ranks_per_node)
    chunk = nbytes / p
    inside, outside = widest - 1, p - widest
    spread = [LinkTraffic(NODE, inside, inside * chunk), LinkTraffic(CROWDED, outside, outside * chunk)]
    gathered = LinkTraffic(topology.neighbours(), p - 1, (p - 1) * chunk)
    return AllreduceCost((*spread, gathered), (p - 1) * chunk)


def recursive_doubling_cost(topology: Topology, nbytes: float) -> AllreduceCost:
    """Return the cost of recursive doubling on p ranks: log2(p) exchanges of the whole buffer."""
    folded, reduced = _fold(topology, nbytes)
    steps = [LinkTraffic(topology.across(distance), 1, nbytes) for distance in _bits(topology.ranks)]
    return AllreduceCost((*folded, *steps), reduced + len(steps) * nbytes)


def rabenseifner_cost(topology: Topology, nbytes: float) -> AllreduceCost:
    """Return the cost of an allreduce of ``nbytes`` bytes by recursive halving and doubling."""
    paired = topology.ranks & (topology.ranks - 1) != 0
    folded, reduced = _fold(topology, nbytes)
    if paired and nbytes >= HALVES_BYTES:
        folded, reduced = (LinkTraffic(topology.across(1), 2, nbytes),), nbytes / 2
    distances = list(_bits(topology.ranks))
    cube = 2 * max(distances, default=0) or 1
    steps = [LinkTraffic(topology.across(distance), 2, 2 * nbytes * distance / cube) for distance in distances]
    return AllreduceCost((*folded, *steps), reduced + nbytes * sum(distances) / cube)


def circulant_cost(topology: Topology, nbytes: float) -> AllreduceCost:
    """Return the cost of the circulant algorithm on p ranks: the bytes of a ring in 2 ceil(log2 p) messages."""
    p = topology.ranks
    share = (p - 1) / p * nbytes
    across = NODE if topology.nodes == 1 else CROWDED
    return AllreduceCost((LinkTraffic(across, 2 * (p - 1).bit_length(), 2 * share),), share)


def ring_bidirectional_cost(topology: Topology, nbytes: float) -> AllreduceCost:
    """Return the cost of the bidirectional ring: the bytes of a ring in twice as many messages."""
    part, share = ring_cost(topology, nbytes).parts[0], ring_cost(topology, nbytes).reduced_bytes
    return AllreduceCost((LinkTraffic(part.link, 2 * part.messages, part.nbytes),), share)


def _bits(ranks: int) -> Iterator[int]:
    distance = 1
    while 2 * distance <= ranks:
        yield distance
        distance *= 2


def _fold(topology: Topology, nbytes: float) -> tuple[tuple[LinkTraffic, ...], float]:
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
    """Measure the cost of messages on ``comm``'s links, and of sums on the device of the array ``like``.

    Collective over ``everyone``. Each time is the maximum over these ranks. ``clock``: function that returns seconds.
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
    """Return the maximum of the numbers ``*seconds`` over all ranks. Collective over ``everyone``."""
    longest = np.array([max(seconds)])
    everyone.allreduce(longest, "max")
    return float(longest[0])


def _link(comm: Communicator | None, everyone: Communicator, on: str, clock: Clock) -> LinkParameters:
    # All pairs of ranks 2i and 2i + 1 of ``comm`` exchange data at the same time. If ``comm`` is None, wait.
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
    left, right = (backend.zeros(LONG_BYTES // 4, np.dtype(np.float32), on) for _ in range(2))
    add = ufunc(left, "sum")

    def once() -> None:
        add(left, right, right)
        backend.synchronise(right)

    return _shortest_s(once, SUM_TIMES, clock)


def _shortest_s(call: Callable[[], None], times: int, clock: Clock) -> float:
    call()  # opens connections, touches memory
    seconds = []
    for _ in range(times):
        start_s = clock()
        call()
        seconds.append(clock() - start_s)
    return min(seconds)
