"""1-bit Adam: momentum sent as signs over a frozen variance, Tang et al. 2021 (arXiv:2102.02888).

Warm-up steps are Adam on the reduced gradient. Then the variance v is frozen. A step on P ranks with local gradients g
is then

    m <- beta1 m + (1 - beta1) g                     on each rank, from the common m
    chunk q of m + worker error -> rank q, compressed; the worker error keeps the compression error
    mean over the ranks + server error -> all ranks, compressed; the server error keeps the compression error
    m <- chunks received from all owners;  u = m^ / (sqrt(v) + epsilon);  w -= rate u

A rank sends about 2 (P-1)/P (n/8 + 4 P) bytes for n elements. Unlike the paper, moments are corrected for their start
at 0. Elements with v = 0 at the freeze never had a gradient and are not updated. For other elements, sqrt(v) is at
least `FLOOR` times the root of the mean v: dividing by a smaller one would make the step too large. Do not call
`accumulate` for a step that will be skipped.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Final

import numpy as np

from hpcdist.arrays import backend
from hpcdist.arrays.backend import Array, is_device, namespace
from hpcdist.arrays.jit import jit
from hpcdist.arrays.ranges import Range, split
from hpcdist.compression.compressor import Compressor, RandomKey, align
from hpcdist.compression.sign import SignSgd, magnitude
from hpcdist.errors import UsageError

FLOOR: Final = 0.01


@dataclass(frozen=True, kw_only=True)
class AdamMoments:
    """Decay rates and epsilon of Adam."""

    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8

    def __post_init__(self) -> None:
        if not (0 <= self.beta1 < 1 and 0 <= self.beta2 < 1 and self.epsilon > 0):
            raise UsageError(f"{self} is invalid; beta1 and beta2 must be in [0, 1), and epsilon above 0")


def places(sizes_bytes: list[int]) -> list[Range]:
    """Return a list of aligned byte ranges in a message, one per payload, for payloads of ``sizes_bytes`` bytes."""
    starts = accumulate(sizes_bytes, lambda start, size: align(start + size), initial=0)
    return [Range(start, start + size) for start, size in zip(starts, sizes_bytes, strict=False)]


class OneBitAdam:
    """State of 1-bit Adam for ``n`` elements on rank ``rank`` of ``ranks`` ranks. All methods are local."""

    def __init__(
        self,
        n: int,
        rank: int,
        ranks: int,
        moments: AdamMoments,
        *,
        compressor: Compressor | None = None,
        on: str = "cpu",
    ) -> None:
        assert 0 <= rank < ranks, f"rank {rank} of {ranks}"
        # Each rank owns one chunk of the elements. A step after the warm-up: `accumulate` adds the gradient.
        # `encode_worker` encodes each chunk, for the chunk's owner. The owner adds the payloads by `add_worker`, in
        # rank order, and encodes the mean by `encode_server`. All ranks gather and `receive` the means. `direction`
        # returns the Adam step.
        self.moments, self.rank, self.ranks = moments, rank, ranks
        self.compressor = compressor or SignSgd()
        self.chunks = split(n, ranks, np.dtype(np.float32).itemsize)
        self.own = self.chunks[rank]
        self.count = 0  # applied updates
        self.is_frozen = False
        real = np.dtype(np.float32)
        self.m, self.v, self.worker_error = (backend.zeros(n, real, on) for _ in range(3))
        self.server_error: Array = backend.zeros(self.own.size, real, on)

    def warm(self, gradient: Array) -> None:
        """Run a warm-up step: update both moments with the averaged ``gradient``.

        Then overwrite ``gradient`` with the optimizer step u of the update w -= rate u.
        """
        self._check(gradient, frozen=False)
        self.count += 1
        beta1, beta2 = self.moments.beta1, self.moments.beta2
        corrections = 1 / (1 - beta1**self.count), 1 / (1 - beta2**self.count)
        run = _warm_ufuncs if is_device(gradient) else _warm
        scalars = (beta1, 1 - beta1, beta2, 1 - beta2, *corrections, self.moments.epsilon)
        run(gradient, self.m, self.v, *map(np.float32, scalars))

    def freeze(self) -> None:
        """End the warm-up: from now on, the variance does not change. Needs at least one warm-up step."""
        # The variance is bias-corrected, with a lower limit.
        if self.is_frozen or not self.count:
            raise UsageError(
                f"1-bit Adam: freeze() was called {'a second time' if self.is_frozen else 'without a variance'}, after "
                f"{self.count} steps; call freeze() once, after at least one warm-up step"
            )
        self.v *= np.float32(1 / (1 - self.moments.beta2**self.count))
        if self.v.size:
            moves = self.v > 0
            namespace(self.v).maximum(self.v, magnitude(self.v, is_norm=False) * np.float32(FLOOR**2), out=self.v)
            self.v *= moves
        self.is_frozen = True

    def thaw(self) -> None:
        """Return to warm-up steps after `freeze`. Only a job of one rank may call this."""
        # The compression errors are added to the momentum and set to 0.
        assert self.is_frozen and self.ranks == 1, "with several ranks, the errors must be sent, not added to m"
        self.v *= np.float32(1 - self.moments.beta2**self.count)
        self.m += self.worker_error
        self.m += self.server_error
        self.m *= self.v > 0
        self.worker_error[...] = 0
        self.server_error[...] = 0
        self.is_frozen = False

    def accumulate(self, gradient: Array) -> None:
        """Begin a step after `freeze`: update the momentum with this rank's ``gradient`` of shape (n,)."""
        self._check(gradient, frozen=True)
        self.count += 1
        beta1 = np.float32(self.moments.beta1)
        run = _accumulate_ufuncs if is_device(gradient) else _accumulate
        run(gradient, self.m, self.v, self.worker_error, beta1, np.float32(1 - self.moments.beta1))

    def encode_worker(self, owner: int, payload: Array, key: RandomKey) -> None:
        """Compress this rank's momentum of the chunk that rank ``owner`` averages. Write the result to ``payload``.

        ``key``: key of the random numbers.
        """
        # The compression error stays in `worker_error`, and is added to the momentum of the next step.
        self._encode(self.worker_error[self.chunks[owner].slice], payload, key)

    def add_worker(self, payload: Array) -> None:
        """Add ``payload``, which `encode_worker` wrote on any rank, to the mean momentum of this rank's chunk."""
        self.compressor.add(payload, self.server_error, 1 / self.ranks)

    def encode_server(self, payload: Array, key: RandomKey) -> None:
        """Compress the mean momentum of this rank's chunk into ``payload``. ``key``: key of the random numbers."""
        # The compression error is kept for the next step.
        self.server_error *= self.v[self.own.slice] > 0
        self._encode(self.server_error, payload, key)

    def receive(self, owner: int, payload: Array) -> None:
        """Decode ``payload``, which `encode_server` wrote on rank ``owner``, into this rank's momentum."""
        self.compressor.decode(payload, self.m[self.chunks[owner].slice])

    def direction(self, out: Array) -> None:
        """Write the step u of the update w -= rate u to ``out``, of shape (n,). Call this after all `receive` calls."""
        self._check(out, frozen=True)
        correction = np.float32(1 / (1 - self.moments.beta1**self.count))
        run = _direction_ufuncs if is_device(out) else _direction
        run(out, self.m, self.v, correction, np.float32(self.moments.epsilon))

    def arrays(self) -> Mapping[str, Array]:
        """Return a dict {name: array} to save in a checkpoint. Also save the attributes ``count`` and ``is_frozen``."""
        # `server_error` has only this rank's chunk. `worker_error` has all elements, and differs between ranks: for
        # another number of ranks, restore the mean of all saved `worker_error` on every rank.
        return {"m": self.m, "v": self.v, "worker_error": self.worker_error, "server_error": self.server_error}

    def _encode(self, values: Array, payload: Array, key: RandomKey) -> None:
        self.compressor.encode(values, payload, key)
        self.compressor.add(payload, values, -1.0)

    def _check(self, values: Array, *, frozen: bool) -> None:
        if values.dtype != np.float32 or values.shape != self.m.shape:
            raise UsageError(
                f"1-bit Adam: got a {values.dtype} array of shape {values.shape}; pass a float32 array of shape "
                f"{self.m.shape}"
            )
        if self.is_frozen != frozen:
            raise UsageError(
                "1-bit Adam: the variance is frozen; call accumulate, not warm"
                if self.is_frozen
                else "1-bit Adam: the variance is not frozen; call warm, and freeze at the end of the warm-up"
            )


@jit
def _warm(gradient, m, v, beta1, rest1, beta2, rest2, correct1, correct2, epsilon):  # type: ignore[no-untyped-def]
    for i in range(gradient.size):
        g = gradient[i]
        m[i] = m[i] * beta1 + g * rest1
        v[i] = v[i] * beta2 + g * g * rest2
        gradient[i] = m[i] * correct1 / (np.sqrt(v[i] * correct2) + epsilon)


def _warm_ufuncs(gradient, m, v, beta1, rest1, beta2, rest2, correct1, correct2, epsilon):  # type: ignore[no-untyped-def]
    m *= beta1
    m += gradient * rest1
    v *= beta2
    v += gradient * gradient * rest2
    gradient[...] = m * correct1 / (namespace(v).sqrt(v * correct2) + epsilon)


@jit
def _accumulate(gradient: Any, m: Any, v: Any, error: Any, beta1: Any, rest1: Any) -> None:
    zero = beta1 - beta1
    for i in range(gradient.size):
        mean = m[i] * beta1 + gradient[i] * rest1
        m[i] = mean
        error[i] = error[i] + mean if v[i] > zero else zero


def _accumulate_ufuncs(gradient: Any, m: Any, v: Any, error: Any, beta1: Any, rest1: Any) -> None:
    m *= beta1
    m += gradient * rest1
    error += m
    error *= v > 0


@jit
def _direction(out: Any, m: Any, v: Any, correction: Any, epsilon: Any) -> None:
    zero = epsilon - epsilon
    for i in range(out.size):
        m[i] = m[i] if v[i] > zero else zero
        out[i] = m[i] * correction / (np.sqrt(v[i]) + epsilon)


def _direction_ufuncs(out: Any, m: Any, v: Any, correction: Any, epsilon: Any) -> None:
    m *= v > 0
    out[...] = m * correction / (namespace(v).sqrt(v) + epsilon)


_ones, _half = np.ones(2, np.float32), np.float32(0.5)
_warm.sample(lambda: (_ones.copy(), _ones.copy(), _ones.copy(), *(_half for _ in range(7))))
_accumulate.sample(lambda: (_ones, _ones.copy(), _ones, _ones.copy(), _half, _half))
_direction.sample(lambda: (_ones.copy(), _ones.copy(), _ones, _half, _half))
