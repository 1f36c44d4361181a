"""Launches of the CUDA kernels of a mixture of experts; their source is ``models/cuda/experts.cu``.

Each does what the loop of its name in `hpcdist.models.experts.router` or `hpcdist.models.experts.mixture` does, in one
launch whatever the number of tokens and experts. Nothing here waits for the GPU. Arrays are contiguous.
"""

from pathlib import Path
from typing import Any, Final

import numpy as np

from hpcdist.arrays import backend
from hpcdist.arrays.backend import Array
from hpcdist.arrays.gpu.kernels import KernelSource, elementwise, width_of

EXPERTS: Final = KernelSource(Path(__file__).parents[1] / "cuda" / "experts.cu")
WARPS: Final = 4  # of a block


def _by_warps(name: str, warps: int, *args: Any, real: Any) -> None:
    """Launch ``name`` with a warp for each of its parts."""
    EXPERTS.launch(name, -(-warps // WARPS), 32 * WARPS, *args, REAL=real)


def choose(logits: Array, bias: Array, sigmoid: bool, chosen: Array, gates: Array) -> None:
    """Write the experts of each token, int32, and their gates; bias is float64."""
    tokens, experts = logits.shape
    _by_warps("choose", tokens, logits, bias, chosen, gates, tokens, experts, chosen.shape[1], int(sigmoid),
              real=logits.dtype)  # fmt: skip


def count(chosen: Array, runs: Array, counts: Array) -> None:
    """Write how many choices each expert has in each run."""
    _by_warps("count_choices", counts.size, chosen, runs, counts, counts.size, counts.shape[-1], chosen.shape[1],
              real=np.float32)  # fmt: skip


def place(chosen: Array, runs: Array, table: Array, places: Array) -> None:
    """Write the rows of the choices in ``runs``; ``table`` (..., experts, 2) has the first of each, and how many."""
    n = table.size // 2
    _by_warps("place_choices", n, chosen, runs, table, places, n, table.shape[-2], chosen.shape[1],
              real=np.float32)  # fmt: skip


def choose_backward(
    logits: Array, chosen: Array, gates: Array, dgates: Array, sigmoid: bool, runs: Array, table: Array, figures: Array
) -> None:
    """Overwrite the logits with their gradient, and add the figures of all tokens to ``figures`` (3,).

    ``table`` (samples, experts + 2) has shares and coefficients.
    """
    (tokens, experts), (samples, pieces, _) = logits.shape, runs.shape
    if not tokens:
        return
    of_tokens = backend.namespace(logits).empty((tokens, 3), np.float64)
    _by_warps("choose_backward", tokens, logits, chosen, gates, dgates, runs, table, of_tokens, tokens, experts,
              chosen.shape[1], tokens // samples, pieces, int(sigmoid), real=logits.dtype)  # fmt: skip
    figures += of_tokens.sum(axis=0)


def spread(tokens: Array, places: Array, rows: Array) -> None:
    """Write the token of each choice to its row."""
    n, each, hidden = places.size * tokens.shape[1], places.shape[1], tokens.shape[1]
    grid = elementwise(n, width_of(rows.dtype))
    EXPERTS.launch("spread", *grid, tokens, places, rows, n, each, hidden, REAL=rows.dtype)


def collect(rows: Array, places: Array, gates: Array, y: Array) -> None:
    """Write the sum of the rows of each token times their gates."""
    _collect(rows, places, gates, y, gated=True)


def collect_onto(rows: Array, places: Array, dx: Array) -> None:
    """Add the rows of each token to its own."""
    _collect(rows, places, rows, dx, gated=False)


def _collect(rows: Array, places: Array, gates: Array, y: Array, *, gated: bool) -> None:
    grid = elementwise(y.size, width_of(y.dtype))
    EXPERTS.launch("collect", *grid, rows, places, gates, y, y.size, places.shape[1], y.shape[1], int(gated),
                   int(not gated), REAL=y.dtype)  # fmt: skip


def collect_backward(dy: Array, places: Array, gates: Array, rows: Array, dgates: Array) -> None:
    """Overwrite the rows with their gradient, and write that of the gates, 0 of those that were dropped."""
    _by_warps("collect_backward", places.size, dy, places, gates, rows, dgates, places.size, places.shape[1],
              rows.shape[1], real=rows.dtype)  # fmt: skip


def move_blocks(source: Array, target: Array, blocks: Array, longest: int, *, back: bool) -> None:
    """Copy blocks of rows; ``blocks`` (n, 3) are first row there, first row here, and rows, at most ``longest``.

    ``back``: from here to there.
    """
    wide, threads = elementwise(longest * source.shape[1], width_of(source.dtype))
    EXPERTS.launch("move_blocks", (wide, len(blocks)), threads, source, target, blocks, source.shape[1], int(back),
                   REAL=source.dtype)  # fmt: skip
