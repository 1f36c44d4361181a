"""A parameter server in lock-step ("bsp"): all workers take every step together, as one process would.

    worker   FORWARD BACKWARD PUSH ...           AGREE                               PULL ...
    server                        COLLECT ...    AGREE  DIRECTION (NORMS) APPLY  PUBLISH ...

A gradient is pushed as soon as backward has completed it. A server adds what the workers push in the order of their
ranks, whatever the order of arrival, so a step has the same bits in every repetition, for any number of servers and
both placements (but for the norm by which gradients are clipped, whose partial sums follow the cut).

The numbers that all ranks agree on travel by the MPI library where ``communication.algorithm`` is native, else by
counted messages; gradients and parameters go from rank to rank in either case.

With Psi bytes of parameters and p ranks, a dedicated worker pushes Psi and pulls Psi a step: it sends Psi, and its
servers send Psi to it. A colocated rank keeps what it owns: where all p ranks serve, each sends 2 Psi (p-1)/p.

With ``communication.algorithm = "hierarchical"`` the workers of a node sum their gradients first, and one of them
speaks for the node: servers get one push a node, and answer it once.
"""

from typing import Final

import numpy as np

from hpcdist.arrays.ranges import Range
from hpcdist.collectives.leader import LEADER, reduce_to_leader, spread_from_leader
from hpcdist.collectives.reduction import ufunc
from hpcdist.collectives.workspace import scratch
from hpcdist.comm.communicator import Communicator, Request
from hpcdist.strategies.exchange import Handlers
from hpcdist.strategies.owner import Owner, OwnerExchange
from hpcdist.strategies.parameter_server.keys import partition
from hpcdist.strategies.parameter_server.roles import Roles
from hpcdist.strategies.schedule.operations import Kind, Operation
from hpcdist.strategies.seat import Seat

GRADIENT: Final = 0  # tags; messages of one tag stay in the order of the plan, which all ranks share
PARAMETER: Final = 1


class LockStepExchange(OwnerExchange):
    """Workers push, servers sum in rank order and update, workers pull. Collective over the world.

    ``servers`` joins the ranks that serve; None on the others.
    """

    def __init__(self, seat: Seat, roles: Roles, servers: Communicator | None) -> None:
        super().__init__(seat)
        self.roles = roles
        self.comm = seat.world.dup("parameters")
        self.rank = self.comm.rank
        self.works, self.serves = self.rank in roles.workers, self.rank in roles.servers
        self.replicas_identical = self.works
        self._node = seat.data.nodes().intra if self.works and seat.algorithm == "hierarchical" else None
        self.speakers, self.speaks = self._speakers(seat)
        found = partition(seat.layout, len(roles.servers))
        # (range, rank of the server that owns it), in the order in which backward completes them
        self._messages = [(part, roles.servers[index]) for part, index in found.messages(seat.layout.units)]
        self._owner_of = dict(self._messages)
        parts = found.parts(roles.servers.index(self.rank)) if self.serves else []
        kept = None if self.works else parts
        stores = seat.store("parameters", kept), seat.store("gradients", kept)
        self.owner = Owner(*stores, seat.build_optimizer(parts), parts, servers, seat.agree_algorithm)
        self._sent: list[Request] = []
        self._last = self.plan()[-1]
        self.carries_out: Handlers = {
            Kind.PUSH: self.push,
            Kind.COLLECT: self.collect,
            Kind.PUBLISH: self.publish,
            Kind.PULL: self.pull,
            **self.owner.carries_out,
        }

    def _speakers(self, seat: Seat) -> tuple[list[int], bool]:
        """Return the workers that exchange messages with servers, and whether this rank is one. Collective."""
        own = self.works and (self._node is None or self._node.rank == LEADER)
        found = seat.world.allgather_object(own)
        return [rank for rank, speaks in enumerate(found) if speaks], own

    def plan(self) -> list[Operation]:
        """Return what this rank does as a worker, as a server, or as both."""
        ranges = [part for part, _ in self._messages] if self.works else []
        own = [part for part, server in self._messages if server == self.rank]
        return [
            *(Operation(Kind.PUSH, range=part) for part in ranges),
            *(Operation(Kind.COLLECT, range=part) for part in own),
            Operation(Kind.AGREE),
            *(self.owner.plan() if self.serves else []),
            *(Operation(Kind.PUBLISH, range=part) for part in own),
            *(Operation(Kind.PULL, range=part) for part in ranges),
        ]

    def push(self, op: Operation) -> None:
        """Begin to send the gradients of a range to its server; they must stay until `agree`."""
        part, server = self._place(op)
        values = self.gradients.range(part)
        if self._node is not None:
            reduce_to_leader(self._node, values)
        if self.speaks and server != self.rank:
            self._sent.append(self.comm.isend(values, server, GRADIENT))

    def collect(self, op: Operation) -> None:
        """Sum the gradients of an own range over the workers that speak, the first one's first."""
        part, _ = self._place(op)
        own = self.gradients.range(part)
        add = ufunc(own, "sum")
        arrived = scratch("parameter_server.arrived", own.size, own.dtype, own)
        # What a worker's own backward wrote has its turn among the others: sums before it need memory of their own.
        late = self.speaks and self.rank != self.speakers[0]
        total = scratch("parameter_server.sum", own.size, own.dtype, own) if late else own
        for worker in self.speakers:
            if worker == self.rank:
                if late:
                    add(total, own, own)
                total = own
            elif worker == self.speakers[0]:
                self.comm.recv(total, worker, GRADIENT)
            else:
                self.comm.recv(arrived, worker, GRADIENT)
                add(total, arrived, total)

    def publish(self, op: Operation) -> None:
        """Begin to send the new values of an own range to the workers."""
        part, _ = self._place(op)
        values = self.parameters.range(part)
        others = [worker for worker in self.speakers if worker != self.rank]
        self._sent += [self.comm.isend(values, worker, PARAMETER) for worker in others]
        self._settle(op)

    def pull(self, op: Operation) -> None:
        """Take the new values of a range from its server."""
        part, server = self._place(op)
        values = self.parameters.range(part)
        if self.speaks and server != self.rank:
            self.comm.recv(values, server, PARAMETER)
        if self._node is not None:
            spread_from_leader(self._node, values)
        self._settle(op)

    def _place(self, op: Operation) -> tuple[Range, int]:
        assert op.range is not None
        return op.range, self._owner_of[op.range]

    def _settle(self, op: Operation) -> None:
        """With the last operation of a step nothing is under way any more."""
        if op == self._last:
            self._wait()

    def _wait(self) -> None:
        for request in self._sent:
            request.wait()
        self._sent.clear()

    def agree(self, values: np.ndarray) -> np.ndarray:
        """Sum ``values`` over the world, in place; what this rank pushed has then arrived. Collective."""
        self._wait()
        return super().agree(values)
