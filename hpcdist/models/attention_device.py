"""Attention on a GPU in 16-bit floats, as one kernel forward and three backward; see cuda/attention.cu.

float32 and float64 take the way of `hpcdist.models.attention`, with the products of the array library between kernels.
"""

from pathlib import Path
from typing import Any, Final

from hpcdist.arrays.backend import Array, is_device
from hpcdist.arrays.fused import Source
from hpcdist.errors import UsageError
from hpcdist.models.attention_tiles import Heads
from hpcdist.models.dropout import Mask

TENSOR: Final = Source(Path(__file__).parent / "cuda" / "attention.cu", ("float16", "bfloat16"))
LARGEST: Final = 128  # head
ROWS: Final = 64  # of a block of threads
THREADS: Final = 128


def takes(like: Array) -> bool:
    """Whether the kernels compute attention of arrays such as this one."""
    return is_device(like) and TENSOR.takes(like.dtype)


def forward(
    heads: Heads, qkv: Array, kv: Array | None, y: Array, sums: Array, causal: bool, dropped: Mask | None
) -> None:
    """Write y (batch, context, heads size), and sums (pairs, context), float32, which `backward` takes."""
    grid = heads.batch * heads.queries, -(-heads.context // ROWS)  # of the second, CUDA has at most 65535
    numbers = _numbers(heads, qkv, kv, causal, dropped)
    TENSOR.launch("attention", grid, THREADS, qkv, _keys(qkv, kv), y, sums, *numbers, **_types(heads, y))


def backward(
    heads: Heads,
    inputs: tuple[Array, Array | None],
    dy: Array,
    y: Array,
    found: tuple[Array, Array | None],
    sums: Array,
    dots: Array,
    causal: bool,
    dropped: Mask | None,
) -> None:
    """Write what is ``found``, the gradients of the inputs, for contiguous dy. ``dots`` (pairs, context) is scratch."""
    (qkv, kv), (dq, dkv) = inputs, found
    types, numbers = _types(heads, y), _numbers(heads, qkv, kv, causal, dropped)
    rows = heads.batch * heads.context * heads.queries
    TENSOR.launch("attention_dots", -(-rows // 4), THREADS, dy, y, dots, rows, heads.context, heads.size,
                  heads.queries, **types)  # fmt: skip
    given, blocks = (qkv, _keys(qkv, kv), dy, sums, dots), -(-heads.context // ROWS)
    TENSOR.launch("attention_queries", (heads.batch * heads.queries, blocks), THREADS, *given, dq, *numbers, **types)
    into = dq if dkv is None else dkv
    TENSOR.launch("attention_keys", (heads.batch * heads.shared, blocks), THREADS, *given, into, *numbers, **types)


def _keys(qkv: Array, kv: Array | None) -> Array:
    return qkv if kv is None else kv


def _types(heads: Heads, like: Array) -> dict[str, Any]:
    if heads.size > LARGEST:
        raise UsageError(
            f"attention in {like.dtype} got heads of {heads.size}; its kernels have heads of at most {LARGEST}: choose "
            "model.heads of at least model.hidden / 128, or compute in float32"
        )
    return {"REAL": like.dtype, "HEAD": -(-heads.size // 16) * 16}


def _numbers(heads: Heads, qkv: Array, kv: Array | None, causal: bool, dropped: Mask | None) -> tuple[int | float, ...]:
    width, shared = heads.queries * heads.size, heads.shared * heads.size
    first = width if kv is None else 0
    place = heads.context, heads.size, heads.queries, heads.shared, qkv.shape[2], _keys(qkv, kv).shape[2]
    mask = (0,) * 12 + (1.0,) if dropped is None else (1, *dropped.place, *dropped.counters, dropped.scale)
    return (*place, first, first + shared, int(causal), heads.scale, *mask)
