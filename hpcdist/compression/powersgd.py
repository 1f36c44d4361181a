"""PowerSGD: a gradient matrix as a product of two thin ones, Vogels, Karimireddy & Jaggi 2019 (arXiv:1905.13727).

A tensor is read as a matrix M (a, b): its first dims by the others, cut so that a + b is least, which is what
travels: query, key and value of (3, h, h) are (3h, h), a convolution (out, in, 3, 3) is (out, 9 in). With rank r,
clamped to min(r, a, b), a step is one step of subspace iteration, warm-started with the Q (b, r) of the step before,
the same on all ranks:

    P = M Q       mean of P over the ranks      P <- orthonormal columns      (Algorithm 1)
    Q = M^T P     mean of Q over the ranks      M is taken as P Q^T

Both rounds are linear: plain allreduces, of r a and then r b float32 values. For replicas of one M the result is P
P^T M, the projection of the mean gradient on a subspace that follows its leading singular vectors. 4 r (a + b) bytes
instead of 4 a b; vectors, and matrices where that does not pay by ``least_saving``, are sent as they are. It is
biased: error feedback takes e <- M - P Q^T with the mean Q, so that no part of the mean gradient is lost. The whole
tensor is needed, not a shard; another shape is another result.

P is made orthonormal by modified Gram-Schmidt in float64, the same operations in the same order on every CPU: ranks
hold the same P after the first round, and must after this. A column that depends on those before it becomes 0 rather
than noise, and the next step takes a fresh one in its place, so that a gradient of lower rank, or a zero one, costs
no rank later.
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

_DOMAIN: Final = 0x70737164  # of the streams that first factors are drawn from
_DEPENDENT: Final = 1e-9  # of a column's norm: what is left of it is below the rounding of float32


def matrix_shape(shape: Sequence[int]) -> tuple[int, int]:
    """Return (rows, columns) of a tensor of ``shape``: its first dims by the others, cut so that both are few."""
    cuts = [(math.prod(shape[:place]), math.prod(shape[place:])) for place in range(1, len(shape))]
    return min(cuts, key=sum, default=(math.prod(shape), 1))


def rank_of(shape: Sequence[int], rank: int, least_saving: float = 1.0) -> int:
    """Return min(``rank``, rows, columns) for a tensor of ``shape``, or 0 where it is sent as it is.

    That is a vector, and a matrix of which the factors are not more than ``least_saving`` times smaller. A stack of
    vectors, as three biases are, looks like a matrix here: see `hpcdist.arrays.layout.TensorSpec.is_matrix`.
    """
    if rank < 1:
        raise UsageError(f"rank {rank} of PowerSGD; pass 1 or more")
    rows, columns = matrix_shape(shape)
    clamped = min(rank, rows, columns)
    pays = rows * columns > least_saving * clamped * (rows + columns)
    return clamped if len(shape) > 1 and min(rows, columns) > 1 and pays else 0


def round_elements(shape: Sequence[int], rank: int, least_saving: float = 1.0) -> tuple[int, int]:
    """Return how many float32 values of a tensor travel in the first round (P, or all of it) and in the second (Q)."""
    clamped = rank_of(shape, rank, least_saving)
    rows, columns = matrix_shape(shape)
    return (clamped * rows, clamped * columns) if clamped else (rows * columns, 0)


def wire_bytes(shapes: Iterable[Sequence[int]], rank: int, least_saving: float = 1.0) -> int:
    """Return the bytes that a rank brings to the two allreduces: 4 times the sum of r (a + b), and of vectors."""
    return sum(4 * sum(round_elements(shape, rank, least_saving)) for shape in shapes)


class PowerSgd:
    """The state of one matrix: Q of the step before, (columns, rank) of float32, equal on all ranks (local).

    A step calls `project`, `orthogonalise` after the first allreduce, `project_back`, and after the second
    `reconstruct`. ``matrix`` is the whole tensor as 1-D float32 (n,): gradient plus residual of error feedback.
    """

    def __init__(self, shape: Sequence[int], rank: int, *, seed: int, tensor: int, on: str = "cpu") -> None:
        self.rows, self.columns = matrix_shape(shape)
        if not 1 <= rank <= min(self.rows, self.columns):
            raise UsageError(
                f"rank {rank} for a matrix of {self.rows} x {self.columns}; pass what rank_of says, where it is not 0"
            )
        self.rank = rank
        drawn = stream(seed, _DOMAIN, tensor).standard_normal((self.columns, rank), np.float32)
        self._first = backend.place(drawn, on)
        self.query: Array = self._first.copy()

    def project(self, matrix: Array, p: Array) -> None:
        """Write M Q to ``p`` (rows * rank,): of the first round, to be averaged."""
        # Orthonormal too: Q has the scale of the gradient, and its product with M would have the square of that.
        orthogonalise(self.query)
        alive = (self.query * self.query).sum(axis=0) > 0  # (rank,)
        self.query[...] = namespace(p).where(alive, self.query, self._first)
        with np.errstate(all="ignore"):  # what is not finite is for the caller to find
            namespace(p).matmul(self._matrix(matrix), self.query, out=self._p(p))

    def orthogonalise(self, p: Array) -> None:
        """Make the columns of the averaged ``p`` orthonormal, or 0."""
        orthogonalise(self._p(p))

    def project_back(self, matrix: Array, p: Array, q: Array) -> None:
        """Write M^T P to ``q`` (columns * rank,): of the second round, to be averaged."""
        with np.errstate(all="ignore"):
            namespace(q).matmul(self._matrix(matrix).T, self._p(p), out=self._q(q))

    def reconstruct(self, p: Array, q: Array, out: Array) -> None:
        """Write P Q^T to ``out`` (n,), and keep the averaged ``q`` for the next step."""
        self.query[...] = self._q(q)
        with np.errstate(all="ignore"):
            namespace(out).matmul(self._p(p), self.query.T, out=self._matrix(out))

    def arrays(self) -> Mapping[str, Array]:
        """Return by name what a checkpoint keeps: the same on all ranks."""
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
                f"PowerSGD: {name} is {flat.dtype} {flat.shape}; pass a contiguous float32 array "
                f"({shape[0] * shape[1]},), all of the {shape[0]} x {shape[1]}: a shard has no factors of its own"
            )
        return flat.reshape(shape)


def orthogonalise(columns: Array) -> None:  # (length, count)
    """Make the float32 ``columns`` orthonormal, in place; one that depends on those before it becomes 0."""
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
