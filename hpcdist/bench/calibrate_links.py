"""Seconds of messages between two ranks, level by level, and of the collectives that trainings use, over sizes.

A level is a way from one rank to another: inside a node, and between nodes. On each, pairs of ranks send each other
messages of all sizes: one of them alone, there and back, of which a message is half, and then all at once, both ways at
the same time, as in a ring: what links have while all neighbours send as well. The collectives are those of
`hpcdist.bench.collectives`, with buffers that no cache remembers, among all ranks of a node and among all there are.

All sizes are visited several times, and what is told is the first quartile of all visits together: what disturbs a
machine lasts for seconds. All sizes of an operation lie in one and the same memory, as those of a training do: how its
pages lie, and whether they were used before, makes up to a factor of two, and memory that is taken for some sizes alone
tells of its own luck. Where times jump between two sizes, more are measured (`calibrate_borders`).
"""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import numpy as np

from hpcdist.arrays import backend
from hpcdist.arrays.backend import Array
from hpcdist.bench import calibrate_borders, collectives
from hpcdist.bench.calibrate_borders import Series
from hpcdist.bench.calibrate_points import OPERATIONS, Busy, CollectivePoint, LinkPoint, sizes
from hpcdist.bench.collectives_file import Configuration
from hpcdist.bench.collectives_plan import ORDINARY, SHARED
from hpcdist.bench.collectives_plan import Wanted as Cells
from hpcdist.collectives import node_shared, release
from hpcdist.comm.communicator import Communicator

Say = Callable[[str], None]
INSIDE: Final = "node"
BETWEEN: Final = "network"
TAG: Final = 7003
LEAST_TURNS, MOST_TURNS = 2, 400  # of a visit
FLOATS: Final = "float32"
PACED_S: Final = 1e-3  # messages that take longer begin together; with shorter ones the barrier would be seen
VISITS: Final = 4
QUARTILE: Final = 25


def levels(comm: Communicator) -> tuple[str, ...]:
    """Return the levels that there are here, from the fastest. Collective over ``comm``."""
    nodes = comm.nodes()
    inside = max(len(members) for members in nodes.members) > 1
    return (INSIDE,) * inside + (BETWEEN,) * (nodes.count > 1)


def links(
    comm: Communicator, least: int, most: int, seconds: float, on: str = "cpu", say: Say | None = None
) -> tuple[LinkPoint, ...]:
    """Return messages of sizes from ``least`` to ``most`` bytes on every level. Collective over ``comm``."""
    found: list[LinkPoint] = []
    names, wanted = levels(comm), sizes(least, most)
    for level in names:
        if say is not None and comm.rank == 0:
            say(f"messages, level {level}")
        found += _Level(comm, level, max(wanted), seconds / len(names) / len(wanted), on).points(wanted)
    return tuple(found)


class _Level:
    """Messages over the links of one level. All of it is collective over ``comm``."""

    def __init__(self, comm: Communicator, level: str, most: int, seconds: float, on: str) -> None:
        nodes = comm.nodes()
        self._comm, self._name, self._seconds = comm, level, seconds
        if level == INSIDE:
            self._across: Communicator | None = nodes.intra
            first = nodes.index == next(place for place, members in enumerate(nodes.members) if len(members) > 1)
        else:
            self._across = nodes.peers if nodes.uniform else nodes.leaders
            first = nodes.intra.rank == 0
        is_first = first and self._across is not None and self._across.rank < 2
        self._alone = self._across if is_first else None
        self._memory = [backend.zeros(most, np.dtype(np.uint8), on) for _ in range(2)]
        for each in self._memory:
            each[...] = 1  # pages that nobody has written are one page of zeros, which any cache holds

    def points(self, nbytes: Sequence[int]) -> list[LinkPoint]:
        """Return messages of each of the sizes, and of those around jumps."""
        plain = self._at(nbytes)
        more: list[dict[int, Busy]] = []

        def measure(new: Sequence[int]) -> Series:
            more.append(self._at(new))
            return self._series(more[-1])

        found = calibrate_borders.borders(self._series(plain), measure)
        for again in found.again.get(self._name, ()):
            plain[again] = Busy(*map(min, plain[again][:2], more[0][again][:2]))
        between = {each: busy for new in more for each, busy in new.items()}
        points = [LinkPoint(self._name, 2, each, busy) for each, busy in plain.items()]
        points += [LinkPoint(self._name, 2, n, between[n], border=True) for n in found.between.get(self._name, ())]
        return sorted(points, key=lambda one: one.nbytes)

    def _series(self, points: Mapping[int, Busy]) -> Series:
        return {self._name: {nbytes: busy.all for nbytes, busy in points.items()}}

    def _at(self, nbytes: Sequence[int]) -> dict[int, Busy]:
        taken: dict[int, tuple[list[float], list[float]]] = {each: ([], []) for each in nbytes}
        for _ in range(VISITS):
            for each, (alone, together) in taken.items():
                given = self._comm, self._memory[0][:each], self._memory[1][:each], self._seconds / 2 / VISITS
                alone += _messages(self._alone, *given)
                together += _messages(self._across, *given, both_ways=True)
        told = self._comm.allgather_object({each: tuple(map(_quartile, times)) for each, times in taken.items()})
        return {each: Busy(*(max(one[each][way] for one in told) for way in range(2))) for each in nbytes}


def _quartile(taken: Sequence[float]) -> float:
    """Return the first quartile; 0 of a rank that looked on."""
    return float(np.percentile(taken, QUARTILE)) if taken else 0.0


def _messages(
    comm: Communicator | None,
    everyone: Communicator,
    out: Array,
    into: Array,
    seconds: float,
    *,
    both_ways: bool = False,
) -> list[float]:
    """Return what each message of ``out`` took on this rank. Collective over ``everyone``.

    It is half of there and back, or with ``both_ways`` all of both at once. A rank whose ``comm`` is None, or that has
    no partner there, looks on, and has none.
    """
    partner = -1 if comm is None else comm.rank ^ 1
    sends = comm is not None and 0 <= partner < comm.size

    def turn() -> float:
        assert comm is not None
        begin_s = time.perf_counter()
        if both_ways:
            comm.sendrecv(out, partner, into, partner, TAG)
            return time.perf_counter() - begin_s
        if comm.rank < partner:
            comm.send(out, partner, TAG)
            comm.recv(into, partner, TAG)
        else:
            comm.recv(into, partner, TAG)
            comm.send(out, partner, TAG)
        return (time.perf_counter() - begin_s) / 2

    everyone.barrier()
    first = [turn() for _ in range(2)][-1] if sends else 0.0  # after the connection, and the pages
    slowest = max(everyone.allgather_object(first))
    count = int(np.clip(seconds / max(2 * slowest, 1e-7), LEAST_TURNS, MOST_TURNS))
    everyone.barrier()
    taken = []
    for _ in range(count):
        if both_ways and slowest > PACED_S:
            everyone.barrier()  # or who is done first leaves the links to the others
        if sends:
            taken.append(turn())
    return taken


def groups(comm: Communicator) -> list[tuple[str, Communicator]]:
    """Return what collectives are measured on: the ranks of a node, and all where there are several. Collective."""
    nodes = comm.nodes()
    found = []
    if INSIDE in levels(comm) and nodes.uniform:
        found.append((INSIDE, nodes.intra))
    if nodes.count > 1:
        found.append((BETWEEN, comm))
    return found


def of_collectives(
    comm: Communicator,
    algorithms: Sequence[str],
    bounds: tuple[int, int],
    seconds: float,
    mpi_library: str,
    say: Say,
) -> tuple[CollectivePoint, ...]:
    """Return allreduce, reduce-scatter and all-gather by ``algorithms``, between ``bounds``. Collective over ``comm``.

    "auto" is what a training would choose here. Buffers are shared memory where the ranks can have it, as the gradients
    of a training are.
    """
    found: list[CollectivePoint] = []
    whole = groups(comm)
    for level, group in whole:
        for operation in OPERATIONS:
            measure = _Operation(group, operation, algorithms, mpi_library, say if comm.rank == 0 else _silent)
            found += measure.points(level, bounds, seconds / len(whole) / len(OPERATIONS))
    return tuple(comm.broadcast_object(found))


def _silent(text: str) -> None:
    """Say nothing: another group of ranks speaks."""


class _Operation:
    """One collective among the ranks of ``group``, by several algorithms. All of it is collective over ``group``."""

    def __init__(
        self, group: Communicator, operation: str, algorithms: Sequence[str], mpi_library: str, say: Say
    ) -> None:
        self._group, self._operation, self._algorithms = group, operation, algorithms
        self._library, self._say = mpi_library, say
        self._shares = node_shared.is_available(group) and group.nodes().count == 1

    def points(self, level: str, bounds: tuple[int, int], seconds: float) -> list[CollectivePoint]:
        """Return all sizes between ``bounds``, and those around jumps, on every rank."""
        wanted = sizes(*bounds)
        each_s = seconds / len(wanted)
        notes: list[str] = []
        memory = collectives.take(self._group, self._cells(wanted, each_s, 0), notes)
        for note in notes:
            self._say(note)
        plain = self._at(wanted, each_s, memory)
        found = calibrate_borders.borders(plain, lambda new: self._at(new, each_s, memory))
        release(self._group)
        rows = [
            (name, nbytes, time_s, is_border)
            for name, times in plain.items()
            for more, is_border in (
                ({**times, **found.again.get(name, {})}, False),
                (found.between.get(name, {}), True),
            )
            for nbytes, time_s in more.items()
        ]
        return [
            CollectivePoint(self._operation, name, level, self._group.size, nbytes, time_s, is_border)
            for name, nbytes, time_s, is_border in sorted(rows)
        ]

    def _at(self, nbytes: Sequence[int], seconds: float, memory: collectives.Memory) -> Series:
        """Return the seconds of each algorithm at each of the sizes, measured for about ``seconds`` each."""
        kept: list[Configuration] = []
        for visit in range(VISITS):
            cells = self._cells(nbytes, seconds / VISITS, visit)
            collectives.run(self._group, cells, self._library, kept.extend, self._say, memory)
        found: Series = self._group.broadcast_object(_best(kept, self._algorithms, self._operation))
        return found

    def _cells(self, nbytes: Sequence[int], seconds: float, visit: int) -> Cells:
        named = [name for name in self._algorithms if name != "auto" or self._operation == "allreduce"]
        if "auto" in self._algorithms and self._operation != "allreduce":
            named += ["node_shared"] if self._shares else []
            named += ["native"]
        return Cells(
            operations=(self._operation,),
            algorithms=tuple(dict.fromkeys(named)),
            bytes=tuple(nbytes),
            dtypes=(FLOATS,),
            buffers=(SHARED,) if self._shares else (ORDINARY,),
            seconds=seconds,
            iterations=None,
            warmup=1,
            least=LEAST_TURNS,
            check=True,
            hot=False,
            seed=visit,
        )


def _best(kept: Sequence[Configuration], algorithms: Sequence[str], operation: str) -> Series:
    """Return seconds by algorithm and bytes on the slowest rank, the first quartile; "auto" is the fastest."""
    visits: dict[tuple[str, str, int], list[np.ndarray]] = {}
    for one in kept:
        if not one.reference:
            key = one.key.algorithm, one.key.buffers, one.key.bytes
            visits.setdefault(key, []).append(np.nanmax(one.time_s, axis=1))
    found: dict[str, dict[int, float]] = {}
    for (algorithm, _, nbytes), times in visits.items():
        names = [algorithm] if algorithm in algorithms else []
        if operation != "allreduce" and "auto" in algorithms:
            names.append("auto")
        for name in names:
            own = found.setdefault(name, {})
            own[nbytes] = min(_quartile(np.concatenate(times).tolist()), own.get(nbytes, np.inf))
    return found
