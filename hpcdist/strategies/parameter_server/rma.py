"""RMA transport of parameter servers: put gradients into, and get parameters from, the servers' MPI windows.

A server's window holds its parameters and, for each worker, a slot for the gradients of what it owns (for each
partial sum, where sums follow logical shards). A worker puts its gradients into its slot, flushes, and says so by a
message of one byte; the server adds the slots in the order of the ranks, as it does with messages, and to the same
bits. It says by a byte that new parameters are there, and the workers get them.

A put is flushed when the next one is due, so that it may go on behind the backward. Where the network has RDMA no
server takes part in it, nor has to be in the MPI library; on one node it is a copy. With Psi bytes of parameters and
w workers a server of Psi/s holds w Psi/s of slots, which messages do not need; the bytes on the wire are theirs.

Nobody touches what another rank still uses: a slot is written again, and parameters change, after all ranks have
agreed on a step, when the server has collected, and when all workers have pulled those of the step before.
"""

from itertools import accumulate

import numpy as np

from hpcdist.arrays.backend import Array
from hpcdist.arrays.ranges import Range
from hpcdist.comm.communicator import Request
from hpcdist.errors import ConfigurationError
from hpcdist.strategies.parameter_server.transport import GRADIENT, PARAMETER, ServerTopology, pushed


class RmaTransport:
    """See `transport.Transport`. Making it is collective over the world.

    Raises ConfigurationError on a GPU and MissingCapabilityError, on all ranks, where MPI has no working RMA.
    """

    loaded_bytes = 0  # what is put and got is counted as sent

    def __init__(self, site: ServerTopology) -> None:
        context = site.context
        if context.on != "cpu":
            raise ConfigurationError(
                f"parameter_server.transport = 'rma' with run.device = {context.on!r}: windows are in the memory of "
                "the host only; set parameter_server.transport = 'messages'"
            )
        self.site, self.comm = site, site.comm
        self._itemsize = context.dtype.itemsize
        self._parts = {server: site.parts(server) for server in site.roles.servers}
        self._starts = {
            server: list(accumulate((part.size for part in parts), initial=0)) for server, parts in self._parts.items()
        }
        stored = None if site.works else self._parts[site.rank]
        held = self._held(site.rank) if site.serves else 0
        owned = self._starts[site.rank][-1] if site.serves else 0
        # The first slot of each worker, and behind all of them how many there are.
        self._first = list(accumulate(map(site.brings, site.roles.workers), initial=0))
        self._window = self.comm.window((held + self._first[-1] * owned) * self._itemsize)
        memory = self._window.memory.view(context.dtype)
        if site.serves:
            self.parameters = context.store(
                "parameters", stored, lambda size, dtype: self._counted(memory[:size], "parameters")
            )
        else:
            self.parameters = context.store("parameters", stored)
        self.gradients = context.store("gradients", stored)
        self.partials = site.partials(self.gradients)
        self._inbox = self._counted(memory[held:], "communication")
        self._slots = [self._inbox[slot * owned : (slot + 1) * owned] for slot in range(self._first[-1])]
        self._put: list[Range] = []  # not flushed yet
        self._got: set[int] = set()  # servers with which a get is under way
        self._notices: list[Request] = []
        self._byte = np.zeros(1, np.uint8)

    def _counted(self, memory: np.ndarray, category: str) -> np.ndarray:
        ledger = self.site.context.ledger
        return memory if ledger is None else ledger.track(memory, category)

    def _held(self, server: int) -> int:
        """Return how many parameters a server keeps in its window."""
        return self.site.context.layout.size if server in self.site.roles.workers else self._starts[server][-1]

    def _owned_at(self, part: Range, server: int) -> int:
        """Return where ``part`` begins among what ``server`` owns."""
        for start, owned in zip(self._starts[server], self._parts[server], strict=False):
            if owned.start <= part.start and part.stop <= owned.stop:
                return start + part.start - owned.start
        raise AssertionError(f"{part} is none of rank {server}")

    def _parameters_at(self, part: Range, server: int) -> int:
        return part.start if server in self.site.roles.workers else self._owned_at(part, server)

    def push(self, part: Range) -> None:
        """Begin to put the gradients of a range into the slot at its server; announce those before."""
        self._announce()
        server = self.site.owners[part]
        if server != self.site.rank:
            at = self._held(server) + self._owned_at(part, server)
            for slot, values in zip(self._slots_of(self.site.rank), self._pushed(part), strict=True):
                self._window.put(values, server, (at + slot * self._starts[server][-1]) * self._itemsize)
            self._put.append(part)
        if part == self.site.messages[-1][0]:
            self._announce()  # nothing needs to follow: a step that is given up is computed again up to here

    def _slots_of(self, worker: int) -> range:
        index = self.site.roles.workers.index(worker)
        return range(self._first[index], self._first[index + 1])

    def _pushed(self, part: Range) -> list[Array]:
        return pushed(self.gradients, self.partials, part)

    def _announce(self) -> None:
        """Complete what was put, and tell the servers."""
        for part in self._put:
            server = self.site.owners[part]
            self._window.flush(server)
            self._notices.append(self.comm.isend(self._byte, server, GRADIENT))
        self._put.clear()

    def collect(self, part: Range) -> None:
        """Sum the gradients of an own range over the slots, and over what the own backward wrote."""
        self._announce()
        own, at = self.gradients.range(part), self._owned_at(part, self.site.rank)
        inputs: list[Array] = []
        for worker in self.site.roles.workers:
            if worker == self.site.rank:
                inputs += self._pushed(part)
            else:
                self.comm.recv(np.zeros(1, np.uint8), worker, GRADIENT)
                inputs += [self._slots[slot][at : at + part.size] for slot in self._slots_of(worker)]
        self._window.sync()
        self.site.total(inputs, own)

    def expect(self) -> None:
        """Nothing has to be made ready."""

    def publish(self, part: Range) -> None:
        """Tell the workers that the new values of an own range are there."""
        self._window.sync()
        others = [worker for worker in self.site.roles.workers if worker != self.site.rank]
        self._notices += [self.comm.isend(self._byte, worker, PARAMETER) for worker in others]

    def pull(self, part: Range) -> None:
        """Begin to get the new values of a range from its server, once it has said that they are there."""
        server = self.site.owners[part]
        if server == self.site.rank:
            return
        self.comm.recv(np.zeros(1, np.uint8), server, PARAMETER)
        at = self._parameters_at(part, server) * self._itemsize
        self._window.get(self.parameters.range(part), server, at)
        self._got.add(server)

    def settle(self) -> None:
        """Complete what was put and got."""
        self._announce()
        for server in sorted(self._got):
            self._window.flush(server)
        self._got.clear()
        for notice in self._notices:
            notice.wait()
        self._notices.clear()

    def close(self) -> None:
        """Free the window: some MPI libraries complain at their end of one that is left."""
        self._window.close()
