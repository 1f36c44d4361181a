"""Top-k: the k largest magnitudes of a segment and their indices, exact, ties broken by the lower index.

k = max(1, ceil(density n)), 8 k bytes. Aji & Heafield 2017 (arXiv:1704.05021); Stich et al. 2018 (arXiv:1809.07599):
||x - C(x)||^2 <= (1 - k/n) ||x||^2, biased, so it wants error feedback.

The magnitudes of floats are ordered as their bits without the sign, read as integers. On the host the k-th largest is
found by radix selection: three digits of 11, 10 and 10 bits, each counted in one pass, O(n) for every input. Before
that a sample of the segment proposes a floor that the k-th largest is hardly ever below. Where no fewer than k and
not many more than k magnitudes reach it, these are gathered and the rest goes on among them alone: the segment is
read once. A proposal that fails costs time, never exactness: four more passes. On a GPU the threshold is found bit by
bit, 31 counts over the segment, and nothing waits for the device.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, Final

import numpy as np

from hpcdist.arrays.backend import Array, is_device, namespace
from hpcdist.arrays.jit import jit
from hpcdist.compression.compressor import Compressor, RandomKey
from hpcdist.compression.sparsify import coo
from hpcdist.errors import NonFiniteError, UsageError

_MAGNITUDE: Final = np.uint32(0x7FFF_FFFF)
_INFINITE: Final = np.uint32(0x7F80_0000)
_ONE: Final = np.uint32(1)
_BITS: Final = 31
_BLOCK: Final = 16  # elements that are compared as one vector first: most blocks have none of the largest
_SAMPLE: Final = 1 << 14  # elements from which a floor is proposed
_MULTIPLIER: Final = 0x9E3779B1  # scatters the sample within its strides, so that no period of a tensor hides from it


@dataclass(frozen=True, kw_only=True)
class TopK(Compressor):
    """Send the ``density`` n largest magnitudes, at least one.

    On the host a NaN or an infinity is among them and refused with NonFiniteError; on a GPU the caller looks before.
    """

    density: float

    name: ClassVar[str] = "topk"

    def __post_init__(self) -> None:
        coo.check_density(self.density)

    def payload_bytes(self, n: int) -> int:
        """Return 8 k."""
        return coo.ENTRY_BYTES * coo.count_of(n, self.density)

    def _encode(self, values: Array, payload: Array, key: RandomKey) -> None:
        select(values, payload)  # signs kept, in ascending order of their indices

    def _decode(self, payload: Array, out: Array) -> None:
        coo.write(payload, out)

    def _add(self, payload: Array, out: Array, factor: np.float32) -> None:
        coo.add(payload, out, factor)

    def poison(self, payload: Array, key: RandomKey) -> None:
        """Write NaN at the first indices."""
        coo.indices(payload)[...] = namespace(payload).arange(payload.size // coo.ENTRY_BYTES, dtype=np.int32)
        coo.values(payload)[...] = np.float32(np.nan)


def select(values: Array, payload: Array) -> None:
    """Write the k = payload.size / 8 largest magnitudes of ``values`` (n,) to the sparse ``payload``.

    Raises UsageError for k above n, and for k = 0 unless n is 0 too.
    """
    n, k = values.size, payload.size // coo.ENTRY_BYTES
    if payload.size % coo.ENTRY_BYTES or not (1 <= k <= n or k == n == 0) or n > coo.MOST_ELEMENTS:
        raise UsageError(
            f"{payload.size} bytes for the largest of {n} elements; pass 8 for each of k elements, "
            f"1 <= k <= n, and at most {coo.MOST_ELEMENTS} elements at a time"
        )
    if n == 0:
        return
    if is_device(values):
        _select_device(values, payload, k)
        return
    words, places, threshold, ties = _threshold(values.view(np.uint32), k)
    if _emit(words, places, np.uint32(threshold), ties, payload.view(np.uint32), k):
        raise NonFiniteError(
            f"the largest of {n} elements are NaN or infinite; look for them before anything is compressed"
        )


def _threshold(words: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray, int, int]:
    """Return the bits of the k-th largest magnitude, and how many of those equal to it belong to the k largest.

    In front of them stand the words to look through for the k largest, all or some, and where these are among all.
    """
    n = words.size
    room = 2 * k + 1024
    everywhere = np.empty(0, np.int32)
    if n > 4 * _SAMPLE and room < n // 2:
        sample = np.empty(_SAMPLE, np.uint32)
        _draw(words, sample)
        expected = k * (_SAMPLE / n)
        floor, _ = _kth_largest(sample, min(_SAMPLE, int(expected + 4 * expected**0.5) + 8))
        largest, places = np.empty(room, np.uint32), np.empty(room, np.int32)
        count = _gather(words, np.uint32(floor), largest, places)
        if count > room:  # many are equal to the floor, zeros perhaps: is it the threshold?
            count = _gather(words, np.uint32(floor + 1), largest, places)
            if count < k:
                return words, everywhere, floor, k - count
        if k <= count <= room:
            return largest[:count], places[:count], *_kth_largest(largest[:count], k)
    return words, everywhere, *_kth_largest(words, k)


@jit
def _draw(words: Any, sample: Any) -> None:
    stride = words.size // sample.size
    for i in range(sample.size):
        sample[i] = words[i * stride + ((i * _MULTIPLIER) & 0xFFFFFFFF) * stride // 0x100000000]


@jit
def _gather(words: Any, floor: Any, largest: Any, places: Any) -> Any:
    # Writes the words whose magnitude is no less than floor, and where they are; returns how many there are, or one
    # more than there is room for.
    count = 0
    whole = words.size - words.size % _BLOCK
    for start in range(0, whole, _BLOCK):
        reached = False
        for i in range(_BLOCK):
            reached |= np.uint32(words[start + i] & _MAGNITUDE) >= floor
        if reached:
            if count + _BLOCK > largest.size:
                return largest.size + 1
            for i in range(_BLOCK):
                largest[count] = words[start + i]
                places[count] = start + i
                count += np.uint32(words[start + i] & _MAGNITUDE) >= floor
    for i in range(whole, words.size):
        if np.uint32(words[i] & _MAGNITUDE) >= floor:
            if count == largest.size:
                return largest.size + 1
            largest[count] = words[i]
            places[count] = i
            count += 1
    return count


@jit
def _kth_largest(words: Any, k: Any) -> Any:
    counts = np.empty(1 << 11, np.int64)
    prefix, rest, shift, width = 0, k, _BITS, 11
    while shift > 0:
        shift -= width
        counts[:] = 0
        mask = (1 << width) - 1
        for i in range(words.size):
            above = np.int64(words[i] & _MAGNITUDE) >> shift
            if above >> width == prefix:
                counts[above & mask] += 1
        digit = mask
        while counts[digit] < rest:
            rest -= counts[digit]
            digit -= 1
        prefix = (prefix << width) | digit
        width = 10
    return prefix, rest


@jit
def _emit(words: Any, places: Any, threshold: Any, ties: Any, payload: Any, k: Any) -> Any:
    # places (words,) or, where words are all, (0,). Returns how many of the k are not finite.
    written, bad = 0, 0
    for start in range(0, words.size, _BLOCK):
        stop = start + _BLOCK
        if stop <= words.size:
            least: Any = threshold if ties > 0 else np.uint32(threshold + _ONE)
            reached = False
            for i in range(_BLOCK):
                reached |= np.uint32(words[start + i] & _MAGNITUDE) >= least
            if not reached:
                continue
        for i in range(start, min(stop, words.size)):
            magnitude = np.uint32(words[i] & _MAGNITUDE)
            if magnitude > threshold or (magnitude == threshold and ties > 0):
                ties -= 1 if magnitude == threshold else 0
                payload[written] = places[i] if places.size else i
                payload[k + written] = words[i]
                written += 1
                bad += 1 if magnitude >= _INFINITE else 0
        if written == k:
            break
    return bad


def _select_device(values: Array, payload: Array, k: int) -> None:
    xp = namespace(values)
    magnitudes = values.view(np.uint32) & _MAGNITUDE
    threshold = xp.zeros((), np.uint32)
    for bit in reversed(range(_BITS)):
        candidate = threshold | np.uint32(1 << bit)
        threshold = xp.where((magnitudes >= candidate).sum() >= k, candidate, threshold)
    larger, equal = magnitudes > threshold, magnitudes == threshold
    ties = k - larger.sum()
    chosen = larger | (equal & (xp.cumsum(equal, dtype=np.int32) <= ties))
    # The index of the j-th chosen is where their number so far reaches j: no size that the host would have to know.
    where = xp.searchsorted(xp.cumsum(chosen, dtype=np.int32), xp.arange(1, k + 1, dtype=np.int32))
    coo.indices(payload)[...] = where
    coo.values(payload)[...] = values[where]


_four = np.ones(4, np.uint32)
_draw.sample(lambda: (_four, _four.copy()))
_places = np.zeros(4, np.int32)
_gather.sample(lambda: (_four, np.uint32(2), _four.copy(), _places.copy()))
_kth_largest.sample(lambda: (_four, 1))
_emit.sample(lambda: (_four, _places, np.uint32(1), 1, np.empty(2, np.uint32), 1))
