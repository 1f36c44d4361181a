"""Bit packing compared with a short Python reference, for every width and number of codes, on CPU and GPU."""

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from hpcdist.compression.codes import (
    GROUP,
    WIDTHS,
    pack,
    pack_arrays,
    packed_bytes,
    rows_of,
    spread,
    unpack_arrays,
)

counts = st.integers(0, 3 * GROUP + 9)


def reference_packing(codes, bits):
    """Pack byte j of a group from the codes j, j + bytes, ..., with the first in the lowest bits, as documented."""
    packed = b""
    for start in range(0, codes.size, GROUP):
        group = [int(code) for code in codes[start : start + GROUP]]
        stride = (len(group) * bits + 7) // 8
        packed += bytes(sum(code << bits * k for k, code in enumerate(group[j::stride])) for j in range(stride))
    return packed


def draw_codes(n, bits, seed):
    return np.random.default_rng(seed).integers(0, 1 << bits, n).astype(np.uint8)


@given(counts, st.sampled_from(WIDTHS), st.integers(0, 99))
@example(0, 4, 0)
@example(1, 1, 0)
@example(GROUP + 1, 2, 0)
def test_pack_and_unpack_round_trip(n, bits, seed):
    codes = draw_codes(n, bits, seed)
    want = reference_packing(codes, bits)
    assert len(want) == packed_bytes(n, bits) == -(-n * bits // 8)
    packed, back = np.full(len(want), 0xAA, np.uint8), np.full(n, 0xAA, np.uint8)
    pack_arrays(codes, bits, packed)
    assert packed.tobytes() == want
    unpack_arrays(packed, bits, back)
    assert (back == codes).all()


@given(st.integers(1, GROUP), st.sampled_from((2, 4)), st.integers(0, 99))
@example(1, 2, 0)
@example(GROUP, 4, 0)
def test_group_loop_packs_like_the_array_version(n, bits, seed):
    codes = draw_codes(n, bits, seed)
    scratch = np.full(GROUP, 0xFF, np.uint8)  # left over from an earlier group
    scratch[:n] = codes
    packed = np.full(packed_bytes(n, bits), 0xAA, np.uint8)
    pack(scratch, n, bits, packed)
    assert packed.tobytes() == reference_packing(codes, bits)


@pytest.mark.parametrize("bits", WIDTHS)
def test_gpu_packs_the_same_bytes(gpu, bits):
    codes = draw_codes(2 * GROUP + 77, bits, 1)
    packed, back = gpu.empty(packed_bytes(codes.size, bits), np.uint8), gpu.empty(codes.size, np.uint8)
    pack_arrays(gpu.asarray(codes), bits, packed)
    unpack_arrays(packed, bits, back)
    assert packed.get().tobytes() == reference_packing(codes, bits)
    assert (back.get() == codes).all()


@given(st.integers(0, 40), st.integers(1, 9))
def test_rows_of_and_spread(n, width):
    values = np.arange(n)
    rows = rows_of(values, width)
    assert [int(v) for row in rows for v in row.reshape(-1)] == list(range(n))
    assert all(row.shape[1] == width or (row.shape[0] == 1 and row is rows[-1]) for row in rows)
    assert (spread(np.arange(-(-n // width), dtype=np.float32), width, n) == values // width).all()
