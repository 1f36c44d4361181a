"""Models on the double of a GPU: the numbers of the CPU without transfers to the host. Losses stay on the GPU too."""

from collections import Counter

import numpy as np
import pytest

from harness.devices import MODELS, ModelRun, batches_of, crossings, place_batches
from harness.models.documents import random_places
from hpcdist.models.documents import PackedTokens

BOUNDS = {"float32": 1e-5, "float64": 1e-12}


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("case", MODELS)
@pytest.mark.full_except("encoder-float32")
def test_forward_and_backward_match_the_cpu(gpu, case, dtype, rng):
    batches, seed = batches_of(case, rng), int(rng.integers(1 << 30))
    host, device = ModelRun(case, dtype, "cpu", seed), ModelRun(case, dtype, "gpu", seed)
    expected, there = host.step(batches), place_batches(batches, "gpu")
    gpu.LOG.clear()
    losses = device.step(there)
    assert gpu.LOG.sites() == crossings(gpu, case)
    np.testing.assert_allclose([float(loss) for loss in losses], expected, rtol=BOUNDS[dtype])
    got, want = device.gradient.array.get(), host.gradient.array
    assert np.linalg.norm(got - want) <= BOUNDS[dtype] * np.linalg.norm(want)
    if MODELS[case][0].experts:
        got, want = (run.model.operations.experts.state.take() for run in (device, host))
        np.testing.assert_allclose(got, want, rtol=BOUNDS[dtype])


@pytest.mark.parametrize("case", MODELS)
def test_evaluation_and_logits_match_the_cpu(gpu, case, rng):
    batches, seed = batches_of(case, rng)[:1], int(rng.integers(1 << 30))
    host, device = ModelRun(case, "float64", "cpu", seed), ModelRun(case, "float64", "gpu", seed)
    ((x, targets),), ((there, answers),) = batches, place_batches(batches, "gpu")
    gpu.LOG.clear()
    logits = device.model.logits(device.parameters, there, device.arena)
    crossed = crossings(gpu, case, backward=False)
    assert gpu.LOG.sites() == crossed
    loss = device.model.evaluate(device.parameters, there, answers, device.arena)
    del crossed[gpu.H2D, "router.bias_of"]
    evaluated = crossed + Counter({(gpu.D2H, "model.weighted_loss"): 1})
    assert gpu.LOG.sites() - crossings(gpu, case, backward=False) == evaluated
    np.testing.assert_allclose(loss, host.model.evaluate(host.parameters, x, targets, host.arena), rtol=1e-12)
    np.testing.assert_allclose(logits.get(), host.model.logits(host.parameters, x, host.arena), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("case", ["gpt tied", "mlp gelu", "gpt of experts"])
def test_two_pass_backward_matches_the_cpu(gpu, case, rng):
    batches, seed = batches_of(case, rng), int(rng.integers(1 << 30))
    host, device = ModelRun(case, "float64", "cpu", seed), ModelRun(case, "float64", "gpu", seed)
    host.split_step(batches, together=False)
    there = place_batches(batches, "gpu")
    gpu.LOG.clear()
    device.split_step(there, together=False)
    assert gpu.LOG.sites() == crossings(gpu, case)
    got, want = device.gradient.array.get(), host.gradient.array
    assert np.linalg.norm(got - want) <= 1e-12 * np.linalg.norm(want)


@pytest.mark.parametrize("case", ["gpt tied, dropout", "encoder with the options of Llama", "gpt of experts"])
def test_packed_documents_match_the_cpu(gpu, case, rng):
    batches, seed = batches_of(case, rng), int(rng.integers(1 << 30))
    places = [random_places(rng, *x.shape, 30) for x, _ in batches]
    host, device = ModelRun(case, "float64", "cpu", seed), ModelRun(case, "float64", "gpu", seed)
    expected, losses = (
        run.step(
            [
                (PackedTokens.of(x, local_data), y)
                for (x, y), local_data in zip(place_batches(batches, on), places, strict=True)
            ]
        )
        for run, on in ((host, "cpu"), (device, "gpu"))
    )
    np.testing.assert_allclose([float(loss) for loss in losses], expected, rtol=1e-12)
    got, want = device.gradient.array.get(), host.gradient.array
    assert np.linalg.norm(got - want) <= 1e-12 * np.linalg.norm(want)
