"""Attention against PyTorch's fused one, forward and backward, one thread each, alternating in one run.

    OMP_NUM_THREADS=1 python benchmarks/attention.py
    OMP_NUM_THREADS=1 python benchmarks/attention.py --context 256 4096 --full -o attention.h5 --plot attention.png

Every context has the same number of tokens, so work grows with the context alone. Outputs and gradients of both are
compared first. Times are CPU seconds, medians over the rounds. "GFLOP/s" counts what a causal attention has to do, two
products forward and four back over the scores that are not hidden, for both: computing scores again does not count.
"held" is what our arena has taken behind forward and backward, "square" the probabilities that are not in it. Needs the
extra `reference`.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from hpcdist.arrays.memory import Ledger
from hpcdist.hdf5 import files
from hpcdist.models.attention.flash import LocalAttention
from hpcdist.models.runtime.arena import Arena
from hpcdist.telemetry.provenance import provenance

SCHEMA, VERSION = "hpcdist.benchmark.attention", 1
NAMES = "hpcdist", "pytorch"
AGREE = 1e-4  # norm of the difference over that of the array, in float32
Pass = Callable[[], tuple[np.ndarray, np.ndarray, float, float]]  # output, gradient, seconds forward and back


def arguments() -> argparse.Namespace:
    """Return the command line, or end with its help."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--context", type=int, nargs="+", default=[64, 128, 256, 512, 1024, 2048])
    parser.add_argument("--tokens", type=int, default=2048, help="of all samples; a context that is longer has one")
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--head-size", type=int, default=64)
    parser.add_argument("--full", action="store_true", help="all rows see all others")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("-o", "--output", type=Path, help="HDF5 file to write; must not exist")
    parser.add_argument("--plot", type=Path, help="picture to write")
    parser.add_argument("--anonymous", action="store_true", help="leave host names out of the file")
    chosen = parser.parse_args()
    if os.environ.get("OMP_NUM_THREADS") != "1":  # numpy's BLAS has read it by now
        parser.error("set OMP_NUM_THREADS=1: one thread each is compared")
    return chosen


def ours(qkv: np.ndarray, dy: np.ndarray, size: int, causal: bool, arena: Arena) -> Pass:
    """Return a function that does forward and backward."""

    def run() -> tuple[np.ndarray, np.ndarray, float, float]:
        saved, start = arena.saved(0), time.process_time()
        y = LocalAttention().forward(qkv, size, saved, causal=causal)
        middle = time.process_time()
        gradient = LocalAttention().backward(dy, saved)
        end = time.process_time()
        assert isinstance(gradient, np.ndarray)
        saved.release()
        return y, gradient, middle - start, end - middle

    return run


def theirs(qkv: np.ndarray, dy: np.ndarray, size: int, causal: bool) -> Pass:
    """The same in PyTorch, from qkv to the layout of y."""
    batch, context, columns = qkv.shape
    given, dgiven = torch.from_numpy(qkv).requires_grad_(), torch.from_numpy(dy)

    def run() -> tuple[np.ndarray, np.ndarray, float, float]:
        given.grad = None
        start = time.process_time()
        q, k, v = given.view(batch, context, 3, columns // 3 // size, size).permute(2, 0, 3, 1, 4)
        y = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)
        y = y.transpose(1, 2).reshape(batch, context, columns // 3)
        middle = time.process_time()
        y.backward(dgiven)
        end = time.process_time()
        assert given.grad is not None
        return y.detach().numpy(), given.grad.numpy(), middle - start, end - middle

    return run


def measured(context: int, options: argparse.Namespace) -> tuple[np.ndarray, int]:
    """Return medians (library, forward or backward) in seconds, and the bytes of our arena."""
    batch, size, causal = max(1, options.tokens // context), options.head_size, not options.full
    rng, columns = np.random.default_rng(context), options.heads * options.head_size
    qkv = rng.standard_normal((batch, context, 3 * columns)).astype(np.float32)
    dy = rng.standard_normal((batch, context, columns)).astype(np.float32)
    ledger = Ledger()
    passes = ours(qkv, dy, size, causal, Arena(ledger)), theirs(qkv, dy, size, causal)
    (y, gradient, *_), (other, expected, *_) = (run() for run in passes)
    for one, reference in ((y, other), (gradient, expected)):
        apart = np.linalg.norm(one - reference) / np.linalg.norm(reference)
        assert apart < AGREE, f"context {context}: the libraries differ by {apart:.1e} of the norm"
    times: list[list[tuple[float, float]]] = [[], []]
    for number in range(options.rounds + 1):
        for found, run in zip(times, passes, strict=True):
            *_, forward, backward = run()
            if number:  # the first round warms up
                found.append((forward, backward))
    medians = [[statistics.median(phase) for phase in zip(*found, strict=True)] for found in times]
    return np.array(medians), ledger.current["activations"]


def flop(context: int, options: argparse.Namespace) -> tuple[int, int]:
    """Return the operations that forward and backward have to do."""
    batch = max(1, options.tokens // context)
    scores = context * context if options.full else context * (context + 1) // 2
    product = 2 * batch * options.heads * options.head_size * scores
    return 2 * product, 4 * product


def main() -> None:
    """Measure, print and write."""
    options = arguments()
    torch.set_num_threads(1)
    for path in (options.output, options.plot):
        if path is not None:
            files.check_place(path)
    titles = [f"{name} {phase}" for name in NAMES for phase in ("fwd", "bwd")]
    print(
        f"{'context':>7}" + "".join(f"{title:>13}" for title in titles) + f"{'ratio':>7}{'held MiB':>10}{'square':>8}"
    )
    seconds, held = np.zeros((len(options.context), 2, 2)), np.zeros(len(options.context), np.int64)
    for place, context in enumerate(options.context):
        seconds[place], held[place] = measured(context, options)
        speeds = np.array(flop(context, options)) / seconds[place] / 1e9
        ratio = seconds[place, 1].sum() / seconds[place, 0].sum()
        square = max(1, options.tokens // context) * options.heads * context * context * 4 / 2**20
        cells = "".join(f"{speed:13.1f}" for speed in speeds.reshape(-1))
        print(f"{context:>7}{cells}{ratio:7.2f}{held[place] / 2**20:10.1f}{square:8.1f}", flush=True)
    print("GFLOP/s; ratio of speeds, above 1: hpcdist is faster")
    if options.output is not None:
        write(options, seconds, held)
    if options.plot is not None:
        plot(options, seconds)


def write(options: argparse.Namespace, seconds: np.ndarray, held: np.ndarray) -> None:
    """Write all medians."""
    given = {name: getattr(options, name) for name in ("tokens", "heads", "head_size", "full", "rounds")}
    files.write_contiguous(
        options.output,
        {"cpu_s": seconds, "held_bytes": held, "context": np.array(options.context)},
        {**provenance(anonymous=options.anonymous), **given, "torch": str(torch.__version__)},
        {
            "cpu_s": {"dims": "context, library, phase", "units": "s", "last": "forward, backward"}
            | {"library": ",".join(NAMES)},
            "held_bytes": {"dims": "context", "units": "By"},
            "context": {"dims": "context", "units": "tokens"},
        },
        schema=SCHEMA,
        version=VERSION,
    )
    print(f"all medians are in {options.output}")


def plot(options: argparse.Namespace, seconds: np.ndarray) -> None:
    """Draw GFLOP/s over the context."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    work = np.array([flop(context, options) for context in options.context])
    for library, name in enumerate(NAMES):
        for phase, (title, style) in enumerate((("forward", "-"), ("backward", "--"))):
            speeds = work[:, phase] / seconds[:, library, phase] / 1e9
            axes.plot(options.context, speeds, style, marker="o", color=f"C{library}", label=f"{name}, {title}")
    axes.set_xscale("log", base=2)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("context (tokens)")
    axes.set_ylabel("GFLOP/s of one thread")
    axes.legend()
    figure.savefig(options.plot)
    print(f"the picture is {options.plot}")


if __name__ == "__main__":
    main()
