"""Rotary positions (Su et al., arXiv:2104.09864): queries and keys are turned by angles that grow with their position.

The halves of a head are the pairs, (i, i + head_size / 2), as in Llama: pair i of position t turns by
``t THETA^(-2 i / head_size)``. A turn keeps lengths, and its gradient is turned back. With e the distance of 1 to the
next number of the dtype, errors are at most ``2 e (|left| + |right|)`` of the pair, and in float64, which angles are
computed in, t times as much.
"""

from typing import Any, Final

import numpy as np

from hpcdist.arrays.backend import Array, is_device, namespace
from hpcdist.arrays.dtypes import accumulation_dtype
from hpcdist.arrays.jit import jit
from hpcdist.errors import ConfigurationError
from hpcdist.models import device
from hpcdist.models.kernels import SAMPLE_DTYPES
from hpcdist.models.stage import Saved

THETA: Final = 10000.0
_tables: dict[tuple[int, Any, bool], Array] = {}  # (head size, dtype, on a GPU) -> table of the longest context yet


class LocalRotary:
    """Rotation of the heads that lie in the first columns; position 0 is the first of a sample."""

    def forward(self, x: Array, head_size: int, rotated: int, saved: Saved) -> Array:
        """Turn columns [0, rotated) of contiguous x (batch, context, columns), in place; return x.

        ``rotated`` is a multiple of ``head_size``, which is even: ConfigurationError where it is not.
        """
        return _turn(x, head_size, rotated, 1)

    def backward(self, dx: Array, head_size: int, rotated: int, saved: Saved) -> Array:
        """Turn columns [0, rotated) of the gradient (batch, context, columns) back, in place; return it."""
        return _turn(dx, head_size, rotated, -1)


def table(context: int, head_size: int, like: Array) -> Array:
    """Return (context, head_size): cosines, then sines, of all positions; where ``like`` is, in its dtype or float32.

    Angles are computed in float64. The table is kept, and grows by doubling: texts grow by a token when sampled.
    """
    dtype = accumulation_dtype(like.dtype)
    key = head_size, dtype, is_device(like)
    found = _tables.get(key)
    if found is None or found.shape[0] < context:
        if head_size % 2:
            raise ConfigurationError(
                f"rotary positions turn pairs, and a head of {head_size} has none for its last; "
                "choose model.heads so that model.hidden / model.heads is even, or model.positions = 'learned'"
            )
        xp = namespace(like)
        longest = context if found is None else max(context, 2 * found.shape[0])
        frequency = THETA ** (-2.0 * xp.arange(head_size // 2, dtype=np.float64) / head_size)
        angle = xp.arange(longest, dtype=np.float64)[:, None] * frequency[None, :]
        found = _tables[key] = xp.concatenate([xp.cos(angle), xp.sin(angle)], axis=1).astype(dtype)
    return found[:context]


def _turn(x: Array, head_size: int, rotated: int, sign: int) -> Array:
    _, context, columns = x.shape
    assert rotated % head_size == 0 and rotated <= columns, f"{rotated} of {columns} columns are no heads"
    turns = table(context, head_size, x)
    if is_device(x):
        device.turn(x, rotated, turns, sign)
    else:
        _turn_rows(x, rotated, turns, x.dtype.type(sign))
    return x


@jit(fastmath={"contract"})
def _turn_rows(x: Any, rotated: Any, turns: Any, sign: Any) -> None:
    half = turns.shape[1] // 2
    for b in range(x.shape[0]):
        for t in range(x.shape[1]):
            cosine, sine = turns[t, :half], turns[t, half:]
            for head in range(0, rotated, 2 * half):
                first, second = x[b, t, head : head + half], x[b, t, head + half : head + 2 * half]
                for i in range(half):
                    left, right = first[i], second[i]
                    first[i] = left * cosine[i] - sign * right * sine[i]
                    second[i] = right * cosine[i] + sign * left * sine[i]


for _dtype in SAMPLE_DTYPES:
    _cube = np.ones((1, 1, 2), _dtype)
    _turn_rows.sample(lambda x=_cube: (x.copy(), 2, x[0], x.dtype.type(1)))
