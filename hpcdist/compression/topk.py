"""Top-k: the k largest magnitudes of a segment and their indices, exact, ties broken by the lower index.

k = max(1, ceil(density n)); a payload has 8 k bytes. Aji & Heafield 2017 (arXiv:1704.05021); Stich et al. 2018
(arXiv:1809.07599): ||x - C(x)||^2 <= (1 - k/n) ||x||^2. Top-k is biased, so it needs error feedback.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, Final

import numpy as np

from hpcdist.arrays.backend import Array, is_device, namespace
from hpcdist.arrays.intrinsics import INFINITE, MAGNITUDE
from hpcdist.arrays.jit import jit
from hpcdist.compression import coo
from hpcdist.compression.compressor import Compressor, RandomKey
from hpcdist.errors import NonFiniteError, UsageError

_ONE: Final = np.uint32(1)
_BITS: Final = 31
_BLOCK: Final = 16  # elements compared as one vector first: most blocks have none of the largest
_SAMPLE: Final = 1 << 14  # sampled elements that propose the lower bound
_MULTIPLIER: Final = 0x9E3779B1  # scatters the sample within its strides, against tensors with a periodic structure


@dataclass(frozen=True, kw_only=True)
class TopK(Compressor):
    """Compressor that sends the values of largest magnitude. ``density``: fraction of the values to send."""

    density: float

    name: ClassVar[str] = "topk"

    def __post_init__(self) -> None:
        coo.check_density(self.density)

    def payload_bytes(self, n: int) -> int:
        return coo.ENTRY_BYTES * coo.count_of(n, self.density)

    def _encode(self, values: Array, payload: Array, key: RandomKey) -> None:
        select(values, payload)  # with signs, in ascending order of indices

    def _decode(self, payload: Array, out: Array) -> None:
        coo.write(payload, out)

    def _add(self, payload: Array, out: Array, factor: np.float32) -> None:
        coo.add(payload, out, factor)

    def poison(self, payload: Array, key: RandomKey) -> None:
        coo.indices(payload)[...] = namespace(payload).arange(payload.size // coo.ENTRY_BYTES, dtype=np.int32)
        coo.values(payload)[...] = np.float32(np.nan)


def select(values: Array, payload: Array) -> None:
    """Write the k values of largest magnitude, and their indices, to ``payload``, an array of 8 k bytes."""
    n, k = values.size, payload.size // coo.ENTRY_BYTES
    if payload.size % coo.ENTRY_BYTES or not (1 <= k <= n or k == n == 0) or n > coo.MOST_ELEMENTS:
        raise UsageError(
            f"the payload for the k largest of n = {n} elements has {payload.size} bytes; pass a payload of 8 k bytes, "
            f"with 1 <= k <= n and n <= {coo.MOST_ELEMENTS}"
        )
    if n == 0:
        return
    if is_device(values):
        _select_device(values, payload, k)  # the caller must check for NaN and infinity
        return
    words, places, threshold, ties = _threshold(values.view(np.uint32), k)
    if _emit(words, places, np.uint32(threshold), ties, payload.view(np.uint32), k):
        raise NonFiniteError(
            f"the largest of {n} elements are NaN or infinite; check that all values are finite before compression"
        )


def _threshold(words: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray, int, int]:
    # Returns (candidates, element indices of the candidates, threshold, ties). The k largest of the magnitudes `words`
    # (float32 bits) are all candidates above the threshold, and `ties` of the candidates equal to the threshold.
    # Without indices, all elements are candidates.
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
        if count > room:  # many are equal to the floor, perhaps zeros: is the floor the threshold?
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
    # Writes the words with a magnitude of at least floor, and their indices. Returns their number, or the capacity + 1
    # if there are too many.
    count = 0
    whole = words.size - words.size % _BLOCK
    for start in range(0, whole, _BLOCK):
        reached = False
        for i in range(_BLOCK):
            reached |= np.uint32(words[start + i] & MAGNITUDE) >= floor
        if reached:
            if count + _BLOCK > largest.size:
                return largest.size + 1
            for i in range(_BLOCK):
                largest[count] = words[start + i]
                places[count] = start + i
                count += np.uint32(words[start + i] & MAGNITUDE) >= floor
    for i in range(whole, words.size):
        if np.uint32(words[i] & MAGNITUDE) >= floor:
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
            above = np.int64(words[i] & MAGNITUDE) >> shift
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
    # places is (words,), or (0,) if words are the whole segment. Returns the number of non-finite selected values.
    written, bad = 0, 0
    for start in range(0, words.size, _BLOCK):
        stop = start + _BLOCK
        if stop <= words.size:
            least: Any = threshold if ties > 0 else np.uint32(threshold + _ONE)
            reached = False
            for i in range(_BLOCK):
                reached |= np.uint32(words[start + i] & MAGNITUDE) >= least
            if not reached:
                continue
        for i in range(start, min(stop, words.size)):
            magnitude = np.uint32(words[i] & MAGNITUDE)
            if magnitude > threshold or (magnitude == threshold and ties > 0):
                ties -= 1 if magnitude == threshold else 0
                payload[written] = places[i] if places.size else i
                payload[k + written] = words[i]
                written += 1
                bad += 1 if magnitude >= INFINITE else 0
        if written == k:
            break
    return bad


def _select_device(values: Array, payload: Array, k: int) -> None:
    xp = namespace(values)
    magnitudes = values.view(np.uint32) & MAGNITUDE
    threshold = xp.zeros((), np.uint32)
    for bit in reversed(range(_BITS)):
        candidate = threshold | np.uint32(1 << bit)
        threshold = xp.where((magnitudes >= candidate).sum() >= k, candidate, threshold)
    larger, equal = magnitudes > threshold, magnitudes == threshold
    ties = k - larger.sum()
    chosen = larger | (equal & (xp.cumsum(equal, dtype=np.int32) <= ties))
    # The index of the j-th chosen element is where the running count reaches j: no size is read back to the host.
    where = xp.searchsorted(xp.cumsum(chosen, dtype=np.int32), xp.arange(1, k + 1, dtype=np.int32))
    coo.indices(payload)[...] = where
    coo.values(payload)[...] = values[where]


_four = np.ones(4, np.uint32)
_draw.sample(lambda: (_four, _four.copy()))
_places = np.zeros(4, np.int32)
_gather.sample(lambda: (_four, np.uint32(2), _four.copy(), _places.copy()))
_kth_largest.sample(lambda: (_four, 1))
_emit.sample(lambda: (_four, _places, np.uint32(1), 1, np.empty(2, np.uint32), 1))
