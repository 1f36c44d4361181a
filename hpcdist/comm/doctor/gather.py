"""Communication of `hpcdist doctor --job`: test messages, clocks, the run directory, and all rows to rank 0.

A rank that gets no answer ends the job (`StageDeadline`) and names the neighbours that it waited for.
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
from hpcdist.comm.doctor.job_checks import Greeting, RankRow, RankTable
from hpcdist.comm.failure import failfast
from hpcdist.comm.record.clock_offsets import ClockReading, measure_offsets
from hpcdist.constants import NS_PER_S
from hpcdist.errors import DeadlineError
from hpcdist.reporting import atomic

LIMIT_S: Final = 60.0  # for each stage; connecting thousands of ranks takes seconds
LOOK_S: Final = 10.0  # NFS shows a new file only after it renews its directory cache
ROUNDS: Final = 20
LARGE_BYTES: Final = 1 << 20  # above the eager limit of MPI libraries: sent by the rendezvous protocol
_LOOK_AGAIN_S: Final = 0.1
_TAG: Final = 4711


@dataclass(frozen=True)
class Gathered:
    """All ranks' facts and test results, as collected on rank 0 by `gather`."""

    table: RankTable
    offsets: tuple[ClockReading, ...]
    failure: str  # error of rank 0 when it wrote to the run directory, or ""


class StageDeadline:
    """Timer that calls ``fail(error)`` if one stage of `hpcdist doctor --job` takes over ``limit_s`` seconds. Local."""

    def __init__(
        self, where: str, limit_s: float = LIMIT_S, fail: Callable[[BaseException], object] = failfast.fail
    ) -> None:
        # `where` names this rank in the error.
        self._where, self._limit_s, self._fail = where, limit_s, fail
        self._timer: threading.Timer | None = None

    def stage(self, what: str, limit_s: float | None = None) -> None:
        """Start the timer of a stage. ``what``: name of the stage. ``limit_s``: time limit, or None for the default."""
        self.stop()
        limit_s = self._limit_s if limit_s is None else limit_s
        text = f"{self._where}: {what} did not end within {limit_s:g} s; a rank, or the network to it, does not answer"
        self._timer = threading.Timer(limit_s, self._fail, (DeadlineError(text),))
        self._timer.daemon = True
        self._timer.start()

    def stop(self) -> None:
        """Cancel the timer of the current stage, if there is one."""
        if self._timer is not None:
            self._timer.cancel()


def gather(
    comm: Communicator,
    facts: RankFacts,
    describe_node: Callable[[], NodeFacts],
    directory: Path,
    announce_stage: Callable[[str], None],
    prefix: str = ".hpcdist-doctor",
    clock: Callable[[], float] = time.time,
    look_s: float = LOOK_S,
) -> Gathered | None:
    """Check messages, clocks and the run ``directory``. Return all ranks' results on rank 0, else None. Collective.

    ``describe_node``: function that returns the node's facts. ``announce_stage``: function to call before each stage.
    """
    announce_stage("finding out which ranks share a node")
    nodes = comm.nodes()
    greeting = greet(comm, nodes, announce_stage)
    announce_stage("comparing clocks")
    offsets = () if nodes.leaders is None else measure_offsets(nodes.leaders, lambda: round(clock() * NS_PER_S))
    announce_stage(f"looking for a new file in {directory}")
    # The result names the nodes that do not see rank 0's new file within `look_s` seconds.
    name, text, failure = comm.broadcast_object(_leave_text(directory, prefix) if comm.rank == 0 else None)
    try:
        machine, unseen = None, ""
        if nodes.intra.rank == 0:
            machine = describe_node()
            unseen = "" if failure else look_for_text(directory / name, text, look_s)
        announce_stage("collecting what all ranks found")
        # In two levels, by the first rank of each node, so that not every rank of a large job holds all rows.
        rows = nodes.intra.allgather_object(RankRow(nodes.index, nodes.intra.rank, facts, greeting, machine, unseen))
        all_rows = [] if nodes.leaders is None else nodes.leaders.allgather_object(rows)
    finally:
        if comm.rank == 0 and not failure:
            atomic.discard(directory / name)
    if comm.rank > 0:
        return None
    ranks = zip(chain(*nodes.members), chain(*all_rows), strict=True)
    return Gathered(RankTable([row for _, row in sorted(ranks, key=itemgetter(0))]), offsets, failure)


def greet(comm: Communicator, nodes: Nodes, announce_stage: Callable[[str], None]) -> Greeting:
    """Send test messages inside each node and between nodes, and run an allreduce. Return the results. Collective.

    ``announce_stage(name)`` is called before each test.
    """
    local_rank = nodes.intra.rank
    announce_stage(f"messages inside the node with {_neighbours(nodes.members[nodes.index], comm.rank)}")
    inside, inside_s = _ring(nodes.intra)
    across = [ranks[local_rank] for ranks in nodes.members if local_rank < len(ranks)]
    announce_stage(f"messages between nodes with {_neighbours(across, comm.rank)}")
    outside, across_s = _ring(nodes.peers)
    announce_stage("an allreduce")
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
    index = list(ring).index(rank)
    others = sorted({ring[index - 1], ring[(index + 1) % len(ring)]} - {rank})
    return " and ".join(f"rank {other}" for other in others) or "nobody"


def _ring(comm: Communicator) -> tuple[bool, float | None]:
    if comm.size == 1:
        return True, None
    to, source = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    large, received = np.full(LARGE_BYTES // 8, comm.rank, np.int64), np.full(LARGE_BYTES // 8, -1, np.int64)
    comm.sendrecv(large, to, received, source, _TAG)  # the first message opens connections
    right, times = bool((received == source).all()), []
    for number in range(ROUNDS):
        small, heard = np.array([comm.rank, number]), np.full(2, -1)
        begin = time.perf_counter()
        comm.sendrecv(small, to, heard, source, _TAG)
        times.append(time.perf_counter() - begin)
        right = right and heard.tolist() == [source, number]
    # True if all messages arrived intact, and the median seconds per small message.
    return right, float(np.median(times))


def _leave_text(directory: Path, prefix: str) -> tuple[str, str, str]:
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
    """Return "" once file ``path`` contains ``text``, or the reason why not after ``patience_s`` seconds. Local."""
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
            return f"{reason}: the file written by rank 0 is not there"
        time.sleep(_LOOK_AGAIN_S)
