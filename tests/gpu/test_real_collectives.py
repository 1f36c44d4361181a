"""The ways of a buffer on a real GPU: threads that share it, and jobs of processes, against numpy."""

from pathlib import Path

import numpy as np
import pytest

from hpcdist import collectives
from hpcdist.arrays import backend
from hpcdist.arrays.gpu import device, staging
from hpcdist.collectives.gpu import nccl, peer_memory
from hpcdist.collectives.gpu import staging as gpu_staging
from hpcdist.collectives.reduction import native_allreduce
from hpcdist.comm.handover import OPERATIONS
from hpcdist.comm.mpi import cuda_aware
from hpcdist.comm.threads.communicator import run_threads
from hpcdist.errors import MissingCapabilityError

COUNT = (1 << 20) + 3
PROGRAM = Path(__file__).with_name("collectives_job.py")


def reduced(ranks, call, dtype="float32"):
    """Check what ``call`` makes of buffers of many elements, so that kernels and copies still run if nobody waits."""

    def body(comm):
        device.choose(comm.rank)
        buffer = backend.place((np.arange(COUNT) % 7 + comm.rank).astype(dtype), "gpu")
        for _ in range(20):
            buffer += buffer.dtype.type(1)
        call(comm, buffer)
        buffer += buffer.dtype.type(1)
        return backend.to_host(buffer)

    want = sum((np.arange(COUNT) % 7 + rank + 20 for rank in range(ranks)), start=np.zeros(COUNT)) + 1
    for values in run_threads(ranks, body):
        assert np.array_equal(values.astype(np.float64), want)


def one_gpu(cupy):
    if cupy.cuda.runtime.getDeviceCount() > 1:
        pytest.skip("threads on several GPUs need peer access; this test is for ranks that share one")


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
@pytest.mark.parametrize("segment_bytes", [1 << 16, 1 << 20, 1 << 30])
def test_segments_through_pinned_memory(segment_bytes, dtype, monkeypatch):
    monkeypatch.setattr(gpu_staging, "SEGMENT_BYTES", segment_bytes)
    for _ in range(3):  # the blocks are used again
        reduced(3, lambda comm, buffer: collectives.allreduce(comm, buffer, "ring"), dtype)
    assert not staging.refusal()


def test_a_copy_to_pinned_memory_is_not_waited_for(cupy):
    source = backend.zeros(1 << 28, np.dtype("uint8"), "gpu")
    event = staging.begin_to_host(source, staging.lease(1 << 28, np.dtype("uint8")))
    assert not event.done  # 256 MiB take milliseconds
    event.synchronize()
    assert event.done


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_kernels_read_the_memory_of_the_others(cupy, ranks, dtype):
    one_gpu(cupy)
    reduced(ranks, peer_memory.device_shared_allreduce, dtype)


def test_memory_of_a_pool_is_not_exported(cupy):
    with pytest.raises(MissingCapabilityError, match="part of a pool"):
        peer_memory.export(cupy.zeros(10, np.uint8))
    with cupy.cuda.using_allocator(cupy.cuda.malloc_async):
        array = cupy.zeros(10, np.uint8)
    with pytest.raises(MissingCapabilityError):
        peer_memory.export(array)
    assert len(peer_memory.export(peer_memory.allocate(1)).handle) == 64


def test_nccl_on_one_rank(cupy):
    try:
        module = device.nccl()
    except MissingCapabilityError as error:
        pytest.skip(str(error))
    channel = module.NcclCommunicator(1, module.get_unique_id(), 0)
    array = cupy.arange(COUNT, dtype=np.float32)
    stream = device.current_stream().ptr
    channel.allReduce(array.data.ptr, array.data.ptr, COUNT, module.NCCL_FLOAT32, module.NCCL_SUM, stream)
    module.groupStart()
    channel.reduce(array.data.ptr, array.data.ptr, COUNT, module.NCCL_FLOAT32, module.NCCL_MAX, 0, stream)
    channel.broadcast(array.data.ptr, array.data.ptr, COUNT * 4, module.NCCL_UINT8, 0, stream)
    module.groupEnd()
    assert np.array_equal(array.get(), np.arange(COUNT, dtype=np.float32))
    channel.destroy()


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("algorithm", ["native", "ring", "rabenseifner", "node_shared", "hierarchical", "all_to_all"])
def test_processes_that_share_a_gpu(job, algorithm, ranks):
    found = job(PROGRAM, ranks, algorithm)
    assert found["right"] and found["ranks"] == ranks
    if algorithm == "node_shared":
        assert found["shared"] == ""  # by handles of the driver, not through the host


@pytest.mark.parametrize("ranks", [2, 3])
def test_processes_over_nccl(cupy, job, ranks):
    try:
        version = int(device.nccl().get_version())
    except MissingCapabilityError as error:
        pytest.skip(str(error))
    if cupy.cuda.runtime.getDeviceCount() < ranks and version < nccl.SEVERAL_RANKS_A_GPU:
        assert "takes one rank a GPU" in str(job(PROGRAM, ranks, "refusal")["nccl"])
        pytest.skip(f"NCCL {version} refuses ranks that share a GPU, and so do we")
    assert job(PROGRAM, ranks, "nccl", **{nccl.SEVERAL_RANKS_VARIABLE: "1"})["right"]


def test_what_the_probe_allows_works(job, monkeypatch, tmp_path):
    """Whatever MPI this is: the probe ends, and device pointers are then used in what it allows."""
    monkeypatch.delenv(cuda_aware.VARIABLE, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    verdict = cuda_aware.probe_cached()
    assert len(list((tmp_path / "hpcdist" / "device_pointers").iterdir())) == 1
    again = cuda_aware.probe_cached()
    assert again.operations == verdict.operations and again.reason.startswith(f"{verdict.reason}; found on ")
    assert verdict.operations <= set(OPERATIONS) and verdict.reason
    found = job(PROGRAM, 2, "native")
    assert found["right"] and set(found["pointers"]) == verdict.operations, found["reason"]


def test_staged_and_native_agree():
    reduced(2, lambda comm, buffer: gpu_staging.staged_allreduce(native_allreduce, comm, buffer))
