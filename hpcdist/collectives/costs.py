"""What each allreduce costs on a given machine, from the formulas in the docstrings of the algorithms.

    time = sum over link classes of (messages α + bytes β)  +  reduced bytes γ

along the path of the busiest rank. Links are of three classes: "node" inside a node with all pairs of ranks at work,
"wire" between nodes with one message each way at a time for a node, "crowded" between nodes with all its ranks sending
at once. (R. Thakur, R. Rabenseifner, W. Gropp, "Optimization of collective communication operations in MPICH", Int. J.
High Perform. Comput. Appl. 19 (2005) 49-66.)

The model only ranks: it says which algorithms are worth measuring. One without a formula is measured wherever it runs;
that of the MPI library has none, because nobody outside knows what it does.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from hpcdist.collectives.rabenseifner import HALVES_BYTES
from hpcdist.comm.communicator import Communicator

NODE, WIRE, CROWDED = "node", "wire", "crowded"


@dataclass(frozen=True, slots=True)
class Topology:
    """How many ranks each node has, nodes in the order of their first rank; ranks of a node are consecutive."""

    ranks_per_node: tuple[int, ...]

    @classmethod
    def of(cls, comm: Communicator) -> "Topology":
        """Return the topology of ``comm``. Collective: it is cut by node."""
        return cls(tuple(len(members) for members in comm.nodes().members))

    @property
    def ranks(self) -> int:
        """All of them."""
        return sum(self.ranks_per_node)

    @property
    def nodes(self) -> int:
        """Their number."""
        return len(self.ranks_per_node)

    def neighbours(self) -> str:
        """Return the slowest link among those from each rank to the next, of which a node sends on one."""
        return NODE if self.nodes == 1 else WIRE

    def across(self, distance: int) -> str:
        """Return the link of ranks whose numbers differ in the bit ``distance``, all pairs at work."""
        inside = all(ranks % (2 * distance) == 0 for ranks in self.ranks_per_node)
        return NODE if self.nodes == 1 or inside else CROWDED


@dataclass(frozen=True, slots=True)
class Link:
    """One class of links as measured: α in s a message, β in s a byte."""

    latency_s: float
    s_per_byte: float


@dataclass(frozen=True, slots=True)
class Machine:
    """What messages and sums take; a class of links that the topology does not have is not there."""

    links: dict[str, Link]
    reduce_s_per_byte: float


@dataclass(frozen=True, slots=True)
class Part:
    """So many messages over one class of links, and their bytes together."""

    link: str
    messages: int
    nbytes: float


@dataclass(frozen=True, slots=True)
class Work:
    """What the busiest rank does, one after the other. A rank that sends and receives at the same time does one."""

    parts: tuple[Part, ...]
    reduced_bytes: float

    @property
    def messages(self) -> int:
        """Over all classes of links."""
        return sum(part.messages for part in self.parts)

    @property
    def nbytes(self) -> float:
        """Over all classes of links."""
        return sum(part.nbytes for part in self.parts)

    def seconds(self, machine: Machine) -> float:
        """Return the time that the model predicts."""
        links = [(machine.links[part.link], part) for part in self.parts if part.messages]
        sent = sum(part.messages * link.latency_s + part.nbytes * link.s_per_byte for link, part in links)
        return sent + self.reduced_bytes * machine.reduce_s_per_byte


Formula = Callable[[Topology, float], Work]


def ring(topology: Topology, nbytes: float) -> Work:
    """2 (p-1) steps, each as slow as the slowest link of the circle."""
    p = topology.ranks
    share = (p - 1) / p * nbytes
    return Work((Part(topology.neighbours(), 2 * (p - 1), 2 * share),), share)


def all_to_all(topology: Topology, nbytes: float) -> Work:
    """p-1 chunks to all others, those to other nodes over a crowded link, then the ring's all-gather."""
    p, widest = topology.ranks, max(topology.ranks_per_node)
    chunk = nbytes / p
    inside, outside = widest - 1, p - widest
    spread = [Part(NODE, inside, inside * chunk), Part(CROWDED, outside, outside * chunk)]
    gathered = Part(topology.neighbours(), p - 1, (p - 1) * chunk)
    return Work((*spread, gathered), (p - 1) * chunk)


def recursive_doubling(topology: Topology, nbytes: float) -> Work:
    """All bytes to the partner in every bit."""
    folded, reduced = _fold(topology, nbytes)
    steps = [Part(topology.across(distance), 1, nbytes) for distance in _bits(topology.ranks)]
    return Work((*folded, *steps), reduced + len(steps) * nbytes)


def rabenseifner(topology: Topology, nbytes: float) -> Work:
    """Half, a quarter, ... to the partner in every bit, and back; without a power of two, pairs come first."""
    paired = topology.ranks & (topology.ranks - 1) != 0
    folded, reduced = _fold(topology, nbytes)
    if paired and nbytes >= HALVES_BYTES:
        folded, reduced = (Part(topology.across(1), 2, nbytes),), nbytes / 2
    distances = list(_bits(topology.ranks))
    cube = 2 * max(distances, default=0) or 1
    steps = [Part(topology.across(distance), 2, 2 * nbytes * distance / cube) for distance in distances]
    return Work((*folded, *steps), reduced + nbytes * sum(distances) / cube)


def circulant(topology: Topology, nbytes: float) -> Work:
    """The bytes of the ring in ceil(log2 p) steps there and as many back; a step may take a second message."""
    p = topology.ranks
    share = (p - 1) / p * nbytes
    across = NODE if topology.nodes == 1 else CROWDED
    return Work((Part(across, 2 * (p - 1).bit_length(), 2 * share),), share)


def ring_bidirectional(topology: Topology, nbytes: float) -> Work:
    """The ring's bytes in twice as many messages: that two of them travel at once is not counted on."""
    part, share = ring(topology, nbytes).parts[0], ring(topology, nbytes).reduced_bytes
    return Work((Part(part.link, 2 * part.messages, part.nbytes),), share)


def _bits(ranks: int) -> Iterator[int]:
    """Yield 1, 2, 4, ... below the largest power of two in ``ranks``."""
    distance = 1
    while 2 * distance <= ranks:
        yield distance
        distance *= 2


def _fold(topology: Topology, nbytes: float) -> tuple[tuple[Part, ...], float]:
    """Return what `power_of_two` adds where the number of ranks is none: messages, and bytes reduced."""
    if topology.ranks & (topology.ranks - 1) == 0:
        return (), 0.0
    return (Part(topology.across(1), 2, 2 * nbytes),), nbytes


FORMULAS: Final[dict[str, Formula]] = {
    "ring": ring,
    "ring_bidirectional": ring_bidirectional,
    "circulant": circulant,
    "all_to_all": all_to_all,
    "recursive_doubling": recursive_doubling,
    "rabenseifner": rabenseifner,
}
