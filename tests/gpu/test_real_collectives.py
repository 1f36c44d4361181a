"""Allreduces of buffers on a real GPU: threads that share it, and jobs of processes, compared with numpy."""

from pathlib import Path

import numpy as np
import pytest

from hpcdist import collectives
from hpcdist.arrays import backend
from hpcdist.arrays.gpu import device, staging
from hpcdist.collectives import dispatch, nccl, peer_memory
from hpcdist.collectives.reduction import native_allreduce
from hpcdist.comm.handover import OPERATIONS
from hpcdist.comm.mpi import cuda_aware
from hpcdist.comm.threads.communicator import run_threads
from hpcdist.errors import MissingCapabilityError

COUNT = (1 << 20) + 3
PROGRAM = Path(__file__).with_name("collectives_job.py")


def check_reduction(ranks, call, dtype="float32"):
    """Check the result of ``call`` on large buffers, so that kernels and copies are still running if nobody waits."""

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


def skip_with_several_gpus(cupy):
    if cupy.cuda.runtime.getDeviceCount() > 1:
        pytest.skip("threads on several GPUs need peer access; this test is for ranks that share one")


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
@pytest.mark.parametrize("segment_bytes", [1 << 16, 1 << 20, 1 << 30])
def test_ring_allreduce_through_pinned_memory_matches_numpy(segment_bytes, dtype, monkeypatch):
    monkeypatch.setattr(dispatch, "SEGMENT_BYTES", segment_bytes)
    for _ in range(3):  # the blocks are used again
        check_reduction(3, lambda comm, buffer: collectives.allreduce(comm, buffer, "ring"), dtype)
    assert not staging.refusal()


def test_copy_to_pinned_memory_is_asynchronous(cupy):
    source = backend.zeros(1 << 28, np.dtype("uint8"), "gpu")
    event = staging.begin_to_host(source, staging.lease(1 << 28, np.dtype("uint8")))
    assert not event.done  # 256 MiB take milliseconds
    event.synchronize()
    assert event.done


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_device_shared_allreduce_of_threads_matches_numpy(cupy, ranks, dtype):
    skip_with_several_gpus(cupy)
    check_reduction(ranks, peer_memory.device_shared_allreduce, dtype)


def test_export_of_pool_memory_is_rejected(cupy):
    with pytest.raises(MissingCapabilityError, match="part of a pool"):
        peer_memory.export(cupy.zeros(10, np.uint8))
    with cupy.cuda.using_allocator(cupy.cuda.malloc_async):
        array = cupy.zeros(10, np.uint8)
    with pytest.raises(MissingCapabilityError):
        peer_memory.export(array)
    assert len(peer_memory.export(peer_memory.allocate(1)).handle) == 64


def test_nccl_collectives_on_one_rank_keep_the_values(cupy):
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
def test_allreduce_of_processes_on_one_gpu_matches_numpy(job, algorithm, ranks):
    result = job(PROGRAM, ranks, algorithm)
    assert result["right"] and result["ranks"] == ranks
    if algorithm == "node_shared":
        assert result["shared"] == ""  # by handles of the driver, not through the host


@pytest.mark.parametrize("ranks", [2, 3])
def test_nccl_allreduce_of_processes_matches_numpy(cupy, job, ranks):
    try:
        version = int(device.nccl().get_version())
    except MissingCapabilityError as error:
        pytest.skip(str(error))
    if cupy.cuda.runtime.getDeviceCount() < ranks and version < nccl.SEVERAL_RANKS_A_GPU:
        assert "takes one rank a GPU" in str(job(PROGRAM, ranks, "refusal")["nccl"])
        pytest.skip(f"NCCL {version} refuses ranks that share a GPU, and so do we")
    assert job(PROGRAM, ranks, "nccl", **{nccl.SEVERAL_RANKS_VARIABLE: "1"})["right"]


def test_device_pointers_are_used_for_the_probed_operations(job, monkeypatch, tmp_path):
    """With any MPI, the probe ends, and device pointers are then used for the operations that it allows."""
    monkeypatch.delenv(cuda_aware.VARIABLE, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    verdict = cuda_aware.probe_cached()
    assert len(list((tmp_path / "hpcdist" / "device_pointers").iterdir())) == 1
    again = cuda_aware.probe_cached()
    assert again.operations == verdict.operations and again.reason.startswith(f"{verdict.reason}; measured on ")
    assert verdict.operations <= set(OPERATIONS) and verdict.reason
    result = job(PROGRAM, 2, "native")
    assert result["right"] and set(result["pointers"]) == verdict.operations, result["reason"]


def test_staged_native_allreduce_matches_numpy():
    check_reduction(2, lambda comm, buffer: dispatch.staged_allreduce(native_allreduce, comm, buffer))
