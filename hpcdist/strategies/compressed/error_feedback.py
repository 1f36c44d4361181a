"""Error feedback: residuals of compression through skipped steps, checkpoints, and changes of the ranks.

Each of the p ranks that exchange payloads has residuals of its own, and their sum is what the run still owes its
parameters. For as many ranks again a checkpoint gives every rank its own back, to the bit. For another number each
new rank takes the sums over all old ranks in a share of the elements, and zeros elsewhere: nothing is lost, nothing
counts twice, and every byte is read once. A checkpoint without residuals, of a run that did not compress, begins with
zeros.

`ErrorFeedbackExchange` is the base class of exchanges with residuals. Gradients are encoded as float32 and in
unscaled units: 16-bit working gradients are widened and divided by the loss scale before, so that what is fed back
means the same whatever becomes of the scale.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

import numpy as np

from hpcdist.arrays.backend import Array
from hpcdist.arrays.piece import Piece
from hpcdist.arrays.ranges import Range, split
from hpcdist.arrays.store import FlatStore
from hpcdist.collectives.segments import scratch
from hpcdist.compression.compressor import ErrorFeedback
from hpcdist.errors import StorageError
from hpcdist.optim.update import kernels
from hpcdist.strategies.core.exchange import pieces_of
from hpcdist.strategies.core.rank_context import RankContext
from hpcdist.strategies.core.sharded_update import ShardedUpdateExchange
from hpcdist.strategies.tensor.axis import counted

STATE: Final = "residuals"  # the number of ranks that had some, among the numbers of a checkpoint


class Residuals:
    """Residuals of this rank for ``parts``: number ``rank`` of the ``ranks`` that have some. All of it is local.

    ``can_roll_back`` where a step may be given up after its gradients were encoded. ``kind`` is that of the pieces in a
    checkpoint, in front of the rank.
    """

    def __init__(
        self,
        context: RankContext,
        rank: int,
        ranks: int,
        parts: Sequence[Range],
        *,
        can_roll_back: bool,
        kind: str = "residual",
    ) -> None:
        self.rank, self.ranks, self.kind, self._can_roll_back = rank, ranks, kind, can_roll_back
        self._context, self._before = context, ranks
        self.feedback = ErrorFeedback(
            context.layout, parts, on=context.on, can_roll_back=can_roll_back, ledger=context.ledger
        )
        self._store = self.feedback.residuals
        self._taken: list[FlatStore] = []  # of another number of ranks, while a checkpoint is read

    def keep(self) -> None:
        """End a step that is applied."""
        self.feedback.keep()

    def settle(self) -> None:
        """End a step that was given up, if there was one: residuals are those of before it.

        Where they cannot be, nothing goes on from here: the run has met a gradient that is not finite.
        """
        if self._can_roll_back:
            self.feedback.rollback()
        else:
            self.feedback.keep()

    def pieces(self) -> list[Piece]:
        """Return views of the residuals, as pieces of this rank's own kind."""
        self.settle()
        own = counted(self._context.layout, self._store.parts, self._context.tensor)
        return pieces_of({self._kind(self.rank): self._store}, own)

    def _kind(self, rank: int) -> str:
        return f"{self.kind}.{rank}"

    def prepare_restore(self, state: Mapping[str, Any]) -> None:
        """Record how many ranks had residuals in the checkpoint about to be read: `wanted` follows from it."""
        ranks = state.get(STATE, self.ranks)
        if not (isinstance(ranks, int) and ranks > 0):
            raise StorageError(f"the checkpoint says that {ranks!r} ranks had residuals of compression; it is damaged")
        self._before = ranks

    def wanted(self) -> list[Piece]:
        """Return the memory into which residuals of a checkpoint are read; it may have none."""
        if self._before == self.ranks:
            return pieces_of({self._kind(self.rank): self._store}, self._store.parts)
        own = [_share(part, self.ranks)[self.rank] for part in self._store.parts]
        self._taken = [FlatStore(self._store.layout, self._store.dtype, own, on=self._context.on) for _ in self.old]
        return [
            piece for rank, store in zip(self.old, self._taken, strict=True)
            for piece in pieces_of({self._kind(rank): store}, store.parts)
        ]  # fmt: skip

    @property
    def old(self) -> range:
        """Ranks that had residuals in the checkpoint that is read."""
        return range(self._before)

    @property
    def kinds(self) -> tuple[str, ...]:
        """Names of the pieces of `wanted`; each may be missing."""
        return tuple(map(self._kind, self.old))

    def restored(self) -> None:
        """End a restore: keep the sums over all old ranks, where their number was another one."""
        if self._before == self.ranks:
            return
        self._store.zero()
        for taken in self._taken:
            for part in taken.parts:
                self._store.add(part, taken.range(part))
        self._taken, self._before = [], self.ranks

    def state(self) -> dict[str, Any]:
        """Return the scalars to store in a checkpoint in addition to the residual arrays."""
        return {STATE: self.ranks}


def _share(part: Range, ranks: int) -> list[Range]:
    return [share.shift(part.start) for share in split(part.size, ranks, np.dtype(np.float32).itemsize)]


_FLOAT32: Final = np.dtype(np.float32)


class ErrorFeedbackExchange(ShardedUpdateExchange):
    """Mixin of exchanges that may have ``residuals``; it comes before the exchange among the base classes.

    A subclass opens the step when it encodes, and gives up one that is still open at its `begin`.
    """

    residuals: Residuals | None = None
    _is_open = False  # gradients were encoded that are not applied yet
    _loss_scale = 1.0  # of the step

    def scaled_by(self, loss_scale: float) -> None:
        """Record the loss scale of the step that begins (local)."""
        self._loss_scale = loss_scale

    @property
    def all_residuals(self) -> tuple[Residuals, ...]:
        """All residuals of this rank, and what is kept as they are."""
        return () if self.residuals is None else (self.residuals,)

    def _give_up(self) -> None:
        """Restore the residuals of before a step that was given up, if there was one (local)."""
        if self._is_open and self.residuals is not None:
            self.residuals.settle()
        self._is_open = False

    def begin_update(self, scale: float) -> None:
        """Begin the update of the step, and commit its residuals."""
        self._is_open = False
        for residuals in self.all_residuals:
            residuals.keep()
        super().begin_update(scale)

    def pieces(self) -> Sequence[Piece]:
        """Return the pieces of the base class and this rank's residuals."""
        self._give_up()
        return [*super().pieces(), *(piece for residuals in self.all_residuals for piece in residuals.pieces())]

    def prepare_restore(self, state: Mapping[str, Any]) -> Collection[str]:
        """Record the ranks whose residuals a checkpoint has; it may lack all of them (local)."""
        kinds = set(super().prepare_restore(state))
        for residuals in self.all_residuals:
            residuals.prepare_restore(state)
            kinds |= set(residuals.kinds)
        return kinds

    def wanted(self) -> Sequence[Piece]:
        """Return the pieces of the base class and the residuals, to be restored."""
        return [*super().wanted(), *(piece for residuals in self.all_residuals for piece in residuals.wanted())]

    def state(self) -> dict[str, Any]:
        """Return the optimizer's clock, and how many ranks have residuals."""
        return super().state() | (self.all_residuals[0].state() if self.all_residuals else {})

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned, once the pieces are there."""
        super().restore(state)
        for residuals in self.all_residuals:
            residuals.restored()


def without_loss_scale(gradients: Array, loss_scale: float, wide: Array | None = None) -> Array:
    """Return ``gradients`` themselves, or float32 copies of 16-bit ones without their loss scale (local).

    Copies are written to ``wide``; without it they last until the next ones are made.
    """
    if gradients.dtype == _FLOAT32:
        return gradients
    if wide is None:
        wide = scratch("compressed.widened", gradients.size, _FLOAT32, gradients)
    kernels.widen(gradients, wide)
    wide *= np.float32(1.0 / loss_scale)
    return wide


def with_loss_scale(values: Array, gradients: Array, loss_scale: float) -> None:
    """Write ``values``, which `without_loss_scale` returned, to 16-bit ``gradients`` with their loss scale (local)."""
    if values is not gradients:
        values *= np.float32(loss_scale)
        kernels.round_into(values, gradients)
