"""16-bit models on the double of a GPU with a float32 master, compared with float64 on the CPU."""

import numpy as np
import pytest

from harness.devices import MODELS, ModelRun, batches_of, place_batches
from hpcdist.arrays.dtypes import dtype_of
from hpcdist.arrays.ranges import Range
from hpcdist.arrays.store import FlatStore
from hpcdist.optim import optimizer
from hpcdist.optim.config import OptimizerConfig
from hpcdist.optim.master_weights import MasterWeights

# Of the loss, of the whole gradient: some roundings of activations, which do not add up in one direction
BOUNDS = {"float16": (2e-3, 1e-2), "bfloat16": (1e-2, 6e-2)}
SMOOTH = [case for case, (config, _) in MODELS.items() if not config.experts]  # a rounding may choose another expert


def in_float64(run, case):
    """Make the same run on the CPU in float64, with the parameters of ``run``."""
    host = ModelRun(case, "float64", "cpu", run.seed)
    host.store.array[...] = run.store.array.get().astype(np.float64)
    return host


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("case", SMOOTH)
@pytest.mark.full_except("encoder with the options of Llama-float16")
def test_forward_and_backward_match_float64(gpu, case, dtype, rng):
    batches = batches_of(case, rng)
    batches = [(x.astype(dtype_of(dtype)) if x.dtype.kind == "f" else x, targets) for x, targets in batches]
    device = ModelRun(case, dtype, "gpu", int(rng.integers(1 << 30)))
    device.store.array[...] = device.store.array * device.store.dtype.type(0.25)  # else softmaxes are steps
    host = in_float64(device, case)
    there = place_batches(batches, "gpu")
    gpu.LOG.clear()
    losses = device.step(there)
    assert gpu.LOG.events == [] and all(loss.dtype == np.float64 for loss in losses)
    of_loss, of_gradient = BOUNDS[dtype]
    expected = host.step([(x.astype(np.float64) if x.dtype.kind not in "iu" else x, y) for x, y in batches])
    np.testing.assert_allclose([float(loss) for loss in losses], expected, rtol=of_loss)
    got, want = device.gradient.array.get().astype(np.float64), host.gradient.array
    assert device.gradient.dtype == dtype_of(dtype)
    assert np.linalg.norm(got - want) <= of_gradient * np.linalg.norm(want)


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.full_except("float16")
def test_updates_too_small_for_16_bits_are_not_lost(gpu, dtype, rng):
    """Twenty steps use a rate at which a 16-bit weight would never change. The float32 master changes."""
    run = ModelRun("gpt tied", dtype, "gpu", int(rng.integers(1 << 30)))
    run.store.array[...] = run.store.array * run.store.dtype.type(0.25)
    layout = run.model.layout
    whole = Range(0, layout.size)
    config = OptimizerConfig(name="adamw", learning_rate=1e-5, weight_decay=0.0)
    inner = optimizer.build(config, layout, whole, np.dtype("float32"), total_steps=100, on="gpu")
    master = MasterWeights(inner, layout, whole, ledger=None, on="gpu")
    master.weights.array[...] = run.store.array.astype(np.float32)
    before = master.weights.array.get()
    gradient = FlatStore(layout, run.store.dtype, on="gpu")
    signs = np.sign(rng.standard_normal(layout.size))
    gradient.array.set(signs.astype(gradient.dtype))
    total = 0.0
    for _ in range(20):
        master.begin_step()
        total += master.learning_rate
        master.direction(whole, run.store, gradient)
        master.apply(whole, run.store, gradient)
    moved = master.weights.array.get() - before
    inside = np.zeros(layout.size, bool)
    for segment in layout.segments:
        inside[segment.range.slice] = True
    np.testing.assert_allclose(moved[inside], -total * signs[inside], rtol=2e-2)
    assert master.weights.array.get().astype(dtype_of(dtype)).tobytes() == run.store.array.get().tobytes()
