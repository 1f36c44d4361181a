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
from hpcdist.strategies.parameter_server.transport import GRADIENT, PARAMETER, ServerTopology, Transport, pushed


class RmaTransport(Transport):
    """Transport by one-sided communication. Construction is collective over the world.

    Raises ConfigurationError on a GPU and MissingCapabilityError, on all ranks, where MPI has no working RMA.
    """

    def __init__(self, topology: ServerTopology) -> None:
        context = topology.context
        if context.on != "cpu":
            raise ConfigurationError(
                f"parameter_server.transport = 'rma' with run.device = {context.on!r}: windows are in the memory of "
                "the host only; set parameter_server.transport = 'messages'"
            )
        self.topology, self.comm = topology, topology.comm
        self._itemsize = context.dtype.itemsize
        self._parts = {server: topology.parts(server) for server in topology.roles.servers}
        self._starts = {
            server: list(accumulate((part.size for part in parts), initial=0)) for server, parts in self._parts.items()
        }
        stored = None if topology.works else self._parts[topology.rank]
        # The window of a server: its parameters (``held`` elements; all of the model where it works too, since it
        # computes with them), then the slots one behind the other, each of the ``owned`` elements that it serves.
        held = self._held(topology.rank) if topology.serves else 0
        owned = self._starts[topology.rank][-1] if topology.serves else 0
        # The first slot of each worker and, at the end, the number of all slots.
        self._first = list(accumulate(map(topology.brings, topology.roles.workers), initial=0))
        self._window = self.comm.window((held + self._first[-1] * owned) * self._itemsize)
        memory = self._window.memory.view(context.dtype)
        if topology.serves:
            self.parameters = context.store(
                "parameters", stored, lambda size, dtype: context.counted(memory[:size], "parameters")
            )
        else:
            self.parameters = context.store("parameters", stored)
        self.gradients = context.store("gradients", stored)
        self.partials = topology.partials(self.gradients)
        self._inbox = context.counted(memory[held:], "communication")
        self._slots = [self._inbox[slot * owned : (slot + 1) * owned] for slot in range(self._first[-1])]
        self._put: list[Range] = []  # not flushed yet
        self._got: set[int] = set()  # servers with which a get is under way
        self._notices: list[Request] = []
        self._byte = np.zeros(1, np.uint8)

    def _held(self, server: int) -> int:
        """Return the number of parameters in the window of a server."""
        return self.topology.context.layout.size if server in self.topology.roles.workers else self._starts[server][-1]

    def _owned_at(self, part: Range, server: int) -> int:
        """Return the offset of ``part`` among the elements that ``server`` owns."""
        for start, owned in zip(self._starts[server], self._parts[server], strict=False):
            if owned.start <= part.start and part.stop <= owned.stop:
                return start + part.start - owned.start
        raise AssertionError(f"{part} is none of rank {server}")

    def _parameters_at(self, part: Range, server: int) -> int:
        return part.start if server in self.topology.roles.workers else self._owned_at(part, server)

    def push(self, part: Range) -> None:
        """Begin to put the gradients of a range into the slot at its server; announce the puts before."""
        self._announce()
        server = self.topology.owners[part]
        if server != self.topology.rank:
            # In elements from the start of the server's window; slots are as long as what that server owns.
            at = self._held(server) + self._owned_at(part, server)
            for slot, values in zip(
                self._slots_of(self.topology.rank), pushed(self.gradients, self.partials, part), strict=True
            ):
                self._window.put(values, server, (at + slot * self._starts[server][-1]) * self._itemsize)
            self._put.append(part)
        if part == self.topology.messages[-1][0]:
            self._announce()  # nothing needs to follow: a step that is given up is computed again up to here

    def _slots_of(self, worker: int) -> range:
        index = self.topology.roles.workers.index(worker)
        return range(self._first[index], self._first[index + 1])

    def _announce(self) -> None:
        """Flush the puts, and tell the servers."""
        for part in self._put:
            server = self.topology.owners[part]
            # Messages and puts are not ordered: the byte may leave only when the put is complete at the server.
            self._window.flush(server)
            self._notices.append(self.comm.isend(self._byte, server, GRADIENT))
        self._put.clear()

    def collect(self, part: Range) -> None:
        """Sum the gradients of an own range over the slots, and over those of the own backward."""
        self._announce()
        own, at = self.gradients.range(part), self._owned_at(part, self.topology.rank)
        inputs: list[Array] = []
        for worker in self.topology.roles.workers:
            if worker == self.topology.rank:
                inputs += pushed(self.gradients, self.partials, part)
            else:
                self.comm.recv(np.zeros(1, np.uint8), worker, GRADIENT)
                inputs += [self._slots[slot][at : at + part.size] for slot in self._slots_of(worker)]
        self._window.sync()  # memory barrier: loads below see what others have put
        self.topology.total(inputs, own)

    def publish(self, part: Range) -> None:
        """Tell the workers that the new values of an own range are in the window."""
        self._window.sync()  # memory barrier: gets of others see what was stored here
        others = [worker for worker in self.topology.roles.workers if worker != self.topology.rank]
        self._notices += [self.comm.isend(self._byte, worker, PARAMETER) for worker in others]

    def pull(self, part: Range) -> None:
        """Begin to get the new values of a range from its server, once it has announced them."""
        server = self.topology.owners[part]
        if server == self.topology.rank:
            return
        self.comm.recv(np.zeros(1, np.uint8), server, PARAMETER)
        at = self._parameters_at(part, server) * self._itemsize
        self._window.get(self.parameters.range(part), server, at)
        self._got.add(server)

    def settle(self) -> None:
        """Complete the puts and gets."""
        self._announce()
        for server in sorted(self._got):
            self._window.flush(server)
        self._got.clear()
        for notice in self._notices:
            notice.wait()
        self._notices.clear()

    def close(self) -> None:
        """Free the window: some MPI libraries complain in their finalisation of one that is left."""
        self._window.close()
