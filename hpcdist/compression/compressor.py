"""Compressor protocol, values of a tensor to bytes and back, and error feedback, which sends later what was lost.

A payload is a 1-D uint8 array that holds everything the receiver needs but the number of values: scales, codes,
indices. It begins at a multiple of `ALIGNMENT` bytes, since its head is read as words; `align` says where the next
one in a message may begin. All methods are local. On numpy they are loops under `arrays.jit` (one thread, without the
GIL) that allocate nothing as large as the values; on cupy they are array operations that give the same bits. Values
are finite: the caller looks for NaN and infinity before (`is_finite`), because signs and codes hide them.

`ErrorFeedback` (Seide et al. 2014; Karimireddy et al., arXiv:1901.09847) adds what a compressor lost of a gradient to
the next gradient. With C a compressor, D what its payload decodes to, and e = 0 at first:

    p = g + e;  send C(p);  e <- p - D(C(p))

so that after any number of steps the sum of what was sent is the sum of all gradients less the last e (but for the
rounding of float32). Residuals are named by where they lie in the layout, which is by tensor, never by bucket:
buckets may be cut anew. The caller gives gradients in unscaled units, so that another loss scale changes nothing.
Gradients must be finite: one NaN would stay in e for ever.

After a step that is skipped, `rollback` brings back the residuals of before it, to the bit. They take 4 bytes for an
element, and 4 more where steps can be rolled back.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import numpy as np

from hpcdist.arrays.backend import Array, is_device, namespace
from hpcdist.arrays.jit import jit
from hpcdist.arrays.layout import Layout
from hpcdist.arrays.memory import Ledger
from hpcdist.arrays.ranges import Range, align_up
from hpcdist.arrays.store import FlatStore
from hpcdist.errors import UsageError

_MAGNITUDE: Final = np.uint32(0x7FFF_FFFF)
_INFINITE: Final = np.uint32(0x7F80_0000)


def is_finite(values: Array) -> bool:
    """Return whether no value of the float32 ``values`` (n,) is NaN or infinite (local; waits for a GPU)."""
    if is_device(values):
        return bool(namespace(values).isfinite(values).all())
    return bool(_largest(values.view(np.uint32)) < _INFINITE)


@jit
def _largest(words: Any) -> Any:
    largest = np.uint32(0)
    for i in range(words.size):
        largest = max(largest, np.uint32(words[i] & _MAGNITUDE))
    return largest


_largest.sample(lambda: (np.zeros(2, np.uint32),))


ALIGNMENT: Final = 4  # bytes: a word. Lines of the cache would cost small tensors more than their payload saves
_WORD: Final = 0xFFFFFFFF
# The streams of compression are none of those of dropout, whose keys are the bare seed.
_DOMAIN: Final = 0x636F6D70


@dataclass(frozen=True)
class RandomKey:
    """Key of a stream of random numbers: everything that is encoded once has its own.

    ``tensor`` numbers what is encoded: tensors, and pieces or phases of one where they are encoded by themselves.
    Streams that ranks draw in common (the indices of random-k) are asked for with ``rank`` 0 on all of them.
    """

    seed: int
    step: int
    rank: int
    tensor: int

    @property
    def words(self) -> tuple[int, int, int, int, int]:
        """The three upper words of the counter and the two of the key, as `hpcdist.arrays.rng.philox` takes them."""
        high = self.seed >> 32 & _WORD
        return self.tensor & _WORD, self.step & _WORD, self.rank & _WORD, self.seed & _WORD, high ^ _DOMAIN


class Compressor(ABC):
    """Protocol of a compressor: n float32 values as ``payload_bytes(n)`` bytes.

    ``is_linear``: the sum of payloads, taken elementwise over `summable`, decodes to the sum of the values (rounded in
    the dtype of that view, so its sums are carried in float32). One that is biased wants `ErrorFeedback`.
    """

    name: ClassVar[str]
    is_linear: ClassVar[bool] = False

    @property
    def is_random(self) -> bool:
        """Whether the bits depend on the key."""
        return False

    @abstractmethod
    def payload_bytes(self, n: int) -> int:
        """Return the bytes of a payload of ``n`` values; a bound where their number depends on the values."""

    def encode(self, values: Array, payload: Array, key: RandomKey) -> None:
        """Write the float32 ``values`` (n,) to ``payload`` (payload_bytes(n),); the values are kept."""
        self.check(values, payload)
        if values.size:
            self._encode(values, payload, key)

    def decode(self, payload: Array, out: Array) -> None:
        """Write what ``payload`` says to the float32 ``out`` (n,), n as it was for `encode`."""
        self.check(out, payload)
        if out.size:
            self._decode(payload, out)

    def add(self, payload: Array, out: Array, factor: float = 1.0) -> None:
        """Add ``factor`` times what ``payload`` says to the float32 ``out`` (n,): one rounding of each, in one pass."""
        self.check(out, payload)
        if out.size:
            self._add(payload, out, np.float32(factor))

    @abstractmethod
    def _encode(self, values: Array, payload: Array, key: RandomKey) -> None:
        """Do what `encode` does, of one value or more."""

    @abstractmethod
    def _decode(self, payload: Array, out: Array) -> None:
        """Do what `decode` does, of one value or more."""

    @abstractmethod
    def _add(self, payload: Array, out: Array, factor: np.float32) -> None:
        """Do what `add` does, of one value or more."""

    def poison(self, payload: Array, key: RandomKey) -> None:
        """Write a payload of some values that decodes to NaN: the message of a rank whose values are not finite.

        What others add to it is NaN too, so that every rank sees it in the sum.
        """
        payload[...] = 0xFF  # every scale and every float is NaN

    def summable(self, payload: Array) -> Array:
        """Return ``payload`` as the floats that may be summed. Raises UsageError where they may not."""
        raise UsageError(
            f"payloads of {self.name} cannot be summed without being decoded; use an exchange that gathers payloads "
            "and adds what they decode to, or a linear compressor (float16, bfloat16)"
        )

    def check(self, values: Array, payload: Array) -> None:
        """Raise UsageError unless the buffers are what the loops take: dtypes, sizes, contiguous, at a word."""
        expected = self.payload_bytes(values.size)
        if values.ndim != 1 or values.dtype != np.float32 or not values.flags.c_contiguous:
            raise UsageError(
                f"{self.name}: values are {values.dtype} {values.shape}; pass a contiguous float32 array (n,)"
            )
        if payload.dtype != np.uint8 or payload.shape != (expected,) or not payload.flags.c_contiguous:
            raise UsageError(
                f"{self.name}: the payload of {values.size} values is {payload.dtype} {payload.shape}; "
                f"pass a contiguous uint8 array ({expected},), as payload_bytes says"
            )
        if expected and address(payload) % 4:
            raise UsageError(
                f"{self.name}: the payload begins {address(payload) % 4} bytes behind a word; place it by align()"
            )


class DenseCompressor(Compressor):
    """Base of compressors whose payloads have a code for each value: a loop on the host, array operations on a GPU."""

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
    def _decoded(self, payload: Array, n: int) -> Array:
        """Return the ``n`` values that ``payload`` on a GPU says."""

    @abstractmethod
    def _decode_on_host(self, payload: Array, out: Array, factor: np.float32 | None = None) -> None:
        """Write what ``payload`` says to ``out``, or add ``factor`` times that, where there is one."""


def align(offset_bytes: int) -> int:
    """Return where in a message the next payload may begin, at ``offset_bytes`` or a little behind."""
    return align_up(offset_bytes, ALIGNMENT)


def address(array: Array) -> int:
    """Return the address of the first element, in host or device memory."""
    return int(array.ctypes.data if isinstance(array, np.ndarray) else array.data.ptr)


_FLOAT32: Final = np.dtype(np.float32)


class ErrorFeedback:
    """The residuals of this rank for ``parts`` of ``layout`` (all of it: None). All of it is local.

    In a step each range is given to `encode`, or to `compensate` where the caller compresses, once; then `keep` ends
    the step, or `rollback` where it is skipped.
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
        def new_store() -> FlatStore:
            return FlatStore(layout, _FLOAT32, parts, on=on, category="optimizer", ledger=ledger)

        self.residuals = new_store()
        self._before = new_store() if can_roll_back else None
        self._open: list[Range] = []

    def encode(self, where: Range, gradient: Array, compressor: Compressor, payload: Array, key: RandomKey) -> None:
        """Write ``gradient`` (where.size,), which is kept, plus the residual of ``where`` to ``payload``.

        What that loses is the new residual.
        """
        compensated = self.compensate(where, gradient)
        compressor.encode(compensated, payload, key)
        compressor.add(payload, compensated, -1.0)

    def compensate(self, where: Range, gradient: Array) -> Array:
        """Add ``gradient`` to the residual of ``where`` and return it, a view: p.

        The caller subtracts from the view what the others will make of it.
        """
        taken = next((other for other in self._open if other.intersect(where)), None)
        if taken is not None:
            raise UsageError(f"residuals of {where} meet those of {taken} in one step; end it by keep() or rollback()")
        if where:
            self._open.append(where)
        residual = self.residuals.range(where)
        before = None if self._before is None else self._before.range(where)
        if is_device(residual):
            if before is not None:
                before[...] = residual
            residual += gradient
        elif before is None:
            _add_loop(residual, gradient)
        else:
            _save_and_add_loop(residual, before, gradient)
        return residual

    def keep(self) -> None:
        """End a step that is applied."""
        self._open.clear()

    def rollback(self) -> None:
        """End a step that is skipped: the residuals are those of before it."""
        if self._before is None and self._open:
            raise UsageError("residuals of before the step were not kept; make ErrorFeedback with can_roll_back=True")
        for where in self._open:
            assert self._before is not None
            self.residuals.range(where)[...] = self._before.range(where)
        self._open.clear()


@jit
def _add_loop(residual: Any, gradient: Any) -> None:
    for i in range(residual.size):
        residual[i] += gradient[i]


@jit
def _save_and_add_loop(residual: Any, before: Any, gradient: Any) -> None:
    for i in range(residual.size):
        before[i] = residual[i]
        residual[i] += gradient[i]


_add_loop.sample(lambda: (np.ones(2, np.float32), np.ones(2, np.float32)))
_save_and_add_loop.sample(lambda: (np.ones(2, np.float32), np.ones(2, np.float32), np.ones(2, np.float32)))
