"""Models and optimizers on a real GPU against the CPU."""

import numpy as np
import pytest

from harness.devices import MODELS, OPTIMIZERS, UPDATES, ModelRun, OptimizerRun, batches_of, place_batches, random_store
from hpcdist.arrays import backend
from hpcdist.optim import norms

BOUNDS = {"float32": 1e-4, "float64": 1e-11}  # sums and exponentials in another order and of another library


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("case", MODELS)
def test_forward_and_backward_on_the_gpu_match_the_cpu(case, dtype, rng):
    batches, seed = batches_of(case, rng), int(rng.integers(1 << 30))
    host, device = ModelRun(case, dtype, "cpu", seed), ModelRun(case, dtype, "gpu", seed)
    for _ in range(2):  # the second step is in memory that was used before
        losses = [float(loss) for loss in device.step(place_batches(batches, "gpu"))]
        np.testing.assert_allclose(losses, host.step(batches), rtol=BOUNDS[dtype])
        got, want = backend.to_host(device.gradient.array), host.gradient.array
        assert np.linalg.norm(got - want) <= BOUNDS[dtype] * np.linalg.norm(want)


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizer_updates_on_the_gpu_match_the_cpu(name, dtype, rng):
    start = random_store(rng, dtype)
    host, device = (OptimizerRun(name, dtype, on, start, "float32") for on in ("cpu", "gpu"))
    for _ in range(UPDATES):
        gradient = random_store(rng, dtype)
        host.step(gradient)
        device.step(gradient)
    for got, want in zip(device.stores(), host.stores(), strict=True):
        assert np.linalg.norm(backend.to_host(got.array) - want.array) <= BOUNDS[dtype] * np.linalg.norm(want.array)
    rounded = backend.to_host(device.master.array).astype(np.float32)
    assert np.array_equal(backend.to_host(device.working.array), rounded)
    np.testing.assert_allclose(
        norms.sum_of_squares(device.master), norms.sum_of_squares(host.master), rtol=BOUNDS[dtype]
    )
