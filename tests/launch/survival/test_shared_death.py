"""A rank that dies while others wait for it in shared memory causes an error, not a hang.


Most launchers end a job at the first death, before a survivor can report anything. Open MPI does not if it is started
with its user-level fault tolerance.
"""

import re

import pytest

from hpcdist.comm.launch import mpirun

pytestmark = pytest.mark.full

PROGRAM = """
import os, signal, sys, time
import numpy as np
from hpcdist.collectives.node import shared_memory
from hpcdist.comm import start
from hpcdist.errors import CommunicationError

session = start.start()
comm = session.comm
buffer = shared_memory.allocate(comm, 100_000, np.dtype(np.float32))
for call in range(50):
    if call == 20 and comm.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    while call == 20 and "MPI" in sys.argv and not comm.failed():
        comm.poll(comm.rank)  # MPI is told of a death while it progresses
    try:
        shared_memory.node_shared_allreduce(comm, buffer[: (10, 100_000)[call % 2]])
    except CommunicationError as error:
        print(f"rank {comm.rank}, call {call}: {error}", flush=True)
        time.sleep(2)  # until the other one has seen the same
        os._exit(0)
print("nobody missed rank 1", flush=True)
os._exit(1)
"""


@pytest.mark.parametrize("told_by", ["anybody", "MPI"])
def test_survivors_in_shared_memory_name_the_dead_rank(mpi, launch, told_by):
    """The kernel and the MPI library both report a death.

    Either may be first, unless the test waits for one of them.
    """
    if mpi.vendor != mpirun.OPEN_MPI:
        pytest.skip(f"{mpi.vendor} ends a job before its survivors can say anything")
    ended = launch(3, PROGRAM, told_by, options=["--with-ft", "ulfm"])
    for rank in (0, 2):
        # Rank 1 may die while another one still waits, in call 19, for the third.
        assert re.search(rf"rank {rank}, call (19|20): rank 1 of world \(process \d+\) has died", ended.stdout), ended
    assert ended.stdout.count("has died, while this rank waited in shared memory for another rank") == 2
