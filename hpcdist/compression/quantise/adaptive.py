"""Adaptive levels quantisation (ALQ): 4 bits per value, a sign and one of 8 levels fitted to the tensor.

ALQ of Faghri et al. (arXiv:2010.12460), with block scales: magnitudes are divided by the largest magnitude S of their
block and rounded stochastically, without bias, to one of the two neighbouring levels. The levels minimise the variance
for the given values. The error of a value is below S times the distance between its two neighbouring levels. The
variance is 0.14 (Student's t) to 0.7 (normal) times the variance of equally spaced levels.

Levels are fitted by coordinate descent. Let F be the distribution of the divided magnitudes, weighted by S^2. Between
fixed neighbours a < c, the best level b has F(b) = F(c) - integral from a to c of (r - a) / (c - a) dF(r). F is a
histogram: sums over bins are integers that float64 holds exactly, so every processor computes the same levels.
"""

from dataclasses import dataclass
from types import ModuleType
from typing import Any, ClassVar, Final

import numpy as np

from hpcdist.arrays.backend import Array, is_device, namespace
from hpcdist.arrays.intrinsics import bits_of
from hpcdist.arrays.jit import Kernel, jit
from hpcdist.arrays.rng import philox
from hpcdist.compression.compressor import DenseCompressor, RandomKey
from hpcdist.compression.quantise import codes as coding
from hpcdist.compression.quantise.codes import (
    GROUP,
    MAXIMUM,
    WORDS,
    inverse_of,
    largest,
    lift_of,
    pack,
    packed_bytes,
    unit,
)
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
    """Return (bin edges, bin centres, initial levels) for histograms of magnitudes. ``xp``: numpy or cupy.

    Edges: BINS + 1 float64 numbers from 0 to 1. Levels: bin indices of evenly spaced quantisation levels.
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
    """Return the index (uint32) of the histogram bin of a ``magnitude`` in [0, 1]. Callable from compiled kernels."""
    # The bits of positive floats are ordered as their values, so a bin is an exponent and the 5 upper fraction bits.
    word = np.uint32(bits_of(magnitude) >> SHIFT)
    above = np.uint32((word if word > BASE else BASE) - BASE)
    return above if above < _LAST else _LAST


def bins_arrays(magnitudes: Array) -> Array:
    """Return the indices (int64) of the histogram bins of float32 ``magnitudes``, on the host or a GPU."""
    xp = namespace(magnitudes)
    words = (magnitudes.view(np.uint32) >> SHIFT).astype(np.int64)
    return xp.minimum(xp.maximum(words, int(BASE)) - int(BASE), BINS - 1)


def spacing(rows: int, block: int) -> int:
    """Return the sampling stride n: every n-th block is sampled, so that about SAMPLE values are used.

    ``rows``: number of blocks. ``block``: number of values per block.
    """
    return max(1, -(-rows // max(1, SAMPLE // block)))


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
_ZERO: Final = np.float32(0.0)
_ONE: Final = np.float32(1.0)
_NONE: Final = np.int32(0)
_SIGN: Final = np.int32(LEVELS + 1)  # the sign bit of a code


@dataclass(frozen=True, kw_only=True)
class Adaptive(DenseCompressor):
    """Compressor to 4-bit codes, with levels fitted to the values, and one scale (the maximum) per ``block`` values."""

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
        levels, scales, packed = self._parts(payload, values.size)
        apart = spacing(scales.size, self.block)
        counts = namespace(values).zeros(BINS, np.uint32)
        if is_device(values):
            for rows, place in self._blocks(values):
                scales[place] = coding.scales_arrays(rows, MAXIMUM, self.block)
            _count_arrays(values, scales, counts, self.block, apart)
            levels[...] = fit_levels(counts)
            self._encode_arrays(values, levels, scales, packed, key)
        else:
            _scales_loop(values, scales, self.block)
            _count_loop(values, scales, counts, self.block, apart)
            levels[...] = fit_levels(counts)
            _encode_loop(values, levels, scales, packed, self.block, *key.words)

    def _decode_on_host(self, payload: Array, out: Array, factor: np.float32 | None = None) -> None:
        loop = _decode_loop if factor is None else _add_loop
        loop(*self._parts(payload, out.size), out, self.block, _ONE if factor is None else factor)

    def _decoded(self, payload: Array, n: int) -> Array:
        levels, scales, packed = self._parts(payload, n)
        xp = namespace(scales)
        codes = xp.empty(n, np.uint8)
        coding.unpack_arrays(packed, BITS, codes)
        signed = xp.concatenate([levels, -levels])
        return signed[codes.astype(np.int64)] * coding.spread(scales, self.block, n)

    def _parts(self, payload: Array, n: int) -> tuple[Array, Array, Array]:
        codes_at = HEAD_BYTES + 4 * -(-n // self.block)
        words = payload[:codes_at].view(np.float32)
        return words[: LEVELS + 1], words[LEVELS + 1 :], payload[codes_at:]

    def _blocks(self, values: Array) -> list[tuple[Array, slice]]:
        blocks, first = [], 0
        for rows in coding.rows_of(values, self.block):
            blocks.append((rows, slice(first, first + rows.shape[0])))
            first += rows.shape[0]
        return blocks

    def _encode_arrays(self, values: Array, levels: Array, scales: Array, packed: Array, key: RandomKey) -> None:
        xp = namespace(values)
        lift, inverse = coding.lifts_arrays(scales, 1)
        n, block = values.size, self.block
        x = xp.absolute(values) * coding.spread(lift, block, n) * coding.spread(inverse, block, n)
        r = xp.minimum(x, _ONE)
        k = (r[:, None] >= levels[None, 1:LEVELS]).sum(axis=1)
        widths = _ONE / (levels[1:] - levels[:-1])
        up = coding.units_arrays(values, key.words) < (r - levels[k]) * widths[k]
        codes = k + up + _SIGN * (values < _ZERO)
        coding.pack_arrays(codes.astype(np.uint8), BITS, packed)


@jit
def _scales_loop(values: Any, scales: Any, block: Any) -> None:
    for b in range(scales.size):
        scales[b] = largest(values[b * block : (b + 1) * block])


@jit
def _count_loop(values: Any, scales: Any, counts: Any, block: Any, apart: Any) -> None:
    top = largest(scales[::apart])
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
def _codes(values: Any, codes: Any, lift: Any, inverse: Any, levels: Any, widths: Any, words: Any) -> None:
    # Scalars instead of array elements, which would be loaded again for each value: so the loop vectorises.
    a, b, c, d, e, f = levels[1], levels[2], levels[3], levels[4], levels[5], levels[6]
    first, wa, wb, wc, wd, we, wf = widths[0], widths[1], widths[2], widths[3], widths[4], widths[5], widths[6]
    for j in range(values.size):
        x = np.float32(np.float32(abs(values[j]) * lift) * inverse)
        r = x if x < _ONE else _ONE
        # The level below r, 1 / (distance to the next level), and the level's index: selections without branches.
        low, width = (a, wa) if r >= a else (_ZERO, first)
        low, width = (b, wb) if r >= b else (low, width)
        low, width = (c, wc) if r >= c else (low, width)
        low, width = (d, wd) if r >= d else (low, width)
        low, width = (e, we) if r >= e else (low, width)
        low, width = (f, wf) if r >= f else (low, width)
        lower = np.int32(np.int32(np.int32(r >= a) + np.int32(r >= b)) + np.int32(r >= c))
        upper = np.int32(np.int32(np.int32(r >= d) + np.int32(r >= e)) + np.int32(r >= f))
        up = np.int32(unit(words[j]) < np.float32(np.float32(r - low) * width))
        sign = _SIGN if values[j] < _ZERO else _NONE
        codes[j] = np.uint8(np.int32(np.int32(np.int32(lower + upper) + up) + sign))


@jit
def _encode_loop(values, levels, scales, packed, block, counter1, counter2, counter3, key0, key1):  # type: ignore[no-untyped-def]
    words, codes = np.empty(GROUP, np.uint32), np.empty(GROUP, np.uint8)
    widths = np.empty(LEVELS, np.float32)
    for k in range(LEVELS):
        widths[k] = np.float32(_ONE / np.float32(levels[k + 1] - levels[k]))
    for start in range(0, values.size, GROUP):
        group = values[start : start + GROUP]
        place = packed[start // 2 : start // 2 + (group.size + 1) // 2]
        scale = scales[start // block]
        philox(words, (group.size + 3) // WORDS, start // WORDS, counter1, counter2, counter3, key0, key1)
        _codes(group, codes[: group.size], lift_of(scale), inverse_of(scale, 1), levels, widths, words)
        pack(codes, group.size, BITS, place)


@jit
def _table(levels: Any, scale: Any, table: Any) -> None:
    # The decoded values of the 16 codes in a block of this scale: positive levels, then negative levels.
    for k in range(LEVELS + 1):
        table[k] = np.float32(levels[k] * scale)
        table[k + LEVELS + 1] = np.float32(-table[k])


def _decoder(*, adds: bool) -> Kernel:
    @jit
    def loop(levels: Any, scales: Any, packed: Any, out: Any, block: Any, factor: Any) -> None:
        table = np.empty(2 * LEVELS + 2, np.float32)
        for start in range(0, out.size, GROUP):
            group = out[start : start + GROUP]
            stride = (group.size + 1) // 2  # byte j holds the codes j and stride + j (see `codes`)
            place = packed[start // 2 : start // 2 + stride]
            _table(levels, scales[start // block], table)
            high = group[stride:]
            for j in range(stride):
                value = table[place[j] & 15]
                if adds:
                    group[j] += np.float32(factor * value)
                else:
                    group[j] = value
            for j in range(high.size):
                value = table[place[j] >> 4]
                if adds:
                    high[j] += np.float32(factor * value)
                else:
                    high[j] = value

    return loop


_decode_loop, _add_loop = _decoder(adds=False), _decoder(adds=True)


_ones, _bytes = np.ones(8, np.float32), np.ones(4, np.uint8)
_levels = np.arange(LEVELS + 1, dtype=np.float32)
_scales_loop.sample(lambda: (_ones, _ones[:1].copy(), 256))
_count_loop.sample(lambda: (_ones, _ones[:1], np.zeros(BINS, np.uint32), 256, 1))
_encode_loop.sample(lambda: (_ones, _levels, _ones[:1], _bytes.copy(), 256, 0, 0, 0, 0, 0))
for _loop in (_decode_loop, _add_loop):
    _loop.sample(lambda: (_levels, _ones[:1], _bytes, _ones.copy(), 256, np.float32(1.0)))
