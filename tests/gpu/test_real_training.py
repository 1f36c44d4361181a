"""Trainings and collectives on a real GPU, which all ranks (threads) share, against the CPU."""

import numpy as np
import pytest

from harness.combinations import PRODUCTS
from harness.inputs import write_text
from harness.trainings import LAYOUTS, STEPS, TRAININGS, Trained, assemble_trainer, check_same, with_pointers
from hpcdist import collectives
from hpcdist.arrays import backend
from hpcdist.arrays.gpu import device
from hpcdist.comm.threads.communicator import run_threads
from hpcdist.training.run.saving import CheckpointSaver
from stubs import late_messages

BOUNDS = {"float32": 1e-4, "float64": 1e-10}
NOISE = ("qkv.bias",)  # the true gradient of the keys' bias is zero: under Adam it is noise in any order of summation


@pytest.fixture
def text(tmp_path, rng):
    return {"data.path": write_text(tmp_path / "text.txt", rng)}


def on_gpu(comm, pointers):
    """Give this rank the GPU of its local rank, as the start of a job does."""
    device.choose(comm.rank)
    if pointers:
        with_pointers(comm)


@pytest.mark.parametrize("pointers", [False, True], ids=["staged", "pointers"])
@pytest.mark.parametrize("mode", BOUNDS)
@pytest.mark.parametrize(("layout", "ranks"), TRAININGS)
def test_training_on_the_gpu_matches_the_cpu(text, layout, ranks, mode, pointers, cupy):
    if pointers and ranks > 1 and cupy.cuda.runtime.getDeviceCount() > 1:
        pytest.skip("threads on several GPUs need peer access; this test is for ranks that share one")
    settings = {**text, **LAYOUTS[layout][1], "precision.mode": mode}

    def on_device(comm):
        on_gpu(comm, pointers)
        return Trained(comm, {**settings, "run.device": "gpu"})

    host = run_threads(ranks, lambda comm: Trained(comm, settings))
    check_same(host, run_threads(ranks, on_device), BOUNDS[mode], NOISE)


IN_16_BITS = {"precision.mode": "bfloat16", "precision.activations": "working"}


@pytest.mark.parametrize("keys", [{}, {"model.dropout": 0.2}, IN_16_BITS, {**IN_16_BITS, "model.dropout": 0.2}])
def test_cuda_graphs_do_not_change_the_bits_of_a_training(text, keys):
    settings = {**text, **LAYOUTS["allreduce"][1], **keys, "run.device": "gpu", "run.steps": 8}

    def on_device(comm, graphs):
        on_gpu(comm, False)
        return Trained(comm, {**settings, "run.cuda_graph": graphs})

    plain, graphs = (run_threads(1, lambda comm, on=on: on_device(comm, on))[0] for on in ("false", "true"))
    assert graphs.losses == plain.losses
    assert all(graphs.state[key].tobytes() == plain.state[key].tobytes() for key in plain.state)


@pytest.mark.parametrize("pointers", [False, True], ids=["staged", "pointers"])
@pytest.mark.parametrize("product", PRODUCTS)
def test_training_in_a_product_layout_matches_the_cpu(text, product, pointers, cupy, monkeypatch):
    if pointers and cupy.cuda.runtime.getDeviceCount() > 1:
        pytest.skip("threads on several GPUs need peer access; this test is for ranks that share one")
    ranks, keys = PRODUCTS[product]
    settings = text | keys | {"precision.mode": "float64"}

    def on_device(comm):
        on_gpu(comm, pointers)
        return Trained(comm, {**settings, "run.device": "gpu"})

    host = run_threads(ranks, lambda comm: Trained(comm, settings))
    late_messages.install(monkeypatch)
    check_same(host, run_threads(ranks, on_device), BOUNDS["float64"], NOISE)


@pytest.mark.parametrize("pointers", [False, True], ids=["staged", "pointers"])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("algorithm", collectives.ALLREDUCE)
def test_allreduce_on_the_gpu_matches_numpy(algorithm, ranks, pointers, rng, cupy):
    if pointers and ranks > 1 and cupy.cuda.runtime.getDeviceCount() > 1:
        pytest.skip("threads on several GPUs need peer access; this test is for ranks that share one")
    for dtype in (np.float32, np.float64, np.float16):
        # Integers, so that the sum is exact in every order; many elements, so that a kernel is still busy if none waits
        inputs = [rng.integers(-9, 9, 1 << 20).astype(dtype) for _ in range(ranks)]

        def body(comm, inputs=inputs):
            on_gpu(comm, pointers)
            buffer = backend.place(inputs[comm.rank], "gpu")
            buffer *= 2
            buffer += 1
            collectives.allreduce(comm, buffer, algorithm)
            return backend.to_host(buffer)

        want = sum(2 * values.astype(np.float64) + 1 for values in inputs)
        for got in run_threads(ranks, body, 2 if algorithm == "hierarchical" else None):
            assert got.dtype == dtype and np.array_equal(got.astype(np.float64), want)


def test_gpu_training_resumes_from_its_checkpoint(text, tmp_path):
    settings = {**text, **LAYOUTS["zero3"][1], "run.device": "gpu"}

    def save_checkpoint(comm):
        on_gpu(comm, False)
        run = Trained(comm, settings)
        path = CheckpointSaver(run.trainer, tmp_path / "checkpoints").save(STEPS)
        trainer = assemble_trainer(comm, settings, path)
        for piece in trainer.exchange.pieces():
            kept = run.state[piece.kind, piece.tensor, piece.flat.start]
            assert backend.to_host(piece.array).tobytes() == kept.tobytes(), piece.name
        assert trainer.first_step == STEPS
        return path

    path = run_threads(2, save_checkpoint)[0]
    # and without the GPU, by the same recipe but for the device
    assert assembled_on_cpu({**settings, "run.device": "cpu"}, path) == STEPS


def assembled_on_cpu(settings, path):
    return run_threads(1, lambda comm: assemble_trainer(comm, settings, path).first_step)[0]


def test_all_memory_categories_of_a_step_are_on_the_device(text):
    def body(comm):
        on_gpu(comm, False)
        return Trained(comm, {**text, **LAYOUTS["allreduce"][1], "run.device": "gpu"}).trainer.ledger.peak

    peak = run_threads(1, body)[0]
    assert all(peak[category] > 0 for category in ("parameters", "gradients", "optimizer", "activations"))
    assert device.cupy().get_default_memory_pool().total_bytes() >= peak["parameters"] + peak["gradients"]
