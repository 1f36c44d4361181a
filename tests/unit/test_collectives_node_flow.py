"""Segments summed and spread inside a node, by ranks that need not keep step."""

import time

import numpy as np
import pytest

from hpcdist.arrays.ranges import Range, cut
from hpcdist.collectives import node_flow, node_flow_shared
from hpcdist.collectives.node_flow import NodeFlow
from hpcdist.collectives.node_flow_shared import SharedFlow, flow_of
from hpcdist.comm.communicator import Communicator
from hpcdist.comm.recording import recording
from hpcdist.comm.threads import run_threads

PART_BYTES = 48 * 8


@pytest.fixture(params=["shared", "messages"])
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> type[NodeFlow]:
    """Which flow `flow_of` returns on several ranks."""
    if request.param == "messages":
        monkeypatch.setattr(node_flow_shared, "MOST_OWNERS", 0)
    return NodeFlow if request.param == "messages" else SharedFlow


@pytest.mark.parametrize(("size", "owners"), [(1, 1), (2, 2), (3, 3), (5, 5), (4, 2), (3, 1)])
def test_segments_are_summed_by_their_owners_and_spread(
    kind: type[NodeFlow], size: int, owners: int, rng: np.random.Generator
) -> None:
    inputs = rng.integers(-99, 99, (size, 1000)).astype(np.float64)
    order = [*cut(Range(500, 1000), 48), *cut(Range(0, 500), 48)]
    assert len(order) > 2 * (node_flow.EARLY + node_flow.LATE)

    def body(comm: Communicator) -> None:
        for _ in range(2):  # the second call finds the numbers where the first left them
            once(comm)

    def once(comm: Communicator) -> None:
        buffer = inputs[comm.rank].copy()
        flow = flow_of(comm, owners, buffer, "sum", order, PART_BYTES)
        assert type(flow) is (kind if size > 1 else NodeFlow)
        for turn, segment in enumerate(order):
            time.sleep(1e-3 * ((turn + comm.rank) % 3 == 0))
            flow.sum_next()
            own = flow.own(segment)
            assert comm.rank < owners or own.size == 0
            own *= 2  # what the rest of the world would add
            flow.spread(segment)
        flow.finish()
        assert np.array_equal(buffer, 2 * inputs.sum(axis=0))

    run_threads(size, body)


def test_both_flows_give_the_same_bits(monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator) -> None:
    inputs = rng.standard_normal((4, 1000)).astype(np.float32)
    order = list(cut(Range(0, 1000), 48))

    def body(comm: Communicator) -> bytes:
        buffer = inputs[comm.rank].copy()
        flow = flow_of(comm, 4, buffer, "sum", order, PART_BYTES)
        for segment in order:
            flow.sum_next()
            flow.spread(segment)
        flow.finish()
        return buffer.tobytes()

    results = set(run_threads(4, body))
    monkeypatch.setattr(node_flow_shared, "MOST_OWNERS", 0)
    results |= set(run_threads(4, body))
    assert len(results) == 1


def test_what_a_rank_sends_inside_the_node() -> None:
    def body(comm: Communicator) -> None:
        buffer = np.ones(64 * 8 * 4)
        order = list(cut(Range(0, buffer.size), 256))
        with recording(comm) as traffic:
            flow = NodeFlow(comm, comm.size, buffer, "sum", order)
            for segment in order:
                flow.sum_next()
                flow.spread(segment)
            flow.finish()
        assert traffic.sent_bytes == 2 * (comm.size - 1) * buffer.nbytes // comm.size

    run_threads(4, body)
