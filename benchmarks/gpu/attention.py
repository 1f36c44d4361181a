"""Fused 16-bit attention on a GPU, forward and backward, compared with PyTorch's flash attention, by context length.

    python -m benchmarks gpu.attention
    python -m benchmarks gpu.attention --context 512 8192 --dtype float16 -o gpu_attention.h5 --anonymous

Every context has the same number of tokens. The study compares outputs and gradients, then times both libraries
alternately by events on their common stream. "x torch" below 1: hpcdist is faster. TFLOP/s count the products of
visible scores: two forward and five backward. Exit code 69 without a GPU or a CUDA build of PyTorch.
"""

import argparse
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np

from benchmarks import harness
from benchmarks.gpu.card import card, event_seconds
from benchmarks.harness import Results
from hpcdist.arrays import backend
from hpcdist.arrays.dtypes import dtype_of
from hpcdist.arrays.gpu import device
from hpcdist.bench.step.contenders import load_torch
from hpcdist.comm.start import Session
from hpcdist.errors import MissingCapabilityError
from hpcdist.models.arena import Arena
from hpcdist.models.attention.flash import LocalAttention
from hpcdist.reporting.table import aligned

SCHEMA, ON = "hpcdist.benchmark.gpu_attention", "gpu"

NAMES: Final = ("hpcdist", "torch")
AGREE: Final = {"bfloat16": 3e-2, "float16": 5e-3}  # largest norm of the difference, relative to the array's norm
OPTIONS: Final = {"context": [512, 1024, 2048, 4096, 8192, 16384], "tokens": 16384, "heads": 16, "head_size": 64}
OPTIONS |= {"rounds": 20, "dtype": AGREE, "where": dict.fromkeys(("cuda", "cpu"))}
Passes = tuple[Callable[[], Any], Callable[[], Any]]  # forward and backward; call them alternately


def ours(qkv: np.ndarray, dy: np.ndarray, size: int, arena: Arena) -> Passes:
    inputs, gradient = backend.place(qkv, "gpu"), backend.place(dy, "gpu")

    def forward() -> Any:
        return LocalAttention().forward(inputs, size, arena.saved(0), causal=True)

    def backward() -> Any:
        saved = arena.saved(0)
        result = LocalAttention().backward(gradient, saved)
        saved.release()
        return result

    return forward, backward


def theirs(qkv: np.ndarray, dy: np.ndarray, size: int, where: str) -> Passes:
    """Return PyTorch's passes, with the array layouts of hpcdist."""
    library = load_torch()
    flash = library.nn.attention.SDPBackend.FLASH_ATTENTION
    batch, context, columns = qkv.shape
    kind = getattr(library, str(qkv.dtype))
    inputs = library.from_numpy(qkv.astype(np.float32)).to(where, kind).requires_grad_()
    output_gradient = library.from_numpy(dy.astype(np.float32)).to(where, kind)
    outputs: list[Any] = []

    def forward() -> Any:
        q, k, v = inputs.view(batch, context, 3, columns // 3 // size, size).permute(2, 0, 3, 1, 4)
        with library.nn.attention.sdpa_kernel(flash):
            y = library.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        outputs[:] = [y.transpose(1, 2).reshape(batch, context, columns // 3)]
        return outputs[0].detach()

    def backward() -> Any:
        inputs.grad = None
        outputs.pop().backward(output_gradient)
        return inputs.grad

    return forward, backward


def on_host(values: Any) -> np.ndarray:
    if backend.is_device(values) and not hasattr(values, "detach"):
        return backend.to_host(values).astype(np.float32)
    return np.asarray(values.float().cpu())


def measured(context: int, chosen: argparse.Namespace) -> np.ndarray:
    """Check and time a context length: seconds (library, rounds, (forward, backward))."""
    batch, size = max(1, chosen.tokens // context), chosen.head_size
    rng, columns, kind = np.random.default_rng(context), chosen.heads * size, dtype_of(chosen.dtype)
    qkv = rng.standard_normal((batch, context, 3 * columns), np.float32).astype(kind)
    dy = rng.standard_normal((batch, context, columns), np.float32).astype(kind)
    sides = dict(zip(NAMES, (ours(qkv, dy, size, Arena(on="gpu")), theirs(qkv, dy, size, chosen.where)), strict=True))
    both = [[on_host(call()) for call in passes] for passes in sides.values()]
    for what, result, reference in zip(("output", "gradient"), *both, strict=True):
        apart = np.linalg.norm(result - reference.reshape(result.shape)) / np.linalg.norm(reference)
        if not apart <= AGREE[chosen.dtype]:
            raise SystemExit(f"context {context}: the {what} differs by {apart:.1e} of its norm from PyTorch's")
    calls = {name: lambda passes=passes: [event_seconds(call) for call in passes] for name, passes in sides.items()}
    return np.array(list(harness.alternate(calls, chosen.rounds).values()))


def measure(chosen: argparse.Namespace, session: Session) -> Results:
    device.choose(0)
    if chosen.where == "cuda" and not load_torch().cuda.is_available():
        raise MissingCapabilityError("this PyTorch sees no GPU; install one that is built for CUDA")
    times = np.array([measured(context, chosen) for context in chosen.context])
    about = {name: getattr(chosen, name) for name in ("tokens", "heads", "head_size", "dtype")} | card()
    about |= {"library": ",".join(NAMES), "torch": str(load_torch().__version__)}
    dims = {"time_s": "context, library, rounds, (forward, backward)", "context": "context"}
    return Results({"time_s": times, "context": np.array(chosen.context)}, dims, about)


def ratios(results: Results) -> harness.Ratios:
    both = results.arrays["time_s"].sum(axis=3)
    contexts = results.arrays["context"].tolist()
    return {f"context {context}": times[0] / times[1] for context, times in zip(contexts, both, strict=True)}


def lines(results: Results) -> Sequence[str]:
    about = results.attributes
    titles = [f"{name} {phase}" for name in NAMES for phase in ("fwd us", "bwd us", "TFLOP/s")]
    rows = [["", *titles, "x torch", "interval"]]
    for (name, samples), times, context in zip(ratios(results).items(), *results.arrays.values(), strict=True):
        batch = max(1, int(about["tokens"]) // context)
        scores = batch * int(about["heads"]) * context * (context + 1) / 2
        cells: list[str] = []
        for forward, backward in np.median(times, axis=1):
            flops = 7 * 2 * scores * int(about["head_size"]) / (forward + backward)
            cells += [f"{1e6 * forward:.1f}", f"{1e6 * backward:.1f}", f"{flops / 1e12:.1f}"]
        ratio, low, high = harness.interval(samples)
        rows.append([name, *cells, f"{ratio:.3f}", f"{low:.3f} to {high:.3f}"])
    return aligned(rows)
