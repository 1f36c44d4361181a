"""Outputs that a later stage takes beside that of the one before it: skip connections, inside a rank or between two.

A stage that declares ``takes``, the indices of earlier units, finds their outputs in its `Saved` as "skip.UNIT", which
it leaves unchanged, and leaves their gradients there as "skip.UNIT.gradient". Between ranks each goes straight from the
rank of the one to that of the other (`Operation.source`), past those between them. The gradient of an output is the sum
of what comes back, in the order of the units that took it: the same bits on every placement.
"""

from hpcdist.arrays.backend import Array
from hpcdist.models.stage import Saved
from hpcdist.strategies.schedule.messages import Neighbours
from hpcdist.strategies.schedule.operations import Operation
from hpcdist.strategies.schedule.placement import Placement

Skip = tuple[int, int, int]  # micro-batch, unit whose output it is, unit that takes it


class Skips:
    """What goes over the skip connections of one rank. All of it is local, but for the messages it asks for."""

    def __init__(self, placement: Placement, neighbours: Neighbours) -> None:
        self._place, self._neighbours = placement, neighbours
        self._values: dict[Skip, Array] = {}
        self._gradients: dict[Skip, Array] = {}

    def begin(self) -> None:
        """Forget what an earlier list has left."""
        self._values.clear()
        self._gradients.clear()

    def bring(self, op: Operation, saved: Saved) -> None:
        """Give the unit of a FORWARD what it takes."""
        for source in self._place.skips_into(op.unit):
            saved.keep(f"skip.{source}", self._values[op.microbatch, source, op.unit])

    def leave(self, op: Operation, y: Array, *, dropped: bool) -> None:
        """Take the output of a FORWARD for the units that want it; a copy where ``y`` is ``dropped`` before they come.

        Then what the unit itself took is given back too.
        """
        if dropped:
            self.end(op)
            for source in self._place.skips_into(op.unit):
                self._neighbours.forget_gradient(op.microbatch, self._place.edge(source, op.unit))
        for target in self._place.skips_from(op.unit):
            apart = self._place.rank_of(op.unit) != self._place.rank_of(target)
            copy = dropped and not apart  # a message is copied when it is sent
            skip = (op.microbatch, op.unit, target)
            self._values[skip] = self._neighbours.keep(op.microbatch, self._edge(skip), y) if copy else y

    def add(self, op: Operation, dy: Array) -> Array:
        """Add to ``dy``, in place, what came back to the unit of a backward."""
        for target in self._place.skips_from(op.unit):
            skip = (op.microbatch, op.unit, target)
            dy += self._gradients.pop(skip)
            self._neighbours.forget_gradient(op.microbatch, self._edge(skip))
        return dy

    def send_back(self, op: Operation, saved: Saved) -> None:
        """Take the gradients that the unit of a backward has left, for those that they go to."""
        for source in self._place.skips_into(op.unit):
            skip, gradient = (op.microbatch, source, op.unit), saved[f"skip.{source}.gradient"]
            self._gradients[skip] = self._neighbours.keep(op.microbatch, self._edge(skip), gradient)

    def end(self, op: Operation) -> None:
        """Give back what the unit took of a micro-batch, which is through."""
        for source in self._place.skips_into(op.unit):
            skip = (op.microbatch, source, op.unit)
            del self._values[skip]
            self._neighbours.forget(op.microbatch, self._edge(skip))

    def send_activation(self, op: Operation, *, copy: bool) -> None:
        """Send an output to the rank that takes it."""
        self._neighbours.send_activation(op, self._values.pop((op.microbatch, op.source, op.unit)), copy=copy)

    def send_gradient(self, op: Operation) -> None:
        """Send a gradient back."""
        skip = (op.microbatch, op.source, op.unit)
        self._neighbours.send_gradient(op, self._gradients.pop(skip))
        self._neighbours.forget_gradient(op.microbatch, self._edge(skip))

    def received(self, op: Operation, values: Array, *, back: bool) -> None:
        """Take what came from another rank."""
        (self._gradients if back else self._values)[op.microbatch, op.source, op.unit] = values

    def _edge(self, skip: Skip) -> int:
        return self._place.edge(skip[1], skip[2])
