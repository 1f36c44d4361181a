"""Seconds of messages between two ranks, level by level, and of the collectives that trainings use, over sizes.

A level is a way from one rank to another: inside a node, and between nodes. On each, pairs of ranks send each other
messages of all sizes: one of them alone, there and back, of which a message is half, and then all at once, both ways at
the same time, as in a ring: what links have while all neighbours send as well. The
collectives are those of `hpcdist.bench.collectives`, with buffers that no cache remembers, among all ranks of a node
and among all there are.
"""

import time
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np

from hpcdist.arrays import backend
from hpcdist.bench import collectives
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
LEAST_TURNS, MOST_TURNS = 7, 400
FLOATS: Final = "float32"
PACED_S: Final = 1e-3  # messages that take longer begin together; with shorter ones the barrier would be seen
STEP: Final = 1.4  # times that grow by so much more than sizes, or fall, are a jump
HALVINGS: Final = 5


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
    names = levels(comm)
    for level in names:
        if say is not None and comm.rank == 0:
            say(f"messages, level {level}")
        measure = _Level(comm, level, seconds / len(names) / len(sizes(least, most)), on)
        plain = [measure.at(nbytes) for nbytes in sizes(least, most)]
        found += [*plain, *measure.borders(plain)]
    return tuple(found)


class _Level:
    """Messages over the links of one level. All of it is collective over ``comm``."""

    def __init__(self, comm: Communicator, level: str, seconds: float, on: str) -> None:
        nodes = comm.nodes()
        self._comm, self._name, self._seconds, self._on = comm, level, seconds, on
        if level == INSIDE:
            self._across: Communicator | None = nodes.intra
            first = nodes.index == 0
        else:
            self._across = nodes.peers if nodes.uniform else nodes.leaders
            first = nodes.intra.rank == 0
        is_first = first and self._across is not None and self._across.rank < 2
        self._alone = self._across if is_first else None

    def at(self, nbytes: int, *, border: bool = False) -> LinkPoint:
        """Return messages of ``nbytes``."""
        given = self._comm, nbytes, self._seconds / 2, self._on
        times = _message(self._alone, *given), _message(self._across, *given, both_ways=True)
        return LinkPoint(self._name, 2, nbytes, Busy(*times), border)

    def borders(self, points: Sequence[LinkPoint]) -> list[LinkPoint]:
        """Return points to both sides of where times jump between neighbours, by bisection."""
        found = []
        for left, right in zip(points, points[1:], strict=False):
            for _ in range(HALVINGS):
                between = round((left.nbytes * right.nbytes) ** 0.5 / 8) * 8
                if not (_jump(left, right) and left.nbytes < between < right.nbytes):
                    break
                middle = self.at(between, border=True)
                found.append(middle)
                left, right = (middle, right) if _jump(middle, right) > _jump(left, middle) else (left, middle)
        return found


def _jump(left: LinkPoint, right: LinkPoint) -> float:
    """Return how far the times of two sizes are from any line through them that rises: 0 where it could be one."""
    grows, sizes_grow = right.seconds.all / left.seconds.all, right.nbytes / left.nbytes
    if grows > STEP * sizes_grow:
        return grows / sizes_grow
    return 1 / grows if grows < 1 / STEP else 0.0


def _message(
    comm: Communicator | None, everyone: Communicator, nbytes: int, seconds: float, on: str, *, both_ways: bool = False
) -> float:
    """Return what a message takes, the first quartile, on the slowest pair. Collective over ``everyone``.

    It is half of there and back, or with ``both_ways`` all of both at once. A rank whose ``comm`` is None, or that has
    no partner there, looks on.
    """
    partner = -1 if comm is None else comm.rank ^ 1
    sends = comm is not None and 0 <= partner < comm.size
    out, into = (backend.zeros(nbytes if sends else 0, np.dtype(np.uint8), on) for _ in range(2))

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
        taken.append(turn() if sends else 0.0)
    found: float = max(everyone.allgather_object(float(np.percentile(taken, 25))))
    return found


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
            cells = _cells(group, operation, algorithms, bounds, seconds / len(whole) / len(OPERATIONS))
            kept: list[Configuration] = []
            collectives.run(group, cells, mpi_library, kept.extend, say if comm.rank == 0 else _silent)
            release(group)
            best = _best(kept, algorithms, operation)
            found += [
                CollectivePoint(operation, *key[:1], level, group.size, key[1], value) for key, value in best.items()
            ]
    return tuple(comm.broadcast_object(found))


def _silent(text: str) -> None:
    """Say nothing: another group of ranks speaks."""


def _cells(
    group: Communicator, operation: str, algorithms: Sequence[str], bounds: tuple[int, int], seconds: float
) -> Cells:
    """Return what is measured of one operation. Collective over ``group``."""
    wanted = sizes(*bounds, per_octave=1)
    shares = node_shared.is_available(group) and group.nodes().count == 1
    named = [name for name in algorithms if name != "auto" or operation == "allreduce"]
    if "auto" in algorithms and operation != "allreduce":
        named += ["node_shared"] if shares else []
        named += ["native"]
    return Cells(
        operations=(operation,),
        algorithms=tuple(dict.fromkeys(named)),
        bytes=wanted,
        dtypes=(FLOATS,),
        buffers=(SHARED,) if shares else (ORDINARY,),
        seconds=seconds / len(wanted),
        iterations=None,
        warmup=2,
        least=5,
        check=True,
        hot=False,
        seed=0,
    )


def _best(kept: Sequence[Configuration], algorithms: Sequence[str], operation: str) -> dict[tuple[str, int], float]:
    """Return seconds by (algorithm, bytes) on the slowest rank, the first quartile; "auto" is the fastest."""
    found: dict[tuple[str, int], float] = {}
    fastest: dict[int, float] = {}
    for one in kept:
        if one.reference:
            continue
        time_s = float(np.percentile(np.nanmax(one.time_s, axis=1), 25))
        key = (one.key.algorithm, one.key.bytes)
        found[key] = min(time_s, found.get(key, np.inf))
        fastest[one.key.bytes] = min(time_s, fastest.get(one.key.bytes, np.inf))
    named = {key: value for key, value in found.items() if key[0] in algorithms}
    if operation != "allreduce" and "auto" in algorithms:
        named |= {("auto", nbytes): value for nbytes, value in fastest.items()}
    return named
