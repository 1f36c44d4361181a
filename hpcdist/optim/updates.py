"""Whole updates of elementwise optimizers in one pass over memory: unscale, clip, decay, moments, step.

Each is once a loop for the CPU (numba, fused) and once ufuncs for a GPU (cupy), side by side, as in
`hpcdist.optim.kernels`: buffers are 1-D contiguous views of equal length (n,) and of one dtype, float32 or float64, and
scalars are cast to that dtype before a loop. ``gradient`` is multiplied by ``scale``, where the clipping and the loss
scale are, and is undefined afterwards. A loop does what a direction and a descent would, operation by operation in the
dtype of the buffers, so the bits are theirs.
"""

import math

import numpy as np

from hpcdist.arrays.backend import Array, is_device, namespace
from hpcdist.arrays.jit import jit
from hpcdist.optim import kernels


def adam(
    weights: Array,
    gradient: Array,
    m: Array,
    v: Array,
    *,
    scale: float,
    rate: float,
    beta1: float,
    beta2: float,
    epsilon: float,
    decay: float,
    count: int,
    corrects: bool = True,
) -> None:
    """Update the moments with g = ``scale * gradient``, and step the weights.

    m = beta1 m + (1 - beta1) g;  v = beta2 v + (1 - beta2) g^2;  w -= rate (m^ / (sqrt(v^) + epsilon) + decay w), where
    m^ and v^ are as in `kernels.adam_direction`: corrected for ``count`` applied updates, where it ``corrects``.
    """
    correct1, correct2 = kernels.bias_corrections((beta1, beta2), count if corrects else 0)
    scalars = (scale, beta1, 1.0 - beta1, beta2, 1.0 - beta2, correct1, correct2, epsilon, decay, rate)
    run = _adam_ufuncs if is_device(weights) else _adam_loop
    run(weights, gradient, m, v, *map(weights.dtype.type, scalars))


@jit
def _adam_loop(weights, gradient, m, v, scale, beta1, rest1, beta2, rest2, correct1, correct2, epsilon, decay, rate):  # type: ignore[no-untyped-def]
    for i in range(weights.size):
        g = gradient[i] * scale
        mean = m[i] * beta1 + g * rest1
        square = v[i] * beta2 + g * g * rest2
        m[i] = mean
        v[i] = square
        w = weights[i]
        # np.divide: see `kernels`
        weights[i] = w - rate * (np.divide(mean * correct1, math.sqrt(square * correct2) + epsilon) + decay * w)


def _adam_ufuncs(weights, gradient, m, v, scale, beta1, rest1, beta2, rest2, correct1, correct2, epsilon, decay, rate):  # type: ignore[no-untyped-def]
    xp = namespace(weights)
    gradient *= scale
    m *= beta1
    m += rest1 * gradient
    v *= beta2
    xp.square(gradient, out=gradient)
    gradient *= rest2
    v += gradient
    xp.multiply(v, correct2, out=gradient)
    xp.sqrt(gradient, out=gradient)
    gradient += epsilon
    xp.divide(m * correct1, gradient, out=gradient)
    gradient += decay * weights
    gradient *= rate
    weights -= gradient


def momentum(
    weights: Array,
    gradient: Array,
    velocity: Array,
    *,
    scale: float,
    rate: float,
    momentum: float,
    nesterov: bool,
    decay: float,
) -> None:
    """Update ``velocity`` = momentum velocity + g, with g = ``scale * gradient`` + decay w, and step the weights.

    They move by -rate times the velocity, or g + momentum velocity with ``nesterov``.
    """
    own, ahead = kernels.shares_of_step(momentum, nesterov)
    run = _momentum_ufuncs if is_device(weights) else _momentum_loop
    run(weights, gradient, velocity, *map(weights.dtype.type, (scale, momentum, own, ahead, decay, rate)))


@jit
def _momentum_loop(weights, gradient, velocity, scale, momentum, own, ahead, decay, rate):  # type: ignore[no-untyped-def]
    for i in range(weights.size):
        w = weights[i]
        g = gradient[i] * scale + decay * w
        fast = momentum * velocity[i] + g
        velocity[i] = fast
        weights[i] = w - rate * (own * g + ahead * fast)


def _momentum_ufuncs(weights, gradient, velocity, scale, momentum, own, ahead, decay, rate):  # type: ignore[no-untyped-def]
    gradient *= scale
    gradient += decay * weights
    velocity *= momentum
    velocity += gradient
    gradient *= own
    gradient += ahead * velocity
    gradient *= rate
    weights -= gradient


def plain(weights: Array, gradient: Array, *, scale: float, rate: float, decay: float) -> None:
    """Step the weights by -rate (``scale * gradient`` + decay w)."""
    run = _plain_ufuncs if is_device(weights) else _plain_loop
    run(weights, gradient, *map(weights.dtype.type, (scale, decay, rate)))


@jit
def _plain_loop(weights, gradient, scale, decay, rate):  # type: ignore[no-untyped-def]
    for i in range(weights.size):
        w = weights[i]
        weights[i] = w - rate * (gradient[i] * scale + decay * w)


def _plain_ufuncs(weights, gradient, scale, decay, rate):  # type: ignore[no-untyped-def]
    gradient *= scale
    gradient += decay * weights
    gradient *= rate
    weights -= gradient


for _kernel, _buffers, _scalars in ((_adam_loop, 4, 10), (_momentum_loop, 3, 6), (_plain_loop, 2, 3)):
    for _arguments in kernels.samples(_buffers, _scalars):
        _kernel.sample(lambda _arguments=_arguments: _arguments)
