"""Helpers for tests of compressors: difficult input values, and encoding and decoding."""

import numpy as np

from hpcdist.arrays.backend import Array
from hpcdist.compression.compressor import Compressor, RandomKey

KEY = RandomKey(seed=0x123456789ABCDEF, step=17, rank=3, tensor=5)
LARGEST = float(np.finfo(np.float32).max)
SMALLEST = 2.0**-149


def difficult_values() -> dict[str, np.ndarray]:
    """Return float32 inputs by name."""
    rng = np.random.default_rng(7)
    mixed = rng.standard_normal(1000)
    mixed[256:512] = 0.0
    mixed[512:768] *= 1e-42
    mixed[768:] *= 1e37
    signed = rng.choice([-1.0, 1.0], 515)
    made = {
        "empty": np.zeros(0),
        "one": np.array([-0.3]),
        "zeros of both signs": np.array([0.0, -0.0, 0.0]),
        "zero blocks": np.zeros(700),
        "a block": rng.standard_normal(256),
        "one more than a block": rng.standard_normal(257),
        "uneven": rng.standard_normal(2 * 512 + 37),
        "heavy tails": rng.standard_t(2, 1500),
        "subnormal": signed * SMALLEST * rng.integers(0, 1000, 515),
        "the smallest": signed * SMALLEST,
        "huge": signed * LARGEST,
        "all alike": np.full(300, 0.7),
        "blocks of all sizes": mixed,
    }
    return {name: array.astype(np.float32) for name, array in made.items()}


def encode_values(compressor: Compressor, given: Array, key: RandomKey = KEY, fill: int = 0xAA) -> np.ndarray:
    """Return the payload of numpy values, written into memory with other contents before."""
    payload = np.full(compressor.payload_bytes(given.size), fill, np.uint8)
    compressor.encode(given, payload, key)
    return payload


def decode_values(compressor: Compressor, payload: np.ndarray, n: int) -> np.ndarray:
    """Return the n values of a payload."""
    out = np.full(n, np.nan, np.float32)
    compressor.decode(payload, out)
    return out


def encode_and_decode(compressor: Compressor, given: np.ndarray, key: RandomKey = KEY) -> np.ndarray:
    """Return the values after encoding and decoding."""
    return decode_values(compressor, encode_values(compressor, given, key), given.size)


def student_t_values(n: int, seed: int) -> np.ndarray:
    """Return values with heavy tails: Student's t distribution with 2 degrees of freedom."""
    return np.random.default_rng(seed).standard_t(2, n).astype(np.float32)
