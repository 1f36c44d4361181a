"""Update kernels, each as a numba loop for the CPU and as ufuncs for a GPU, and the launch of CUDA kernels.

The buffers of one call are 1-D contiguous views of equal length (n,) and, unless said, of one dtype, float32 or
float64. Scalars are cast to that dtype before a loop: a Python float would pull float32 data through float64. The
ufunc versions ask the buffer for its library, so they run on numpy too.

The functions ``launch_*`` run kernels of ``cuda/updates.cu``, which read the gradient in the type that it has. Those of
an update are one kernel for all tensors of the buffers, which `TensorOptions` tell apart; layer-wise optimizers have
one for directions and one for steps. Weights and slots are float32 or float64. ``working``, a copy of the weights in
another type, is rounded from them in the same pass, None where there is none. They do not wait for the GPU.
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
from hpcdist.collectives import half_precision
from hpcdist.collectives.half_precision import (
    bfloat16_to_float32,
    float16_to_float32,
    float32_to_bfloat16,
    float32_to_float16,
)

CUDA_SOURCE: Final = KernelSource(Path(__file__).parent / "cuda" / "updates.cu")
PACK: Final = 4  # elements that a thread takes at a time
TILE: Final = 4096  # elements of the flat space that a block of an update takes at a time
BLOCKS: Final = 1024  # of a sum at most: a constant, so that it is the same on every GPU
THREADS: Final = 256  # of a block of an update or a sum


class TensorOptions(NamedTuple):
    """Options of all tensors of a flat space, on a GPU, for updates of buffers that begin at ``start`` of it."""

    bounds: Array  # (tensors, 2), int64: where each begins and ends, ascending
    options: Array  # (tensors, 2), float64: weight decay, and factor of the rate
    start: int = 0


def launch_adam_direction(
    weights: Array,
    gradient: Array,
    m: Array,
    v: Array,
    step: Array,
    partial: Array,
    tensors: TensorOptions,
    *scalars: float,
) -> None:
    """Update the moments, and write the direction of `adam_direction` to ``step``, which may be the gradient.

    Sums of squares of weights and direction are added to ``partial``, see `tensor_sums`. ``scalars``: scale, beta1,
    1 - beta1, beta2, 1 - beta2, the corrections of both, epsilon.
    """
    _launch("adam_direction", weights, gradient, (m, v, step, partial), step, tensors, (), scalars)


def launch_scaled_direction(
    weights: Array, gradient: Array, step: Array, partial: Array, tensors: TensorOptions, scale: float
) -> None:
    """Write ``scale * gradient`` to ``step``, which may be the gradient; ``partial`` as in `launch_adam_direction`."""
    _launch("scaled_direction", weights, gradient, (step, partial), step, tensors, (), (scale,))


def partial_sums(size: int, tensors: int) -> Array:  # (places, 2)
    """Return zeroed memory on a GPU for what directions sum up, of ``tensors`` in a flat space of ``size`` elements.

    A tensor has a place for each `TILE` of the space that it lies in: cut at the bounds of tiles it has the bits of one
    that is whole.
    """
    return zeros((-(-size // TILE) + tensors, 2), np.dtype(np.float64), "gpu")


def tensor_sums(partial: Array, tensors: TensorOptions) -> Array:  # (tensors, 2)
    """Return the sums of squares of weights and directions by tensor, in float64 on the GPU, tile by tile."""
    sums = namespace(partial).empty((len(tensors.bounds), 2), np.float64)
    CUDA_SOURCE.launch("tensor_sums", len(sums), THREADS, partial, sums, tensors.bounds, **_types(sums, sums, sums))
    return sums


def launch_update(
    name: str,
    weights: Array,
    gradient: Array,
    slots: Sequence[Array],
    working: Array | None,
    tensors: TensorOptions,
    *scalars: float,
) -> None:
    """Launch the kernel ``name`` of `hpcdist.optim.update.fused`; the gradient is kept.

    Slots and scalars by name:

    "adam": m and v; scale, beta1, 1 - beta1, beta2, 1 - beta2, the corrections of both, epsilon, rate.
    "momentum": the velocity; scale, momentum, shares of g and of the velocity in the step, rate.
    "plain": no slots; scale, rate.
    "descend": no slots, no scalars; the gradient is a direction, the factors of ``tensors`` are rates.
    "descend_with_velocity": the velocity; momentum.
    """
    # Without a working copy the kernel gets the weights in its place, and a flag that it is not to be written.
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
    grid = elementwise(start % TILE + n if n else 0, TILE // THREADS)  # as many blocks as tiles that the buffers touch
    CUDA_SOURCE.launch(
        name, *grid, weights, gradient, *others, bounds, options, len(bounds), start, n, *flags, *map(float, scalars),
        **_types(weights, gradient, working)
    )  # fmt: skip


def _types(weights: Array, gradient: Array, working: Array) -> dict[str, Any]:
    return {"REAL": weights.dtype, "GRADIENT": gradient.dtype, "WORKING": working.dtype}


def launch_sum_of_squares(*pieces: Array) -> Array:
    """Return the sum of squares of one or more arrays in float64, as an array () on the GPU."""
    blocks = min(max(1, -(-max(values.size for values in pieces) // (THREADS * PACK))), BLOCKS)
    partial = namespace(pieces[0]).empty(blocks, np.float64)
    for number, values in enumerate(pieces):
        types: dict[str, Any] = {"REAL": np.float64, "GRADIENT": values.dtype, "WORKING": np.float64}
        CUDA_SOURCE.launch("squares", blocks, THREADS, values, partial, values.size, int(number > 0), **types)
    total: Array = partial.sum()
    return total


def launch_convert(values: Array, into: Array, add: bool = False) -> None:
    """Write ``values`` into ``into`` of another type, rounded once to nearest even, or add them to it before."""
    types: dict[str, Any] = {"REAL": np.float32, "GRADIENT": values.dtype, "WORKING": into.dtype}
    CUDA_SOURCE.launch("convert", *elementwise(values.size, PACK), values, into, values.size, int(add), **types)


LANES: Final = 512  # sums of squares side by side: enough rows of vector registers to hide the time of an addition


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
    """Update the moments with ``scale * gradient`` and turn the gradient into the step of Adam, plus decay.

    m = beta1 m + (1 - beta1) g;  v = beta2 v + (1 - beta2) g^2;  u = m^ / (sqrt(v^) + epsilon) + decay w,
    where m^ and v^ are corrected for their start at 0 by ``count`` applied updates; with 0 of them they are m and v.
    ``gradient`` holds u afterwards.
    """
    scalars = (scale, *moment_factors(betas, count), epsilon, decay)
    run = _adam_ufuncs if is_device(weights) else _adam_loop
    run(weights, gradient, m, v, *map(weights.dtype.type, scalars))


def moment_factors(betas: tuple[float, float], count: int) -> tuple[float, ...]:
    """Return beta1, 1 - beta1, beta2, 1 - beta2, and what corrects both moments after ``count`` updates (0: 1)."""
    beta1, beta2 = betas
    corrections = (1.0 / (1.0 - beta1**count), 1.0 / (1.0 - beta2**count)) if count else (1.0, 1.0)
    return beta1, 1.0 - beta1, beta2, 1.0 - beta2, *corrections


@jit
def adam_step(m, v, i, g, beta1, rest1, beta2, rest2, correct1, correct2, epsilon):  # type: ignore[no-untyped-def]
    """Update the moments of element ``i`` with the gradient ``g``; return m^ / (sqrt(v^) + epsilon). For kernels."""
    mean = m[i] * beta1 + g * rest1
    square = v[i] * beta2 + g * g * rest2
    m[i] = mean
    v[i] = square
    # np.divide, since the check of `/` for a zero divisor keeps the loop from being vectorised (8 times slower)
    return np.divide(mean * correct1, math.sqrt(square * correct2) + epsilon)


@jit
def _adam_loop(weights, gradient, m, v, scale, beta1, rest1, beta2, rest2, correct1, correct2, epsilon, decay):  # type: ignore[no-untyped-def]
    for i in range(weights.size):
        step = adam_step(m, v, i, gradient[i] * scale, beta1, rest1, beta2, rest2, correct1, correct2, epsilon)
        gradient[i] = step + decay * weights[i]


def _adam_ufuncs(weights, gradient, m, v, scale, beta1, rest1, beta2, rest2, correct1, correct2, epsilon, decay):  # type: ignore[no-untyped-def]
    # As the loop above, operation by operation; once it is in m, the gradient's memory holds g^2 and the denominator.
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
    """Update ``velocity`` = momentum velocity + g, with g = ``scale * gradient`` + decay w.

    ``gradient`` holds the step afterwards: the velocity, or g + momentum velocity with ``nesterov``.
    """
    own, ahead = shares_of_step(momentum, nesterov)
    run = _momentum_ufuncs if is_device(weights) else _momentum_loop
    run(weights, gradient, velocity, *map(weights.dtype.type, (scale, momentum, own, ahead, decay)))


def shares_of_step(momentum: float, nesterov: bool) -> tuple[float, float]:
    """Return (own, ahead) of step = own g + ahead velocity: the heavy ball's, or Nesterov's."""
    return (1.0, momentum) if nesterov else (0.0, 1.0)


@jit
def _momentum_loop(weights, gradient, velocity, scale, momentum, own, ahead, decay):  # type: ignore[no-untyped-def]
    for i in range(weights.size):
        g = gradient[i] * scale + decay * weights[i]
        fast = momentum * velocity[i] + g
        velocity[i] = fast
        gradient[i] = own * g + ahead * fast


def _momentum_ufuncs(weights, gradient, velocity, scale, momentum, own, ahead, decay):  # type: ignore[no-untyped-def]
    gradient *= scale
    gradient += decay * weights
    velocity *= momentum
    velocity += gradient
    gradient *= own
    gradient += ahead * velocity


def scale_in_place(gradient: Array, scale: float) -> None:
    """Multiply ``gradient`` by ``scale``."""
    if scale != 1.0:
        gradient *= gradient.dtype.type(scale)


def descend(weights: Array, step: Array, rate: float) -> None:
    """Subtract ``rate * step`` from ``weights``; ``step`` is kept."""
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
    """Update ``velocity`` = momentum velocity + rate (gradient + decay w), and subtract it from ``weights``.

    On the host: a GPU has `launch_update`.
    """
    _velocity_loop(weights, gradient, velocity, *map(weights.dtype.type, (rate, momentum, decay)))


@jit
def _velocity_loop(weights, gradient, velocity, rate, momentum, decay):  # type: ignore[no-untyped-def]
    for i in range(weights.size):
        fast = momentum * velocity[i] + rate * (gradient[i] + decay * weights[i])
        velocity[i] = fast
        weights[i] -= fast


def sum_of_squares(values: Array) -> Any:
    """Return the sum of squares in float64: a float, or an array () on the GPU, which the caller need not wait for."""
    if is_device(values):
        return launch_sum_of_squares(values)
    sums = np.zeros(LANES)
    add_squares(values, sums, 0)
    return float(total(sums))


# Sums that are far apart are added in vector registers, whichever the CPU has, and in one order. fastmath would be as
# fast, in an order that differs between CPUs: replicas on different ones would then take different steps.
@jit
def add_squares(values: Any, sums: Any, phase: Any) -> None:
    """Add the square of element i of ``values``, on the host, to ``sums[(phase + i) % LANES]``, in float64.

    ``values`` are float32 or float64. So a tensor that comes in blocks gives the bits of one that comes whole.
    """
    # Up to the next lane 0, from the lane at which the block before ended; from there on element k of a row goes to
    # lane k, without a modulus. The last row may be shorter.
    head = min((LANES - phase) % LANES, values.size)
    row = values[:head]
    place = sums[phase : phase + head]
    for k in range(head):
        x = np.float64(row[k])
        place[k] += x * x
    for start in range(head, values.size, LANES):
        row = values[start : min(start + LANES, values.size)]
        for k in range(row.size):
            x = np.float64(row[k])
            sums[k] += x * x


@jit
def total(sums: Any) -> Any:  # (LANES,)
    """Return the sum of the lanes of `add_squares`; ``sums`` are undefined afterwards."""
    half = LANES // 2  # a fixed tree, whose additions are independent in each level
    while half:
        left, right = sums[:half], sums[half : 2 * half]
        for k in range(half):
            left[k] += right[k]
        half //= 2
    return sums[0]


def round_into(master: Array, working: Array) -> None:
    """Write ``master`` into ``working``, rounded once to nearest even; the dtypes may differ.

    What is beyond the range of ``working`` becomes infinite.
    """
    if master.dtype != np.float32 or not is_16bit_float(working.dtype):
        working[...] = master
    elif is_device(master):
        launch_convert(master, working)
    else:
        half_precision.round_on_host(working, master)


def widen(working: Array, wide: Array) -> None:
    """Write the 16-bit floats of ``working`` into the float32 ``wide``; exact."""
    if is_device(working):
        launch_convert(working, wide)
    else:
        half_precision.widen_on_host(working, wide)


def add_rounded(working: Array, addend: Array) -> None:
    """Add the float32 ``addend`` to the 16-bit ``working`` in float32, and round the sum once. ``addend`` is kept."""
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
    """Return arguments of the two sets of types that training uses: float32 and float64."""
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
