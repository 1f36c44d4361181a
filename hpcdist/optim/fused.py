"""Fused updates of the elementwise optimizers in one pass over memory: unscale, clip, decay, moments, step.

Buffers are as in `hpcdist.optim.kernels`. If GPU buffers span tensors, ``decay`` is the `TensorOptions` of all
tensors, with factors of ``rate``. ``scale`` includes clipping and loss scale. ``gradient`` is undefined afterwards.
Results have the same bits as separate passes.
"""

from hpcdist.arrays.backend import Array
from hpcdist.arrays.jit import jit
from hpcdist.optim import kernels
from hpcdist.optim.kernels import TensorOptions, adam_step


def adam(
    weights: Array,
    gradient: Array,
    m: Array,
    v: Array,
    *,
    scale: float,
    rate: float,
    betas: tuple[float, float],
    epsilon: float,
    decay: float | TensorOptions,
    count: int,
    working: Array | None = None,
) -> None:
    """Run one Adam step: update ``weights``, first moments ``m`` and second moments ``v`` in place."""
    # g = scale * gradient;  m = beta1 m + (1 - beta1) g;  v = beta2 v + (1 - beta2) g^2
    # w -= rate (m' / (sqrt(v') + epsilon) + decay w),  m' = m / (1 - beta1^count),  v' = v / (1 - beta2^count)
    # If count is 0, m' = m and v' = v.
    scalars = (scale, *kernels.moment_factors(betas, count), epsilon)
    if isinstance(decay, TensorOptions):
        kernels.launch_update("adam", weights, gradient, (m, v), working, decay, *scalars, rate)
        return
    _adam_loop(weights, gradient, m, v, *map(weights.dtype.type, (*scalars, decay, rate)))
    _round(weights, working)


@jit
def _adam_loop(weights, gradient, m, v, scale, beta1, rest1, beta2, rest2, correct1, correct2, epsilon, decay, rate):  # type: ignore[no-untyped-def]
    for i in range(weights.size):
        step = adam_step(m, v, i, gradient[i] * scale, beta1, rest1, beta2, rest2, correct1, correct2, epsilon)
        weights[i] = weights[i] - rate * (step + decay * weights[i])


def momentum(
    weights: Array,
    gradient: Array,
    velocity: Array,
    *,
    scale: float,
    rate: float,
    momentum: float,
    nesterov: bool,
    decay: float | TensorOptions,
    working: Array | None = None,
) -> None:
    """Run one step of SGD with momentum: update ``weights`` and ``velocity`` in place."""
    # g = scale * gradient + decay * w;  velocity = momentum * velocity + g;  w -= rate * velocity
    # With Nesterov momentum: w -= rate * (g + momentum * velocity).
    g_share, v_share = kernels.momentum_factors(momentum, nesterov)
    scalars = (scale, momentum, g_share, v_share)
    if isinstance(decay, TensorOptions):
        kernels.launch_update("momentum", weights, gradient, (velocity,), working, decay, *scalars, rate)
        return
    _momentum_loop(weights, gradient, velocity, *map(weights.dtype.type, (*scalars, decay, rate)))
    _round(weights, working)


@jit
def _momentum_loop(weights, gradient, velocity, scale, momentum, g_share, v_share, decay, rate):  # type: ignore[no-untyped-def]
    for i in range(weights.size):
        w = weights[i]
        g = gradient[i] * scale + decay * w
        fast = momentum * velocity[i] + g
        velocity[i] = fast
        weights[i] = w - rate * (g_share * g + v_share * fast)


def sgd(
    weights: Array,
    gradient: Array,
    *,
    scale: float,
    rate: float,
    decay: float | TensorOptions,
    working: Array | None = None,
) -> None:
    """Run one step of SGD without momentum: weights -= rate * (scale * gradient + decay * weights)."""
    if isinstance(decay, TensorOptions):
        kernels.launch_update("plain", weights, gradient, (), working, decay, scale, rate)
        return
    _sgd_loop(weights, gradient, *map(weights.dtype.type, (scale, decay, rate)))
    _round(weights, working)


@jit
def _sgd_loop(weights, gradient, scale, decay, rate):  # type: ignore[no-untyped-def]
    for i in range(weights.size):
        w = weights[i]
        weights[i] = w - rate * (gradient[i] * scale + decay * w)


def _round(weights: Array, working: Array | None) -> None:
    if working is not None:
        kernels.round_into(weights, working)


for _kernel, _buffers, _scalars in ((_adam_loop, 4, 10), (_momentum_loop, 3, 6), (_sgd_loop, 2, 3)):
    for _arguments in kernels.samples(_buffers, _scalars):
        _kernel.sample(lambda _arguments=_arguments: _arguments)
