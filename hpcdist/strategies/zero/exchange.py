"""The ZeRO exchange (Rajbhandari et al., arXiv:1910.02054): reduce-scatter, update of the own shard, all-gather.

Every layer is cut over the replicas, and each rank updates its own cut: no two replicas need keep the same part of a
model and of its state. Parameters, gradients and optimizer state each have a sharding degree, d_p | d_g | d_o | p, on
p replicas (see `levels`). The three stages are special cases, and so are others' ideas:

    zero1   (1, 1, p)    zero2   (1, p, p)    zero3   (p, p, p)
    MiCS (Zhang et al., arXiv:2205.00119)                     (d, d, d)   d ranks hold a model; all else are replicas
    hpZ of ZeRO++ (Wang et al., arXiv:2306.10209)             (d, p, p)   gathers stay among the d ranks of a node
    hybrid sharding of FSDP (Zhao et al., arXiv:2304.11277)   (d, d, d)
    AMSP (Chen et al., arXiv:2311.00257)                      any

With Psi bytes of parameters and m micro-batches a step, each rank sends on the ring, in bytes,

    gradients    m Psi (1 - 1/d_g)       after each micro-batch, where d_g > 1: then they are freed
                 Psi (1/d_g - 1/d_o)     once a step, to the cuts of the optimizer
                 2 Psi/d_o (1 - d_o/p)   once a step, over the p/d_o owners of the same cut
    parameters   Psi (1/d_p - 1/d_o)     once a step, the new cuts to all that keep them
                 2 m Psi (1 - 1/d_p)     for each use, once forward and once backward; uses of the same layer that
                                         follow each other are one, as those of the last layer of a model;
                                         up to 3 m where a pipeline computes forwards again

so 2 Psi (p-1)/p in zero1, (1 + m) of these in zero2 and 3 m in zero3; Psi is that of the layers of this rank. Where m
is large, as in a pipeline, memory buys bytes: ``keep_gradients`` adds up those of a step whole and reduces once (Psi
more memory), ``keep_parameters`` gathers once and keeps to the last use (Psi more): zero3 then sends what zero1 does.
Else what is kept of a model takes Psi/d_p + Psi/d_g + K Psi/d_o, with K = 2 for Adam, and where d_p or d_g is above 1
memory for whole layers on top: the largest one, or two.

Over logical shards (see `hpcdist.strategies.core.logical_shards`) cuts decide no bit. Parameters travel as above,
gradients once a step, to all owners: k Psi (p-1)/d_o bytes with k = 1 where L/p is a power of two (`LayerTrees`, in
the order of `hpcdist.collectives.algorithms.fixed_tree`). Each rank first sums what it can without the others, and
these partial sums are of whole layers: log2(L/p) Psi bytes, so zero2 and zero3 save no memory of gradients unless
every rank has one shard.

A layer that others are tied to stays gathered from its first use in a micro-batch to its last: stage 3 then sends
less. A layer of fewer than ``persistent_below`` elements, S bytes, stays gathered for good: it sends S (1 - 1/d_o)
after its update, nothing for each use, and no message of a few bytes holds up a layer. All of its state is cut as
before. So does a layer with a tensor that another stage of a pipeline has a copy of.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from hpcdist.arrays.piece import Piece
from hpcdist.arrays.ranges import Range
from hpcdist.arrays.store import FlatStore
from hpcdist.strategies.core.exchange import Handlers, pieces_of
from hpcdist.strategies.core.logical_shards import LogicalShards
from hpcdist.strategies.core.rank_context import RankContext
from hpcdist.strategies.core.sharded_update import ShardedUpdate, ShardedUpdateExchange
from hpcdist.strategies.pipeline.tied import tied_tensors
from hpcdist.strategies.schedule.operations import Kind, Operation
from hpcdist.strategies.tensor.axis import counted
from hpcdist.strategies.zero.config import ZeroConfig
from hpcdist.strategies.zero.levels import GRADIENTS, OPTIMIZER, PARAMETERS, WHOLE, Levels
from hpcdist.strategies.zero.node_parameters import NodeParameters
from hpcdist.strategies.zero.offload import Offload
from hpcdist.strategies.zero.overlap import LockStepGuard, ZeroOverlap, overlap_of, transient_layers


class LayerTrees:
    """A tree for each layer that ``levels`` cuts. Collective over the data axis, but where it says local."""

    def __init__(self, shards: LogicalShards, levels: Levels) -> None:
        self._shards, self._levels = shards, levels
        self._trees = {layer: shards.tree() for layer in levels.cuts}
        self._owners = {layer: levels.owners(layer) for layer in levels.cuts}

    def add(self, layer: int, microbatch: int, store: FlatStore) -> None:
        """Take in the gradients of a shard of a layer that is not the last one here (local)."""
        self._take_in(layer, microbatch, store, copy=True)

    def reduce(self, layer: int, microbatch: int, store: FlatStore) -> None:
        """Take in those of the last one, and put the sum over all shards in the place of the own cut.

        What ``store`` holds of the layer beyond that is undefined afterwards.
        """
        self._take_in(layer, microbatch, store, copy=False)
        self._trees[layer].reduce_scatter(store.range(self._levels.cuts[layer][WHOLE]), self._owners[layer])

    def _take_in(self, layer: int, microbatch: int, store: FlatStore, *, copy: bool) -> None:
        whole = store.range(self._levels.cuts[layer][WHOLE])
        self._shards.add(self._trees[layer], microbatch, whole, copy=copy)


_DEFAULT = ZeroConfig()


class ZeroExchange(ShardedUpdateExchange):
    """ZeRO ``stage`` 1, 2 or 3, or what ``config`` makes of it. Collective over the data axis, but where it says local.

    ``parameters`` holds the whole of layers that stay gathered, and the shard of the others.
    """

    def __init__(
        self, seat: RankContext, stage: int, config: ZeroConfig = _DEFAULT, shards: LogicalShards | None = None
    ) -> None:
        super().__init__(seat, shards)
        self.degrees = self._over = config.degrees(stage, seat.data.size)
        if shards is not None:  # each REDUCE is over all replicas
            self.degrees = replace(self._over, gradients=seat.data.size)
        self.levels = levels = Levels(seat, self._over)
        self._offload = Offload(seat, config)
        in_memory = config.offload_parameters == "none"  # else a layer comes and goes even where nothing is cut
        self._kept = GRADIENTS if shards is None else OPTIMIZER  # what stays of gradients that are not kept whole
        self._comes_and_goes = self._over.parameters > 1 or not in_memory
        self.replicas_identical = not self._comes_and_goes
        self._keeps_gradients = (self._over.gradients == 1 or config.keep_gradients) and in_memory
        self.keeps_parameters = config.keep_parameters
        self.accumulates = self._keeps_gradients and shards is None
        self.overlap = overlap_of(seat, levels)
        self.ahead = config.prefetch if self.overlap is not None else 0
        # Units with a tensor that other stages have a copy of: these get the whole.
        self._copied = {tie.unit for tie in tied_tensors(seat.model, seat.placed)}
        self._layer_at = {part: seat.model.stages[unit].layer for unit, part in seat.ranges.items()}
        cut = [unit for unit in seat.units if self._is_cut(unit, config.persistent_below)]
        self._cut_layers = {seat.model.stages[unit].layer for unit in cut}
        self.gathers: Mapping[int, Sequence[int]] = (
            {unit: [used for used in needs if used in cut] for unit, needs in seat.model.needs.items()} if cut else {}
        )
        self._order = LockStepGuard(seat.data, seat.agree_algorithm)
        ahead = self.overlap if self.ahead else None
        self._whole_parameters = transient_layers(seat, "parameters", cut, levels.first(WHOLE, PARAMETERS), ahead)
        whole = () if self._keeps_gradients else seat.units
        self._whole_gradients = transient_layers(seat, "gradients", whole, levels.first(WHOLE, GRADIENTS), self.overlap)
        own = [cuts[OPTIMIZER] for cuts in levels.cuts.values()]
        self._node = NodeParameters(seat, [*map(levels.of_all, levels.cuts)]) if config.shared_parameters else None
        self.owner = ShardedUpdate(
            self._stepped(own),
            self._keep_gradients(),
            self._offload.optimizer(own),
            own,
            levels.sharers,
            seat.agree_algorithm,
            exactly=shards is not None,
            tensor=seat.tensor,
        )
        self._trees = None if shards is None else LayerTrees(shards, levels)
        self._added: set[int] = set()  # layers whose gradient shard holds a micro-batch of this step already
        self.handlers: Handlers = {
            Kind.ADD: self.add,
            Kind.REDUCE: self.reduce,
            Kind.COMBINE: self.combine,
            Kind.GATHER: self.gather,
            Kind.FREE: self.free,
            Kind.REFRESH: self.refresh,
            Kind.COMMIT: self.commit,
            **self.owner.handlers,
        }
        self._behind: ZeroOverlap | None = None
        if self.overlap is not None:
            how = (self._layer_of, self.gradients_at, self._place, self._take_in)
            self._behind = ZeroOverlap(self.overlap, levels, self._order, *how)
            self.handlers = {**self.handlers, **self._behind.handlers}

    def _is_cut(self, unit: int, persistent_below: int) -> bool:
        """Whether the parameters of ``unit`` are gathered for each use, and not kept whole (local)."""
        size = sum(part.size for _, part in self.seat.layout.within(self.seat.ranges[unit]))
        return self._comes_and_goes and size >= persistent_below and unit not in self._copied

    def _stepped(self, own: Sequence[Range]) -> FlatStore:
        """Return what the owners of the cuts ``own`` step (local)."""
        return self._keep_parameters() if self._node is None else self._node.front

    def _keep_parameters(self) -> FlatStore:
        if not self._cut_layers:  # what is whole is handed round among the replicas; a shard is this rank's alone
            over = self.levels.first(PARAMETERS, OPTIMIZER)
            return self.seat.store("parameters", allocate=self.seat.for_replicas("parameters", over))
        kept = [cuts[PARAMETERS if layer in self._cut_layers else WHOLE] for layer, cuts in self.levels.cuts.items()]
        return self._offload.parameters(kept)

    def _keep_gradients(self) -> FlatStore:
        if self._keeps_gradients:
            over = self.levels.first(WHOLE, OPTIMIZER) or self.levels.replicas
            over = self.overlap.over if self.overlap is not None else over
            return self.seat.store("gradients", allocate=self.seat.for_replicas("gradients", over))
        return self._offload.gradients([cuts[self._kept] for cuts in self.levels.cuts.values()])

    def plan(self) -> list[Operation]:
        """Return REDUCE per layer, COMBINE of its shards, AGREE, the update of the own cuts, and their way back.

        ADD and no COMBINE where logical shards are summed. Back by GATHER where a layer is kept whole, REFRESH where a
        shard is that is more than the own cut; COMMIT where the ranks of a node share the parameters.
        """
        ranges = list(reversed(self.seat.ranges.values()))
        reduces = [Operation(Kind.REDUCE, range=part) for part in ranges]
        if self.shards is not None:
            reduces += [Operation(Kind.ADD, range=part) for part in ranges]
        elif not self.accumulates and self._over.gradients < self.seat.data.size:
            reduces += [Operation(Kind.COMBINE, range=part) for part in ranges]
        return [*reduces, Operation(Kind.AGREE), *self.owner.plan(), *self._back()]

    def _back(self) -> list[Operation]:
        """Return how the new cuts of all ranks get to those who keep them."""
        if self._node is not None:
            return [Operation(Kind.COMMIT)]
        found = []
        for unit in self.seat.units:
            is_cut = self.seat.model.stages[unit].layer in self._cut_layers
            if (self._over.parameters if is_cut else 1) < self._over.optimizer:
                found.append(Operation(Kind.REFRESH if is_cut else Kind.GATHER, unit=unit))
        return found

    def begin(self, operations: Sequence[Operation]) -> None:
        """Watch, where parameters are gathered for each use, that all ranks run the same list."""
        self._added.clear()  # also where the step before was given up
        if self.gathers:
            self._order.begin(operations)

    def reduce(self, op: Operation) -> None:
        """Sum the gradients of a layer to the shards that are kept of it or, where they are whole, to the own cuts."""
        self._order.meet(op)
        store = self.gradients_at(layer := self._layer_of(op))
        if self._trees is not None:
            self._trees.reduce(layer, op.microbatch, store)
        else:
            self._sum(store, layer, WHOLE, OPTIMIZER if self.accumulates else GRADIENTS)
        self._take_in(layer)

    def _sum(self, store: FlatStore, layer: int, start: int, stop: int) -> None:
        """Sum cut ``start`` of a layer to its cut ``stop``, the last one over all who own the same. Collective."""
        self.levels.reduce(store, layer, start, stop)
        if stop == OPTIMIZER:
            self.levels.sum_replicas(store, layer)

    def _take_in(self, layer: int) -> None:
        """Add this rank's shard of a layer to those of earlier micro-batches, and free the layer (local)."""
        if self._keeps_gradients:  # it is where it belongs
            return
        own, store = self.levels.cuts[layer][self._kept], self.gradients_at(layer)
        (self.gradients.add if layer in self._added else self.gradients.write)(own, store.range(own))
        self._added.add(layer)
        self._whole_gradients.free(layer)

    def add(self, op: Operation) -> None:
        """Take the gradients of a logical shard into the partial sums of this rank, and free the layer (local)."""
        assert self._trees is not None
        self._trees.add(layer := self._layer_of(op), op.microbatch, self.gradients_at(layer))
        if not self._keeps_gradients:
            self._whole_gradients.free(layer)

    def combine(self, op: Operation) -> None:
        """Sum the shard of a layer over those who hold the same one, to their cuts, once a step."""
        self._sum(self.gradients, self._layer_of(op), GRADIENTS, OPTIMIZER)

    def gather(self, op: Operation) -> None:
        """Bring a layer together: before a use, from the shards; where it is kept whole, from the new cuts."""
        self._order.meet(op)
        layer = self.seat.model.stages[op.unit].layer
        if layer in self._cut_layers and self._behind is not None and self.ahead:
            self._behind.gather(layer)
        elif layer in self._cut_layers:
            self._bring(self._place(layer), layer, WHOLE, PARAMETERS)
        else:
            self.levels.gather(self.parameters, layer, WHOLE, OPTIMIZER)

    def _place(self, layer: int) -> FlatStore:
        """Return memory for the whole of a layer, with the own shard in it (local)."""
        store, own = self._whole_parameters.at(layer), self.levels.cuts[layer][PARAMETERS]
        self.parameters.read(own, store.range(own))
        return store

    def refresh(self, op: Operation) -> None:
        """Bring the shard of a layer together from the new cuts."""
        self._bring(self.parameters, self.seat.model.stages[op.unit].layer, PARAMETERS, OPTIMIZER)

    def _bring(self, store: FlatStore, layer: int, start: int, stop: int) -> None:
        """Fill cut ``start`` of a layer that is not kept whole from its cuts ``stop``. Collective."""
        self.levels.gather(store, layer, start, stop)

    def free(self, op: Operation) -> None:
        """Drop the gathered layer (local)."""
        self._whole_parameters.free(self.seat.model.stages[op.unit].layer)

    def commit(self, op: Operation) -> None:
        """Put the new parameters of the node in the place of the old ones."""
        assert self._node is not None
        self._node.commit()

    def _layer_of(self, op: Operation) -> int:
        return self._layer_at[op.range] if op.range is not None else self.seat.model.stages[op.unit].layer

    def parameters_at(self, layer: int) -> FlatStore:
        """Return where the layer is whole: one that is cut is there between GATHER and FREE only."""
        return self._whole_parameters.at(layer) if layer in self._cut_layers else self.parameters

    def gradients_at(self, layer: int) -> FlatStore:
        """Return where the layer is whole: where gradients are cut, it is there until its REDUCE."""
        return self.gradients if self._keeps_gradients else self._whole_gradients.at(layer)

    @property
    def parameters(self) -> FlatStore:
        """The parameters that this rank keeps between steps; during an update, of shared ones, still the old."""
        return self.owner.parameters if self._node is None else self._node.front

    def norm_squared(self) -> float:
        """Return the share of the own cuts, for one of those who own the same: together they are the model, once."""
        own = self.owner.norm_squared()
        return own if self.levels.replicas is None or self.levels.replicas.rank == 0 else 0.0

    def spread(self) -> None:
        """Bring the own cuts to all ranks that keep them. Collective."""
        if self._node is not None:
            self.owner.parameters = self._node.begin()  # in front, as they are now
        for op in self._back():
            self.handlers[op.kind](op)

    def begin_update(self, scale: float) -> None:
        """Begin the update of the step."""
        if self._node is not None:
            self.owner.parameters = self._node.begin()
        self.owner.begin_update(scale)

    def close(self) -> None:
        """Give back the communicators of levels and nodes."""
        self.levels.free()
        if self._node is not None:
            self._node.free()

    def pieces(self) -> Sequence[Piece]:
        """Return this rank's share, by bytes, of the own cuts: what several ranks own is written once."""
        own = counted(self.seat.layout, self.levels.of_replicas(self.owner.parts), self.seat.tensor)
        return pieces_of({"parameters": self.weights, **self.owner.slots()}, own)
