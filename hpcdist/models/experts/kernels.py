"""Launches of the CUDA kernels of a mixture of experts (``models/cuda/experts.cu``).

Each function does the same as the CPU loop of its name in `hpcdist.models.experts.router` or `mixture`. No function
waits for the GPU. Arrays are contiguous.
"""

from pathlib import Path
from typing import Any, Final

import numpy as np

from hpcdist.arrays import backend
from hpcdist.arrays.backend import Array
from hpcdist.arrays.gpu.kernels import KernelSource, elementwise, width_of

EXPERTS: Final = KernelSource(Path(__file__).parents[1] / "cuda" / "experts.cu")
WARPS: Final = 4  # per block


def _by_warps(name: str, warps: int, *args: Any, real: Any) -> None:
    EXPERTS.launch(name, -(-warps // WARPS), 32 * WARPS, *args, REAL=real)


def choose(logits: Array, bias: Array, sigmoid: bool, chosen: Array, gates: Array) -> None:
    """Choose experts for each token: write expert indices to ``chosen`` and weights to ``gates``. On a GPU.

    ``bias``: float64 per expert, added to the scores for the choice only. ``sigmoid``: False for softmax scores.
    """
    # The experts with the largest sums of score and `bias` are chosen.
    tokens, experts = logits.shape
    _by_warps("choose", tokens, logits, bias, chosen, gates, tokens, experts, chosen.shape[1], int(sigmoid),
              real=logits.dtype)  # fmt: skip


def count(chosen: Array, runs: Array, counts: Array) -> None:
    """Write to ``counts[s, r, e]`` the number of tokens in the range ``runs[s, r]`` that chose expert e. On a GPU.

    ``chosen[t, j]``: choice j of token t. ``runs[s, r]``: range r [first, end) of tokens of sample s.
    """
    _by_warps("count_choices", counts.size, chosen, runs, counts, counts.size, counts.shape[-1], chosen.shape[1],
              real=np.float32)  # fmt: skip


def place(chosen: Array, runs: Array, table: Array, places: Array) -> None:
    """Write to ``places[t, j]`` the buffer row of token t for expert ``chosen[t, j]``. On a GPU.

    ``runs[s, r]``: a range [first, end) of tokens of sample s. ``table[s, r, e]``: first row and maximum number of rows
    for expert e in this range. ``places`` is unchanged for a full expert.
    """
    n = table.size // 2
    _by_warps("place_choices", n, chosen, runs, table, places, n, table.shape[-2], chosen.shape[1],
              real=np.float32)  # fmt: skip


def choose_backward(
    logits: Array, chosen: Array, gates: Array, dgates: Array, sigmoid: bool, runs: Array, table: Array, figures: Array
) -> None:
    """Overwrite the router ``logits`` with their gradient, and add loss statistics to ``figures``. On a GPU.

    Arguments: as for `hpcdist.models.experts.router.gradient_of_logits`, and ``sigmoid`` as for `choose`.
    """
    (tokens, experts), (samples, pieces, _) = logits.shape, runs.shape
    if not tokens:
        return
    of_tokens = backend.namespace(logits).empty((tokens, 3), np.float64)
    _by_warps("choose_backward", tokens, logits, chosen, gates, dgates, runs, table, of_tokens, tokens, experts,
              chosen.shape[1], tokens // samples, pieces, int(sigmoid), real=logits.dtype)  # fmt: skip
    figures += of_tokens.sum(axis=0)


def spread(tokens: Array, places: Array, rows: Array) -> None:
    """Copy ``tokens[t]`` to ``rows[places[t, j]]`` for all t and j with ``places[t, j]`` >= 0. On a GPU."""
    n, each, hidden = places.size * tokens.shape[1], places.shape[1], tokens.shape[1]
    grid = elementwise(n, width_of(rows.dtype))
    EXPERTS.launch("spread", *grid, tokens, places, rows, n, each, hidden, REAL=rows.dtype)


def collect(rows: Array, places: Array, gates: Array, y: Array) -> None:
    """Set y[t] to the sum of ``gates[t, j] * rows[places[t, j]]`` over all j with ``places[t, j]`` >= 0. On a GPU."""
    _collect(rows, places, gates, y, gated=True)


def collect_onto(rows: Array, places: Array, dx: Array) -> None:
    """Add the gradients ``rows[places[t, j]]`` to dx[t] for all t and j with ``places[t, j]`` >= 0. On a GPU."""
    _collect(rows, places, rows, dx, gated=False)


def _collect(rows: Array, places: Array, gates: Array, y: Array, *, gated: bool) -> None:
    grid = elementwise(y.size, width_of(y.dtype))
    EXPERTS.launch("collect", *grid, rows, places, gates, y, y.size, places.shape[1], y.shape[1], int(gated),
                   int(not gated), REAL=y.dtype)  # fmt: skip


def collect_backward(dy: Array, places: Array, gates: Array, rows: Array, dgates: Array) -> None:
    """Overwrite the expert outputs ``rows`` with their gradient, and write the gradient of ``gates`` to ``dgates``.

    ``dy``: gradient of the layer's output. ``places[t, j]``: row for choice j of token t, or -1 if dropped. On a GPU.
    """
    _by_warps("collect_backward", places.size, dy, places, gates, rows, dgates, places.size, places.shape[1],
              rows.shape[1], real=rows.dtype)  # fmt: skip


def move_blocks(source: Array, target: Array, blocks: Array, longest: int, *, back: bool) -> None:
    """Copy groups of consecutive rows from ``source`` to ``target`` on a GPU.

    ``blocks``, of shape (n, 3): first source row, first target row, number of rows. ``longest``: rows of the largest
    group. Keyword-only ``back``: swap the first two columns.
    """
    wide, threads = elementwise(longest * source.shape[1], width_of(source.dtype))
    EXPERTS.launch("move_blocks", (wide, len(blocks)), threads, source, target, blocks, source.shape[1], int(back),
                   REAL=source.dtype)  # fmt: skip
