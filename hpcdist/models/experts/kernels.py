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
    """Choose experts for each token on a GPU, like `hpcdist.models.experts.router.choose`."""
    # The experts with the largest sums of score and `bias` are chosen.
    tokens, experts = logits.shape
    _by_warps("choose", tokens, logits, bias, chosen, gates, tokens, experts, chosen.shape[1], int(sigmoid),
              real=logits.dtype)  # fmt: skip


def count(chosen: Array, token_ranges: Array, counts: Array) -> None:
    """On a GPU, write to ``counts[s, r, e]`` the number of tokens in ``token_ranges[s, r]`` that chose expert e."""
    _by_warps("count_choices", counts.size, chosen, token_ranges, counts, counts.size, counts.shape[-1],
              chosen.shape[1], real=np.float32)  # fmt: skip


def place(chosen: Array, token_ranges: Array, table: Array, buffer_rows: Array) -> None:
    """On a GPU, write to ``buffer_rows[t, j]`` the row of choice j of token t, unless the chosen expert is full.

    ``chosen[t, j]``: index of the expert. ``table[s, r, e]``: first row and maximum number of rows for expert e in
    ``token_ranges[s, r]``.
    """
    n = table.size // 2
    _by_warps("place_choices", n, chosen, token_ranges, table, buffer_rows, n, table.shape[-2], chosen.shape[1],
              real=np.float32)  # fmt: skip


def choose_backward(
    logits: Array,
    chosen: Array,
    gates: Array,
    dgates: Array,
    sigmoid: bool,
    token_ranges: Array,
    table: Array,
    loss_sums: Array,
) -> None:
    """Overwrite the router ``logits`` with their gradient on a GPU, like `experts.router.gradient_of_logits`."""
    (tokens, experts), (samples, pieces, _) = logits.shape, token_ranges.shape
    if not tokens:
        return
    of_tokens = backend.namespace(logits).empty((tokens, 3), np.float64)
    _by_warps("choose_backward", tokens, logits, chosen, gates, dgates, token_ranges, table, of_tokens, tokens, experts,
              chosen.shape[1], tokens // samples, pieces, int(sigmoid), real=logits.dtype)  # fmt: skip
    loss_sums += of_tokens.sum(axis=0)


def spread(tokens: Array, buffer_rows: Array, rows: Array) -> None:
    """On a GPU, copy ``tokens[t]`` to ``rows[buffer_rows[t, j]]`` for all t and j with ``buffer_rows[t, j]`` >= 0."""
    n, each, hidden = buffer_rows.size * tokens.shape[1], buffer_rows.shape[1], tokens.shape[1]
    grid = elementwise(n, width_of(rows.dtype))
    EXPERTS.launch("spread", *grid, tokens, buffer_rows, rows, n, each, hidden, REAL=rows.dtype)


def collect(rows: Array, buffer_rows: Array, gates: Array, y: Array) -> None:
    """On a GPU, set y[t] to the sum over j of ``gates[t, j] * rows[buffer_rows[t, j]]``. Skip negative row numbers."""
    _collect(rows, buffer_rows, gates, y, gated=True)


def collect_onto(rows: Array, buffer_rows: Array, dx: Array) -> None:
    """On a GPU, add ``rows[buffer_rows[t, j]]`` (gradients) to dx[t] for all t and j. Skip negative row numbers."""
    _collect(rows, buffer_rows, rows, dx, gated=False)


def _collect(rows: Array, buffer_rows: Array, gates: Array, y: Array, *, gated: bool) -> None:
    grid = elementwise(y.size, width_of(y.dtype))
    EXPERTS.launch("collect", *grid, rows, buffer_rows, gates, y, y.size, buffer_rows.shape[1], y.shape[1], int(gated),
                   int(not gated), REAL=y.dtype)  # fmt: skip


def collect_backward(dy: Array, buffer_rows: Array, gates: Array, rows: Array, dgates: Array) -> None:
    """On a GPU, overwrite ``rows`` and ``dgates`` with the gradients of `collect` for the output gradient dy.

    ``rows``: on entry, the expert outputs. ``buffer_rows``, ``gates``: as for `collect`.
    """
    _by_warps("collect_backward", buffer_rows.size, dy, buffer_rows, gates, rows, dgates, buffer_rows.size,
              buffer_rows.shape[1], rows.shape[1], real=rows.dtype)  # fmt: skip


def move_blocks(source: Array, target: Array, blocks: Array, longest: int, *, back: bool) -> None:
    """On a GPU, copy blocks of rows from ``source`` to ``target``, or in the other direction if ``back``.

    ``blocks``: array of (source row, target row, number of rows). ``longest``: largest number of rows.
    """
    wide, threads = elementwise(longest * source.shape[1], width_of(source.dtype))
    EXPERTS.launch("move_blocks", (wide, len(blocks)), threads, source, target, blocks, source.shape[1], int(back),
                   REAL=source.dtype)  # fmt: skip
