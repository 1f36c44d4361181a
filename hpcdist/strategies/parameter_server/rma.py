"""RMA transport of parameter servers: put gradients into, and get parameters from, the servers' MPI windows.

A server's window holds its parameters and, for each worker, a slot for the gradients of its ranges. With Psi bytes of
parameters on s servers and w workers, a server holds w Psi/s of slots. A slot is written again, and parameters change,
only after all ranks have agreed on a step.
"""

from itertools import accumulate

import numpy as np

from hpcdist.arrays.backend import Array
from hpcdist.arrays.ranges import Range
from hpcdist.comm.transport import Request
from hpcdist.errors import ConfigurationError
from hpcdist.strategies.parameter_server.transport import GRADIENT, PARAMETER, ServerTopology, Transport, pushed


class RmaTransport(Transport):
    """Parameter-server transport by MPI one-sided communication. Construction is collective over the world.

    Raises ConfigurationError on a GPU, and MissingCapabilityError on all ranks if MPI has no working RMA.
    """

    def __init__(self, topology: ServerTopology) -> None:
        context = topology.context
        if context.on != "cpu":
            raise ConfigurationError(
                f"parameter_server.transport = 'rma' with run.device = {context.on!r}: RMA windows must be in host "
                "memory; set parameter_server.transport = 'messages'"
            )
        self.topology, self.comm = topology, topology.comm
        self._itemsize = context.dtype.itemsize
        self._parts = {server: topology.parts(server) for server in topology.roles.servers}
        self._starts = {
            server: list(accumulate((part.size for part in parts), initial=0)) for server, parts in self._parts.items()
        }
        stored = None if topology.works else self._parts[topology.rank]
        # The window of a server: its parameters (``held`` elements; the whole model if it also works), then the slots,
        # each with the ``owned`` elements that it serves.
        held = self._held(topology.rank) if topology.serves else 0
        owned = self._starts[topology.rank][-1] if topology.serves else 0
        # The first slot of each worker, and the number of all slots.
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
        self._got: set[int] = set()  # servers with a get in flight
        self._notices: list[Request] = []
        self._byte = np.zeros(1, np.uint8)

    def _held(self, server: int) -> int:
        return self.topology.context.layout.size if server in self.topology.roles.workers else self._starts[server][-1]

    def _owned_at(self, part: Range, server: int) -> int:
        for start, owned in zip(self._starts[server], self._parts[server], strict=False):
            if owned.start <= part.start and part.stop <= owned.stop:
                return start + part.start - owned.start
        raise AssertionError(f"parameter range {part} must lie within one range that server rank {server} owns")

    def push(self, part: Range) -> None:
        """Start to put the gradients of range ``part`` into its server's RMA window; first complete earlier puts."""
        self._announce()
        server = self.topology.owners[part]
        if server != self.topology.rank:
            # In elements from the start of the server's window; a slot has the elements that the server owns.
            at = self._held(server) + self._owned_at(part, server)
            for slot, values in zip(
                self._slots_of(self.topology.rank), pushed(self.gradients, self.partials, part), strict=True
            ):
                self._window.put(values, server, (at + slot * self._starts[server][-1]) * self._itemsize)
            self._put.append(part)
        if part == self.topology.messages[-1][0]:
            self._announce()  # the last push of the step

    def _slots_of(self, worker: int) -> range:
        index = self.topology.roles.workers.index(worker)
        return range(self._first[index], self._first[index + 1])

    def _announce(self) -> None:
        for part in self._put:
            server = self.topology.owners[part]
            # Messages and puts are not ordered: the put must be complete before the byte is sent.
            self._window.flush(server)
            self._notices.append(self.comm.isend(self._byte, server, GRADIENT))
        self._put.clear()

    def collect(self, part: Range) -> None:
        self._announce()
        gradients, at = self.gradients.range(part), self._owned_at(part, self.topology.rank)
        inputs: list[Array] = []
        for worker in self.topology.roles.workers:
            if worker == self.topology.rank:
                inputs += pushed(self.gradients, self.partials, part)
            else:
                self.comm.recv(np.zeros(1, np.uint8), worker, GRADIENT)
                inputs += [self._slots[slot][at : at + part.size] for slot in self._slots_of(worker)]
        self._window.sync()  # memory barrier: loads below see the puts
        self.topology.total(inputs, gradients)

    def publish(self, part: Range) -> None:
        self._window.sync()  # memory barrier: gets see these values
        others = [worker for worker in self.topology.roles.workers if worker != self.topology.rank]
        self._notices += [self.comm.isend(self._byte, worker, PARAMETER) for worker in others]

    def pull(self, part: Range) -> None:
        server = self.topology.owners[part]
        if server == self.topology.rank:
            return
        self.comm.recv(np.zeros(1, np.uint8), server, PARAMETER)
        at = part.start if server in self.topology.roles.workers else self._owned_at(part, server)
        self._window.get(self.parameters.range(part), server, at * self._itemsize)
        self._got.add(server)

    def settle(self) -> None:
        self._announce()
        for server in sorted(self._got):
            self._window.flush(server)
        self._got.clear()
        for notice in self._notices:
            notice.wait()
        self._notices.clear()

    def close(self) -> None:
        """Free the RMA window now: some MPI libraries report windows that are still open when MPI finalizes."""
        self._window.close()
