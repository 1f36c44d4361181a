"""Gatherers: they bring the parameters that ranks update to all ranks that compute with the parameters.

`CutGatherer` belongs to ZeRO. Operations on a layer that is cut:

GATHER    before each use, all-gather the layer from the shards
FREE      after each use, free the layer; its shard stays
REFRESH   after the update, all-gather the shard from the smaller cuts of the optimizer

Operation on a layer that every rank keeps whole:

GATHER    after the update, all-gather the layer from the cuts of the optimizer

Next on the path: `cuts.Cuts.gather`, or `coded_zero.CompressedGathers.gather` for compressed parameters.

`NodeShared` keeps one copy of the parameters for all data ranks of a node: a double buffer in shared memory. All ranks
read the front buffer. In an update, each owner copies its cuts to the back buffer and updates them there. COMMIT brings
the cuts of other nodes, waits for all ranks of the node, and swaps the buffers. Nothing is gathered inside a node, and
m ranks keep 2 Psi bytes instead of m Psi.

One barrier per step is enough. A rank writes to a buffer only after the commit that made it the back buffer, and every
rank of the node enters that commit after it has read the buffer for the last time. A rank that dies during an update
leaves the front buffer whole.

Between nodes, a cut is sent once to each other node, directly into its back buffer: rank i of a node sends to rank i of
the other nodes (modulo their number of ranks). On k nodes of m ranks, each rank sends (k-1) Psi/(k m).
"""

from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Final

import numpy as np

from hpcdist import collectives
from hpcdist.arrays.backend import Array
from hpcdist.arrays.ranges import Range, split
from hpcdist.arrays.store import FlatStore
from hpcdist.collectives.node import shared_memory
from hpcdist.collectives.segments import wait_all
from hpcdist.errors import DivergenceError, MissingCapabilityError
from hpcdist.strategies.core.background import BackgroundCollectives
from hpcdist.strategies.core.exchange import Handlers
from hpcdist.strategies.core.operations import Kind, Operation
from hpcdist.strategies.core.parameter_views import TransientLayers
from hpcdist.strategies.core.rank_context import RankContext
from hpcdist.strategies.core.sharded_update import ShardedUpdate
from hpcdist.strategies.data.coded_zero import CompressedGathers
from hpcdist.strategies.data.cuts import OPTIMIZER, PARAMETERS, WHOLE, Cuts


class Gatherer:
    """Base class of gatherers, which send updated parameters to all ranks that compute with these parameters."""

    handlers: Handlers = MappingProxyType({})

    def __init__(self, update: ShardedUpdate) -> None:
        self.update = update

    @property
    def parameters(self) -> FlatStore:
        """Store of the parameters that this rank keeps between steps."""
        return self.update.parameters

    def parameters_at(self, layer: int) -> FlatStore:
        """Return the store with the current parameters of ``layer``. Local."""
        return self.parameters

    def plan(self) -> list[Operation]:
        """Return a list of the operations that the gatherer adds after the optimizer update. Local."""
        return []

    def begin(self) -> None:
        """Prepare for a step or an evaluation. Collective over the data axis."""

    def begin_update(self) -> None:
        """Prepare for the update of a step. Local."""

    def spread(self) -> None:
        """Send this rank's updated parameters to all ranks that use these parameters. Collective over the data axis."""
        for op in self.plan():
            self.handlers[op.kind](op)

    def loaded(self) -> None:
        """Record that initial parameters were loaded. Local."""

    def restored(self) -> None:
        """Record that parameters were restored from a checkpoint. Local."""

    def close(self) -> None:
        """Free communicators. Collective over the data axis."""


class CutGatherer(Gatherer):
    """Gatherer of ZeRO shards, layer by layer, before use or after the update. Collective over the data axis."""

    def __init__(
        self,
        context: RankContext,
        update: ShardedUpdate,
        cuts: Cuts,
        cut_units: Collection[int],  # indices of the model stages whose parameters are gathered
        whole: TransientLayers,  # memory of the gathered layers
        background: BackgroundCollectives | None = None,  # gathers layers while other layers are computed
        compressed: CompressedGathers | None = None,  # gathers the layers that are cut in place of ``cuts``
        decoded: FlatStore | None = None,  # store of decoded shards, if the exact parameters are in another store
    ) -> None:
        super().__init__(update)
        self.cuts, self._decoded = cuts, decoded
        self.gathers: Cuts | CompressedGathers = cuts if compressed is None else compressed
        self._keeps_decoded = compressed is not None and compressed.keeps_decoded
        self._is_stale = False  # the shards are not yet decoded from the owners' cuts
        self._layer_of: Mapping[int, int] = {unit: context.model.stages[unit].layer for unit in context.units}
        self._cut_layers = {self._layer_of[unit] for unit in cut_units}
        self._whole, self._background = whole, background
        self.handlers = {Kind.GATHER: self.gather, Kind.FREE: self.free, Kind.REFRESH: self.refresh}
        if background is not None:
            self.handlers |= {Kind.START_GATHER: self.start_gather, Kind.WAIT_GATHER: self.wait_gather}

    @property
    def parameters(self) -> FlatStore:
        return self.update.parameters if self._decoded is None else self._decoded

    def begin(self) -> None:
        if self._is_stale:
            self._is_stale = False
            self.spread()

    def plan(self) -> list[Operation]:
        degrees, plan = self.cuts.degrees, []
        for unit, layer in self._layer_of.items():
            is_cut = layer in self._cut_layers
            if (degrees.parameters if is_cut else 1) < degrees.optimizer:
                plan.append(Operation(Kind.REFRESH if is_cut else Kind.GATHER, unit=unit))
        return plan

    def parameters_at(self, layer: int) -> FlatStore:
        """Return all parameters of ``layer``. If ``layer`` is sharded, they are valid from `gather` to `free`."""
        return self._whole.at(layer) if layer in self._cut_layers else self.parameters

    def gather(self, op: Operation) -> None:
        """All-gather the shards of the layer of stage ``op.unit``."""
        layer = self._layer_of[op.unit]
        if layer not in self._cut_layers:  # after the update
            self._copy_cut(layer)
            self.cuts.gather(self.parameters, layer, WHOLE, OPTIMIZER)
        elif self._background is not None:
            self.start_gather(op)
            self._background.wait(layer)
        else:
            self.gathers.gather(self._with_shard(layer), layer, WHOLE, PARAMETERS)

    def _with_shard(self, layer: int) -> FlatStore:
        store, shard = self._whole.at(layer), self.cuts.cuts[layer][PARAMETERS]
        self.parameters.read(shard, store.range(shard))
        return store

    def free(self, op: Operation) -> None:
        """Free the gathered parameters of model layer ``op.unit`` after their use. Local."""
        self._whole.free(self._layer_of[op.unit])

    def refresh(self, op: Operation) -> None:
        """All-gather this rank's shard of layer ``op.unit`` from the ranks that update subranges of this shard."""
        layer = self._layer_of[op.unit]
        self._copy_cut(layer)
        self.gathers.gather(self.parameters, layer, PARAMETERS, OPTIMIZER)

    def _copy_cut(self, layer: int) -> None:
        if self._decoded is not None:
            part = self.cuts.cuts[layer][OPTIMIZER]
            self._decoded.range(part)[...] = self.update.parameters.range(part)

    def start_gather(self, op: Operation) -> None:
        """Start to all-gather the parameters of model layer ``op.unit``."""
        assert self._background is not None
        layer = self._layer_of[op.unit]
        whole = self._with_shard(layer).range(self.cuts.cuts[layer][WHOLE])
        self._background.start_gather(layer, whole, self.cuts.shares(layer), self.cuts.algorithm)

    def wait_gather(self, op: Operation) -> None:
        """Wait for the all-gather that `start_gather` started for layer ``op.unit``."""
        assert self._background is not None
        self._background.wait_gather(self._layer_of[op.unit])

    def loaded(self) -> None:
        self._is_stale = self._keeps_decoded

    def restored(self) -> None:
        self._is_stale = self._decoded is not None  # 16-bit parameters were gathered when they were rounded

    def close(self) -> None:
        self.cuts.free()


_TAG: Final = 0  # messages between two ranks stay in the order of the layers, which is the same on all ranks


class NodeParameters:
    """Parameters in memory that the data ranks of a node share. Construction is collective over the data axis."""

    # All ranks read a front buffer, and update a back buffer. ``cuts[i][r]``: range of layer i that data rank r
    # updates.

    def __init__(self, context: RankContext, cuts: Sequence[Sequence[Range]]) -> None:
        nodes = context.data.nodes()
        self._intra = nodes.intra
        self._data = context.data
        self._comm = context.data.dup("node parameters") if nodes.count > 1 else context.data
        can_share = self._intra.size == 1 or shared_memory.is_available(self._intra)
        if not all(context.data.allgather_object(can_share)):
            raise MissingCapabilityError(
                "zero.shared_parameters = true, but the ranks of a node cannot share memory; check the free memory, "
                "/dev/shm and the containers' process namespaces, or set zero.shared_parameters = false"
            )
        self._counted: list[Array] = []  # this rank's share of the shared memory, kept for the memory report
        # A rank that is alone on its node needs no second buffer.
        self._stores = [self._allocate(context) for _ in range(2 if self._intra.size > 1 else 1)]
        self._cuts = [parts[context.data.rank] for parts in cuts if parts[context.data.rank]]
        self._commits = 0
        local_ranks, index = nodes.members[nodes.index], nodes.intra.rank
        others = [members for number, members in enumerate(nodes.members) if number != nodes.index]
        self._receivers = [members[index % len(members)] for members in others]
        self._senders = [  # (rank, cut) of the cuts that this rank receives
            (rank, parts[rank])
            for parts in cuts
            for members in others
            for number, rank in enumerate(members)
            if local_ranks[number % len(local_ranks)] == context.data.rank and parts[rank]
        ]

    def _allocate(self, context: RankContext) -> FlatStore:
        if self._intra.size == 1:
            return context.store("parameters")
        store = context.store(
            "parameters", allocate=lambda size, dtype: shared_memory.allocate_common(self._intra, size, np.dtype(dtype))
        )
        if context.ledger is not None:
            share = split(store.size, self._intra.size, store.array.itemsize)[self._intra.rank]
            self._counted.append(context.ledger.track(store.array[share.slice], "parameters"))
        return store

    @property
    def front(self) -> FlatStore:
        """Store of the parameters that all ranks read now (front buffer)."""
        return self._stores[0]

    def begin(self) -> FlatStore:
        """Return the back buffer for new parameters, after copying the ranges that this rank updates into it."""
        back = self._stores[-1]
        for part in self._cuts if back is not self.front else ():
            back.range(part)[...] = self.front.range(part)
        return back

    def commit(self) -> None:
        """Exchange updated ranges with other nodes, and swap front and back buffer. Collective over the data axis.

        Afterwards, all ranks read the new parameters.
        """
        back = self._stores[-1]
        requests = [self._comm.irecv(back.range(part), rank, _TAG) for rank, part in self._senders]
        for part in self._cuts:
            requests += [self._comm.isend(back.range(part), rank, _TAG) for rank in self._receivers]
        wait_all(requests)
        self._commits += 1
        self._wait_for_node()
        self._stores.reverse()

    def free(self) -> None:
        """Free the communicator. Collective over the data axis."""
        if self._comm is not self._data:
            self._comm.free()

    def _wait_for_node(self) -> None:
        if self._intra.size == 1:
            return
        votes = np.array([self._commits, -self._commits], np.int64)
        collectives.allreduce(self._intra, votes, "node_shared", op="max")
        if votes[0] != -votes[1]:
            raise DivergenceError(
                f"the ranks of this node have committed {-votes[1]} to {votes[0]} updates of shared parameters, but "
                f"all ranks must commit equally many (this rank: {self._commits}); restart from the last checkpoint"
            )


class NodeShared(Gatherer):
    """Gatherer for parameters in memory that the ranks of a node share."""

    def __init__(self, update: ShardedUpdate, cuts: Cuts, node: NodeParameters) -> None:
        super().__init__(update)
        self.cuts, self._node = cuts, node
        self.handlers = {Kind.COMMIT: self.commit}

    @property
    def parameters(self) -> FlatStore:
        """Store of the current parameters. During an update, these are the parameters before the update."""
        return self._node.front

    def plan(self) -> list[Operation]:
        return [Operation(Kind.COMMIT)]

    def commit(self, op: Operation) -> None:
        """Exchange updated parameters with other nodes, and make them current. Collective over the data axis."""
        self._node.commit()

    def begin_update(self) -> None:
        self.update.parameters = self._node.begin()

    def spread(self) -> None:
        self.begin_update()
        super().spread()

    def close(self) -> None:
        self.cuts.free()
        self._node.free()
