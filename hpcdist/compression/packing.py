"""Codes of 1, 2, 4 or 8 bits in bytes, without a gap: n codes are ceil(n bits / 8) bytes.

Codes are packed by groups of `GROUP`. A group of m codes has ceil(m bits / 8) bytes, and byte j holds the codes j,
j + bytes, j + 2 bytes, ... of it, the first in its lowest bits: neighbours in memory meet in a register, so loops over
a group become vectors. Only the last group may be shorter; where its codes do not fill its bytes, the rest is 0.
"""

from typing import Any, Final

import numpy as np

from hpcdist.arrays.backend import Array, namespace
from hpcdist.arrays.jit import jit

GROUP: Final = 256  # codes: a multiple of 8, few enough for the first cache
WIDTHS: Final = (1, 2, 4, 8)
_BY2: Final = np.uint8(2)
_BY4: Final = np.uint8(4)


def packed_bytes(n: int, bits: int) -> int:
    """Return the bytes of ``n`` codes."""
    return -(-n * bits // 8)


@jit
def pack(codes: Any, count: Any, bits: Any, packed: Any) -> None:
    """Pack one group, the first ``count`` of the uint8 ``codes`` (GROUP,), into the bytes ``packed``. For kernels.

    High bits of codes must be 0. Codes from ``count`` on are overwritten.
    """
    # Indices begin at 0, and one loop for each width: an index that may be negative, and a shift of bytes by what is
    # no constant, keep loops scalar.
    stride = packed.size
    codes[count:] = 0
    if bits == 4:
        high = codes[stride:]
        for j in range(stride):
            packed[j] = codes[j] | np.uint8(high[j] << _BY4)
    else:
        second, third, fourth = codes[stride:], codes[2 * stride :], codes[3 * stride :]
        for j in range(stride):
            low = codes[j] | np.uint8(second[j] << _BY2)
            packed[j] = low | np.uint8(np.uint8(third[j] | np.uint8(fourth[j] << _BY2)) << _BY4)


def pack_arrays(codes: Array, bits: int, packed: Array) -> None:
    """Pack uint8 ``codes`` (n,) into ``packed`` (packed_bytes(n, bits),), on either processor."""
    for group, place in _groups(codes, bits, packed):
        stride = place.shape[1]
        place[...] = 0
        for k, first in enumerate(range(0, group.shape[1], stride)):
            part = group[:, first : first + stride]
            place[:, : part.shape[1]] |= part << np.uint8(k * bits)


def unpack_arrays(packed: Array, bits: int, codes: Array) -> None:
    """Unpack ``packed`` into the uint8 ``codes`` (n,), on either processor."""
    mask = np.uint8((1 << bits) - 1)
    for group, place in _groups(codes, bits, packed):
        stride = place.shape[1]
        for k, first in enumerate(range(0, group.shape[1], stride)):
            part = group[:, first : first + stride]
            part[...] = place[:, : part.shape[1]] >> np.uint8(k * bits) & mask


def _groups(codes: Array, bits: int, packed: Array) -> list[tuple[Array, Array]]:
    """Return the whole groups as (rows, GROUP) with their bytes, and the last one, if it is shorter, as (1, rest)."""
    whole = codes.size // GROUP * GROUP
    ends = packed_bytes(whole, bits)
    pairs = [(codes[:whole].reshape(-1, GROUP), packed[:ends].reshape(-1, GROUP * bits // 8))]
    pairs.append((codes[None, whole:], packed[None, ends:]))
    return [(group, place) for group, place in pairs if group.size]


def rows_of(values: Array, width: int) -> list[Array]:
    """Return views of ``values`` (n,): the whole rows as (rows, width), and the rest, if there is one, as (1, rest)."""
    whole = values.size // width * width
    rows = [values[:whole].reshape(-1, width), values[None, whole:]]
    return [row for row in rows if row.size]


def spread(scales: Array, width: int, n: int) -> Array:
    """Return (n,) values: each of ``scales`` for the next ``width`` of them."""
    wide = namespace(scales).empty((scales.size, width), scales.dtype)
    wide[...] = scales[:, None]
    return wide.reshape(-1)[:n]
