"""The loops and their GPU versions compared with plain formulas, and the rounding to bfloat16 for special values."""

import numpy as np
import pytest

from hpcdist.arrays import jit
from hpcdist.arrays.dtypes import BFLOAT16
from hpcdist.optim import fused, kernels
from stubs.gpu import host_kernels


@pytest.fixture(params=["loops", "gpu"], autouse=True)
def path(request, monkeypatch):
    """The loops of the CPU, and the code that a GPU runs in their place, both on numpy."""
    if request.param == "gpu":
        host_kernels.install(monkeypatch, kernels)
    return request.param


def awkward_bits(rng):
    edges = np.array(
        [
            *(0x0, 0x80000000, 0x1, 0x7FFF, 0x8000, 0x8001, 0x18000, 0x3F808000, 0x3F818000, 0x3F807FFF, 0x7F7FFFFF),
            *(0x7F800000, 0xFF800000, 0x7F800001, 0x7FFFFFFF, 0xFFFFFFFF, 0x7FC00000, 0xFF7FFFFF, 0x7F7F7FFF),
            0x7F7F8000,
        ],
        np.uint32,
    )
    return np.concatenate([edges, rng.integers(0, 2**32, 100_000, dtype=np.uint32)])


def test_bfloat16_rounds_to_nearest_even(rng):
    master = awkward_bits(rng).view(np.float32)
    working = np.zeros(master.size, BFLOAT16)
    kernels.round_into(master, working)
    with np.errstate(invalid="ignore", over="ignore"):
        expected = master.astype(BFLOAT16)
    nan = np.isnan(master)
    assert np.array_equal(working.view(np.uint16)[~nan], expected.view(np.uint16)[~nan])
    assert np.isnan(working[nan].astype(np.float32)).all()


@pytest.mark.parametrize("dtype", [BFLOAT16, np.dtype("float16")], ids=str)
@pytest.mark.full
def test_16_bit_sums_are_rounded_once(rng, dtype):
    held = (rng.standard_normal(1003) * 10.0 ** rng.integers(-6, 5, 1003)).astype(dtype)
    addend = (rng.standard_normal(1003) * 10.0 ** rng.integers(-6, 5, 1003)).astype(np.float32)
    kept = addend.copy()
    with np.errstate(over="ignore"):
        expected = (held.astype(np.float32) + addend).astype(dtype)
    kernels.add_rounded(held, addend)
    assert held.tobytes() == expected.tobytes() and addend.tobytes() == kept.tobytes()
    wide = np.zeros(1003, np.float32)
    kernels.widen(held, wide)
    assert wide.tobytes() == held.astype(np.float32).tobytes()


@pytest.mark.filterwarnings("error")
def test_values_beyond_float16_become_infinite():
    working = np.zeros(4, np.float16)
    kernels.round_into(np.array([65519, 65520, -1e9, 1e-8], np.float32), working)
    assert working.tolist() == [65504, np.inf, -np.inf, 0]
    kernels.add_rounded(working, np.array([65504, 0, 0, 1], np.float32))
    assert working.tolist() == [np.inf, np.inf, -np.inf, 1]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("size", [0, 1, 3, 4, 5, 1000])
def test_sum_of_squares_matches_numpy(rng, dtype, size):
    values = rng.standard_normal(size).astype(dtype)
    assert float(kernels.sum_of_squares(values)) == pytest.approx(np.sum(values.astype(np.float64) ** 2), rel=1e-14)


def test_sum_of_squares_neither_overflows_nor_underflows_in_float32():
    values = np.array([3e30, 4e30, 1e-30], np.float32)
    assert float(kernels.sum_of_squares(values)) == pytest.approx(2.5e61, rel=1e-6)
    assert float(kernels.sum_of_squares(values[2:])) == pytest.approx(1e-60, rel=1e-6)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_sum_of_squares_keeps_nonfinite_values_visible(bad):
    values = np.ones(9, np.float32)
    values[4] = bad
    assert not np.isfinite(float(kernels.sum_of_squares(values)))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_adam_direction_keeps_its_dtype(rng, dtype):
    w, g, m, v = (rng.standard_normal(1001).astype(dtype) for _ in range(4))
    v **= 2
    before = [x.astype(np.float64) for x in (w, g, m, v)]
    kernels.adam_direction(w, g, m, v, **dict(scale=0.3, betas=(0.9, 0.99), epsilon=1e-8, decay=0.1, count=3))
    g64 = 0.3 * before[1]
    m64, v64 = 0.9 * before[2] + 0.1 * g64, 0.99 * before[3] + 0.01 * g64**2
    u64 = (m64 / (1 - 0.9**3)) / (np.sqrt(v64 / (1 - 0.99**3)) + 1e-8) + 0.1 * before[0]
    tolerance = 2e-5 if dtype is np.float32 else 1e-13
    for got, expected in ((w, before[0]), (m, m64), (v, v64), (g, u64)):
        assert got.dtype == dtype
        np.testing.assert_allclose(got, expected, rtol=tolerance, atol=tolerance)


CONSTANTS = dict(scale=0.3, rate=0.07, decay=0.1)
ADAM = CONSTANTS | dict(betas=(0.9, 0.99), epsilon=1e-8, count=3)
UPDATES = {
    "adam": ("adam", ADAM),
    "adam, not corrected": ("adam", ADAM | dict(count=0)),
    "heavy ball": ("momentum", CONSTANTS | dict(momentum=0.8, nesterov=False)),
    "nesterov": ("momentum", CONSTANTS | dict(momentum=0.8, nesterov=True)),
    "plain": ("sgd", CONSTANTS),
    "plain, no decay": ("sgd", CONSTANTS | dict(decay=0.0, scale=1.0)),
}
SLOTS = {"adam": 2, "momentum": 1, "sgd": 0}


def update(path, case, arrays):
    """Run the update on its arrays. On a GPU they are the arrays of two tensors."""
    name, options = UPDATES[case]
    if path == "gpu":
        size = arrays[0].size
        bounds = np.array([(5, 5 + size // 3), (5 + size // 3, 5 + size)])
        options = options | {"decay": kernels.TensorOptions(bounds, np.array([(options["decay"], 1.0)] * 2), 5)}
    getattr(fused, name)(*arrays[: SLOTS[name] + 2], **options)


def reference_update(name, options, w, g, m, v):
    """Return new w, m and v of the update, computed independently in float64."""
    g = options["scale"] * g
    if name == "adam":
        beta1, beta2 = options["betas"]
        m, v = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g**2
        start = options["count"] or np.inf
        mean, square = m / (1 - beta1**start), v / (1 - beta2**start)
        return w - options["rate"] * (mean / (np.sqrt(square) + options["epsilon"]) + options["decay"] * w), m, v
    g = g + options["decay"] * w
    if name == "sgd":
        return w - options["rate"] * g, m, v
    m = options["momentum"] * m + g
    return w - options["rate"] * (g + options["momentum"] * m if options["nesterov"] else m), m, v


def draw_arrays(rng, size, dtype):
    """Return weights, a gradient and slots. Slots of squares are at least 0."""
    w, g, m, v = (rng.standard_normal(size).astype(dtype) for _ in range(4))
    return w, g, m, np.square(v)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("case", UPDATES)
@pytest.mark.parametrize("size", [0, 1, 7, 16, 1001])
def test_fused_updates_match_the_formula(rng, case, size, dtype, path):
    """Each element may differ by 16 roundings of the largest term of a sum."""
    name, options = UPDATES[case]
    arrays = draw_arrays(rng, size, dtype)
    expected = reference_update(name, options, *(x.astype(np.float64) for x in arrays))
    update(path, case, arrays)
    w, _, m, v = arrays
    for got, want in zip((w, m, v), expected, strict=True):
        assert got.dtype == dtype
        bound = 16 * np.finfo(dtype).eps
        np.testing.assert_allclose(got, want, rtol=bound, atol=bound * 4)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("case", UPDATES)
def test_non_finite_gradient_affects_only_its_element(rng, case, bad, path):
    name, _ = UPDATES[case]
    arrays, clean = draw_arrays(rng, 37, np.float32), draw_arrays(rng, 37, np.float32)
    for array, other in zip(clean, arrays, strict=True):
        array[...] = other
    arrays[1][5] = bad
    for each in (arrays, clean):
        with np.errstate(invalid="ignore"):
            update(path, case, each)
    assert not np.isfinite(arrays[0][5])
    for got, want in zip(arrays[:1] + arrays[2 : SLOTS[name] + 2], clean[:1] + clean[2:], strict=False):
        assert np.array_equal(np.delete(got, 5), np.delete(want, 5))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("case", ["adam", "heavy ball", "nesterov"])
def test_one_pass_has_the_bits_of_direction_and_descent(rng, case, dtype, path):
    name, options = UPDATES[case]
    once, twice = draw_arrays(rng, 1003, dtype), draw_arrays(rng, 1003, dtype)
    for array, other in zip(twice, once, strict=True):
        array[...] = other
    update(path, case, once)
    rest = {key: value for key, value in options.items() if key != "rate"}
    getattr(kernels, f"{name}_direction")(*twice[: SLOTS[name] + 2], **rest)
    kernels.descend(twice[0], twice[1], options["rate"])
    assert all(once[k].tobytes() == twice[k].tobytes() for k in (0, 2, 3))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_block_squares_have_the_same_bits_for_any_split(rng, dtype):
    values = (rng.standard_normal(5003) * 10.0 ** rng.integers(-3, 4, 5003)).astype(dtype)
    whole = float(kernels.sum_of_squares(values))
    result = set()
    for _ in range(5):
        bounds = [0, *sorted(rng.integers(0, values.size + 1, 9).tolist()), values.size]
        sums = np.zeros(kernels.LANES)
        for start, stop in zip(bounds, bounds[1:], strict=False):
            kernels.add_squares(values[start:stop], sums, start % kernels.LANES)
        result.add(kernels.total(sums))
    assert len(result) == 1 and result.pop() == pytest.approx(whole, rel=1e-14)
    assert whole == pytest.approx(np.sum(values.astype(np.float64) ** 2), rel=1e-14)


def test_kernels_write_only_inside_their_views(rng):
    whole = rng.standard_normal((4, 30)).astype(np.float32)
    before = whole.copy()
    w, g, v, _ = (row[7:20] for row in whole)
    kernels.momentum_direction(w, g, v, scale=1.0, momentum=0.5, nesterov=True, decay=0.0)
    kernels.descend(w, g, 0.1)
    kernels.descend_with_velocity(w, g, v, rate=0.1, momentum=0.5, decay=0.2)
    assert np.array_equal(whole[:, :7], before[:, :7]) and np.array_equal(whole[:, 20:], before[:, 20:])
    assert np.array_equal(whole[3], before[3])
    fast = 0.5 * before[2, 7:20] + before[1, 7:20]
    step = before[1, 7:20] + 0.5 * fast
    moved = before[0, 7:20] - 0.1 * step
    fast2 = 0.5 * fast + 0.1 * (step + 0.2 * moved)
    np.testing.assert_allclose(g, step, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(v, fast2, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(w, moved - fast2, rtol=1e-5, atol=1e-6)


def test_kernel_samples_have_the_types_of_a_training(rng, path):
    """After `hpcdist warmup`, no kernel may be left to compile for a float32 or float64 master."""
    mine = [k for k in jit._kernels if k.function.__module__ in (kernels.__name__, fused.__name__)]
    assert len(mine) == 12  # one of them, which others call, is compiled with those
    for kernel in mine:
        for arguments in kernel._samples:
            kernel(*arguments())
    compiled = {k.__name__: len(k.compiled.signatures) for k in mine}
    for dtype in (np.float32, np.float64):
        w, g, m, v = (rng.random(33).astype(dtype)[1:17] for _ in range(4))
        kernels.adam_direction(w, g, m, v, scale=1.0, betas=(0.9, 0.9), epsilon=1e-8, decay=0.0, count=1)
        kernels.momentum_direction(w, g, m, scale=1.0, momentum=0.9, nesterov=False, decay=0.0)
        kernels.descend(w, g, 1e-3)
        kernels.descend_with_velocity(w, g, m, rate=0.1, momentum=0.9, decay=0.0)
        kernels.sum_of_squares(w)
        for case in UPDATES:
            update(path, case, (w, g, m, v))
        kernels.round_into(w, np.zeros(16, BFLOAT16))
    assert {k.__name__: len(k.compiled.signatures) for k in mine} == compiled
