"""Recursive doubling and Rabenseifner's algorithm: ranks paired by the bits of their number.

With p ranks and n bytes, for p a power of two:

    recursive doubling   log2(p) (α + n β + n γ)
    Rabenseifner         2 log2(p) α + 2 (p-1)/p n β + (p-1)/p n γ

R. Thakur, R. Rabenseifner, W. Gropp, "Optimization of collective communication operations in MPICH", Int. J. High
Perform. Comput. Appl. 19 (2005) 49-66; R. Rabenseifner, "Optimization of collective reduction operations", ICCS 2004,
LNCS 3036.

Recursive doubling has the fewest steps, for small buffers: in step k every rank exchanges its whole partial sum with
the rank that differs in bit k. Both ranks take the operand of the lower half first, so they compute the same bits.
Rabenseifner's algorithm is a reduce-scatter by recursive halving, then an all-gather by recursive doubling: the bytes
of the ring in the steps of a tree, for medium and large buffers on many ranks. Every element is summed in one place
only and its bits are handed on, so all ranks end with the same bits.

With another p, let q be the largest power of two in p: the first 2 (p-q) ranks form pairs, each pair one of q
vertices. A short buffer is folded: the even rank of a pair sends its buffer to the odd one before the algorithm and
receives the result after it, 2 (α + n β) + n γ more than for q ranks. For a long buffer Rabenseifner's ranks of a
pair first exchange halves, so that each has the sum of one half. In the first halving the vertex keeps one half,
whose rank continues alone; the other rank gives the other half to the partner vertex and receives it back, finished,
in the last doubling. Then the pair exchanges its halves again: 2 α + n β + n/2 γ more than for q ranks, where folding
costs 2 α + 2 n β + n γ.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from hpcdist.arrays.backend import Array
from hpcdist.arrays.ranges import Range, split
from hpcdist.collectives.reduction import Combine, combiner
from hpcdist.collectives.segments import scratch
from hpcdist.comm.communicator import Communicator


@dataclass(frozen=True, slots=True)
class Hypercube:
    """The 2^k ranks that take part, numbered anew; ``rank`` is None on a rank that stands by."""

    size: int
    rank: int | None
    pairs: int

    @classmethod
    def of(cls, comm: Communicator) -> "Hypercube":
        """Return the hypercube inside ``comm`` (local)."""
        size = 1 << (comm.size.bit_length() - 1)
        pairs = comm.size - size
        # The first 2 pairs ranks form pairs: of ranks 2v and 2v + 1 the odd one is vertex v. The others follow, each
        # moved down by the number of even ranks that stand by.
        if comm.rank >= 2 * pairs:
            return cls(size, comm.rank - pairs, pairs)
        return cls(size, comm.rank // 2 if comm.rank % 2 else None, pairs)

    def is_paired(self, comm: Communicator) -> bool:
        """Whether this rank of ``comm`` stands by or acts for one that does (local)."""
        return comm.rank < 2 * self.pairs

    def outer(self, rank: int) -> int:
        """Return the number in the communicator of ``rank`` of the hypercube."""
        return 2 * rank + 1 if rank < self.pairs else rank + self.pairs


def fold(comm: Communicator, buffer: Array, combine: Combine) -> Hypercube:
    """Reduce the buffers of all ranks into those of a hypercube, which is returned. Collective; `unfold` undoes it."""
    cube = Hypercube.of(comm)
    if cube.is_paired(comm):
        if cube.rank is None:
            comm.send(buffer, comm.rank + 1)
        else:
            received = scratch("fold", buffer.size, buffer.dtype, buffer)
            comm.recv(received, comm.rank - 1)
            combine(received, buffer, buffer)
    return cube


def unfold(comm: Communicator, cube: Hypercube, buffer: Array) -> None:
    """Overwrite the buffers of the ranks that stood by with the result of their partners. Collective."""
    if cube.is_paired(comm):
        if cube.rank is None:
            comm.recv(buffer, comm.rank + 1)
        else:
            comm.send(buffer, comm.rank - 1)


def recursive_doubling_allreduce(comm: Communicator, buffer: Array, op: str = "sum") -> None:
    """Reduce ``buffer`` in place to the same bits on every rank. Collective over ``comm``."""
    combine = combiner(buffer, op)
    cube = fold(comm, buffer, combine)
    if cube.rank is not None:
        _double(comm, cube, cube.rank, buffer, combine)
    unfold(comm, cube, buffer)


def _double(comm: Communicator, cube: Hypercube, rank: int, buffer: Array, combine: Combine) -> None:
    received = scratch("recursive doubling", buffer.size, buffer.dtype, buffer)
    distance = 1
    while distance < cube.size:
        partner = rank ^ distance
        comm.sendrecv(buffer, cube.outer(partner), received, cube.outer(partner))
        # The lower vertex's operand comes first on both sides: signs of zeros and payloads of NaN depend on the order.
        if partner < rank:
            combine(received, buffer, buffer)
        else:
            combine(buffer, received, buffer)
        distance *= 2


# From here on pairs exchange halves. Three ranks on two cores: faster at 16 MiB, slower at 4 MiB.
HALVES_BYTES: Final = 8 << 20


def rabenseifner_allreduce(
    comm: Communicator, buffer: Array, op: str = "sum", *, halves_bytes: int = HALVES_BYTES
) -> None:
    """Reduce ``buffer`` in place to the same bits on every rank. Collective over ``comm``.

    Where p is no power of two, buffers from ``halves_bytes`` on are halved in the pairs, shorter ones folded.
    """
    combine = combiner(buffer, op)
    if comm.size & (comm.size - 1) and buffer.nbytes >= halves_bytes:
        _in_halves(comm, buffer, combine)
        return
    cube = fold(comm, buffer, combine)
    if cube.rank is not None:
        chunks = split(buffer.size, cube.size, buffer.itemsize)
        arrival = _arrival(buffer, chunks)
        _reduce_scatter(comm, cube.rank, cube.outer, cube.size // 2, buffer, arrival, chunks, combine)
        _all_gather(comm, cube.rank, cube.outer, cube.size, buffer, chunks)
    unfold(comm, cube, buffer)


def _in_halves(comm: Communicator, buffer: Array, combine: Combine) -> None:
    cube = Hypercube.of(comm)
    chunks = split(buffer.size, cube.size, buffer.itemsize)
    middle = chunks[cube.size // 2].start
    place = _Place.of(comm, cube, [Range(0, middle), Range(middle, buffer.size)])
    arrival = _arrival(buffer, chunks)
    _first_halving(comm, place, buffer, arrival, combine)
    if place.goes_on:
        width = cube.size // 2
        _reduce_scatter(comm, place.vertex, place.rank_of, width // 2, buffer, arrival, chunks, combine)
        _all_gather(comm, place.vertex, place.rank_of, width, buffer, chunks)
    _last_doubling(comm, place, buffer)


def _arrival(buffer: Array, chunks: Sequence[Range]) -> Array:
    """Return scratch for the longer half of ``buffer``."""
    middle = chunks[len(chunks) // 2].start
    return scratch("recursive halving", max(middle, buffer.size - middle), buffer.dtype, buffer)


@dataclass(frozen=True, slots=True)
class _Place:
    """A rank of a vertex of the hypercube, and the two halves of the buffer."""

    cube: Hypercube
    vertex: int
    halves: Sequence[Range]
    held: int | None  # half that this rank of a pair sums; None on a rank that is a vertex alone

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
        """Return the rank of the partner vertex that holds ``half``."""
        return self._answers(self.vertex ^ (self.cube.size // 2), half)

    def rank_of(self, vertex: int) -> int:
        """Return the rank of ``vertex`` that goes on after the first halving."""
        return self._answers(vertex, self._kept_by(vertex))

    def _kept_by(self, vertex: int) -> int:
        # The half in which the chunk of this number lies: the windows of the later halvings are inside it.
        return int(vertex >= self.cube.size // 2)

    def _answers(self, vertex: int, half: int) -> int:
        # Of a pair the even rank holds half 0, the odd one half 1; a rank that is a vertex alone holds both.
        return 2 * vertex + half if vertex < self.cube.pairs else vertex + self.cube.pairs


def _first_halving(comm: Communicator, place: _Place, buffer: Array, arrival: Array, combine: Combine) -> None:
    """Reduce over the pairs, then with the partner vertex: afterwards the kept half is the sum of both vertices."""
    first, second = (buffer[half.slice] for half in place.halves)
    target, outgoing = (second, first) if place.kept else (first, second)
    received = arrival[: target.size]
    if place.held is None:
        # The partner vertex may be a pair: then the two halves are exchanged with its two ranks.
        comm.sendrecv(outgoing, place.across(1 - place.kept), received, place.across(place.kept))
        combine(received, target, target)
        return
    own, others = (second, first) if place.held else (first, second)
    comm.sendrecv(others, comm.rank ^ 1, arrival[: own.size], comm.rank ^ 1)  # pairs are ranks 2v and 2v + 1
    combine(arrival[: own.size], own, own)
    # Each rank of the pair has the sum of one half: one continues with it, the other hands its half to the partner.
    if place.goes_on:
        comm.recv(received, place.across(place.kept))
        combine(received, target, target)
    else:
        comm.send(own, place.across(place.held))


def _last_doubling(comm: Communicator, place: _Place, buffer: Array) -> None:
    """Give the kept half, finished, to the partner vertex and get the other; a pair then shares what each rank has."""
    first, second = (buffer[half.slice] for half in place.halves)
    finished, missing = (second, first) if place.kept else (first, second)
    if place.held is None:
        comm.sendrecv(finished, place.across(place.kept), missing, place.across(1 - place.kept))
        return
    own, others = (second, first) if place.held else (first, second)
    if place.goes_on:
        comm.send(own, place.across(place.held))
    else:
        comm.recv(own, place.across(place.held))
    comm.sendrecv(own, comm.rank ^ 1, others, comm.rank ^ 1)


def _window(chunks: Sequence[Range], vertex: int, width: int) -> slice:
    """Return the elements of the ``width`` chunks (a power of two, aligned to it) that chunk ``vertex`` is among."""
    first = vertex & -width  # with its low bits cleared: the first chunk of the aligned block of this width
    return slice(chunks[first].start, chunks[first + width - 1].stop)


def _reduce_scatter(
    comm: Communicator,
    vertex: int,
    rank_of: Callable[[int], int],
    width: int,
    buffer: Array,
    arrival: Array,
    chunks: Sequence[Range],
    combine: Combine,
) -> None:
    """Halve the window of 2 ``width`` chunks until only the own one is left: keep one half, give the other away."""
    while width:
        partner = vertex ^ width  # its window is the other half of the aligned window of 2 width chunks
        target, outgoing = buffer[_window(chunks, vertex, width)], buffer[_window(chunks, partner, width)]
        received = arrival[: target.size]
        comm.sendrecv(outgoing, rank_of(partner), received, rank_of(partner))
        combine(received, target, target)
        width //= 2


def _all_gather(
    comm: Communicator, vertex: int, rank_of: Callable[[int], int], last: int, buffer: Array, chunks: Sequence[Range]
) -> None:
    """Double the window of finished chunks, up to ``last`` of them, by exchanging it with the partner's."""
    width = 1
    while width < last:
        partner = vertex ^ width
        own, theirs = buffer[_window(chunks, vertex, width)], buffer[_window(chunks, partner, width)]
        comm.sendrecv(own, rank_of(partner), theirs, rank_of(partner))
        width *= 2
