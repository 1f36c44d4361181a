"""Uniform quantisation to integers from -s to s, with a scale per block of values: blockwise integers and QSGD.

With s = 2^(bits - 1) - 1, a value v of a block with scale S is quantised to q = v s / S, rounded to nearest even or
stochastically. It decodes to (q (1/s)) S. A payload holds the float32 scales of the blocks, then the codes q + s + 1 of
all values.

Blockwise integers (Dettmers et al., arXiv:2110.02861; Wang et al., arXiv:2306.10209): S is the largest magnitude of the
block. The error of a value is at most S / (2 s) if rounded to nearest, and below S / s if rounded stochastically.
Stochastic rounding is unbiased, and its variance is at most S^2 / (4 s^2).

QSGD (Alistarh et al., arXiv:1610.02132): S is the 2-norm of a bucket b of n values, and rounding is stochastic. The
variance of a bucket is at most min(n / s^2, sqrt(n) / s) |b|^2 (lemma 3.1).
"""

from dataclasses import dataclass
from typing import Any, ClassVar, Final

import numpy as np

from hpcdist.arrays.backend import Array, is_device, namespace
from hpcdist.arrays.intrinsics import bits_of
from hpcdist.arrays.jit import Kernel, jit
from hpcdist.arrays.rng import philox
from hpcdist.compression import codes as coding
from hpcdist.compression.codes import (
    GROUP,
    MAXIMUM,
    NORM,
    WORDS,
    inverse_of,
    largest,
    lift_of,
    norm,
    pack,
    packed_bytes,
    unit,
)
from hpcdist.compression.compressor import DenseCompressor, RandomKey
from hpcdist.errors import ConfigurationError

# Adding 1.5 * 2^23 rounds a float32 to an integer whose two's complement is in the lowest bits. Adding an even number
# as well does not change the rounding.
_ROUNDER: Final = np.float32(12582912.0)
_ZERO: Final = np.float32(0.0)
_ONE: Final = np.float32(1.0)
_KEYLESS: Final = (0, 0, 0, 0, 0)


def levels_of(bits: int) -> int:
    """Return the largest quantised value s = 2^(bits - 1) - 1. Quantised values are the integers -s to s."""
    return (1 << (bits - 1)) - 1


class BlockCompressor(DenseCompressor):
    """Base class of quantisers that encode values as codes of ``bits`` bits, with one scale per ``width`` values."""

    bits: int
    scaling: ClassVar[int]  # MAXIMUM or NORM of a block

    @property
    def width(self) -> int:
        """Number of values in a block, which share one scale."""
        raise NotImplementedError

    def payload_bytes(self, n: int) -> int:
        return 4 * -(-n // self.width) + packed_bytes(n, self.bits)

    def _parts(self, payload: Array, n: int) -> tuple[Array, Array]:
        head_bytes = 4 * -(-n // self.width)
        return payload[:head_bytes].view(np.float32), payload[head_bytes:]

    def _encode(self, values: Array, payload: Array, key: RandomKey) -> None:
        scales, packed = self._parts(payload, values.size)
        if self.bits == 8 and self.scaling == MAXIMUM and not self.is_random and not is_device(values):
            _encode_bytes(values, scales, packed, self.width)
        else:
            run = _encode_arrays if is_device(values) else _encode_loop
            words = key.words if self.is_random else _KEYLESS
            run(values, scales, packed, self.bits, self.width, self.scaling, self.is_random, *words)

    def _decode_on_host(self, payload: Array, out: Array, factor: np.float32 | None = None) -> None:
        scales, packed = self._parts(payload, out.size)
        loop = _decode_loop if factor is None else _add_loop
        loop(scales, packed, out, _ONE if factor is None else factor, self.bits, self.width)

    def _decoded(self, payload: Array, n: int) -> Array:
        scales, packed = self._parts(payload, n)
        levels = levels_of(self.bits)
        codes = namespace(scales).empty(n, np.uint8)
        coding.unpack_arrays(packed, self.bits, codes)
        q = (codes.astype(np.int32) - np.int32(levels + 1)).astype(np.float32)
        q *= np.float32(np.float32(1.0) / np.float32(levels))
        q *= coding.spread(scales, self.width, n)
        return q


@jit
def _nearest(values: Any, codes: Any, lift: Any, inverse: Any, rounder: Any) -> None:
    if lift == _ONE:  # without one product: int8 must run at memory speed
        for j in range(values.size):
            codes[j] = np.uint8(bits_of(np.float32(np.float32(values[j] * inverse) + rounder)))
    else:
        for j in range(values.size):
            x = np.float32(np.float32(values[j] * lift) * inverse)
            codes[j] = np.uint8(bits_of(np.float32(x + rounder)))


@jit
def _encode_bytes(values: Any, scales: Any, codes: Any, block: Any) -> None:
    # The codes equal the codes of `_encode_loop`.
    rounder = np.float32(_ROUNDER + np.float32(128.0))
    for b in range(scales.size):
        part = values[b * block : (b + 1) * block]
        scale = largest(part)
        scales[b] = scale
        _nearest(part, codes[b * block : (b + 1) * block], lift_of(scale), inverse_of(scale, 127), rounder)


@jit
def _drawn(values: Any, codes: Any, lift: Any, inverse: Any, levels: Any, words: Any) -> None:
    zero = np.int32(levels + 1)
    for j in range(values.size):
        x = np.float32(np.float32(values[j] * lift) * inverse)
        magnitude = np.float32(abs(x))
        below = np.int32(magnitude)
        rest = np.float32(magnitude - np.float32(below))
        q = np.int32(below + np.int32(unit(words[j]) < rest))
        q = q if q < levels else levels
        codes[j] = np.uint8(np.int32(zero + (q if x >= _ZERO else np.int32(-q))))


@jit
def _encode_loop(values, scales, packed, bits, block, kind, is_random, counter1, counter2, counter3, key0, key1):  # type: ignore[no-untyped-def]
    levels = np.int32((1 << (bits - 1)) - 1)
    rounder = np.float32(_ROUNDER + np.float32(levels + 1))
    words = np.empty(GROUP, np.uint32)
    scratch = np.empty(GROUP, np.uint8)
    squares = np.empty(block if kind != MAXIMUM else 0, np.float64)
    for b in range(scales.size):
        first, last = b * block, min((b + 1) * block, values.size)
        scale = largest(values[first:last]) if kind == MAXIMUM else norm(values[first:last], squares)
        scales[b] = scale
        lift, inverse = lift_of(scale), inverse_of(scale, levels)
        for start in range(first, last, GROUP):
            count = min(GROUP, last - start)
            place = packed[start // 8 * bits : start // 8 * bits + (count * bits + 7) // 8]
            codes = place if bits == 8 else scratch[:count]
            group = values[start : start + count]
            if is_random:
                philox(words, (count + 3) // WORDS, start // WORDS, counter1, counter2, counter3, key0, key1)
                _drawn(group, codes, lift, inverse, levels, words)
            else:
                _nearest(group, codes, lift, inverse, rounder)
            if bits < 8:
                pack(scratch, count, bits, place)


def _decoder(*, adds: bool) -> Kernel:

    @jit
    def loop(scales: Any, packed: Any, out: Any, factor: Any, bits: Any, block: Any) -> None:
        zero = np.int32(1 << (bits - 1))
        part = np.float32(np.float32(1.0) / np.float32(zero - 1))
        mask = np.uint32((1 << bits) - 1)
        for start in range(0, out.size, GROUP):
            count = min(GROUP, out.size - start)
            stride = (count * bits + 7) // 8
            place = packed[start // 8 * bits : start // 8 * bits + stride]
            scale = scales[start // block]
            for first in range(0, count, stride):
                shift = np.uint32(first // stride * bits)
                target = out[start + first : start + min(first + stride, count)]
                for j in range(target.size):
                    code = np.uint32(np.uint32(np.uint32(place[j]) >> shift) & mask)
                    q = np.float32(np.int32(np.int32(code) - zero))
                    value = np.float32(np.float32(q * part) * scale)
                    if adds:
                        target[j] += np.float32(factor * value)
                    else:
                        target[j] = value

    return loop


_decode_loop, _add_loop = _decoder(adds=False), _decoder(adds=True)


def _encode_arrays(
    values: Array, scales: Array, packed: Array, bits: int, block: int, kind: int, is_random: bool, *key: int
) -> None:
    xp, levels = namespace(values), levels_of(bits)
    codes, first = xp.empty(values.size, np.uint8), 0
    units = coding.units_arrays(values, key) if is_random else None
    for rows in coding.rows_of(values, block):
        place, count = slice(first // block, first // block + rows.shape[0]), rows.size
        scales[place] = coding.scales_arrays(rows, kind, block)
        lift, inverse = coding.lifts_arrays(scales[place], levels)
        x = rows * lift[:, None] * inverse[:, None]
        if units is None:
            rounded = (x + np.float32(_ROUNDER + np.float32(levels + 1))).view(np.uint32)
        else:
            magnitude = xp.absolute(x)
            below = magnitude.astype(np.int32)
            q = xp.minimum(below + (units[first : first + count].reshape(x.shape) < magnitude - below), levels)
            rounded = levels + 1 + xp.where(x >= _ZERO, q, -q)
        codes[first : first + count] = rounded.astype(np.uint8).reshape(-1)
        first += count
    coding.pack_arrays(codes, bits, packed)


_payload = np.ones(4, np.float32).view(np.uint8)
for _is_random in (False, True):
    _encode_loop.sample(
        lambda r=_is_random: (np.ones(8, np.float32), np.ones(1, np.float32), _payload[:8], 8, 256, 0, r, *_KEYLESS)
    )
_encode_bytes.sample(lambda: (np.ones(8, np.float32), np.ones(1, np.float32), _payload[:8], 256))
for _loop in (_decode_loop, _add_loop):
    _loop.sample(lambda: (np.ones(1, np.float32), _payload[:8], np.ones(8, np.float32), np.float32(1.0), 8, 256))


NEAREST: Final = "nearest"
STOCHASTIC: Final = "stochastic"


@dataclass(frozen=True, kw_only=True)
class Blockwise(BlockCompressor):
    """Compressor to integers of ``bits`` bits. Each block of ``block`` values is scaled by its largest magnitude."""

    bits: int = 8
    block: int = 256
    rounding: str = NEAREST

    name: ClassVar[str] = "blockwise"
    scaling: ClassVar[int] = MAXIMUM

    def __post_init__(self) -> None:
        if self.bits not in (8, 4):
            raise ConfigurationError(f"blockwise integers of {self.bits} bits are not supported; choose 8 or 4 bits")
        if self.block < GROUP or self.block % GROUP:
            raise ConfigurationError(
                f"compression blocks of {self.block} values are not possible; choose a multiple of {GROUP}"
            )
        if self.rounding not in (NEAREST, STOCHASTIC):
            raise ConfigurationError(f"unknown rounding {self.rounding!r}; choose {NEAREST} or {STOCHASTIC}")

    @property
    def width(self) -> int:
        return self.block

    @property
    def is_random(self) -> bool:
        return self.rounding == STOCHASTIC


@dataclass(frozen=True, kw_only=True)
class Qsgd(BlockCompressor):
    """Compressor that rounds values to ``bits``-bit integers. A bucket of ``bucket`` values is scaled by its 2-norm."""

    bits: int = 4
    bucket: int = 512

    name: ClassVar[str] = "qsgd"
    scaling: ClassVar[int] = NORM
    is_random = True  # values are rounded stochastically

    def __post_init__(self) -> None:
        if self.bits not in (2, 4, 8):
            raise ConfigurationError(f"QSGD codes of {self.bits} bits are not supported; choose 2, 4 or 8 bits")
        if self.bucket < GROUP or self.bucket & (self.bucket - 1):
            raise ConfigurationError(
                f"QSGD buckets of {self.bucket} values are not supported; choose a power of two of at least {GROUP}"
            )

    @property
    def width(self) -> int:
        return self.bucket

    @property
    def levels(self) -> int:
        """Largest quantised value s. The quantised values are the integers -s to s."""
        return levels_of(self.bits)
