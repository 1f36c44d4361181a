"""Communication of `hpcdist doctor --job`: test messages, clocks, the run directory, and all rows to rank 0.

Every rank makes the same calls in the same order whatever it finds; its findings travel in its row. A rank that gets no
answer ends the job (`StageDeadline`) and names the neighbours that it waited for.
"""

import os
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import itemgetter
from pathlib import Path
from typing import Final

import numpy as np

from hpcdist.comm.communicator import Communicator, Nodes
from hpcdist.comm.doctor.facts import NodeFacts, RankFacts
from hpcdist.comm.doctor.job_checks import ClockOffset, Greeting, RankRow, RankTable
from hpcdist.comm.failure import failfast
from hpcdist.comm.record import clock_offsets
from hpcdist.errors import DeadlineError
from hpcdist.reporting import atomic

LIMIT_S: Final = 60.0  # for each stage; connections of thousands of ranks take seconds
LOOK_S: Final = 10.0  # NFS shows a new file when its cache of the directory is renewed
ROUNDS: Final = 20
LARGE_BYTES: Final = 1 << 20  # above the eager limit of MPI libraries: sent by the rendezvous protocol
_LOOK_AGAIN_S: Final = 0.1
_TAG: Final = 4711


@dataclass(frozen=True)
class Gathered:
    """Facts of all ranks, as rank 0 has them; ``failure``: why it cannot write the run directory."""

    table: RankTable
    offsets: tuple[ClockOffset, ...]
    failure: str


class StageDeadline:
    """Deadline of the stages of an examination: ends the job after ``limit_s`` seconds in one (local).

    ``fail`` is called with the error, in a thread of its own.
    """

    def __init__(
        self, where: str, limit_s: float = LIMIT_S, fail: Callable[[BaseException], object] = failfast.fail
    ) -> None:
        self._where, self._limit_s, self._fail = where, limit_s, fail
        self._timer: threading.Timer | None = None

    def stage(self, what: str, limit_s: float | None = None) -> None:
        """Begin the stage ``what`` and end the one before; ``limit_s`` replaces the usual limit."""
        self.stop()
        limit_s = self._limit_s if limit_s is None else limit_s
        text = f"{self._where}: {what} did not end within {limit_s:g} s; a rank, or the way to it, does not answer"
        self._timer = threading.Timer(limit_s, self._fail, (DeadlineError(text),))
        self._timer.daemon = True
        self._timer.start()

    def stop(self) -> None:
        """End the last stage."""
        if self._timer is not None:
            self._timer.cancel()


def gather(
    comm: Communicator,
    facts: RankFacts,
    describe: Callable[[], NodeFacts],
    directory: Path,
    stage: Callable[[str], None],
    prefix: str = ".hpcdist-doctor",
    clock: Callable[[], float] = time.time,
    look_s: float = LOOK_S,
) -> Gathered | None:
    """Return the facts of all ranks on rank 0, None on the others. Collective over ``comm``.

    ``describe`` is called by one rank of each node. Rank 0 makes ``directory`` where it is missing, and in it a probe
    file, whose name begins with ``prefix``, while the others look for it. ``stage`` is called before each step, for a
    deadline.
    """
    stage("finding out which ranks share a node")
    nodes = comm.nodes()
    greeting = greet(comm, nodes, stage)
    stage("comparing clocks")
    offsets = () if nodes.leaders is None else compare_clocks(nodes.leaders, clock)
    stage(f"looking for a new file in {directory}")
    name, text, failure = comm.broadcast_object(_leave_text(directory, prefix) if comm.rank == 0 else None)
    try:
        machine, unseen = None, ""
        if nodes.intra.rank == 0:
            machine = describe()
            unseen = "" if failure else look_for_text(directory / name, text, look_s)
        stage("collecting what all ranks found")
        # In two levels, by the first rank of each node: not every rank of a large job holds the rows of all.
        own = nodes.intra.allgather_object(RankRow(nodes.index, nodes.intra.rank, facts, greeting, machine, unseen))
        all_rows = [] if nodes.leaders is None else nodes.leaders.allgather_object(own)
    finally:
        if comm.rank == 0 and not failure:
            atomic.discard(directory / name)
    if comm.rank > 0:
        return None
    ranks = zip(chain(*nodes.members), chain(*all_rows), strict=True)
    return Gathered(RankTable([row for _, row in sorted(ranks, key=itemgetter(0))]), offsets, failure)


def greet(comm: Communicator, nodes: Nodes, stage: Callable[[str], None]) -> Greeting:
    """Exchange small messages and a large one in two rings, in the node and across nodes; return the result.

    Collective over ``comm``, with an allreduce at the end.
    """
    own = nodes.intra.rank
    stage(f"messages inside the node with {_neighbours(nodes.members[nodes.index], comm.rank)}")
    inside, inside_s = _ring(nodes.intra)
    across = [ranks[own] for ranks in nodes.members if own < len(ranks)]
    stage(f"messages between nodes with {_neighbours(across, comm.rank)}")
    outside, across_s = _ring(nodes.peers)
    stage("an allreduce")
    times = []
    total = np.zeros(1)
    for _ in range(ROUNDS):
        total[0] = comm.rank + 1.0
        begin = time.perf_counter()
        comm.allreduce(total)
        times.append(time.perf_counter() - begin)
    reduced = total[0] == comm.size * (comm.size + 1) / 2
    return Greeting(inside and outside and bool(reduced), inside_s, across_s, float(np.median(times)))


def _neighbours(ring: Sequence[int], rank: int) -> str:
    place = list(ring).index(rank)
    others = sorted({ring[place - 1], ring[(place + 1) % len(ring)]} - {rank})
    return " and ".join(f"rank {other}" for other in others) or "nobody"


def _ring(comm: Communicator) -> tuple[bool, float | None]:
    """Return whether the previous rank's data arrived unchanged, and the median seconds of a small round."""
    if comm.size == 1:
        return True, None
    to, source = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    large, received = np.full(LARGE_BYTES // 8, comm.rank, np.int64), np.full(LARGE_BYTES // 8, -1, np.int64)
    comm.sendrecv(large, to, received, source, _TAG)  # the first: connections are made
    right, times = bool((received == source).all()), []
    for number in range(ROUNDS):
        small, heard = np.array([comm.rank, number]), np.full(2, -1)
        begin = time.perf_counter()
        comm.sendrecv(small, to, heard, source, _TAG)
        times.append(time.perf_counter() - begin)
        right = right and heard.tolist() == [source, number]
    return right, float(np.median(times))


def compare_clocks(leaders: Communicator, clock: Callable[[], float] = time.time) -> tuple[ClockOffset, ...]:
    """Return the clock offset of each rank to rank 0, on rank 0 only. Collective over ``leaders``."""
    readings = clock_offsets.measure_offsets(leaders, lambda: round(clock() * 1e9))
    return tuple(ClockOffset(reading.offset_ns / 1e9, reading.bound_ns / 1e9) for reading in readings)


def _leave_text(directory: Path, prefix: str) -> tuple[str, str, str]:
    """Write a probe file into ``directory``; return its name, its text, and the error ("" where it was written)."""
    name, text = f"{prefix}-{secrets.token_hex(8)}", secrets.token_hex(16)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with (directory / name).open("x") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        return name, text, error.strerror or str(error)
    return name, text, ""


def look_for_text(path: Path, text: str, patience_s: float = LOOK_S) -> str:
    """Return why ``path`` does not show ``text`` within ``patience_s`` s, or its directory is not writable (local)."""
    until = time.monotonic() + patience_s
    while True:
        try:
            if path.read_text() == text:
                return "" if os.access(path.parent, os.W_OK | os.X_OK) else "this user may not write there"
            reason = "another directory, with another content"
        except FileNotFoundError:
            reason = "another directory" if os.path.isdir(path.parent) else "there is no such directory"
        except OSError as error:
            reason = error.strerror or str(error)
        if time.monotonic() > until:
            return f"{reason}: what rank 0 has written is not there"
        time.sleep(_LOOK_AGAIN_S)
