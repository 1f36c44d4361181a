"""Whole training steps with run.device = "gpu" on the double: every architecture matches the CPU.


Between two steps only the batch, its losses at once, one norm, and staged messages cross the device boundary. Transfers
are counted for each rank and call site.
"""

import threading
from dataclasses import replace

import numpy as np
import pytest

from harness import trainings
from harness.devices import Watch, expected_sites
from harness.marks import on_threads
from harness.trainings import (
    LAYOUTS,
    STEPS,
    TRAININGS,
    Trained,
    assemble_trainer,
    check_same,
    recipe_keys,
    with_pointers,
)
from hpcdist.arrays import backend
from hpcdist.arrays.gpu import device
from hpcdist.comm.threads.communicator import run_threads
from hpcdist.errors import DataError, DivergenceError, MissingCapabilityError
from hpcdist.strategies.schedule.replica_check import check_replicas
from hpcdist.training import inference
from hpcdist.training.data import microbatches
from hpcdist.training.recipe import recipe as recipes
from hpcdist.training.run.saving import CheckpointSaver

BOUNDS = {"float32": 1e-5, "float64": 1e-12}


IN_FLOAT32 = [("allreduce", 2), ("zero3", 2), ("1f1b", 2), ("a server", 2)]  # the maths of a model is tested by itself


@pytest.mark.parametrize(
    ("layout", "ranks", "mode"),
    [*((*case, "float64") for case in TRAININGS), *((*case, "float32") for case in IN_FLOAT32)],
)
def test_training_on_the_gpu_matches_the_cpu(gpu, words, layout, ranks, mode):
    settings = {**words, **LAYOUTS[layout][1], "precision.mode": mode}
    host = run_threads(ranks, lambda comm: Trained(comm, settings))
    assert gpu.LOG.events == []
    device = run_threads(ranks, lambda comm: Trained(comm, {**settings, "run.device": "gpu"}))
    assert host[0].losses[-1] < host[0].losses[0]
    check_same(host, device, BOUNDS[mode])


# Each layout both ways, but not each number of ranks.
COUNTED = [
    (name, ranks, way)
    for name, (sizes, _) in LAYOUTS.items()
    for way in (False, True)
    for ranks in (sizes if len(sizes) == 1 else sizes[way::2])
]


@pytest.mark.parametrize(("layout", "ranks", "pointers"), COUNTED)
def test_step_makes_only_the_necessary_transfers(gpu, words, layout, ranks, pointers):
    settings = {**words, **LAYOUTS[layout][1], "run.device": "gpu"}

    def body(comm):
        if pointers:
            with_pointers(comm)
        watch = Watch(gpu, pointers)
        comm.events = watch
        return Trained(comm, settings, watch.before_step, watch.after_step), watch

    for run, watch in run_threads(ranks, body):
        for sites, messages in watch.steps:
            assert +sites == +expected_sites(gpu, run, messages, pointers)
            assert (messages.total() > 0) == (ranks > 1)


def without_lock_step(comm, settings):
    """Train under asp with one worker, which is as reproducible as lock-step. Return losses and parameters."""
    trainer = assemble_trainer(
        comm, settings | recipe_keys("strategy=parameter_server parameter_server.consistency=asp")
    )
    exchange, losses = trainer.exchange, []
    operations = exchange.attended(trainer.operations)
    exchange.resume()
    if exchange.works:
        with trainer.batches(STEPS) as batches:
            for step, batch in enumerate(batches, start=1):
                parts = microbatches(trainer.place(batch), 2)
                losses.append(trainer.executor.run(operations, parts, len(batch[0]), step, np.zeros(0)).loss)
    exchange.meet()
    exchange.refresh()
    return losses, backend.to_host(exchange.parameters.array).copy()


@pytest.mark.parametrize("pointers", [False, True], ids=["staged", "pointers"])
@pytest.mark.parametrize(("ranks", "placement"), [(1, "colocated"), (2, "dedicated")])
def test_asynchronous_training_on_the_gpu_matches_the_cpu(gpu, words, ranks, placement, pointers):
    settings = {
        **words,
        "precision.mode": "float32",
        "parallel.microbatches": 2,
        "parameter_server.placement": placement,
    }

    def on_device(comm):
        if pointers:
            with_pointers(comm)
        comm.events = Watch(gpu, pointers)
        return without_lock_step(comm, {**settings, "run.device": "gpu"})

    host = run_threads(ranks, lambda comm: without_lock_step(comm, settings))
    device = run_threads(ranks, on_device)
    assert host[0][0][-1] < host[0][0][0]
    for (expected, want), (losses, got) in zip(host, device, strict=True):
        np.testing.assert_allclose(losses, expected, rtol=1e-5)
        assert np.linalg.norm(got - want) <= 1e-4 * np.linalg.norm(want)


@pytest.mark.parametrize("key", ["gpt", "mlp"])
@on_threads(1)
def test_token_out_of_range_is_rejected_before_the_transfer(comm, gpu, words, key):
    keys = {"model.kind": key, "model.tied": "false", "run.device": "gpu"}
    trainer = assemble_trainer(comm, {**words, **keys, **({"model.vocabulary": 256} if key == "gpt" else {})})
    tokens = np.full((3, 8), 7, np.uint16)
    targets = tokens if key == "gpt" else tokens[:, 0]
    trainer.place((tokens, targets))
    gpu.LOG.clear()
    with pytest.raises(DataError, match="target 300 is outside"):
        trainer.place((tokens, np.where(targets == 7, 300, targets)))
    if key == "gpt":
        with pytest.raises(DataError, match="token 299 is outside"):
            trainer.place((tokens + np.uint16(292), targets))
    assert gpu.LOG.events == []


@pytest.mark.parametrize(("layout", "ranks"), [("allreduce", 2), ("zero3", 2), ("1f1b", 4)])
def test_run_resumes_from_a_checkpoint_of_the_other_device(gpu, words, tmp_path, layout, ranks):
    settings = {**words, **LAYOUTS[layout][1], "precision.mode": "float64"}

    def save_checkpoint(comm):
        trainer = Trained(comm, {**settings, "run.device": "gpu"}).trainer
        return CheckpointSaver(trainer, tmp_path / "checkpoints").save(4)

    def resume_on(comm, on):
        trainer = assemble_trainer(comm, {**settings, "run.device": on}, path)
        return {f"{p.name} {p.flat.start}": backend.to_host(p.array).copy() for p in trainer.exchange.pieces()}

    path = run_threads(ranks, save_checkpoint)[0]
    sides = [run_threads(ranks, lambda comm, on=on: resume_on(comm, on)) for on in ("cpu", "gpu")]
    for host, there in zip(*sides, strict=True):
        assert host.keys() == there.keys() and host
        assert all(host[name].tobytes() == there[name].tobytes() for name in host)


def test_comparison_of_replicas_on_the_device_needs_one_copy(gpu, words):
    def body(comm):
        trainer = assemble_trainer(comm, {**words, **LAYOUTS["allreduce"][1], "run.device": "gpu"})
        store, name = trainer.exchange.parameters, threading.current_thread().name
        before = gpu.LOG.sites(name)
        check_replicas(comm, store, 7)
        assert gpu.LOG.sites(name) - before == {(gpu.D2H, "replica_check.check_replicas"): 1}
        store.view("1.up.weight")[3, 4] += 1e-3 * comm.rank
        try:
            check_replicas(comm, store, 8)
        except DivergenceError as error:
            return str(error)
        return "no error"

    assert all("step 8" in messages and "1.up.weight" in messages for messages in run_threads(2, body))


def test_nan_on_the_device_names_rank_and_parameter(gpu, words):
    def body(comm):
        trainer = assemble_trainer(comm, {**words, **LAYOUTS["allreduce"][1], "run.device": "gpu"})
        if comm.rank == 1:
            trainer.exchange.parameters.view("1.up.weight")[3, 4] = np.nan
        return trainings.failure_reason(trainer)

    assert all(
        "rank 1: parameter 1.up.weight" in messages and "rank 0:" not in messages for messages in run_threads(2, body)
    )


def test_trained_model_can_be_inspected_on_cpu_and_gpu(gpu, words, tmp_path):
    settings = {**words, **LAYOUTS["zero3"][1], "precision.mode": "float64", "run.device": "gpu"}
    tokens = np.frombuffer(b"abcd efg", np.uint8)[None, :]

    def save_checkpoint(comm):
        trainer = assemble_trainer(comm, settings)
        CheckpointSaver(trainer, tmp_path / "checkpoints").save(0)
        return trainer.recipe

    def inspect(comm, on):
        trained = inference.load(comm, tmp_path, replace(recipe, run=replace(recipe.run, device=on)))
        name = threading.current_thread().name
        before = gpu.LOG.sites(name)
        logits = trained.logits(tokens)
        crossed = {(gpu.H2D, "inference.logits"): 1, (gpu.D2H, "inference.logits"): 1} if on == "gpu" else {}
        assert gpu.LOG.sites(name) - before == crossed
        return logits, trained.validation_loss()

    recipe = run_threads(2, save_checkpoint)[0]
    (host, host_loss), *_ = run_threads(1, lambda comm: inspect(comm, "cpu"))
    for logits, loss in run_threads(2, lambda comm: inspect(comm, "gpu")):
        np.testing.assert_allclose(logits, host, rtol=1e-10, atol=1e-12)
        assert loss == pytest.approx(host_loss, rel=1e-12)
    assert inference.on_available_device(recipe) is recipe


def test_model_is_inspected_on_the_cpu_without_a_gpu(monkeypatch, capsys):
    def raise_missing():
        raise MissingCapabilityError("cupy cannot be imported")

    monkeypatch.setattr(device, "cupy", raise_missing)
    recipe = recipes.load(None, ["run.device=gpu", "run.seed=5"]).recipe
    result = inference.on_available_device(recipe)
    assert result.run == replace(recipe.run, device="cpu") and result.model == recipe.model
    assert "cupy cannot be imported. The CPU is used instead" in capsys.readouterr().err
