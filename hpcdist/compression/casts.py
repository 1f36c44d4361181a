"""Compressors to 16-bit floats: half the bytes, rounded to nearest, ties to even.

Values out of range become the largest finite value, because an infinity would make error feedback infinite too. The
error of a value v is at most |v| / 2^11 (float16 from 2^-14 on, 2^-25 below) or |v| / 2^8 (bfloat16, half of 2^-133
below 2^-126).
"""

from dataclasses import dataclass
from typing import Any, ClassVar, Final

import numpy as np

from hpcdist.arrays.backend import Array, is_device, namespace
from hpcdist.arrays.dtypes import BFLOAT16
from hpcdist.arrays.jit import jit
from hpcdist.collectives.reduction import (
    bfloat16_to_float32,
    float16_to_float32,
    float32_to_bfloat16,
    float32_to_float16,
    widen_on_host,
)
from hpcdist.compression.compressor import DenseCompressor, RandomKey

LARGEST16: Final = np.float32(65504.0)
LARGEST_BFLOAT16: Final = np.float32(3.3895313892515355e38)


class _Cast(DenseCompressor):
    is_linear: ClassVar[bool] = True
    dtype: ClassVar[np.dtype]

    def payload_bytes(self, n: int) -> int:
        return 2 * n

    def summable(self, payload: Array) -> Array:
        return payload.view(self.dtype)

    def _decoded(self, payload: Array, n: int) -> Array:
        halves = self.summable(payload)
        if self.dtype != BFLOAT16:
            return halves.astype(np.float32)
        wide = halves.view(np.uint16).astype(np.uint32)
        wide <<= np.uint32(16)
        return wide.view(np.float32)

    def _decode_on_host(self, payload: Array, out: Array, factor: np.float32 | None = None) -> None:
        if factor is None:
            widen_on_host(self.summable(payload), out)
        else:
            add = _add_bfloat16 if self.dtype == BFLOAT16 else _add_float16
            add(payload.view(np.uint16), out, factor)


@dataclass(frozen=True)
class Float16(_Cast):
    """Compressor that rounds values to IEEE half precision (float16)."""

    name: ClassVar[str] = "float16"
    dtype: ClassVar[np.dtype] = np.dtype(np.float16)

    def _encode(self, values: Array, payload: Array, key: RandomKey) -> None:
        if is_device(values):
            self.summable(payload)[...] = _clipped(values, LARGEST16)
        else:
            _round_float16(values, payload.view(np.uint16))


@dataclass(frozen=True)
class BFloat16(_Cast):
    """Compressor that rounds values to bfloat16, the upper half of a float32."""

    name: ClassVar[str] = "bfloat16"
    dtype: ClassVar[np.dtype] = BFLOAT16

    def _encode(self, values: Array, payload: Array, key: RandomKey) -> None:
        if is_device(values):
            bits = _clipped(values, LARGEST_BFLOAT16).view(np.uint32)
            even = bits + (np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))
            payload.view(np.uint16)[...] = even >> np.uint32(16)
        else:
            _round_bfloat16(values, payload.view(np.uint16))


def _clipped(values: Array, largest: Any) -> Array:
    xp = namespace(values)
    return xp.minimum(xp.maximum(values, -largest), largest)


@jit
def _round_float16(values: Any, halves: Any) -> None:
    for i in range(values.size):
        v = values[i] if values[i] < LARGEST16 else LARGEST16
        halves[i] = float32_to_float16(v if v > -LARGEST16 else np.float32(-LARGEST16))


@jit
def _round_bfloat16(values: Any, halves: Any) -> None:
    for i in range(values.size):
        v = values[i] if values[i] < LARGEST_BFLOAT16 else LARGEST_BFLOAT16
        halves[i] = float32_to_bfloat16(v if v > -LARGEST_BFLOAT16 else np.float32(-LARGEST_BFLOAT16))


@jit
def _add_float16(halves: Any, out: Any, factor: Any) -> None:
    for i in range(out.size):
        out[i] += np.float32(factor * float16_to_float32(halves[i]))


@jit
def _add_bfloat16(halves: Any, out: Any, factor: Any) -> None:
    for i in range(out.size):
        out[i] += np.float32(factor * bfloat16_to_float32(halves[i]))


for _loop in (_round_float16, _round_bfloat16):
    _loop.sample(lambda: (np.ones(1, np.float32), np.ones(1, np.uint16)))
for _loop in (_add_float16, _add_bfloat16):
    _loop.sample(lambda: (np.ones(1, np.uint16), np.ones(1, np.float32), np.float32(1.0)))
