"""The algorithm through shared memory: no bytes in messages, pieces in turn, one node only."""

import numpy as np
import pytest

from hpcdist import collectives
from hpcdist.arrays.ledger import Ledger
from hpcdist.collectives import node_shared, node_shared_allreduce
from hpcdist.comm.communicator import Communicator
from hpcdist.comm.recording import recording
from hpcdist.comm.threads import run_threads
from hpcdist.errors import UsageError


@pytest.mark.parametrize("size", [2, 3, 8])
def test_node_shared_sends_no_bytes(size: int) -> None:
    def body(comm: Communicator) -> None:
        buffer = np.full(1000, 2.0**comm.rank)
        node_shared_allreduce(comm, buffer)  # takes the memory
        buffer[...] = 2.0**comm.rank
        with recording(comm) as traffic:
            node_shared_allreduce(comm, buffer)
        assert (buffer == 2**size - 1).all()
        assert traffic.calls == {"barrier": 2} and traffic.sent_bytes == 0

    run_threads(size, body)


@pytest.mark.parametrize("size", [2, 3, 5])
def test_node_shared_takes_large_buffers_in_pieces(
    size: int, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_shared, "PIECE_BYTES", 4096)
    counts = [512 * pieces + extra for pieces in (1, 2, 5) for extra in (-1, 0, 1)]
    inputs = [rng.integers(0, 1000, (size, count)).astype(np.float64) for count in counts]

    def body(comm: Communicator) -> None:
        for brought in inputs:
            buffer = brought[comm.rank].copy()
            node_shared_allreduce(comm, buffer)
            assert np.array_equal(buffer, brought.sum(axis=0))

    run_threads(size, body)


def test_node_shared_sums_in_rank_order(rng: np.random.Generator) -> None:
    inputs = rng.standard_normal((6, 400)).astype(np.float32)

    def body(comm: Communicator) -> None:
        buffer = inputs[comm.rank].copy()
        node_shared_allreduce(comm, buffer)
        assert np.array_equal(buffer, np.add.reduce(inputs, axis=0))

    run_threads(6, body)


def test_node_shared_refuses_several_nodes() -> None:
    with pytest.raises(UsageError, match="4 ranks of world are on 2; choose hierarchical"):
        run_threads(4, lambda comm: node_shared_allreduce(comm, np.zeros(8)), ranks_per_node=2)


def test_what_is_kept_between_calls_is_counted_and_can_be_given_back() -> None:
    def body(comm: Communicator) -> None:
        ledger = Ledger()
        collectives.account(ledger)
        for _ in range(2):
            collectives.allreduce(comm, np.zeros(1000), "node_shared")
            collectives.allreduce(comm, np.zeros(1000, np.float16), "recursive_doubling")
        expected = 2 * node_shared.PIECE_BYTES + 4000 * 2  # shared memory, widened copy, received copy
        assert ledger.current["communication"] == expected
        collectives.release(comm)
        comm.allgather_object(None)  # threads see the arrays of each other until all have let go
        assert ledger.current["communication"] == 0
        collectives.allreduce(comm, np.ones(10), "node_shared")
        collectives.account(None)

    run_threads(2, body)
