"""Views of parameters and gradients for the stages of a rank, and memory of transient layers.

`ParameterViews` binds the tensors of each stage to the stores of the exchange, or to copies of tied tensors, for as
long as that memory stays where it is. `TransientLayers` holds layers that are whole for a moment only: gathered to be
used (ZeRO), filled by a backward to be reduced, or widened to float32 (mixed precision).
"""

from collections import Counter
from collections.abc import Callable, Collection

import numpy as np

from hpcdist.arrays import backend
from hpcdist.arrays.backend import Array
from hpcdist.arrays.store import FlatStore
from hpcdist.comm.communicator import Communicator
from hpcdist.models.model import BoundGradients
from hpcdist.models.stage import Parameters
from hpcdist.strategies.core.exchange import Exchange
from hpcdist.strategies.core.rank_context import RankContext
from hpcdist.strategies.pipeline.tied import TiedCopies


class ParameterViews:
    """Views of the stores of an exchange by stage, bound while their memory stays in place. All of it is local."""

    def __init__(self, context: RankContext, exchange: Exchange, copies: TiedCopies) -> None:
        self._model, self._exchange, self._copies = context.model, exchange, copies
        self._parameters: dict[int, Parameters] = {}  # by unit
        self._gradients: dict[int, BoundGradients] = {}
        self._complete: set[int] = set()
        self.written: set[str] = set()  # tensors that have a gradient in this step

    def begin(self) -> None:
        """Reset the records of an earlier list."""
        self.written.clear()
        self._complete.clear()
        if self._exchange.alternates:
            self._gradients.clear()

    def parameters(self, unit: int) -> Parameters:
        """Return the parameters of a stage, tied ones included."""
        if unit not in self._parameters:
            self._parameters[unit] = self._model.bind_stage(unit, self._parameters_at)
        return self._parameters[unit]

    def gradients(self, unit: int) -> BoundGradients:
        """Return the views into which a stage writes its gradients, or adds them."""
        if unit not in self._gradients:
            self._gradients[unit] = self._model.bind_stage_gradients(unit, self._gradients_at, self.written)
        return self._gradients[unit]

    def backward_done(self, unit: int) -> None:
        """Record the backward of a micro-batch through a stage."""

    def no_backward(self, unit: int) -> None:
        """Allocate the gradients of a micro-batch without samples, as the other ranks do here."""
        self.gradients(unit)

    def complete(self, unit: int) -> None:
        """Zero the gradients of a stage that no micro-batch has written, after the last backward."""
        if unit not in self._complete:
            self.gradients(unit).finish()  # or it would be last step's
            self._complete.add(unit)

    def complete_copies(self) -> None:
        """Zero the gradients of tied copies that no micro-batch has written."""
        for key in self._copies.keys - self.written:
            self._copies.gradients.view(key)[...] = 0

    def exchanged(self, unit: int) -> None:
        """Record that the exchange has taken the gradients of a stage: the next micro-batch has its own memory."""
        self._gradients.pop(unit).begin_step()
        self._complete.discard(unit)

    def moved(self, unit: int | None = None) -> None:
        """Record that the parameters of a stage, or of all, are at another address now."""
        for user in [user for user in self._parameters if unit is None or unit in self._model.needs[user]]:
            del self._parameters[user]

    def _parameters_at(self, layer: int) -> FlatStore:
        return self._copies.parameters if layer in self._copies.layers else self._exchange.parameters_at(layer)

    def _gradients_at(self, layer: int) -> FlatStore:
        return self._copies.gradients if layer in self._copies.layers else self._exchange.gradients_at(layer)


class TransientLayers:
    """Pool of memory for whole layers that are freed after use: as many blocks as were ever in use at once.

    Layers that only their own stage uses share blocks as long as the longest of them. One that others are tied to lives
    long, may be far longer, and has a block of its own. ``units`` are those that ever come; ``over`` joins the ranks
    that sum or hand round what lies there, once ``drain`` has returned: then nothing else goes on there.
    """

    def __init__(
        self,
        context: RankContext,
        category: str,
        units: Collection[int],
        over: Communicator | None,
        drain: Callable[[], None] | None = None,
    ) -> None:
        self._context, self._category, self._over, self._drain = context, category, over, drain
        users = Counter(unit for used in context.model.needs.values() for unit in used)
        sizes = {context.model.stages[unit].layer: (context.ranges[unit].size, users[unit]) for unit in units}
        longest = max((size for size, count in sizes.values() if count == 1), default=0)
        self._block_size = {layer: longest if count == 1 else size for layer, (size, count) in sizes.items()}
        self._free: dict[int, list[Array]] = {}  # by size
        self._blocks: dict[int, Array] = {}
        self._stores: dict[int, FlatStore] = {}

    def at(self, layer: int) -> FlatStore:
        """Return the store of ``layer``; its memory is uninitialised when it is new (local)."""
        if layer not in self._stores:
            size = self._block_size[layer]
            free = self._free.setdefault(size, [])
            block = free.pop() if free else self._new(size)
            self._blocks[layer] = block
            whole = self._context.layout.part_of(layer, self._context.portion)
            self._stores[layer] = self._context.store(self._category, whole, lambda count, dtype: block[:count])
        return self._stores[layer]

    def free(self, layer: int) -> None:
        """Return the memory of ``layer`` to the pool (local)."""
        del self._stores[layer]
        self._free[self._block_size[layer]].append(self._blocks.pop(layer))

    def _new(self, size: int) -> Array:
        allocate = self._context.for_replicas(self._category, self._over)
        if allocate is not None:  # all of ``over`` need a new block at the same place of their lists
            if self._drain is not None:
                self._drain()
            return allocate(size, np.dtype(self._context.dtype))
        block = backend.zeros(size, np.dtype(self._context.dtype), self._context.on)
        return self._context.counted(block, self._category)
