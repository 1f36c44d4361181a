"""Convolution by unfolding, compared with sums in float64 at every border. Gradients are the transposed sums."""

import numpy as np
import pytest

from hpcdist.models.arena import Arena
from hpcdist.models.layers import convolution
from hpcdist.models.layers.convolution import SIZE, convolve, convolve_backward, output_side

SHAPES = [  # samples, height, width, inputs, outputs, stride
    (2, 5, 4, 3, 4, 1),
    (3, 6, 7, 2, 5, 2),
    (1, 1, 1, 1, 1, 1),
    (1, 1, 1, 3, 2, 2),
    (2, 1, 9, 3, 1, 2),
    (2, 2, 1, 5, 3, 1),
    (5, 8, 8, 16, 9, 2),
    (0, 4, 4, 3, 2, 1),
]


class Into(dict):
    """Gradients that are overwritten or added to."""

    def __init__(self, add, **shapes):
        super().__init__({name.replace("_", "."): np.full(shape, 2.0) for name, shape in shapes.items()})
        self.add = add

    def into(self, name):
        return self[name], self.add

    def wants(self, name):
        return name in self


def taps(height, width, stride):
    """Yield (window position, output pixel, input pixel) of every product whose input is inside the picture."""
    for p in range(output_side(height, stride)):
        for q in range(output_side(width, stride)):
            for i in range(SIZE):
                for j in range(SIZE):
                    above, left = p * stride + i - 1, q * stride + j - 1
                    if 0 <= above < height and 0 <= left < width:
                        yield (i, j), (p, q), (above, left)


@pytest.fixture(params=SHAPES, ids=str)
def case(request, rng):
    samples, height, width, inputs, outputs, stride = request.param
    x = rng.standard_normal((samples, height, width, inputs))
    weight = rng.standard_normal((outputs, SIZE, SIZE, inputs))
    bias = rng.standard_normal(outputs)
    dy = rng.standard_normal((samples, output_side(height, stride), output_side(width, stride), outputs))
    return x, weight, bias, dy, stride


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("few", [False, True])
def test_convolution_matches_the_sums(case, dtype, few, monkeypatch):
    x, weight, bias, dy, stride = (value if isinstance(value, int) else value.astype(dtype) for value in case)
    if few:  # samples at a time
        monkeypatch.setattr(convolution, "CACHE_BYTES", 1)
    want = np.zeros(dy.shape) + bias.astype(np.float64)
    dx, dweight = np.zeros(x.shape), np.zeros(weight.shape)
    for (i, j), (p, q), (above, left) in taps(*x.shape[1:3], stride):
        pixel, d = x[:, above, left].astype(np.float64), dy[:, p, q].astype(np.float64)
        want[:, p, q] += pixel @ weight[:, i, j].T
        dx[:, above, left] += d @ weight[:, i, j]
        dweight[:, i, j] += d.T @ pixel
    parameters = {"c.weight": weight, "c.bias": bias}
    # A sum of n products is off by n roundings of the size of its terms at most.
    bound = np.finfo(dtype).eps * (weight[0].size + dy[..., 0].size + 2) * 30
    for add in (False, True):
        saved, into = Arena().saved(0), Into(add, c_weight=weight.shape, c_bias=bias.shape)
        y = convolve(parameters, "c", x, stride, saved)
        assert y.dtype == dtype and y.shape == want.shape
        np.testing.assert_allclose(y, want, atol=bound)
        np.testing.assert_allclose(convolve_backward(parameters, into, "c", dy, saved), dx, atol=bound)
        np.testing.assert_allclose(into["c.weight"], dweight + 2 * add, atol=bound)
        np.testing.assert_allclose(into["c.bias"], dy.sum(axis=(0, 1, 2), dtype=np.float64) + 2 * add, atol=bound)


def test_gradient_of_the_input_is_optional(case):
    x, weight, bias, dy, stride = case
    saved, into = Arena().saved(0), Into(False, c_weight=weight.shape, c_bias=bias.shape)
    convolve({"c.weight": weight, "c.bias": bias}, "c", x, stride, saved)
    assert convolve_backward({"c.weight": weight}, into, "c", dy, saved, wants_dx=False) is None


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_non_finite_inputs_affect_only_their_windows(bad, rng):
    x, weight = rng.standard_normal((1, 4, 4, 2)), rng.standard_normal((3, SIZE, SIZE, 2))
    x[0, 0, 0, 1] = bad
    y = convolve({"c.weight": weight, "c.bias": np.zeros(3)}, "c", x, 1, Arena().saved(0))
    assert not np.isfinite(y[0, :2, :2]).any()
    assert np.isfinite(y[0, 2:]).all() and np.isfinite(y[0, :, 2:]).all()


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("side", [1, 2, 3, 4, 7])
def test_gpu_slices_have_the_bits_of_the_cpu_loops(side, stride, rng):
    x = rng.standard_normal((2, side, 5, 3))
    high, wide = output_side(side, stride), output_side(5, stride)
    ours, theirs = (np.full((2 * high * wide, SIZE * SIZE * 3), np.nan) for _ in range(2))
    convolution._unfold_rows(x, ours, high, wide, stride)
    convolution._unfold_device(x, theirs, high, wide, stride)
    assert (ours == theirs).all()
    rows = rng.standard_normal(ours.shape)
    ours, theirs = (np.ones(x.shape) for _ in range(2))
    convolution._fold_rows(rows, ours, high, wide, stride)
    convolution._fold_device(rows, theirs, high, wide, stride)
    np.testing.assert_allclose(theirs, ours, atol=3e-14)  # ten terms of a few, in another order
