"""What ZeRO exchanges behind the computation: sums of gradients behind a backward, layers that are gathered ahead.

    REDUCE   ->  START ... WAIT                  the whole gradient of a layer is freed, and its shard taken in, by WAIT
    GATHER   ->  START_GATHER ... WAIT_GATHER

All of it goes on over a communicator of its own, so memory that is exchanged here is shared over that one, and further
memory is taken there only when nothing is under way.
"""

from collections.abc import Callable, Collection

from hpcdist.arrays.store import FlatStore
from hpcdist.comm.communicator import Communicator
from hpcdist.errors import ConfigurationError
from hpcdist.strategies.exchange import Handlers
from hpcdist.strategies.overlap import Overlap
from hpcdist.strategies.schedule.operations import Kind, Operation
from hpcdist.strategies.seat import Seat
from hpcdist.strategies.zero.levels import WHOLE, Levels
from hpcdist.strategies.zero.order import Order
from hpcdist.strategies.zero.transient import Transient


def overlap_of(seat: Seat, levels: Levels) -> Overlap | None:
    """Return what exchanges beside the computation, None where nothing does. Collective over the data axis.

    Raises ConfigurationError for sharding degrees with which it cannot.
    """
    if seat.overlap == "none" or seat.data.size == 1:
        return None
    if not levels.at_once:
        raise ConfigurationError(
            f"communication.overlap = {seat.overlap!r} with sharding degrees that are neither 1 nor all of the "
            f"{seat.data.size} data ranks is not built in this version: only what is cut over all of them in one step "
            "goes on beside the computation; set zero.parameters, zero.gradients and zero.optimizer to 0, or "
            "communication.overlap = 'none'"
        )
    return Overlap(seat.data, seat.overlap)


def transient(
    seat: Seat, category: str, units: Collection[int], over: Communicator | None, overlap: Overlap | None
) -> Transient:
    """Return memory for whole layers, exchanged over ``over`` or, where there is one, by ``overlap`` (local)."""
    if overlap is None:
        return Transient(seat, category, units, over)
    return Transient(seat, category, units, overlap.over, overlap.drain)


class Behind:
    """The operations that start and wait. Collective over the data axis, but for what is said to be local.

    ``layer_of`` names the layer of an operation, ``gradients_at`` and ``place`` return where its whole gradient, and
    its parameters with the own shard among them, lie; ``take_in`` is called with a layer whose gradient is summed.
    """

    def __init__(
        self,
        overlap: Overlap,
        levels: Levels,
        order: Order,
        layer_of: Callable[[Operation], int],
        gradients_at: Callable[[int], FlatStore],
        place: Callable[[int], FlatStore],
        take_in: Callable[[int], None],
    ) -> None:
        self._overlap, self._levels, self._order = overlap, levels, order
        self._layer_of, self._gradients_at, self._place, self._take_in = layer_of, gradients_at, place, take_in
        self.carries_out: Handlers = {
            Kind.START: self.start,
            Kind.WAIT: self.wait,
            Kind.START_GATHER: self.start_gather,
            Kind.WAIT_GATHER: self.wait_gather,
            Kind.POLL: self.poll,
        }

    def start(self, op: Operation) -> None:
        """Begin to sum the gradients of a layer."""
        self._order.meet(op)
        layer = self._layer_of(op)
        whole = self._gradients_at(layer).range(self._levels.cuts[layer][WHOLE])
        self._overlap.start_sum(op.range, whole, self._levels.shares(layer), self._levels.algorithm)

    def wait(self, op: Operation) -> None:
        """Return when the sum is there and taken in."""
        self._overlap.wait(op.range)
        self._take_in(self._layer_of(op))

    def poll(self, op: Operation) -> None:
        """Move what was started (local)."""
        self._overlap.poll()

    def start_gather(self, op: Operation) -> None:
        """Begin to bring a layer together."""
        self._order.meet(op)
        self._start_gather(self._layer_of(op))

    def wait_gather(self, op: Operation) -> None:
        """Return when the layer is there."""
        self._overlap.wait_gather(self._layer_of(op))

    def gather(self, layer: int) -> None:
        """Bring a layer together in its turn, where no list asks for it ahead."""
        self._start_gather(layer)
        self._overlap.wait(layer)

    def _start_gather(self, layer: int) -> None:
        whole = self._place(layer).range(self._levels.cuts[layer][WHOLE])
        self._overlap.start_gather(layer, whole, self._levels.shares(layer), self._levels.algorithm)
