"""Error feedback: add what a compressor lost of a gradient to the next gradient.

Seide et al. 2014; Karimireddy et al., arXiv:1901.09847. With C a compressor, D what its payload decodes to, and e = 0
at first:

    p = g + e;  send C(p);  e <- p - D(C(p))

so that after any number of steps the sum of what was sent is the sum of all gradients less the last e (but for the
rounding of float32). Residuals are named by where they lie in the layout, which is by tensor, never by bucket:
buckets may be cut anew. They are in unscaled units (g is multiplied by ``unscale``, one over the loss scale), so
another loss scale changes nothing. Gradients must be finite: one NaN would stay in e for ever.

A step that is skipped must not have happened: `rollback` brings back the residuals of before it, to the bit. 4 bytes
for an element, and 4 more where steps can be rolled back.

Ranks have residuals of their own. Of those of P ranks only what they add to the reduced gradient counts, so a
checkpoint for another number of ranks keeps their sum, and each of P' ranks takes the sum over P where the reduced
gradient is a mean, over P' where it is a sum (`share`): then nothing is lost and nothing is counted twice. For P' = P
the residuals themselves go on to the bit.
"""

from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from hpcdist.arrays.backend import Array, is_device
from hpcdist.arrays.jit import jit
from hpcdist.arrays.layout import Layout
from hpcdist.arrays.memory import Ledger
from hpcdist.arrays.piece import Piece
from hpcdist.arrays.ranges import Range
from hpcdist.arrays.store import FlatStore
from hpcdist.compression.compressor import Compressor, RandomKey
from hpcdist.errors import UsageError

RESIDUAL: Final = "residual"
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
        def made() -> FlatStore:
            return FlatStore(layout, _FLOAT32, parts, on=on, category="optimizer", ledger=ledger)

        self.residuals = made()
        self._before = made() if can_roll_back else None
        self._open: list[Range] = []

    def encode(
        self,
        where: Range,
        gradient: Array,
        compressor: Compressor,
        payload: Array,
        key: RandomKey,
        unscale: float = 1.0,
    ) -> None:
        """Write ``unscale * gradient`` plus the residual of ``where`` to ``payload``, and keep what that loses.

        ``gradient`` (where.size,) is kept.
        """
        compensated = self.compensate(where, gradient, unscale)
        compressor.encode(compensated, payload, key)
        compressor.add(payload, compensated, -1.0)

    def compensate(self, where: Range, gradient: Array, unscale: float = 1.0) -> Array:
        """Add ``unscale * gradient`` to the residual of ``where`` and return it, a view: p.

        The caller subtracts from the view what the others will make of it.
        """
        taken = next((other for other in self._open if other.intersect(where)), None)
        if taken is not None:
            raise UsageError(f"residuals of {where} meet those of {taken} in one step; end it by keep() or rollback()")
        if where:
            self._open.append(where)
        residual = self.residuals.range(where)
        before = None if self._before is None else self._before.range(where)
        scale = np.float32(unscale)
        if is_device(residual):
            if before is not None:
                before[...] = residual
            residual += scale * gradient
        elif before is None:
            _add_loop(residual, gradient, scale)
        else:
            _save_and_add_loop(residual, before, gradient, scale)
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

    def pieces(self, kind: str = RESIDUAL) -> list[Piece]:
        """Return views of the residuals, tensor by tensor; those of each rank want a kind of their own."""
        if self._open:
            raise UsageError(
                f"residuals of {self._open[0]} are in a step; end it by keep() or rollback() before saving"
            )
        return [
            Piece.of(kind, segment, touched, self.residuals.contents(touched))
            for segment, touched in self.residuals.tensors()
        ]

    def share(self, before: int, now: int, *, is_mean: bool) -> None:
        """Turn sums over ``before`` ranks, with which `pieces` were filled, into the residuals of one of ``now``."""
        self.residuals.array *= np.float32(1.0 / (before if is_mean else now))


@jit
def _add_loop(residual: Any, gradient: Any, scale: Any) -> None:
    for i in range(residual.size):
        residual[i] += scale * gradient[i]


@jit
def _save_and_add_loop(residual: Any, before: Any, gradient: Any, scale: Any) -> None:
    for i in range(residual.size):
        before[i] = residual[i]
        residual[i] += scale * gradient[i]


_add_loop.sample(lambda: (np.ones(2, np.float32), np.ones(2, np.float32), np.float32(1.0)))
_save_and_add_loop.sample(
    lambda: (np.ones(2, np.float32), np.ones(2, np.float32), np.ones(2, np.float32), np.float32(1.0))
)
