"""Nonblocking collectives over real MPI: the bits of the blocking ones, alone and in training."""

import numpy as np
import pytest

from harness.trainings import dotted, losses, recipe_keys, small
from hpcdist import collectives
from hpcdist.collectives.nonblocking import engines
from hpcdist.comm.config import BUCKET_BYTES
from hpcdist.comm.record.timing import count_traffic
from hpcdist.comm.threads.communicator import solo
from hpcdist.errors import CommunicationError, MissingCapabilityError
from hpcdist.strategies.schedule.operations import Kind

KINDS = sorted(engines.KINDS)
HALVES = [("poll", "ring"), *(("thread", name) for name in sorted(collectives.SHARDED))]
PAIRS = [("poll", "ring"), *(("thread", name) for name in sorted(collectives.ALLREDUCE))]
COUNTS = (0, 1, 7, 5000, 200_000)  # the last one travels in several lanes, by the protocol for large messages


def begun(comm, kind):
    """Return the progress of ``kind``; where the library has no threads, see that it is refused, and skip."""
    if kind == "thread" and not comm.supports("thread_multiple"):
        with pytest.raises(MissingCapabilityError, match="MPI_THREAD_MULTIPLE"):
            engines.begin(comm, kind)
        pytest.skip("the MPI library was started below MPI_THREAD_MULTIPLE")
    return engines.begin(comm, kind)


@pytest.mark.parametrize(("kind", "algorithm"), PAIRS)
def test_rank_bits_are_those_of_the_blocking_algorithm(comm, kind, algorithm, rng):
    inputs = [rng.standard_normal((comm.size, count)).astype(np.float32)[comm.rank] for count in COUNTS]
    expected = [data.copy() for data in inputs]
    for data in expected:
        collectives.allreduce(comm, data, algorithm)
    with begun(comm, kind) as progress:
        for _ in range(2):  # the second time in memory that is there
            found = [data.copy() for data in inputs]
            handles = [progress.iallreduce(data, algorithm) for data in found]
            for index in (3, 0, 4, 1, 2):
                handles[index].wait()
                assert handles[index].test()
                assert found[index].tobytes() == expected[index].tobytes()
    collectives.release(comm)


def test_rank_the_librarys_own_is_polled(comm, rng):
    inputs = rng.standard_normal((comm.size, 50_000))
    with engines.begin(comm, "poll") as progress, count_traffic(comm) as traffic:
        found = [inputs[comm.rank].copy() for _ in range(3)]
        handles = [progress.iallreduce(data) for data in found]
        while not all(handle.test() for handle in handles):
            pass
        assert comm.size == 1 or traffic.calls["native_iallreduce"] == traffic.unknown["iallreduce"] == 3
    for data in found:
        np.testing.assert_allclose(data, inputs.sum(axis=0), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_rank_other_messages_go_on_beside(comm, kind, rng):
    inputs = rng.standard_normal((comm.size, 100_000))
    beside, found = inputs[comm.rank].copy(), [inputs[comm.rank].copy() for _ in range(4)]
    with begun(comm, kind) as progress:
        handles = [progress.iallreduce(data, "ring") for data in found[:2]]
        collectives.allreduce(comm, beside, "ring")
        handles += [progress.iallreduce(data, "ring") for data in found[2:]]
        comm.barrier()
        progress.progress()
    assert all(handle.test() for handle in handles), "leaving waits"
    assert {data.tobytes() for data in found} == {beside.tobytes()}


def test_rank_two_that_are_polled_at_once_share_no_memory(comm):
    with engines.begin(comm, "poll") as one, engines.begin(comm, "poll") as other:
        for _ in range(5):
            first, second = np.full(300_000, 1, np.float32), np.full(300_000, 100, np.float32)
            handles = one.iallreduce(first, "ring"), other.iallreduce(second, "ring")
            while not (handles[0].test() & handles[1].test()):  # both are moved each time
                pass
            assert (first == comm.size).all() and (second == 100 * comm.size).all()


def test_rank_polled_calls_are_checked(comm):
    """Differences are found before anything moves, and a rank that waits first does not hold up the others."""
    comm.checked = True
    try:
        progress = engines.begin(comm, "poll")
        first, second = np.ones(100_000), np.ones(100_000)
        handle = progress.iallreduce(first, "ring")
        if comm.rank == 0:
            handle.wait()
        other = progress.iallreduce(second, "native")
        handle.wait()
        other.wait()
        assert (first == comm.size).all() and (second == comm.size).all()
        if comm.size > 1:
            with pytest.raises(CommunicationError, match="came to one collective with different calls"):
                progress.iallreduce(np.ones(10 + comm.rank), "ring")
        progress.close()
    finally:
        comm.checked = False


def test_rank_polled_ring_sends_what_the_ring_sends(comm):
    data = np.ones(960 * 1024, np.float32)
    with engines.begin(comm, "poll") as progress, count_traffic(comm) as traffic:
        progress.iallreduce(data, "ring").wait()
    assert (data == comm.size).all()
    assert traffic.sent_bytes == 2 * (comm.size - 1) * data.nbytes // comm.size
    assert comm.size == 1 or traffic.calls["isend"] > 2 * (comm.size - 1), "several lanes"


KEYS = recipe_keys("layers=2 hidden=32 data.context=16 steps=6 global_batch=9 bucket_bytes=16384")


def _trained(comm, folder, **keys):
    trainer = small(comm, folder, KEYS | dotted(keys))
    found = losses(trainer, 6)
    trainer.close()
    return found, trainer.exchange.parameters.array.tobytes(), trainer


@pytest.mark.parametrize(
    ("overlap", "algorithm"), [("poll", "ring"), ("thread", "ring"), ("thread", "native"), ("thread", "node_shared")]
)
def test_rank_training_has_the_same_bits(comm, folder, overlap, algorithm):
    keys = {"communication__algorithm": algorithm, "parallel__microbatches": 2}
    if overlap == "thread":
        begun(comm, overlap).close()
    expected, weights, _ = _trained(comm, folder, **keys)
    behind, found, trainer = _trained(comm, folder, communication__overlap=overlap, **keys)
    assert (behind, found) == (expected, weights)
    starts = sum(op.kind is Kind.START for op in trainer.operations)
    assert starts == sum(op.kind is Kind.WAIT for op in trainer.operations)
    assert (starts > 2) == (comm.size > 1)
    if comm.size > 1:
        overlapped = trainer.exchange.overlap
        assert overlapped is not None and overlapped.taken()[0] > 0


@pytest.mark.parametrize(("kind", "algorithm"), HALVES)
def test_rank_halves_have_the_bits_of_the_blocking_ones(comm, kind, algorithm, rng):
    sharding = collectives.SHARDED[algorithm]
    inputs = [rng.standard_normal((comm.size, count)).astype(np.float32)[comm.rank] for count in COUNTS]
    shares = [sharding.shares(comm, count, 4) for count in COUNTS]
    expected, found = ([data.copy() for data in inputs] for _ in range(2))
    for data, parts in zip(expected, shares, strict=True):
        sharding.reduce_scatter(comm, data, parts)
    with begun(comm, kind) as progress:
        handles = [progress.ireduce_scatter(data, parts, algorithm) for data, parts in zip(found, shares, strict=True)]
        for index in (3, 0, 4, 1, 2):
            handles[index].wait()
            own = shares[index][comm.rank].slice
            assert found[index][own].tobytes() == expected[index][own].tobytes()
        for data, parts in zip(expected, shares, strict=True):
            sharding.all_gather(comm, data, parts)
        handles = [progress.iall_gather(data, parts, algorithm) for data, parts in zip(found, shares, strict=True)]
        for handle, data, right in zip(handles, found, expected, strict=True):
            handle.wait()
            assert data.tobytes() == right.tobytes()
    collectives.release(comm)


ZERO = [("zero1", 0, 1), ("zero2", 0, 2), ("zero3", 0, 2), ("zero3", 1, 1), ("zero3", 2, 2)]


@pytest.mark.parametrize(("overlap", "algorithm"), [("poll", "ring"), ("thread", "ring"), ("thread", "node_shared")])
@pytest.mark.parametrize(("strategy", "prefetch", "parts"), ZERO)
def test_rank_zero_behind_the_computation_has_the_same_bits(
    comm, folder, overlap, algorithm, strategy, prefetch, parts
):
    keys = {"parallel__strategy": strategy, "communication__algorithm": algorithm, "parallel__microbatches": parts}
    keys["communication__bucket_bytes"] = BUCKET_BYTES  # ZeRO has no buckets
    if overlap == "thread":
        begun(comm, overlap).close()
    expected, weights, _ = _trained(comm, folder, **keys)
    keys |= {"communication__overlap": overlap, "zero__prefetch": prefetch}
    behind, found, trainer = _trained(comm, folder, **keys)
    assert (behind, found) == (expected, weights)
    overlapped = trainer.exchange.overlap
    assert (overlapped is None) == (comm.size == 1)
    if overlapped is not None:
        fetched = overlapped.fetched()
        gathers = sum(op.kind is Kind.START_GATHER for op in trainer.operations)
        assert fetched.hits + fetched.misses == 6 * gathers and (gathers > 0) == (prefetch > 0)


@pytest.mark.parametrize("overlap", KINDS)
def test_rank_delayed_gradients_are_those_of_one_rank(comm, folder, overlap):
    keys = {"communication__algorithm": "ring", "communication__delayed": "true", "precision__mode": "float64"}
    begun(comm, overlap).close()
    alone, right, _ = _trained(solo(), folder, communication__overlap=overlap, **keys)
    late, weights, _ = _trained(comm, folder, communication__overlap=overlap, **keys)
    again, bits, _ = _trained(comm, folder, communication__overlap=overlap, **keys)
    assert (again, bits) == (late, weights)
    np.testing.assert_allclose(late, alone, rtol=1e-10)
    found, one = np.frombuffer(weights), np.frombuffer(right)
    assert np.linalg.norm(found - one) <= 1e-4 * np.linalg.norm(one), "the bias of the keys is noise under Adam"
