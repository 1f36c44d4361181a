"""Mixtures of experts with run.device = "gpu" on the double: every layout matches the CPU."""

import numpy as np
import pytest

from harness.trainings import Trained, check_same, recipe_keys
from hpcdist.comm.threads.communicator import run_threads

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
    host = run_threads(ranks, lambda comm: Trained(comm, settings))
    assert gpu.LOG.events == []
    device = run_threads(ranks, lambda comm: Trained(comm, {**settings, "run.device": "gpu"}))
    assert host[0].losses[-1] < host[0].losses[0]
    check_same(host, device, BOUNDS[mode])
    for ours, theirs in zip(device, host, strict=True):
        local_data, want = ours.trainer, theirs.trainer
        np.testing.assert_array_equal(local_data.router.loads, want.router.loads)
        np.testing.assert_allclose(local_data.router.last, want.router.last, rtol=BOUNDS[mode] * 100, atol=1e-12)
        biases = [trainer.model.operations.experts.state.bias for trainer in (local_data, want)]
        np.testing.assert_array_equal(*biases)
        assert biases[0].any() == (router == "biased")
