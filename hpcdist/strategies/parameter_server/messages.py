"""Transports of parameter servers over MPI, on any number of nodes: messages, or one-sided communication (RMA).

`MessageTransport`: with Psi bytes of parameters on p ranks that all work and serve, a rank sends 2 Psi (p-1)/p per
step, and buffers `AHEAD` of the largest messages. With ``communication.algorithm = "hierarchical"`` the workers of a
node sum their gradients, and one of them (the speaker) exchanges one message per node with each server. A server sums
16-bit floats in float32, and rounds once.

`RmaTransport` puts gradients into, and gets parameters from, the servers' MPI windows. A window holds the server's
parameters and, for each worker, a slot for the gradients of its ranges. With Psi bytes of parameters on s servers and w
workers, a server holds w Psi/s of slots. A slot is written again, and parameters change, only after all ranks have
agreed on a step.
"""

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Final

import numpy as np

from hpcdist.arrays import backend
from hpcdist.arrays.backend import Array
from hpcdist.arrays.dtypes import accumulation_dtype, is_16bit_float
from hpcdist.arrays.ranges import Range
from hpcdist.collectives import segments
from hpcdist.collectives.algorithms.ring import LEADER, broadcast_from_leader, reduce_to_leader
from hpcdist.collectives.reduction import round_into, ufunc, widen
from hpcdist.collectives.segments import scratch, wait_all
from hpcdist.comm.communicator import Communicator
from hpcdist.comm.transport import Request
from hpcdist.errors import ConfigurationError
from hpcdist.strategies.parameter_server.transport import GRADIENT, PARAMETER, ServerTopology, Transport, pushed

AHEAD: Final = 4  # receive buffers of a server: two are added while two are in flight


class ReceiveQueue:
    """Queue of the gradient messages that a server receives in a fixed order. Local."""

    # An array from `take` stays valid during the next call of `take`; the call after the next may overwrite it.

    def __init__(self, comm: Communicator, order: Sequence[tuple[int, int]], dtype: "np.dtype[np.generic]", on: str):
        self._comm, self._order = comm, order
        longest = max((size for size, _ in order), default=0)
        self._buffers: list[Array] = [
            segments.count_in_ledger(backend.empty(longest, np.dtype(dtype), on)) for _ in range(min(AHEAD, len(order)))
        ]
        self._requests: list[Request] = []
        self._taken = 0
        self.begun = False

    def begin(self) -> None:
        """Post one nonblocking receive per receive buffer. Do nothing if these receives are already posted."""
        if not self.begun:
            self.begun, self._taken = True, 0
            self._requests = [self._post(index) for index in range(len(self._buffers))]

    def take(self) -> Array:
        """Wait for the next message, and return its content as a view of a receive buffer."""
        index = self._taken
        due = index - 2 + len(self._buffers)  # receive into the buffer of the message before the last
        if index >= 2 and due < len(self._order):
            self._requests.append(self._post(due))
        self._requests[index].wait()
        self._taken += 1
        self.begun = self._taken < len(self._order)
        return self._view(index)

    def _view(self, index: int) -> Array:
        return self._buffers[index % len(self._buffers)][: self._order[index][0]]

    def _post(self, index: int) -> Request:
        return self._comm.irecv(self._view(index), self._order[index][1], GRADIENT)


class MessageTransport(Transport):
    """Parameter-server transport that uses point-to-point messages. Construction is collective over the world."""

    def __init__(self, topology: ServerTopology) -> None:
        context = topology.context
        self.topology, self.comm = topology, topology.comm
        parts = None if topology.works else topology.parts(topology.rank)
        self.parameters, self.gradients = context.store("parameters", parts), context.store("gradients", parts)
        self.partials = topology.partials(self.gradients)
        self._node = context.data.nodes().intra if topology.works and context.algorithm == "hierarchical" else None
        self.speakers, self.speaks = self._speakers()
        self._arrivals = self._receiver()
        self._expected: dict[Range, Request] = {}
        self._sent: list[Request] = []

    def _speakers(self) -> tuple[list[int], bool]:
        speaks_here = self.topology.works and (self._node is None or self._node.rank == LEADER)
        speaking = self.comm.allgather_object(speaks_here)
        return [rank for rank, speaks in enumerate(speaking) if speaks], speaks_here

    def _heard(self) -> list[int]:
        return [worker for worker in self.speakers if worker != self.topology.rank]

    def _receiver(self) -> ReceiveQueue:
        topology = self.topology
        order = [
            (part.size, worker)
            for part in topology.own
            for worker in self._heard()
            for _ in range(topology.brings(worker))
        ]
        return ReceiveQueue(self.comm, order, topology.context.dtype, topology.context.on)

    def push(self, part: Range) -> None:
        self._arrivals.begin()  # the receives of a server that also works are in flight while it computes
        server = self.topology.owners[part]
        for values in pushed(self.gradients, self.partials, part):
            if self._node is not None:
                reduce_to_leader(self._node, values)
            if self.speaks and server != self.topology.rank:
                self._sent.append(self.comm.isend(values, server, GRADIENT))

    def collect(self, part: Range) -> None:
        self._arrivals.begin()
        gradients = self.gradients.range(part)
        if self.topology.tree is not None:
            self.topology.tree.total(self._pushed(part), gradients, lasting=False)
            return
        if is_16bit_float(gradients.dtype):
            self._sum_wide(gradients)
            return
        add = ufunc(gradients, "sum")
        # The local gradient is added in rank order, so sums before it need a buffer.
        late = self.speaks and len(self.speakers) > 1 and self.speakers[0] != self.topology.rank
        total = None
        for worker in self.speakers:
            value = gradients if worker == self.topology.rank else self._arrivals.take()
            if worker == self.topology.rank:
                late = False
            if total is None:
                total = value
                continue
            target = scratch("parameter_server.sum", gradients.size, gradients.dtype, gradients) if late else gradients
            add(total, value, target)
            total = target
        if total is not gradients:
            gradients[...] = total

    def _sum_wide(self, target: Array) -> None:
        dtype = accumulation_dtype(target.dtype)
        total, addend = (scratch(f"parameter_server.{name}", target.size, dtype, target) for name in ("wide", "addend"))
        for number, worker in enumerate(self.speakers):
            value = target if worker == self.topology.rank else self._arrivals.take()
            widen(value, addend if number else total)
            if number:
                ufunc(total, "sum")(total, addend, total)
        round_into(target, total)

    def _pushed(self, part: Range) -> Iterator[Array]:
        for worker in self.topology.roles.workers:
            if worker == self.topology.rank:
                yield from pushed(self.gradients, self.partials, part)
            else:
                yield from (self._arrivals.take() for _ in range(self.topology.brings(worker)))

    def expect(self) -> None:
        staged = self.topology.context.on == "gpu" and not self.comm.supports("device_pointers")
        if self.speaks and not staged:  # each staged receive holds pinned memory until its message arrives
            for part, server in self.topology.messages:
                if server != self.topology.rank:
                    self._expect(part, server)

    def _expect(self, part: Range, server: int) -> None:
        self._expected[part] = self.comm.irecv(self.parameters.range(part), server, PARAMETER)

    def publish(self, part: Range) -> None:
        values = self.parameters.range(part)
        self._sent += [self.comm.isend(values, worker, PARAMETER) for worker in self._heard()]

    def pull(self, part: Range) -> None:
        server = self.topology.owners[part]
        if self.speaks and server != self.topology.rank:
            if part not in self._expected:
                self._expect(part, server)
            self._expected.pop(part).wait()
        if self._node is not None:
            broadcast_from_leader(self._node, self.parameters.range(part))

    def settle(self) -> None:
        wait_all(self._sent)
        self._sent.clear()


class RmaTransport(Transport):
    """Parameter-server transport that uses MPI one-sided communication. Construction is collective over the world."""

    def __init__(self, topology: ServerTopology) -> None:
        context = topology.context
        if context.on != "cpu":
            raise ConfigurationError(
                f"parameter_server.transport = 'rma' is not supported with run.device = {context.on!r}, because RMA "
                "windows must be in host memory; set parameter_server.transport = 'messages'"
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
        wait_all(self._notices)
        self._notices.clear()

    def close(self) -> None:
        """Free the RMA window. Some MPI libraries report an error if a window is still open in MPI_Finalize."""
        self._window.close()
