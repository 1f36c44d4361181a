"""Shared-memory transport of parameter servers: what ranks of a node exchange is read where it was written.

    gradients    each worker's backward writes where all ranks of the node can read: a server sums its ranges straight
                 from there, in the order of the ranks, like messages do, and with the same bits
    parameters   one copy for the node: its servers update it where it lies, its workers compute on it, and a pull is
                 but a counter to wait for

With Psi bytes and w workers on one node, the servers together load w Psi, of which what they wrote themselves comes
from their own memory, and each worker reads Psi in its forward; nothing is sent. Where all p ranks work and serve,
each loads 2 Psi (p-1)/p of what others wrote, and parameters take Psi on the node, not p Psi.

Between nodes there are messages: a worker sends its gradients to servers elsewhere, and the first worker of a node
takes parameters from elsewhere for all of them. The sums, and so the bits, are those of messages alone.

Nobody overwrites what is still read: a server changes parameters after all ranks have agreed on the step, when every
backward is over, and a backward writes gradients again when the rank has pulled, after every server has collected.
"""

import os
import time
from collections.abc import Callable
from typing import Final

import numpy as np

from hpcdist.arrays.backend import Array
from hpcdist.arrays.intrinsics import store_release
from hpcdist.arrays.jit import jit
from hpcdist.arrays.ranges import Range, align_up
from hpcdist.arrays.store import FlatStore
from hpcdist.collectives.node.protocol import LINE_BYTES, has_reached
from hpcdist.collectives.segments import scratch, wait_all
from hpcdist.comm.communicator import Communicator, Request, SharedBlock
from hpcdist.errors import ConfigurationError, MissingCapabilityError
from hpcdist.strategies.parameter_server.transport import (
    GRADIENT,
    PARAMETER,
    PartialSums,
    ServerTopology,
    Transport,
    pushed,
)

SPINS: Final = 4000  # looks at a counter before the core is offered to others, where each rank has one of its own
YIELDS: Final = 500  # offers before Python is asked whether all live: about a millisecond
PAUSE_SHARE: Final = 0.05  # of the time waited so far: what a long wait sleeps between two looks,
LONGEST_PAUSE_S: Final = 1e-3  # at most
_WORD_BYTES: Final = 8


@jit
def raise_word(address: int, value: int) -> None:
    """Store ``value`` with release order: earlier writes are visible to whoever loads it."""
    store_release(address, value)


def _samples() -> tuple[int, int]:
    return _SAMPLE.ctypes.data, 1


_SAMPLE: Final = np.zeros(1, np.int64)
raise_word.sample(_samples)
has_reached.sample(lambda: (*_samples(), 0, 0))


class NodeFlags:
    """Counters in shared memory, ``words`` for each rank of one node. Construction is collective, all else local.

    Where memory cannot be shared, ``is_shared`` says so, and nothing else may be called.
    """

    def __init__(self, comm: Communicator, words: int) -> None:
        self._block = comm.shared(align_up(max(1, words) * _WORD_BYTES, LINE_BYTES))
        self.is_shared = self._block.is_shared
        self._at = [view.ctypes.data for view in self._block.views]
        self._own = self._at[comm.rank]
        # Where ranks share cores, a rank that spins keeps the one that it waits for from running.
        cores = set().union(*comm.allgather_object(os.sched_getaffinity(0)))
        self._spins = 1 if comm.size > len(cores) else SPINS

    def raise_to(self, word: int, value: int) -> None:
        """Set the own counter ``word`` to a larger value."""
        raise_word(self._own + _WORD_BYTES * word, value)

    def wait(self, rank: int, word: int, value: int) -> None:
        """Wait until the counter ``word`` of ``rank`` is at least ``value``.

        MPI progresses meanwhile. Raises CommunicationError when a rank of the node has died.
        """
        address = self._at[rank] + _WORD_BYTES * word
        if has_reached(address, value, self._spins, YIELDS):
            return
        since = time.monotonic()
        while not has_reached(address, value, 0, 1):
            self._block.check_alive(since)
            # A server waits as long as a backward takes: the core is for those that compute.
            time.sleep(min(LONGEST_PAUSE_S, PAUSE_SHARE * (time.monotonic() - since)))

    def close(self) -> None:
        """Free the memory. Collective."""
        self._block.close()


class SharedMemoryTransport(Transport):
    """Transport by shared memory. Construction is collective over the world.

    Raises ConfigurationError on a GPU and MissingCapabilityError, on all ranks, where a node cannot share memory.
    """

    def __init__(self, topology: ServerTopology) -> None:
        context, nodes = topology.context, topology.comm.nodes()
        if context.on != "cpu":
            raise ConfigurationError(
                f"parameter_server.transport = 'shared' with run.device = {context.on!r}: ranks share the memory of "
                "the host only; set parameter_server.transport = 'messages'"
            )
        self.topology, self.comm, self._node = topology, topology.comm, nodes.intra
        self._here = list(nodes.members[nodes.index])  # ranks of this node
        self._nodes = nodes.members
        self._worker_here = next((rank for rank in self._here if rank in topology.roles.workers), None)
        self._place = {part: index for index, (part, _) in enumerate(topology.messages)}
        count = len(self._place)
        # Counters only grow, and each has one writer, so a waiter needs no lock and no reset between steps: it compares
        # with the number of steps that it has made itself. The first ``count`` of a rank count its pushes of each
        # message, the others its new values.
        self._flags = NodeFlags(self._node, 2 * count)
        self._pushes, self._collects, self._news = [0] * count, [0] * count, [0] * count
        self._sent: list[Request] = []
        self._blocks: list[SharedBlock] = []
        self.partials: PartialSums | None = None
        self.parameters, self.gradients = self._stores()
        alike = context.world.allgather_object(self._flags.is_shared and all(block.is_shared for block in self._blocks))
        if not all(alike):
            alone = [rank for rank, shares in enumerate(alike) if not shares]
            raise MissingCapabilityError(
                f"rank {', '.join(map(str, alone))} cannot share memory with the ranks of its node (see the free "
                "memory, /dev/shm and the containers' process namespaces); set parameter_server.transport = 'messages'"
            )

    def _stores(self) -> tuple[FlatStore, FlatStore]:
        """Return the stores of parameters and gradients. Collective over the node."""
        topology, context = self.topology, self.topology.context
        nbytes = context.layout.size * context.dtype.itemsize
        own = None if topology.works else topology.parts(topology.rank)
        if self._worker_here is None:  # a node of servers keeps what they serve, no more
            return context.store("parameters", own), context.store("gradients", own)
        common = self._shared(nbytes if self._here[0] == topology.rank else 0)
        written = self._shared(nbytes * (1 + topology.slots(topology.rank)) if topology.works else 0)
        # The one copy is counted by one rank.
        counted = context.counted(common.views[0], "parameters") if self._here[0] == topology.rank else common.views[0]
        parameters = context.store("parameters", None, _given(counted))
        itself = {rank: index for index, rank in enumerate(self._here)}
        self._written = {
            rank: self._of_worker(rank, written.views[itself[rank]])
            for rank in self._here
            if rank in topology.roles.workers and rank != topology.rank and written.is_shared
        }
        if not topology.works:
            return parameters, context.store("gradients", own)
        mine = written.views[self._node.rank]
        # Kept for the ledger, which counts these as long as they live.
        self._own = context.counted(mine[:nbytes], "gradients"), context.counted(mine[nbytes:], "communication")
        gradients, self.partials = self._of_worker(topology.rank, mine)
        return parameters, gradients

    def _of_worker(self, worker: int, octets: np.ndarray) -> tuple[FlatStore, PartialSums | None]:
        """Return the gradients of the rank ``worker`` in shared memory, and its partial sums behind them."""
        nbytes = self.topology.context.layout.size * self.topology.context.dtype.itemsize
        stores = [
            self.topology.context.store("gradients", None, _given(octets[slot * nbytes : (slot + 1) * nbytes]))
            for slot in range(1 + self.topology.slots(worker))
        ]
        return stores[0], self.topology.partials_in(worker, stores[0], lambda slot: stores[1 + slot])

    def _shared(self, nbytes: int) -> SharedBlock:
        block = self._node.shared(nbytes)
        self._blocks.append(block)
        return block

    def push(self, part: Range) -> None:
        """Announce the gradients of a range, or begin to send them to a server on another node."""
        server, place = self.topology.owners[part], self._place[part]
        if server not in self._here:
            values = pushed(self.gradients, self.partials, part)
            self._sent += [self.comm.isend(array, server, GRADIENT) for array in values]
        self._pushes[place] += 1
        self._flags.raise_to(place, self._pushes[place])  # a release: the gradients before it are visible to a server

    def collect(self, part: Range) -> None:
        """Sum the gradients of an own range out of the memory of the workers."""
        place, own = self._place[part], self.gradients.range(part)
        self._collects[place] += 1
        others = [worker for worker in self.topology.roles.workers if worker not in self._here]
        elsewhere = [worker for worker in others for _ in range(self.topology.brings(worker))]
        arrived = scratch("parameter_server.arrived", len(elsewhere) * own.size, own.dtype, own)
        arrived = arrived.reshape(len(elsewhere), own.size)
        requests = [self.comm.irecv(arrived[at], worker, GRADIENT) for at, worker in enumerate(elsewhere)]
        inputs: list[Array] = []
        for worker in self.topology.roles.workers:
            if worker == self.topology.rank:
                inputs += pushed(self.gradients, self.partials, part)
            elif worker in self._here:
                self._wait(worker, place, self._collects[place], part.size * self.topology.brings(worker))
                inputs += pushed(*self._written[worker], part)
            else:
                inputs += [arrived[at] for at, rank in enumerate(elsewhere) if rank == worker]
        wait_all(requests)
        self.topology.total(inputs, own)

    def publish(self, part: Range) -> None:
        """Announce the new values of an own range, and begin to send them to the other nodes."""
        values = self.parameters.range(part)
        for members in self._nodes:
            first = next((rank for rank in members if rank in self.topology.roles.workers), None)
            if first is not None and first not in self._here:
                self._sent.append(self.comm.isend(values, first, PARAMETER))
        self._say_new(part)

    def pull(self, part: Range) -> None:
        """Wait until the new values of a range are in the memory of the node."""
        server, place = self.topology.owners[part], self._place[part]
        if server == self.topology.rank:
            return
        # Values from another node come to the first worker of this one, who announces them to the rest.
        provider = server if server in self._here else self._worker_here
        if provider == self.topology.rank:
            self.comm.recv(self.parameters.range(part), server, PARAMETER)
            self._say_new(part)
            return
        assert provider is not None
        self._news[place] += 1
        self._wait(provider, len(self._place) + place, self._news[place], part.size)

    def _say_new(self, part: Range) -> None:
        place = self._place[part]
        self._news[place] += 1
        self._flags.raise_to(len(self._place) + place, self._news[place])

    def _wait(self, rank: int, word: int, value: int, size: int) -> None:
        """Wait for a counter of another rank of the node; ``size`` elements of its memory are read then."""
        dtype = self.topology.context.dtype
        token = self.comm.events.begin(self.comm.name, "load", str(dtype), size, 0, rank, 0)
        self._flags.wait(self._here.index(rank), word, value)
        self.comm.events.end(token)
        self.loaded_bytes += size * dtype.itemsize

    def settle(self) -> None:
        """Wait for the sends to other nodes."""
        wait_all(self._sent)
        self._sent.clear()

    def close(self) -> None:
        """Free the shared memory."""
        self._flags.close()
        for block in self._blocks:
            block.close()


def _given(octets: np.ndarray) -> Callable[[int, "np.dtype[np.generic]"], Array]:
    """Return an allocator that hands out ``octets``."""
    return lambda size, dtype: octets.view(dtype)
