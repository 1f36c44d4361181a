"""Recursive doubling and Rabenseifner's algorithm: ranks paired by the bits of their number.

For p a power of two:

    recursive doubling   log2(p) (α + n β + n γ)
    Rabenseifner         2 log2(p) α + 2 (p-1)/p n β + (p-1)/p n γ

R. Thakur, R. Rabenseifner, W. Gropp, Int. J. High Perform. Comput. Appl. 19 (2005) 49-66; R. Rabenseifner, ICCS 2004,
LNCS 3036. Rabenseifner's algorithm is a reduce-scatter by recursive halving, then an all-gather by recursive doubling.

If p is not a power of two, let q be the largest power of two below p: the first 2 (p-q) ranks form pairs, and each pair
is one of q vertices. For a short buffer, the odd rank of a pair sums both buffers (2 α + 2 n β + n γ more). For a long
buffer, each rank of a pair sums one half (2 α + n β + n/2 γ more).
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
    """Position of this rank in a hypercube of 2^k vertices, for algorithms on a power-of-two number of ranks."""

    size: int  # 2^k
    rank: int | None  # this rank's vertex number; None: not a vertex
    pairs: int  # the first 2 * pairs ranks form pairs (0, 1), (2, 3), ...; only the odd rank is a vertex

    @classmethod
    def of(cls, comm: Communicator) -> "Hypercube":
        """Return this rank's position in the largest hypercube that the ranks of ``comm`` can form. Local."""
        size = 1 << (comm.size.bit_length() - 1)
        pairs = comm.size - size
        # The first 2 pairs ranks form pairs: rank 2v + 1 is vertex v. The other ranks move down by the number of even
        # ranks that do not take part.
        if comm.rank >= 2 * pairs:
            return cls(size, comm.rank - pairs, pairs)
        return cls(size, comm.rank // 2 if comm.rank % 2 else None, pairs)

    def is_paired(self, comm: Communicator) -> bool:
        """Return True if this rank and another rank of ``comm`` share one hypercube vertex. Local."""
        return comm.rank < 2 * self.pairs

    def outer(self, rank: int) -> int:
        """Return the communicator rank of the hypercube vertex with number ``rank``. Local."""
        return 2 * rank + 1 if rank < self.pairs else rank + self.pairs


def fold(comm: Communicator, buffer: Array, combine: Combine) -> Hypercube:
    """Combine the buffers of paired ranks, so that 2^k buffers remain. Return this rank's `Hypercube`. Collective."""
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
    """Undo `fold`: copy ``buffer`` from the vertices of ``cube`` to the ranks that are not vertices. Collective."""
    if cube.is_paired(comm):
        if cube.rank is None:
            comm.recv(buffer, comm.rank + 1)
        else:
            comm.send(buffer, comm.rank - 1)


def recursive_doubling_allreduce(comm: Communicator, buffer: Array, op: str = "sum") -> None:
    """Reduce ``buffer`` in place by recursive doubling, with equal bits on every rank. Collective over ``comm``."""
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
        # Both ranks pass the lower vertex's operand first: signs of zeros and payloads of NaNs depend on the order.
        if partner < rank:
            combine(received, buffer, buffer)
        else:
            combine(buffer, received, buffer)
        distance *= 2


# Minimum size to exchange halves in pairs. Three ranks on two cores: faster at 16 MiB, slower at 4 MiB.
HALVES_BYTES: Final = 8 << 20


def rabenseifner_allreduce(
    comm: Communicator, buffer: Array, op: str = "sum", *, halves_bytes: int = HALVES_BYTES
) -> None:
    """Reduce ``buffer`` in place by Rabenseifner's algorithm, with equal bits on every rank. Collective."""
    # If the number of ranks is not a power of two, some ranks form pairs. From ``halves_bytes`` bytes on, each rank of
    # a pair reduces one half; below, one rank reduces both.
    combine = combiner(buffer, op)
    if comm.size & (comm.size - 1) and buffer.nbytes >= halves_bytes:
        _in_halves(comm, buffer, combine)
        return
    cube = fold(comm, buffer, combine)
    if cube.rank is not None:
        chunks = split(buffer.size, cube.size, buffer.itemsize)
        received = _arrival(buffer, chunks)
        _reduce_scatter(comm, cube.rank, cube.outer, cube.size // 2, buffer, received, chunks, combine)
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
    middle = chunks[len(chunks) // 2].start
    return scratch("recursive halving", max(middle, buffer.size - middle), buffer.dtype, buffer)


@dataclass(frozen=True, slots=True)
class _Place:
    cube: Hypercube
    vertex: int
    halves: Sequence[Range]
    held: int | None  # the half that this rank of a pair sums; None on an unpaired rank

    @classmethod
    def of(cls, comm: Communicator, cube: Hypercube, halves: Sequence[Range]) -> "_Place":
        if cube.is_paired(comm):
            return cls(cube, comm.rank // 2, halves, comm.rank % 2)
        return cls(cube, comm.rank - cube.pairs, halves, None)

    @property
    def kept(self) -> int:
        return self._kept_by(self.vertex)

    @property
    def goes_on(self) -> bool:
        return self.held in (None, self.kept)

    def across(self, half: int) -> int:
        return self._answers(self.vertex ^ (self.cube.size // 2), half)

    def rank_of(self, vertex: int) -> int:
        return self._answers(vertex, self._kept_by(vertex))

    def _kept_by(self, vertex: int) -> int:
        # The half that contains the chunk of this vertex: the windows of the later halvings are inside this half.
        return int(vertex >= self.cube.size // 2)

    def _answers(self, vertex: int, half: int) -> int:
        # The even rank of a pair holds half 0, the odd rank half 1; an unpaired rank holds both.
        return 2 * vertex + half if vertex < self.cube.pairs else vertex + self.cube.pairs


def _first_halving(comm: Communicator, place: _Place, buffer: Array, arrival: Array, combine: Combine) -> None:
    first, second = (buffer[half.slice] for half in place.halves)
    target, outgoing = (second, first) if place.kept else (first, second)
    received = arrival[: target.size]
    if place.held is None:
        # The partner vertex may be a pair: exchange the two halves with its two ranks.
        comm.sendrecv(outgoing, place.across(1 - place.kept), received, place.across(place.kept))
        combine(received, target, target)
        return
    held_half, others = (second, first) if place.held else (first, second)
    comm.sendrecv(others, comm.rank ^ 1, arrival[: held_half.size], comm.rank ^ 1)  # pairs are ranks 2v and 2v + 1
    combine(arrival[: held_half.size], held_half, held_half)
    # One rank of the pair continues with its half; the other sends its half to the partner vertex.
    if place.goes_on:
        comm.recv(received, place.across(place.kept))
        combine(received, target, target)
    else:
        comm.send(held_half, place.across(place.held))


def _last_doubling(comm: Communicator, place: _Place, buffer: Array) -> None:
    first, second = (buffer[half.slice] for half in place.halves)
    finished, missing = (second, first) if place.kept else (first, second)
    if place.held is None:
        comm.sendrecv(finished, place.across(place.kept), missing, place.across(1 - place.kept))
        return
    held_half, others = (second, first) if place.held else (first, second)
    if place.goes_on:
        comm.send(held_half, place.across(place.held))
    else:
        comm.recv(held_half, place.across(place.held))
    comm.sendrecv(held_half, comm.rank ^ 1, others, comm.rank ^ 1)


def _window(chunks: Sequence[Range], vertex: int, width: int) -> slice:
    first = vertex & -width  # clear the low bits
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
    # Recursive halving over 2 * ``width`` vertices; the result is in ``buffer[chunks[vertex]]``. ``arrival``: scratch.
    while width:
        partner = vertex ^ width  # has the other half of the aligned window of 2 width chunks
        target, outgoing = buffer[_window(chunks, vertex, width)], buffer[_window(chunks, partner, width)]
        received = arrival[: target.size]
        comm.sendrecv(outgoing, rank_of(partner), received, rank_of(partner))
        combine(received, target, target)
        width //= 2


def _all_gather(
    comm: Communicator, vertex: int, rank_of: Callable[[int], int], last: int, buffer: Array, chunks: Sequence[Range]
) -> None:
    width = 1
    while width < last:
        partner = vertex ^ width
        finished, theirs = buffer[_window(chunks, vertex, width)], buffer[_window(chunks, partner, width)]
        comm.sendrecv(finished, rank_of(partner), theirs, rank_of(partner))
        width *= 2
