"""1-bit Adam: a momentum sent as signs over a frozen variance, Tang et al. 2021 (arXiv:2102.02888).

For one stretch of n elements (a tensor, best: signs have one scale for each chunk of a stretch). Adam on the reduced
gradient for the warm-up steps; then v is frozen, and a step on each of P ranks with its own gradient g is

    m <- beta1 m + (1 - beta1) g                     of this rank, from the m that all have
    chunk q of m + worker error -> its owner, rank q, compressed; the error keeps what was lost
    mean over the ranks + server error -> all ranks, compressed; the error keeps what was lost
    m <- what came from the owners;  u = m^ / (sqrt(v) + epsilon);  w -= rate u

so both compressions have error feedback, and m is the same on all ranks at the end of a step. A rank sends 2 (P-1)/P
(n/8 + 4 P) bytes or so, for 2 (P-1)/P 4 n of a dense allreduce: 32 times less where chunks are long. Chunks are those
of `ranges.split`, in lines of 64 bytes: nothing is padded, later chunks may be shorter or empty, and an empty one has
no payload.

The paper writes Adam without correcting its moments for their start at 0. Here they are corrected, v for the last
time when it is frozen: without that the first frozen steps would be longer by 1 / sqrt(1 - beta2^warm-up). Elements
whose v is 0 when it is frozen never had a gradient (padding, rows of an embedding that did not occur): a sign would
move them by rate * scale / epsilon, so they stay where they are. For the same reason, which the paper does not
mention, a root of v is at least `FLOOR` times the root of the mean of v in its stretch: gradients of the biases of
keys are nothing but rounding, 1e-10 of the others. A step that will be skipped must not reach `accumulate`.
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
from hpcdist.compression.quantise.sign import SignSgd, magnitude
from hpcdist.errors import UsageError

FLOOR: Final = 0.01


@dataclass(frozen=True, kw_only=True)
class AdamMoments:
    """The constants of Adam."""

    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8

    def __post_init__(self) -> None:
        if not (0 <= self.beta1 < 1 and 0 <= self.beta2 < 1 and self.epsilon > 0):
            raise UsageError(f"{self}; betas are at least 0 and below 1, epsilon is above 0")


def places(sizes_bytes: list[int]) -> list[Range]:
    """Return where payloads of these sizes lie in a message: each begins where `align` allows."""
    starts = accumulate(sizes_bytes, lambda start, size: align(start + size), initial=0)
    return [Range(start, start + size) for start, size in zip(starts, sizes_bytes, strict=False)]


class OneBitAdam:
    """The state of a stretch of ``n`` elements on ``rank`` of ``ranks``. All of it is local.

    Until `freeze` a step calls `warm`. After that `accumulate`, `encode_worker` of each chunk, an all-to-all,
    `add_worker` of each payload in order of ranks, `encode_server`, an all-gather, `receive` of each chunk, and
    `direction`. ``compressor`` is for chunks; without one, signs with the mean magnitude as their scale: the paper's,
    the norm, may enlarge what it should take away (see `hpcdist.compression.quantise.sign`).
    """

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
        """Advance both moments by the reduced ``gradient`` (n,), and write the step of Adam to it."""
        self._check(gradient, frozen=False)
        self.count += 1
        beta1, beta2 = self.moments.beta1, self.moments.beta2
        corrections = 1 / (1 - beta1**self.count), 1 / (1 - beta2**self.count)
        run = _warm_ufuncs if is_device(gradient) else _warm
        scalars = (beta1, 1 - beta1, beta2, 1 - beta2, *corrections, self.moments.epsilon)
        run(gradient, self.m, self.v, *map(np.float32, scalars))

    def freeze(self) -> None:
        """Correct the variance for its start at 0, lift it to its floor, and keep it from now on.

        After one `warm` at least.
        """
        if self.is_frozen or not self.count:
            raise UsageError(
                f"1-bit Adam frozen after {self.count} steps, {'again' if self.is_frozen else 'without a variance'}; "
                "take at least one step of the warm-up, and freeze once"
            )
        self.v *= np.float32(1 / (1 - self.moments.beta2**self.count))
        if self.v.size:
            moves = self.v > 0
            namespace(self.v).maximum(self.v, magnitude(self.v, is_norm=False) * np.float32(FLOOR**2), out=self.v)
            self.v *= moves
        self.is_frozen = True

    def thaw(self) -> None:
        """Return to the state that `warm` takes, on one rank: the variance grows again, and m takes in both errors."""
        assert self.is_frozen and self.ranks == 1, "the errors of several ranks are paid by what they send"
        self.v *= np.float32(1 - self.moments.beta2**self.count)
        self.m += self.worker_error
        self.m += self.server_error
        self.m *= self.v > 0
        self.worker_error[...] = 0
        self.server_error[...] = 0
        self.is_frozen = False

    def accumulate(self, gradient: Array) -> None:
        """Advance the momentum by the ``gradient`` (n,) of this rank, which is kept, and begin a step."""
        self._check(gradient, frozen=True)
        self.count += 1
        beta1 = np.float32(self.moments.beta1)
        run = _accumulate_ufuncs if is_device(gradient) else _accumulate
        run(gradient, self.m, self.v, self.worker_error, beta1, np.float32(1 - self.moments.beta1))

    def encode_worker(self, owner: int, payload: Array, key: RandomKey) -> None:
        """Write the chunk of ``owner`` to ``payload``; the worker error keeps what is lost."""
        self._encode(self.worker_error[self.chunks[owner].slice], payload, key)

    def add_worker(self, payload: Array) -> None:
        """Add the share of a rank to the own chunk."""
        self.compressor.add(payload, self.server_error, 1 / self.ranks)

    def encode_server(self, payload: Array, key: RandomKey) -> None:
        """Write the mean of the own chunk to ``payload``; the server error keeps what is lost."""
        run = _mask_ufuncs if is_device(self.v) else _mask
        run(self.server_error, self.v[self.own.slice])
        self._encode(self.server_error, payload, key)

    def receive(self, owner: int, payload: Array) -> None:
        """Take the chunk of ``owner`` as the momentum that all ranks have."""
        self.compressor.decode(payload, self.m[self.chunks[owner].slice])

    def direction(self, out: Array) -> None:
        """Write the step, of all chunks that were received, to ``out`` (n,)."""
        self._check(out, frozen=True)
        correction = np.float32(1 / (1 - self.moments.beta1**self.count))
        run = _direction_ufuncs if is_device(out) else _direction
        run(out, self.m, self.v, correction, np.float32(self.moments.epsilon))

    def arrays(self) -> Mapping[str, Array]:
        """Return by name what a checkpoint keeps besides ``count`` and ``is_frozen``.

        The moments are the same on all ranks, and the server errors, one behind the other, are one array of n whoever
        owns its parts. Of the worker errors only the mean over the ranks counts: ranks of another number take that.
        """
        return {"m": self.m, "v": self.v, "worker_error": self.worker_error, "server_error": self.server_error}

    def _encode(self, values: Array, payload: Array, key: RandomKey) -> None:
        self.compressor.encode(values, payload, key)
        self.compressor.add(payload, values, -1.0)

    def _check(self, values: Array, *, frozen: bool) -> None:
        if values.dtype != np.float32 or values.shape != self.m.shape:
            raise UsageError(f"1-bit Adam: got {values.dtype} {values.shape}; pass float32 {self.m.shape}")
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
def _mask(values: Any, v: Any) -> None:
    zero = np.float32(0.0)
    for i in range(values.size):
        values[i] = values[i] if v[i] > zero else zero


def _mask_ufuncs(values: Any, v: Any) -> None:
    values *= v > 0


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
_mask.sample(lambda: (_ones.copy(), _ones))
_direction.sample(lambda: (_ones.copy(), _ones.copy(), _ones, _half, _half))
