"""Elementwise and row kernels of a GPU, compared with the time to move their bytes through its memory.

    python -m benchmarks gpu.kernels --dtype bfloat16 --tokens 8192 --hidden 1024 -o gpu_kernels.h5

The floor is the number of bytes that a kernel must read and write once, divided by the bandwidth of a device copy
larger than the caches. The copy is measured between the kernels in the same run, by events on the stream. "x floor" is
1.0 at the floor; the target is at most 1.3. Exit code 69 without a GPU.
"""

import argparse
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np

from benchmarks import harness
from benchmarks.gpu.card import card, event_seconds
from benchmarks.harness import Results
from hpcdist.arrays import backend
from hpcdist.arrays.dtypes import FLOATS, accumulation_dtype, dtype_of
from hpcdist.arrays.gpu import device
from hpcdist.comm.start import Session
from hpcdist.models.layers import cuda_kernels as models
from hpcdist.optim import kernels as optim
from hpcdist.reporting.table import aligned

SCHEMA, ON = "hpcdist.benchmark.gpu_kernels", "gpu"

VOCABULARY: Final = 256
Case = tuple[Callable[[], Any], int]  # a launch, and the minimum number of bytes that it moves
OPTIONS: Final = {"dtype": dict.fromkeys(("bfloat16", *sorted(FLOATS))), "tokens": 8192, "hidden": 1024, "rounds": 50}
OPTIONS |= {"copied": 1 << 30}  # bytes of the copy that measures the bandwidth


def cases(dtype: np.dtype, tokens: int, hidden: int) -> dict[str, Case]:
    """Return the kernels with the array sizes of a GPT block (MLP width 4 * ``hidden``)."""
    exact, drawn = accumulation_dtype(dtype), np.random.default_rng(0)

    def random_array(*shape: int, kind: Any = dtype) -> Any:
        return backend.place(drawn.standard_normal(shape, np.float32).astype(kind), "gpu")

    x, y, dx = (random_array(tokens, hidden) for _ in range(3))
    wide, out = random_array(tokens, 4 * hidden), random_array(tokens, 4 * hidden)
    scale, bias, dscale, dbias = (random_array(hidden) for _ in range(4))
    statistics, turns = random_array(tokens, 2, kind=exact), random_array(tokens, 64, kind=exact)
    logits, sums = random_array(tokens, VOCABULARY), random_array(tokens, 2, kind=exact)
    targets = backend.place(drawn.integers(0, VOCABULARY, tokens), "gpu")
    count, e, r = tokens * hidden, dtype.itemsize, exact.itemsize
    weights, m, v = (random_array(8 * count, kind=exact) for _ in range(3))
    v *= v
    gradient = random_array(8 * count)
    adam = (1.0, 0.9, 0.1, 0.99, 0.01, 1.0, 1.0, 1e-8, 1e-4)
    ends = np.linspace(0, 8 * count, 149).astype(np.int64)  # as many tensors as 12 blocks of a GPT
    tables = np.stack([ends[:-1], ends[1:]], axis=1), np.tile([0.1, 1.0], (148, 1))
    options = optim.TensorOptions(*(backend.place(table, "gpu") for table in tables))
    whole, half = x.reshape(1, tokens, hidden), out.reshape(-1)[: 2 * count].reshape(tokens, -1)
    sums_of_columns = random_array(4 * hidden)
    copy = gradient if e != r else None
    step, partial = random_array(8 * count, kind=exact), optim.partial_sums(8 * count, 148)
    return {
        "gelu": (lambda: models.gelu(wide, out), 8 * count * e),
        "gelu backward": (lambda: models.gelu_backward(out, wide), 12 * count * e),
        "swiglu": (lambda: models.swiglu(wide, half), 6 * count * e),
        "residual": (lambda: models.add(y, x), 3 * count * e),
        "norm": (lambda: models.norm(x, scale, bias, 1e-5, y, statistics), 2 * count * e + 2 * tokens * r),
        "norm backward": (
            lambda: models.norm_backward(y, x, scale, statistics, dx, True, (dscale, True), (dbias, True)),
            4 * count * e + 2 * tokens * r,
        ),
        "rotary": (lambda: models.rotate(whole, hidden // 64 * 64, turns, 1), 2 * count * e + tokens * 64 * r),
        "bias gradient": (lambda: models.column_sums(wide, sums_of_columns, False), 4 * count * e),
        "cross entropy": (lambda: models.cross_entropy(logits, targets, sums), logits.nbytes),
        "adamw": (
            lambda: optim.launch_update("adam", weights, gradient, (m, v), copy, options, *adam),
            8 * count * (6 * r + e + (e if e != r else 0)),
        ),
        "lamb direction": (
            lambda: optim.launch_adam_direction(weights, gradient, m, v, step, partial, options, *adam[:-1]),
            8 * count * (6 * r + e),
        ),
        "lamb step": (
            lambda: optim.launch_update("descend", weights, step, (), copy, options),
            8 * count * (3 * r + (e if e != r else 0)),
        ),
        "sum of squares": (lambda: optim.launch_sum_of_squares(gradient), gradient.nbytes),
    }


def measure(chosen: argparse.Namespace, session: Session) -> Results:
    device.choose(0)
    kernels = cases(dtype_of(chosen.dtype), chosen.tokens, chosen.hidden)
    source, target = (backend.zeros(chosen.copied, np.dtype(np.uint8), "gpu") for _ in range(2))

    def copy() -> None:
        target[...] = source

    launches = {"copy": copy} | {name: launch for name, (launch, _) in kernels.items()}
    calls = {name: lambda launch=launch: event_seconds(launch) for name, launch in launches.items()}
    values = harness.alternate(calls, chosen.rounds)
    arrays = {f"{name.replace(' ', '_')}_s": np.array(samples) for name, samples in values.items()}
    about = {name: getattr(chosen, name) for name in ("dtype", "tokens", "hidden")} | card()
    moved = [2 * chosen.copied, *(nbytes for _, nbytes in kernels.values())]
    return Results(arrays, dict.fromkeys(arrays, "rounds"), about | {"kernels": ";".join(values), "bytes": moved})


def ratios(results: Results) -> harness.Ratios:
    copy_s, copied = results.arrays["copy_s"], int(results.attributes["bytes"][0])
    return {
        name: results.arrays[f"{name.replace(' ', '_')}_s"] / (copy_s * int(nbytes) / copied)
        for name, nbytes in zip(results.names("kernels")[1:], results.attributes["bytes"][1:], strict=True)
    }


def lines(results: Results) -> Sequence[str]:
    bandwidth = int(results.attributes["bytes"][0]) / np.median(results.arrays["copy_s"])
    rows = [["", "bytes", "us", "floor us", "x floor", "interval"]]
    for (name, samples), nbytes in zip(ratios(results).items(), results.attributes["bytes"][1:], strict=True):
        ratio, low, high = harness.interval(samples)
        us = 1e6 * np.median(results.arrays[f"{name.replace(' ', '_')}_s"])
        floor = f"{1e6 * int(nbytes) / bandwidth:.2f}"
        rows.append([name, f"{int(nbytes)}", f"{us:.2f}", floor, f"{ratio:.3f}", f"{low:.3f} to {high:.3f}"])
    return [f"{results.attributes['gpu']}: {bandwidth / 1e9:.1f} GB/s copied", *aligned(rows)]
