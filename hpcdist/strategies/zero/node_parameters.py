"""One copy of the parameters on a node, for all of its ranks: a double buffer in shared memory.

All ranks read the front. In an update each owner copies its cuts to the back and steps them there, while the front
stays as it was; the commit brings the cuts of other nodes, waits until all ranks of the node have come, and the
buffers change places. Nothing is gathered inside a node, and m ranks keep 2 Psi bytes where they would keep m Psi.

One barrier a step is enough. A rank writes to a buffer again only after the commit that made it the back, and to that
every rank of the node has come when it had done with the step that read it. A rank that dies in the middle of an
update leaves the front whole.

Between nodes a cut goes once to each other node, straight into its back: rank i of a node sends to rank i of the
others (to rank i modulo their number where they have fewer), so that on k nodes of m ranks each sends (k-1) Psi/(k
m).
"""

from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from hpcdist import collectives
from hpcdist.arrays.backend import Array
from hpcdist.arrays.ranges import Range, split
from hpcdist.arrays.store import FlatStore
from hpcdist.collectives.node import shared_memory
from hpcdist.collectives.segments import wait_all
from hpcdist.errors import DivergenceError, MissingCapabilityError
from hpcdist.strategies.core.rank_context import RankContext
from hpcdist.strategies.schedule.operations import Kind, Operation
from hpcdist.strategies.zero.config import ShardingDegrees, ZeroConfig
from hpcdist.strategies.zero.plain import PlainZero

_TAG: Final = 0  # messages between two ranks stay in the order of the layers, which all share


class NodeParameters:
    """Parameters shared by the data ranks of this node. Construction is collective over the data axis.

    ``cuts`` has, for each layer, what every data rank updates of it. Each rank counts its share of the memory in its
    ledger, as the kernel does in its PSS: together they count it once. Raises MissingCapabilityError, on all ranks,
    where those of a node cannot share memory.
    """

    def __init__(self, context: RankContext, cuts: Sequence[Sequence[Range]]) -> None:
        nodes = context.data.nodes()
        self._intra = nodes.intra
        self._data = context.data
        self._comm = context.data.dup("node parameters") if nodes.count > 1 else context.data
        shares = self._intra.size == 1 or shared_memory.is_available(self._intra)
        if not all(context.data.allgather_object(shares)):
            raise MissingCapabilityError(
                "zero.shared_parameters = true, but the ranks of a node cannot share memory (see the free memory, "
                "/dev/shm and the containers' process namespaces); set it to false"
            )
        self._counted: list[Array] = []  # this rank's share of what is shared, kept for the ledger
        # Nobody else reads the parameters of a rank that is alone on its node: they are stepped where they are.
        self._stores = [self._new(context) for _ in range(2 if self._intra.size > 1 else 1)]
        self._own = [parts[context.data.rank] for parts in cuts if parts[context.data.rank]]
        self._committed = 0
        here, index = nodes.members[nodes.index], nodes.intra.rank
        others = [members for number, members in enumerate(nodes.members) if number != nodes.index]
        self._receivers = [members[index % len(members)] for members in others]
        self._senders = [  # (rank, its cut), for this rank to take in
            (rank, parts[rank])
            for parts in cuts
            for members in others
            for number, rank in enumerate(members)
            if here[number % len(here)] == context.data.rank and parts[rank]
        ]

    def _new(self, context: RankContext) -> FlatStore:
        if self._intra.size == 1:
            return context.store("parameters")
        store = context.store(
            "parameters", allocate=lambda size, dtype: shared_memory.allocate_common(self._intra, size, np.dtype(dtype))
        )
        if context.ledger is not None:
            mine = split(store.size, self._intra.size, store.array.itemsize)[self._intra.rank]
            self._counted.append(context.ledger.track(store.array[mine.slice], "parameters"))
        return store

    @property
    def front(self) -> FlatStore:
        """Parameters that all ranks read."""
        return self._stores[0]

    def begin(self) -> FlatStore:
        """Return the back buffer, with this rank's cuts copied from the front (local)."""
        back = self._stores[-1]
        for part in self._own if back is not self.front else ():
            back.range(part)[...] = self.front.range(part)
        return back

    def commit(self) -> None:
        """Swap front and back once all of the back is new. Collective over the data axis."""
        back = self._stores[-1]
        requests = [self._comm.irecv(back.range(part), rank, _TAG) for rank, part in self._senders]
        for part in self._own:
            requests += [self._comm.isend(back.range(part), rank, _TAG) for rank in self._receivers]
        wait_all(requests)
        self._committed += 1
        self._meet()
        self._stores.reverse()

    def free(self) -> None:
        """Free the communicator of the cuts; nothing can be committed then. Collective over the data axis."""
        if self._comm is not self._data:
            self._comm.free()

    def _meet(self) -> None:
        """Wait for all ranks of the node at the same commit. Collective over the node."""
        if self._intra.size == 1:
            return
        votes = np.array([self._committed, -self._committed], np.int64)
        collectives.allreduce(self._intra, votes, "node_shared", op="max")
        if votes[0] != -votes[1]:
            raise DivergenceError(
                f"the ranks of the node commit different steps of their common parameters: {-votes[1]} to {votes[0]}, "
                f"and this one {self._committed}"
            )


class NodeSharedZero(PlainZero):
    """Layer of ZeRO that keeps one copy of the parameters for the ranks of a node, where ``config`` says so."""

    def __init__(self, context: RankContext, degrees: ShardingDegrees, config: ZeroConfig, **of_base: Any) -> None:
        self._node: NodeParameters | None = None
        self._shares_parameters = config.shared_parameters
        super().__init__(context, degrees, config, **of_base)
        self.handlers = {**self.handlers, Kind.COMMIT: self.commit}

    def _make_parameters(self, own: Sequence[Range]) -> FlatStore:
        """Return the parameters that owners update: those of the node, if it shares them."""
        if not self._shares_parameters:
            return super()._make_parameters(own)
        self._node = NodeParameters(self.context, [*map(self.levels.of_all, self.levels.cuts)])
        return self._node.front

    def _gathers_after_update(self) -> list[Operation]:
        """Return COMMIT in place of the gathers, where the ranks of a node share the parameters (local)."""
        return super()._gathers_after_update() if self._node is None else [Operation(Kind.COMMIT)]

    def commit(self, op: Operation) -> None:
        """Swap the new parameters of the node with the old ones."""
        assert self._node is not None
        self._node.commit()

    @property
    def parameters(self) -> FlatStore:
        """The parameters that this rank keeps between steps; during an update, of shared ones, still the old."""
        return super().parameters if self._node is None else self._node.front

    def spread(self) -> None:
        """Send the updated cuts to all ranks that keep them. Collective."""
        if self._node is not None:
            self.sharded_update.parameters = self._node.begin()  # in front, as they are now
        super().spread()

    def begin_update(self, scale: float) -> None:
        """Begin the update of the step."""
        if self._node is not None:
            self.sharded_update.parameters = self._node.begin()
        super().begin_update(scale)

    def close(self) -> None:
        """Release the communicators of levels and nodes."""
        super().close()
        if self._node is not None:
            self._node.free()
