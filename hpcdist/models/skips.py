"""Skip connections of a model that one rank computes: outputs that a later stage takes beside that of the one before.

A stage that declares ``takes``, the indices of earlier stages, finds their outputs in its `Saved` as "skip.INDEX",
which it leaves unchanged, and leaves their gradients there as "skip.INDEX.gradient".
"""

from collections import defaultdict
from collections.abc import Sequence

from hpcdist.arrays.backend import Array
from hpcdist.models.stage import Saved


class Skips:
    """What goes over the pairs (stage, later stage that takes its output too), of one micro-batch. Local."""

    def __init__(self, pairs: Sequence[tuple[int, int]]) -> None:
        self._into: dict[int, list[int]] = defaultdict(list)
        for source, target in sorted(pairs):
            self._into[target].append(source)
        self._sources = {source for source, _ in pairs}
        self._values: dict[int, Array] = {}
        self._gradients: dict[int, list[Array]] = defaultdict(list)

    def bring(self, unit: int, saved: Saved) -> None:
        """Give stage ``unit`` what it takes, before its forward."""
        for source in self._into.get(unit, ()):
            saved.keep(f"skip.{source}", self._values[source])

    def leave(self, unit: int, y: Array, *, copy: bool = False) -> None:
        """Take the output of a stage; a ``copy`` where its memory is given back before others take it."""
        if unit in self._sources:
            self._values[unit] = y.copy() if copy else y

    def send_back(self, unit: int, saved: Saved) -> None:
        """Take the gradients that the backward of stage ``unit`` has left."""
        for source in self._into.get(unit, ()):
            self._gradients[source].append(saved[f"skip.{source}.gradient"].copy())

    def add(self, unit: int, dy: Array) -> Array:
        """Add to ``dy``, in place, what came back to stage ``unit``, in the order of those that took its output."""
        for gradient in reversed(self._gradients.pop(unit, [])):
            dy += gradient
        return dy
