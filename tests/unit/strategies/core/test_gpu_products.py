"""Pipelines, tensor ranks and products on the double of GPUs: the numbers of the CPU, with waits for messages only.


A pipeline message costs its sender one wait, and its receiver one if the library accepts device pointers. So does a sum
over the tensor axis. Nothing waits for a layer or a micro-batch; losses are copied once per step. Message buffers are
neither reused nor written before the wait.
"""

import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest

from harness import pipelines as skipping
from harness import trainings
from harness.combinations import PRODUCT_STEPS as STEPS
from harness.combinations import PRODUCTS
from harness.devices import Watch, expected_sites
from harness.trainings import Trained, assemble_trainer, check_same, with_pointers
from hpcdist.arrays import backend
from hpcdist.comm.threads.communicator import run_threads
from hpcdist.errors import DivergenceError
from hpcdist.strategies.pipeline import costs
from hpcdist.strategies.schedule.replica_check import check_tensor_axis
from hpcdist.training.run.saving import CheckpointSaver
from stubs import late_messages


@pytest.fixture
def text(text):
    return {"data.path": text, "precision.mode": "float32"}


@pytest.mark.parametrize("product", PRODUCTS)
@pytest.mark.matrix_except(
    "interleaved, recomputing", "gpipe x zero3, kept", "zb-h2, measured", "zb-h1 x tensor by rows", "zb-h1 x servers"
)
@pytest.mark.full
def test_products_on_the_gpu_match_the_cpu(gpu, text, product, monkeypatch):
    (ranks, keys), pointers = PRODUCTS[product], list(PRODUCTS).index(product) % 2 == 0
    settings = text | keys

    def on_device(comm):
        if pointers:
            with_pointers(comm)
        watch = Watch(gpu, pointers)
        comm.events = watch
        return Trained(comm, {**settings, "run.device": "gpu"}, watch.before_step, watch.after_step), watch

    host = run_threads(ranks, lambda comm: Trained(comm, settings))
    assert gpu.LOG.events == []
    late_messages.install(monkeypatch)
    results = run_threads(ranks, on_device)
    check_same(host, [run for run, _ in results], 1e-5, leave_out=("qkv.bias",))
    for run, watch in results:
        assert len(watch.steps) == STEPS
        for sites, messages in watch.steps:
            assert +sites == +expected_sites(gpu, run, messages, pointers)
            assert messages.total() > 0


def test_measurements_begin_and_end_with_an_idle_gpu(gpu, text, monkeypatch):
    looks = []

    def look():
        looks.append(gpu.LOG.kernels_pending())
        return time.perf_counter()

    monkeypatch.setattr(costs, "time", SimpleNamespace(perf_counter=look))
    _, keys = PRODUCTS["zb-h2, measured"]
    plans = run_threads(2, lambda comm: assemble_trainer(comm, {**text, **keys, "run.device": "gpu"}).plan)
    assert plans[0] is not None and looks and not any(looks)


def test_comparison_of_tensor_ranks_needs_one_copy(gpu, text):
    def body(comm):
        trainer = assemble_trainer(comm, {**text, **PRODUCTS["tensor"][1], "run.device": "gpu"})
        tensor, store, name = trainer.context.tensor, trainer.exchange.parameters, threading.current_thread().name
        before = gpu.LOG.sites(name)
        check_tensor_axis(tensor, store, 7)
        assert gpu.LOG.sites(name) - before == {(gpu.D2H, "replica_check.check_tensor_axis"): 1}
        store.view("1.norm2.scale")[3] += 1e-3 * comm.rank
        try:
            check_tensor_axis(tensor, store, 8)
        except DivergenceError as error:
            return str(error)
        return "no error"

    assert all("step 8" in messages and "1.norm2.scale" in messages for messages in run_threads(2, body))


def test_nan_in_a_product_names_rank_and_parameter(gpu, text):
    ranks, keys = PRODUCTS["zb-h1 x tensor by rows"]

    def body(comm):
        trainer = assemble_trainer(comm, {**text, **keys, "run.device": "gpu"})
        if comm.rank == ranks - 1:
            trainer.exchange.parameters.array[3] = np.nan
        return trainings.failure_reason(trainer)

    assert all(f"rank {ranks - 1}: parameter " in messages for messages in run_threads(ranks, body))


def test_product_resumes_from_a_checkpoint_of_the_other_device(gpu, text, tmp_path):
    ranks, keys = PRODUCTS["zero3 x tensor by rows"]
    settings = text | keys | {"run.steps": 1}

    def save_checkpoint(comm):
        trainer = Trained(comm, {**settings, "run.device": "gpu"}).trainer
        return CheckpointSaver(trainer, tmp_path / "checkpoints").save(1)

    def resume_on(comm, on):
        trainer = assemble_trainer(comm, {**settings, "run.device": on}, path)
        return {f"{p.name} {p.flat.start}": backend.to_host(p.array).tobytes() for p in trainer.exchange.pieces()}

    path = run_threads(ranks, save_checkpoint)[0]
    host, there = (run_threads(ranks, lambda comm, on=on: resume_on(comm, on)) for on in ("cpu", "gpu"))
    assert host == there and all(host)


@pytest.mark.parametrize(("schedule", "ranks", "chunks"), [("zb-h1", 3, 1), ("interleaved", 2, 2)])
def test_skip_connections_on_the_gpu_match_one_rank(gpu, monkeypatch, schedule, ranks, chunks):
    loss, evaluated, expected = skipping.run_single_process(4, "gpu")
    host = skipping.run_single_process(4)
    late_messages.install(monkeypatch)
    results = {}

    def body(comm):
        with_pointers(comm)
        return skipping.run(comm, skipping.schedule_passes(schedule, ranks, chunks, 4), "gpu")

    for local_values, of_all, gradients in run_threads(ranks, body):
        assert (local_values, of_all) == (loss, evaluated)
        results |= gradients
    assert results == expected  # the bits of one GPU, and nearly the bits of the CPU
    assert (loss, evaluated) == pytest.approx(host[:2], rel=1e-12)
    for key, values in host[2].items():
        np.testing.assert_allclose(np.frombuffer(results[key]), np.frombuffer(values), rtol=1e-10, atol=1e-14)
