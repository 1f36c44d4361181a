"""The GPU kernels of router and rows, compiled for the host, compared with the CPU loops in float64."""

import numpy as np
import pytest

from hpcdist.arrays import backend
from hpcdist.arrays.dtypes import dtype_of
from hpcdist.models.experts import kernels, mixture, router

UNIT = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-24, "float64": 2.0**-53}
# Two samples of nine tokens: two pieces each, and padding after the seventh token of the first sample.
RUNS = np.array([[[0, 4], [4, 7]], [[9, 13], [13, 18]]])
TOKENS, EACH, ROOMS = 18, 3, np.array([3, 2])


def draw_normal(rng, shape, dtype):
    """Return normal numbers that are exact in ``dtype``: as float64, and on the device in ``dtype``."""
    rounded = rng.standard_normal(shape).astype(dtype_of(dtype))
    return rounded.astype(np.float64), backend.place(rounded, "gpu")


def empty(shape, dtype):
    return backend.empty(shape, dtype_of(dtype), "gpu")


def check(got, want, dtype, roundings=8):
    bound = roundings * UNIT[dtype] * max(1.0, np.abs(want).max())
    np.testing.assert_allclose(backend.to_host(got).astype(np.float64), want, rtol=roundings * UNIT[dtype], atol=bound)


@pytest.mark.parametrize("dtype", UNIT)
@pytest.mark.parametrize(("kind", "experts", "each"), [("softmax", 5, EACH), ("sigmoid", 70, EACH), ("softmax", 33, 1)])
@pytest.mark.full_except("softmax-5-3-float32", "sigmoid-70-3-float64", "softmax-33-1-float64")
def test_router_kernels_match_the_cpu(gpu, rng, dtype, kind, experts, each):
    logits, there = draw_normal(rng, (TOKENS, experts), dtype)
    chosen, gates, bias = np.empty((TOKENS, each), np.int32), np.empty((TOKENS, each)), rng.standard_normal(experts) / 5
    router.choose(logits, bias, kind, chosen, gates)
    local_data, own_gates = empty(chosen.shape, "int32"), empty(chosen.shape, dtype)
    router.choose(there, backend.place(bias, "gpu"), kind, local_data, own_gates)
    np.testing.assert_array_equal(backend.to_host(local_data), chosen)
    check(own_gates, gates, dtype)
    runs_there, counts = backend.place(RUNS, "gpu"), router.count(chosen, RUNS, experts)
    np.testing.assert_array_equal(router.count(local_data, runs_there, experts), counts)
    before, places, own_places = rng.integers(0, 3, counts.shape), np.empty_like(chosen), empty(chosen.shape, "int32")
    before[0, 0] = ROOMS[0]
    starts = router.place(chosen, RUNS, counts, before, ROOMS, places)
    np.testing.assert_array_equal(router.place(local_data, runs_there, counts, before, ROOMS, own_places), starts)
    np.testing.assert_array_equal(backend.to_host(own_places), places)
    assert (places[:4] == -1).all() and (places[7:9] == -1).all() and starts[-1] == (places >= 0).sum() > 0
    dgates, dgates_there = draw_normal(rng, chosen.shape, dtype)
    table, figures, own_figures = rng.random((2, experts + 2)), np.zeros(3), backend.zeros(3, np.dtype(float), "gpu")
    gates = backend.to_host(own_gates).astype(np.float64)
    router.gradient_of_logits(logits, chosen, gates, dgates, kind, RUNS, table, figures)
    router.gradient_of_logits(there, local_data, own_gates, dgates_there, kind, runs_there, table, own_figures)
    check(there, logits, dtype, 16)
    assert not backend.to_host(there)[7:9].astype(float).any() and logits[:7].any()
    np.testing.assert_allclose(backend.to_host(own_figures), figures, rtol=1e-5 if dtype != "float64" else 1e-12)


@pytest.mark.parametrize("dtype", UNIT)
@pytest.mark.parametrize("hidden", [6, 16])
@pytest.mark.full_except("6-float64", "16-float32")
def test_row_kernels_match_the_cpu(gpu, rng, dtype, hidden):
    places = rng.permutation(TOKENS * EACH).reshape(TOKENS, EACH).astype(np.int32)
    places[places >= 40] = -1  # dropped
    where = backend.place(places, "gpu")
    (x, x_there), (gates, gates_there) = (
        draw_normal(rng, (TOKENS, hidden), dtype),
        draw_normal(rng, places.shape, dtype),
    )
    (rows, rows_there), (dgates, dgates_there) = (
        draw_normal(rng, (40, hidden), dtype),
        draw_normal(rng, places.shape, dtype),
    )
    y, y_there = np.empty_like(x), empty(x.shape, dtype)
    mixture._collect(rows, places, gates, y)
    kernels.collect(rows_there, where, gates_there, y_there)
    check(y_there, y, dtype)
    mixture._collect_onto(rows, places, x)
    kernels.collect_onto(rows_there, where, x_there)
    check(x_there, x, dtype)
    x = backend.to_host(x_there).astype(np.float64)
    mixture._collect_backward(x, places, gates, rows, dgates)
    kernels.collect_backward(x_there, where, gates_there, rows_there, dgates_there)
    check(rows_there, rows, dtype)
    check(dgates_there, dgates, dtype)
    mixture._spread(x, places, rows)
    kernels.spread(x_there, where, rows_there)
    np.testing.assert_array_equal(backend.to_host(rows_there).astype(np.float64), rows)


def test_nan_selects_valid_experts_and_stays_visible(gpu, rng):
    logits = rng.standard_normal((3, 40)).astype(np.float32)
    logits[1] = np.nan
    chosen, gates, bias = empty((3, 2), "int32"), empty((3, 2), "float32"), backend.zeros(40, np.dtype(float), "gpu")
    router.choose(backend.place(logits, "gpu"), bias, "softmax", chosen, gates)
    assert backend.to_host(chosen)[1].tolist() == [0, 1]
    np.testing.assert_array_equal(np.isnan(backend.to_host(gates)), [[False] * 2, [True] * 2, [False] * 2])
