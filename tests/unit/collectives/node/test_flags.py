"""Node counters: data written before a counter is raised is visible after the wait, and dead ranks are detected."""

import numpy as np
import pytest

from harness.marks import on_threads
from hpcdist.comm.threads.communicator import run_threads
from hpcdist.errors import CommunicationError, DeadlineError
from hpcdist.strategies.parameter_server.shared_memory import NodeFlags


@pytest.mark.parametrize("size", range(1, 9))
def test_token_passes_through_all_ranks(size):
    rounds = 20

    def body(comm):
        flags, block = NodeFlags(comm, 3), comm.shared(8)
        value, before = block.views[0].view(np.int64), (comm.rank - 1) % size
        seen = []
        for turn in range(rounds):
            if comm.rank > 0 or turn > 0:
                flags.wait(before, 1, turn + (comm.rank > 0))
            seen.append(int(value[0]))
            value[0] += 1
            flags.raise_to(1, turn + 1)
        flags.wait(size - 1, 1, rounds)
        comm.barrier()
        flags.close()
        return seen

    results = run_threads(size, body)
    assert [results[rank][turn] for turn in range(rounds) for rank in range(size)] == list(range(rounds * size))


@on_threads(1, deadline_s=0.2)
def test_counters_of_a_rank_are_independent(comm):
    flags = NodeFlags(comm, 2)
    flags.raise_to(0, 5)
    flags.wait(0, 0, 4)
    with pytest.raises(DeadlineError):
        flags.wait(0, 1, 1)
    flags.raise_to(1, 1)
    flags.wait(0, 1, 1)
    with pytest.raises(DeadlineError):
        flags.wait(0, 1, 2)


def test_wait_for_a_failed_rank_is_released():
    def body(comm):
        flags = NodeFlags(comm, 1)
        if comm.rank == 1:
            raise ValueError("on purpose")
        with pytest.raises(CommunicationError, match="another rank failed"):
            flags.wait(1, 0, 1)

    with pytest.raises(ValueError, match="on purpose"):
        run_threads(2, body)


@on_threads(2, deadline_s=0.2)
def test_wait_ends_at_the_deadline(comm):
    flags = NodeFlags(comm, 1)
    if comm.rank == 0:
        with pytest.raises(DeadlineError):
            flags.wait(1, 0, 1)
