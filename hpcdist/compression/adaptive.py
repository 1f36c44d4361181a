"""Adaptive levels quantisation (ALQ): 4 bits per value, a sign and one of 8 levels fitted to the tensor.

ALQ of Faghri et al. (arXiv:2010.12460), with block scales: magnitudes are divided by the largest magnitude S of their
block and rounded stochastically, without bias, to one of the two neighbouring levels. The levels minimise the variance
for the given values. The error of a value is at most S times the distance between its two neighbouring levels. The
variance is 0.14 (Student's t) to 0.7 (normal) times the variance of equally spaced levels.

Eight values of a group of 256 share a random number. Each value is unbiased, and the expected squared error of the
group is the same as with a number per value.

Levels are fitted by coordinate descent. Let F be the distribution of the divided magnitudes, weighted by S^2. Between
fixed neighbours a < c, the best level b has F(b) = F(c) - integral from a to c of (r - a) / (c - a) dF(r). F is a
histogram: sums over bins are integers that float64 holds exactly, so every processor computes the same levels.
"""

from dataclasses import dataclass
from types import ModuleType
from typing import Any, ClassVar, Final

import numpy as np

from hpcdist.arrays.backend import Array, is_device, namespace
from hpcdist.arrays.intrinsics import bits_of, prefer_wide_vectors, prefetch
from hpcdist.arrays.jit import jit
from hpcdist.arrays.rng import philox
from hpcdist.compression import codes as coding
from hpcdist.compression.codes import (
    GROUP,
    MAXIMUM,
    WORDS,
    inverse_of,
    largest,
    lift_of,
    packed_bytes,
    unit,
)
from hpcdist.compression.compressor import DenseCompressor, RandomKey
from hpcdist.errors import ConfigurationError

SHIFT: Final = np.uint32(18)  # keeps the exponent and 5 fraction bits: 32 bins per octave
OCTAVES: Final = 20
BINS: Final = 32 * OCTAVES
BASE: Final = np.uint32((127 - OCTAVES) << 5)  # the bin from 2^-OCTAVES on, which also counts all smaller magnitudes
SAMPLE: Final = 1 << 16  # at most this many values are counted, in evenly spaced blocks
WEIGHT: Final = 1 << 10  # of the block with the largest scale: counts stay below 2^26, their moments below 2^53
SWEEPS: Final = 16  # brings the variance of 7 levels within 1 % of its limit; a sweep moves odd, then even levels
LEVELS: Final = 7  # above 0; the last level is 1. With a sign: 4 bits


def tables(xp: ModuleType) -> tuple[Array, Array, Array]:
    """Return (bin edges, bin centres, edge indices of the initial levels) for histograms of magnitudes.

    ``xp``: the module numpy or cupy, which creates the arrays.
    """
    words = xp.arange(int(BASE), int(BASE) + BINS + 1, dtype=np.uint32)
    at = (words << SHIFT).view(np.float32).astype(np.float64)
    at[0] = 0.0
    centres = (at[1:] + at[:-1]) / 2
    # LEVELS + 1 evenly spaced levels
    evenly = xp.arange(LEVELS + 1, dtype=np.float64) / LEVELS
    return at, centres, (centres[None, :] < evenly[:, None]).sum(axis=1)


_EDGES, _CENTRES, _EVENLY = tables(np)
_LAST: Final = np.uint32(BINS - 1)


@jit
def bin_of(magnitude: Any) -> Any:
    """Return the index of the histogram bin of a ``magnitude`` in [0, 1]. Called by compiled kernels."""
    # The bits of positive floats are ordered as their values, so a bin is an exponent and the 5 upper fraction bits.
    word = np.uint32(bits_of(magnitude) >> SHIFT)
    above = np.uint32((word if word > BASE else BASE) - BASE)
    return above if above < _LAST else _LAST


def bins_arrays(magnitudes: Array) -> Array:
    """Return the int64 indices of the histogram bins of float32 ``magnitudes``, on the host or a GPU."""
    xp = namespace(magnitudes)
    words = (magnitudes.view(np.uint32) >> SHIFT).astype(np.int64)
    return xp.minimum(xp.maximum(words, int(BASE)) - int(BASE), BINS - 1)


def spacing(blocks: int, block: int) -> int:
    """Return a stride s. Every s-th of ``blocks`` blocks, of ``block`` values each, gives about SAMPLE values."""
    return max(1, -(-blocks // max(1, SAMPLE // block)))


def fit_levels(counts: Array) -> Array:
    """Return float32 quantisation levels from 0 to 1, of shape (LEVELS + 1,), fitted to the histogram ``counts``."""
    if is_device(counts):
        return _fitted_arrays(counts)
    chosen = _EVENLY.copy()
    _improve(counts, _EDGES, _CENTRES, chosen)
    return _EDGES[chosen].astype(np.float32)


@jit
def _improve(counts: Any, at: Any, centres: Any, chosen: Any) -> None:
    # Running sums of counts (F) and of counts times centres, up to each edge: an integral is a difference of two sums.
    mass, moment = np.zeros(counts.size + 1), np.zeros(counts.size + 1)
    for i in range(counts.size):
        mass[i + 1] = mass[i] + counts[i]
        moment[i + 1] = moment[i] + counts[i] * centres[i]
    # Odd levels, then even levels, with fixed neighbours. F(b) of the best level is known, and F grows: bisection finds
    # the edge. The better of the two edges around it is used if it is better than the present level.
    for sweep in range(2 * SWEEPS):
        for j in range(1 + sweep % 2, chosen.size - 1, 2):
            low, high = chosen[j - 1], chosen[j + 1]
            a, c = at[low], at[high]
            target = (c * mass[high] - a * mass[low] - (moment[high] - moment[low])) / (c - a)
            above = np.searchsorted(mass, target)
            best, least = chosen[j], _variance(low, chosen[j], high, at, mass, moment)
            for candidate in (above - 1, above):
                tried = min(max(candidate, low + 1), high - 1)  # levels stay distinct
                variance = _variance(low, tried, high, at, mass, moment)
                if variance < least:
                    best, least = tried, variance
            chosen[j] = best


@jit
def _variance(low: Any, middle: Any, high: Any, at: Any, mass: Any, moment: Any) -> Any:
    a, b, c = at[low], at[middle], at[high]
    # Rounded randomly to a or b, r has variance (r - a) (b - r) = (a + b) r - a b - r^2; the r^2 term is left out.
    below = (a + b) * (moment[middle] - moment[low]) - a * b * (mass[middle] - mass[low])
    return below + (b + c) * (moment[high] - moment[middle]) - b * c * (mass[high] - mass[middle])


def _fitted_arrays(counts: Array) -> Array:
    xp = namespace(counts)
    at, centres, chosen = tables(xp)
    mass, moment = _running(counts.astype(np.float64)), _running(counts * centres)
    for sweep in range(2 * SWEEPS):
        first = sweep % 2
        now = chosen[1 + first : LEVELS : 2]
        low, high = chosen[first : first + 2 * now.size : 2], chosen[2 + first : 3 + first + 2 * now.size : 2]
        a, c = at[low], at[high]
        target = (c * mass[high] - a * mass[low] - (moment[high] - moment[low])) / (c - a)
        above = (mass[None, :] < target[:, None]).sum(axis=1)
        best, least = now, _variance.function(low, now, high, at, mass, moment)
        for candidate in (above - 1, above):
            tried = xp.minimum(xp.maximum(candidate, low + 1), high - 1)
            variance = _variance.function(low, tried, high, at, mass, moment)
            is_better = variance < least
            best, least = xp.where(is_better, tried, best), xp.where(is_better, variance, least)
        now[...] = best
    return at[chosen].astype(np.float32)


def _running(counts: Array) -> Array:
    sums = namespace(counts).zeros(BINS + 1, np.float64)  # all sums are exact, see WEIGHT
    sums[1:] = counts
    apart = 1  # scan by doubling: element i holds the sum of the last `apart` elements
    while apart <= BINS:
        shifted = sums[:-apart].copy()
        sums[apart:] += shifted
        apart *= 2
    return sums


_improve.sample(lambda: (np.ones(BINS, np.uint32), _EDGES, _CENTRES, _EVENLY.copy()))


BITS: Final = 4
HEAD_BYTES: Final = 4 * (LEVELS + 1)
CHUNK: Final = 16 * GROUP  # values whose random numbers are drawn by one call, because a call has a setup cost
SHARERS: Final = 8  # values of a group that share a random number
AHEAD: Final = 8 * GROUP  # values loaded into the cache ahead of their use
DRAWS: Final = GROUP // SHARERS  # random numbers of a group
_HALF: Final = GROUP // 2
_ZERO: Final = np.float32(0.0)
_ONE: Final = np.float32(1.0)
_ZERO_BITS: Final = np.int32(0)
_BIT1, _BIT2, _BIT4, _SIGN = np.int32(1), np.int32(2), np.int32(4), np.int32(LEVELS + 1)  # the bits of a code
_HIGH: Final = np.int32(1 << BITS)


@dataclass(frozen=True, kw_only=True)
class Adaptive(DenseCompressor):
    """Compressor to 4-bit codes. It fits the quantisation levels to the values, and scales each block of values."""

    block: int = 256

    name: ClassVar[str] = "adaptive"
    is_random = True  # magnitudes are rounded stochastically

    def __post_init__(self) -> None:
        if self.block < GROUP or self.block % GROUP:
            raise ConfigurationError(
                f"compression blocks of {self.block} values are not possible; choose a multiple of {GROUP}"
            )

    def payload_bytes(self, n: int) -> int:
        return HEAD_BYTES + 4 * -(-n // self.block) + packed_bytes(n, BITS) if n else 0

    def _encode(self, values: Array, payload: Array, key: RandomKey) -> None:
        levels, scales, packed = self._split_payload(payload, values.size)
        sampling_stride = spacing(scales.size, self.block)
        counts = namespace(values).zeros(BINS, np.uint32)
        if is_device(values):
            first = 0
            for rows in coding.rows_of(values, self.block):
                scales[first : first + rows.shape[0]] = coding.scales_arrays(rows, MAXIMUM, self.block)
                first += rows.shape[0]
            _count_arrays(values, scales, counts, self.block, sampling_stride)
            levels[...] = fit_levels(counts)
            self._encode_arrays(values, levels, scales, packed, key)
        else:
            _count_loop(values, scales, counts, self.block, sampling_stride)
            levels[...] = fit_levels(counts)
            _encode_loop(values, levels, scales, packed, self.block, *key.words)

    def _decode_on_host(self, payload: Array, out: Array, factor: np.float32 | None = None) -> None:
        adds = factor is not None
        _decode_loop(*self._split_payload(payload, out.size), out, self.block, factor if adds else _ONE, adds)

    def _decoded(self, payload: Array, n: int) -> Array:
        levels, scales, packed = self._split_payload(payload, n)
        xp = namespace(scales)
        codes = xp.empty(n, np.uint8)
        coding.unpack_arrays(packed, BITS, codes)
        signed = xp.concatenate([levels, -levels])
        return signed[codes.astype(np.int64)] * coding.spread(scales, self.block, n)

    def _split_payload(self, payload: Array, n: int) -> tuple[Array, Array, Array]:
        codes_at = HEAD_BYTES + 4 * -(-n // self.block)
        words = payload[:codes_at].view(np.float32)
        return words[: LEVELS + 1], words[LEVELS + 1 :], payload[codes_at:]

    def _encode_arrays(self, values: Array, levels: Array, scales: Array, packed: Array, key: RandomKey) -> None:
        xp = namespace(values)
        lift, inverse = coding.lifts_arrays(scales, 1)
        n, block = values.size, self.block
        r = xp.absolute(values) * coding.spread(lift, block, n) * coding.spread(inverse, block, n)
        units = _units_arrays(values, key.words)
        codes = (_SIGN * (values < _ZERO)).astype(np.uint8)
        for k in range(LEVELS):
            low, high = levels[k : k + 1], levels[k + 1 : k + 2]
            codes += r > low + units * (high - low)
        coding.pack_arrays(codes, BITS, packed)


def _units_arrays(values: Array, key: tuple[int, ...]) -> Array:
    # See `_codes`: the values of a group share a number.
    xp, n = namespace(values), values.size
    groups = -(-n // GROUP)
    drawn = coding.units_arrays(xp.empty(groups * DRAWS, np.float32), key)
    per_byte = xp.empty((groups, _HALF // DRAWS, DRAWS), np.float32)
    per_byte[...] = drawn.reshape(groups, 1, DRAWS)
    units = xp.empty(n, np.float32)
    for group, packed in coding.grouped(units, BITS, per_byte.reshape(-1)[: packed_bytes(n, BITS)]):
        group[:, : packed.shape[1]] = packed
        group[:, packed.shape[1] :] = packed[:, : group.shape[1] - packed.shape[1]]
    return units


@jit
def _count_loop(values: Any, scales: Any, counts: Any, block: Any, apart: Any) -> None:
    top = _ZERO
    for b in range(0, scales.size, apart):
        scales[b] = largest(values[b * block : (b + 1) * block])
        top = max(top, scales[b])
    for b in range(0, scales.size, apart):
        if scales[b] > _ZERO:
            ratio = np.float64(scales[b]) / np.float64(top)
            weight = np.uint32(ratio * ratio * WEIGHT + 0.5)  # errors scale with the square of the block's scale
            lift, inverse = lift_of(scales[b]), inverse_of(scales[b], 1)
            part = values[b * block : (b + 1) * block]
            for j in range(part.size):
                r = np.float32(np.float32(abs(part[j]) * lift) * inverse)
                counts[bin_of(r)] += weight


def _count_arrays(values: Array, scales: Array, counts: Array, block: int, apart: int) -> None:
    xp = namespace(values)
    seen = scales[::apart]
    top = seen.max().astype(np.float64)
    ratio = seen.astype(np.float64) / xp.where(top > 0, top, 1.0)
    weights = (ratio * ratio * WEIGHT + 0.5).astype(np.uint32)
    lift, inverse = coding.lifts_arrays(seen, 1)
    first = 0
    for rows in coding.rows_of(values, block):
        # Every `apart`-th whole block is counted. A shorter last block is counted if it is the next in this sequence.
        picked = rows[-first % apart :: apart]
        blocks = slice(-(-first // apart), -(-first // apart) + picked.shape[0])
        first += rows.shape[0]
        if not picked.shape[0]:
            continue
        r = xp.absolute(picked) * lift[blocks, None] * inverse[blocks, None]
        spread_weights = xp.empty(r.shape, np.uint32)
        spread_weights[...] = weights[blocks, None]
        xp.add.at(counts, bins_arrays(r).reshape(-1), spread_weights.reshape(-1))


@jit
def _code(value: Any, inverse: Any, thresholds: Any) -> Any:
    # The number of thresholds below the magnitude, by bisection without branches, plus the sign bit.
    first, second, third, middle, fifth, sixth, seventh = thresholds
    r = np.float32(abs(value) * inverse)
    is_upper = r > middle
    is_second = r > (sixth if is_upper else second)
    upper = seventh if is_second else fifth
    lower = third if is_second else first
    is_odd = r > (upper if is_upper else lower)
    code = _SIGN if value < _ZERO else _ZERO_BITS
    code = np.int32(code + (_BIT4 if is_upper else _ZERO_BITS))
    code = np.int32(code + (_BIT2 if is_second else _ZERO_BITS))
    return np.int32(code + (_BIT1 if is_odd else _ZERO_BITS))


@jit
def _byte(low: Any, high: Any, inverse: Any, thresholds: Any) -> Any:
    return np.uint8(np.int32(_code(low, inverse, thresholds) + np.int32(_code(high, inverse, thresholds) * _HIGH)))


@jit
def _codes(values: Any, packed: Any, inverse: Any, lower: Any, gaps: Any, words: Any) -> None:
    # A magnitude between the levels a and c is rounded up if it exceeds the threshold a + u (c - a), with u uniform in
    # [0, 1). Thresholds increase with their level. Random numbers and thresholds are the largest cost: hence `SHARERS`.
    # Tuples instead of arrays, and constant bounds: so the loop vectorises without tests for overlap.
    prefer_wide_vectors()
    l1, l2, l3, l4, l5, l6 = lower
    g0, g1, g2, g3, g4, g5, g6 = gaps
    for j in range(DRAWS):
        u = unit(words[j])
        t0, t1, t2 = np.float32(u * g0), np.float32(l1 + np.float32(u * g1)), np.float32(l2 + np.float32(u * g2))
        t3, t4 = np.float32(l3 + np.float32(u * g3)), np.float32(l4 + np.float32(u * g4))
        t5, t6 = np.float32(l5 + np.float32(u * g5)), np.float32(l6 + np.float32(u * g6))
        thresholds = (t0, t1, t2, t3, t4, t5, t6)
        packed[j] = _byte(values[j], values[_HALF + j], inverse, thresholds)
        packed[DRAWS + j] = _byte(values[DRAWS + j], values[_HALF + DRAWS + j], inverse, thresholds)
        packed[2 * DRAWS + j] = _byte(values[2 * DRAWS + j], values[_HALF + 2 * DRAWS + j], inverse, thresholds)
        packed[3 * DRAWS + j] = _byte(values[3 * DRAWS + j], values[_HALF + 3 * DRAWS + j], inverse, thresholds)


@jit
def _encode_loop(values, levels, scales, packed, block, counter1, counter2, counter3, key0, key1):  # type: ignore[no-untyped-def]
    words, padded, codes = np.empty(CHUNK // SHARERS, np.uint32), np.empty(GROUP, np.float32), np.empty(_HALF, np.uint8)
    lower = levels[1], levels[2], levels[3], levels[4], levels[5], levels[6]
    d = levels[1:] - levels[:-1]
    gaps = d[0], d[1], d[2], d[3], d[4], d[5], d[6]
    lift, inverse, address = _ZERO, _ZERO, values.ctypes.data
    for first in range(0, values.size, CHUNK):
        philox(words, CHUNK // SHARERS // WORDS, first // SHARERS // WORDS, counter1, counter2, counter3, key0, key1)
        for start in range(first, min(first + CHUNK, values.size), GROUP):
            prefetch(address + 4 * (start + AHEAD), 4 * GROUP)
            if start % block == 0:
                scale = largest(values[start : start + block])
                scales[start // block] = scale
                lift, inverse = lift_of(scale), inverse_of(scale, 1)
            group, draws = values[start : start + GROUP], words[(start - first) // SHARERS :]
            stride = (group.size + 1) // 2
            codes_of_group = packed[start // 2 : start // 2 + stride]
            if lift == _ONE and group.size == GROUP:
                _codes(group, codes_of_group, inverse, lower, gaps, draws)
            else:
                # Tiny scales, or a shorter last group. Byte j holds the codes j and stride + j (see `codes`).
                padded[:] = _ZERO
                for j in range(stride):
                    padded[j] = group[j] * lift
                for j in range(group.size - stride):
                    padded[_HALF + j] = group[stride + j] * lift
                _codes(padded, codes, inverse, lower, gaps, draws)
                codes_of_group[:] = codes[:stride]


@jit
def _table(levels: Any, scale: Any) -> Any:
    v1, v2, v3 = np.float32(levels[1] * scale), np.float32(levels[2] * scale), np.float32(levels[3] * scale)
    v4, v5, v6 = np.float32(levels[4] * scale), np.float32(levels[5] * scale), np.float32(levels[6] * scale)
    return np.float32(levels[0] * scale), v1, v2, v3, v4, v5, v6, np.float32(levels[7] * scale)


@jit
def _value(code: Any, table: Any) -> Any:
    # Selections instead of loads from the table, which would not vectorise.
    v0, v1, v2, v3, v4, v5, v6, v7 = table
    is_odd = np.int32(code & _BIT1) != _ZERO_BITS
    is_second = np.int32(code & _BIT2) != _ZERO_BITS
    is_upper = np.int32(code & _BIT4) != _ZERO_BITS
    is_negative = np.int32(code & _SIGN) != _ZERO_BITS
    first = v1 if is_odd else v0
    second = v3 if is_odd else v2
    third = v5 if is_odd else v4
    fourth = v7 if is_odd else v6
    lower = second if is_second else first
    upper = fourth if is_second else third
    value = upper if is_upper else lower
    return np.float32(-value) if is_negative else value


@jit
def _decode_group(packed: Any, table: Any, out: Any) -> None:
    prefer_wide_vectors()
    for j in range(_HALF):
        code = np.int32(packed[j])
        out[j], out[_HALF + j] = _value(code, table), _value(np.int32(code >> _BIT4), table)


@jit
def _add_group(packed: Any, table: Any, out: Any, factor: Any) -> None:
    prefer_wide_vectors()
    for j in range(_HALF):
        code = np.int32(packed[j])
        out[j] += np.float32(factor * _value(code, table))
        out[_HALF + j] += np.float32(factor * _value(np.int32(code >> _BIT4), table))


@jit
def _decode_loop(levels: Any, scales: Any, packed: Any, out: Any, block: Any, factor: Any, adds: Any) -> None:
    for start in range(0, out.size, GROUP):
        table = _table(levels, scales[start // block])
        group = out[start : start + GROUP]
        stride = (group.size + 1) // 2
        codes_of_group = packed[start // 2 : start // 2 + stride]
        if group.size == GROUP and adds:
            _add_group(codes_of_group, table, group, factor)
        elif group.size == GROUP:
            _decode_group(codes_of_group, table, group)
        else:
            for j in range(group.size):
                value = _value(
                    np.int32(codes_of_group[j] if j < stride else codes_of_group[j - stride] >> _BIT4), table
                )
                group[j] = group[j] + np.float32(factor * value) if adds else value


_ones, _bytes = np.ones(8, np.float32), np.ones(4, np.uint8)
_levels = np.arange(LEVELS + 1, dtype=np.float32)
_count_loop.sample(lambda: (_ones, _ones[:1].copy(), np.zeros(BINS, np.uint32), 256, 1))
_encode_loop.sample(lambda: (_ones, _levels, _ones[:1].copy(), _bytes.copy(), 256, 0, 0, 0, 0, 0))
_decode_loop.sample(lambda: (_levels, _ones[:1], _bytes, _ones.copy(), 256, np.float32(1.0), True))
