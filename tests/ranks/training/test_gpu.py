"""Trainings with run.device = "gpu" over MPI on the double of cupy: device buffers are staged without loss."""

from pathlib import Path

import numpy as np
import pytest

from harness.inputs import write_text
from harness.trainings import LAYOUTS, Trained, check_same, recipe_keys
from hpcdist import collectives
from hpcdist.arrays import backend
from hpcdist.arrays.gpu import device
from stubs.gpu import cupy_double

# All kinds of messages of device buffers; tests/unit/training/build/test_gpu.py has every architecture, on threads.
CHOSEN = {"allreduce": True, "zero3": True, "1f1b": False, "a server": False, "servers that work": False}

MIXTURE = recipe_keys(
    "experts=4 expert_hidden=10 capacity_factor=1 shared_experts=1 balance_loss=0.1 z_loss=0.01 balance_rate=0.01"
)


@pytest.fixture
def gpu(monkeypatch):
    made = cupy_double.module()
    monkeypatch.setattr(device, "cupy", lambda: made)
    cupy_double.LOG.clear()
    return cupy_double


@pytest.fixture
def text(comm, tmp_path, rng):
    """A text file that all ranks see."""
    path = Path(comm.broadcast_object(str(tmp_path / "text.txt")))
    if comm.rank == 0:
        write_text(path, rng)
    comm.barrier()
    return {"data.path": path}


@pytest.mark.parametrize("layout", CHOSEN)
@pytest.mark.full_except("a server")
def test_rank_training_on_the_gpu_matches_the_cpu(comm, gpu, text, layout):
    sizes, keys = LAYOUTS[layout]
    if comm.size not in sizes and not CHOSEN[layout]:
        pytest.skip(f"{layout} is for {sizes} ranks")
    settings = {**text, **keys, "precision.mode": "float64"}
    host = Trained(comm, settings)
    assert gpu.LOG.events == []
    check_same([host], [Trained(comm, {**settings, "run.device": "gpu"})], 1e-12)
    assert host.losses[-1] < host.losses[0]


@pytest.mark.parametrize("keys", ["", "expert=2 strategy=zero1 algorithm=ring", "expert=4"], ids=str)
@pytest.mark.full_except("expert=2 strategy=zero1 algorithm=ring")
def test_rank_mixture_of_experts_on_the_gpu_matches_the_cpu(comm, gpu, text, keys):
    """Rows are sent to the ranks of their experts like other device buffers."""
    settings = {**text, **MIXTURE, **recipe_keys(keys), "precision.mode": "float64"}
    if comm.size % settings.get("parallel.expert", 1):
        pytest.skip(f"{keys} is for a multiple of these ranks")
    host = Trained(comm, settings)
    assert gpu.LOG.events == []
    check_same([host], [Trained(comm, {**settings, "run.device": "gpu"})], 1e-12)
    assert host.losses[-1] < host.losses[0]


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("algorithm", sorted(collectives.ALLREDUCE))
def test_rank_allreduce_of_device_buffers(comm, gpu, algorithm, dtype):
    inputs = [(np.arange(1001) * (rank + 1) % 5).astype(dtype) for rank in range(comm.size)]
    buffer = backend.place(inputs[comm.rank], "gpu")
    collectives.allreduce(comm, buffer, algorithm)
    assert np.array_equal(backend.to_host(buffer), np.sum(inputs, axis=0, dtype=dtype))


def test_rank_messages_of_device_buffers(comm, gpu):
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    local_data = backend.place(np.full(100, comm.rank, np.float32), "gpu")
    arrived = [backend.empty(100, np.dtype(np.float32), "gpu") for _ in range(2)]
    first = comm.irecv(arrived[0], left, 1)
    requests = [comm.isend(local_data, right, 1), comm.isend(local_data, right, 2)]
    local_data += 100  # staged: what was sent has left the buffer
    first.wait()
    comm.probe(left, 2).recv(arrived[1])
    for request in requests:
        request.wait()
    assert all((backend.to_host(values) == left).all() for values in arrived)
    comm.broadcast(local_data, root=comm.size - 1)
    assert (backend.to_host(local_data) == comm.size + 99).all()
