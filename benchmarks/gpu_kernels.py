"""The elementwise and row kernels of a GPU against the time that their bytes take on its memory.

    python benchmarks/gpu_kernels.py [--dtype bfloat16] [--tokens 8192] [--hidden 1024] [-o gpu_kernels.h5]

The floor is the bandwidth of copying device memory that is larger than the caches, measured in the same run between the
kernels, times the bytes that a kernel has to read and write once. Times are of events on the stream, medians over
rounds in which all kernels take their turn. Prints one JSON line a kernel: microseconds, the floor, and their ratio
(1.0 is the floor; the target is at most 1.3). Raw times go to the HDF5 file. Without a GPU it leaves with 69.
"""

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from hpcdist.arrays import backend
from hpcdist.arrays.dtypes import FLOATS, accumulation_dtype, dtype_of
from hpcdist.arrays.gpu import device
from hpcdist.errors import HpcdistError
from hpcdist.hdf5 import files
from hpcdist.models.layers import cuda_kernels as models
from hpcdist.optim.update import kernels as optim
from hpcdist.telemetry.provenance import provenance

SCHEMA, VERSION = "hpcdist.benchmark.gpu_kernels", 1
VOCABULARY = 256
COPIED = 1 << 30  # bytes of the copy that measures the bandwidth
Case = tuple[Callable[[], Any], int]  # a launch, and the bytes that it moves at least


def cases(dtype: np.dtype, tokens: int, hidden: int) -> dict[str, Case]:
    """Return the kernels at the sizes of a block of a GPT, 4 hidden wide in the middle."""
    exact, drawn = accumulation_dtype(dtype), np.random.default_rng(0)

    def made(*shape: int, kind: Any = dtype) -> Any:
        return backend.place(drawn.standard_normal(shape, np.float32).astype(kind), "gpu")

    x, y, dx = (made(tokens, hidden) for _ in range(3))
    wide, out = made(tokens, 4 * hidden), made(tokens, 4 * hidden)
    scale, bias, dscale, dbias = (made(hidden) for _ in range(4))
    statistics, turns = made(tokens, 2, kind=exact), made(tokens, 64, kind=exact)
    logits, sums = made(tokens, VOCABULARY), made(tokens, 2, kind=exact)
    targets = backend.place(drawn.integers(0, VOCABULARY, tokens), "gpu")
    count, e, r = tokens * hidden, dtype.itemsize, exact.itemsize
    weights, m, v = (made(8 * count, kind=exact) for _ in range(3))
    v *= v
    gradient = made(8 * count)
    adam = (1.0, 0.9, 0.1, 0.99, 0.01, 1.0, 1.0, 1e-8, 0.1, 1e-4)
    whole, half = x.reshape(1, tokens, hidden), out.reshape(-1)[: 2 * count].reshape(tokens, -1)
    sums_of_columns = made(4 * hidden)
    return {
        "gelu": (lambda: models.gelu(wide, out), 8 * count * e),
        "gelu backward": (lambda: models.gelu_backward(out, wide), 12 * count * e),
        "swiglu": (lambda: models.swiglu(wide, half), 6 * count * e),
        "residual": (lambda: models.add(y, x), 3 * count * e),
        "norm": (lambda: models.norm(x, scale, bias, 1e-5, y, statistics), 2 * count * e + 2 * tokens * r),
        "norm backward": (
            lambda: models.norm_backward(y, x, scale, statistics, dx, dscale, dbias),
            4 * count * e + 2 * tokens * r,
        ),
        "rotary": (lambda: models.rotate(whole, hidden // 64 * 64, turns, 1), 2 * count * e + tokens * 64 * r),
        "bias gradient": (lambda: models.column_sums(wide, sums_of_columns, False), 4 * count * e),
        "cross entropy": (lambda: models.cross_entropy(logits, targets, sums), logits.nbytes),
        "adamw": (
            lambda: optim.launch_adam(weights, gradient, m, v, gradient if e != r else None, *adam),
            8 * count * (6 * r + e + (e if e != r else 0)),
        ),
        "sum of squares": (lambda: optim.launch_sum_of_squares(gradient), gradient.nbytes),
    }


def timed_s(launch: Callable[[], Any]) -> float:
    """Return the seconds between two events around a launch."""
    cuda = device.cupy().cuda
    begin, end = cuda.Event(), cuda.Event()
    begin.record()
    launch()
    end.record()
    end.synchronize()
    return float(cuda.get_elapsed_time(begin, end)) / 1e3


def measure(found: dict[str, Case], rounds: int, copied: int = COPIED) -> dict[str, np.ndarray]:
    """Return the seconds of each round, of each kernel and of the copy, whose bytes are read and written."""
    source, target = (backend.zeros(copied, np.dtype(np.uint8), "gpu") for _ in range(2))

    def copy() -> None:
        target[...] = source

    everything = {"copy": copy} | {name: launch for name, (launch, _) in found.items()}
    for launch in everything.values():  # compiled, and memory taken
        launch()
        launch()
    times: dict[str, list[float]] = {name: [] for name in everything}
    for _ in range(rounds):
        for name, launch in everything.items():
            times[name].append(timed_s(launch))
    return {name: np.array(values) for name, values in times.items()}


def report(found: dict[str, Case], times: dict[str, np.ndarray], copied: int = COPIED) -> list[dict[str, Any]]:
    """Return a row for each kernel."""
    bandwidth = 2 * copied / float(np.median(times["copy"]))
    rows = []
    for name, (_, nbytes) in found.items():
        taken_s, floor_s = float(np.median(times[name])), nbytes / bandwidth
        figures = {"us": taken_s * 1e6, "floor_us": floor_s * 1e6, "ratio": taken_s / floor_s}
        rows.append({"kernel": name, "bytes": nbytes, **{key: round(value, 3) for key, value in figures.items()}})
    return [{"copy_gb_per_s": round(bandwidth / 1e9, 1)}, *rows]


def write(path: Path, times: dict[str, np.ndarray], arguments: dict[str, Any], anonymous: bool) -> None:
    """Write the times of all rounds with the provenance."""
    with files.edit(path, SCHEMA, VERSION) as file:
        for name, values in times.items():
            key = name.replace(" ", "_") + "_s"
            file[key] = values
            file[key].attrs.update({"units": "s", "dims": "rounds"})
        file.attrs.update(provenance(anonymous=anonymous) | arguments)
    print(f"raw times are in {path}", file=sys.stderr)


def main(arguments: list[str] | None = None) -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", choices=sorted(FLOATS), default="bfloat16")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--copied", type=int, default=COPIED, help="bytes of the copy that gives the bandwidth")
    parser.add_argument("-o", "--output", type=Path, help="HDF5 file for the raw times")
    parser.add_argument("--anonymous", action="store_true", help="leave host names out of the file")
    options = parser.parse_args(arguments)
    try:
        device.choose(0)
        found = cases(dtype_of(options.dtype), options.tokens, options.hidden)
        times = measure(found, options.rounds, options.copied)
    except HpcdistError as error:
        print(f"gpu_kernels: {error}", file=sys.stderr)
        raise SystemExit(error.exit_code) from None
    for row in report(found, times, options.copied):
        print(json.dumps(row))
    if options.output is not None:
        sizes = {"dtype": options.dtype, "tokens": options.tokens, "hidden": options.hidden}
        write(options.output, times, sizes, options.anonymous)


if __name__ == "__main__":
    main()
