"""Optimizers and clipping on the double of a GPU: the numbers of the CPU, and no more transfers than they need."""

from types import ModuleType

import numpy as np
import pytest

from hpcdist.arrays.dtypes import dtype_of
from hpcdist.arrays.layout import Layout, TensorSpec
from hpcdist.arrays.ranges import Range, split
from hpcdist.arrays.store import FlatStore
from hpcdist.errors import NonFiniteError
from hpcdist.optim import clip, optimizer
from hpcdist.optim.config import OptimizerConfig

LAYOUT = Layout.of(
    [TensorSpec(0, "table", (11, 7)), TensorSpec(1, "weight", (33, 19)), TensorSpec(1, "b", (5,), False)]
)
CONFIGS = {
    "sgd": OptimizerConfig(name="sgd", momentum=0.0, weight_decay=0.01),
    "sgd, heavy ball": OptimizerConfig(name="sgd", momentum=0.9),
    "sgd, nesterov": OptimizerConfig(name="sgd", momentum=0.9, nesterov=True, weight_decay=0.01),
    "adamw": OptimizerConfig(name="adamw", weight_decay=0.1),
    "lars": OptimizerConfig(name="lars", momentum=0.9, weight_decay=0.01),
    "lamb": OptimizerConfig(name="lamb", weight_decay=0.1),
}
BOUNDS = {"float32": 1e-5, "float64": 1e-12}
STEPS = 5


class Run:
    """One optimizer over two shards, as two ranks would hold them, with a 16-bit working copy."""

    def __init__(self, config: OptimizerConfig, dtype: str, on: str, start: FlatStore) -> None:
        real = dtype_of(dtype)
        self.optimizers = [
            optimizer.build(config, LAYOUT, part, real, total_steps=STEPS, on=on) for part in split(LAYOUT.size, 2, 4)
        ]
        self.master, self.gradient = (FlatStore(LAYOUT, real, on=on) for _ in range(2))
        self.working = FlatStore(LAYOUT, dtype_of("bfloat16" if dtype == "float32" else "float32"), on=on)
        self.master.copy_from(start)

    def step(self, gradient: FlatStore, norms: bool) -> None:
        self.gradient.copy_from(gradient)
        for rule, part in zip(self.optimizers, split(LAYOUT.size, 2, 4), strict=True):
            rule.begin_step()
            rule.direction(part, self.master, self.gradient, 0.5)
        sums = sum(rule.partial_norms() for rule in self.optimizers) if norms else None
        for rule, part in zip(self.optimizers, split(LAYOUT.size, 2, 4), strict=True):
            rule.apply(part, self.master, self.gradient, self.working, sums)


def drawn(rng: np.random.Generator, dtype: str) -> FlatStore:
    store = FlatStore(LAYOUT, dtype_of(dtype))
    for segment in LAYOUT.segments:
        store.view(segment.key)[...] = rng.standard_normal(segment.spec.shape)
    return store


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("name", CONFIGS)
def test_updates_are_those_of_the_cpu(gpu: ModuleType, name: str, dtype: str, rng: np.random.Generator) -> None:
    start = drawn(rng, dtype)
    host, device = (Run(CONFIGS[name], dtype, on, start) for on in ("cpu", "gpu"))
    needs = device.optimizers[0].needs_norms
    for _ in range(STEPS):
        gradient = drawn(rng, dtype)
        host.step(gradient, needs)
        gpu.LOG.clear()
        device.step(gradient, needs)
        expected = {(gpu.H2D, "store.copy_from"): 1} | ({(gpu.D2H, "segmentwise.partial_norms"): 2} if needs else {})
        assert gpu.LOG.sites() == expected
    stores = [(device.master, host.master)]
    for ours, theirs in zip(device.optimizers, host.optimizers, strict=True):
        stores += [(slot, theirs.slots[key]) for key, slot in ours.slots.items()]
    for got, want in stores:
        difference = np.linalg.norm(got.array.get() - want.array)
        assert difference <= BOUNDS[dtype] * np.linalg.norm(want.array)
    if dtype == "float32":  # rounded once from what the GPU holds, not from what the CPU does
        rounded = device.master.array.get().astype(dtype_of("bfloat16"))
        assert np.array_equal(device.working.array.get().view(np.uint16), rounded.view(np.uint16))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_the_norm_waits_once(gpu: ModuleType, dtype: str, rng: np.random.Generator) -> None:
    host = drawn(rng, dtype)
    device = FlatStore(LAYOUT, dtype_of(dtype), on="gpu")
    device.copy_from(host)
    gpu.LOG.clear()
    part = Range(32, LAYOUT.size - 40)
    got = clip.sum_of_squares(device, part)
    assert gpu.LOG.sites() == {(gpu.D2H, "clip.sum_of_squares"): 1} and gpu.LOG.nbytes(gpu.D2H) == 8
    np.testing.assert_allclose(got, clip.sum_of_squares(host, part), rtol=1e-12)


def test_a_nan_on_the_device_is_refused_and_named(gpu: ModuleType, rng: np.random.Generator) -> None:
    device = FlatStore(LAYOUT, np.dtype(np.float32), on="gpu")
    device.copy_from(drawn(rng, "float32"))
    assert clip.first_nonfinite(device, Range(0, LAYOUT.size)) is None
    device.view("1.weight")[3, 4] = np.nan
    with pytest.raises(NonFiniteError):
        clip.clip_scale(clip.sum_of_squares(device, Range(0, LAYOUT.size)), 1.0)
    assert clip.first_nonfinite(device, Range(0, LAYOUT.size)) == "1.weight"
