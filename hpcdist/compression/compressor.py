"""Compressor protocol: encode the values of a tensor, or of a piece of one, as bytes, and decode them.

A payload is a 1-D uint8 array that holds everything the receiver needs but the number of values: scales, codes,
indices. It begins at a multiple of `ALIGNMENT` bytes, since its head is read as words; `align` says where the next
one in a message may begin. All methods are local. On numpy they are loops under `arrays.jit` (one thread, without the
GIL) that allocate nothing as large as the values; on cupy they are array operations that give the same bits. Values
are finite: the caller looks for NaN and infinity before, because signs and codes hide them.

`is_finite` is the check that the caller makes before.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import numpy as np

from hpcdist.arrays.backend import Array, is_device, namespace
from hpcdist.arrays.jit import jit
from hpcdist.arrays.ranges import align_up
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
    """The name of a stream of random numbers: everything that is encoded once has its own.

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
    """A way to write n float32 values as `payload_bytes(n)` bytes.

    ``is_linear``: the sum of payloads, taken elementwise over `summable`, decodes to the sum of the values (rounded in
    the dtype of that view, so its sums are carried in float32). One that is not unbiased wants `ErrorFeedback`.
    """

    name: ClassVar[str]
    is_linear: ClassVar[bool] = False

    @property
    def is_unbiased(self) -> bool:
        """Whether the mean of what is decoded, over the draws, are the values."""
        return False

    @property
    def is_random(self) -> bool:
        """Whether the bits depend on the key."""
        return False

    @abstractmethod
    def payload_bytes(self, n: int) -> int:
        """Return the bytes of a payload of ``n`` values; a bound where their number depends on the values."""

    def used_bytes(self, payload: Array) -> int:
        """Return how many bytes of an encoded ``payload`` are to be sent, the first ones (waits for a GPU)."""
        return int(payload.size)

    @abstractmethod
    def encode(self, values: Array, payload: Array, key: RandomKey) -> None:
        """Write the float32 ``values`` (n,) to ``payload`` (payload_bytes(n),); the values are kept."""

    @abstractmethod
    def decode(self, payload: Array, out: Array) -> None:
        """Write what ``payload`` says to the float32 ``out`` (n,), n as it was for `encode`."""

    @abstractmethod
    def add(self, payload: Array, out: Array, factor: float = 1.0) -> None:
        """Add ``factor`` times what ``payload`` says to the float32 ``out`` (n,): one rounding of each, in one pass."""

    def poison(self, payload: Array, key: RandomKey) -> None:
        """Write a payload of some values that decodes to NaN: the message of a rank whose values are not finite.

        What others add to it is NaN too, so that whoever looks at the sum learns of it.
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


def align(offset_bytes: int) -> int:
    """Return where in a message the next payload may begin, at ``offset_bytes`` or a little behind."""
    return align_up(offset_bytes, ALIGNMENT)


def address(array: Array) -> int:
    """Return the address of the first element, in host or device memory."""
    return int(array.ctypes.data if isinstance(array, np.ndarray) else array.data.ptr)
