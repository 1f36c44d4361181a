"""Every GPU kernel, compiled for the host, compared with its float64 formula, for all float types and odd shapes."""

import numpy as np
import pytest

from hpcdist.arrays import backend
from hpcdist.arrays.dtypes import accumulation_dtype, dtype_of
from hpcdist.models.layers import cuda_kernels
from stubs.gpu import cuda_compiler

DTYPES = ("float16", "bfloat16", "float32", "float64")
UNIT = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-24, "float64": 2.0**-53}
ROWS = ((1, 1), (3, 7), (5, 64), (2, 1030), (9, 33))
ROOT, CUBIC = np.sqrt(2 / np.pi), 0.044715
EPSILON = 1e-5


def draw_normal(rng, shape, dtype, spread=1.0):
    """Return normal numbers, rounded to ``dtype``."""
    return (rng.standard_normal(shape) * spread).astype(dtype_of(dtype))


def to_gpu(array):
    return backend.place(array, "gpu")


def to_float64(array):
    return backend.to_host(array).astype(np.float64)


def empty(shape, dtype):
    return backend.empty(shape, np.dtype(dtype), "gpu")


def check(got, want, dtype, units=4.0, size=None):
    """Check each element within one rounding to ``dtype`` plus ``units`` roundings of the compute type.


    ``size`` is the magnitude of those roundings, by default the magnitude of the element.
    """
    size = np.abs(want) if size is None else size
    exact = UNIT[str(accumulation_dtype(dtype_of(dtype)))]
    # A factor below the smallest normal number is 0, and others of the product are up to 1000.
    least = 2.0**-25 if dtype == "float16" else 1e-35 if dtype != "float64" else 1e-300
    bound = UNIT[dtype] * np.abs(want) * 1.001 + units * exact * size + least
    error = np.abs(to_float64(got) - want)
    assert (error <= bound).all(), f"{(error / bound).max()} times the bound"


def gate(x):
    with np.errstate(over="ignore"):
        return 1 / (1 + np.exp(-2 * ROOT * (x + CUBIC * x**3)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", ROWS)
def test_activation_kernels_match_the_formula(gpu, dtype, shape, rng):
    x, dy = draw_normal(rng, shape, dtype, 3.0), draw_normal(rng, shape, dtype)
    x64, d64, s = to_float64(x), to_float64(dy), gate(to_float64(x))
    y = empty(shape, x.dtype)
    cuda_kernels.gelu(to_gpu(x), y)
    # the exponent 2 u is rounded before it is raised, so |2 u| roundings count
    turn = 2 * ROOT * (np.abs(x64) + CUBIC * np.abs(x64) ** 3)
    check(y, x64 * s, dtype, 8, np.abs(x64 * s) * (1 + turn))
    slope = s + x64 * s * (1 - s) * 2 * ROOT * (1 + 3 * CUBIC * x64**2)
    dx = to_gpu(x)
    cuda_kernels.gelu_backward(dx, to_gpu(dy))
    steep = np.abs(x64) * 2 * ROOT * (1 + 3 * CUBIC * x64**2)
    check(dx, d64 * slope, dtype, 10, np.abs(d64) * s * (1 + turn) * (1 + steep))
    cuda_kernels.relu(to_gpu(x), y)
    check(y, np.maximum(x64, 0), dtype, 0)
    dx = to_gpu(x)
    cuda_kernels.relu_backward(dx, to_gpu(dy))
    check(dx, d64 * (x64 > 0), dtype, 0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_activation_kernels_of_huge_numbers_are_finite(gpu, dtype):
    largest = 3e4 if dtype == "float16" else 1e300 if dtype == "float64" else 3e38
    magnitudes = np.logspace(np.log10(2000), np.log10(largest), 40)
    x = np.concatenate([magnitudes, -magnitudes]).astype(dtype_of(dtype))
    ones, above = np.ones_like(x), to_float64(x) > 0
    y, dx = empty(x.shape, x.dtype), to_gpu(x)
    cuda_kernels.gelu(to_gpu(x), y)
    np.testing.assert_array_equal(to_float64(y), np.where(above, to_float64(x), 0))
    cuda_kernels.gelu_backward(dx, to_gpu(ones))
    np.testing.assert_array_equal(to_float64(dx), above)
    pairs, y = np.stack([x, ones], axis=1), empty((x.size, 1), x.dtype)
    cuda_kernels.swiglu(to_gpu(pairs), y)
    np.testing.assert_array_equal(to_float64(y)[:, 0], np.where(above, to_float64(x), 0))
    dx = to_gpu(pairs)
    cuda_kernels.swiglu_backward(dx, to_gpu(ones.reshape(-1, 1)))
    np.testing.assert_array_equal(to_float64(dx), np.stack([above, np.where(above, to_float64(x), 0)], axis=1))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", ROWS)
def test_swiglu_kernels_match_the_formula(gpu, dtype, shape, rng):
    rows, w = shape
    x, dy = draw_normal(rng, (rows, 2 * w), dtype, 2.0), draw_normal(rng, shape, dtype)
    g, v, d = to_float64(x)[:, :w], to_float64(x)[:, w:], to_float64(dy)
    s = 1 / (1 + np.exp(-g))
    y = empty(shape, x.dtype)
    cuda_kernels.swiglu(to_gpu(x), y)
    check(y, g * s * v, dtype, 8, np.abs(g * s * v) * (1 + np.abs(g)))
    dx = to_gpu(x)
    cuda_kernels.swiglu_backward(dx, to_gpu(dy))
    want = np.concatenate([d * v * s * (1 + g * (1 - s)), d * g * s], axis=1)
    size = np.concatenate([np.abs(d * v) * (1 + np.abs(g)), np.abs(d * g * s)], axis=1)
    check(dx, want, dtype, 8, size * (1 + np.abs(np.tile(g, 2))))


@pytest.mark.parametrize("kind", ["gelu", "relu", "swiglu"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", ROWS)
def test_activation_kernel_with_bias_has_the_bits_of_separate_steps(gpu, kind, dtype, shape, rng):
    """The bits equal a sum that is rounded once, followed by the activation."""
    rows, width = shape
    columns, run = width * (2 if kind == "swiglu" else 1), getattr(cuda_kernels, kind)
    x, bias = draw_normal(rng, (rows, columns), dtype), draw_normal(rng, columns, dtype)
    ours, total = to_gpu(x), to_gpu((to_float64(x) + to_float64(bias)).astype(x.dtype))
    y, want = empty(shape, x.dtype), empty(shape, x.dtype)
    run(ours, y, to_gpu(bias))
    run(total, want)
    for got, expected in ((ours, total), (y, want)):
        assert backend.to_host(got).tobytes() == backend.to_host(expected).tobytes()


@pytest.mark.parametrize("dtype", DTYPES)
def test_in_place_sums_match_the_formula(gpu, dtype, rng):
    for shape, tail in (((3, 5, 7), (3, 5, 7)), ((3, 5, 16), (5, 16)), ((4, 6), (6,)), ((0, 4), (4,))):
        y, x = draw_normal(rng, shape, dtype), draw_normal(rng, tail, dtype)
        got = to_gpu(y)
        cuda_kernels.add(got, to_gpu(x))
        check(got, to_float64(y) + to_float64(x), dtype, 1)


@pytest.mark.parametrize("kind", ["layer", "rms"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [*ROWS, (700, 5), (2, 8197)])
@pytest.mark.full_except("shape3-float64-layer")
def test_norm_kernels_match_the_formula(gpu, kind, dtype, shape, rng):
    rows, hidden = shape
    x, dy, residual = (draw_normal(rng, shape, dtype) for _ in range(3))
    scale, bias = draw_normal(rng, hidden, dtype), draw_normal(rng, hidden, dtype)
    sums = [draw_normal(rng, hidden, dtype) for _ in range(2)]
    x64, d64, s64 = to_float64(x), to_float64(dy), to_float64(scale)
    mean = x64.mean(axis=1, keepdims=True) if kind == "layer" else 0.0
    inverse = 1 / np.sqrt(((x64 - mean) ** 2).mean(axis=1, keepdims=True) + EPSILON)
    normal = (x64 - mean) * inverse
    y, statistics = empty(shape, x.dtype), empty((rows, 2 if kind == "layer" else 1), accumulation_dtype(x.dtype))
    dx, (dscale, dbias) = to_gpu(residual), map(to_gpu, sums)
    terms = (to_float64(residual) + (d64 * s64) * inverse, d64 * normal)
    g = d64 * s64
    lost = (g.mean(axis=1, keepdims=True) if kind == "layer" else 0.0) + normal * (g * normal).mean(
        axis=1, keepdims=True
    )
    many, size = 8 + np.sqrt(hidden), np.abs(x64).max() * inverse
    if kind == "layer":
        cuda_kernels.norm(to_gpu(x), to_gpu(scale), to_gpu(bias), EPSILON, y, statistics)
        check(y, normal * s64 + to_float64(bias), dtype, many, (1 + size) * (np.abs(s64) + np.abs(to_float64(bias))))
        sums_there = (dscale, True), (dbias, True)
        cuda_kernels.norm_backward(to_gpu(dy), to_gpu(x), to_gpu(scale), statistics, dx, True, *sums_there)
        check(dbias, to_float64(sums[1]) + d64.sum(axis=0), dtype, 8 + np.sqrt(rows), np.abs(d64).sum(axis=0))
    else:
        cuda_kernels.rms(to_gpu(x), to_gpu(scale), EPSILON, y, statistics)
        check(y, normal * s64, dtype, many, (1 + size) * np.abs(s64))
        cuda_kernels.norm_backward(to_gpu(dy), to_gpu(x), to_gpu(scale), statistics, dx, True, (dscale, True))
    size = (1 + size) ** 2 * (np.abs(terms[0]) + inverse * (1 + np.abs(g).max(axis=1, keepdims=True)))
    check(dx, to_float64(residual) + (g - lost) * inverse, dtype, many, size)
    check(dscale, to_float64(sums[0]) + terms[1].sum(axis=0), dtype, many + np.sqrt(rows),
          (1 + np.abs(x64).max() * inverse.max()) * np.abs(d64).sum(axis=0))  # fmt: skip


@pytest.mark.parametrize("kind", ["layer", "rms"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", ROWS)
def test_norm_kernel_with_residual_has_the_bits_of_separate_steps(gpu, kind, dtype, shape, rng):
    """The bits equal a sum that is rounded once, followed by the norm."""
    x, residual = draw_normal(rng, shape, dtype), draw_normal(rng, shape, dtype)
    scale, bias = to_gpu(draw_normal(rng, shape[1], dtype)), to_gpu(draw_normal(rng, shape[1], dtype))
    terms = (scale, bias) if kind == "layer" else (scale,)
    run = cuda_kernels.norm if kind == "layer" else cuda_kernels.rms
    total, ours = to_gpu((to_float64(x) + to_float64(residual)).astype(x.dtype)), to_gpu(x)
    results = [(empty(shape, x.dtype), empty((shape[0], len(terms)), accumulation_dtype(x.dtype))) for _ in range(2)]
    cuda_compiler.LAUNCHES.clear()
    run(ours, *terms, EPSILON, *results[0], to_gpu(residual))
    assert cuda_compiler.LAUNCHES == ["norm_rows"]
    run(total, *terms, EPSILON, *results[1])
    for got, want in zip((ours, *results[0]), (total, *results[1]), strict=True):
        assert backend.to_host(got).tobytes() == backend.to_host(want).tobytes()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [*ROWS, (700, 3)])
def test_column_sums_match_the_formula(gpu, dtype, shape, rng):
    rows, before = draw_normal(rng, shape, dtype), draw_normal(rng, shape[1], dtype)
    total, size = to_float64(rows).sum(axis=0), np.abs(to_float64(rows)).sum(axis=0)
    for add in (False, True):
        into = to_gpu(before)
        cuda_kernels.column_sums(to_gpu(rows), into, add)
        check(into, total + add * to_float64(before), dtype, 8 + np.sqrt(shape[0]), size)


def test_column_sums_of_more_columns_than_threads(gpu, rng, monkeypatch):
    monkeypatch.setattr(cuda_kernels, "elementwise", lambda n, width=1, threads=256: (2, 32))
    rows = draw_normal(rng, (40, 150), "float32")
    into = empty(150, np.float32)
    cuda_kernels.column_sums(to_gpu(rows), into, add=False)
    check(into, to_float64(rows).sum(axis=0), "float32", 8 + np.sqrt(40), np.abs(to_float64(rows)).sum(axis=0))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", ROWS)
@pytest.mark.full_except("shape2-float32")
def test_cross_entropy_kernels_match_the_formula(gpu, dtype, shape, rng):
    tokens, classes = shape
    logits, targets = draw_normal(rng, shape, dtype, 4.0), rng.integers(-1, classes, tokens)
    z, counts = to_float64(logits), targets >= 0
    z = z - z.max(axis=1, keepdims=True)
    p = np.exp(z) / np.exp(z).sum(axis=1, keepdims=True)
    losses = np.where(counts, np.log(np.exp(z).sum(axis=1)) - z[np.arange(tokens), targets], 0.0)
    device_logits, statistics = to_gpu(logits), empty((tokens, 2), accumulation_dtype(logits.dtype))
    total = cuda_kernels.cross_entropy(device_logits, to_gpu(targets), statistics)
    assert (total.dtype, total.shape) == (np.float64, ())
    exact = UNIT[str(accumulation_dtype(logits.dtype))]
    assert abs(float(total) - losses.sum()) <= 32 * exact * (1 + np.abs(z).max()) * tokens
    onehot = np.zeros(shape)
    onehot[np.arange(tokens)[counts], targets[counts]] = 1
    cuda_kernels.cross_entropy_backward(device_logits, to_gpu(targets), statistics, 0.37)
    check(device_logits, (p - onehot) * 0.37 * counts[:, None], dtype, 32, 0.37 * (1 + np.abs(z)) * (p + onehot))


def test_bad_logits_and_targets_stay_visible(gpu):
    targets = to_gpu(np.array([0, 1, 5, -1]))
    for row, bad in ((0, np.nan), (0, np.inf), (0, -np.inf), (2, 0.0), (3, np.nan)):
        logits = np.zeros((4, 3), np.float32)
        logits[row] = bad if bad != np.inf else [np.inf, 0, 0]
        statistics = empty((4, 2), np.float32)
        device_logits = to_gpu(logits)
        total = float(cuda_kernels.cross_entropy(device_logits, targets, statistics))
        cuda_kernels.cross_entropy_backward(device_logits, targets, statistics, 1.0)
        assert np.isnan(total) or row == 3
        assert row != 0 or np.isnan(device_logits.get()[0]).any()
    assert np.isnan(device_logits.get()[3]).all()  # it has no loss, and is not hidden


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("classes", [2000, 2001, 8200])  # a pack or an element a thread; several packs
def test_cross_entropy_of_rows_with_minus_infinity(gpu, dtype, classes, rng):
    logits, targets = draw_normal(rng, (4, classes), dtype, 4.0), rng.integers(classes // 2, classes, 4)
    kept = rng.random((4, classes)) < 0.5  # of row 0
    kept[1] = np.arange(classes) >= 40  # whole packs
    kept[2] = np.arange(classes) == targets[2]
    kept[3] = np.arange(classes) != targets[3]  # what should come has no chance
    kept[0, targets[0]] = True
    logits[~kept] = -np.inf
    z, place = to_float64(logits), (np.arange(4), targets)
    z = z - z.max(axis=1, keepdims=True)
    p = np.exp(z) / np.exp(z).sum(axis=1, keepdims=True)
    losses = np.log(np.exp(z).sum(axis=1)) - z[place]
    onehot = np.zeros(z.shape)
    onehot[place] = 1
    exact = UNIT[str(accumulation_dtype(logits.dtype))]
    for row, loss in enumerate(losses):
        here, statistics = to_gpu(logits[row : row + 1]), empty((1, 2), accumulation_dtype(logits.dtype))
        total = float(cuda_kernels.cross_entropy(here, to_gpu(targets[row : row + 1]), statistics))
        assert total == loss == np.inf if row == 3 else abs(total - loss) <= 32 * exact * (1 + abs(z[kept]).max())
        cuda_kernels.cross_entropy_backward(here, to_gpu(targets[row : row + 1]), statistics, 0.37)
        size = 0.37 * (1 + np.where(kept[row], np.abs(z[row]), 0)) * (p[row] + onehot[row])
        check(here[0], (p[row] - onehot[row]) * 0.37, dtype, 32, size)


@pytest.mark.parametrize("classes", [2000, 8200])
@pytest.mark.parametrize("beside", [-np.inf, np.nan, 1.0])
def test_nan_in_the_first_logits_of_a_thread_stays_visible(gpu, beside, classes):
    logits = np.zeros((1, classes), np.float32)
    logits[0, :4] = beside, np.nan, beside, beside
    here, statistics = to_gpu(logits), empty((1, 2), np.float32)
    assert np.isnan(float(cuda_kernels.cross_entropy(here, to_gpu(np.array([classes - 1])), statistics)))
    cuda_kernels.cross_entropy_backward(here, to_gpu(np.array([classes - 1])), statistics, 1.0)
    assert np.isnan(here.get()).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("hidden", "vocabulary"), [(1, 5), (7, 400), (64, 5), (1030, 5), (1030, 400)])
@pytest.mark.full_except("1-5-float16")
@pytest.mark.matrix_except("1-5-float16", "7-400-bfloat16", "64-5-float64", "1030-5-float32", "1030-400-float16")
def test_table_row_kernels_match_the_formula(gpu, dtype, hidden, vocabulary, rng):
    n = 600  # some tokens come for the first time after others have come twice
    table, rows = draw_normal(rng, (vocabulary, hidden), dtype), draw_normal(rng, (n, hidden), dtype)
    tokens = rng.integers(0, vocabulary - 1, n)  # the last one never comes
    y, into = empty((n, hidden), table.dtype), to_gpu(table)
    cuda_kernels.gather(to_gpu(table), to_gpu(tokens), y)
    assert to_float64(y).tolist() == to_float64(table)[tokens].tolist()
    cuda_kernels.scatter(to_gpu(rows), to_gpu(tokens), into)
    want, size = to_float64(table), np.abs(to_float64(table))
    np.add.at(want, tokens, to_float64(rows))
    np.add.at(size, tokens, np.abs(to_float64(rows)))
    check(into, want, dtype, 32, size)
    again = to_gpu(table)
    cuda_kernels.scatter(to_gpu(rows), to_gpu(tokens), again)
    assert backend.to_host(again).tobytes() == backend.to_host(into).tobytes()
    cuda_kernels.gather(to_gpu(table), to_gpu(np.array([vocabulary, -1])), y[:2])
    assert np.isnan(to_float64(y[:2])).all()
    cuda_kernels.scatter(to_gpu(rows[:0]), to_gpu(tokens[:0]), again)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("size", "heads", "others"), [(2, 1, 0), (6, 3, 5), (64, 2, 64)])
def test_rotary_kernels_match_the_formula(gpu, dtype, size, heads, others, rng):
    batch, context, rotated = 2, 5, size * heads
    x = draw_normal(rng, (batch, context, rotated + others), dtype)
    angles = np.arange(context)[:, None] * 10000.0 ** (-2 * np.arange(size // 2) / size)
    turns = np.concatenate([np.cos(angles), np.sin(angles)], axis=1).astype(accumulation_dtype(x.dtype))
    pairs = to_float64(x)[..., :rotated].reshape(batch, context, heads, 2, size // 2)
    c, s = np.cos(angles)[None, :, None], np.sin(angles)[None, :, None]
    want, got = to_float64(x), to_gpu(x)
    left, right = pairs[:, :, :, 0], pairs[:, :, :, 1]
    turned = np.stack([left * c - right * s, right * c + left * s], axis=3)
    want[..., :rotated] = turned.reshape(batch, context, rotated)
    cuda_kernels.rotate(got, rotated, to_gpu(turns), 1)
    check(got, want, dtype, 4, np.abs(to_float64(x)).max())
    cuda_kernels.rotate(got, rotated, to_gpu(turns), -1)
    assert np.abs(to_float64(got) - to_float64(x)).max() <= 8 * UNIT[dtype] * np.abs(to_float64(x)).max()


def test_launch_rejects_strided_or_mistyped_arguments(gpu, rng):
    x = to_gpu(draw_normal(rng, (4, 6), "float32"))
    with pytest.raises(TypeError, match="strides"):
        cuda_kernels.gelu(x[:, ::2], empty((4, 3), np.float32))
    with pytest.raises(TypeError, match="argument 2 of gelu is .* float64; it takes float32 in memory of the device"):
        cuda_kernels.gelu(x, empty((4, 6), np.float64))
    with pytest.raises(TypeError, match="kernel gelu got an argument of <class 'numpy.ndarray'>; pass GPU arrays"):
        cuda_kernels.gelu(x, np.empty((4, 6), np.float32))
    with pytest.raises(Exception, match="do not support int64"):
        cuda_kernels.gelu(to_gpu(np.arange(3)), empty(3, np.int64))


BROKEN = {
    "a barrier of the block that some of its threads do not reach": "if (threadIdx.x == 0) __syncthreads();",
    "some of its lanes wait at a barrier of the block": "if (threadIdx.x) __syncthreads(); else __syncwarp();",
    "some of its lanes have ended": "if (threadIdx.x) y[0] = __shfl_xor_sync(0xFFFFFFFFu, y[1], 1);",
}


@pytest.mark.parametrize("message", BROKEN)
@pytest.mark.full_except("some of its lanes have ended")
def test_host_ends_a_launch_that_would_hang(gpu, message):
    code = f'extern "C" __global__ void broken(float* y) {{ {BROKEN[message]} }}'
    kernel = cuda_compiler.RawKernel(code, "broken")
    array = to_gpu(np.zeros(64, np.float32))
    for _ in range(2):  # the next launch is not hurt by the last
        with pytest.raises(Exception, match=message):
            kernel((2,), (64,), (array,))
    right = cuda_compiler.RawKernel(
        'extern "C" __global__ void right(float* y) { y[threadIdx.x] = threadIdx.x; }', "right"
    )
    right((1,), (64,), (array,))
    assert array.get().tolist() == list(range(64))
