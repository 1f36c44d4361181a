"""Attention compared with PyTorch's fused attention, forward and backward, on one thread, alternating in one run.

    python -m benchmarks attention
    python -m benchmarks attention --context 256 4096 --full -o attention.h5

Every context has the same number of tokens. The study compares outputs and gradients, then times both libraries in CPU
seconds (medians over the rounds); "x pytorch" below 1 is faster. GFLOP/s count the products of visible scores: two
forward and four backward, without recomputed scores. "held" is the memory of hpcdist's arena after forward and
backward; "square" is the size of the probabilities, which it does not store. Needs the extra `reference`.
"""

import argparse
import time
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np

from benchmarks import harness
from benchmarks.harness import Results
from hpcdist.arrays.backend import Ledger
from hpcdist.comm.start import Session
from hpcdist.models.arena import Arena
from hpcdist.models.attention.flash import LocalAttention
from hpcdist.reporting.table import aligned

SCHEMA, COMMITTED = "hpcdist.benchmark.attention", "training/2026-11-22-attention.h5"
SMALL = {"context": [64, 256, 1024], "rounds": 5}

NAMES: Final = ("hpcdist", "pytorch")
SIZES: Final = {"tokens": 2048, "heads": 4, "head_size": 64}
AGREE: Final = 1e-4  # largest norm of the difference, relative to the array's norm, in float32
Pass = Callable[[], tuple[np.ndarray, np.ndarray, float, float]]  # returns output, gradient, forward s, backward s
OPTIONS: Final = {"context": [64, 128, 256, 512, 1024, 2048], **SIZES, "full": False, "rounds": 15}


def ours(qkv: np.ndarray, dy: np.ndarray, size: int, causal: bool, arena: Arena) -> Pass:

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
    import torch

    torch.set_num_threads(1)
    batch, context, columns = qkv.shape
    inputs, output_gradient = torch.from_numpy(qkv).requires_grad_(), torch.from_numpy(dy)

    def run() -> tuple[np.ndarray, np.ndarray, float, float]:
        inputs.grad = None
        start = time.process_time()
        q, k, v = inputs.view(batch, context, 3, columns // 3 // size, size).permute(2, 0, 3, 1, 4)
        y = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)
        y = y.transpose(1, 2).reshape(batch, context, columns // 3)
        middle = time.process_time()
        y.backward(output_gradient)
        end = time.process_time()
        assert inputs.grad is not None
        return y.detach().numpy(), inputs.grad.numpy(), middle - start, end - middle

    return run


def measured(context: int, chosen: argparse.Namespace) -> tuple[np.ndarray, int]:
    """Return median seconds (library, forward or backward), and the bytes of hpcdist's arena."""
    batch, size, causal = max(1, chosen.tokens // context), chosen.head_size, not chosen.full
    rng, columns = np.random.default_rng(context), chosen.heads * chosen.head_size
    qkv = rng.standard_normal((batch, context, 3 * columns)).astype(np.float32)
    dy = rng.standard_normal((batch, context, columns)).astype(np.float32)
    ledger = Ledger()
    passes = dict(zip(NAMES, (ours(qkv, dy, size, causal, Arena(ledger)), theirs(qkv, dy, size, causal)), strict=True))
    both = [run()[:2] for run in passes.values()]
    for result, reference in zip(*both, strict=True):
        apart = np.linalg.norm(result - reference) / np.linalg.norm(reference)
        assert apart < AGREE, f"context {context}: the libraries differ by {apart:.1e} of the norm"
    values = harness.alternate({name: lambda run=run: run()[2:] for name, run in passes.items()}, chosen.rounds)
    return np.median(np.array(list(values.values())), axis=1), ledger.current["activations"]


def measure(chosen: argparse.Namespace, session: Session) -> Results:
    import torch

    medians, held = zip(*(measured(context, chosen) for context in chosen.context), strict=True)
    arrays = {"cpu_s": np.array(medians), "held_bytes": np.array(held), "context": np.array(chosen.context)}
    about = {name: getattr(chosen, name) for name in (*SIZES, "full", "rounds")}
    about |= {"library": ",".join(NAMES), "torch": str(torch.__version__)}
    dims = {"cpu_s": "context, library, (forward, backward)", "held_bytes": "context", "context": "context"}
    return Results(arrays, dims, about)


def ratios(results: Results) -> harness.Ratios:
    both = results.arrays["cpu_s"].sum(axis=2)
    contexts = results.arrays["context"].tolist()
    return {f"context {context}": times[:1] / times[1] for context, times in zip(contexts, both, strict=True)}


def lines(results: Results) -> Sequence[str]:
    titles = [f"{name} {phase} ms" for name in NAMES for phase in ("fwd", "bwd")]
    rows = [["", *titles, "x pytorch", "held MiB", "square MiB"]]
    about = results.attributes
    for (name, ratio), times, held, context in zip(ratios(results).items(), *results.arrays.values(), strict=True):
        square = max(1, about["tokens"] // context) * about["heads"] * context * context * 4 / 2**20
        cells = [*(f"{1e3 * value:.2f}" for value in times.reshape(-1)), f"{ratio[0]:.3f}"]
        rows.append([name, *cells, f"{held / 2**20:.1f}", f"{square:.1f}"])
    return aligned(rows)
