"""Casts: rounding like numpy and ml_dtypes, saturation, error bounds, and sums of payloads."""

import ml_dtypes
import numpy as np
import pytest

from harness.compressed.compressors import difficult_values, encode_and_decode, encode_values
from hpcdist.compression.casts import LARGEST16, LARGEST_BFLOAT16, BFloat16, Float16

CASTS = [(Float16(), np.float16, LARGEST16), (BFloat16(), ml_dtypes.bfloat16, LARGEST_BFLOAT16)]


@pytest.mark.parametrize(("cast", "dtype", "largest"), CASTS)
def test_casts_round_to_nearest_even_and_saturate(cast, dtype, largest):
    assert largest == np.float32(ml_dtypes.finfo(dtype).max)
    words = np.random.default_rng(1).integers(0, 1 << 32, 200_000, np.uint64).astype(np.uint32).view(np.float32)
    ties = np.arange(0, 1 << 16, dtype=np.uint16).view(dtype).astype(np.float32)
    between = ties.view(np.uint32) | np.uint32(1 << 15 if dtype is ml_dtypes.bfloat16 else 1 << 12)
    for given in (words, ties, between.view(np.float32), *difficult_values().values()):
        finite = given[np.isfinite(given)]
        with np.errstate(over="ignore"):
            want = np.clip(finite, -largest, largest).astype(dtype)
        assert encode_values(cast, finite).tobytes() == want.tobytes()
        assert (encode_and_decode(cast, finite) == want.astype(np.float32)).all()


@pytest.mark.parametrize(
    ("cast", "relative", "least"), [(Float16(), 2.0**-11, 2.0**-25), (BFloat16(), 2.0**-8, 2.0**-134)]
)
def test_errors_are_within_the_bound(cast, relative, least):
    for name, given in difficult_values().items():
        wide = given.astype(np.float64)
        if isinstance(cast, Float16):
            wide = np.clip(wide, -65504, 65504)
        error = np.abs(encode_and_decode(cast, given) - wide)
        bound = np.maximum(np.abs(wide) * relative, least)
        within = (
            error <= bound
            if isinstance(cast, Float16)
            else error[np.abs(wide) < LARGEST_BFLOAT16] <= bound[np.abs(wide) < LARGEST_BFLOAT16]
        )
        assert within.all(), name


@pytest.mark.parametrize(("cast", "dtype", "largest"), CASTS)
def test_sum_of_payloads_decodes_to_the_sum(cast, dtype, largest):
    one, other = np.arange(0, 40, dtype=np.float32), np.arange(100, 140, dtype=np.float32)  # exact in both
    payload = encode_values(cast, one)
    view = cast.summable(payload)
    assert view.dtype == dtype and cast.is_linear
    view += cast.summable(encode_values(cast, other))
    out = np.empty(40, np.float32)
    cast.decode(payload, out)
    assert (out == one + other).all()
