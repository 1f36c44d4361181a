"""Pipelines, tensor ranks and products on the double of GPUs: the numbers of the CPU, and no wait but a message's.

A message of a pipeline costs its sender one wait, and its receiver one where the library takes pointers of the device;
so does a sum over the tensor axis. Nothing waits for a layer or a micro-batch; losses are brought once a step. Messages
use the memory that they were given until they are waited for: none is given out again, or written, before.
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
from harness.trainings import Trained, assembled, check_same, with_pointers
from hpcdist.arrays import backend
from hpcdist.comm.threads.communicator import run_threads
from hpcdist.errors import DivergenceError
from hpcdist.strategies.core.replica_check import check_tensor_axis
from hpcdist.strategies.pipeline import costs
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
def test_a_product_on_the_gpu_is_that_of_the_cpu(gpu, text, product, monkeypatch):
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
    found = run_threads(ranks, on_device)
    check_same(host, [run for run, _ in found], 1e-5, leave_out=("qkv.bias",))
    for run, watch in found:
        assert len(watch.steps) == STEPS
        for sites, messages in watch.steps:
            assert +sites == +expected_sites(gpu, run, messages, pointers)
            assert messages.total() > 0


def test_measured_seconds_begin_and_end_where_the_gpu_is_idle(gpu, text, monkeypatch):
    looks = []

    def look():
        looks.append(gpu.LOG.kernels_pending())
        return time.perf_counter()

    monkeypatch.setattr(costs, "time", SimpleNamespace(perf_counter=look))
    _, keys = PRODUCTS["zb-h2, measured"]
    plans = run_threads(2, lambda comm: assembled(comm, {**text, **keys, "run.device": "gpu"}).plan)
    assert plans[0] is not None and looks and not any(looks)


def test_tensor_ranks_are_compared_by_one_copy(gpu, text):
    def body(comm):
        trainer = assembled(comm, {**text, **PRODUCTS["tensor"][1], "run.device": "gpu"})
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

    assert all("step 8" in said and "1.norm2.scale" in said for said in run_threads(2, body))


def test_a_nan_in_a_product_is_explained(gpu, text):
    ranks, keys = PRODUCTS["zb-h1 x tensor by rows"]

    def body(comm):
        trainer = assembled(comm, {**text, **keys, "run.device": "gpu"})
        if comm.rank == ranks - 1:
            trainer.exchange.parameters.array[3] = np.nan
        return trainings.failure(trainer)

    assert all(f"rank {ranks - 1}: parameter " in said for said in run_threads(ranks, body))


def test_a_product_goes_on_from_a_checkpoint_of_the_other_side(gpu, text, tmp_path):
    ranks, keys = PRODUCTS["zero3 x tensor by rows"]
    settings = text | keys | {"run.steps": 1}

    def saved(comm):
        trainer = Trained(comm, {**settings, "run.device": "gpu"}).trainer
        return CheckpointSaver(trainer, tmp_path / "checkpoints").save(1)

    def resumed(comm, on):
        trainer = assembled(comm, {**settings, "run.device": on}, path)
        return {f"{p.name} {p.flat.start}": backend.to_host(p.array).tobytes() for p in trainer.exchange.pieces()}

    path = run_threads(ranks, saved)[0]
    host, there = (run_threads(ranks, lambda comm, on=on: resumed(comm, on)) for on in ("cpu", "gpu"))
    assert host == there and all(host)


@pytest.mark.parametrize(("schedule", "ranks", "chunks"), [("zb-h1", 3, 1), ("interleaved", 2, 2)])
def test_skip_connections_on_the_gpu(gpu, monkeypatch, schedule, ranks, chunks):
    loss, evaluated, expected = skipping.alone(4, "gpu")
    host = skipping.alone(4)
    late_messages.install(monkeypatch)
    found = {}

    def body(comm):
        with_pointers(comm)
        return skipping.run(comm, skipping.planned(schedule, ranks, chunks, 4), "gpu")

    for own, of_all, gradients in run_threads(ranks, body):
        assert (own, of_all) == (loss, evaluated)
        found |= gradients
    assert found == expected  # the bits of one GPU, and nearly those of the CPU
    assert (loss, evaluated) == pytest.approx(host[:2], rel=1e-12)
    for key, values in host[2].items():
        np.testing.assert_allclose(np.frombuffer(found[key]), np.frombuffer(values), rtol=1e-10, atol=1e-14)
