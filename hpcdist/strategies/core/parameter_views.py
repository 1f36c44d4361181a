"""Views of a rank's parameters and gradients by stage, and memory of transient layers."""

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
from hpcdist.strategies.core.tied import TiedCopies


class ParameterViews:
    """Cached views of one rank's parameter and gradient memory, by model layer. Local."""

    def __init__(self, context: RankContext, exchange: Exchange, copies: TiedCopies) -> None:
        self._model, self._exchange, self._copies = context.model, exchange, copies
        self._parameters: dict[int, Parameters] = {}  # by unit
        self._gradients: dict[int, BoundGradients] = {}
        self._complete: set[int] = set()
        self.written: set[str] = set()  # tensors that have a gradient in the current step

    def begin(self) -> None:
        """Clear the state of the previous step or evaluation."""
        self.written.clear()
        self._complete.clear()
        if self._exchange.traits.alternates:
            self._gradients.clear()

    def parameters(self, unit: int) -> Parameters:
        """Return the parameters that stage number ``unit`` uses, including tied tensors of other layers."""
        if unit not in self._parameters:
            self._parameters[unit] = self._model.bind_stage(unit, self._parameters_at)
        return self._parameters[unit]

    def gradients(self, unit: int) -> BoundGradients:
        """Return views of the gradient memory of stage number ``unit``."""
        if unit not in self._gradients:
            self._gradients[unit] = self._model.bind_stage_gradients(unit, self._gradients_at, self.written)
        return self._gradients[unit]

    def backward_done(self, unit: int) -> None:
        """Record that the backward pass of model layer number ``unit`` is complete for one micro-batch."""

    def no_backward(self, unit: int) -> None:
        """Allocate the gradients of layer ``unit`` in place of the backward pass of a micro-batch without samples."""
        self.gradients(unit)

    def complete(self, unit: int) -> None:
        """Zero the gradients of layer ``unit`` that no micro-batch of this step has written."""
        if unit not in self._complete:
            self.gradients(unit).finish()  # or the gradients would be those from the last step
            self._complete.add(unit)

    def complete_copies(self) -> None:
        """Zero the gradients of this rank's tied tensor copies that no micro-batch of this step has written."""
        for key in self._copies.keys - self.written:
            self._copies.gradients.view(key)[...] = 0

    def exchanged(self, unit: int) -> None:
        """Record that the gradients of model layer number ``unit`` were exchanged and may be overwritten."""
        self._gradients.pop(unit).begin_step()
        self._complete.discard(unit)

    def moved(self, unit: int | None = None) -> None:
        """Drop cached views of the memory of layer ``unit``, which moved. None drops the views of all layers."""
        for user in [user for user in self._parameters if unit is None or unit in self._model.needs[user]]:
            del self._parameters[user]

    def _parameters_at(self, layer: int) -> FlatStore:
        return self._copies.parameters if layer in self._copies.layers else self._exchange.parameters_at(layer)

    def _gradients_at(self, layer: int) -> FlatStore:
        return self._copies.gradients if layer in self._copies.layers else self._exchange.gradients_at(layer)


class TransientLayers:
    """Memory pool for layers that are unsharded only while they are used (ZeRO, mixed precision)."""

    # Memory shared on a node is allocated collectively over ``over`` (default: the data axis), after a call of
    # ``drain``.

    def __init__(
        self,
        context: RankContext,
        category: str,  # name in memory reports
        units: Collection[int],  # indices of the model stages that use the pool
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
        """Return the store of the whole ``layer``. The first call allocates the store, without initial values."""
        if layer not in self._stores:
            size = self._block_size[layer]
            free = self._free.setdefault(size, [])
            block = free.pop() if free else self._new(size)
            self._blocks[layer] = block
            whole = self._context.layout.range_of(layer, self._context.portion)
            self._stores[layer] = self._context.store(self._category, whole, lambda count, dtype: block[:count])
        return self._stores[layer]

    def free(self, layer: int) -> None:
        """Return the memory that `at` allocated for ``layer`` to the pool. Local."""
        del self._stores[layer]
        self._free[self._block_size[layer]].append(self._blocks.pop(layer))

    def _new(self, size: int) -> Array:
        allocate = self._context.for_replicas(self._category, self._over)
        if allocate is not None:  # all ranks of ``over`` allocate at the same point of their operation lists
            if self._drain is not None:
                self._drain()
            return allocate(size, np.dtype(self._context.dtype))
        block = backend.zeros(size, np.dtype(self._context.dtype), self._context.on)
        return self._context.counted(block, self._category)
