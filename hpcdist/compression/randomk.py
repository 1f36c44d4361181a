"""Random-k: values at k random indices that follow from a key, so that only values are sent and payloads can be summed.

k = max(1, ceil(density n)). A payload is 16 bytes that identify the random draw, and k float32 values. Ranks that
encode with the same key, ``rank`` 0, use the same indices. So the sum of their payloads is the payload of the sum.

If scaled by n/k, the decoded values are unbiased, with E ||C(x) - x||^2 = (n/k - 1) ||x||^2 (arXiv:1809.07599;
arXiv:1710.09854). Unscaled, E ||x - C(x)||^2 = (1 - k/n) ||x||^2, as error feedback needs. Scaled values with n/k > 2
would let the residual grow without bound.

One index is drawn in each of k strata of almost equal size. One common rotation of all indices makes every probability
exactly k/n. A draw costs O(k).
"""

from dataclasses import dataclass
from typing import Any, ClassVar, Final

import numpy as np

from hpcdist.arrays.backend import Array, is_device, namespace
from hpcdist.arrays.jit import jit
from hpcdist.arrays.rng import philox, philox_arrays
from hpcdist.compression import coo
from hpcdist.compression.compressor import Compressor, RandomKey
from hpcdist.errors import UsageError

HEADER_BYTES: Final = 16  # four words: tensor and step of the key, and two words of the seed
_COUNTERS: Final = 256  # drawn at a time, so that the words stay in the first-level cache
_OFFSET: Final = 0xFFFF_FFFF  # the counter of the offset; counters of the strata end below 2^29


@dataclass(frozen=True, kw_only=True)
class RandomK(Compressor):
    """Compressor that sends k = ceil(``density`` n) of n values, at random indices that all ranks share."""

    density: float
    scaled: bool = True  # multiply the values by n / k, for use without error feedback

    name: ClassVar[str] = "randomk"
    is_linear: ClassVar[bool] = True
    is_random = True  # the indices follow from the key

    def __post_init__(self) -> None:
        coo.check_density(self.density)

    def payload_bytes(self, n: int) -> int:
        return HEADER_BYTES + 4 * coo.count_of(n, self.density) if n else 0

    def _encode(self, values: Array, payload: Array, key: RandomKey) -> None:
        if key.rank:
            raise UsageError(
                f"randomk got a RandomKey with rank = {key.rank}; pass rank 0 on all ranks, since only payloads with "
                "the same indices may be summed"
            )
        _name(payload, key)
        where, chosen = indices(payload, values.size), self.summable(payload)
        chosen[...] = values[where]
        if self.scaled:
            chosen *= np.float32(values.size / where.size)

    def _decode(self, payload: Array, out: Array) -> None:
        out[...] = 0
        out[indices(payload, out.size)] = self.summable(payload)

    def _add(self, payload: Array, out: Array, factor: np.float32) -> None:
        out[indices(payload, out.size)] += factor * self.summable(payload)  # indices are distinct

    def poison(self, payload: Array, key: RandomKey) -> None:
        if payload.size:
            _name(payload, key)
            self.summable(payload)[...] = np.float32(np.nan)

    def summable(self, payload: Array) -> Array:
        """Return a view of the k float32 values in ``payload``. With the same key, all ranks send the same indices."""
        return payload[HEADER_BYTES:].view(np.float32)


def _name(payload: Array, key: RandomKey) -> None:
    tensor, step, _, low, high = key.words
    named = payload[:HEADER_BYTES].view(np.uint32)
    for place, word in enumerate((tensor, step, low, high)):
        named[place] = np.uint32(word)


def indices(payload: Array, n: int) -> Array:  # (k,) of int64
    """Return the indices of the values in ``payload``: k distinct random numbers from 0 to n - 1."""
    k = (payload.size - HEADER_BYTES) // 4
    named = payload[:HEADER_BYTES].view(np.uint32)
    if is_device(payload):
        return _indices_device(named, n, k)
    where = np.empty(k, np.int64)
    _draw(named, n, where)
    return where


@jit
def _draw(named: Any, n: Any, where: Any) -> None:
    words = np.empty(4 * _COUNTERS, np.uint32)
    philox(words, 1, _OFFSET, named[0], named[1], 0, named[2], named[3])
    offset = np.int64((np.uint64(words[0]) << np.uint64(32) | np.uint64(words[1])) % np.uint64(n))
    k = where.size
    length, longer = n // k, n % k
    start, turned = 0, 0  # turned: the remainder of j * longer / k
    for j in range(k):
        if j % (4 * _COUNTERS) == 0:
            philox(words, _COUNTERS, j // 4, named[0], named[1], 0, named[2], named[3])
        turned += longer
        size = length
        if turned >= k:
            turned -= k
            size += 1
        index = start + (np.int64(words[j % (4 * _COUNTERS)]) * size >> 32) + offset
        where[j] = index - n if index >= n else index
        start += size


def _indices_device(named: Array, n: int, k: int) -> Array:
    xp = namespace(named)
    wide = named.astype(np.uint64)

    def words(first: Array) -> tuple[Array | int, ...]:
        return philox_arrays((first, wide[0], wide[1], 0), (wide[2], wide[3]))

    high, low, _, _ = words(xp.zeros((), np.uint64) + np.uint64(_OFFSET))
    offset = (high << np.uint64(32) | low) % np.uint64(n)
    drawn = xp.empty((-(-k // 4), 4), np.uint64)
    for place, word in enumerate(words(xp.arange(drawn.shape[0], dtype=np.uint64))):
        drawn[:, place] = word
    starts = xp.arange(k + 1, dtype=np.uint64) * np.uint64(n) // np.uint64(k)
    within = drawn.reshape(-1)[:k] * (starts[1:] - starts[:-1]) >> np.uint64(32)
    return ((starts[:-1] + within + offset) % np.uint64(n)).astype(np.int64)


_draw.sample(lambda: (np.zeros(4, np.uint32), 3, np.empty(2, np.int64)))
