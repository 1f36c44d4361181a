"""Optimizers and clipping on the double of a GPU: the numbers of the CPU, and no more transfers than they need."""

from dataclasses import replace

import numpy as np
import pytest

from harness.devices import OPTIMIZERS, TENSORS, UPDATES, OptimizerRun, drawn
from hpcdist.arrays.dtypes import dtype_of
from hpcdist.arrays.layout import Layout, TensorSpec
from hpcdist.arrays.ranges import Range
from hpcdist.arrays.store import FlatStore
from hpcdist.errors import NonFiniteError
from hpcdist.optim import norms, optimizer
from hpcdist.optim.update import kernels
from stubs.gpu import cuda_compiler

BOUNDS = {"float32": 1e-5, "float64": 1e-12}
WORKING = {"float32": "bfloat16", "float64": "float32"}


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_updates_are_those_of_the_cpu(gpu, name, dtype, rng):
    start = drawn(rng, dtype)
    host, device = (OptimizerRun(name, dtype, on, start, WORKING[dtype]) for on in ("cpu", "gpu"))
    for _ in range(UPDATES):
        gradient = drawn(rng, dtype)
        host.step(gradient)
        gpu.LOG.clear()
        device.step(gradient)
        norms = {(gpu.D2H, "base.partial_norms"): 2} if device.optimizers[0].needs_norms else {}
        assert gpu.LOG.sites() == {(gpu.H2D, "store.copy_from"): 1, **norms}
    for got, want in zip(device.stores(), host.stores(), strict=True):
        assert np.linalg.norm(got.array.get() - want.array) <= BOUNDS[dtype] * np.linalg.norm(want.array)
    # Rounded once, from what the GPU holds.
    rounded = device.master.array.get().astype(dtype_of(WORKING[dtype]))
    assert device.working.array.get().tobytes() == rounded.tobytes()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.full_except("bfloat16")
def test_the_norm_of_several_ranges_waits_once(gpu, dtype, rng):
    host = drawn(rng, dtype)
    device = FlatStore(TENSORS, dtype_of(dtype), on="gpu")
    device.copy_from(host)
    gpu.LOG.clear()
    parts = [Range(32, 64), Range(100, TENSORS.size - 40)]
    got = norms.sum_of_squares(device, parts)
    assert gpu.LOG.sites() == {(gpu.D2H, "norms.sum_of_squares"): 1} and gpu.LOG.nbytes(gpu.D2H) == 8
    np.testing.assert_allclose(got, sum(norms.sum_of_squares(host, part) for part in parts), rtol=1e-12)


def test_tensors_that_touch_are_one_kernel(gpu, rng):
    layout = Layout.of(
        [TensorSpec(0, name, (4, 16)) for name in "abc"] + [TensorSpec(0, "odd", (5,)), TensorSpec(0, "z", (16,))]
    )
    host = FlatStore(layout, np.dtype(np.float32))
    for segment in layout.segments:
        host.view(segment.key)[...] = rng.standard_normal(segment.spec.shape)
    device = FlatStore(layout, np.dtype(np.float32), on="gpu")
    device.copy_from(host)
    cuda_compiler.LAUNCHES.clear()
    got = norms.sum_of_squares(device)
    assert cuda_compiler.LAUNCHES == ["squares"] * 2  # padding behind "odd" is left out
    np.testing.assert_allclose(got, norms.sum_of_squares(host), rtol=1e-12)


SHAPES = {"0.a": (3, 67), "0.norm.scale": (17,), "1.b": (131, 71), "1.bias": (1,), "1.none": (0, 4), "2.c": (40, 32)}
GROUPS = ("*.a: rate_factor=0.5", "*.bias: weight_decay=0.25 rate_factor=3")


def formula(config, rate, weights, gradient, slots, decay):
    """One update in float64; the slots are changed in place, the new weights returned."""
    if config.name == "adamw":
        m, v = slots["m"], slots["v"]
        m[...] = config.beta1 * m + (1 - config.beta1) * gradient
        v[...] = config.beta2 * v + (1 - config.beta2) * gradient**2
        step = m / (1 - config.beta1) / (np.sqrt(v / (1 - config.beta2)) + config.epsilon)
        return weights - rate * (step + decay * weights)
    step = gradient + decay * weights
    if "momentum" in slots:
        slots["momentum"][...] = step = config.momentum * slots["momentum"] + step
    return weights - rate * step


@pytest.mark.parametrize("given", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("name", ["adamw", "sgd", "sgd, heavy ball"])
@pytest.mark.full_except("adamw-bfloat16", "sgd, heavy ball-float32")
def test_all_tensors_are_one_kernel(gpu, name, given, rng):
    """In two pieces that are cut anywhere, over padding that nothing may touch, with options by tensor."""
    config = replace(OPTIMIZERS[name], groups=GROUPS, warmup_steps=0)
    layout = Layout.of(TensorSpec(int(key[0]), key[2:], shape, len(shape) > 1) for key, shape in SHAPES.items())
    assert layout.size > 2 * kernels.TILE
    master = dtype_of("float64" if given == "float64" else "float32")
    cut = int(rng.integers(1, layout.size))
    pieces = [Range(0, cut), Range(cut, layout.size)]
    rule = optimizer.build(config, layout, Range(0, layout.size), master, total_steps=10, on="gpu")
    weights, gradient, working = (FlatStore(layout, dtype, on="gpu") for dtype in (master, *[dtype_of(given)] * 2))
    start = {store: rng.standard_normal(layout.size).astype(store.dtype) for store in (weights, gradient, working)}
    for key, slot in rule.slots.items():
        start[slot] = (np.square if key == "v" else np.negative)(rng.standard_normal(layout.size).astype(master))
    for store, values in start.items():
        store.array.set(values)
    rule.begin_step()
    rule.direction(pieces[0], weights, gradient, 0.5)
    cuda_compiler.LAUNCHES.clear()
    for piece in pieces:
        rule.apply(piece, weights, gradient, working)
    assert len(cuda_compiler.LAUNCHES) == len(pieces)
    padding = np.ones(layout.size, bool)
    for segment in layout.segments:
        at, factor, decay = segment.range.slice, 1.0, config.weight_decay if segment.spec.adapted else 0.0
        padding[at] = False
        if segment.key == "0.a":
            factor = 0.5
        if segment.key == "1.bias":
            factor, decay = 3.0, 0.25
        slots = {key: start[slot][at].astype(np.float64) for key, slot in rule.slots.items()}
        wide = start[gradient][at].astype(np.float64) * 0.5
        want = formula(config, rule.learning_rate * factor, start[weights][at].astype(np.float64), wide, slots, decay)
        bound = 32 * np.finfo(master).eps
        np.testing.assert_allclose(weights.array.get()[at], want, rtol=bound, atol=bound)
        for key, values in slots.items():
            np.testing.assert_allclose(rule.slots[key].array.get()[at], values, rtol=bound, atol=bound)
    rounded = weights.array.get().astype(working.dtype)
    assert working.array.get()[~padding].tobytes() == rounded[~padding].tobytes()
    assert all(store.array.get()[padding].tobytes() == values[padding].tobytes() for store, values in start.items())


def test_a_nan_on_the_device_is_refused_and_named(gpu, rng):
    device = FlatStore(TENSORS, np.dtype(np.float32), on="gpu")
    device.copy_from(drawn(rng, "float32"))
    assert norms.first_nonfinite(device) is None
    device.view("1.weight")[3, 4] = np.nan
    with pytest.raises(NonFiniteError):
        norms.clip_scale(norms.sum_of_squares(device), 1.0)
    assert norms.first_nonfinite(device) == "1.weight"
