"""Transfer paths of GPU buffers, on the double: segments in pinned memory, memory of the other ranks, and NCCL."""

import gc
import threading

import numpy as np
import pytest

from harness.inputs import write_text
from harness.marks import cases, on_threads
from harness.trainings import LAYOUTS, Trained, assemble_trainer, check_same
from hpcdist import collectives
from hpcdist.arrays import backend
from hpcdist.arrays.dtypes import dtype_of
from hpcdist.collectives import autotune, dispatch, nccl, peer_memory
from hpcdist.collectives.reduction import native_allreduce
from hpcdist.comm.handover import Handover
from hpcdist.comm.threads.communicator import run_threads
from hpcdist.errors import BufferHandoverError, ConfigurationError, MissingCapabilityError
from stubs.gpu import cuda_double, nccl_double

COUNT = 1003


def run_between_kernels(size, inputs, call):
    """Run ``call`` on a buffer between two kernels that double and increment it. Return each rank's buffer."""

    def body(comm):
        buffer = backend.place(inputs[comm.rank], "gpu")
        buffer *= buffer.dtype.type(2)
        call(comm, buffer)
        buffer += buffer.dtype.type(1)
        return buffer.get()

    return run_threads(size, body)


def integer_inputs(rng, size, dtype="float32"):
    """Return arrays of whole numbers, whose sums are exact in any order."""
    return [rng.integers(0, 9, COUNT).astype(dtype) for _ in range(size)]


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("segments", [1, 2, 3, 4, 9])
def test_segments_use_three_pinned_blocks(gpu, size, segments, rng, monkeypatch):
    monkeypatch.setattr(dispatch, "SEGMENT_BYTES", 4 * -(-COUNT // segments))
    inputs = integer_inputs(rng, size)
    leased = []
    lease = dispatch.staging.lease
    monkeypatch.setattr(dispatch.staging, "lease", lambda *expected: leased.append(expected) or lease(*expected))
    result = run_between_kernels(
        size, inputs, lambda comm, buffer: dispatch.staged_allreduce(native_allreduce, comm, buffer)
    )
    for values in result:
        assert np.array_equal(values, 2 * np.sum(inputs, axis=0) + 1)
    assert len(leased) == size * min(segments, dispatch.BLOCKS)
    for rank in range(size):
        # the test itself adds one transfer each way
        assert gpu.LOG.count(gpu.D2H, f"rank {rank}") == gpu.LOG.count(gpu.H2D, f"rank {rank}") == segments + 1


def test_host_waits_for_one_segment_at_a_time(gpu, monkeypatch):
    """While segment 0 is reduced, the copies of segments 1 and 2 are in flight."""
    monkeypatch.setattr(dispatch, "SEGMENT_BYTES", 40)
    seen = []

    def record_pending(comm, block, op="sum"):
        stream = dispatch.staging._per_thread.stream
        seen.append(stream._given - stream._done)

    run_threads(
        1, lambda comm: dispatch.staged_allreduce(record_pending, comm, backend.zeros(40, np.dtype("float32"), "gpu"))
    )
    assert seen == [4, 4, 2, 0]  # an event wait and a copy for each segment ahead


@pytest.mark.parametrize("dtype", ["float32", "float64", "int64", "float16"])
@pytest.mark.parametrize("op", ["sum", "max", "min"])
@pytest.mark.parametrize("size", [2, 3, 5])
def test_device_shared_allreduce_reads_peer_memory(gpu, size, op, dtype, rng, monkeypatch):
    monkeypatch.setattr(peer_memory, "UNIT_BYTES", 512)
    monkeypatch.setattr(peer_memory, "PIECE_BYTES", 512)  # several pieces, and both halves
    inputs = integer_inputs(rng, size, dtype)

    def reduce_twice(comm, buffer):
        peer_memory.device_shared_allreduce(comm, buffer, op)
        peer_memory.device_shared_allreduce(comm, buffer, "max")  # all ranks have equal values
        assert not peer_memory.refusal(comm)
        collectives.release(comm)
        assert not cuda_double.LOCAL.opened

    want = {"sum": np.sum, "max": np.max, "min": np.min}[op](inputs, axis=0)
    for values in run_between_kernels(size, inputs, reduce_twice):
        assert values.dtype == dtype and np.array_equal(values, (2 * want + 1).astype(dtype))


def test_16_bit_device_sums_use_float32_and_round_once(gpu, rng):
    inputs = [rng.standard_normal(COUNT).astype(np.float16) for _ in range(4)]
    wide = np.float32(0)
    for part in inputs:
        wide = wide + (2 * part).astype(np.float32)
    want = wide.astype(np.float16) + np.float16(1)
    for values in run_between_kernels(4, inputs, peer_memory.device_shared_allreduce):
        assert values.tobytes() == want.tobytes()


def test_peer_memory_of_a_freed_communicator_is_unmapped(gpu, rng):
    def body(comm, buffer):
        part = comm.split(0, comm.rank)
        peer_memory.device_shared_allreduce(part, buffer)
        assert len(cuda_double.LOCAL.opened) == 2
        comm.barrier()  # no rank frees memory that another still reads
        del part
        gc.collect()
        assert not cuda_double.LOCAL.opened

    run_between_kernels(3, integer_inputs(rng, 3), body)


def test_unmappable_peer_memory_is_rejected_and_staged_instead(gpu, rng, monkeypatch):
    monkeypatch.setitem(cuda_double.LIMIT, "ipc", 0)
    inputs = integer_inputs(rng, 3)

    def body(comm, buffer):
        with pytest.raises(MissingCapabilityError, match="rank 0: GPU .* cannot open memory of GPU .*--gpus-per-node"):
            peer_memory.device_shared_allreduce(comm, buffer)
        collectives.allreduce(comm, buffer, "node_shared")

    for values in run_between_kernels(3, inputs, body):
        assert np.array_equal(values, 2 * np.sum(inputs, axis=0) + 1)


@pytest.fixture
def several_ranks_a_gpu(monkeypatch):
    monkeypatch.setattr(nccl_double, "VERSION", [nccl.SEVERAL_RANKS_A_GPU])
    monkeypatch.setenv(nccl.SEVERAL_RANKS_VARIABLE, "1")


@pytest.mark.usefixtures("several_ranks_a_gpu")
@pytest.mark.parametrize("dtype", ["float32", "float64", "int64", "float16"])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_nccl_allreduce_is_exact(gpu, size, dtype, rng):
    inputs = integer_inputs(rng, size, dtype)

    def body(comm, buffer):
        collectives.allreduce(comm, buffer, "nccl")
        collectives.allreduce(comm, buffer, "nccl", "max")
        collectives.release(comm)

    for values in run_between_kernels(size, inputs, body):
        assert np.array_equal(values, 2 * np.sum(inputs, axis=0) + 1)


@pytest.mark.usefixtures("several_ranks_a_gpu")
@pytest.mark.parametrize("algorithm", ["nccl", "native", "node_shared", "ring"])
@pytest.mark.parametrize("op", ["max", "min"])
def test_gpu_extremes_are_nan_wherever_a_rank_has_nan(gpu, algorithm, op, rng):
    inputs = integer_inputs(rng, 3)
    for rank, values in enumerate(inputs):
        values[rank::5] = np.nan
    expected = {"max": np.maximum, "min": np.minimum}[op].reduce(inputs) * np.float32(2) + 1
    result = run_between_kernels(3, inputs, lambda comm, buffer: collectives.allreduce(comm, buffer, algorithm, op))
    assert all(np.array_equal(values, expected, equal_nan=True) for values in result)


@pytest.mark.usefixtures("several_ranks_a_gpu")
@pytest.mark.parametrize("size", [1, 2, 3])
def test_nccl_shards_are_exact(gpu, size, rng):
    inputs = integer_inputs(rng, size)

    def body(comm, buffer):
        sharding = collectives.SHARDED_ON_GPUS["nccl"]
        shares = sharding.shares(comm, COUNT, 4)
        sharding.reduce_scatter(comm, buffer, shares)
        local_slice = shares[comm.rank].slice
        kept = buffer[local_slice].copy()
        buffer[...] = np.float32(0)
        buffer[local_slice] = kept
        sharding.all_gather(comm, buffer, shares)

    for values in run_between_kernels(size, inputs, body):
        assert np.array_equal(values, 2 * np.sum(inputs, axis=0) + 1)


@pytest.mark.usefixtures("several_ranks_a_gpu")
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_nccl_sends_16_bits_and_sums_in_float32(gpu, size, dtype, rng, monkeypatch):
    inputs = [rng.standard_normal(COUNT).astype(dtype_of(dtype)) for _ in range(size)]
    wide = np.sum([(2 * part).astype(np.float32) for part in inputs], axis=0, dtype=np.float32)
    sent = []
    send = nccl_double.NcclCommunicator.send
    monkeypatch.setattr(nccl_double.NcclCommunicator, "send", lambda self, *of: sent.append(of[1]) or send(self, *of))

    def reduce_and_gather(comm, buffer):
        sharding = collectives.SHARDED_ON_GPUS["nccl"]
        shares = sharding.shares(comm, COUNT, 2)
        sharding.reduce_scatter(comm, buffer, shares)
        sharding.all_gather(comm, buffer, shares)

    for call in (lambda comm, buffer: collectives.allreduce(comm, buffer, "nccl"), reduce_and_gather):
        sent.clear()
        for values in run_between_kernels(size, inputs, call):
            assert values.tobytes() == (wide.astype(dtype_of(dtype)) + dtype_of(dtype).type(1)).tobytes()
        assert sum(sent) == (size > 1) * size * COUNT * 2
    for values in run_between_kernels(
        size, inputs, lambda comm, buffer: collectives.allreduce(comm, buffer, "nccl", "max")
    ):
        assert np.array_equal(values, 2 * np.max(inputs, axis=0) + dtype_of(dtype).type(1))


@cases(
    "version, variable, reason",
    (
        22703,
        "1",
        r"2 ranks share GPU 0000:00:00.0 of node 0, but the installed .*NCCL 2\.27\.3.*a GPU of its own",
    ),
    (23000, "0", r"NCCL 2\.30\.0.*set NCCL_MULTI_RANK_GPU_ENABLE=1"),
)
def test_nccl_rejects_ranks_that_share_a_gpu(gpu, version, variable, reason, monkeypatch):
    monkeypatch.setattr(nccl_double, "VERSION", [version])
    monkeypatch.setenv(nccl.SEVERAL_RANKS_VARIABLE, variable)

    def body(comm):
        with pytest.raises(MissingCapabilityError, match=reason):
            collectives.allreduce(comm, backend.zeros(5, np.dtype("float32"), "gpu"), "nccl")

    run_threads(2, body)


def test_missing_nccl_is_reported_on_every_rank(gpu, monkeypatch):
    monkeypatch.setattr(nccl_double, "available", False)

    def body(comm):
        with pytest.raises(MissingCapabilityError, match="rank 0: cupy cannot use NCCL .*nvidia-nccl-cu12"):
            collectives.allreduce(comm, backend.zeros(5, np.dtype("float32"), "gpu"), "nccl")

    run_threads(2, body)


def test_nccl_on_host_buffers_uses_mpi(gpu):
    def body(comm):
        buffer = np.full(3, comm.rank + 1.0)
        collectives.allreduce(comm, buffer, "nccl")
        with pytest.raises(BufferHandoverError, match="got a buffer on the host"):
            nccl.nccl_allreduce(comm, buffer)
        with pytest.raises(BufferHandoverError, match="NCCL cannot reduce int16"):
            nccl.nccl_allreduce(comm, backend.zeros(3, np.dtype("int16"), "gpu"))
        return buffer.tolist()

    assert run_threads(2, body) == [[3.0] * 3] * 2


def test_pointer_support_is_decided_per_operation(gpu):
    def body(comm):
        comm.handover = Handover(("send",))
        results = [dispatch.takes_pointers(comm, operation) for operation in ("send", "allreduce")]
        children = comm.split(0)
        assert children is not None and dispatch.takes_pointers(children, "send")
        return results

    assert run_threads(2, body) == [[True, False]] * 2


@pytest.mark.parametrize(
    ("on", "error", "reason"),
    [("cpu", ConfigurationError, "needs GPUs, but run.device = cpu"), ("gpu", MissingCapabilityError, "share GPU")],
)
@pytest.mark.parametrize("strategy", ["allreduce", "zero2"])
@on_threads(2)
def test_run_that_cannot_use_nccl_is_rejected_before_its_first_step(
    comm, gpu, on, error, reason, strategy, tmp_path, rng
):
    keys = {
        "data.path": write_text(tmp_path / "text", rng),
        "communication.algorithm": "nccl",
        "run.device": on,
        "parallel.strategy": strategy,
    }
    with pytest.raises(error, match=reason):
        assemble_trainer(comm, keys)


@pytest.mark.usefixtures("several_ranks_a_gpu")
@pytest.mark.parametrize("layout", ["allreduce", "zero1", "zero2", "zero3"])
@pytest.mark.full
def test_nccl_run_matches_cpu_run(gpu, layout, monkeypatch, tmp_path, rng):
    called = set()

    def count_calls(name, before):
        def call(*arguments):
            called.add(name)
            before(*arguments)

        return call

    for name in ("allReduce", "reduce", "broadcast"):
        before = getattr(nccl_double.NcclCommunicator, name)
        monkeypatch.setattr(nccl_double.NcclCommunicator, name, count_calls(name, before))
    settings = {"data.path": write_text(tmp_path / "text", rng), **LAYOUTS[layout][1], "precision.mode": "float64"}
    host = run_threads(2, lambda comm: Trained(comm, settings))
    assert not called
    keys = {**settings, "communication.algorithm": "nccl", "run.device": "gpu"}
    check_same(host, run_threads(2, lambda comm: Trained(comm, keys)), 1e-12)
    assert called == ({"allReduce"} if layout == "allreduce" else {"reduce", "broadcast"})


@pytest.mark.usefixtures("several_ranks_a_gpu")
def test_autotuning_of_gpu_shards_includes_nccl(gpu, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    expected = autotune.TuningRequest(
        max_bytes=4096, dtype=np.dtype("float32"), kind=autotune.SHARDED_KIND, buffer="device", budget_s=0.1
    )

    def raced_algorithms(renewed):
        ticks = threading.local()

        def clock():
            """Return a clock on which every call takes the same time, so that no candidate is dropped."""
            ticks.now = getattr(ticks, "now", 0.0) + 1e-3
            return float(ticks.now)

        def body(comm):
            return autotune.select(comm, comm, expected, "threads", renewed=renewed, clock=clock)

        (row,) = run_threads(2, body)[0].rows
        return dict(row.measured)

    assert "nccl" in raced_algorithms(renewed=False)
    assert autotune.usable("nccl", autotune.SHARDED_KIND, 2)
    monkeypatch.setenv(nccl.SEVERAL_RANKS_VARIABLE, "0")
    assert "nccl" not in raced_algorithms(renewed=True)
