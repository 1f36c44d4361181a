"""Blockwise integers: int8 or int4 codes, a float32 scale for each block of values.

The scale is the largest magnitude of the block (Dettmers et al., arXiv:2110.02861; with 8 and 4 bits for gradients in
ZeRO++, Wang et al., arXiv:2306.10209), so a value that is far out costs its own block alone.

Bytes: 4 ceil(n / block) + ceil(n bits / 8). Error of a value: at most S / (2 s) rounded to nearest, below S / s rounded
by draws, where S is the scale of its block and s = 127 or 7. Rounded by draws it is unbiased with a variance of at most
S^2 / (4 s^2) per value.
"""

from dataclasses import dataclass
from typing import ClassVar, Final

from hpcdist.arrays.backend import Array
from hpcdist.compression import uniform
from hpcdist.compression.compressor import Compressor, Key
from hpcdist.compression.packing import GROUP
from hpcdist.compression.scales import MAXIMUM
from hpcdist.errors import ConfigurationError

NEAREST: Final = "nearest"
STOCHASTIC: Final = "stochastic"


@dataclass(frozen=True, kw_only=True)
class Blockwise(Compressor):
    """Integers of ``bits`` and the largest magnitude of every ``block`` values."""

    bits: int = 8
    block: int = 256
    rounding: str = NEAREST

    name: ClassVar[str] = "blockwise"

    def __post_init__(self) -> None:
        if self.bits not in (8, 4):
            raise ConfigurationError(f"blockwise integers of {self.bits} bits; choose 8 or 4")
        if self.block < GROUP or self.block % GROUP:
            raise ConfigurationError(f"blocks of {self.block} values; choose a multiple of {GROUP}")
        if self.rounding not in (NEAREST, STOCHASTIC):
            raise ConfigurationError(f"rounding {self.rounding!r}; choose {NEAREST} or {STOCHASTIC}")

    @property
    def is_unbiased(self) -> bool:
        """Only rounding by draws is."""
        return self.rounding == STOCHASTIC

    @property
    def is_random(self) -> bool:
        """Whether it rounds by draws."""
        return self.rounding == STOCHASTIC

    def payload_bytes(self, n: int) -> int:
        """Return 4 ceil(n / block) + ceil(n bits / 8)."""
        return uniform.payload_bytes(n, self.bits, self.block)

    def encode(self, values: Array, payload: Array, key: Key) -> None:
        """Write ``values`` to ``payload`` (local)."""
        self.check(values, payload)
        words = key.words if self.is_random else None
        uniform.encode(values, payload, self.bits, self.block, MAXIMUM, words)

    def decode(self, payload: Array, out: Array) -> None:
        """Write what ``payload`` says to ``out`` (local)."""
        self.check(out, payload)
        uniform.decode(payload, out, self.bits, self.block)

    def add(self, payload: Array, out: Array, factor: float = 1.0) -> None:
        """Add ``factor`` times what ``payload`` says to ``out`` (local)."""
        self.check(out, payload)
        uniform.add(payload, out, factor, self.bits, self.block)
