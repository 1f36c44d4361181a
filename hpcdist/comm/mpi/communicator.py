"""MPI communicator: the bare transport of `endpoint.Endpoint` over mpi4py.

mpi4py is imported by `comm.start`, never at import of this module. Buffers have passed the hand-over: they are 1-D,
contiguous, of a dtype that MPI knows, and ready to be read or written.
"""

import time
from collections.abc import Mapping, Sequence
from typing import Any, Self

import numpy as np

from hpcdist.arrays.backend import Array
from hpcdist.arrays.ranges import Range
from hpcdist.comm import window
from hpcdist.comm.communicator import ANY, Message, Request, SharedBlock
from hpcdist.comm.endpoint import Endpoint
from hpcdist.comm.handover import Handover
from hpcdist.comm.mpi import shared_memory, ulfm
from hpcdist.errors import CommunicationError


class _MpiRequest:
    def __init__(self, request: Any) -> None:
        self._request = request

    def wait(self) -> None:
        self._request.Wait()

    def test(self) -> bool:
        return bool(self._request.Test())


class _MpiMessage:
    """A matched probe (MPI_Mprobe): after a plain probe another thread could receive the message first."""

    def __init__(self, message: Any, status: Any, mpi: Any, handover: Handover) -> None:
        self._message, self._mpi, self._handover = message, mpi, handover
        self.source, self.tag, self.nbytes = status.Get_source(), status.Get_tag(), status.Get_count(mpi.BYTE)

    def recv(self, buffer: Array) -> None:
        if buffer.nbytes != self.nbytes:
            raise CommunicationError(
                f"a message of {self.nbytes} bytes from rank {self.source} (tag {self.tag}) met a buffer of "
                f"{buffer.nbytes} bytes"
            )
        target, finish = self._handover.incoming(buffer)
        self._message.Recv(target)
        if finish is not None:
            finish()


class MpiCommunicator(Endpoint):
    """Communicator over an MPI communicator that nothing else uses."""

    def __init__(self, mpi: Any, comm: Any, name: str, handover: Handover, declared_node: int | None = None) -> None:
        super().__init__(name, comm.Get_rank(), comm.Get_size(), handover, declared_node)
        self._mpi, self._comm = mpi, comm
        self._ops = {"sum": mpi.SUM, "max": mpi.MAX, "min": mpi.MIN}

    def _send(self, message: Array, peer: int, tag: int) -> None:
        self._comm.Send(message, peer, tag)

    def _recv(self, message: Array, peer: int, tag: int) -> None:
        status = self._mpi.Status()
        self._comm.Recv(message, peer, tag, status)
        self._check_received(message, status)

    def _sendrecv(self, send: Array, to: int, receive: Array, source: int, tag: int) -> None:
        status = self._mpi.Status()
        self._comm.Sendrecv(send, to, tag, receive, source, tag, status)
        self._check_received(receive, status)

    def _check_received(self, message: Array, status: Any) -> None:
        # MPI raises for a longer message only (ERR_TRUNCATE); a shorter one would leave old data at the end.
        received = status.Get_count(self._mpi.BYTE)
        if received != message.nbytes:
            raise CommunicationError(
                f"{self.name} rank {self.rank}: a message of {received} bytes from rank {status.Get_source()} "
                f"(tag {status.Get_tag()}) met a buffer of {message.nbytes} bytes"
            )

    def _isend(self, message: Array, peer: int, tag: int) -> Request:
        return _MpiRequest(self._comm.Isend(message, peer, tag))

    def _irecv(self, message: Array, peer: int, tag: int) -> Request:
        return _MpiRequest(self._comm.Irecv(message, peer, tag))

    def _probe(self, peer: int, tag: int) -> Message:
        status = self._mpi.Status()
        message = self._comm.Mprobe(
            self._mpi.ANY_SOURCE if peer == ANY else peer, self._mpi.ANY_TAG if tag == ANY else tag, status
        )
        return _MpiMessage(message, status, self._mpi, self.handover)

    def _poll(self, peer: int, tag: int) -> Message | None:
        status = self._mpi.Status()
        message = self._comm.Improbe(
            self._mpi.ANY_SOURCE if peer == ANY else peer, self._mpi.ANY_TAG if tag == ANY else tag, status
        )
        return None if message is None else _MpiMessage(message, status, self._mpi, self.handover)

    def _idle(self, since: float) -> None:
        time.sleep(0)  # yield to another rank on this core; MPI has progressed inside of Test

    def _barrier(self) -> None:
        self._comm.Barrier()

    def _broadcast(self, message: Array, root: int) -> None:
        self._comm.Bcast(message, root)

    def _allreduce(self, message: Array, op: str) -> None:
        self._comm.Allreduce(self._mpi.IN_PLACE, message, self._ops[op])

    def _iallreduce(self, message: Array, op: str) -> Request:
        return _MpiRequest(self._comm.Iallreduce(self._mpi.IN_PLACE, message, self._ops[op]))

    def _reduce_scatter(self, message: Array, ranges: Sequence[Range], op: str) -> None:
        own, counts = message[ranges[self.rank].slice], [part.size for part in ranges]
        # In place, MPI leaves the result at the start of the buffer, whatever the rank. That overwrites nothing of use:
        # only the own range is defined afterwards.
        if isinstance(own, np.ndarray):
            self._comm.Reduce_scatter(self._mpi.IN_PLACE, message, counts, self._ops[op])
            own[...] = message[: own.size]  # numpy copies overlapping memory correctly
        else:
            result = own.copy()
            self._comm.Reduce_scatter(message, result, counts, self._ops[op])
            own[...] = result

    def _all_gather(self, message: Array, ranges: Sequence[Range]) -> None:
        counts, starts = [part.size for part in ranges], [part.start for part in ranges]
        self._comm.Allgatherv(self._mpi.IN_PLACE, [message, counts, starts, self._typecode(message)])
        ulfm.check_completed(self._mpi, self._comm)  # with ULFM: Allgatherv may hide a rank failure

    def _all_to_all(
        self, send: Array, receive: Array, send_ranges: Sequence[Range], receive_ranges: Sequence[Range]
    ) -> None:
        kind = self._typecode(send)
        self._comm.Alltoallv(
            [send, [part.size for part in send_ranges], [part.start for part in send_ranges], kind],
            [receive, [part.size for part in receive_ranges], [part.start for part in receive_ranges], kind],
        )

    def _typecode(self, message: Array) -> Any:
        return self._mpi.Datatype.fromcode(message.dtype.char)

    def _allgather_object(self, value: Any) -> list[Any]:
        return ulfm.allgather_objects(self._mpi, self._comm, value)

    def _broadcast_object(self, value: Any, root: int) -> Any:
        return self._comm.bcast(value, root)

    def _split(self, color: int | None, key: int, name: str) -> "MpiCommunicator | None":
        child = self._comm.Split(self._mpi.UNDEFINED if color is None else color, key)
        return None if color is None else self._made(child, name)

    def _made(self, comm: Any, name: str) -> Self:
        """Return the communicator over ``comm``, which was made from the one of this."""
        comm.Set_name(name[:60])  # of MPI; errors and records have the whole name
        return type(self)(self._mpi, comm, name, self.handover, self.declared_node)

    def subgroup(self, ranks: Sequence[int], tag: int, label: str = "group") -> "MpiCommunicator":
        """Return the communicator of ``ranks`` of this one, in their order. Collective over those ranks alone.

        Groups that are made at the same time, by several threads, need different ``tag``s.
        """
        child: MpiCommunicator = self._recorded("create_group", self._create_group, ranks, tag, f"{self.name}/{label}")
        self._adopt(self._passed_on(child))
        return child

    def _create_group(self, ranks: Sequence[int], tag: int, name: str) -> "MpiCommunicator":
        everybody = self._comm.Get_group()
        group = everybody.Incl(ranks)
        child = self._comm.Create_group(group, tag)
        group.Free()
        everybody.Free()
        return self._made(child, name)

    def _first_of_node(self) -> int:
        node = self._comm.Split_type(self._mpi.COMM_TYPE_SHARED, self.rank)
        first = int(node.allreduce(self.rank, self._mpi.MIN))  # a name for the node that all of its ranks know
        node.Free()
        return first

    def _shared(self, nbytes: int) -> SharedBlock:
        return shared_memory.allocate(self._mpi, self._comm, nbytes)

    def _window(self, nbytes: int) -> window.Window:
        return window.allocate(self._mpi, self._comm, nbytes)

    def supports(self, feature: str) -> bool:
        """Whether the MPI library, as it was initialised, has ``feature`` (local)."""
        if feature == "thread_multiple":
            return bool(self._mpi.Query_thread() == self._mpi.THREAD_MULTIPLE)
        if feature == "device_pointers":
            return self.handover.device_pointers
        return feature == "ulfm" and ulfm.is_enabled(self._mpi)

    def _revoke(self) -> None:
        if self._comm:  # false after it was freed
            self._comm.Revoke()

    def failed(self) -> tuple[int, ...]:
        """Return the ranks known to have failed, ascending (local)."""
        return ulfm.failed(self._mpi, self._comm) if self.supports("ulfm") else ()

    def _agree(self, flag: bool) -> bool:
        return ulfm.agree(self._mpi, self._comm, flag)

    def _shrink(self, name: str) -> Self:
        return self._made(ulfm.shrink(self._mpi, self._comm), name)

    def _grow(self, count: int, arguments: Sequence[str], environment: Mapping[str, str], name: str) -> Self:
        return self._made(ulfm.grow(self._mpi, self._comm, count, arguments, environment), name)

    def _abandon(self) -> None:
        self._nodes = None
        self._comm.Free()

    def free(self) -> None:
        """Free the MPI communicator, and those made by `nodes`. Collective."""
        if self._nodes is not None:
            for part in (self._nodes.intra, self._nodes.peers, self._nodes.leaders):
                if part is not None:
                    part.free()
            self._nodes = None
        self._comm.Free()
