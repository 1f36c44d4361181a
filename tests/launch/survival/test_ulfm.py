"""Ranks killed at random while others continue: Open MPI with ``--with-ft ulfm``, real processes, real deaths."""

import os

import pytest

from hpcdist.comm.launch import mpirun
from hpcdist.errors import MissingCapabilityError

pytestmark = pytest.mark.full

KILLS = int(os.environ.get("HPCDIST_TEST_DEATHS", "3"))
RANKS = 4

# A rank kills itself at a random moment of one collective after the other; those who live go on. Of four ranks one
# stays in the end where nobody replaces them, so a life of one rank is the last.
PROGRAM = """
import os, random, signal, sys, threading
from pathlib import Path
import numpy as np
from hpcdist import collectives
from hpcdist.comm.mpi import spawn
from hpcdist.comm import start
from hpcdist.comm.failure.rank_failures import is_rank_failure

mode, kills, out = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
newcomer = "new" in sys.argv
session = start.start_joined() if newcomer else start.start()
everyone = session.comm
assert everyone.supports("ulfm") and session.outlives
assert not everyone.supports("thread_multiple"), "a lock held by a thread that meets a dead rank blocks it"
if newcomer:
    life, size, places = everyone.broadcast_object(None)
    place = places[everyone.rank]
else:
    life, size, place = 0, everyone.size, everyone.rank


def exchange(comm, name, buffer):
    if name == "sendrecv":
        arrived = np.zeros_like(buffer)
        comm.sendrecv(buffer, (comm.rank + 1) % comm.size, arrived, (comm.rank - 1) % comm.size)
        buffer *= comm.size
    elif name == "iallreduce":
        request = comm.iallreduce(buffer)
        while not request.test():
            pass
    else:
        collectives.allreduce(comm, buffer, name)


def live(session):
    comm, drawn = session.comm, random.Random(life)
    name = drawn.choice(["ring", "native", "node_shared", "sendrecv", "iallreduce"])
    buffer = np.ones(drawn.choice([10, 3000, 500_000]), np.float32)
    comm.barrier()
    if life < kills and comm.rank == drawn.randrange(comm.size):
        threading.Timer(drawn.random() * 0.05, os.kill, (os.getpid(), signal.SIGKILL)).start()
    steps = 0
    while life < kills or steps < 5:
        buffer[:] = 1
        exchange(comm, name, buffer)
        assert (buffer == comm.size).all(), name
        steps += 1


def meet():
    global everyone, life, place, size
    everyone, before = everyone.shrink("everyone"), everyone
    before.abandon()
    places = everyone.allgather_object(place)
    life = max(everyone.allgather_object(life)) + 1
    lost = sorted(set(range(size)) - set(places))
    if mode == "replace":
        everyone = spawn.spawn(everyone, len(lost), [__file__, mode, str(kills), str(out), "new"], "everyone")
        everyone.broadcast_object((life, size, [*places, *lost]))
    else:
        place, size = sorted(places).index(place), everyone.size


met = True
while True:
    try:
        if not met:
            meet()
            met = True
        session = session.survive(everyone.split(0, place, "training"))
        session.record(out, 60.0)
        live(session)
        break
    except Exception as error:
        if not is_rank_failure(error, everyone):
            raise
        met = False
        everyone.revoke()
        session.stop_recording()
print(f"rank {session.comm.rank} of {session.comm.size}, life {life}", flush=True)
session.leave(7)
"""


@pytest.fixture
def launch_with_ulfm(mpi, launch):
    """Return a function that starts a program with fault tolerance. Skip if this MPI does not support it."""
    try:
        options = mpirun.ulfm_options(mpi)[:-3]  # the fixture has those for more ranks than cores already
    except MissingCapabilityError as error:
        pytest.skip(str(error))
    return lambda *arguments, **extra: launch(RANKS, PROGRAM, *arguments, options=options, **extra)


@pytest.mark.parametrize("mode", ["shrink", "replace"])
def test_survivors_continue_after_deaths_at_random_moments(launch_with_ulfm, tmp_path, mode):
    kills = KILLS if mode == "replace" else min(KILLS, RANKS - 1)
    size = RANKS if mode == "replace" else RANKS - kills
    folder = tmp_path / "launch"
    folder.mkdir()
    ended = launch_with_ulfm(
        mode, str(kills), str(tmp_path / "run"), HPCDIST_SURVIVE=mode, HPCDIST_LAUNCH_DIR=str(folder)
    )
    lines = sorted(line for line in ended.stdout.splitlines() if line.startswith("rank "))
    assert lines == [f"rank {rank} of {size}, life {kills}" for rank in range(size)], ended.output
    assert (folder / "ended").read_text() == "7"
    records = sorted(path.name for path in (tmp_path / "run" / "recorder").glob("*.rec"))
    assert records == [f"rank-{rank:05d}.rec" for rank in range(size)], "and none of those who left"
    assert len(list(folder.glob("pid-*"))) == RANKS + (kills if mode == "replace" else 0)


def test_survival_without_fault_tolerance_is_rejected(mpi, launch):
    ended = launch(1, "from hpcdist.comm.start import start\nstart()", HPCDIST_SURVIVE="shrink")
    assert (
        ended.code == 69 and "HPCDIST_SURVIVE=shrink requires the job to continue after rank failures" in ended.stderr
    ), ended.output
