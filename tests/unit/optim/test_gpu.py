"""Optimizers and clipping on the double of a GPU: the numbers of the CPU, with the minimum of transfers."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from harness.devices import OPTIMIZERS, TENSORS, UPDATES, OptimizerRun, random_store
from hpcdist.arrays import backend
from hpcdist.arrays.dtypes import dtype_of
from hpcdist.arrays.layout import Layout, TensorSpec
from hpcdist.arrays.ranges import Range
from hpcdist.arrays.store import FlatStore
from hpcdist.errors import NonFiniteError
from hpcdist.optim import kernels, norms, optimizer
from hpcdist.optim.master_weights import MasterWeights
from stubs.gpu import cuda_compiler

BOUNDS = {"float32": 1e-5, "float64": 1e-12}
WORKING = {"float32": "bfloat16", "float64": "float32"}


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_updates_match_the_cpu(gpu, name, dtype, rng):
    start = random_store(rng, dtype)
    host, device = (OptimizerRun(name, dtype, on, start, WORKING[dtype]) for on in ("cpu", "gpu"))
    for _ in range(UPDATES):
        gradient = random_store(rng, dtype)
        host.step(gradient)
        gpu.LOG.clear()
        device.step(gradient)
        crossing = (gpu.D2H, "base.partial_norms"), (gpu.H2D, "base._rates_on_gpu")
        norms = dict.fromkeys(crossing, 2) if device.optimizers[0].needs_norms else {}
        assert gpu.LOG.sites() == {(gpu.H2D, "store.copy_from"): 1, **norms}
    for got, want in zip(device.stores(), host.stores(), strict=True):
        assert np.linalg.norm(got.array.get() - want.array) <= BOUNDS[dtype] * np.linalg.norm(want.array)
    # Rounded once, from what the GPU holds.
    rounded = device.master.array.get().astype(dtype_of(WORKING[dtype]))
    assert device.working.array.get().tobytes() == rounded.tobytes()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.full_except("bfloat16")
def test_norm_of_several_ranges_waits_once(gpu, dtype, rng):
    host = random_store(rng, dtype)
    device = FlatStore(TENSORS, dtype_of(dtype), on="gpu")
    device.copy_from(host)
    gpu.LOG.clear()
    parts = [Range(32, 64), Range(100, TENSORS.size - 40)]
    got = norms.sum_of_squares(device, parts)
    assert gpu.LOG.sites() == {(gpu.D2H, "norms.sum_of_squares"): 1} and gpu.LOG.nbytes(gpu.D2H) == 8
    np.testing.assert_allclose(got, sum(norms.sum_of_squares(host, part) for part in parts), rtol=1e-12)


def test_adjacent_tensors_use_one_kernel(gpu, rng):
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
    assert cuda_compiler.LAUNCHES == ["squares"] * 2  # padding after "odd" is left out
    np.testing.assert_allclose(got, norms.sum_of_squares(host), rtol=1e-12)


SHAPES = {"0.a": (3, 67), "0.norm.scale": (17,), "1.b": (131, 71), "1.bias": (1,), "1.none": (0, 4), "2.c": (40, 32)}
GROUPS = ("*.a: rate_factor=0.5", "*.bias: weight_decay=0.25 rate_factor=3")


def formula(config, rate, weights, gradient, slots, decay):
    """Return the new weights of one update in float64. The slots are changed in place."""
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
def test_update_of_all_tensors_uses_one_kernel(gpu, name, given, rng):
    """There are two pieces with any split, padding that must not change, and options for each tensor."""
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


class LayerWiseUpdate:
    """One update of ``name`` on ``on``, in pieces, from given numbers. 16-bit gradients have a float32 master."""

    def __init__(self, name, given, on, layout, pieces, start):
        config = replace(OPTIMIZERS[name], groups=GROUPS, warmup_steps=0)
        master = dtype_of("float64" if given == "float64" else "float32")
        whole = Range(0, layout.size)
        self.rule = self.inner = optimizer.build(config, layout, whole, master, total_steps=10, on=on)
        self.weights, self.gradient = FlatStore(layout, master, on=on), FlatStore(layout, dtype_of(given), on=on)
        self.working = FlatStore(layout, self.gradient.dtype, on=on)
        if self.gradient.dtype != master:
            self.rule = MasterWeights(self.inner, layout, whole, ledger=None, on=on)
            self.weights = self.rule.weights
        self.stores = [self.weights, self.gradient, self.working, *self.inner.slots.values()]
        for store, values in zip(self.stores, start, strict=True):
            store.array[...] = backend.place(values.astype(store.dtype), on)
        self.pieces = pieces
        self.rule.begin_step()

    def directions(self):
        """Return the norms of tensors."""
        for piece in self.pieces:
            if self.rule is self.inner:
                self.rule.direction(piece, self.weights, self.gradient, 0.5)
            else:
                self.rule.direction(piece, self.working, self.gradient, 0.5)
        return self.rule.partial_norms()

    def apply(self, norms):
        for piece in self.pieces:
            if self.rule is self.inner:
                self.rule.apply(piece, self.weights, self.gradient, self.working, norms)
            else:
                self.rule.apply(piece, self.working, self.gradient, norms=norms)


def starts(rng, layout, count):
    """Return random numbers for the stores of an update. Squares of gradients are at least 0."""
    drawn = [rng.standard_normal(layout.size) for _ in range(count)]
    return [*drawn[:4], *(np.square(each) for each in drawn[4:])]


LAYOUT = Layout.of(TensorSpec(int(key[0]), key[2:], shape, len(shape) > 1) for key, shape in SHAPES.items())


@pytest.mark.parametrize("given", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("name", ["lamb", "lamb, not corrected", "lars"])
@pytest.mark.full_except("lamb-bfloat16", "lars-float32")
def test_layer_wise_update_uses_one_kernel_per_phase_and_cpu_bits(gpu, name, given, rng):
    cut = int(rng.integers(1, LAYOUT.size))
    pieces = [Range(0, cut), Range(cut, LAYOUT.size)]
    start = starts(rng, LAYOUT, 4 if name == "lars" else 5)
    host, device = (LayerWiseUpdate(name, given, on, LAYOUT, pieces, start) for on in ("cpu", "gpu"))
    norms, phase = host.directions(), "scaled_direction" if name == "lars" else "adam_direction"
    cuda_compiler.LAUNCHES.clear()
    result = device.directions()
    assert [*[phase] * len(pieces), "tensor_sums"] == cuda_compiler.LAUNCHES
    assert result[:, 0].any() and not result[[not segment.spec.adapted for segment in LAYOUT.segments]].any()
    np.testing.assert_allclose(result, norms, rtol=1e-14)
    host.apply(norms)
    cuda_compiler.LAUNCHES.clear()
    device.apply(norms)
    moved = "descend_with_velocity" if name == "lars" else "descend"
    assert [moved] * len(pieces) == cuda_compiler.LAUNCHES
    inside = np.zeros(LAYOUT.size, bool)
    for segment in LAYOUT.segments:
        inside[segment.range.slice] = True
    for got, want, values in zip(device.stores, host.stores, start, strict=True):
        assert got.array.get()[inside].tobytes() == want.array[inside].tobytes()
        assert got.array.get()[~inside].tobytes() == values.astype(got.dtype)[~inside].tobytes()


@pytest.mark.parametrize("name", ["lamb", "lars"])
def test_tensor_norms_do_not_depend_on_pieces_split_at_tiles(gpu, name, rng):
    start, result = starts(rng, LAYOUT, 4 if name == "lars" else 5), []
    for bounds in ([0], [0, kernels.TILE], [0, 2 * kernels.TILE]):
        pieces = [Range(*ends) for ends in pairwise([*bounds, LAYOUT.size])]
        result.append(LayerWiseUpdate(name, "float32", "gpu", LAYOUT, pieces, start).directions())
    assert len({norms.tobytes() for norms in result}) == 1


def test_nan_on_the_device_raises_and_is_named(gpu, rng):
    device = FlatStore(TENSORS, np.dtype(np.float32), on="gpu")
    device.copy_from(random_store(rng, "float32"))
    assert norms.first_nonfinite(device) is None
    device.view("1.weight")[3, 4] = np.nan
    with pytest.raises(NonFiniteError):
        norms.clip_scale(norms.sum_of_squares(device), 1.0)
    assert norms.first_nonfinite(device) == "1.weight"
