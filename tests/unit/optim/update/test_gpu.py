"""Optimizers and clipping on the double of a GPU: the numbers of the CPU, and no more transfers than they need."""

import numpy as np
import pytest

from harness.devices import OPTIMIZERS, TENSORS, UPDATES, OptimizerRun, drawn
from hpcdist.arrays.dtypes import dtype_of
from hpcdist.arrays.layout import Layout, TensorSpec
from hpcdist.arrays.ranges import Range
from hpcdist.arrays.store import FlatStore
from hpcdist.errors import NonFiniteError
from hpcdist.optim import norms
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


def test_a_nan_on_the_device_is_refused_and_named(gpu, rng):
    device = FlatStore(TENSORS, np.dtype(np.float32), on="gpu")
    device.copy_from(drawn(rng, "float32"))
    assert norms.first_nonfinite(device) is None
    device.view("1.weight")[3, 4] = np.nan
    with pytest.raises(NonFiniteError):
        norms.clip_scale(norms.sum_of_squares(device), 1.0)
    assert norms.first_nonfinite(device) == "1.weight"
