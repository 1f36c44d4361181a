"""Rotary positions of query and key heads (RoPE; Su et al., arXiv:2104.09864).

They rotate the pairs (i, i + head size / 2) of a head, as in Llama: pair i at position t by the angle ``t f_i``, with
the `frequencies` f. With e = the machine epsilon of the dtype, errors are at most ``2 e (|left| + |right|)`` of the
pair, in float64 ``2 t e (|left| + |right|)``, because angles are float64.
"""

import math
from typing import Any

import numpy as np

from hpcdist.arrays.backend import Array, is_device, namespace
from hpcdist.arrays.dtypes import accumulation_dtype
from hpcdist.arrays.jit import jit
from hpcdist.errors import ConfigurationError
from hpcdist.models.config import Rotation
from hpcdist.models.documents import Documents
from hpcdist.models.layers import cuda_kernels
from hpcdist.models.layers.vector_math import SAMPLE_DTYPES
from hpcdist.models.stage import Saved

_tables: dict[tuple[Rotation, Any, bool], Array] = {}  # (rotation, dtype, on a GPU) -> table for the longest context
_outgrown: list[Array] = []  # older tables, which CUDA graphs may still read


class LocalRotary:
    """Rotary encoding of positions in query and key heads. Positions count from the start of the document or sample."""

    def forward(self, x: Array, rotation: Rotation, rotated: int, saved: Saved) -> Array:
        """Rotate the first ``rotated`` columns of x, of shape (batch, context, columns), in place. Return x."""
        # `rotated` must be a multiple of the head size. An odd head size raises ConfigurationError.
        if saved.documents is not None:
            return turn_in_documents(x, rotation, rotated, saved.documents, 1)
        return turn(x, rotated, rotary_table(x.shape[1], rotation, x), 1)

    def backward(self, dx: Array, rotation: Rotation, rotated: int, saved: Saved) -> Array:
        if saved.documents is not None:
            return turn_in_documents(dx, rotation, rotated, saved.documents, -1)
        return turn(dx, rotated, rotary_table(dx.shape[1], rotation, dx), -1)


def turn_in_documents(x: Array, rotation: Rotation, rotated: int, documents: Documents, sign: int) -> Array:
    """Rotate the first ``rotated`` columns of x in place, by the position of each token in its document. Return x."""
    turns = rotary_table(documents.longest, rotation, x)[documents.places.reshape(-1)]
    turn(x.reshape(1, -1, x.shape[2]), rotated, turns, sign)
    return x


def rotary_table(context: int, rotation: Rotation, like: Array) -> Array:
    """Return an array (context, head size): row t has the cosines, then the sines, of the angles at position t."""
    dtype = accumulation_dtype(like.dtype)
    key = rotation, dtype, is_device(like)
    table = _tables.get(key)
    if table is None or table.shape[0] < context:
        if rotation.size % 2:
            raise ConfigurationError(
                f"rotary positions need an even head size, got {rotation.size}; set model.head_size, or choose "
                "model.heads so that model.hidden / model.heads is even, or model.positions = 'learned'"
            )
        xp = namespace(like)
        longest = context if table is None else max(context, 2 * table.shape[0])
        _outgrown.extend([] if table is None else [table])
        angle = xp.arange(longest, dtype=np.float64)[:, None] * frequencies(rotation, xp)[None, :]
        turns = xp.concatenate([xp.cos(angle), xp.sin(angle)], axis=1)
        table = _tables[key] = (turns if rotation.magnitude == 1 else turns * rotation.magnitude).astype(dtype)
    return table[:context]


def frequencies(rotation: Rotation, xp: Any = np) -> Array:
    """Return the angle per position of each pair of columns, as a float64 array of ``rotation.size // 2`` elements.

    ``xp``: numpy or cupy.
    """
    plain: Array = rotation.base ** (-2.0 * xp.arange(rotation.size // 2, dtype=np.float64) / rotation.size)
    if rotation.scaling == "none":
        return plain
    scaled = plain / rotation.factor
    if rotation.scaling == "linear":
        return scaled
    if rotation.scaling == "llama3":
        rotations = rotation.context * plain / (2 * np.pi)
        share = (rotations - rotation.slow) / (rotation.fast - rotation.slow)
    else:
        # Yarn interpolates over the index of the pair: between the pairs with ``fast`` and ``slow`` rotations.
        first, last = (
            rotation.size * math.log(rotation.context / (2 * math.pi * count)) / (2 * math.log(rotation.base))
            for count in (rotation.fast, rotation.slow)
        )
        low, high = max(math.floor(first), 0), min(math.ceil(last), rotation.size - 1)
        share = 1 - (xp.arange(rotation.size // 2) - low) / max(high - low, 1e-3)
    share = xp.clip(share, 0, 1)
    mixed: Array = (1 - share) * scaled + share * plain
    return mixed


def turn(x: Array, rotated: int, turns: Array, sign: int) -> Array:
    """Rotate the first ``rotated`` columns of x by the angles of the `rotary_table` ``turns``, in place. Return x."""
    _, context, columns = x.shape
    assert rotated % turns.shape[1] == 0 and rotated <= columns, f"{rotated} of {columns} columns are not whole heads"
    assert turns.shape[0] == context
    if is_device(x):
        cuda_kernels.rotate(x, rotated, turns, sign)
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


for _rotary_dtype in SAMPLE_DTYPES:
    _cube = np.ones((1, 1, 2), _rotary_dtype)
    _turn_rows.sample(lambda x=_cube: (x.copy(), 2, x[0], x.dtype.type(1)))
