"""16-bit working copies with run.device = "gpu" on the double: the numbers of the CPU."""

from contextlib import nullcontext

import numpy as np
import pytest

from harness.inputs import write_text
from harness.marks import on_threads
from harness.trainings import LAYOUTS, Trained, assemble_trainer, check_same, recipe_keys, session_of
from hpcdist.arrays import backend
from hpcdist.arrays.gpu import device as arrays_device
from hpcdist.checkpoint.lock import RunLock
from hpcdist.comm.threads.communicator import run_threads
from hpcdist.errors import MissingCapabilityError
from hpcdist.training.run.job import TrainingJob
from hpcdist.training.run.stop_requests import StopRequests
from hpcdist.training.run_directory import RunDirectory

BOUND = 2e-4  # a GPU sums in another order, and what is rounded to 11 bits may then fall on the other side


@pytest.mark.parametrize("layout", ["allreduce", "zero2", "zero3", "zero2, lamb", "1f1b", "servers that work"])
def test_float16_training_on_the_gpu_matches_the_cpu(gpu, tmp_path, rng, layout):
    text = write_text(tmp_path / "text.txt", rng)
    settings = {**LAYOUTS[layout][1], "data.path": text, "precision.mode": "float16", "precision.loss_scale": 1024}
    host = run_threads(2, lambda comm: Trained(comm, settings))
    assert gpu.LOG.events == []
    device = run_threads(2, lambda comm: Trained(comm, {**settings, "run.device": "gpu"}))
    assert host[0].losses[-1] < host[0].losses[0] and gpu.LOG.events
    check_same(host, device, BOUND)


@pytest.mark.parametrize("layout", ["allreduce", "zero3", "1f1b"])
def test_bfloat16_training_on_the_gpu_matches_the_cpu(gpu, tmp_path, rng, layout):
    settings = {**LAYOUTS[layout][1], "data.path": write_text(tmp_path / "text.txt", rng), "precision.mode": "bfloat16"}
    host = run_threads(2, lambda comm: Trained(comm, settings))
    device = run_threads(2, lambda comm: Trained(comm, {**settings, "run.device": "gpu"}))
    assert host[0].losses[-1] < host[0].losses[0] and gpu.LOG.events
    np.testing.assert_allclose(device[0].losses, host[0].losses, rtol=1e-3)


def test_cupy_without_bfloat16_is_rejected_with_the_remedy(gpu, monkeypatch):
    def raise_value_error(*_):
        raise ValueError("Unsupported dtype bfloat16")

    monkeypatch.setattr(arrays_device.cupy(), "zeros", raise_value_error)
    with pytest.raises(MissingCapabilityError, match="has no bfloat16 .* install cupy 14 or newer"):
        arrays_device.check_bfloat16()


@pytest.mark.parametrize(
    ("keys", "output"),
    [
        ("precision.mode=bfloat16", "needs compute capability 8.0 or newer; set precision.mode = 'float16'"),
        ("precision.mode=bfloat16 model.kind=mlp model.tied=false", "precision.mode = 'bfloat16' needs compute"),
        (
            "precision.mode=float16 precision.activations=working",
            "16-bit floats needs compute capability 8.0 .* set precision.activations = 'float32'",
        ),
        ("precision.mode=float16 precision.activations=working model.kind=mlp model.tied=false", ""),
        ("precision.mode=float16", ""),
        ("precision.mode=float32", ""),
    ],
)
@on_threads(1)
def test_gpu_without_tensor_cores_for_the_type_is_rejected(comm, gpu, monkeypatch, words, keys, output):
    properties = {"name": b"Tesla V100", "major": 7, "minor": 0}
    monkeypatch.setattr(arrays_device.cupy().cuda.runtime, "getDeviceProperties", lambda index: properties)
    settings = {**words, **recipe_keys(keys), "run.device": "gpu"}
    with pytest.raises(MissingCapabilityError, match=output) if output else nullcontext() as error:
        assemble_trainer(comm, settings)
    if error is not None:
        assert "GPU 0 is a Tesla V100 of compute capability 7.0" in str(error.value)


@pytest.mark.parametrize("layout", ["allreduce", "zero1", "zero3", "1f1b"])
@pytest.mark.parametrize("mode", ["float16", "bfloat16"])
def test_16_bit_activations_learn_like_float32(gpu, tmp_path, rng, layout, mode):
    text = write_text(tmp_path / "text.txt", rng)
    settings = {**LAYOUTS[layout][1], "data.path": text}  # of two micro-batches, or three in a pipeline
    host = run_threads(2, lambda comm: Trained(comm, settings))
    narrow = {**settings, "precision.mode": mode, "precision.activations": "working", "run.device": "gpu"}
    device = run_threads(2, lambda comm: Trained(comm, narrow))
    assert host[0].losses[-1] < host[0].losses[0] and gpu.LOG.events
    np.testing.assert_allclose(device[0].losses, host[0].losses, rtol={"float16": 2e-3, "bfloat16": 2e-2}[mode])


def test_16_bit_gradient_sums_of_many_micro_batches_are_accurate(gpu, words):
    """Each sum is rounded once more, and no micro-batch is lost or counted twice."""
    keys = {**words, **recipe_keys("optimizer.name=sgd optimizer.momentum=0 global_batch=12 steps=1")}
    narrow = {"precision.mode": "bfloat16", "precision.activations": "working", "run.device": "gpu"}

    def gradient(comm, more):
        exchange = Trained(comm, {**keys, "optimizer.clip_norm": 0, **more}).trainer.exchange
        return backend.to_host(exchange.gradients.array).astype(np.float64)

    (exact,) = run_threads(1, lambda comm: gradient(comm, {"precision.mode": "float64"}))
    for microbatches in (1, 12):
        more = {**narrow, "parallel.microbatches": microbatches}
        (rounded,) = run_threads(1, lambda comm, more=more: gradient(comm, more))
        assert 0 < np.linalg.norm(rounded - exact) <= 1.5e-2 * np.linalg.norm(exact)


@pytest.mark.parametrize(
    ("ranks", "keys"),
    [
        (2, ""),
        (2, "parallel.sequence_parallel=true data.context=9"),
        (4, "parallel.strategy=zero3"),
        (4, "parallel.pipeline=2 parallel.microbatches=3 run.global_batch=12 model.tied=false"),
    ],
)
def test_16_bit_tensor_ranks_learn_like_one_float32_rank(gpu, tmp_path, rng, ranks, keys):
    """Two tensor ranks are also close to one rank of 16 bits, whose sums are rounded at other points."""
    settings = {"data.path": write_text(tmp_path / "text.txt", rng), **recipe_keys(keys)}
    alone = {
        **settings,
        "parallel.pipeline": 1,
        "parallel.sequence_parallel": "false",
        "parallel.strategy": "allreduce",
    }
    narrow = {"precision.mode": "bfloat16", "precision.activations": "working", "run.device": "gpu"}
    (wide,) = run_threads(1, lambda comm: Trained(comm, alone))
    (whole,) = run_threads(1, lambda comm: Trained(comm, {**alone, **narrow}))
    cut = run_threads(ranks, lambda comm: Trained(comm, {**settings, **narrow, "parallel.tensor": 2}))
    assert whole.losses[-1] < whole.losses[0]
    for run in cut:
        np.testing.assert_allclose(run.losses, wide.losses, rtol=2e-2)
        np.testing.assert_allclose(run.losses, whole.losses, rtol=5e-3)


@on_threads(1)
def test_gpu_run_prints_the_type_of_its_products(comm, gpu, words, tmp_path, capsys):
    def precision_lines(keys):
        trainer = assemble_trainer(comm, {**words, "precision.mode": "float32", **keys})
        run = RunDirectory(tmp_path, None)
        job = TrainingJob(trainer.recipe, run, StopRequests(), RunLock({}), as_json=False)
        job.introduce(session_of(comm), trainer, job.progress(trainer))
        return [line for line in capsys.readouterr().err.splitlines() if line.startswith("precision: ")]

    assert precision_lines({}) == []
    (line,) = precision_lines({"run.device": "gpu"})
    assert "in float32; precision.mode = 'bfloat16'" in line
