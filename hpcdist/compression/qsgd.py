"""QSGD: levels of a bucket's 2-norm, reached by draws, so that the mean is exact.

Alistarh et al., arXiv:1610.02132. A value v of a bucket of n values is sign(v) |b| l / s, where b is the bucket, and l
one of the two integers next to s |v| / |b|, the upper one with the probability of the fraction. The mean over the draws
is v, and the variance of a bucket at most min(n / s^2, sqrt(n) / s) |b|^2 (their lemma 3.1): small buckets keep it
small.

Bytes: 4 ceil(n / bucket) + ceil(n bits / 8), with s = 2^(bits - 1) - 1 levels above 0: codes of a fixed size and not
the Elias codes of the paper, whose length follows the values: the bytes of a message are known before it is sent.
"""

from dataclasses import dataclass
from typing import ClassVar

from hpcdist.arrays.backend import Array
from hpcdist.compression import uniform
from hpcdist.compression.compressor import Compressor, Key
from hpcdist.compression.packing import GROUP
from hpcdist.compression.scales import NORM
from hpcdist.errors import ConfigurationError


@dataclass(frozen=True, kw_only=True)
class Qsgd(Compressor):
    """Codes of ``bits`` and the 2-norm of every ``bucket`` values."""

    bits: int = 4
    bucket: int = 512

    name: ClassVar[str] = "qsgd"

    def __post_init__(self) -> None:
        if self.bits not in (2, 4, 8):
            raise ConfigurationError(f"QSGD with codes of {self.bits} bits; choose 2, 4 or 8 (1, 7 or 127 levels)")
        if self.bucket < GROUP or self.bucket & (self.bucket - 1):
            raise ConfigurationError(f"QSGD with buckets of {self.bucket} values; choose a power of two from {GROUP}")

    @property
    def is_unbiased(self) -> bool:
        """It is what it is for."""
        return True

    @property
    def is_random(self) -> bool:
        """Every value is drawn."""
        return True

    @property
    def levels(self) -> int:
        """How many there are above 0: s."""
        return uniform.levels_of(self.bits)

    def variance_bound(self, n: int) -> float:
        """Return the bound of E|Q(v) - v|^2 / |v|^2 for ``n`` values: that of the largest bucket."""
        widest = min(n, self.bucket)
        return min(widest / self.levels**2, widest**0.5 / self.levels)

    def payload_bytes(self, n: int) -> int:
        """Return 4 ceil(n / bucket) + ceil(n bits / 8)."""
        return uniform.payload_bytes(n, self.bits, self.bucket)

    def encode(self, values: Array, payload: Array, key: Key) -> None:
        """Write ``values`` to ``payload`` (local)."""
        self.check(values, payload)
        uniform.encode(values, payload, self.bits, self.bucket, NORM, key.words)

    def decode(self, payload: Array, out: Array) -> None:
        """Write what ``payload`` says to ``out`` (local)."""
        self.check(out, payload)
        uniform.decode(payload, out, self.bits, self.bucket)

    def add(self, payload: Array, out: Array, factor: float = 1.0) -> None:
        """Add ``factor`` times what ``payload`` says to ``out`` (local)."""
        self.check(out, payload)
        uniform.add(payload, out, factor, self.bits, self.bucket)
