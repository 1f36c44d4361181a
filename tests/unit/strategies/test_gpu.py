"""Strategies with run.device = "gpu" on the double that rejects implicit copies: the numbers of the CPU."""

from collections import Counter
from functools import partial

import numpy as np
import pytest

from harness.devices import batches_of, place_batches
from harness.inputs import write_text
from harness.trainings import Trained, check_same, recipe_keys
from hpcdist import models
from hpcdist.arrays.store import FlatStore
from hpcdist.collectives import nccl
from hpcdist.comm.threads.communicator import run_threads
from hpcdist.models.arena import Arena
from hpcdist.models.config import ModelConfig
from hpcdist.strategies.tensor.model import cut_model
from hpcdist.training.build import selection
from stubs.gpu import nccl_double


def check_devices(gpu, ranks, settings, bound):
    """Train on the CPU and on the GPU, and compare. Return (host, device): the `Trained` of every rank."""
    host = run_threads(ranks, lambda comm: Trained(comm, settings))
    assert gpu.LOG.events == []
    device = run_threads(ranks, lambda comm: Trained(comm, {**settings, "run.device": "gpu"}))
    assert host[0].losses[-1] < host[0].losses[0]
    check_same(host, device, bound)
    return host, device


COMPRESSOR_KEYS = {
    "topk": {"compression.density": 0.1},
    "randomk": {"compression.density": 0.1},
    "powersgd": {"compression.rank": 2},
}
COMPRESSOR_BOUNDS = {"powersgd": 1e-3}  # columns are made orthonormal otherwise

ONE_OF_A_KIND = ("int8", "topk", "randomk", "powersgd")  # each sums its own way; what encodes has tests of its own


@pytest.mark.parametrize("name", ONE_OF_A_KIND)
@pytest.mark.full
def test_compressed_training_on_the_gpu_matches_the_cpu(gpu, words, name):
    settings = {**words, **COMPRESSOR_KEYS.get(name, {}), "precision.mode": "float32", "run.steps": 2}
    settings["communication.compression"] = name
    host = run_threads(2, lambda comm: Trained(comm, settings))
    device = run_threads(2, lambda comm: Trained(comm, {**settings, "run.device": "gpu"}))
    for one in (*host, *device):  # which follow the last bit of a sum: a code more or less is a whole step of them
        one.state = {key: values for key, values in one.state.items() if not key[0].startswith("residual")}
    check_same(host, device, COMPRESSOR_BOUNDS.get(name, 5e-4))


@pytest.mark.full
def test_automatic_compression_is_measured_on_the_gpu(gpu, words, monkeypatch):
    monkeypatch.setenv("HPCDIST_TUNING", "on")
    monkeypatch.setattr(selection, "decide", partial(selection.decide, budget_s=0.0))
    candidates = '["int8", "powersgd"]'
    settings = {**words, "communication.compression": "auto", "compression.candidates": candidates, "run.device": "gpu"}

    def run(comm):
        trained = Trained(comm, {**settings, "communication.algorithm": "ring", "precision.mode": "float32"})
        return [row.name for row in trained.trainer.compression.rows]

    assert run_threads(2, run) == [["none", "int8", "powersgd"]] * 2


@pytest.mark.full_except("context_method=all_to_all microbatches=2")
@pytest.mark.parametrize(
    "keys", ["context_method=ring positions=rotary kv_heads=1", "context_method=all_to_all microbatches=2"]
)
def test_context_training_on_the_gpu_matches_the_cpu(gpu, keys, tmp_path, rng):
    settings = recipe_keys(f"parallel.context=2 dropout=0.2 precision.mode=float64 data.context=20 {keys}")
    settings["data.path"] = write_text(tmp_path / "text.txt", rng)
    check_devices(gpu, 2, settings, 1e-12)


@pytest.mark.full
def test_16_bit_context_training_on_the_gpu_exchanges_heads(gpu, tmp_path, rng):
    settings = recipe_keys("precision.mode=bfloat16 precision.activations=working run.device=gpu data.context=20")
    settings["data.path"] = write_text(tmp_path / "text.txt", rng)
    settings |= {"parallel.microbatches": 1, "model.hidden": 32}
    cut = {**settings, **recipe_keys("parallel.context=2 context_method=all_to_all")}
    (alone,), together = (
        run_threads(1, lambda comm: Trained(comm, settings)),
        run_threads(2, lambda comm: Trained(comm, cut)),
    )
    assert together[0].losses == pytest.approx(alone.losses, rel=2e-2)


BOUNDS = {"float32": 1e-5, "float64": 1e-12}
ROUTERS = {
    "softmax": "balance_loss=0.1 z_loss=0.01",
    # An odd number of steps up or down does not lead back to biases of zero.
    "biased": "router=sigmoid balance_loss=0 balance_rate=0.02 shared_experts=1 experts_per_token=3 run.steps=5",
    "dropping": "capacity_factor=0.75 experts_per_token=1 activation=swiglu balance_loss=0.1",
}
# ranks, keys, router
LAYOUTS = {
    "one": (1, "microbatches=2", "softmax"),
    "expert": (2, "expert=2 microbatches=2", "dropping"),
    "expert of one sample less x zero3": (4, "expert=4 strategy=zero3 microbatches=3 recompute=true", "biased"),
    "expert between nodes": (4, "expert=4 algorithm=hierarchical ranks_per_node=2 strategy=zero1", "softmax"),
    "tensor by rows x expert": (4, "tensor=2 expert=2 sequence_parallel=true", "dropping"),
    "pipeline x expert": (4, "pipeline=2 expert=2 schedule=zb-h1 microbatches=2 global_batch=8", "biased"),
    "context x expert, packed": (
        2,
        "parallel.context=2 expert=2 data.context=26 data.packed=true document_end=32",
        "dropping",
    ),
}


@pytest.mark.parametrize(("layout", "mode"), [("one", "float32"), *((name, "float64") for name in LAYOUTS)])
@pytest.mark.full_except("one-float32", "expert-float64")
def test_mixtures_on_the_gpu_match_the_cpu(gpu, text, layout, mode):
    ranks, keys, router = LAYOUTS[layout]
    keys = f"experts=4 expert_hidden=10 {ROUTERS[router]} {keys}"
    settings = {"data.path": text, "precision.mode": mode} | recipe_keys(keys)
    host, device = check_devices(gpu, ranks, settings, BOUNDS[mode])
    for ours, theirs in zip(device, host, strict=True):
        local_data, want = ours.trainer, theirs.trainer
        np.testing.assert_array_equal(local_data.router.loads, want.router.loads)
        np.testing.assert_allclose(local_data.router.last, want.router.last, rtol=BOUNDS[mode] * 100, atol=1e-12)
        biases = [trainer.model.operations.experts.state.bias for trainer in (local_data, want)]
        np.testing.assert_array_equal(*biases)
        assert biases[0].any() == (router == "biased")


TENSOR = {"parallel.tensor": 2, "parallel.sequence_parallel": "true", "parallel.microbatches": 2}
TENSOR |= {"precision.mode": "float64", "model.dropout": 0.2}


@pytest.mark.full
def test_tensor_training_on_the_gpu_matches_the_cpu(gpu, tmp_path, rng):
    settings = {"data.path": write_text(tmp_path / "text.txt", rng), **TENSOR}
    check_devices(gpu, 2, settings, 1e-12)


@pytest.mark.parametrize(
    ("by_rows", "algorithm"), [(False, "native"), (True, "native"), (False, "nccl"), (True, "nccl")]
)
@pytest.mark.full_except("True-native")
def test_only_messages_are_copied_to_the_host(gpu, rng, by_rows, algorithm, monkeypatch):
    monkeypatch.setattr(nccl_double, "VERSION", [nccl.SEVERAL_RANKS_A_GPU])
    monkeypatch.setenv(nccl.SEVERAL_RANKS_VARIABLE, "1")
    config = ModelConfig(layers=2, hidden=12, heads=3, vocabulary=11)
    batches = batches_of("gpt", rng)

    def body(comm):
        model = cut_model(models.build(config, "float64", context=7), comm, algorithm, sequence_parallel=by_rows)
        store, gradient = (FlatStore(model.layout, model.dtype, on="gpu") for _ in range(2))
        parameters, into, arena = model.bind(store), model.bind_gradients(gradient), Arena(on="gpu")
        for stage in into:
            stage.begin_step()
        before = gpu.LOG.sites()
        for number, (x, targets) in enumerate(place_batches(batches, "gpu")):
            logits = model.forward(parameters, x, arena, number)
            model.loss.forward(logits, targets, model.operations, arena.saved(model.stages[-1].layer, number))
            model.backward(parameters, into, 1.0, arena, number)
        comm.barrier()
        return Counter(gpu.LOG.sites()) - Counter(before)

    result = run_threads(3, body)[0]
    messages = ("handover", "staging", "dispatch")  # what these bring to the host, they do on pointers no more
    waits = {site: count for site, count in result.items() if site[0] == gpu.D2H and not site[1].startswith(messages)}
    staged = [site for site in result if site[1].startswith(messages)]
    assert waits == {} and bool(staged) == (algorithm == "native" or by_rows)  # 28 rows are not the same for 3 ranks
