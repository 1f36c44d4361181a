"""Counter-based random numbers (Philox): a draw depends on its logical stream, not on the partition of the work."""

from typing import Any, Final

import numpy as np

from hpcdist.arrays.backend import Array
from hpcdist.arrays.jit import jit

ROUNDS: Final = 10
# Constants of Philox4x32: the two multipliers of a round, and the increments of the two key words between rounds.
_FACTORS: Final = 0xD2511F53, 0xCD9E8D57
_GROWTHS: Final = 0x9E3779B9, 0xBB67AE85
WORD: Final = 0xFFFFFFFF  # the bits of a 32-bit word
_A, _B = np.uint64(_FACTORS[0]), np.uint64(_FACTORS[1])
_GA, _GB = np.uint64(_GROWTHS[0]), np.uint64(_GROWTHS[1])
_LOW, _HALF = np.uint64(WORD), np.uint64(32)


def stream(seed: int, *keys: int) -> np.random.Generator:
    """Return a Philox4x64 random generator (Salmon et al., SC'11), seeded by ``seed`` and the integers ``*keys``."""
    return np.random.Generator(np.random.Philox(np.random.SeedSequence([seed, *keys])))


@jit
def philox(
    words: Any, count: Any, first: Any, counter1: Any, counter2: Any, counter3: Any, key0: Any, key1: Any
) -> None:
    """Write ``count`` blocks of four Philox4x32-10 random words to ``words``: uint32, of shape (4 * count,).

    Block i has the counter (``first`` + i, ``counter1``, ``counter2``, ``counter3``) and the key (``key0``, ``key1``).
    """
    # The rounds are inlined: LLVM vectorises this loop, but not a loop over calls.
    for i in range(count):
        a, b, c, d = np.uint64(first + i), np.uint64(counter1), np.uint64(counter2), np.uint64(counter3)
        k, m = np.uint64(key0), np.uint64(key1)
        for _ in range(ROUNDS):
            p, q = _A * a, _B * c  # 64-bit products: the high and the low half are the new words
            a, b = (q >> _HALF) ^ b ^ k, q & _LOW
            c, d = (p >> _HALF) ^ d ^ m, p & _LOW
            k, m = (k + _GA) & _LOW, (m + _GB) & _LOW
        words[4 * i] = a
        words[4 * i + 1] = b
        words[4 * i + 2] = c
        words[4 * i + 3] = d


def philox_arrays(counter: tuple[Array | int, ...], key: tuple[int, int]) -> tuple[Array | int, ...]:
    """Return the four Philox random words of a four-word ``counter`` and a two-word ``key``, as ints or arrays."""
    a, b, c, d = counter
    k, m = key
    for _ in range(ROUNDS):
        p, q = a * _FACTORS[0], c * _FACTORS[1]
        a, b, c, d = (q >> 32) ^ b ^ k, q & WORD, (p >> 32) ^ d ^ m, p & WORD
        k, m = (k + _GROWTHS[0]) & WORD, (m + _GROWTHS[1]) & WORD
    return a, b, c, d


philox.sample(lambda: (np.empty(4, np.uint32), 1, 0, 0, 0, 0, 0, 0))
