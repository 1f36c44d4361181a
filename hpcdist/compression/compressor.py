"""Compressors of float32 values to bytes, and error feedback of the values lost.

A payload is a 1-D uint8 array that starts at a multiple of `ALIGNMENT` bytes. It has everything that the receiver needs
except the number of values. All methods are local. Results on numpy and cupy are equal to the bit. Values must be
finite (see `is_finite`).

`ErrorFeedback` (Seide et al. 2014; Karimireddy et al., arXiv:1901.09847), with a compressor C, its decoder D, a
gradient g and a residual e, initially 0:

    p = g + e;  send C(p);  e <- p - D(C(p))

The sum of the sent values equals the sum of all gradients minus the last e. Residuals take 4 bytes per element, or 8
with rollback. Pass gradients without a loss scale.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import numpy as np

from hpcdist.arrays.backend import Array, Ledger, address, is_device, namespace
from hpcdist.arrays.dtypes import FLOAT32
from hpcdist.arrays.jit import jit
from hpcdist.arrays.layout import Layout
from hpcdist.arrays.ranges import Range, align_up
from hpcdist.arrays.rng import WORD
from hpcdist.arrays.store import FlatStore
from hpcdist.compression.codes import LARGEST, largest
from hpcdist.errors import UsageError


def is_finite(values: Array) -> bool:
    """Return True if the float32 array ``values`` has no NaN and no infinity. Waits for the GPU's result."""
    if is_device(values):
        return bool(namespace(values).isfinite(values).all())
    return bool(largest(values) <= LARGEST)


ALIGNMENT: Final = 4  # bytes: a word. With cache lines, padding of small tensors would exceed the compression gain
# Separates the streams of compression from the streams of dropout, whose keys are the bare seed.
_DOMAIN: Final = 0x636F6D70


@dataclass(frozen=True)
class RandomKey:
    """Key that selects a stream of random numbers. Every call of `Compressor.encode` needs a new key."""

    seed: int
    step: int
    rank: int  # 0 on every rank if all ranks need equal streams
    tensor: int  # differs between the `encode` calls of one step on this rank

    @property
    def words(self) -> tuple[int, int, int, int, int]:
        """The key as the last five arguments of the generator `hpcdist.arrays.rng.philox`."""
        high = self.seed >> 32 & WORD
        return self.tensor & WORD, self.step & WORD, self.rank & WORD, self.seed & WORD, high ^ _DOMAIN


class Compressor(ABC):
    """Base class of compressors, which encode n float32 values as a payload of bytes."""

    # A biased compressor needs `ErrorFeedback`.
    name: ClassVar[str]
    # Payloads may be summed elementwise as floats (see `summable`). The sum of the payloads decodes to the sum of the
    # values, up to rounding.
    is_linear: ClassVar[bool] = False

    @property
    def is_random(self) -> bool:
        """True if the payload depends on the random key."""
        return False

    @abstractmethod
    def payload_bytes(self, n: int) -> int:
        """Return the payload size in bytes for ``n`` values, or an upper bound if the size depends on the values."""

    def encode(self, values: Array, payload: Array, key: RandomKey) -> None:
        """Compress the float32 ``values`` of shape (n,) into ``payload``. ``key``: random stream, new for each call."""
        self.check(values, payload)
        if values.size:
            self._encode(values, payload, key)

    def decode(self, payload: Array, out: Array) -> None:
        """Decompress ``payload`` into the float32 array ``out``."""
        self.check(out, payload)
        if out.size:
            self._decode(payload, out)

    def add(self, payload: Array, out: Array, factor: float = 1.0) -> None:
        """Add ``factor`` times the decompressed ``payload`` to the float32 array ``out``."""
        self.check(out, payload)
        if out.size:
            self._add(payload, out, np.float32(factor))

    @abstractmethod
    def _encode(self, values: Array, payload: Array, key: RandomKey) -> None: ...

    @abstractmethod
    def _decode(self, payload: Array, out: Array) -> None: ...

    @abstractmethod
    def _add(self, payload: Array, out: Array, factor: np.float32) -> None: ...

    def poison(self, payload: Array, key: RandomKey) -> None:
        """Fill ``payload`` so that it decodes to NaN, which makes all ranks detect non-finite values."""
        payload[...] = 0xFF  # every scale and float becomes NaN

    def summable(self, payload: Array) -> Array:
        """Return a view of ``payload`` as floats that an allreduce may sum. Raises UsageError without such a view."""
        raise UsageError(
            f"payloads of {self.name} cannot be summed without being decoded; use an exchange that gathers payloads "
            "and adds the decoded values, or a linear compressor (float16, bfloat16)"
        )

    def check(self, values: Array, payload: Array) -> None:
        """Raise UsageError unless ``values`` and ``payload`` have the expected dtype, size, alignment and layout."""
        expected = self.payload_bytes(values.size)
        if values.ndim != 1 or values.dtype != np.float32 or not values.flags.c_contiguous:
            raise UsageError(
                f"{self.name}: got {values.dtype} values of shape {values.shape}; pass a contiguous float32 array (n,)"
            )
        if payload.dtype != np.uint8 or payload.shape != (expected,) or not payload.flags.c_contiguous:
            raise UsageError(
                f"{self.name}: the payload of {values.size} values is {payload.dtype} of shape {payload.shape}; "
                f"pass a contiguous uint8 array of shape ({expected},), the result of payload_bytes"
            )
        if expected and address(payload) % 4:
            raise UsageError(
                f"{self.name}: the payload starts {address(payload) % 4} bytes after a 4-byte boundary; "
                "use align() to round its offset"
            )


class DenseCompressor(Compressor):
    """Base class of compressors that encode every value."""

    def _decode(self, payload: Array, out: Array) -> None:
        if is_device(out):
            out[...] = self._decoded(payload, out.size)
        else:
            self._decode_on_host(payload, out)

    def _add(self, payload: Array, out: Array, factor: np.float32) -> None:
        if is_device(out):
            out += factor * self._decoded(payload, out.size)
        else:
            self._decode_on_host(payload, out, factor)

    @abstractmethod
    def _decoded(self, payload: Array, n: int) -> Array: ...

    @abstractmethod
    def _decode_on_host(self, payload: Array, out: Array, factor: np.float32 | None = None) -> None: ...


def align(offset_bytes: int) -> int:
    """Round ``offset_bytes`` up to the next offset at which a payload may start in a message."""
    return align_up(offset_bytes, ALIGNMENT)


class ErrorFeedback:
    """Compression errors (residuals) of this rank, which are added to later gradients.

    A step calls `encode` or `compensate` once per range, and then `keep`, or `rollback` if the step is skipped.
    """

    def __init__(
        self,
        layout: Layout,
        parts: Range | Sequence[Range] | None = None,
        *,
        on: str = "cpu",
        can_roll_back: bool = True,
        ledger: Ledger | None = None,
    ) -> None:
        # `layout` describes the flat parameter vector. Only the ranges `parts` have residuals (None: all).
        def new_store() -> FlatStore:
            return FlatStore(layout, FLOAT32, parts, on=on, category="optimizer", ledger=ledger)

        self.residuals = new_store()
        self._before = new_store() if can_roll_back else None
        self._open: list[Range] = []

    def encode(self, where: Range, gradient: Array, compressor: Compressor, payload: Array, key: RandomKey) -> None:
        """Compress ``gradient`` plus the residual of the range ``where`` into ``payload``, with ``compressor``.

        The compression error becomes the new residual. ``key``: key of the random numbers.
        """
        compensated = self.compensate(where, gradient)
        compressor.encode(compensated, payload, key)
        compressor.add(payload, compensated, -1.0)

    def compensate(self, where: Range, gradient: Array) -> Array:
        """Add ``gradient`` to the residual of the range ``where``. Return the sum as a view of the residual.

        The caller must subtract the sent values from this view.
        """
        overlap = next((other for other in self._open if other.intersect(where)), None)
        if overlap is not None:
            raise UsageError(
                f"this step has already used the residuals of the elements {overlap}, which overlap {where}; end the "
                "step with keep() or rollback()"
            )
        if where:
            self._open.append(where)
        residual = self.residuals.range(where)
        before = None if self._before is None else self._before.range(where)
        if is_device(residual):
            if before is not None:
                before[...] = residual
            residual += gradient
        elif before is None:
            residual += gradient
        else:
            _save_and_add_loop(residual, before, gradient)
        # After the subtraction, the view is the new residual.
        return residual

    def keep(self) -> None:
        """End a step. The new residuals will be added to the next gradients."""
        self._open.clear()

    def rollback(self) -> None:
        """End a skipped step, and restore the residuals from before the step."""
        if self._before is None and self._open:
            raise UsageError("residuals before the step were not saved; create ErrorFeedback with can_roll_back=True")
        for where in self._open:
            assert self._before is not None
            self.residuals.range(where)[...] = self._before.range(where)
        self._open.clear()


@jit
def _save_and_add_loop(residual: Any, before: Any, gradient: Any) -> None:
    for i in range(residual.size):
        before[i] = residual[i]
        residual[i] += gradient[i]


_save_and_add_loop.sample(lambda: (np.ones(2, np.float32), np.ones(2, np.float32), np.ones(2, np.float32)))
