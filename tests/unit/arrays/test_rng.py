"""Philox4x32-10: the known answers of its authors, for both implementations."""

import numpy as np
import pytest

from hpcdist.arrays.rng import philox, philox_arrays

# Counter, key, words: the test vectors of Random123 1.14.
ANSWERS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "words"), ANSWERS)
def test_philox_matches_known_answers(counter, key, words):
    received = np.zeros(4, np.uint32)
    philox(received, 1, *counter, *key)
    assert tuple(received) == words
    arrays = philox_arrays(tuple(np.full((2, 1), word, np.uint64) for word in counter), key)
    assert all((array == word).all() for array, word in zip(arrays, words, strict=True))


def test_consecutive_counters_match_array_version(rng):
    first, *others = (int(word) for word in rng.integers(0, 1 << 31, 6))
    words = np.zeros(4 * 37, np.uint32)
    philox(words, 37, first, *others)
    counters = first + np.arange(37, dtype=np.uint64)
    want = philox_arrays((counters, *others[:3]), tuple(others[3:]))
    assert (np.stack(want) == words.reshape(37, 4).T).all()
