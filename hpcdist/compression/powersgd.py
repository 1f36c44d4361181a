"""PowerSGD: a gradient matrix as a product of two thin matrices, Vogels, Karimireddy & Jaggi 2019 (arXiv:1905.13727).

A tensor is reshaped to a matrix M (a, b): its first dims by its other dims, split such that a + b is smallest. With
rank r, at most min(a, b), a step is one subspace iteration. It starts from Q (b, r) of the previous step, which is
equal on all ranks:

    P = M Q       mean of P over the ranks      P <- orthonormal columns      (Algorithm 1)
    Q = M^T P     mean of Q over the ranks      M is replaced by P Q^T

The two means are allreduces of 4 r (a + b) bytes in total instead of 4 a b. Error feedback sets e <- M - P Q^T with the
mean Q, so that no part of the mean gradient is lost. Shards cannot be compressed alone. P is orthonormalised by
modified Gram-Schmidt in float64, in the same order on every CPU, so P is equal on all ranks.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import numpy as np

from hpcdist.arrays import backend
from hpcdist.arrays.backend import Array, is_device, namespace
from hpcdist.arrays.jit import jit
from hpcdist.arrays.rng import stream
from hpcdist.errors import UsageError

_DOMAIN: Final = 0x70737164  # random streams of the initial factors
_DEPENDENT: Final = 1e-9  # a column's remainder below this share of its norm is float32 rounding noise


def matrix_shape(shape: Sequence[int]) -> tuple[int, int]:
    """Return (rows, columns) for the split of ``shape`` into first and last dims with the smallest rows + columns."""
    splits = [(math.prod(shape[:dim]), math.prod(shape[dim:])) for dim in range(1, len(shape))]
    return min(splits, key=sum, default=(math.prod(shape), 1))


def rank_of(shape: Sequence[int], rank: int, least_saving: float = 1.0) -> int:
    """Return the rank of PowerSGD's factors for a tensor of ``shape``, or 0 to send the tensor uncompressed.

    ``rank``: requested matrix rank. ``least_saving``: minimum ratio of the tensor's size to the size of both factors.
    """
    if rank < 1:
        raise UsageError(f"the rank of PowerSGD must be at least 1, got {rank}")
    rows, columns = matrix_shape(shape)
    clamped = min(rank, rows, columns)
    # The matrix shrinks by more than the factor `least_saving`.
    pays = rows * columns > least_saving * clamped * (rows + columns)
    return clamped if len(shape) > 1 and min(rows, columns) > 1 and pays else 0


def round_elements(shape: Sequence[int], rank: int, least_saving: float = 1.0) -> tuple[int, int]:
    """Return a pair: the numbers of float32 elements in the first and the second allreduce of a step for a tensor.

    ``shape``: shape of the tensor. ``rank``, ``least_saving``: as in `rank_of`.
    """
    clamped = rank_of(shape, rank, least_saving)
    rows, columns = matrix_shape(shape)
    return (clamped * rows, clamped * columns) if clamped else (rows * columns, 0)


def wire_bytes(shapes: Iterable[Sequence[int]], rank: int, least_saving: float = 1.0) -> int:
    """Return the bytes that a rank passes to both allreduces of a step in total, for tensors of ``shapes``.

    ``rank``, ``least_saving``: as in `rank_of`.
    """
    # 4 r (a + b) bytes for an a x b matrix with factors of rank r
    return sum(4 * sum(round_elements(shape, rank, least_saving)) for shape in shapes)


class PowerSgd:
    """State of PowerSGD for a matrix M, the sum of a gradient and its residual. Methods are local.

    Call in each step: `project`, allreduce of P, `orthogonalise`, `project_back`, allreduce of Q, `reconstruct`.
    """

    def __init__(self, shape: Sequence[int], rank: int, *, seed: int, tensor: int, on: str = "cpu") -> None:
        self.rows, self.columns = matrix_shape(shape)
        if not 1 <= rank <= min(self.rows, self.columns):
            raise UsageError(
                f"PowerSGD: got rank {rank}, but the rank for a {self.rows} x {self.columns} matrix must be 1 to "
                f"{min(self.rows, self.columns)}; pass the result of rank_of. If rank_of returns 0, send the tensor "
                "uncompressed"
            )
        self.rank = rank
        drawn = stream(seed, _DOMAIN, tensor).standard_normal((self.columns, rank), np.float32)
        self._first = backend.place(drawn, on)
        self.query: Array = self._first.copy()  # the factor Q of the last step, (columns, rank)

    def project(self, matrix: Array, p: Array) -> None:
        """Write the product M Q to ``p``. M is ``matrix``, and Q is the factor of the previous step.

        The caller then averages ``p`` over ranks.
        """
        # Orthonormal too: Q has the scale of the gradient, and M Q would have the square of this scale.
        orthogonalise(self.query)
        alive = (self.query * self.query).sum(axis=0) > 0  # (rank,)
        self.query[...] = namespace(p).where(alive, self.query, self._first)
        with np.errstate(all="ignore"):  # the caller checks for non-finite values
            namespace(p).matmul(self._matrix(matrix), self.query, out=self._p(p))

    def orthogonalise(self, p: Array) -> None:
        """Make the columns of the averaged ``p`` orthonormal, in place."""
        orthogonalise(self._p(p))

    def project_back(self, matrix: Array, p: Array, q: Array) -> None:
        """Write the product M^T P to ``q``. M is ``matrix``, and P is the orthonormal ``p``.

        The caller then averages ``q`` over ranks.
        """
        with np.errstate(all="ignore"):
            namespace(q).matmul(self._matrix(matrix).T, self._p(p), out=self._q(q))

    def reconstruct(self, p: Array, q: Array, out: Array) -> None:
        """Write the decompressed matrix P Q^T to ``out``. Store the averaged ``q`` as the factor for the next step."""
        self.query[...] = self._q(q)
        with np.errstate(all="ignore"):
            namespace(out).matmul(self._p(p), self.query.T, out=self._matrix(out))

    def arrays(self) -> Mapping[str, Array]:
        """Return a dict {name: array} to save in a checkpoint. The arrays are equal on all ranks."""
        return {"query": self.query}

    def _matrix(self, flat: Array) -> Array:
        return self._shaped("matrix", flat, (self.rows, self.columns))

    def _p(self, flat: Array) -> Array:
        return self._shaped("P", flat, (self.rows, self.rank))

    def _q(self, flat: Array) -> Array:
        return self._shaped("Q", flat, (self.columns, self.rank))

    def _shaped(self, name: str, flat: Array, shape: tuple[int, int]) -> Array:
        if flat.dtype != np.float32 or flat.shape != (shape[0] * shape[1],) or not flat.flags.c_contiguous:
            raise UsageError(
                f"PowerSGD: {name} is a {flat.dtype} array of shape {flat.shape}; pass a contiguous float32 array of "
                f"shape ({shape[0] * shape[1]},) with the whole {shape[0]} x {shape[1]} matrix, not only a shard"
            )
        return flat.reshape(shape)


def orthogonalise(columns: Array) -> None:  # (length, count)
    """Make the float32 ``columns`` orthonormal, in place. A column that earlier columns span becomes 0."""
    if is_device(columns):
        _orthogonalise_device(columns)
    else:
        _orthogonalise(columns)


@jit
def _orthogonalise(columns: Any) -> None:
    length, count = columns.shape
    work = columns.astype(np.float64)
    original, dots = np.zeros(count), np.empty(count)
    for i in range(length):
        for j in range(count):
            original[j] += work[i, j] * work[i, j]
    for j in range(count):
        square = 0.0
        for i in range(length):
            square += work[i, j] * work[i, j]
        factor = 1.0 / np.sqrt(square) if square > _DEPENDENT * _DEPENDENT * original[j] else 0.0
        dots[:] = 0.0
        for i in range(length):
            work[i, j] *= factor
            for other in range(j + 1, count):
                dots[other] += work[i, j] * work[i, other]
        for i in range(length):
            for other in range(j + 1, count):
                work[i, other] -= dots[other] * work[i, j]
    for i in range(length):
        for j in range(count):
            columns[i, j] = work[i, j]


def _orthogonalise_device(columns: Array) -> None:
    xp = namespace(columns)
    work = columns.astype(np.float64)
    original = (work * work).sum(axis=0)
    for j in range(work.shape[1]):
        column, rest = work[:, j], work[:, j + 1 :]
        square = (column * column).sum()
        alive = square > _DEPENDENT * _DEPENDENT * original[j]
        column *= xp.where(alive, 1 / xp.sqrt(xp.where(alive, square, 1.0)), 0.0)
        if rest.size:
            rest -= column[:, None] * (column[:, None] * rest).sum(axis=0)
    columns[...] = work


_orthogonalise.sample(lambda: (np.ones((2, 1), np.float32),))
