"""Context parallelism on the double of GPUs: the numbers of the CPU, with both methods."""

import pytest

from harness.inputs import write_text
from harness.trainings import Trained, check_same, recipe_keys
from hpcdist.comm.threads.communicator import run_threads


@pytest.mark.full_except("context_method=all_to_all microbatches=2")
@pytest.mark.parametrize(
    "keys", ["context_method=ring positions=rotary kv_heads=1", "context_method=all_to_all microbatches=2"]
)
def test_context_training_on_the_gpu_matches_the_cpu(gpu, keys, tmp_path, rng):
    settings = recipe_keys(f"parallel.context=2 dropout=0.2 precision.mode=float64 data.context=20 {keys}")
    settings["data.path"] = write_text(tmp_path / "text.txt", rng)
    host = run_threads(2, lambda comm: Trained(comm, settings))
    assert gpu.LOG.events == []
    device = run_threads(2, lambda comm: Trained(comm, {**settings, "run.device": "gpu"}))
    assert host[0].losses[-1] < host[0].losses[0]
    check_same(host, device, 1e-12)


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
