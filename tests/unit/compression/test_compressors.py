"""Requirements for every compressor of fixed size: payload bytes, extreme values, equal bits on a GPU, errors."""

import numpy as np
import pytest

from harness.compressed.compressors import KEY, decode_values, difficult_values, encode_values
from harness.marks import cases
from hpcdist.compression.adaptive import Adaptive
from hpcdist.compression.casts import BFloat16, Float16
from hpcdist.compression.compressor import Compressor, RandomKey, align
from hpcdist.compression.sign import SignSgd
from hpcdist.compression.uniform import Blockwise, Qsgd
from hpcdist.errors import ConfigurationError, UsageError


def block_count(n, width):
    return (n + width - 1) // width


# Each compressor with the formula of its payload bytes for n values.
COMPRESSORS = {
    "float16": (Float16(), lambda n: 2 * n),
    "bfloat16": (BFloat16(), lambda n: 2 * n),
    "int8": (Blockwise(), lambda n: n + 4 * block_count(n, 256)),
    "int8 by draws": (Blockwise(rounding="stochastic", block=512), lambda n: n + 4 * block_count(n, 512)),
    "int4": (Blockwise(bits=4), lambda n: block_count(n, 2) + 4 * block_count(n, 256)),
    "int4 by draws": (Blockwise(bits=4, rounding="stochastic"), lambda n: block_count(n, 2) + 4 * block_count(n, 256)),
    "qsgd 2": (Qsgd(bits=2, bucket=256), lambda n: block_count(n, 4) + 4 * block_count(n, 256)),
    "qsgd 4": (Qsgd(), lambda n: block_count(n, 2) + 4 * block_count(n, 512)),
    "qsgd 8": (Qsgd(bits=8, bucket=1024), lambda n: n + 4 * block_count(n, 1024)),
    "adaptive": (Adaptive(), lambda n: 32 + 4 * block_count(n, 256) + block_count(n, 2) if n else 0),
    "adaptive, large blocks": (
        Adaptive(block=768),
        lambda n: 32 + 4 * block_count(n, 768) + block_count(n, 2) if n else 0,
    ),
    "sign": (SignSgd(), lambda n: 4 + block_count(n, 8) if n else 0),
    "sign, norm": (SignSgd(scale="norm"), lambda n: 4 + block_count(n, 8) if n else 0),
}
VALUES = difficult_values()
every = pytest.mark.parametrize("compressor", [made for made, _ in COMPRESSORS.values()], ids=list(COMPRESSORS))


@pytest.mark.parametrize(("compressor", "formula"), COMPRESSORS.values(), ids=list(COMPRESSORS))
def test_payload_bytes_match_the_formula(compressor, formula):
    for n in (*range(20), 255, 256, 257, 511, 512, 513, 767, 768, 769, 1000, 1024, 1025, 123457):
        assert compressor.payload_bytes(n) == formula(n)
    for given in VALUES.values():
        payload = encode_values(compressor, given)
        assert payload.size == formula(given.size)
        # Every byte is written, and none is random.
        assert (payload == encode_values(compressor, given, fill=0x55)).all()


@every
@pytest.mark.parametrize("name", VALUES)
def test_extreme_values_stay_finite_and_unchanged(compressor, name):
    given = VALUES[name]
    before = given.copy()
    payload = encode_values(compressor, given)
    got = decode_values(compressor, payload, given.size)
    assert (given.view(np.uint32) == before.view(np.uint32)).all()
    assert np.isfinite(got).all()
    furthest = float(np.abs(given).max(initial=0)) * (np.sqrt(1024) if isinstance(compressor, Qsgd) else 1 + 2**-8)
    assert float(np.abs(got).max(initial=0)) <= furthest
    if not given.any():
        assert not got.any()
    for factor in (1.0, -1.0, 0.3):
        start = np.linspace(-1, 1, given.size, dtype=np.float32)
        out = start.copy()
        with np.errstate(over="ignore"):
            compressor.add(payload, out, factor)
            assert (out == start + np.float32(factor) * got).all()


@every
def test_bits_depend_only_on_the_key(compressor):
    given = VALUES["heavy tails"]
    first = encode_values(compressor, given)
    others = [
        RandomKey(1, 17, 3, 5),
        RandomKey(KEY.seed, 18, 3, 5),
        RandomKey(KEY.seed, 17, 4, 5),
        RandomKey(KEY.seed, 17, 3, 6),
    ]
    differs = [bool((encode_values(compressor, given, other) != first).any()) for other in others]
    assert differs == [compressor.is_random] * 4


def test_key_stream_differs_from_dropout_streams():
    words = KEY.words
    assert words[:3] == (5, 17, 3) and words[3] == KEY.seed & 0xFFFFFFFF
    assert words[4] != KEY.seed >> 32 < 1 << 32 and all(0 <= word < 1 << 32 for word in words)
    assert RandomKey(KEY.seed + (1 << 40), 17, 3, 5).words != words  # all 64 bits of the seed are used


@every
@pytest.mark.parametrize("name", VALUES)
def test_gpu_gives_the_same_bits(gpu, compressor, name):
    given = VALUES[name]
    want = encode_values(compressor, given)
    start = np.linspace(-1, 1, given.size, dtype=np.float32)
    added = start.copy()
    with np.errstate(over="ignore"):
        compressor.add(want, added, 0.3)
    on_device, payload = gpu.asarray(given), gpu.asarray(np.full_like(want, 0xAA))
    out, total = gpu.empty(given.size, np.float32), gpu.asarray(start)
    gpu.LOG.clear()
    compressor.encode(on_device, payload, KEY)
    compressor.decode(payload, out)
    compressor.add(payload, total, 0.3)
    assert not gpu.LOG.events  # no copies and no waits
    assert payload.get().tobytes() == want.tobytes()
    assert out.get().tobytes() == decode_values(compressor, want, given.size).tobytes()
    assert total.get().tobytes() == added.tobytes()


@every
def test_buffers_of_wrong_size_or_type_are_rejected(compressor):
    given, payload = np.ones(600, np.float32), np.zeros(compressor.payload_bytes(600) + 64, np.uint8)
    fits = payload[:-64]
    with pytest.raises(UsageError, match="the result of payload_bytes"):
        compressor.encode(given, payload, KEY)
    with pytest.raises(UsageError, match="the result of payload_bytes"):
        compressor.decode(fits.view(np.int8), given)
    with pytest.raises(UsageError, match="pass a contiguous float32"):
        compressor.add(fits, np.ones(600))
    with pytest.raises(UsageError, match="pass a contiguous float32"):
        compressor.encode(np.ones(1200, np.float32)[::2], fits, KEY)
    with pytest.raises(UsageError, match="use align"):
        compressor.encode(given, payload[1:][: fits.size], KEY)


@every
def test_summable_rejects_nonlinear_compressors(compressor):
    payload = encode_values(compressor, VALUES["uneven"])
    if compressor.is_linear:
        assert np.shares_memory(compressor.summable(payload), payload)
    else:
        with pytest.raises(UsageError, match="cannot be summed without being decoded"):
            compressor.summable(payload)


def test_incomplete_compressor_cannot_be_created():
    class Half(Compressor):
        name = "half"

        def payload_bytes(self, n):
            return n

    with pytest.raises(TypeError, match="abstract"):
        Half()


def test_payloads_are_aligned_to_words():
    assert [align(offset) for offset in (0, 1, 3, 4, 5, 64)] == [0, 4, 4, 4, 8, 64]


@cases(
    "make",
    lambda: Blockwise(bits=3),
    lambda: Blockwise(block=0),
    lambda: Blockwise(block=300),
    lambda: Blockwise(rounding="up"),
    lambda: Qsgd(bits=1),
    lambda: Qsgd(bucket=128),
    lambda: Qsgd(bucket=768),
    lambda: Adaptive(block=100),
    lambda: SignSgd(scale="max"),
)
def test_invalid_settings_are_rejected(make):
    with pytest.raises(ConfigurationError, match="choose"):
        make()
