"""Sharded data parallelism: no two replicas keep the same optimizer state (ZeRO; Rajbhandari et al., arXiv:1910.02054).

Every layer is cut over the replicas, and each rank updates its own cut:

    reduce-scatter of gradients  ->  update of the own cut  ->  all-gather of parameters

One implementation serves three stages, which differ in what stays in memory between the two halves. With Psi bytes of
parameters, m micro-batches a step and p ranks, each rank sends on the ring, in units of Psi (p-1)/p:

    stage 1   optimizer state sharded                    2       gradients whole, reduced once a step
    stage 2   and gradients                              1 + m   reduced after every micro-batch, then freed
    stage 3   and parameters, gathered for each use      3 m     once forward, once backward, and the gradients

A layer that others are tied to stays gathered from its first use in a micro-batch to its last: stage 3 then sends less.
"""

from collections import Counter

import numpy as np

from hpcdist.arrays import backend
from hpcdist.arrays.backend import Array
from hpcdist.arrays.ranges import Range
from hpcdist.arrays.store import FlatStore
from hpcdist.collectives.sharded import SHARDED, SHARDED_ON_GPUS
from hpcdist.errors import ConfigurationError
from hpcdist.strategies.exchange import Handlers
from hpcdist.strategies.owner import Owner, OwnerExchange
from hpcdist.strategies.schedule.operations import Kind, Operation
from hpcdist.strategies.seat import Seat


class Transient:
    """Whole layers that come and go in memory taken once: at most as many at a time as were ever alive together.

    Layers that only their own stage uses share blocks as long as the longest of them. One that others are tied to lives
    long, may be far longer, and has a block of its own.
    """

    def __init__(self, seat: Seat, category: str) -> None:
        self._seat, self._category = seat, category
        users = Counter(unit for used in seat.model.needs.values() for unit in used)
        sizes = {seat.model.stages[unit].layer: (part.size, users[unit]) for unit, part in seat.ranges.items()}
        longest = max((size for size, count in sizes.values() if count == 1), default=0)
        self._block_size = {layer: longest if count == 1 else size for layer, (size, count) in sizes.items()}
        self._free: dict[int, list[Array]] = {}  # by size
        self._blocks: dict[int, Array] = {}
        self._stores: dict[int, FlatStore] = {}

    def at(self, layer: int) -> FlatStore:
        """Return the store of ``layer``; its memory is uninitialised when it was not there (local)."""
        if layer not in self._stores:
            size = self._block_size[layer]
            free = self._free.setdefault(size, [])
            block = free.pop() if free else self._new(size)
            self._blocks[layer] = block
            whole = self._seat.layout.units[layer]
            self._stores[layer] = self._seat.store(self._category, whole, lambda count, dtype: block[:count])
        return self._stores[layer]

    def free(self, layer: int) -> None:
        """Give the memory of ``layer`` back (local)."""
        del self._stores[layer]
        self._free[self._block_size[layer]].append(self._blocks.pop(layer))

    def _new(self, size: int) -> Array:
        allocate = self._seat.for_replicas(self._category)
        if allocate is not None:  # all replicas need a new block at the same place of their lists
            return allocate(size, np.dtype(self._seat.dtype))
        block = backend.zeros(size, np.dtype(self._seat.dtype), self._seat.on)
        return block if self._seat.ledger is None else self._seat.ledger.track(block, self._category)


class ZeroExchange(OwnerExchange):
    """ZeRO ``stage`` 1, 2 or 3. Collective over the data axis, but for what is said to be local."""

    def __init__(self, seat: Seat, stage: int) -> None:
        ways = SHARDED | SHARDED_ON_GPUS if seat.on == "gpu" else SHARDED
        if seat.algorithm not in ways:
            raise ConfigurationError(
                f"communication.algorithm = {seat.algorithm!r} cannot be halved into a reduce-scatter and an "
                f"all-gather, as parallel.strategy = 'zero{stage}' needs; on the {seat.on} choose one "
                f"of {', '.join(ways)}"
            )
        super().__init__(seat)
        self.replicas_identical = stage < 3
        self.accumulates = stage == 1
        self.gathers = stage == 3
        self._sharding = ways[seat.algorithm]
        itemsize = seat.dtype.itemsize
        self._layers = {seat.model.stages[unit].layer: part for unit, part in seat.ranges.items()}
        self._shares = {
            layer: self._sharding.shares(seat.data, part.size, itemsize) for layer, part in self._layers.items()
        }
        own = [self._own(layer) for layer in self._layers]
        self._whole_parameters = Transient(seat, "parameters")
        self._whole_gradients = Transient(seat, "gradients")
        # What is whole is summed or handed round among the replicas; a share of it is this rank's alone.
        parameters = (
            seat.store("parameters", own)
            if self.gathers
            else seat.store("parameters", allocate=seat.for_replicas("parameters"))
        )
        gradients = (
            seat.store("gradients", allocate=seat.for_replicas("gradients"))
            if self.accumulates
            else seat.store("gradients", own)
        )
        self.owner = Owner(parameters, gradients, seat.build_optimizer(own), own, seat.data, seat.agree_algorithm)
        self._added: set[int] = set()  # layers whose gradient shard holds a micro-batch of this step already
        self.carries_out: Handlers = {
            Kind.REDUCE: self.reduce,
            Kind.GATHER: self.gather,
            Kind.FREE: self.free,
            **self.owner.carries_out,
        }

    def _own(self, layer: int) -> Range:
        return self._shares[layer][self.seat.data.rank].shift(self._layers[layer].start)

    def plan(self) -> list[Operation]:
        """Return REDUCE per layer, AGREE, the update of the own cuts and, where parameters stay whole, GATHER."""
        reduces = [Operation(Kind.REDUCE, range=part) for part in reversed(self.seat.ranges.values())]
        gathers = [] if self.gathers else [Operation(Kind.GATHER, unit=unit) for unit in self.seat.units]
        return [*reduces, Operation(Kind.AGREE), *self.owner.plan(), *gathers]

    def reduce(self, op: Operation) -> None:
        """Sum the gradients of a layer over the replicas; the own cut of the sum stays."""
        layer = next(layer for layer, part in self._layers.items() if part == op.range)
        store = self.gradients_at(layer)
        whole = store.range(self._layers[layer])
        self._sharding.reduce_scatter(self.seat.data, whole, self._shares[layer])
        if self.accumulates:
            return
        own = self._own(layer)
        if layer in self._added:
            self.gradients.range(own)[...] += store.range(own)
        else:
            self.gradients.range(own)[...] = store.range(own)
            self._added.add(layer)
        self._whole_gradients.free(layer)

    def gather(self, op: Operation) -> None:
        """Bring the cuts of a layer together, from the ranks that own them."""
        layer = self.seat.model.stages[op.unit].layer
        store = self.parameters_at(layer)
        if self.gathers:
            own = self._own(layer)
            store.range(own)[...] = self.parameters.range(own)
        self._sharding.all_gather(self.seat.data, store.range(self._layers[layer]), self._shares[layer])

    def free(self, op: Operation) -> None:
        """Drop the gathered layer (local)."""
        self._whole_parameters.free(self.seat.model.stages[op.unit].layer)

    def parameters_at(self, layer: int) -> FlatStore:
        """Return the whole layer: in stage 3 it is there between GATHER and FREE only."""
        return self._whole_parameters.at(layer) if self.gathers else self.parameters

    def gradients_at(self, layer: int) -> FlatStore:
        """Return the whole layer: from stage 2 on it is there until its REDUCE."""
        return self.gradients if self.accumulates else self._whole_gradients.at(layer)

    def begin_update(self, scale: float) -> None:
        """Begin the update of the step."""
        self._added.clear()
        self.owner.begin_update(scale)
