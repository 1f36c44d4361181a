"""Fused updates of the elementwise optimizers in one pass over memory: unscale, clip, decay, moments, step.

Each is a loop for the CPU (numba, fused), and a kernel of `hpcdist.optim.update.kernels` for a GPU. Buffers are 1-D
contiguous views of equal length (n,) and of one dtype, float32 or float64, and scalars are cast to that dtype before
a loop. On a GPU the gradient may be of another type than the weights, and buffers have any number of tensors: in the
place of the ``decay`` of one are the `TensorOptions` of all, whose factors multiply the ``rate``. ``working``, where
given, is a copy of the weights in another type, rounded once. ``gradient`` is multiplied by ``scale``, where the
clipping and the loss scale are, and is undefined afterwards. A loop does what a direction and a descent would,
operation by operation in the dtype of the buffers, so the bits are theirs.
"""

from hpcdist.arrays.backend import Array
from hpcdist.arrays.jit import jit
from hpcdist.optim.update import kernels
from hpcdist.optim.update.kernels import TensorOptions, adam_step


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
    """Update the moments with g = ``scale * gradient``, and step the weights.

    m = beta1 m + (1 - beta1) g;  v = beta2 v + (1 - beta2) g^2;  w -= rate (m^ / (sqrt(v^) + epsilon) + decay w), where
    m^ and v^ are as in `kernels.adam_direction`: corrected for ``count`` applied updates, 0 for not at all.
    """
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
    """Update ``velocity`` = momentum velocity + g, with g = ``scale * gradient`` + decay w, and step the weights.

    They move by -rate times the velocity, or g + momentum velocity with ``nesterov``.
    """
    own, ahead = kernels.shares_of_step(momentum, nesterov)
    scalars = (scale, momentum, own, ahead)
    if isinstance(decay, TensorOptions):
        kernels.launch_update("momentum", weights, gradient, (velocity,), working, decay, *scalars, rate)
        return
    _momentum_loop(weights, gradient, velocity, *map(weights.dtype.type, (*scalars, decay, rate)))
    _round(weights, working)


@jit
def _momentum_loop(weights, gradient, velocity, scale, momentum, own, ahead, decay, rate):  # type: ignore[no-untyped-def]
    for i in range(weights.size):
        w = weights[i]
        g = gradient[i] * scale + decay * w
        fast = momentum * velocity[i] + g
        velocity[i] = fast
        weights[i] = w - rate * (own * g + ahead * fast)


def sgd(
    weights: Array,
    gradient: Array,
    *,
    scale: float,
    rate: float,
    decay: float | TensorOptions,
    working: Array | None = None,
) -> None:
    """Step the weights by -rate (``scale * gradient`` + decay w)."""
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
