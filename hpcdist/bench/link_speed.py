"""Measurements of links: messages between two ranks, and collectives, over many sizes.

A level is a kind of link: "node" inside a node, "network" between nodes. Each size is visited several times, because
disturbances of a machine last for seconds; the result is the first quartile of all visits. All sizes of an operation
use the same buffers, as in a training: other pages change times by up to a factor of 2.

Measured times jump where a library changes its protocol, or where a cache is full. `borders` locates these sizes by
bisection. Times alpha + beta * size grow between neighbouring sizes by a factor between 1 and the ratio of the sizes,
and lie on the lines through the next two points on either side. A clear violation of both is a jump. Disturbances look
the same, so both sizes are measured again, and the smaller time counts.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np

from hpcdist.arrays import backend
from hpcdist.arrays.backend import Array
from hpcdist.bench.collectives import run
from hpcdist.bench.collectives.results import ORDINARY, SHARED, CollectivesConfiguration, CollectivesRequest
from hpcdist.bench.device_speed import OPERATIONS, BusySeconds, CollectivePoint, LinkPoint, sizes
from hpcdist.collectives import release
from hpcdist.collectives.node import shared_memory
from hpcdist.comm.communicator import Communicator

Times = Mapping[int, float]  # seconds by bytes
Series = Mapping[str, Times]  # times of each algorithm or level
Report = Callable[[str], None]  # prints a message

STEP: Final = 1.12  # a larger deviation, as a factor, is a jump
HALVINGS: Final = 4
JUMPS: Final = 4  # maximum number of jumps of a series: on a busy machine, most times look like jumps
MULTIPLE: Final = 64  # bytes: all operations can split buffers of such sizes
INSIDE: Final = "node"
BETWEEN: Final = "network"
TAG: Final = 7003
LEAST_TURNS, MOST_TURNS = 2, 400  # turns of a visit
PACED_S: Final = 1e-3  # longer messages start together; for shorter ones, the barrier would distort the times
VISITS: Final = 4


class BorderTimes(NamedTuple):
    """Two dicts {series: {size in bytes: seconds}} near jumps: sizes measured again, and new sizes between them."""

    remeasured: dict[str, dict[int, float]]  # both sizes of each jump, with the smaller of two times
    between: dict[str, dict[int, float]]  # sizes between the two sizes of a jump


class _Bracket(NamedTuple):
    name: str
    left: int
    right: int

    @property
    def middle(self) -> int:
        """Geometric mean of the sizes ``left`` and ``right`` in bytes, rounded to a multiple of `MULTIPLE`."""
        return round((self.left * self.right) ** 0.5 / MULTIPLE) * MULTIPLE


def borders(durations: Series, measure: Callable[[Sequence[int]], Series]) -> BorderTimes:
    """Measure more sizes where a duration jumps between two sizes. Collective if ``measure`` is collective.

    ``durations``: {series name: {size in bytes: seconds}} of at least four sizes. ``measure``: function that takes
    a list of sizes, and returns a dict like ``durations`` that is equal on all ranks.
    """
    border_times = BorderTimes({}, {})
    jumps = {name: _jumps(times) for name, times in durations.items()}
    sizes_to_repeat = sorted({size for pairs in jumps.values() for pair in pairs for size in pair})
    if not sizes_to_repeat:
        return border_times
    repeated = measure(sizes_to_repeat)
    best = {name: dict(times) for name, times in durations.items()}
    for name, pairs in jumps.items():
        if pairs:
            lower = {size: min(best[name][size], repeated[name][size]) for pair in pairs for size in pair}
            best[name].update(lower)
            border_times.remeasured[name] = lower
    brackets = [_Bracket(name, *pair) for name, times in best.items() for pair in _jumps(times)]
    for _ in range(HALVINGS):
        brackets = [bracket for bracket in brackets if bracket.left < bracket.middle < bracket.right]
        if not brackets:
            break
        times = measure(sorted({bracket.middle for bracket in brackets}))
        for bracket in brackets:
            middle_s = times[bracket.name][bracket.middle]
            border_times.between.setdefault(bracket.name, {})[bracket.middle] = middle_s
            best[bracket.name][bracket.middle] = middle_s
        brackets = [_half(best[bracket.name], bracket) for bracket in brackets]
    return border_times


def _jumps(times: Times) -> list[tuple[int, int]]:
    points = sorted(times.items())
    jumps = [(_jump(points, index), points[index][0], points[index + 1][0]) for index in range(len(points) - 1)]
    return [(left, right) for factor, left, right in sorted(jumps, reverse=True)[:JUMPS] if factor > STEP]


def _jump(points: Sequence[tuple[int, float]], index: int) -> float:
    (left, left_s), (right, right_s) = points[index], points[index + 1]
    growth = right_s / left_s
    alone = max(growth / (right / left), 1 / growth)
    if index == 0 or index + 2 == len(points):
        return max(alone, 1.0)
    up = right_s / _through(points[index - 1], points[index], right)
    back = _through(points[index + 1], points[index + 2], left) / left_s
    # A bend, where the slope changes, deviates from one line only, or in opposite directions.
    steps = math.sqrt(up * back) if (up > 1) == (back > 1) else 1.0
    return max(alone, steps, 1 / steps, 1.0)


def _through(first: tuple[int, float], second: tuple[int, float], size: int) -> float:
    slope = max(0.0, (second[1] - first[1]) / (second[0] - first[0]))
    near = second if abs(second[0] - size) < abs(first[0] - size) else first
    return near[1] * size / near[0] if slope * near[0] > near[1] else near[1] + slope * (size - near[0])


def _half(times: Times, bracket: _Bracket) -> _Bracket:
    below = abs(math.log(times[bracket.middle] / times[bracket.left]))
    above = abs(math.log(times[bracket.right] / times[bracket.middle]))
    return bracket._replace(left=bracket.middle) if above > below else bracket._replace(right=bracket.middle)


def links(
    comm: Communicator, bounds: tuple[int, int], seconds: float, device_kind: str, print_line: Report
) -> tuple[LinkPoint, ...]:
    """Measure messages inside and between nodes. Return a point for each level and size. Collective over ``comm``.

    ``bounds``: (smallest, largest) message size in bytes. ``seconds``: approximate total duration. ``device_kind``:
    memory of the messages, "cpu" or "gpu". ``print_line``: function that prints progress.
    """
    points: list[LinkPoint] = []
    nodes, message_sizes = comm.nodes(), sizes(*bounds)
    is_shared = max(len(members) for members in nodes.members) > 1  # a node has several ranks
    levels = (INSIDE,) * is_shared + (BETWEEN,) * (nodes.count > 1)
    for level in levels:
        print_line(f"messages, level {level}")
        visit_s = seconds / len(levels) / len(message_sizes)
        points += _Level(comm, level, max(message_sizes), visit_s, device_kind).points(message_sizes)
    return tuple(points)


class _Level:
    def __init__(self, comm: Communicator, level: str, largest_bytes: int, seconds: float, device_kind: str) -> None:
        nodes = comm.nodes()
        self._comm, self._name, self._seconds = comm, level, seconds
        if level == INSIDE:
            self._across: Communicator | None = nodes.intra
            is_first = nodes.index == next(node for node, members in enumerate(nodes.members) if len(members) > 1)
        else:
            self._across = nodes.peers if nodes.uniform else nodes.leaders
            is_first = nodes.intra.rank == 0
        is_in_first_pair = is_first and self._across is not None and self._across.rank < 2
        self._alone = self._across if is_in_first_pair else None
        self._memory = [backend.zeros(largest_bytes, np.dtype(np.uint8), device_kind) for _ in range(2)]
        for array in self._memory:
            array[...] = 1  # unwritten pages all map to one page of zeros, which fits into any cache

    def points(self, nbytes: Sequence[int]) -> list[LinkPoint]:
        """Measure messages of the sizes ``nbytes`` and of sizes near jumps. Return sorted points. Collective."""
        plain = self._at(nbytes)
        rounds: list[dict[int, BusySeconds]] = []

        def measure(new_sizes: Sequence[int]) -> Series:
            rounds.append(self._at(new_sizes))
            return self._series(rounds[-1])

        border_times = borders(self._series(plain), measure)
        for size in border_times.remeasured.get(self._name, ()):
            plain[size] = BusySeconds(*map(min, plain[size][:2], rounds[0][size][:2]))
        points = [LinkPoint(self._name, 2, size, busy) for size, busy in plain.items()]
        between = {size: busy for times in rounds for size, busy in times.items()}
        new_sizes = border_times.between.get(self._name, ())
        points += [LinkPoint(self._name, 2, size, between[size], border=True) for size in new_sizes]
        return sorted(points, key=lambda point: point.nbytes)

    def _series(self, points: Mapping[int, BusySeconds]) -> Series:
        return {self._name: {nbytes: busy.all for nbytes, busy in points.items()}}

    def _at(self, nbytes: Sequence[int]) -> dict[int, BusySeconds]:
        times: dict[int, tuple[list[float], list[float]]] = {size: ([], []) for size in nbytes}
        for _ in range(VISITS):
            for size, (alone, together) in times.items():
                arguments = self._comm, self._memory[0][:size], self._memory[1][:size], self._seconds / 2 / VISITS
                alone += _messages(self._alone, *arguments, both_ways=False)
                together += _messages(self._across, *arguments, both_ways=True)
        by_rank = self._comm.allgather_object({size: tuple(map(_quartile, pair)) for size, pair in times.items()})
        return {size: BusySeconds(*map(max, zip(*(ranks[size] for ranks in by_rank), strict=True))) for size in nbytes}


def _quartile(times: Sequence[float]) -> float:
    return float(np.percentile(times, 25)) if times else 0.0


def _messages(
    comm: Communicator | None, everyone: Communicator, out: Array, into: Array, seconds: float, *, both_ways: bool
) -> list[float]:
    # Ranks 2 i and 2 i + 1 of ``comm`` exchange messages. A rank without a partner returns [].
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
    first = [turn() for _ in range(2)][-1] if sends else 0.0  # the first turn connects, and touches the pages
    slowest = max(everyone.allgather_object(first))
    count = int(np.clip(seconds / max(2 * slowest, 1e-7), LEAST_TURNS, MOST_TURNS))
    everyone.barrier()
    times = []
    for _ in range(count):
        if both_ways and slowest > PACED_S:
            everyone.barrier()  # otherwise a rank that finishes early leaves the links to the others
        if sends:
            times.append(turn())
    return times


def of_collectives(
    comm: Communicator,
    algorithms: Sequence[str],
    bounds: tuple[int, int],
    seconds: float,
    mpi_library: str,
    print_line: Report,
) -> tuple[CollectivePoint, ...]:
    """Measure collectives inside nodes and over all ranks. Return all points on every rank. Collective over ``comm``.

    ``algorithms``: algorithm names. ``bounds``: (smallest, largest) buffer size in bytes. ``seconds``: approximate
    total duration. ``mpi_library``: name of the MPI library. ``print_line``: function that prints progress.
    """
    nodes, points = comm.nodes(), []
    groups = [(INSIDE, nodes.intra)] if nodes.uniform and nodes.intra.size > 1 else []
    groups += [(BETWEEN, comm)] if nodes.count > 1 else []
    for level, group in groups:
        for operation in OPERATIONS:
            measure = _Operation(group, operation, algorithms, mpi_library, print_line)
            points += measure.points(level, bounds, seconds / len(groups) / len(OPERATIONS))
    return tuple(comm.broadcast_object(points))


class _Operation:
    def __init__(
        self, group: Communicator, operation: str, algorithms: Sequence[str], library: str, report: Report
    ) -> None:
        self._group, self._operation, self._algorithms = group, operation, algorithms
        self._library, self._report = library, report
        self._shares = shared_memory.is_available(group) and group.nodes().count == 1

    def points(self, level: str, bounds: tuple[int, int], seconds: float) -> list[CollectivePoint]:
        """Measure the collective at several sizes. Return a list of points, sorted by algorithm and size. Collective.

        ``level``: "node" or "network", stored in each point. ``bounds``: (smallest, largest) size in bytes.
        ``seconds``: approximate total duration.
        """
        buffer_sizes = sizes(*bounds)
        size_s = seconds / len(buffer_sizes)
        notes: list[str] = []
        memory = run.take_memory(self._group, self._request(buffer_sizes, size_s, 0), notes)
        for note in notes:
            self._report(note)
        plain = self._at(buffer_sizes, size_s, memory)
        border_times = borders(plain, lambda new_sizes: self._at(new_sizes, size_s, memory))
        release(self._group)
        final = {name: {**times, **border_times.remeasured.get(name, {})} for name, times in plain.items()}
        return sorted(
            CollectivePoint(self._operation, name, level, self._group.size, size, time_s, is_border)
            for series, is_border in ((final, False), (border_times.between, True))
            for name, times in series.items()
            for size, time_s in times.items()
        )

    def _at(self, nbytes: Sequence[int], seconds: float, memory: run.PoolMemory) -> Series:
        configurations: list[CollectivesConfiguration] = []
        for visit in range(VISITS):
            request = self._request(nbytes, seconds / VISITS, visit)
            run.run(self._group, request, self._library, configurations.extend, self._report, memory)
        best: Series = self._group.broadcast_object(_best(configurations, self._algorithms, self._operation))
        return best

    def _request(self, nbytes: Sequence[int], seconds: float, seed: int) -> CollectivesRequest:
        names = [name for name in self._algorithms if name != "auto" or self._operation == "allreduce"]
        if "auto" in self._algorithms and self._operation != "allreduce":
            names += ["node_shared", "native"] if self._shares else ["native"]
        return CollectivesRequest(
            operations=(self._operation,),
            algorithms=tuple(dict.fromkeys(names)),
            bytes=tuple(nbytes),
            dtypes=("float32",),
            buffers=(SHARED,) if self._shares else (ORDINARY,),
            seconds=seconds,
            iterations=None,
            warmup=1,
            least=LEAST_TURNS,
            check=True,
            hot=False,
            seed=seed,
        )


def _best(configurations: Sequence[CollectivesConfiguration], algorithms: Sequence[str], operation: str) -> Series:
    visits: dict[tuple[str, str, int], list[np.ndarray]] = {}
    for configuration in configurations:
        if not configuration.reference:
            key = configuration.key.algorithm, configuration.key.buffers, configuration.key.bytes
            visits.setdefault(key, []).append(np.nanmax(configuration.time_s, axis=1))
    quartiles: dict[str, dict[int, float]] = {}
    for (algorithm, _, nbytes), times in visits.items():
        names = [algorithm] if algorithm in algorithms else []
        names += ["auto"] if operation != "allreduce" and "auto" in algorithms else []
        for name in names:
            series = quartiles.setdefault(name, {})
            series[nbytes] = min(_quartile(np.concatenate(times).tolist()), series.get(nbytes, math.inf))
    return quartiles
