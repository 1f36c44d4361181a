"""Levels that follow the values: where to put them so that rounding by draws has the least variance.

The coordinate descent of ALQ (Faghri et al., arXiv:2010.12460): with its neighbours a < c in place, the variance
of rounding all magnitudes r in [a, c] to a level b between them or to a or c is least where
F(b) = F(c) - integral from a to c of (r - a) / (c - a) dF(r), with F the distribution of the magnitudes, of which those
of a block are divided by its scale, and each block counts by the square of its scale. Levels are improved one by one,
here all odd ones at once and then all even ones, since a level depends on its neighbours only.

F is not fitted by a normal as in the paper but counted, in `BINS` bins: 32 to an octave, 20 octaves below the scale.
Levels are edges of bins, so the bin of a magnitude says between which two it lies, and sums over bins are integers that
float64 holds exactly: the same levels on every processor. It begins with equally spaced levels, those of plain
quantisation, and moves one only where that lowers the variance: what comes out is never worse on what was counted.
Edges are closer together than levels for a dozen of these at most, so this serves 4 bits and not 8.
"""

from types import ModuleType
from typing import Any, Final

import numpy as np

from hpcdist.arrays.backend import Array, is_device, namespace
from hpcdist.arrays.bits import bits_of
from hpcdist.arrays.jit import jit

SHIFT: Final = np.uint32(18)  # leaves the exponent and 5 bits of fraction: 32 bins to an octave
OCTAVES: Final = 20
BINS: Final = 32 * OCTAVES
BASE: Final = np.uint32((127 - OCTAVES) << 5)  # the bin that begins at 2^-OCTAVES, which takes all below it too
SAMPLE: Final = 1 << 16  # values that are counted at most, of blocks evenly over all
WEIGHT: Final = 1 << 10  # of the block with the largest scale: counts stay below 2^26, their moments below 2^53
SWEEPS: Final = 16  # the variance of 7 levels is within 1 % of its limit; both halves of the levels move in each
LEVELS: Final = 7  # above 0, of which the last is 1: with a sign, 4 bits


def tables(xp: ModuleType) -> tuple[Array, Array, Array]:
    """Return the edges of the bins, BINS + 1 float64 from 0 to 1, their centres, and the edges next to j / LEVELS."""
    words = xp.arange(int(BASE), int(BASE) + BINS + 1, dtype=np.uint32)
    at = (words << SHIFT).view(np.float32).astype(np.float64)
    at[0] = 0.0
    centres = (at[1:] + at[:-1]) / 2
    evenly = xp.arange(LEVELS + 1, dtype=np.float64) / LEVELS
    return at, centres, (centres[None, :] < evenly[:, None]).sum(axis=1)


_EDGES, _CENTRES, _EVENLY = tables(np)
_LAST: Final = np.uint32(BINS - 1)


@jit
def bin_of(magnitude: Any) -> Any:
    """Return the bin of a magnitude in [0, 1], as uint32. For kernels."""
    word = np.uint32(bits_of(magnitude) >> SHIFT)
    above = np.uint32((word if word > BASE else BASE) - BASE)
    return above if above < _LAST else _LAST


def bins_arrays(magnitudes: Array) -> Array:
    """Return the bins of float32 ``magnitudes`` as int64, on either processor."""
    xp = namespace(magnitudes)
    words = (magnitudes.view(np.uint32) >> SHIFT).astype(np.int64)
    return xp.minimum(xp.maximum(words, int(BASE)) - int(BASE), BINS - 1)


def spacing(rows: int, block: int) -> int:
    """Return the distance from one counted block to the next, so that no more than SAMPLE values are counted."""
    return max(1, -(-rows // max(1, SAMPLE // block)))


def fitted(counts: Array) -> Array:
    """Return the levels for ``counts`` (BINS,) of uint32: float32 (LEVELS + 1,) from 0 to 1, on its processor."""
    if is_device(counts):
        return _fitted_arrays(counts)
    chosen = _EVENLY.copy()
    _improve(counts, _EDGES, _CENTRES, chosen)
    return _EDGES[chosen].astype(np.float32)


@jit
def _improve(counts: Any, at: Any, centres: Any, chosen: Any) -> None:
    mass, moment = np.zeros(counts.size + 1), np.zeros(counts.size + 1)
    for i in range(counts.size):
        mass[i + 1] = mass[i] + counts[i]
        moment[i + 1] = moment[i] + counts[i] * centres[i]
    for sweep in range(2 * SWEEPS):
        for j in range(1 + sweep % 2, chosen.size - 1, 2):
            low, high = chosen[j - 1], chosen[j + 1]
            a, c = at[low], at[high]
            wanted = (c * mass[high] - a * mass[low] - (moment[high] - moment[low])) / (c - a)
            above = np.searchsorted(mass, wanted)
            best, least = chosen[j], _variance(low, chosen[j], high, at, mass, moment)
            for candidate in (above - 1, above):
                tried = min(max(candidate, low + 1), high - 1)
                variance = _variance(low, tried, high, at, mass, moment)
                if variance < least:
                    best, least = tried, variance
            chosen[j] = best


@jit
def _variance(low: Any, middle: Any, high: Any, at: Any, mass: Any, moment: Any) -> Any:
    """Return the variance of rounding to three levels what lies between them, but for a term without the middle one."""
    a, b, c = at[low], at[middle], at[high]
    below = (a + b) * (moment[middle] - moment[low]) - a * b * (mass[middle] - mass[low])
    return below + (b + c) * (moment[high] - moment[middle]) - b * c * (mass[high] - mass[middle])


def _fitted_arrays(counts: Array) -> Array:
    """`_improve` as array operations: all levels of a half sweep at once."""
    xp = namespace(counts)
    at, centres, chosen = tables(xp)
    mass, moment = _running(counts.astype(np.float64)), _running(counts * centres)
    for sweep in range(2 * SWEEPS):
        first = sweep % 2
        now = chosen[1 + first : LEVELS : 2]
        low, high = chosen[first : first + 2 * now.size : 2], chosen[2 + first : 3 + first + 2 * now.size : 2]
        a, c = at[low], at[high]
        wanted = (c * mass[high] - a * mass[low] - (moment[high] - moment[low])) / (c - a)
        above = (mass[None, :] < wanted[:, None]).sum(axis=1)
        best, least = now, _variance.function(low, now, high, at, mass, moment)
        for candidate in (above - 1, above):
            tried = xp.minimum(xp.maximum(candidate, low + 1), high - 1)
            variance = _variance.function(low, tried, high, at, mass, moment)
            is_better = variance < least
            best, least = xp.where(is_better, tried, best), xp.where(is_better, variance, least)
        now[...] = best
    return at[chosen].astype(np.float32)


def _running(counts: Array) -> Array:
    """Return the sums of all before each edge (BINS + 1,): exact, whatever their order (see WEIGHT)."""
    sums = namespace(counts).zeros(BINS + 1, np.float64)
    sums[1:] = counts
    apart = 1
    while apart <= BINS:
        shifted = sums[:-apart].copy()
        sums[apart:] += shifted
        apart *= 2
    return sums


_improve.sample(lambda: (np.ones(BINS, np.uint32), _EDGES, _CENTRES, _EVENLY.copy()))
