"""One copy of the parameters for all data ranks of a node: a double buffer in shared memory.

All ranks read the front buffer. In an update, each owner copies its cuts to the back buffer and updates them there.
COMMIT brings the cuts of other nodes, waits for all ranks of the node, and swaps the buffers. Nothing is gathered
inside a node, and m ranks keep 2 Psi bytes instead of m Psi.

One barrier per step is enough. A rank writes to a buffer only after the commit that made it the back buffer, and every
rank of the node enters that commit after it has read the buffer for the last time. A rank that dies during an update
leaves the front buffer whole.

Between nodes, a cut is sent once to each other node, directly into its back buffer: rank i of a node sends to rank i of
the other nodes (modulo their number of ranks). On k nodes of m ranks, each rank sends (k-1) Psi/(k m).
"""

from collections.abc import Sequence
from typing import Final

import numpy as np

from hpcdist import collectives
from hpcdist.arrays.backend import Array
from hpcdist.arrays.ranges import Range, split
from hpcdist.arrays.store import FlatStore
from hpcdist.collectives.node import shared_memory
from hpcdist.collectives.segments import wait_all
from hpcdist.errors import DivergenceError, MissingCapabilityError
from hpcdist.strategies.core.operations import Kind, Operation
from hpcdist.strategies.core.rank_context import RankContext
from hpcdist.strategies.core.sharded_update import ShardedUpdate
from hpcdist.strategies.data.cuts import Cuts
from hpcdist.strategies.data.gatherers import Gatherer

_TAG: Final = 0  # messages between two ranks stay in the order of the layers, which is the same on all ranks


class NodeParameters:
    """Parameters in memory that a node's data ranks share. Construction is collective over the data axis.

    Raises MissingCapabilityError on all ranks if ranks of a node cannot share memory.
    """

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
        """Store of the front buffer: the parameters that all ranks read."""
        return self._stores[0]

    def begin(self) -> FlatStore:
        """Copy the ranges that this rank updates from the front to the back buffer. Return the back buffer. Local."""
        back = self._stores[-1]
        for part in self._cuts if back is not self.front else ():
            back.range(part)[...] = self.front.range(part)
        return back

    def commit(self) -> None:
        """Exchange updated ranges with other nodes, and swap front and back buffer. Collective over the data axis."""
        back = self._stores[-1]
        requests = [self._comm.irecv(back.range(part), rank, _TAG) for rank, part in self._senders]
        for part in self._cuts:
            requests += [self._comm.isend(back.range(part), rank, _TAG) for rank in self._receivers]
        wait_all(requests)
        self._commits += 1
        self._wait_for_node()
        self._stores.reverse()

    def free(self) -> None:
        """Free the communicator. `commit` may not be called afterwards. Collective over the data axis."""
        if self._comm is not self._data:
            self._comm.free()

    def _wait_for_node(self) -> None:
        if self._intra.size == 1:
            return
        votes = np.array([self._commits, -self._commits], np.int64)
        collectives.allreduce(self._intra, votes, "node_shared", op="max")
        if votes[0] != -votes[1]:
            raise DivergenceError(
                f"the ranks of this node have updated their shared parameters {-votes[1]} to {votes[0]} times, but all "
                f"numbers must be equal (this rank: {self._commits} times); restart from the last checkpoint"
            )


class NodeShared(Gatherer):
    """Gatherer for parameters in memory that a node's ranks share. Its operation COMMIT ends an update."""

    def __init__(self, update: ShardedUpdate, cuts: Cuts, node: NodeParameters) -> None:
        super().__init__(update)
        self.cuts, self._node = cuts, node
        self.handlers = {Kind.COMMIT: self.commit}

    @property
    def parameters(self) -> FlatStore:
        """Store of the current parameters; during an update, of the parameters before the update."""
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
