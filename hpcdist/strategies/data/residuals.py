"""Error feedback: residuals of compression, across skipped steps, checkpoints and changed numbers of ranks.

Each rank that sends payloads has residuals: the values that its payloads have not sent yet. With the same number
of ranks, a checkpoint returns each rank's residuals, to the bit. With another number, each rank takes the sum over all
old ranks for its share of the elements, and zeros elsewhere: nothing is lost or counted twice, and every byte is read
once. A checkpoint without residuals starts with zeros.

Gradients are encoded as float32 without loss scale. 16-bit gradients are converted first, so residuals stay valid when
the loss scale changes.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

import numpy as np

from hpcdist.arrays.backend import Array
from hpcdist.arrays.dtypes import FLOAT32
from hpcdist.arrays.piece import Piece
from hpcdist.arrays.ranges import Range, split
from hpcdist.arrays.store import FlatStore
from hpcdist.collectives.segments import scratch
from hpcdist.compression.compressor import ErrorFeedback
from hpcdist.errors import StorageError
from hpcdist.optim import kernels
from hpcdist.strategies.core.exchange import pieces_of
from hpcdist.strategies.core.rank_context import RankContext
from hpcdist.strategies.core.sharded_update import counted

STATE: Final = "residuals"  # in a checkpoint's scalars: the number of ranks that had residuals


class Residuals:
    """Compression errors of this rank's gradients, to add to the next gradients. Local."""

    # This rank is number ``rank`` of the ``ranks`` ranks with residuals. Checkpoint pieces have the kind
    # "<kind>.<rank>".

    def __init__(
        self,
        context: RankContext,
        rank: int,
        ranks: int,
        parts: Sequence[Range],
        *,
        can_roll_back: bool,  # an abandoned step must restore the residuals
        kind: str = "residual",
    ) -> None:
        self.rank, self.ranks, self.kind, self._can_roll_back = rank, ranks, kind, can_roll_back
        self._context, self._old_ranks = context, ranks
        self.feedback = ErrorFeedback(
            context.layout, parts, on=context.on, can_roll_back=can_roll_back, ledger=context.ledger
        )
        self._store = self.feedback.residuals
        self._old: list[FlatStore] = []  # residuals of another number of ranks, while a checkpoint is read

    def keep(self) -> None:
        """Accept the new residuals, so that the residuals of the previous step can no longer be restored."""
        self.feedback.keep()

    def settle(self) -> None:
        """Restore the residuals from before the abandoned last step, if these residuals were saved."""
        if self._can_roll_back:
            self.feedback.rollback()
        else:
            self.feedback.keep()

    def pieces(self) -> list[Piece]:
        """Return a list of the checkpoint pieces with this rank's residuals."""
        self.settle()
        parts = counted(self._context.layout, self._store.parts, self._context.tensor)
        return pieces_of({self._kind(self.rank): self._store}, parts)

    def _kind(self, rank: int) -> str:
        return f"{self.kind}.{rank}"

    def prepare_restore(self, state: Mapping[str, Any]) -> tuple[str, ...]:
        """Read the number of ranks with residuals from the checkpoint scalars ``state``.

        Return a tuple of the kinds of residuals in this checkpoint, one kind per rank.
        """
        ranks = state.get(STATE, self.ranks)
        if not (isinstance(ranks, int) and ranks > 0):
            raise StorageError(
                f"the checkpoint is damaged: the number of ranks with compression residuals is {ranks!r}, expected an "
                "integer of at least 1; resume from another checkpoint"
            )
        self._old_ranks = ranks
        return tuple(map(self._kind, range(ranks)))

    def wanted(self) -> list[Piece]:
        """Return a list of the residual pieces to read from a checkpoint, as views of the memory to fill."""
        if self._old_ranks == self.ranks:
            return pieces_of({self._kind(self.rank): self._store}, self._store.parts)
        shares = [
            split(part.size, self.ranks, FLOAT32.itemsize)[self.rank].shift(part.start) for part in self._store.parts
        ]
        self._old = [
            FlatStore(self._store.layout, self._store.dtype, shares, on=self._context.on)
            for _ in range(self._old_ranks)
        ]
        return [
            piece for rank, store in enumerate(self._old)
            for piece in pieces_of({self._kind(rank): store}, store.parts)
        ]  # fmt: skip

    def restored(self) -> None:
        """After a restore from another number of ranks, set the residuals to the sum over the earlier ranks."""
        if self._old_ranks == self.ranks:
            return
        self._store.zero()
        for old in self._old:
            for part in old.parts:
                self._store.add(part, old.range(part))
        self._old, self._old_ranks = [], self.ranks


class StepResiduals(Residuals):
    """Compression errors of ZeRO gradients, to add to the gradients of the next micro-batch. Local."""

    def __init__(
        self,
        context: RankContext,
        layers: Mapping[int, Range],  # range of each layer
        # Ranges of each layer that this rank does not compress. Residuals of these ranges, from a checkpoint of another
        # layout, are added once.
        plain: Mapping[int, Sequence[Range]],
        *,
        can_roll_back: bool,  # an abandoned step must restore the residuals
    ) -> None:
        parts = sorted(layers.values(), key=lambda part: part.start)
        super().__init__(context, context.data.rank, context.data.size, parts, can_roll_back=False)
        self._layers, self._plain = layers, plain
        self._saved: FlatStore | None = None
        if can_roll_back:
            self._saved = FlatStore(
                context.layout, FLOAT32, parts, on=context.on, category="optimizer", ledger=context.ledger
            )
        self._open: set[int] = set()  # layers that were encoded in this step
        self._due: set[int] = set()  # layers whose plain ranges may have residuals
        self._paid: set[int] = set()  # layers of `_due` whose residuals were added in this step

    @property
    def are_owed(self) -> bool:
        """True if residuals from a checkpoint must still be added to gradients that this rank does not compress."""
        return bool(self._due)

    def open(self, layer: int, gradients: FlatStore) -> None:
        """Back up the residuals of ``layer``, before the first micro-batch of a step compresses its ``gradients``.

        In the first micro-batch after a restore, also add the residuals of ranges that this rank does not compress.
        """
        self.feedback.keep()  # the residuals of earlier micro-batches are final
        if layer not in self._open:
            self._open.add(layer)
            if self._saved is not None:
                part = self._layers[layer]
                self._saved.range(part)[...] = self._store.range(part)
        if layer in self._due:
            self._due.discard(layer)
            self._paid.add(layer)
            for part in self._plain[layer]:
                residual = self._store.range(part)
                if residual.any():  # adding zeros could change bits of the gradient
                    total = gradients.range(part)
                    total += residual
                    residual[...] = 0

    def keep(self) -> None:
        super().keep()
        self._open.clear()
        self._paid.clear()

    def settle(self) -> None:
        if self._saved is not None:
            for layer in self._open:
                part = self._layers[layer]
                self._store.range(part)[...] = self._saved.range(part)
            self._due |= self._paid
        self.keep()

    def restored(self) -> None:
        super().restored()
        self._due = set(self._layers)


class Feedback:
    """All compression errors of one strategy. A step keeps new errors, or restores old errors if abandoned. Local."""

    # A step that compresses gradients sets `is_open`, and `keep` clears it. If it is still set when the next step
    # begins, the step was abandoned.

    def __init__(self, *residuals: Residuals) -> None:
        self.residuals = residuals
        self.is_open = False  # gradients were encoded that are not applied yet

    def give_up(self) -> None:
        """If the last step was abandoned, restore the residuals from before this step."""
        if self.is_open:
            for residuals in self.residuals:
                residuals.settle()
        self.is_open = False

    def keep(self) -> None:
        """Accept the new residuals of all stores, because the step's update begins."""
        self.is_open = False
        for residuals in self.residuals:
            residuals.keep()

    def pieces(self) -> list[Piece]:
        """Return a list of the checkpoint pieces with all residuals of this rank."""
        self.give_up()
        return [piece for residuals in self.residuals for piece in residuals.pieces()]

    def prepare_restore(self, state: Mapping[str, Any]) -> Collection[str]:
        """Prepare to read residuals from a checkpoint with the scalars ``state``.

        Return a list of the kinds of residuals that the checkpoint may lack.
        """
        return [kind for residuals in self.residuals for kind in residuals.prepare_restore(state)]

    def wanted(self) -> list[Piece]:
        """Return a list of all residual pieces to read from a checkpoint, as views of the memory to fill."""
        return [piece for residuals in self.residuals for piece in residuals.wanted()]

    def state(self) -> dict[str, Any]:
        """Return a dict {"residuals": number of ranks that have residuals}, or {} without residuals."""
        return {STATE: self.residuals[0].ranks} if self.residuals else {}

    def restored(self) -> None:
        """Call `Residuals.restored` for all residuals, after their checkpoint pieces were read."""
        for residuals in self.residuals:
            residuals.restored()


def without_loss_scale(gradients: Array, loss_scale: float, wide: Array | None = None) -> Array:
    """Return 16-bit ``gradients`` / ``loss_scale`` as a float32 array. Return float32 ``gradients`` unchanged. Local.

    ``wide``: array for the result, by default scratch memory.
    """
    if gradients.dtype == FLOAT32:
        return gradients
    if wide is None:
        wide = scratch("compressed.widened", gradients.size, FLOAT32, gradients)
    kernels.widen(gradients, wide)
    wide *= np.float32(1.0 / loss_scale)
    return wide


def with_loss_scale(values: Array, gradients: Array, loss_scale: float) -> None:
    """Write float32 ``values`` times ``loss_scale`` to the 16-bit ``gradients``. Local.

    Do nothing if ``values`` and ``gradients`` are the same array. This is the inverse of `without_loss_scale`.
    """
    if values is not gradients:
        values *= np.float32(loss_scale)
        kernels.round_into(values, gradients)
