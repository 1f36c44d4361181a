"""Collectives on cupy double arrays: staged by counted copies or passed as pointers, and always synchronised."""

from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest

from hpcdist import collectives
from hpcdist.arrays import backend
from hpcdist.arrays.dtypes import dtype_of
from hpcdist.arrays.ranges import split
from hpcdist.comm.communicator import Communicator
from hpcdist.comm.handover import Handover
from hpcdist.comm.threads.communicator import run_threads

COUNT = 1001
# The copies that the message layer stages for an operation: to the host, to the device.
STAGED = {
    "send": (1, 0),
    "isend": (1, 0),
    "recv": (0, 1),
    "irecv": (0, 1),
    "sendrecv": (1, 1),
    "broadcast": (1, 1),
    "allreduce": (1, 1),
    "reduce_scatter": (1, 1),
    "all_gather": (1, 1),
    "all_to_all": (1, 1),
}

BOTH_WAYS = ("broadcast", "allreduce", "reduce_scatter", "all_gather")  # copy one buffer to the host and back


class Watch:
    """An event sink that counts operations, and asserts that no kernel is pending when a pointer is passed."""

    def __init__(self, gpu, pointers):
        self.gpu, self.pointers = gpu, pointers
        self.counts = Counter()
        self.sent_bytes = 0

    def begin(self, comm, op, dtype, count, sent_bytes, peer, tag):
        if op in STAGED:
            self.counts[op] += 1
            self.sent_bytes += max(0, sent_bytes)
            assert not (self.pointers and self.gpu.LOG.kernels_pending()), f"{op} begins while kernels write"
        return 0

    def end(self, token):
        return


Body = Callable[[Communicator, object], None]


def run_on(gpu, inputs, body, pointers, nodes_of):
    """Run ``body`` on the double, one rank per input. Return the buffer and the event sink of each rank."""

    seen = []

    def rank(comm):
        watch = Watch(gpu, pointers)
        comm.handover = Handover(device_pointers=pointers)
        comm.nodes()
        buffer = backend.place(inputs[comm.rank], "gpu")
        comm.barrier()
        if comm.rank == 0:
            gpu.LOG.events.clear()
        comm.barrier()
        comm.events = watch
        body(comm, buffer)
        comm.barrier()
        if comm.rank == 0:
            seen[:] = gpu.LOG.events
        comm.barrier()
        return buffer.get(), watch

    results = run_threads(len(inputs), rank, nodes_of)
    gpu.LOG.events[:] = seen
    return results


def check_transfers(gpu, result, pointers):
    """Check that only the message layer copies, and that it waits only before messages and after copies."""
    for rank, (_, watch) in enumerate(result):
        name = f"rank {rank}"
        to_host = sum(STAGED[op][0] * times for op, times in watch.counts.items())
        to_device = sum(STAGED[op][1] * times for op, times in watch.counts.items())
        both = sum(watch.counts[op] for op in BOTH_WAYS)
        assert gpu.LOG.count(gpu.SYNCHRONISE, name) == (to_host + to_device - both if pointers else to_host)
        assert gpu.LOG.count(gpu.D2H, name) == (0 if pointers else to_host)
        assert gpu.LOG.count(gpu.H2D, name) == (0 if pointers else to_device)
        if not pointers and not any(watch.counts[op] for op in ("all_to_all", *BOTH_WAYS)):
            assert gpu.LOG.nbytes(gpu.D2H, name) == watch.sent_bytes


def check_staged(gpu, result, segments=1):
    """Check that each segment is copied to the host and back once, without any other wait of the host."""
    for rank in range(len(result)):
        counts = [gpu.LOG.count(kind, f"rank {rank}") for kind in (gpu.D2H, gpu.H2D, gpu.SYNCHRONISE)]
        assert counts == [segments * (len(result) > 1)] * 3


def check_staged_shards(gpu, size, nbytes):
    """Check that each half goes through pinned memory once: the whole buffer one way, this rank's share the other."""
    for rank, part in enumerate(split(nbytes // 4, size, 4)):
        name, local_data = f"rank {rank}", part.size * 4
        both = 2 * (size > 1)
        assert [gpu.LOG.count(kind, name) for kind in (gpu.D2H, gpu.H2D, gpu.SYNCHRONISE)] == [both] * 3
        for kind in (gpu.D2H, gpu.H2D):
            assert gpu.LOG.nbytes(kind, name) == (nbytes + local_data if size > 1 else 0)
    assert {site.partition(".")[0] for _, site in gpu.LOG.sites()} <= {"dispatch", "staging"}


CASES = [(algorithm, size) for algorithm in collectives.ALLREDUCE for size in (1, 2, 3, 4)]
ON_HOST = ("hierarchical",)  # algorithms that always work in host memory
KINDS = (("float32", "sum"), ("float64", "max"), ("float16", "sum"))


@pytest.mark.parametrize("pointers", [False, True], ids=["staged", "pointers"])
@pytest.mark.parametrize(("algorithm", "size"), CASES)
def test_gpu_allreduce_matches_host_and_counts_transfers(gpu, algorithm, size, pointers, rng):
    nodes_of = 2 if algorithm == "hierarchical" else None
    for dtype, op in KINDS:
        inputs = [rng.standard_normal(COUNT).astype(dtype) for _ in range(size)]

        def body(comm, buffer, op=op):
            collectives.allreduce(comm, buffer, algorithm, op)

        def on_host(comm, inputs=inputs, op=op):
            buffer = inputs[comm.rank].copy()
            collectives.allreduce(comm, buffer, algorithm, op)
            return buffer

        expected = run_threads(size, on_host, nodes_of)[0]
        result = run_on(gpu, inputs, body, pointers, nodes_of)
        for values, _ in result:
            assert values.dtype == dtype and values.tobytes() == expected.tobytes()
        if algorithm == "node_shared":
            waits = 2 * (size > 1)  # one before each of two barriers, no copy to the host
            kinds = [(event.kind, event.thread) for event in gpu.LOG.of()]
            assert sorted(kinds) == sorted([(gpu.SYNCHRONISE, f"rank {rank}") for rank in range(size)] * waits)
        elif pointers and algorithm not in ON_HOST and (algorithm, op) != ("native", "max"):
            check_transfers(gpu, result, pointers)
        else:  # MPI's NaN-propagating operators run on the host
            check_staged(gpu, result)


SHARDED = [(algorithm, size) for algorithm in collectives.SHARDED for size in (1, 2, 3, 4)]


@pytest.mark.parametrize("pointers", [False, True], ids=["staged", "pointers"])
@pytest.mark.parametrize(("algorithm", "size"), SHARDED)
def test_gpu_shards_match_host_and_count_transfers(gpu, algorithm, size, pointers, rng):
    nodes_of = 2 if algorithm == "hierarchical" else None
    inputs = [rng.integers(-9, 9, COUNT).astype(np.float32) for _ in range(size)]
    sharding = collectives.SHARDED[algorithm]

    def body(comm, buffer):
        shares = sharding.shares(comm, COUNT, 4)
        sharding.reduce_scatter(comm, buffer, shares)
        sharding.all_gather(comm, buffer, shares)

    result = run_on(gpu, inputs, body, pointers, nodes_of)
    for values, _ in result:
        assert np.array_equal(values, np.sum(inputs, axis=0))
    if algorithm == "node_shared":
        check_staged_shards(gpu, size, COUNT * 4)
    else:
        check_transfers(gpu, result, pointers)


@pytest.mark.parametrize("pointers", [False, True], ids=["staged", "pointers"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "int64"])
def test_gpu_messages_match_host_and_count_transfers(gpu, dtype, pointers, rng):
    inputs = [rng.integers(0, 99, COUNT).astype(dtype_of(dtype)) for _ in range(3)]

    def body(comm, buffer):
        right, left = (comm.rank + 1) % 3, (comm.rank - 1) % 3
        arrived = backend.empty(COUNT, inputs[0].dtype, "gpu")
        comm.sendrecv(buffer, right, arrived, left)
        request = comm.irecv(buffer, left)
        comm.isend(arrived, right).wait()
        request.wait()
        comm.send(buffer, right)
        comm.probe(left).recv(arrived)
        comm.broadcast(arrived, root=2)
        buffer[...] = arrived

    for values, _ in run_on(gpu, inputs, body, pointers, None):
        # Three passes to the right return every buffer to its owner, and rank 2 broadcasts its buffer.
        assert np.array_equal(values, inputs[2])
