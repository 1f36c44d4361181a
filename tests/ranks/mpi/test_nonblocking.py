"""Nonblocking collectives over real MPI: bit-identical to the blocking collectives, alone and in training."""

import numpy as np
import pytest

from harness.trainings import dotted_keys, losses, recipe_keys, small_trainer
from hpcdist import collectives
from hpcdist.collectives import nonblocking
from hpcdist.comm.config import BUCKET_BYTES
from hpcdist.comm.record.timing import count_traffic
from hpcdist.comm.threads.communicator import solo
from hpcdist.errors import CommunicationError, MissingCapabilityError
from hpcdist.strategies.core.operations import Kind

KINDS = sorted(nonblocking.KINDS)
HALVES = [("poll", "ring"), *(("thread", name) for name in sorted(collectives.SHARDED))]
PAIRS = [("poll", "ring"), *(("thread", name) for name in sorted(collectives.ALLREDUCE))]
COUNTS = (0, 1, 7, 5000, 200_000)  # the last one travels in several lanes, by the protocol for large messages


def start_progress(comm, kind):
    """Return the progress of ``kind``. If the library has no thread support, check that it is rejected, and skip."""
    if kind == "thread" and not comm.supports("thread_multiple"):
        with pytest.raises(MissingCapabilityError, match="MPI_THREAD_MULTIPLE"):
            nonblocking.begin(comm, kind)
        pytest.skip("the MPI library was started below MPI_THREAD_MULTIPLE")
    return nonblocking.begin(comm, kind)


@pytest.mark.parametrize(("kind", "algorithm"), PAIRS)
def test_rank_nonblocking_results_have_the_bits_of_blocking_ones(comm, kind, algorithm, rng):
    inputs = [rng.standard_normal((comm.size, count)).astype(np.float32)[comm.rank] for count in COUNTS]
    expected = [data.copy() for data in inputs]
    for data in expected:
        collectives.allreduce(comm, data, algorithm)
    with start_progress(comm, kind) as progress:
        for _ in range(2):  # the second time in memory that is there
            results = [data.copy() for data in inputs]
            handles = [progress.iallreduce(data, algorithm) for data in results]
            for index in (3, 0, 4, 1, 2):
                handles[index].wait()
                assert handles[index].test()
                assert results[index].tobytes() == expected[index].tobytes()
    collectives.release(comm)


def test_rank_native_nonblocking_allreduce_is_polled(comm, rng):
    inputs = rng.standard_normal((comm.size, 50_000))
    with nonblocking.begin(comm, "poll") as progress, count_traffic(comm) as traffic:
        results = [inputs[comm.rank].copy() for _ in range(3)]
        handles = [progress.iallreduce(data) for data in results]
        while not all(handle.test() for handle in handles):
            pass
        assert comm.size == 1 or traffic.calls["native_iallreduce"] == traffic.unknown["iallreduce"] == 3
    for data in results:
        np.testing.assert_allclose(data, inputs.sum(axis=0), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_rank_other_messages_proceed_during_nonblocking_operations(comm, kind, rng):
    inputs = rng.standard_normal((comm.size, 100_000))
    beside, result = inputs[comm.rank].copy(), [inputs[comm.rank].copy() for _ in range(4)]
    with start_progress(comm, kind) as progress:
        handles = [progress.iallreduce(data, "ring") for data in result[:2]]
        collectives.allreduce(comm, beside, "ring")
        handles += [progress.iallreduce(data, "ring") for data in result[2:]]
        comm.barrier()
        progress.progress()
    assert all(handle.test() for handle in handles), "leaving waits"
    assert {data.tobytes() for data in result} == {beside.tobytes()}


def test_rank_two_concurrent_polled_operations_share_no_memory(comm):
    with nonblocking.begin(comm, "poll") as one, nonblocking.begin(comm, "poll") as other:
        for _ in range(5):
            first, second = np.full(300_000, 1, np.float32), np.full(300_000, 100, np.float32)
            handles = one.iallreduce(first, "ring"), other.iallreduce(second, "ring")
            while not (handles[0].test() & handles[1].test()):  # both are moved each time
                pass
            assert (first == comm.size).all() and (second == 100 * comm.size).all()


def test_rank_differing_polled_calls_raise(comm):
    """Differences are detected before any data moves, and a rank that waits first does not delay the others."""
    comm.checked = True
    try:
        progress = nonblocking.begin(comm, "poll")
        first, second = np.ones(100_000), np.ones(100_000)
        handle = progress.iallreduce(first, "ring")
        if comm.rank == 0:
            handle.wait()
        other = progress.iallreduce(second, "native")
        handle.wait()
        other.wait()
        assert (first == comm.size).all() and (second == comm.size).all()
        if comm.size > 1:
            with pytest.raises(CommunicationError, match="made different collective calls"):
                progress.iallreduce(np.ones(10 + comm.rank), "ring")
        progress.close()
    finally:
        comm.checked = False


def test_rank_polled_ring_sends_the_bytes_of_the_blocking_ring(comm):
    data = np.ones(960 * 1024, np.float32)
    with nonblocking.begin(comm, "poll") as progress, count_traffic(comm) as traffic:
        progress.iallreduce(data, "ring").wait()
    assert (data == comm.size).all()
    assert traffic.sent_bytes == 2 * (comm.size - 1) * data.nbytes // comm.size
    assert comm.size == 1 or traffic.calls["isend"] > 2 * (comm.size - 1), "several lanes"


KEYS = recipe_keys("layers=2 hidden=32 data.context=16 steps=6 global_batch=9 bucket_bytes=16384")


def _train(comm, folder, **keys):
    trainer = small_trainer(comm, folder, KEYS | dotted_keys(keys))
    actual_losses = losses(trainer, 6)
    trainer.close()
    return actual_losses, trainer.exchange.parameters.array.tobytes(), trainer


@pytest.mark.parametrize(
    ("overlap", "algorithm"), [("poll", "ring"), ("thread", "ring"), ("thread", "native"), ("thread", "node_shared")]
)
def test_rank_overlapped_training_has_the_same_bits(comm, folder, overlap, algorithm):
    keys = {"communication__algorithm": algorithm, "parallel__microbatches": 2}
    if overlap == "thread":
        start_progress(comm, overlap).close()
    expected, weights, _ = _train(comm, folder, **keys)
    behind, result, trainer = _train(comm, folder, communication__overlap=overlap, **keys)
    assert (behind, result) == (expected, weights)
    starts = sum(op.kind is Kind.START for op in trainer.operations)
    assert starts == sum(op.kind is Kind.WAIT for op in trainer.operations)
    assert (starts > 2) == (comm.size > 1)
    if comm.size > 1:
        overlapped = trainer.exchange.background
        assert overlapped is not None and overlapped.taken()[0] > 0


@pytest.mark.parametrize(("kind", "algorithm"), HALVES)
def test_rank_nonblocking_halves_have_the_bits_of_blocking_ones(comm, kind, algorithm, rng):
    sharding = collectives.SHARDED[algorithm]
    inputs = [rng.standard_normal((comm.size, count)).astype(np.float32)[comm.rank] for count in COUNTS]
    shares = [sharding.shares(comm, count, 4) for count in COUNTS]
    expected, result = ([data.copy() for data in inputs] for _ in range(2))
    for data, parts in zip(expected, shares, strict=True):
        sharding.reduce_scatter(comm, data, parts)
    with start_progress(comm, kind) as progress:
        handles = [progress.ireduce_scatter(data, parts, algorithm) for data, parts in zip(result, shares, strict=True)]
        for index in (3, 0, 4, 1, 2):
            handles[index].wait()
            local_slice = shares[index][comm.rank].slice
            assert result[index][local_slice].tobytes() == expected[index][local_slice].tobytes()
        for data, parts in zip(expected, shares, strict=True):
            sharding.all_gather(comm, data, parts)
        handles = [progress.iall_gather(data, parts, algorithm) for data, parts in zip(result, shares, strict=True)]
        for handle, data, right in zip(handles, result, expected, strict=True):
            handle.wait()
            assert data.tobytes() == right.tobytes()
    collectives.release(comm)


ZERO = [("zero1", 0, 1), ("zero2", 0, 2), ("zero3", 0, 2), ("zero3", 1, 1), ("zero3", 2, 2)]


@pytest.mark.parametrize(("overlap", "algorithm"), [("poll", "ring"), ("thread", "ring"), ("thread", "node_shared")])
@pytest.mark.parametrize(("strategy", "prefetch", "parts"), ZERO)
def test_rank_overlapped_zero_has_the_same_bits(comm, folder, overlap, algorithm, strategy, prefetch, parts):
    keys = {"parallel__strategy": strategy, "communication__algorithm": algorithm, "parallel__microbatches": parts}
    keys["communication__bucket_bytes"] = BUCKET_BYTES  # ZeRO has no buckets
    if overlap == "thread":
        start_progress(comm, overlap).close()
    expected, weights, _ = _train(comm, folder, **keys)
    keys |= {"communication__overlap": overlap, "zero__prefetch": prefetch}
    behind, result, trainer = _train(comm, folder, **keys)
    assert (behind, result) == (expected, weights)
    overlapped = trainer.exchange.background
    assert (overlapped is None) == (comm.size == 1)
    if overlapped is not None:
        fetched = overlapped.fetched()
        gathers = sum(op.kind is Kind.START_GATHER for op in trainer.operations)
        assert fetched.hits + fetched.misses == 6 * gathers and (gathers > 0) == (prefetch > 0)


@pytest.mark.parametrize("overlap", KINDS)
def test_rank_delayed_gradients_match_one_rank(comm, folder, overlap):
    keys = {"communication__algorithm": "ring", "communication__delayed": "true", "precision__mode": "float64"}
    start_progress(comm, overlap).close()
    alone, right, _ = _train(solo(), folder, communication__overlap=overlap, **keys)
    late, weights, _ = _train(comm, folder, communication__overlap=overlap, **keys)
    again, bits, _ = _train(comm, folder, communication__overlap=overlap, **keys)
    assert (again, bits) == (late, weights)
    np.testing.assert_allclose(late, alone, rtol=1e-10)
    result, one = np.frombuffer(weights), np.frombuffer(right)
    assert np.linalg.norm(result - one) <= 1e-4 * np.linalg.norm(one), "the bias of the keys is noise under Adam"
