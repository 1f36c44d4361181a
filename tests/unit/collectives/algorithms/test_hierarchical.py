"""The hierarchical algorithm: nodes with equal and unequal numbers of ranks, segments, and traffic between nodes."""

import importlib
import time

import numpy as np
import pytest

from harness.marks import on_threads
from hpcdist.collectives import hierarchical, hierarchical_allreduce
from hpcdist.comm.threads.communicator import run_threads

MODULE = importlib.import_module(
    "hpcdist.collectives.algorithms.hierarchical"
)  # the package has the function under this name
DTYPES = (np.float32, np.float64, np.int64)
SHAPES = [(8, 4), (8, 2), (8, 3), (7, 2), (6, 2), (6, 3), (5, 3), (4, 1), (3, 1), (2, 1), (12, 3)]  # ranks, per node


@pytest.fixture
def short_segments(monkeypatch):
    """Make segments so short that a buffer of a few KiB needs more of them than may be in flight."""
    monkeypatch.setattr(MODULE, "SEGMENT_BYTES", 64)


@pytest.mark.parametrize("size", range(1, 9))
@pytest.mark.parametrize("ranks_per_node", [1, 2, 3, 4])
@on_threads("size", ranks_per_node="ranks_per_node")
def test_hierarchical_with_equal_and_unequal_nodes(comm, size, ranks_per_node, rng):
    cases = [rng.integers(-50, 50, (size, count)).astype(dtype) for dtype in DTYPES for count in (0, 1, 5, 300)]
    assert comm.nodes().uniform == (size % ranks_per_node == 0 or size < ranks_per_node)
    for inputs in cases:
        for op, expected in (("sum", inputs.sum(axis=0)), ("min", inputs.min(axis=0))):
            buffer = inputs[comm.rank].copy()
            hierarchical_allreduce(comm, buffer, op)
            assert np.array_equal(buffer, expected)


@pytest.mark.usefixtures("short_segments")
@pytest.mark.parametrize(("size", "ranks_per_node"), SHAPES)
@on_threads("size", ranks_per_node="ranks_per_node")
def test_hierarchical_with_many_segments(comm, size, ranks_per_node, rng):
    cases = [rng.integers(-50, 50, (size, count)).astype(np.float32) for count in (1, 17, 500, 2001)]
    for inputs in cases:
        buffer = inputs[comm.rank].copy()
        hierarchical_allreduce(comm, buffer)
        assert np.array_equal(buffer, inputs.sum(axis=0))


@pytest.mark.parametrize("node_of", [[0, 1, 0, 1], [0, 1, 1, 0], [0, 1, 1, 0, 2, 2], [1, 0, 0, 2, 1, 0]])
def test_hierarchical_with_ranks_interleaved_over_nodes(node_of, rng):
    inputs = rng.standard_normal((len(node_of), 700))

    def body(comm):
        comm.declared_node = node_of[comm.rank]
        buffer = inputs[comm.rank].copy()
        hierarchical_allreduce(comm, buffer)
        assert np.allclose(buffer, inputs.sum(axis=0), rtol=0, atol=1e-13)
        return buffer.tobytes()

    assert len(set(run_threads(len(node_of), body))) == 1


class Sink:
    """An event sink that counts traffic between nodes, and the sends in flight at each arrival."""

    def __init__(self, pause=lambda: None):
        self.pause = pause
        self.sent_bytes, self.sends, self.open_sends = 0, 0, 0
        self.queued = []  # at each arrival: the number of started sends, and of sends in flight
        self.operations = {0: ""}

    def begin(self, comm, op, dtype, count, sent_bytes, peer, tag):
        self.pause()
        if "/peers" not in comm:
            return 0
        if op == "isend":
            self.sends, self.open_sends, self.sent_bytes = (
                self.sends + 1,
                self.open_sends + 1,
                self.sent_bytes + sent_bytes,
            )
        self.operations[len(self.operations)] = op
        return len(self.operations) - 1

    def end(self, token):
        operation = self.operations[token]
        if operation == "isend":
            self.open_sends -= 1
        if operation == "irecv":
            self.queued.append((self.sends, self.open_sends))


def run_with_sinks(size, ranks_per_node, inputs, pauses=False):
    """Reduce ``inputs`` (ranks, elements). Return the result and the sink of each rank."""

    def body(comm):
        local_data = np.random.default_rng(comm.rank)
        comm.nodes()
        comm.events = sink = Sink(
            (lambda: time.sleep(local_data.choice([0, 0, 1e-4, 2e-3]))) if pauses else lambda: None
        )
        buffer = inputs[comm.rank].copy()
        hierarchical_allreduce(comm, buffer)
        return buffer.tobytes(), sink

    return run_threads(size, body, ranks_per_node)


@pytest.mark.usefixtures("short_segments")
@pytest.mark.parametrize(("size", "ranks_per_node"), SHAPES)
def test_hierarchical_bits_are_equal_on_all_ranks_and_timings(size, ranks_per_node, rng):
    special = np.array([0x7FC00001, 0xFFC00002, 0x80000000, 0x7F800000, 0xFF800000], np.uint32).view(np.float32)
    inputs = rng.standard_normal((size, 333)).astype(np.float32)
    inputs[:, ::7] = rng.choice(special, inputs[:, ::7].shape)  # NaN payloads depend on the order of the operands
    with np.errstate(invalid="ignore"):
        expected = inputs.astype(np.float64).sum(axis=0)
    results = {got for turn in range(3) for got, _ in run_with_sinks(size, ranks_per_node, inputs, pauses=turn > 0)}
    assert len(results) == 1
    np.testing.assert_allclose(np.frombuffer(results.pop(), np.float32), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("segment_bytes", [64, 1 << 20])
@pytest.mark.parametrize(("size", "ranks_per_node"), SHAPES)
def test_hierarchical_bytes_between_nodes_match_formula(size, ranks_per_node, segment_bytes, monkeypatch):
    """A rank sends 2 (k-1)/k of n/m: k nodes, n bytes, m the smallest number of ranks on a node. Others send none."""
    monkeypatch.setattr(MODULE, "SEGMENT_BYTES", segment_bytes)
    nodes = -(-size // ranks_per_node)
    streams = ranks_per_node if size % ranks_per_node == 0 else size % ranks_per_node
    inputs = np.ones((size, nodes * streams * 16 * 20), np.float32)
    for rank, (_, sink) in enumerate(run_with_sinks(size, ranks_per_node, inputs)):
        expected = 2 * (nodes - 1) * inputs[0].nbytes // (nodes * streams)
        assert sink.sent_bytes == (expected if rank % ranks_per_node < streams else 0)


@pytest.mark.usefixtures("short_segments")
@pytest.mark.parametrize(("size", "ranks_per_node"), [(4, 2), (2, 1), (6, 2), (4, 1)])
def test_hierarchical_keeps_sends_in_flight(size, ranks_per_node):
    """Whenever a message arrives whose successor is not made yet, other sends are queued, until all are sent."""
    for _, sink in run_with_sinks(size, ranks_per_node, np.ones((size, 64 * size * 16), np.float32)):
        assert sink.sends > 4 * MODULE.AHEAD
        assert all(waiting >= MODULE.AHEAD for begun, waiting in sink.queued if MODULE.AHEAD <= begun < sink.sends)


@on_threads(8)
def test_hierarchical_with_given_communicators(comm):
    buffer = np.full(512, 2.0**comm.rank)
    intra = comm.split(comm.rank // 4)
    inter = comm.dup().split(comm.rank % 4)
    assert intra is not None and inter is not None
    hierarchical(intra, inter, buffer)
    assert (buffer == 255).all()
