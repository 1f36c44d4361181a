"""Shared-memory transport of parameter servers: ranks of a node read data where other ranks wrote them.

Servers sum the gradients of their node's workers from shared memory, and update the node's only copy of the parameters
in place. With Psi bytes of parameters and w workers on one node, the servers read w Psi and send nothing.
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
from hpcdist.collectives.node.shared_memory import SPINS, YIELDS
from hpcdist.collectives.segments import scratch, wait_all
from hpcdist.comm.communicator import Communicator
from hpcdist.comm.transport import Request, SharedBlock
from hpcdist.errors import ConfigurationError, MissingCapabilityError
from hpcdist.strategies.parameter_server.transport import (
    GRADIENT,
    PARAMETER,
    PartialSums,
    ServerTopology,
    Transport,
    pushed,
)

PAUSE_SHARE: Final = 0.05  # sleep between two polls, relative to the time waited so far,
LONGEST_PAUSE_S: Final = 1e-3  # but at most this long
_WORD_BYTES: Final = 8


@jit
def raise_word(address: int, value: int) -> None:
    """Store ``value`` with release order: a rank that reads ``value`` also sees all earlier writes of this rank."""
    store_release(address, value)


def _samples() -> tuple[int, int]:
    return _SAMPLE.ctypes.data, 1


_SAMPLE: Final = np.zeros(1, np.int64)
raise_word.sample(_samples)
has_reached.sample(lambda: (*_samples(), 0, 0))


class NodeFlags:
    """Counters in shared memory: ``words`` counters per rank of ``comm``. Construction is collective over ``comm``."""

    def __init__(self, comm: Communicator, words: int) -> None:
        self._block = comm.shared(align_up(max(1, words) * _WORD_BYTES, LINE_BYTES))
        self.is_shared = self._block.is_shared
        self._at = [view.ctypes.data for view in self._block.views]
        self._own = self._at[comm.rank]
        # If ranks share cores, a spinning rank would block the rank that it waits for.
        cores = set().union(*comm.allgather_object(os.sched_getaffinity(0)))
        self._spins = 1 if comm.size > len(cores) else SPINS

    def raise_to(self, word: int, value: int) -> None:
        """Increase this rank's counter number ``word`` to ``value``."""
        raise_word(self._own + _WORD_BYTES * word, value)

    def wait(self, rank: int, word: int, value: int) -> None:
        """Wait until counter ``word`` of ``rank`` is at least ``value``. Raises CommunicationError if a rank died."""
        address = self._at[rank] + _WORD_BYTES * word
        if has_reached(address, value, self._spins, YIELDS):
            return
        since = time.monotonic()
        while not has_reached(address, value, 0, 1):
            self._block.check_alive(since)
            # Waits can take as long as a backward pass: leave the core to the workers.
            time.sleep(min(LONGEST_PAUSE_S, PAUSE_SHARE * (time.monotonic() - since)))

    def close(self) -> None:
        """Free the shared memory of the counters. Collective over the ranks that constructed them."""
        self._block.close()


class SharedMemoryTransport(Transport):
    """Parameter-server transport that uses shared memory within nodes. Construction is collective over the world."""

    def __init__(self, topology: ServerTopology) -> None:
        context, nodes = topology.context, topology.comm.nodes()
        if context.on != "cpu":
            raise ConfigurationError(
                f"parameter_server.transport = 'shared' is not supported with run.device = {context.on!r}, because "
                "ranks can share only host memory; set parameter_server.transport = 'messages'"
            )
        self.topology, self.comm, self._node = topology, topology.comm, nodes.intra
        self._here = list(nodes.members[nodes.index])  # ranks of this node
        self._nodes = nodes.members
        self._worker_here = next((rank for rank in self._here if rank in topology.roles.workers), None)
        self._place = {part: index for index, (part, _) in enumerate(topology.messages)}
        count = len(self._place)
        # Counters only grow and have one writer each, so a waiter compares them with its own number of steps, without
        # locks or resets. The first ``count`` of a rank count its pushes of each message, the others its new values.
        self._flags = NodeFlags(self._node, 2 * count)
        self._pushes, self._collects, self._news = [0] * count, [0] * count, [0] * count
        self._sent: list[Request] = []
        self._blocks: list[SharedBlock] = []
        self.partials: PartialSums | None = None
        self.parameters, self.gradients = self._stores()
        votes = context.world.allgather_object(self._flags.is_shared and all(block.is_shared for block in self._blocks))
        if not all(votes):
            failing = [rank for rank, shares in enumerate(votes) if not shares]
            raise MissingCapabilityError(
                f"ranks {', '.join(map(str, failing))} cannot share memory with the other ranks of their nodes; check "
                "the free memory, /dev/shm and the process namespaces of the containers, or set "
                "parameter_server.transport = 'messages'"
            )

    def _stores(self) -> tuple[FlatStore, FlatStore]:
        topology, context = self.topology, self.topology.context
        nbytes = context.layout.size * context.dtype.itemsize
        served = None if topology.works else topology.parts(topology.rank)
        if self._worker_here is None:  # a node of dedicated servers keeps only its parts
            return context.store("parameters", served), context.store("gradients", served)
        common = self._shared(nbytes if self._here[0] == topology.rank else 0)
        written = self._shared(nbytes * (1 + topology.slots(topology.rank)) if topology.works else 0)
        # One rank counts the shared copy in its ledger.
        counted = context.counted(common.views[0], "parameters") if self._here[0] == topology.rank else common.views[0]
        parameters = context.store("parameters", None, _given(counted))
        node_ranks = {rank: index for index, rank in enumerate(self._here)}
        self._written = {
            rank: self._of_worker(rank, written.views[node_ranks[rank]])
            for rank in self._here
            if rank in topology.roles.workers and rank != topology.rank and written.is_shared
        }
        if not topology.works:
            return parameters, context.store("gradients", served)
        memory = written.views[self._node.rank]
        # Referenced to keep these entries in the ledger.
        self._own = context.counted(memory[:nbytes], "gradients"), context.counted(memory[nbytes:], "communication")
        gradients, self.partials = self._of_worker(topology.rank, memory)
        return parameters, gradients

    def _of_worker(self, worker: int, octets: np.ndarray) -> tuple[FlatStore, PartialSums | None]:
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
        server, index = self.topology.owners[part], self._place[part]
        if server not in self._here:
            values = pushed(self.gradients, self.partials, part)
            self._sent += [self.comm.isend(array, server, GRADIENT) for array in values]
        self._pushes[index] += 1
        self._flags.raise_to(index, self._pushes[index])  # a release: the server sees the gradients written before

    def collect(self, part: Range) -> None:
        index, gradients = self._place[part], self.gradients.range(part)
        self._collects[index] += 1
        others = [worker for worker in self.topology.roles.workers if worker not in self._here]
        elsewhere = [worker for worker in others for _ in range(self.topology.brings(worker))]
        arrived = scratch("parameter_server.arrived", len(elsewhere) * gradients.size, gradients.dtype, gradients)
        arrived = arrived.reshape(len(elsewhere), gradients.size)
        requests = [self.comm.irecv(arrived[at], worker, GRADIENT) for at, worker in enumerate(elsewhere)]
        inputs: list[Array] = []
        for worker in self.topology.roles.workers:
            if worker == self.topology.rank:
                inputs += pushed(self.gradients, self.partials, part)
            elif worker in self._here:
                self._wait(worker, index, self._collects[index], part.size * self.topology.brings(worker))
                inputs += pushed(*self._written[worker], part)
            else:
                inputs += [arrived[at] for at, rank in enumerate(elsewhere) if rank == worker]
        wait_all(requests)
        self.topology.total(inputs, gradients)

    def publish(self, part: Range) -> None:
        values = self.parameters.range(part)
        for members in self._nodes:
            first = next((rank for rank in members if rank in self.topology.roles.workers), None)
            if first is not None and first not in self._here:
                self._sent.append(self.comm.isend(values, first, PARAMETER))
        self._say_new(part)

    def pull(self, part: Range) -> None:
        server, index = self.topology.owners[part], self._place[part]
        if server == self.topology.rank:
            return
        # The first worker of a node receives values from other nodes, and announces them to the others.
        provider = server if server in self._here else self._worker_here
        if provider == self.topology.rank:
            self.comm.recv(self.parameters.range(part), server, PARAMETER)
            self._say_new(part)
            return
        assert provider is not None
        self._news[index] += 1
        self._wait(provider, len(self._place) + index, self._news[index], part.size)

    def _say_new(self, part: Range) -> None:
        index = self._place[part]
        self._news[index] += 1
        self._flags.raise_to(len(self._place) + index, self._news[index])

    def _wait(self, rank: int, word: int, value: int, size: int) -> None:
        dtype = self.topology.context.dtype
        token = self.comm.events.begin(self.comm.name, "load", str(dtype), size, 0, rank, 0)
        self._flags.wait(self._here.index(rank), word, value)
        self.comm.events.end(token)
        self.loaded_bytes += size * dtype.itemsize

    def settle(self) -> None:
        wait_all(self._sent)
        self._sent.clear()

    def close(self) -> None:
        self._flags.close()
        for block in self._blocks:
            block.close()


def _given(octets: np.ndarray) -> Callable[[int, "np.dtype[np.generic]"], Array]:
    return lambda size, dtype: octets.view(dtype)
