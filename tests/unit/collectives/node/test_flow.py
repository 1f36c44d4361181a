"""Segments are summed and spread inside a node by ranks that run at different speeds."""

import threading
import time

import numpy as np
import pytest

from harness.jobs import LIMIT_S
from harness.marks import on_threads
from hpcdist import collectives
from hpcdist.arrays.ranges import Range, cut
from hpcdist.collectives.node import flow
from hpcdist.collectives.node.flow import NodeFlow, SharedFlow, flow_of
from hpcdist.comm.record.timing import count_traffic
from hpcdist.comm.threads.communicator import run_threads
from hpcdist.errors import CommunicationError

PART_BYTES = 48 * 8


@pytest.fixture(params=["shared", "messages"])
def flow_class(request, monkeypatch):
    """The class of flow that `flow_of` returns on several ranks."""
    if request.param == "messages":
        monkeypatch.setattr(flow, "MOST_OWNERS", 0)
    return NodeFlow if request.param == "messages" else SharedFlow


@pytest.mark.parametrize(("size", "owners"), [(1, 1), (2, 2), (3, 3), (5, 5), (4, 2), (3, 1)])
def test_segments_are_summed_by_owners_and_spread(flow_class, size, owners, rng):
    inputs = rng.integers(-99, 99, (size, 1000)).astype(np.float64)
    order = [*cut(Range(500, 1000), 48), *cut(Range(0, 500), 48)]
    assert len(order) > 2 * (flow.EARLY + flow.LATE)

    def body(comm):
        for _ in range(2):  # the second call starts with the counters of the first
            sum_and_spread(comm)

    def sum_and_spread(comm):
        buffer = inputs[comm.rank].copy()
        flow = flow_of(comm, owners, buffer, "sum", order, PART_BYTES)
        assert type(flow) is (flow_class if size > 1 else NodeFlow)
        for turn, segment in enumerate(order):
            time.sleep(1e-3 * ((turn + comm.rank) % 3 == 0))
            flow.sum_next()
            local_data = flow.local_view(segment)
            assert comm.rank < owners or local_data.size == 0
            local_data *= 2  # the contribution of the other nodes
            flow.spread(segment)
        flow.finish()
        assert np.array_equal(buffer, 2 * inputs.sum(axis=0))

    run_threads(size, body)


def sum_and_spread_many(comm, owners, part_bytes=PART_BYTES):
    """Sum and spread more segments than there are slots."""
    buffer, elements = np.full(owners * part_bytes * 3, comm.rank + 1.0), owners * part_bytes // 8
    order = list(cut(Range(0, buffer.size), elements))
    flow = flow_of(comm, owners, buffer, "sum", order, part_bytes)
    assert type(flow) is SharedFlow
    for segment in order:
        flow.sum_next()
        flow.spread(segment)
    flow.finish()
    assert (buffer == comm.size * (comm.size + 1) / 2).all()


@on_threads(4)
def test_successive_calls_may_change_owners_and_part_size(comm):
    for owners, part_bytes in ((1, 64), (4, 64), (2, 512), (4, 64), (1, 128)):
        sum_and_spread_many(comm, owners, part_bytes)


def test_message_that_arrives_during_a_wait_can_be_received():
    sent = threading.Event()

    def body(comm):
        message = np.full(3, comm.rank, np.float32)
        if comm.rank == 1:
            comm.send(message, 0, tag=7)
            sent.set()
            time.sleep(0.05)  # rank 0 waits, and progresses other messages
        sent.wait(LIMIT_S)
        sum_and_spread_many(comm, 2)
        if comm.rank == 0:
            comm.recv(message, 1, tag=7)
        assert (message == 1).all()

    run_threads(2, body, deadline_s=5)


@on_threads(2, deadline_s=10)
def test_interrupted_call_blocks_the_next_until_release(comm):
    sum_and_spread_many(comm, 2)
    if comm.rank == 0:
        block = flow._memory[comm].block
        block.progress = lambda: (_ for _ in ()).throw(KeyboardInterrupt)
        with pytest.raises(KeyboardInterrupt):
            sum_and_spread_many(comm, 2)
        del block.progress
        with pytest.raises(CommunicationError, match=r"was aborted.* collectives\.release"):
            sum_and_spread_many(comm, 2)
    collectives.release(comm)
    sum_and_spread_many(comm, 2)


@on_threads(4, ranks_per_node=2)
def test_release_frees_memory_without_a_split(comm):
    with count_traffic(comm) as traffic:
        collectives.release(comm)
    assert not traffic.calls
    buffer = np.ones(500)
    collectives.allreduce(comm, buffer, "hierarchical")
    node = comm.nodes().intra
    local_data, other = comm.split(comm.rank // 2), comm.split(comm.rank % 2)
    assert local_data is not None and other is not None
    collectives.hierarchical(local_data, other, buffer)
    assert (buffer == 16).all()
    assert {node, local_data} <= set(flow._memory)
    collectives.release(comm)
    assert node not in flow._memory and local_data in flow._memory
    collectives.release(local_data)
    assert local_data not in flow._memory
    collectives.allreduce(comm, buffer, "hierarchical")
    assert (buffer == 64).all()


def test_both_flows_give_the_same_bits(monkeypatch, rng):
    inputs = rng.standard_normal((4, 1000)).astype(np.float32)
    order = list(cut(Range(0, 1000), 48))

    def body(comm):
        buffer = inputs[comm.rank].copy()
        flow = flow_of(comm, 4, buffer, "sum", order, PART_BYTES)
        for segment in order:
            flow.sum_next()
            flow.spread(segment)
        flow.finish()
        return buffer.tobytes()

    results = set(run_threads(4, body))
    monkeypatch.setattr(flow, "MOST_OWNERS", 0)
    results |= set(run_threads(4, body))
    assert len(results) == 1


@on_threads(4)
def test_bytes_sent_inside_the_node(comm):
    buffer = np.ones(64 * 8 * 4)
    order = list(cut(Range(0, buffer.size), 256))
    with count_traffic(comm) as traffic:
        flow = NodeFlow(comm, comm.size, buffer, "sum", order)
        for segment in order:
            flow.sum_next()
            flow.spread(segment)
        flow.finish()
    assert traffic.sent_bytes == 2 * (comm.size - 1) * buffer.nbytes // comm.size
