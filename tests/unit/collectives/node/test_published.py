"""Memory in which ranks publish data for others: turns, growth, and interrupted waits."""

import numpy as np
import pytest

from hpcdist.collectives.node.flow import PublishedMemory
from hpcdist.comm.threads.communicator import run_threads
from hpcdist.errors import CommunicationError

RANKS, TURNS = 3, 40


def test_alternating_parts_are_read_as_published(rng):
    """Two parts alternate, like rows and results. Each grows sometimes, and the header holds its length."""
    lengths, pauses = rng.integers(0, 300, (TURNS, RANKS)), rng.random((TURNS, RANKS)) < 0.2
    values = rng.standard_normal((2, TURNS, RANKS, 300))

    def body(comm):
        memory = PublishedMemory(comm, 2)
        assert memory.is_shared
        for turn in range(TURNS):
            memory.head[comm.rank][:] = turn, lengths[turn, comm.rank]
            memory.publish()
            memory.wait()
            heads = np.stack(memory.head)
            np.testing.assert_array_equal(heads[:, 0], turn)
            memory.grow({"there": int(heads[:, 1].max()) * 8, "back": turn})
            for part, local_data in zip(("there", "back"), values[:, turn], strict=True):
                size = int(heads[comm.rank, 1]) if part == "there" else turn // 8
                memory.part(comm.rank, part, (size,), np.dtype(np.float64))[...] = local_data[comm.rank, :size]
                memory.publish()
                if pauses[turn, comm.rank]:
                    sum(range(10000))
                memory.wait()
                for rank in range(RANKS):
                    size = int(heads[rank, 1]) if part == "there" else turn // 8
                    read = memory.part(rank, part, (size,), np.dtype(np.float64))
                    np.testing.assert_array_equal(read, local_data[rank, :size])

    run_threads(RANKS, body)


def test_interrupted_wait_blocks_further_publishing(monkeypatch):
    def body(comm):
        memory = PublishedMemory(comm, 1)
        if comm.rank:
            return
        monkeypatch.setattr(memory._counters.block, "progress", lambda: 1 // 0)
        memory.publish()
        with pytest.raises(ZeroDivisionError):
            memory.wait()
        with pytest.raises(CommunicationError, match="was aborted"):
            memory.publish()

    run_threads(2, body)
