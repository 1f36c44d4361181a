"""Broadcast algorithms: any root, dtype and number of ranks, and the promised number of bytes."""

import importlib

import numpy as np
import pytest

from harness.marks import on_threads
from hpcdist.arrays.dtypes import FLOATS, INTEGERS
from hpcdist.arrays.ranges import split
from hpcdist.collectives import BROADCAST, broadcast
from hpcdist.collectives.algorithms.broadcast import chain_broadcast
from hpcdist.comm.record.timing import count_traffic
from hpcdist.comm.threads.communicator import run_threads
from hpcdist.errors import BufferHandoverError, UsageError

MODULE = importlib.import_module(
    "hpcdist.collectives.algorithms.broadcast"
)  # the package has the function under this name
SIZES = [*range(1, 10), 13, 16]
MESSAGES = sorted(set(BROADCAST) - {"native"})


@pytest.mark.parametrize("algorithm", BROADCAST)
@pytest.mark.parametrize("size", SIZES)
def test_broadcast_from_any_root(algorithm, size, rng):
    cases = [
        (count, root, rng.standard_normal((size, count)).astype(dtype))
        for dtype in (np.float64, FLOATS["bfloat16"], INTEGERS["uint8"])
        for count in (0, 1, 3, 1003)
        for root in sorted({0, size // 2, size - 1})
    ]

    def body(comm):
        for count, root, inputs in cases:
            buffer = inputs[comm.rank].copy()
            broadcast(comm, buffer, root, algorithm)
            assert buffer.tobytes() == inputs[root].tobytes(), f"{count} {buffer.dtype} from {root}"

    run_threads(size, body)


@pytest.mark.parametrize("root", [0, 2])
@pytest.mark.parametrize("algorithm", MESSAGES)
@pytest.mark.parametrize("size", SIZES[2:])
def test_broadcast_sends_the_promised_bytes(algorithm, size, root, rng):
    inputs = rng.standard_normal((size, 16 * size))

    def body(comm):
        buffer = inputs[comm.rank].copy()
        with count_traffic(comm) as traffic:
            broadcast(comm, buffer, root, algorithm)
        assert not traffic.unknown
        return traffic.sent_bytes

    sent = run_threads(size, body)
    nbytes, rounds = 16 * size * 8, (size - 1).bit_length()
    if algorithm == "scatter_all_gather":
        # The root scatters all chunks but its own. The all-gather brings each rank all chunks but its own.
        assert sent[root] == 2 * (size - 1) * nbytes // size
        assert sum(sent) <= (size - 1 + rounds) * nbytes
    else:
        assert sum(sent) == (size - 1) * nbytes
        assert sent[root] == nbytes * (rounds if algorithm == "binomial" else 1)
        assert max(sent) == sent[root]


@pytest.mark.parametrize("size", SIZES)
@on_threads("size")
def test_chain_broadcast_in_segments(comm, size, rng):
    inputs = rng.integers(0, 99, (size, 1003)).astype(np.int32)
    for root in (0, size - 1):
        buffer = inputs[comm.rank].copy()
        with count_traffic(comm) as traffic:
            chain_broadcast(comm, buffer, root, segment_bytes=256)
        assert np.array_equal(buffer, inputs[root])
        is_last = (comm.rank - root) % size == size - 1
        assert traffic.calls["isend"] == (0 if is_last else len(split(1003, -(-4012 // 256), 4)))


def test_auto_broadcast_chooses_by_size_and_ranks(monkeypatch):
    called = []
    for name in list(BROADCAST):
        monkeypatch.setitem(MODULE.BROADCAST, name, lambda comm, buffer, root, name=name: called.append(name))
    limit = MODULE.BINOMIAL_BYTES

    def body(comm):
        broadcast(comm, np.zeros(limit, np.uint8))
        broadcast(comm, np.zeros(limit + 1, np.uint8))

    ranks = MODULE.SCATTER_RANKS
    run_threads(ranks, body)
    assert sorted(called) == ["binomial"] * ranks + ["scatter_all_gather"] * ranks
    called.clear()
    run_threads(ranks - 1, body)
    assert called == ["binomial"] * (2 * ranks - 2)


@on_threads(3)
def test_broadcast_rejects_bad_calls_before_sending(comm):
    with count_traffic(comm) as traffic:
        with pytest.raises(UsageError, match="'tree' is unknown; choose auto or one of native, binomial"):
            broadcast(comm, np.zeros(4), 0, "tree")
        for algorithm in (*BROADCAST, "auto"):
            for root in (-1, 3):
                with pytest.raises(UsageError, match=f"root {root} does not exist among 3 ranks"):
                    broadcast(comm, np.zeros(4), root, algorithm)
            with pytest.raises(BufferHandoverError, match="1-D contiguous"):
                broadcast(comm, np.zeros((2, 2)), 0, algorithm)
        with pytest.raises(UsageError, match="segment_bytes must be at least 1, .* got 0"):
            chain_broadcast(comm, np.zeros(4), segment_bytes=0)
    assert not traffic.calls
