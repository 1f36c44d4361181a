"""Measure links: messages between two ranks, level by level, and the collectives of trainings, over sizes.

A level is the kind of link between two ranks: inside a node, or between nodes. On each, pairs of ranks send each other
messages of all sizes: one of them alone, there and back, of which a message is half, and then all at once, both ways
at the same time, as in a ring: what links have while all neighbours send as well. The collectives are those of
`hpcdist.bench.collectives.run`, with buffers that no cache remembers, among all ranks of a node and among all there
are.

All sizes are visited several times, and the result is the first quartile of all visits together: what disturbs a
machine lasts for seconds. All sizes of an operation lie in one and the same memory, as those of a training do: how
its pages lie, and whether they were used before, makes up to a factor of two, so times of sizes with memory of their
own could not be compared.

Times over sizes jump where a library changes its protocol, or a cache is full. `borders` finds these sizes by
bisection. Between two neighbouring sizes, times that a line through alpha and beta can have grow by a factor between
1 and that of the sizes, and lie on the lines through the next two to the left and to the right. What clearly does
neither is a jump. A disturbance of the machine also looks like one, so both sides are measured again, and the lesser
time counts, since a disturbance makes times longer, never shorter. Where there still is a jump, sizes between are
measured until it is enclosed.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np

from hpcdist.arrays import backend
from hpcdist.arrays.backend import Array
from hpcdist.bench.calibrate.device import OPERATIONS, BusySeconds, CollectivePoint, LinkPoint, sizes
from hpcdist.bench.collectives import run
from hpcdist.bench.collectives.results import ORDINARY, SHARED, CollectivesConfiguration
from hpcdist.bench.collectives.results import CollectivesRequest as Cells
from hpcdist.collectives import release
from hpcdist.collectives.node import shared_memory
from hpcdist.comm.communicator import Communicator

Times = Mapping[int, float]  # bytes -> seconds
Series = Mapping[str, Times]  # of each algorithm or level

STEP: Final = 1.12  # what times may be off before it counts as a jump
HALVINGS: Final = 4
JUMPS: Final = 4  # of a series at most, the greatest ones: on a busy machine everything jumps
MULTIPLE: Final = 64  # bytes: what all operations can divide


class BorderTimes(NamedTuple):
    """Times at the jumps of each series (bytes -> seconds): sizes ``remeasured``, and new ones ``between`` them."""

    remeasured: dict[str, dict[int, float]]
    between: dict[str, dict[int, float]]


class _Bracket(NamedTuple):
    """The sizes to both sides of a jump of a series."""

    name: str
    left: int
    right: int

    @property
    def middle(self) -> int:
        """The geometric one, a multiple of `MULTIPLE`."""
        return round((self.left * self.right) ** 0.5 / MULTIPLE) * MULTIPLE

    @property
    def is_open(self) -> bool:
        """Whether there is a size between."""
        return self.left < self.middle < self.right


def borders(series: Series, measure: Callable[[Sequence[int]], Series]) -> BorderTimes:
    """Return the times at the jumps of each of ``series``, of four sizes or more, that has any.

    ``measure`` gets all sizes of a round at once, and returns the times of every series at these. Where it is
    collective, the times must be the same on all ranks, and so is this.
    """
    border_times = BorderTimes({}, {})
    suspects = {name: _jumps(times) for name, times in series.items()}
    sides = sorted({side for pairs in suspects.values() for pair in pairs for side in pair})
    if not sides:
        return border_times
    second = measure(sides)
    known = {name: dict(times) for name, times in series.items()}
    for name, pairs in suspects.items():
        own = {side for pair in pairs for side in pair}
        known[name].update({side: min(known[name][side], second[name][side]) for side in own})
        border_times.remeasured.update({name: {side: known[name][side] for side in own}} if own else {})
    brackets = [_Bracket(name, *pair) for name, times in known.items() for pair in _jumps(times)]
    for _ in range(HALVINGS):
        brackets = [bracket for bracket in brackets if bracket.is_open]
        if not brackets:
            break
        times = measure(sorted({bracket.middle for bracket in brackets}))
        for bracket in brackets:
            border_times.between.setdefault(bracket.name, {})[bracket.middle] = times[bracket.name][bracket.middle]
            known[bracket.name][bracket.middle] = times[bracket.name][bracket.middle]
        brackets = [_half(known[bracket.name], bracket) for bracket in brackets]
    return border_times


def _jumps(times: Times) -> list[tuple[int, int]]:
    """Return the neighbours between which the greatest jumps are."""
    points = sorted(times.items())
    jumps = [(_jump(points, at), points[at][0], points[at + 1][0]) for at in range(len(points) - 1)]
    return [(left, right) for much, left, right in sorted(jumps, reverse=True)[:JUMPS] if much > STEP]


def _jump(points: Sequence[tuple[int, float]], at: int) -> float:
    """Return the factor by which the times at ``at`` and after it are off a line with their neighbours; 1 for none."""
    (left, left_s), (right, right_s) = points[at], points[at + 1]
    grows = right_s / left_s
    alone = max(grows / (right / left), 1 / grows)
    if at == 0 or at + 2 == len(points):
        return max(alone, 1.0)
    up = right_s / _through(points[at - 1], points[at], right)
    back = _through(points[at + 1], points[at + 2], left) / left_s
    # A bend, where the slope changes, is off on one side only, or to different ones.
    steps = math.sqrt(up * back) if (up > 1) == (back > 1) else 1.0
    return max(alone, steps, 1 / steps, 1.0)


def _through(first: tuple[int, float], second: tuple[int, float], size: int) -> float:
    """Return the seconds of ``size`` on the line through two points, whose slope and latency are not negative."""
    slope = max(0.0, (second[1] - first[1]) / (second[0] - first[0]))
    near = second if abs(second[0] - size) < abs(first[0] - size) else first
    return near[1] * size / near[0] if slope * near[0] > near[1] else near[1] + slope * (size - near[0])


def _half(times: Times, bracket: _Bracket) -> _Bracket:
    """Return the half in which times change by the greater factor."""
    below, above = (
        abs(math.log(times[b] / times[a])) for a, b in ((bracket.left, bracket.middle), (bracket.middle, bracket.right))
    )
    return bracket._replace(left=bracket.middle) if above > below else bracket._replace(right=bracket.middle)


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
    points: list[LinkPoint] = []
    names, wanted = levels(comm), sizes(least, most)
    for level in names:
        if say is not None and comm.rank == 0:
            say(f"messages, level {level}")
        points += _Level(comm, level, max(wanted), seconds / len(names) / len(wanted), on).points(wanted)
    return tuple(points)


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
        more: list[dict[int, BusySeconds]] = []

        def measure(new: Sequence[int]) -> Series:
            more.append(self._at(new))
            return self._series(more[-1])

        border_times = borders(self._series(plain), measure)
        for size in border_times.remeasured.get(self._name, ()):
            plain[size] = BusySeconds(*map(min, plain[size][:2], more[0][size][:2]))
        between = {each: busy for new in more for each, busy in new.items()}
        points = [LinkPoint(self._name, 2, each, busy) for each, busy in plain.items()]
        points += [
            LinkPoint(self._name, 2, n, between[n], border=True) for n in border_times.between.get(self._name, ())
        ]
        return sorted(points, key=lambda point: point.nbytes)

    def _series(self, points: Mapping[int, BusySeconds]) -> Series:
        return {self._name: {nbytes: busy.all for nbytes, busy in points.items()}}

    def _at(self, nbytes: Sequence[int]) -> dict[int, BusySeconds]:
        taken: dict[int, tuple[list[float], list[float]]] = {size: ([], []) for size in nbytes}
        for _ in range(VISITS):
            for size, (alone, together) in taken.items():
                arguments = self._comm, self._memory[0][:size], self._memory[1][:size], self._seconds / 2 / VISITS
                alone += _messages(self._alone, *arguments)
                together += _messages(self._across, *arguments, both_ways=True)
        by_rank = self._comm.allgather_object({size: tuple(map(_quartile, times)) for size, times in taken.items()})
        return {
            size: BusySeconds(*(max(of_rank[size][way] for of_rank in by_rank) for way in range(2))) for size in nbytes
        }


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
    """Return the groups to measure collectives on: the ranks of a node, and all where there are several. Collective."""
    nodes = comm.nodes()
    measured = []
    if INSIDE in levels(comm) and nodes.uniform:
        measured.append((INSIDE, nodes.intra))
    if nodes.count > 1:
        measured.append((BETWEEN, comm))
    return measured


def of_collectives(
    comm: Communicator, algorithms: Sequence[str], bounds: tuple[int, int], seconds: float, mpi_library: str, say: Say
) -> tuple[CollectivePoint, ...]:
    """Return allreduce, reduce-scatter and all-gather by ``algorithms``, between ``bounds``. Collective over ``comm``.

    "auto" is what a training would choose here. Buffers are shared memory where the ranks can have it, as the gradients
    of a training are.
    """
    points: list[CollectivePoint] = []
    whole = groups(comm)
    for level, group in whole:
        for operation in OPERATIONS:
            # Another group of ranks says nothing.
            told = say if comm.rank == 0 else (lambda text: None)
            measure = _Operation(group, operation, algorithms, mpi_library, told)
            points += measure.points(level, bounds, seconds / len(whole) / len(OPERATIONS))
    return tuple(comm.broadcast_object(points))


class _Operation:
    """One collective among the ranks of ``group``, by several algorithms. All of it is collective over ``group``."""

    def __init__(
        self, group: Communicator, operation: str, algorithms: Sequence[str], mpi_library: str, say: Say
    ) -> None:
        self._group, self._operation, self._algorithms = group, operation, algorithms
        self._library, self._say = mpi_library, say
        self._shares = shared_memory.is_available(group) and group.nodes().count == 1

    def points(self, level: str, bounds: tuple[int, int], seconds: float) -> list[CollectivePoint]:
        """Return all sizes between ``bounds``, and those around jumps, on every rank."""
        wanted = sizes(*bounds)
        each_s = seconds / len(wanted)
        notes: list[str] = []
        memory = run.take_memory(self._group, self._cells(wanted, each_s, 0), notes)
        for note in notes:
            self._say(note)
        plain = self._at(wanted, each_s, memory)
        border_times = borders(plain, lambda new: self._at(new, each_s, memory))
        release(self._group)
        rows = [
            (name, nbytes, time_s, is_border)
            for name, times in plain.items()
            for more, is_border in (
                ({**times, **border_times.remeasured.get(name, {})}, False),
                (border_times.between.get(name, {}), True),
            )
            for nbytes, time_s in more.items()
        ]
        return [
            CollectivePoint(self._operation, name, level, self._group.size, nbytes, time_s, is_border)
            for name, nbytes, time_s, is_border in sorted(rows)
        ]

    def _at(self, nbytes: Sequence[int], seconds: float, memory: run.PoolMemory) -> Series:
        """Return the seconds of each algorithm at each of the sizes, measured for about ``seconds`` each."""
        configurations: list[CollectivesConfiguration] = []
        for visit in range(VISITS):
            cells = self._cells(nbytes, seconds / VISITS, visit)
            run.run(self._group, cells, self._library, configurations.extend, self._say, memory)
        best: Series = self._group.broadcast_object(_best(configurations, self._algorithms, self._operation))
        return best

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


def _best(configurations: Sequence[CollectivesConfiguration], algorithms: Sequence[str], operation: str) -> Series:
    """Return seconds by algorithm and bytes on the slowest rank, the first quartile; "auto" is the fastest."""
    visits: dict[tuple[str, str, int], list[np.ndarray]] = {}
    for configuration in configurations:
        if not configuration.reference:
            key = configuration.key.algorithm, configuration.key.buffers, configuration.key.bytes
            visits.setdefault(key, []).append(np.nanmax(configuration.time_s, axis=1))
    quartiles: dict[str, dict[int, float]] = {}
    for (algorithm, _, nbytes), times in visits.items():
        names = [algorithm] if algorithm in algorithms else []
        if operation != "allreduce" and "auto" in algorithms:
            names.append("auto")
        for name in names:
            own = quartiles.setdefault(name, {})
            own[nbytes] = min(_quartile(np.concatenate(times).tolist()), own.get(nbytes, np.inf))
    return quartiles
