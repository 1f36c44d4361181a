"""Random orders of 0..size-1: drawn from all of them where they are short, else of a family that needs no memory.

`drawn` gives every order the same chance. `permute` can be asked for any index without the order being stored: an
alternating Feistel network permutes the least power of two that is not below ``size``; an image outside is sent
through again until it falls inside (cycle walking; Black and Rogaway, CT-RSA 2002). Less than half of the images fall
outside, so two passes are expected at most. Such a network makes even permutations only; exchanging two places for one
value of a random bit makes half of all odd, as they should be.
"""

import numpy as np

ROUNDS = 8


def drawn(words: np.ndarray) -> np.ndarray:
    """Return the order (n,) int64 of 0..n-1 in which random ``words`` (n,) uint64 ascend.

    Every order is as likely as any other, as long as no two words are equal: for 2^16 words a chance of 1 in 2^33.
    """
    return np.argsort(words, kind="stable")


def exchanged(places: np.ndarray) -> np.ndarray:
    """Return ``places`` (n,) with 0 and 1 in each other's place."""
    return np.where(places < 2, 1 - places, places)


def permute(indices: np.ndarray, size: int, key: np.ndarray) -> np.ndarray:
    """Return the places of ``indices`` (n,) int64 in the permutation of ``size`` elements that ``key`` names.

    ``key`` (ROUNDS,) is uint64. Different indices below ``size`` get different places below ``size``.
    """
    assert size >= 1 and key.shape == (ROUNDS,) and key.dtype == np.uint64
    bits = (size - 1).bit_length()
    places = indices.astype(np.uint64)
    outside = np.ones(places.shape, bool)
    while outside.any():
        places[outside] = _feistel(places[outside], bits, key)
        outside = places >= np.uint64(size)
    return places.astype(np.int64)


def _feistel(values: np.ndarray, bits: int, key: np.ndarray) -> np.ndarray:
    """Permute the numbers of ``bits`` bits: each round changes one half by a hash of the other, so it can be undone."""
    low_bits = np.uint64(bits // 2)
    low_mask = np.uint64((1 << (bits // 2)) - 1)
    high_mask = np.uint64((1 << (bits - bits // 2)) - 1)
    low, high = values & low_mask, values >> low_bits
    for number in range(ROUNDS):
        if number % 2:
            low = low ^ (_hash(high, key[number]) & low_mask)
        else:
            high = high ^ (_hash(low, key[number]) & high_mask)
    return (high << low_bits) | low


def _hash(values: np.ndarray, key: np.uint64) -> np.ndarray:
    """Mix 64 bits (the finaliser of splitmix64; Steele et al., OOPSLA 2014)."""
    mixed = values ^ key
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))
