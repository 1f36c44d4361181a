"""Residuals of gradients that are summed several times in a step, after each micro-batch, as ZeRO sums those it cuts.

What one micro-batch leaves is added to the next one's. A step that is given up must not have happened, so the copy that
brings residuals back is that of before its first micro-batch: 4 bytes for an element, and 4 more where steps may be
given up. Every rank has residuals for all of its stages, whatever is cut: it encodes the cuts of all others.

A rank never encodes what it owns, nor what travels as it is. Residuals of such places come of a checkpoint whose cuts
were others. They are owed all the same: they are added to the gradient, and are paid.
"""

from collections.abc import Mapping, Sequence

from hpcdist.arrays.ranges import Range
from hpcdist.arrays.store import FlatStore
from hpcdist.strategies.compressed.residuals import Residuals
from hpcdist.strategies.compressed.zero_levels import FLOAT32
from hpcdist.strategies.seat import Seat


class StepResiduals(Residuals):
    """Residuals of ``layers``, ranges of the flat space by layer; ``plain`` are those that are not encoded here.

    All of it is local.
    """

    def __init__(
        self,
        seat: Seat,
        layers: Mapping[int, Range],
        plain: Mapping[int, Sequence[Range]],
        *,
        can_roll_back: bool,
    ) -> None:
        parts = sorted(layers.values(), key=lambda part: part.start)
        super().__init__(seat, seat.data, parts, can_roll_back=False)
        self._layers, self._plain = layers, plain
        self._saved: FlatStore | None = None
        if can_roll_back:
            self._saved = FlatStore(seat.layout, FLOAT32, parts, on=seat.on, category="optimizer", ledger=seat.ledger)
        self._open: set[int] = set()  # layers that were encoded in this step
        self._due: set[int] = set()  # layers with residuals that may be owed in plain places
        self._paid: set[int] = set()  # of them in this step

    @property
    def are_owed(self) -> bool:
        """Whether some may have to be added to gradients that are not encoded."""
        return bool(self._due)

    def open(self, layer: int, gradients: FlatStore) -> None:
        """Begin to encode the float32 ``gradients`` of a layer; what is owed in plain places is added to them."""
        self.feedback.keep()  # what was encoded of it for an earlier micro-batch is done with
        if layer not in self._open:
            self._open.add(layer)
            if self._saved is not None:
                part = self._layers[layer]
                self._saved.range(part)[...] = self._store.range(part)
        if layer in self._due:
            self._due.discard(layer)
            self._paid.add(layer)
            self._pay(layer, gradients)

    def _pay(self, layer: int, gradients: FlatStore) -> None:
        for part in self._plain[layer]:
            residual = self._store.range(part)
            if residual.any():  # else the bits of the gradient stay as they are
                total = gradients.range(part)
                total += residual
                residual[...] = 0

    def keep(self) -> None:
        """End a step that is applied."""
        self.feedback.keep()
        self._open.clear()
        self._paid.clear()

    def settle(self) -> None:
        """End a step that was given up, if there was one: residuals are those of before it, where they can be."""
        if self._saved is not None:
            for layer in self._open:
                part = self._layers[layer]
                self._store.range(part)[...] = self._saved.range(part)
            self._due |= self._paid
        self.keep()

    def restored(self) -> None:
        """Take what was read, of the same number of ranks or another, and of these cuts or others."""
        super().restored()
        self._due = set(self._layers)
