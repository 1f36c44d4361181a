"""Update kernels, each as a numba loop for the CPU and as ufuncs for a GPU, and launches of CUDA kernels.

Buffers of a call are contiguous vectors of equal length and, unless noted, of one dtype, float32 or float64. The
functions ``launch_*`` do not wait for the GPU. Their gradient may have any float dtype. ``working``, or None, is a copy
of the weights in another dtype.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from hpcdist.arrays.backend import Array, is_device, namespace, zeros
from hpcdist.arrays.dtypes import BFLOAT16, is_16bit_float
from hpcdist.arrays.gpu.kernels import KernelSource, elementwise
from hpcdist.arrays.jit import jit
from hpcdist.collectives import reduction
from hpcdist.collectives.reduction import (
    bfloat16_to_float32,
    float16_to_float32,
    float32_to_bfloat16,
    float32_to_float16,
)

CUDA_SOURCE: Final = KernelSource(Path(__file__).parent / "cuda" / "updates.cu")
PACK: Final = 4  # elements per thread at a time
TILE: Final = 4096  # elements of the flat space per block at a time
BLOCKS: Final = 1024  # largest number of blocks of a sum: constant, so that sums are equal on every GPU
THREADS: Final = 256  # per block


class TensorOptions(NamedTuple):
    """Arguments of a GPU kernel: bounds and optimizer settings of each tensor in the flat parameter vector."""

    bounds: Array  # (tensors, 2), int64: start and end of each tensor, ascending
    options: Array  # (tensors, 2), float64: weight decay and factor of the rate
    start: int = 0  # flat index of the first element that the kernel processes


def launch_adam_direction(
    weights: Array,
    gradient: Array,
    m: Array,
    v: Array,
    step: Array,  # may be the gradient array
    partial: Array,  # result of `partial_sums`
    tensors: TensorOptions,  # weight decays
    *scalars: float,  # factor of the gradient, the six results of `moment_factors`, epsilon
) -> None:
    """Update the moments m and v on a GPU, and write Adam's update direction of ``weights`` to ``step``.

    Also add the sums of squares of ``weights`` and ``step`` to ``partial``, a result of `partial_sums`. ``tensors``:
    bounds and weight decays of the tensors.
    """
    _launch("adam_direction", weights, gradient, (m, v, step, partial), step, tensors, (), scalars)


def launch_scaled_direction(
    weights: Array, gradient: Array, step: Array, partial: Array, tensors: TensorOptions, scale: float
) -> None:
    """Write ``scale * gradient`` to ``step`` on a GPU. Add the squares of ``weights`` and ``step`` to ``partial``."""
    _launch("scaled_direction", weights, gradient, (step, partial), step, tensors, (), (scale,))


def partial_sums(size: int, tensors: int) -> Array:  # (places, 2)
    """Return a zeroed GPU array for the sums of squares of ``tensors`` tensors with ``size`` elements in total."""
    # The sums have the same bits if the flat vector is processed in ranges that are split at multiples of `TILE`.
    return zeros((-(-size // TILE) + tensors, 2), np.dtype(np.float64), "gpu")


def tensor_sums(partial: Array, tensors: TensorOptions) -> Array:  # (tensors, 2)
    """Return a float64 array (tensors, 2): sums of squares of weights and of update directions, per tensor."""
    sums = namespace(partial).empty((len(tensors.bounds), 2), np.float64)
    CUDA_SOURCE.launch("tensor_sums", len(sums), THREADS, partial, sums, tensors.bounds, **_types(sums, sums, sums))
    return sums


def launch_update(
    name: str,
    weights: Array,
    gradient: Array,
    slots: Sequence[Array],
    working: Array | None,
    tensors: TensorOptions,  # weight decay and rate factor of each tensor
    *scalars: float,
) -> None:
    """Launch the update kernel ``name`` on a GPU. The kernel does not change ``gradient``.

    ``slots``: optimizer state vectors. ``working``: array for the rounded weights, or None. ``tensors``: weight decay
    and learning rate factor of each tensor. ``*scalars``: constants for the kernel.
    """
    # Kernels, with their slots and scalars ("scale" multiplies the gradient):
    # "adam": m and v; scale, beta1, 1 - beta1, beta2, 1 - beta2, both bias corrections, epsilon, rate.
    # "momentum": velocity; scale, momentum, a, b, rate, for the step a * gradient + b * velocity.
    # "plain": no slot; scale, rate.
    # "descend": no slot, no scalar. The gradient is an update direction, and rate factors are learning rates.
    # "descend_with_velocity": as "descend", with slot velocity and scalar momentum.
    # Without a working copy the kernel gets the weights instead, and a flag.
    copy = weights if working is None else working
    _launch(name, weights, gradient, (*slots, copy), copy, tensors, (int(working is not None),), scalars)


def _launch(
    name: str,
    weights: Array,
    gradient: Array,
    others: tuple[Array, ...],
    working: Array,
    tensors: TensorOptions,
    flags: tuple[int, ...],
    scalars: Any,
) -> None:
    n, (bounds, options, start) = weights.size, tensors
    grid = elementwise(start % TILE + n if n else 0, TILE // THREADS)  # one block per tile that the buffers overlap
    CUDA_SOURCE.launch(
        name, *grid, weights, gradient, *others, bounds, options, len(bounds), start, n, *flags, *map(float, scalars),
        **_types(weights, gradient, working)
    )  # fmt: skip


def _types(weights: Array, gradient: Array, working: Array) -> dict[str, Any]:
    return {"REAL": weights.dtype, "GRADIENT": gradient.dtype, "WORKING": working.dtype}


def launch_sum_of_squares(*pieces: Array) -> Array:
    """Return the sum of the squares of all elements of the GPU arrays ``*pieces``, as a 0-d float64 GPU array."""
    blocks = min(max(1, -(-max(values.size for values in pieces) // (THREADS * PACK))), BLOCKS)
    partial = namespace(pieces[0]).empty(blocks, np.float64)
    for number, values in enumerate(pieces):
        types: dict[str, Any] = {"REAL": np.float64, "GRADIENT": values.dtype, "WORKING": np.float64}
        CUDA_SOURCE.launch("squares", blocks, THREADS, values, partial, values.size, int(number > 0), **types)
    total: Array = partial.sum()
    return total


def launch_convert(values: Array, into: Array, add: bool = False) -> None:
    """Write ``values`` to ``into`` on a GPU, or add them if ``add``. Round once, to the dtype of ``into``."""
    types: dict[str, Any] = {"REAL": np.float32, "GRADIENT": values.dtype, "WORKING": into.dtype}
    CUDA_SOURCE.launch("convert", *elementwise(values.size, PACK), values, into, values.size, int(add), **types)


LANES: Final = 512  # independent sums of squares: enough vector registers to hide the latency of additions


def adam_direction(
    weights: Array,
    gradient: Array,
    m: Array,
    v: Array,
    *,
    scale: float,
    betas: tuple[float, float],
    epsilon: float,
    decay: float,
    count: int,
) -> None:
    """Update Adam's moments m and v. Overwrite ``gradient`` with the update, before the learning rate is applied."""
    # The direction is m' / (sqrt(v') + epsilon) + decay * weights, with the gradient scale * gradient. m' and v' are m
    # and v, bias-corrected if ``count``, the number of applied updates, is positive.
    scalars = (scale, *moment_factors(betas, count), epsilon, decay)
    run = _adam_ufuncs if is_device(weights) else _adam_loop
    run(weights, gradient, m, v, *map(weights.dtype.type, scalars))


def moment_factors(betas: tuple[float, float], count: int) -> tuple[float, ...]:
    """Return (beta1, 1 - beta1, beta2, 1 - beta2, bias correction of m, of v) after ``count`` updates."""
    beta1, beta2 = betas
    corrections = (1.0 / (1.0 - beta1**count), 1.0 / (1.0 - beta2**count)) if count else (1.0, 1.0)
    return beta1, 1.0 - beta1, beta2, 1.0 - beta2, *corrections


@jit
def adam_step(m, v, i, g, beta1, rest1, beta2, rest2, correct1, correct2, epsilon):  # type: ignore[no-untyped-def]
    """Update element ``i`` of Adam's moments m and v for the gradient g. Return the update before the learning rate.

    ``beta1`` to ``correct2``: the six results of `moment_factors`.
    """
    mean = m[i] * beta1 + g * rest1
    square = v[i] * beta2 + g * g * rest2
    m[i] = mean
    v[i] = square
    # np.divide, because the zero-divisor check of `/` prevents vectorisation (8 times slower)
    return np.divide(mean * correct1, math.sqrt(square * correct2) + epsilon)


@jit
def _adam_loop(weights, gradient, m, v, scale, beta1, rest1, beta2, rest2, correct1, correct2, epsilon, decay):  # type: ignore[no-untyped-def]
    for i in range(weights.size):
        step = adam_step(m, v, i, gradient[i] * scale, beta1, rest1, beta2, rest2, correct1, correct2, epsilon)
        gradient[i] = step + decay * weights[i]


def _adam_ufuncs(weights, gradient, m, v, scale, beta1, rest1, beta2, rest2, correct1, correct2, epsilon, decay):  # type: ignore[no-untyped-def]
    # As the loop above. After m is updated, the gradient's memory holds g^2 and then the denominator.
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


def momentum_direction(
    weights: Array, gradient: Array, velocity: Array, *, scale: float, momentum: float, nesterov: bool, decay: float
) -> None:
    """Update the momentum state ``velocity``. Overwrite ``gradient`` with the update direction for ``weights``."""
    # g = scale * gradient + decay * weights; velocity = momentum * velocity + g. The step is the velocity or, with
    # Nesterov momentum, g + momentum * velocity.
    g_share, v_share = momentum_factors(momentum, nesterov)
    run = _momentum_ufuncs if is_device(weights) else _momentum_loop
    run(weights, gradient, velocity, *map(weights.dtype.type, (scale, momentum, g_share, v_share, decay)))


def momentum_factors(momentum: float, nesterov: bool) -> tuple[float, float]:
    """Return (a, b) of the update direction a * gradient + b * velocity of SGD with (Nesterov) momentum."""
    return (1.0, momentum) if nesterov else (0.0, 1.0)


@jit
def _momentum_loop(weights, gradient, velocity, scale, momentum, g_share, v_share, decay):  # type: ignore[no-untyped-def]
    for i in range(weights.size):
        g = gradient[i] * scale + decay * weights[i]
        fast = momentum * velocity[i] + g
        velocity[i] = fast
        gradient[i] = g_share * g + v_share * fast


def _momentum_ufuncs(weights, gradient, velocity, scale, momentum, g_share, v_share, decay):  # type: ignore[no-untyped-def]
    gradient *= scale
    gradient += decay * weights
    velocity *= momentum
    velocity += gradient
    gradient *= g_share
    gradient += v_share * velocity


def scale_in_place(gradient: Array, scale: float) -> None:
    """Multiply ``gradient`` by ``scale`` in place."""
    if scale != 1.0:
        gradient *= gradient.dtype.type(scale)


def descend(weights: Array, step: Array, rate: float) -> None:
    """Subtract ``rate * step`` from ``weights`` in place."""
    run = _descend_ufuncs if is_device(weights) else _descend_loop
    run(weights, step, weights.dtype.type(rate))


@jit
def _descend_loop(weights, step, rate):  # type: ignore[no-untyped-def]
    for i in range(weights.size):
        weights[i] -= rate * step[i]


def _descend_ufuncs(weights, step, rate):  # type: ignore[no-untyped-def]
    weights -= rate * step


def descend_with_velocity(
    weights: Array, gradient: Array, velocity: Array, *, rate: float, momentum: float, decay: float
) -> None:
    """Set velocity = momentum * velocity + rate * (gradient + decay * weights), then weights -= velocity."""
    _velocity_loop(weights, gradient, velocity, *map(weights.dtype.type, (rate, momentum, decay)))


@jit
def _velocity_loop(weights, gradient, velocity, rate, momentum, decay):  # type: ignore[no-untyped-def]
    for i in range(weights.size):
        fast = momentum * velocity[i] + rate * (gradient[i] + decay * weights[i])
        velocity[i] = fast
        weights[i] -= fast


def sum_of_squares(values: Array) -> Any:
    """Return the float64 sum of squares of ``values``, as a float or, if ``values`` is on a GPU, as a 0-d array."""
    if is_device(values):
        return launch_sum_of_squares(values)
    sums = np.zeros(LANES)
    add_squares(values, sums, 0)
    return float(total(sums))


# Distant sums are added in vector registers in a fixed order. fastmath would use an order that depends on the CPU, so
# replicas on different CPUs would diverge.
@jit
def add_squares(values: Any, sums: Any, phase: Any) -> None:
    """Add the square of element i of ``values`` to ``sums[(phase + i) % LANES]`` in float64, for all i."""
    # If phase is the index of values[0] in its tensor, modulo LANES, several calls give the same bits as one call.
    # First complete the row of lanes that the previous block left. Then element k of each row goes to lane k, without a
    # modulus. The last row may be shorter.
    head = min((LANES - phase) % LANES, values.size)
    row = values[:head]
    lanes = sums[phase : phase + head]
    for k in range(head):
        x = np.float64(row[k])
        lanes[k] += x * x
    for start in range(head, values.size, LANES):
        row = values[start : min(start + LANES, values.size)]
        for k in range(row.size):
            x = np.float64(row[k])
            sums[k] += x * x


@jit
def total(sums: Any) -> Any:  # (LANES,)
    """Return the total of ``sums``, the partial sums of `add_squares`. Overwrites ``sums``."""
    half = LANES // 2  # a fixed tree with independent additions per level
    while half:
        left, right = sums[:half], sums[half : 2 * half]
        for k in range(half):
            left[k] += right[k]
        half //= 2
    return sums[0]


def round_into(master: Array, working: Array) -> None:
    """Write ``master`` to ``working``, rounded to nearest even in the dtype of ``working``. Overflow gives infinity."""
    if master.dtype != np.float32 or not is_16bit_float(working.dtype):
        working[...] = master
    elif is_device(master):
        launch_convert(master, working)
    else:
        reduction.round_on_host(working, master)


def widen(working: Array, wide: Array) -> None:
    """Write the 16-bit floats ``working`` to the float32 array ``wide``."""
    if is_device(working):
        launch_convert(working, wide)
    else:
        reduction.widen_on_host(working, wide)


def add_rounded(working: Array, addend: Array) -> None:
    """Add the float32 array ``addend`` to the 16-bit array ``working`` in float32, then round to 16 bits. In place."""
    if is_device(working):
        launch_convert(addend, working, add=True)
        return
    loop = _add_to_bfloat16_loop if working.dtype == BFLOAT16 else _add_to_float16_loop
    loop(working.view(np.uint16), addend)


@jit
def _add_to_bfloat16_loop(halves, addend):  # type: ignore[no-untyped-def]
    for i in range(addend.size):
        halves[i] = float32_to_bfloat16(np.float32(bfloat16_to_float32(halves[i]) + addend[i]))


@jit
def _add_to_float16_loop(halves, addend):  # type: ignore[no-untyped-def]
    for i in range(addend.size):
        halves[i] = float32_to_float16(np.float32(float16_to_float32(halves[i]) + addend[i]))


def samples(buffers: int, scalars: int) -> list[tuple[object, ...]]:
    """Return a list of example argument tuples, one per dtype: ``buffers`` arrays, then ``scalars`` numbers."""
    return [
        (*(np.ones(8, dtype) for _ in range(buffers)), *(dtype(0.5) for _ in range(scalars)))
        for dtype in (np.float32, np.float64)
    ]


for _kernel, _buffers, _scalars in (
    (_adam_loop, 4, 9),
    (_momentum_loop, 3, 5),
    (_descend_loop, 2, 1),
    (_velocity_loop, 3, 3),
):
    for _arguments in samples(_buffers, _scalars):
        _kernel.sample(lambda _arguments=_arguments: _arguments)
for _loop in (_add_to_bfloat16_loop, _add_to_float16_loop):
    _loop.sample(lambda: (np.ones(8, np.uint16), np.ones(8, np.float32)))
for _dtype in (np.float32, np.float64):
    add_squares.sample(lambda _dtype=_dtype: (np.ones(8, _dtype), np.zeros(LANES), 0))
total.sample(lambda: (np.zeros(LANES),))
