"""Rabenseifner's algorithm: reduce-scatter by recursive halving, then all-gather by recursive doubling.

    2 log2(p) α + 2 (p-1)/p n β + (p-1)/p n γ    for p a power of two

The bytes of the ring in the steps of a tree: for medium and large buffers on many ranks. R. Rabenseifner, "Optimization
of collective reduction operations", ICCS 2004, LNCS 3036; R. Thakur, R. Rabenseifner, W. Gropp, "Optimization of
collective communication operations in MPICH", Int. J. High Perform. Comput. Appl. 19 (2005) 49-66.

With another p, and q the power of two below it, the first 2 (p-q) ranks act in pairs, each pair as one of q vertices.
First the ranks of a pair exchange halves of the buffer, so that each has the sum of one half. In the first halving the
vertex keeps one of the halves, and the rank that has it goes on alone; the other rank gives the other half to the
partner vertex and, in the last doubling, gets it back, finished. Then the pair exchanges its halves again:

    2 α + n β + n/2 γ    more than for q ranks; to give the other one the whole buffer, and back, costs 2 n β + n γ

Every element is summed in one place only and its bits are handed on, so all ranks end with the same bits.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from hpcdist.arrays.backend import Array
from hpcdist.arrays.ranges import Range, split
from hpcdist.collectives.power_of_two import Hypercube
from hpcdist.collectives.reduction import Combine, combiner
from hpcdist.collectives.workspace import scratch
from hpcdist.comm.communicator import Communicator


def rabenseifner_allreduce(comm: Communicator, buffer: Array, op: str = "sum") -> None:
    """Reduce ``buffer`` in place to the same bits on every rank. Collective over ``comm``."""
    combine = combiner(buffer, op)
    if comm.size == 1:
        return
    cube = Hypercube.of(comm)
    chunks = split(buffer.size, cube.size, buffer.itemsize)
    middle = chunks[cube.size // 2].start
    place = _Place.of(comm, cube, [Range(0, middle), Range(middle, buffer.size)])
    arrival = scratch("recursive halving", max(half.size for half in place.halves), buffer.dtype, buffer)
    _first_halving(comm, place, buffer, arrival, combine)
    if place.goes_on:
        _reduce_scatter(comm, place, buffer, arrival, chunks, combine)
        _all_gather(comm, place, buffer, chunks)
    _last_doubling(comm, place, buffer)


@dataclass(frozen=True, slots=True)
class _Place:
    """A rank of a vertex of the hypercube, and the two halves of the buffer."""

    cube: Hypercube
    vertex: int
    halves: Sequence[Range]
    held: int | None  # the half that this rank of a pair answers for; None on a rank that is a vertex alone

    @classmethod
    def of(cls, comm: Communicator, cube: Hypercube, halves: Sequence[Range]) -> "_Place":
        if cube.is_paired(comm):
            return cls(cube, comm.rank // 2, halves, comm.rank % 2)
        return cls(cube, comm.rank - cube.pairs, halves, None)

    @property
    def kept(self) -> int:
        """The half that this vertex keeps in the first halving; its partner keeps the other."""
        return self._kept_by(self.vertex)

    @property
    def goes_on(self) -> bool:
        """Whether this rank is the vertex once there is only one half."""
        return self.held in (None, self.kept)

    def across(self, half: int) -> int:
        """Return the rank of the partner vertex that answers for ``half``."""
        return self._answers(self.vertex ^ (self.cube.size // 2), half)

    def rank_of(self, vertex: int) -> int:
        """Return the rank of ``vertex`` that goes on after the first halving."""
        return self._answers(vertex, self._kept_by(vertex))

    def _kept_by(self, vertex: int) -> int:
        return int(vertex >= self.cube.size // 2)

    def _answers(self, vertex: int, half: int) -> int:
        return 2 * vertex + half if vertex < self.cube.pairs else vertex + self.cube.pairs


def _first_halving(comm: Communicator, place: _Place, buffer: Array, arrival: Array, combine: Combine) -> None:
    """Reduce over the pairs, then with the partner vertex: afterwards the kept half is the sum of both vertices."""
    first, second = (buffer[half.slice] for half in place.halves)
    kept, given = (second, first) if place.kept else (first, second)
    received = arrival[: kept.size]
    if place.held is None:
        comm.sendrecv(given, place.across(1 - place.kept), received, place.across(place.kept))
        combine(received, kept, kept)
        return
    own, others = (second, first) if place.held else (first, second)
    comm.sendrecv(others, comm.rank ^ 1, arrival[: own.size], comm.rank ^ 1)
    combine(arrival[: own.size], own, own)
    if place.goes_on:
        comm.recv(received, place.across(place.kept))
        combine(received, kept, kept)
    else:
        comm.send(own, place.across(place.held))


def _last_doubling(comm: Communicator, place: _Place, buffer: Array) -> None:
    """Give the kept half, finished, to the partner vertex and get the other; a pair then shares what each rank has."""
    first, second = (buffer[half.slice] for half in place.halves)
    kept, missing = (second, first) if place.kept else (first, second)
    if place.held is None:
        comm.sendrecv(kept, place.across(place.kept), missing, place.across(1 - place.kept))
        return
    own, others = (second, first) if place.held else (first, second)
    if place.goes_on:
        comm.send(own, place.across(place.held))
    else:
        comm.recv(own, place.across(place.held))
    comm.sendrecv(own, comm.rank ^ 1, others, comm.rank ^ 1)


def _window(chunks: Sequence[Range], vertex: int, width: int) -> slice:
    """Return the elements of the ``width`` chunks (a power of two, aligned to it) that chunk ``vertex`` is among."""
    first = vertex & -width
    return slice(chunks[first].start, chunks[first + width - 1].stop)


def _reduce_scatter(
    comm: Communicator, place: _Place, buffer: Array, arrival: Array, chunks: Sequence[Range], combine: Combine
) -> None:
    """Halve the window of chunks until only the own one is left: keep one half of it, give the other away."""
    width = place.cube.size // 4
    while width:
        partner = place.vertex ^ width
        kept, given = buffer[_window(chunks, place.vertex, width)], buffer[_window(chunks, partner, width)]
        received = arrival[: kept.size]
        comm.sendrecv(given, place.rank_of(partner), received, place.rank_of(partner))
        combine(received, kept, kept)
        width //= 2


def _all_gather(comm: Communicator, place: _Place, buffer: Array, chunks: Sequence[Range]) -> None:
    """Double the window of finished chunks, up to the kept half, by exchanging it with the partner's."""
    width = 1
    while width < place.cube.size // 2:
        partner = place.vertex ^ width
        own, theirs = buffer[_window(chunks, place.vertex, width)], buffer[_window(chunks, partner, width)]
        comm.sendrecv(own, place.rank_of(partner), theirs, place.rank_of(partner))
        width *= 2
