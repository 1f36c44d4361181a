"""What every compressor of fixed size keeps to: its bytes, awkward values, the same bits on a GPU, its refusals."""

import numpy as np
import pytest

from harness.compressed.compressors import KEY, decoded, encoded, values
from harness.marks import cases
from hpcdist.compression.casts import BFloat16, Float16
from hpcdist.compression.compressor import Compressor, RandomKey, align
from hpcdist.compression.quantise.adaptive import Adaptive
from hpcdist.compression.quantise.sign import SignSgd
from hpcdist.compression.quantise.uniform import Blockwise, Qsgd
from hpcdist.errors import ConfigurationError, UsageError


def blocks(n, width):
    return (n + width - 1) // width


# With the bytes of n values, as the formulas say.
COMPRESSORS = {
    "float16": (Float16(), lambda n: 2 * n),
    "bfloat16": (BFloat16(), lambda n: 2 * n),
    "int8": (Blockwise(), lambda n: n + 4 * blocks(n, 256)),
    "int8 by draws": (Blockwise(rounding="stochastic", block=512), lambda n: n + 4 * blocks(n, 512)),
    "int4": (Blockwise(bits=4), lambda n: blocks(n, 2) + 4 * blocks(n, 256)),
    "int4 by draws": (Blockwise(bits=4, rounding="stochastic"), lambda n: blocks(n, 2) + 4 * blocks(n, 256)),
    "qsgd 2": (Qsgd(bits=2, bucket=256), lambda n: blocks(n, 4) + 4 * blocks(n, 256)),
    "qsgd 4": (Qsgd(), lambda n: blocks(n, 2) + 4 * blocks(n, 512)),
    "qsgd 8": (Qsgd(bits=8, bucket=1024), lambda n: n + 4 * blocks(n, 1024)),
    "adaptive": (Adaptive(), lambda n: 32 + 4 * blocks(n, 256) + blocks(n, 2) if n else 0),
    "adaptive, large blocks": (Adaptive(block=768), lambda n: 32 + 4 * blocks(n, 768) + blocks(n, 2) if n else 0),
    "sign": (SignSgd(), lambda n: 4 + blocks(n, 8) if n else 0),
    "sign, norm": (SignSgd(scale="norm"), lambda n: 4 + blocks(n, 8) if n else 0),
}
VALUES = values()
every = pytest.mark.parametrize("compressor", [made for made, _ in COMPRESSORS.values()], ids=list(COMPRESSORS))


@pytest.mark.parametrize(("compressor", "formula"), COMPRESSORS.values(), ids=list(COMPRESSORS))
def test_payloads_have_the_bytes_of_the_formula(compressor, formula):
    for n in (*range(20), 255, 256, 257, 511, 512, 513, 767, 768, 769, 1000, 1024, 1025, 123457):
        assert compressor.payload_bytes(n) == formula(n)
    for given in VALUES.values():
        payload = encoded(compressor, given)
        assert payload.size == formula(given.size)
        # No byte is left as it was, and no random one is sent.
        assert (payload == encoded(compressor, given, fill=0x55)).all()


@every
@pytest.mark.parametrize("name", VALUES)
def test_awkward_values_come_back_finite_and_are_kept(compressor, name):
    given = VALUES[name]
    before = given.copy()
    payload = encoded(compressor, given)
    got = decoded(compressor, payload, given.size)
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
def test_the_bits_are_those_of_the_key_alone(compressor):
    given = VALUES["heavy tails"]
    first = encoded(compressor, given)
    others = [
        RandomKey(1, 17, 3, 5),
        RandomKey(KEY.seed, 18, 3, 5),
        RandomKey(KEY.seed, 17, 4, 5),
        RandomKey(KEY.seed, 17, 3, 6),
    ]
    differs = [bool((encoded(compressor, given, other) != first).any()) for other in others]
    assert differs == [compressor.is_random] * 4


def test_the_stream_of_a_key_is_none_of_dropout():
    words = KEY.words
    assert words[:3] == (5, 17, 3) and words[3] == KEY.seed & 0xFFFFFFFF
    assert words[4] != KEY.seed >> 32 < 1 << 32 and all(0 <= word < 1 << 32 for word in words)
    assert RandomKey(KEY.seed + (1 << 40), 17, 3, 5).words != words  # all 64 bits of the seed count


@every
@pytest.mark.parametrize("name", VALUES)
def test_a_gpu_gives_the_same_bits(gpu, compressor, name):
    given = VALUES[name]
    want = encoded(compressor, given)
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
    assert not gpu.LOG.events  # nothing is copied, nothing is waited for
    assert payload.get().tobytes() == want.tobytes()
    assert out.get().tobytes() == decoded(compressor, want, given.size).tobytes()
    assert total.get().tobytes() == added.tobytes()


@every
def test_buffers_that_do_not_fit_are_refused(compressor):
    given, payload = np.ones(600, np.float32), np.zeros(compressor.payload_bytes(600) + 64, np.uint8)
    fits = payload[:-64]
    with pytest.raises(UsageError, match="as payload_bytes says"):
        compressor.encode(given, payload, KEY)
    with pytest.raises(UsageError, match="as payload_bytes says"):
        compressor.decode(fits.view(np.int8), given)
    with pytest.raises(UsageError, match="pass a contiguous float32"):
        compressor.add(fits, np.ones(600))
    with pytest.raises(UsageError, match="pass a contiguous float32"):
        compressor.encode(np.ones(1200, np.float32)[::2], fits, KEY)
    with pytest.raises(UsageError, match="place it by align"):
        compressor.encode(given, payload[1:][: fits.size], KEY)


@every
def test_payloads_that_may_not_be_summed_say_so(compressor):
    payload = encoded(compressor, VALUES["uneven"])
    if compressor.is_linear:
        assert np.shares_memory(compressor.summable(payload), payload)
    else:
        with pytest.raises(UsageError, match="cannot be summed without being decoded"):
            compressor.summable(payload)


def test_a_compressor_must_be_whole():
    class Half(Compressor):
        name = "half"

        def payload_bytes(self, n):
            return n

    with pytest.raises(TypeError, match="abstract"):
        Half()


def test_the_next_payload_begins_at_a_word():
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
def test_settings_that_do_not_exist_are_refused(make):
    with pytest.raises(ConfigurationError, match="choose"):
        make()
