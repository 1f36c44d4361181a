"""SignSGD with a scale: each payload has one bit per value, and one float32 scale.

Bernstein et al., arXiv:1802.04434; scale of Karimireddy et al., arXiv:1901.09847. The scale "mean" of n values p is the
a that minimises |p - a sign(p)|^2. The minimum, |p|^2 - |p|_1^2 / n, is less than |p|^2, as error feedback needs to
converge. sign(0) and sign(-0) are +1, so the caller must mask elements that must stay 0.
"""

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import numpy as np

from hpcdist.arrays.backend import Array, is_device, namespace
from hpcdist.arrays.intrinsics import bits_of, float_of
from hpcdist.arrays.jit import Kernel, jit
from hpcdist.compression.codes import (
    GROUP,
    folded,
    folded_arrays,
    pack_arrays,
    packed_bytes,
    rows_of,
    unpack_arrays,
)
from hpcdist.compression.compressor import DenseCompressor, RandomKey
from hpcdist.errors import ConfigurationError

MEAN: Final = "mean"
NORM: Final = "norm"
_ZERO: Final = np.float32(0.0)
_SIGN: Final = np.uint32(31)
_ONE: Final = np.uint32(1)


@dataclass(frozen=True, kw_only=True)
class SignSgd(DenseCompressor):
    """Compressor to signs with one scale per payload: the mean magnitude ("mean") or the root mean square ("norm")."""

    scale: str = MEAN

    name: ClassVar[str] = "signsgd"

    def __post_init__(self) -> None:
        if self.scale not in (MEAN, NORM):
            raise ConfigurationError(f"unknown scale {self.scale!r} of signSGD; choose {MEAN} or {NORM}")

    def payload_bytes(self, n: int) -> int:
        return 4 + packed_bytes(n, 1) if n else 0

    def _encode(self, values: Array, payload: Array, key: RandomKey) -> None:
        scale = magnitude(values, is_norm=self.scale == NORM)
        payload[:4].view(np.float32)[...] = scale
        if is_device(values):
            pack_arrays((values < _ZERO).astype(np.uint8), 1, payload[4:])
        else:
            _signs_loop(values, payload[4:])

    def _decode_on_host(self, payload: Array, out: Array, factor: np.float32 | None = None) -> None:
        loop = _decode_loop if factor is None else _add_loop
        loop(payload[:4].view(np.float32), payload[4:], out, _ZERO if factor is None else factor)

    def _decoded(self, payload: Array, n: int) -> Array:
        codes = namespace(payload).empty(n, np.uint8)
        unpack_arrays(payload[4:], 1, codes)
        signs = np.float32(1.0) - np.float32(2.0) * codes.astype(np.float32)
        signs *= payload[:4].view(np.float32)
        return signs


def magnitude(values: Array, *, is_norm: bool) -> Any:
    """Return the mean magnitude of ``values`` as float32, or the root mean square if ``is_norm`` is True."""
    if is_device(values):
        return _magnitude_arrays(values, is_norm)
    sums = np.empty(-(-values.size // GROUP), np.float64)
    _row_sums(values, sums, is_norm)
    # in a fixed order, so that the result is reproducible
    while sums.size > 1:
        rest = np.empty(-(-sums.size // GROUP), np.float64)
        _row_sums(sums, rest, False)
        sums = rest
    mean = float(sums[0]) / values.size
    return np.float32(math.sqrt(mean) if is_norm else mean)


def _magnitude_arrays(values: Array, is_norm: bool) -> Array:
    xp, power = namespace(values), values
    while True:
        sums, first = xp.empty(-(-power.size // GROUP), np.float64), 0
        for rows in rows_of(power, GROUP):
            wide = xp.zeros((rows.shape[0], GROUP), np.float64)
            wide[:, : rows.shape[1]] = rows
            if power is values:
                wide = wide * wide if is_norm else xp.absolute(wide)
            sums[first : first + rows.shape[0]] = folded_arrays(wide)
            first += rows.shape[0]
        if sums.size == 1:
            mean = sums[0] / values.size
            return (xp.sqrt(mean) if is_norm else mean).astype(np.float32)
        power = sums


@jit
def _row_sums(values: Any, sums: Any, is_norm: Any) -> None:
    wide = np.empty(GROUP, np.float64)
    for row in range(sums.size):
        part = values[row * GROUP : (row + 1) * GROUP]
        wide[part.size :] = 0.0
        if is_norm:
            for j in range(part.size):
                value = np.float64(part[j])
                wide[j] = value * value
        else:
            for j in range(part.size):
                wide[j] = abs(np.float64(part[j]))
        sums[row] = folded(wide)


@jit
def _signs_loop(values: Any, packed: Any) -> None:
    for start in range(0, values.size, GROUP):
        group = values[start : start + GROUP]
        place = packed[start // 8 : start // 8 + (group.size + 7) // 8]
        stride = place.size
        place[:] = 0
        for plane in range((group.size + stride - 1) // stride):
            shift = np.uint32(plane)
            part = group[plane * stride : (plane + 1) * stride]
            for j in range(part.size):
                place[j] |= np.uint8(np.uint32(np.uint32(part[j] < _ZERO) << shift))


def _decoder(*, adds: bool) -> Kernel:

    @jit
    def loop(scale: Any, packed: Any, out: Any, factor: Any) -> None:
        word = bits_of(scale[0])
        for start in range(0, out.size, GROUP):
            group = out[start : start + GROUP]
            place = packed[start // 8 : start // 8 + (group.size + 7) // 8]
            stride = place.size
            for plane in range((group.size + stride - 1) // stride):
                shift = np.uint32(plane)
                part = group[plane * stride : (plane + 1) * stride]
                for j in range(part.size):
                    bit = np.uint32(np.uint32(np.uint32(place[j]) >> shift) & _ONE)
                    value = float_of(np.uint32(word | np.uint32(bit << _SIGN)))
                    if adds:
                        part[j] += np.float32(factor * value)
                    else:
                        part[j] = value

    return loop


_decode_loop, _add_loop = _decoder(adds=False), _decoder(adds=True)


for _dtype in (np.float32, np.float64):
    _row_sums.sample(lambda _dtype=_dtype: (np.ones(2, _dtype), np.ones(1, np.float64), True))
_signs_loop.sample(lambda: (np.ones(2, np.float32), np.ones(1, np.uint8)))
for _loop in (_decode_loop, _add_loop):
    _loop.sample(lambda: (np.ones(1, np.float32), np.ones(1, np.uint8), np.ones(2, np.float32), np.float32(1.0)))
