"""The hierarchical algorithm: nodes of equal and unequal numbers of ranks, and what travels between them."""

import numpy as np
import pytest

from hpcdist.collectives import hierarchical, hierarchical_allreduce, leader_allreduce
from hpcdist.comm.communicator import Communicator
from hpcdist.comm.recording import recording
from hpcdist.comm.threads import run_threads

DTYPES = (np.float32, np.float64, np.int64)


@pytest.mark.parametrize("size", range(1, 9))
@pytest.mark.parametrize("ranks_per_node", [1, 2, 3, 4])
def test_hierarchical_over_nodes_equal_or_not(size: int, ranks_per_node: int, rng: np.random.Generator) -> None:
    cases = [rng.integers(-50, 50, (size, count)).astype(dtype) for dtype in DTYPES for count in (0, 1, 5, 300)]

    def body(comm: Communicator) -> None:
        assert comm.nodes().uniform == (size % ranks_per_node == 0 or size < ranks_per_node)
        for inputs in cases:
            for op, expected in (("sum", inputs.sum(axis=0)), ("min", inputs.min(axis=0))):
                buffer = inputs[comm.rank].copy()
                hierarchical_allreduce(comm, buffer, op)
                assert np.array_equal(buffer, expected)

    run_threads(size, body, ranks_per_node)


@pytest.mark.parametrize(("size", "ranks_per_node"), [(8, 4), (8, 3), (7, 2), (6, 2)])
def test_hierarchical_gives_all_ranks_the_same_bits(size: int, ranks_per_node: int, rng: np.random.Generator) -> None:
    inputs = rng.standard_normal((size, 999)).astype(np.float32)

    def body(comm: Communicator) -> bytes:
        buffer = inputs[comm.rank].copy()
        hierarchical_allreduce(comm, buffer)
        return buffer.tobytes()

    assert len(set(run_threads(size, body, ranks_per_node))) == 1


def test_hierarchical_sends_one_part_in_m_between_nodes() -> None:
    """8 ranks on 2 nodes of 4: a quarter of the buffer takes the ring of 2 between the nodes."""

    def body(comm: Communicator) -> None:
        buffer = np.full(512, 2.0**comm.rank)
        intra = comm.split(comm.rank // 4)
        inter = comm.dup().split(comm.rank % 4)
        assert intra is not None and inter is not None
        with recording(comm) as traffic:
            hierarchical(intra, inter, buffer)
        assert (buffer == 255).all()
        inside, between = 2 * 3 * buffer.nbytes // 4, buffer.nbytes // 4
        assert traffic.sent_bytes == inside + between

    run_threads(8, body)


def test_leaders_speak_for_nodes_of_any_size() -> None:
    """Nodes of 4 and 2 ranks: the leaders send the whole buffer between the nodes, the others nothing."""

    def body(comm: Communicator) -> None:
        buffer = np.full(512, 2.0**comm.rank)
        intra = comm.split(comm.rank // 4)
        leaders = comm.split(0 if comm.rank % 4 == 0 else None)
        assert intra is not None
        with recording(comm) as traffic:
            leader_allreduce(intra, leaders, buffer)
        assert (buffer == 63).all()
        m = intra.size
        chunk = buffer.nbytes // m
        ring = 2 * (m - 1) * chunk
        if leaders is None:
            assert traffic.sent_bytes == ring + chunk  # the own chunk to the leader
        else:
            assert traffic.sent_bytes == ring + (m - 1) * chunk + buffer.nbytes  # a chunk to each, and the ring of 2

    run_threads(6, body)
