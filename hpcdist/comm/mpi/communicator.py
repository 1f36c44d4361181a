"""MPI communicator: the bare transport of `communicator.Communicator` over mpi4py, which `comm.start` imports.

Buffers have passed the hand-over: they are 1-D, contiguous, of a dtype that MPI supports, and ready for use.
"""

import functools
import pickle
import time
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any, Final, Self

import numpy as np

from hpcdist.arrays.backend import Array
from hpcdist.arrays.ranges import Range
from hpcdist.comm import transport, window
from hpcdist.comm.communicator import ANY, Communicator
from hpcdist.comm.handover import Handover
from hpcdist.comm.mpi import shared_memory, ulfm
from hpcdist.comm.transport import Message, Request, SharedBlock

_EXTREMES: Final = {"max": np.maximum, "min": np.minimum}
_EXTREME_PIECE: Final = 2**20  # bytes of one call: MPICH uses a slow algorithm above if the operator is user-defined


@functools.cache  # MPI has few slots for user-defined operators; these live as long as MPI
def _extreme(mpi: Any, op: str, code: str) -> Any:
    # MPI.MAX and MPI.MIN need not propagate NaN. `code` is a NumPy type code.
    ufunc, dtype = _EXTREMES[op], np.dtype(code)

    def reduce(left: Any, right: Any, datatype: Any) -> None:
        out = np.frombuffer(right, dtype)
        with np.errstate(all="ignore"):
            ufunc(np.frombuffer(left, dtype), out, out=out)

    return mpi.Op.Create(reduce, commute=True)


def job_ranks(mpi: Any, comm: Any, ranks: Sequence[int] | None = None) -> str:
    """Translate ``ranks`` of ``comm`` (None: all) to ranks of the job. Return them as text of `rank_runs`. Local.

    ``mpi``, ``comm``: module and communicator of mpi4py. The text is "" if a rank is not in MPI_COMM_WORLD.
    """
    local, job = comm.Get_group(), mpi.COMM_WORLD.Get_group()
    translated = local.Translate_ranks(list(range(local.size) if ranks is None else ranks), job)
    local.Free()
    job.Free()
    # Processes that were spawned later have another MPI_COMM_WORLD.
    return "" if mpi.UNDEFINED in translated else transport.rank_runs(translated)


class _MpiRequest:
    def __init__(self, request: Any) -> None:
        self._request = request

    def wait(self) -> None:
        self._request.Wait()

    def test(self) -> bool:
        return bool(self._request.Test())


class _MpiRequests:
    def __init__(self, mpi: Any, requests: list[Any]) -> None:
        self._mpi, self._requests = mpi, requests

    def wait(self) -> None:
        self._mpi.Request.Waitall(self._requests)

    def test(self) -> bool:
        return bool(self._mpi.Request.Testall(self._requests))


class _MpiMessage:
    def __init__(self, message: Any, status: Any, mpi: Any, handover: Handover) -> None:
        # reserved by MPI_Mprobe
        self._message, self._mpi, self._handover = message, mpi, handover
        self.source, self.tag, self.nbytes = status.Get_source(), status.Get_tag(), status.Get_elements(mpi.BYTE)

    def recv(self, buffer: Array) -> None:
        transport.check_size(self.nbytes, self.source, self.tag, buffer)
        target, finish = self._handover.incoming(buffer)
        is_large = target.size > transport.LARGEST_COUNT
        self._message.Recv(transport.as_one_element(self._mpi, target) if is_large else target)
        if finish is not None:
            finish()


class MpiCommunicator(Communicator):
    """Communicator that wraps an MPI communicator, which no other code may use."""

    def __init__(self, mpi: Any, comm: Any, name: str, handover: Handover, declared_node: int | None = None) -> None:
        super().__init__(name, comm.Get_rank(), comm.Get_size(), handover, declared_node)
        self._mpi, self._comm = mpi, comm
        self._ops = {"sum": mpi.SUM, "max": mpi.MAX, "min": mpi.MIN}
        transport.note_members(name, job_ranks(mpi, comm))

    def _send(self, message: Array, peer: int, tag: int) -> None:
        self._comm.Send(self._spec(message), peer, tag)

    def _recv(self, message: Array, peer: int, tag: int) -> None:
        status = self._mpi.Status()
        self._comm.Recv(self._spec(message), peer, tag, status)
        self._check_received(message, status)

    def _sendrecv(self, send: Array, to: int, receive: Array, source: int, tag: int) -> None:
        status = self._mpi.Status()
        self._comm.Sendrecv(self._spec(send), to, tag, self._spec(receive), source, tag, status)
        self._check_received(receive, status)

    def _spec(self, message: Array) -> Any:
        return message if message.size <= transport.LARGEST_COUNT else transport.as_one_element(self._mpi, message)

    def _check_received(self, message: Array, status: Any) -> None:
        # MPI raises only for a longer message (ERR_TRUNCATE); a shorter one would leave old data at the end.
        received = status.Get_elements(self._mpi.BYTE)  # Get_count is wrong from 2^31 bytes on
        receiver = f"{self.name} rank {self.rank}: "
        transport.check_size(received, status.Get_source(), status.Get_tag(), message, receiver)

    def _isend(self, message: Array, peer: int, tag: int) -> Request:
        return _MpiRequest(self._comm.Isend(self._spec(message), peer, tag))

    def _irecv(self, message: Array, peer: int, tag: int) -> Request:
        return _MpiRequest(self._comm.Irecv(self._spec(message), peer, tag))

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
        if message.size > transport.LARGEST_COUNT:
            for piece in transport.pieces(message.size):
                self._comm.Bcast(message[piece.slice], root)
        else:
            self._comm.Bcast(message, root)

    def _allreduce(self, message: Array, op: str) -> None:
        largest = transport.LARGEST_COUNT
        if op != "sum":
            largest = min(largest, _EXTREME_PIECE // message.itemsize)
        if message.size > largest:
            for piece in transport.pieces(message.size, largest):
                self._allreduce(message[piece.slice], op)
        else:
            self._comm.Allreduce(self._mpi.IN_PLACE, message, self._mpi.SUM if op == "sum" else self._op(message, op))

    def _op(self, message: Array, op: str) -> Any:
        if op != "sum" and message.dtype.kind == "f":
            return _extreme(self._mpi, op, message.dtype.char)
        return self._ops[op]

    def _iallreduce(self, message: Array, op: str) -> Request:
        if message.size <= transport.LARGEST_COUNT:
            return _MpiRequest(self._comm.Iallreduce(self._mpi.IN_PLACE, message, self._op(message, op)))
        parts = [message[piece.slice] for piece in transport.pieces(message.size)]
        return _MpiRequests(
            self._mpi, [self._comm.Iallreduce(self._mpi.IN_PLACE, part, self._op(message, op)) for part in parts]
        )

    def _reduce_scatter(self, message: Array, ranges: Sequence[Range], op: str) -> None:
        if message.size > transport.LARGEST_COUNT:
            for piece in transport.pieces(message.size):
                self._reduce_scatter(message[piece.slice], transport.within(piece, ranges), op)
            return
        local, counts = message[ranges[self.rank].slice], [part.size for part in ranges]
        # In place, MPI leaves the result at the start of the buffer on every rank. That overwrites nothing of use,
        # because only the local range is defined afterwards.
        if isinstance(local, np.ndarray):
            self._comm.Reduce_scatter(self._mpi.IN_PLACE, message, counts, self._op(message, op))
            local[...] = message[: local.size]  # numpy copies overlapping memory correctly
        else:
            result = local.copy()
            self._comm.Reduce_scatter(message, result, counts, self._op(message, op))
            local[...] = result

    def _all_gather(self, message: Array, ranges: Sequence[Range]) -> None:
        if message.size > transport.LARGEST_COUNT:
            for piece in transport.pieces(message.size):
                self._all_gather(message[piece.slice], transport.within(piece, ranges))
            return
        counts, starts = [part.size for part in ranges], [part.start for part in ranges]
        self._comm.Allgatherv(self._mpi.IN_PLACE, [message, counts, starts, self._typecode(message)])
        ulfm.check_completed(self._mpi, self._comm)  # with ULFM: Allgatherv may hide a rank failure

    def _all_to_all(
        self, send: Array, receive: Array, send_ranges: Sequence[Range], receive_ranges: Sequence[Range]
    ) -> None:
        largest = transport.LARGEST_COUNT // self.size  # per part: MPI_Alltoallv then moves at most LARGEST_COUNT
        if any(part.size > largest or part.stop > transport.LARGEST_COUNT for part in (*send_ranges, *receive_ranges)):
            self._large_all_to_all(send, receive, send_ranges, receive_ranges, largest)
            return
        kind = self._typecode(send)
        self._comm.Alltoallv(
            [send, [part.size for part in send_ranges], [part.start for part in send_ranges], kind],
            [receive, [part.size for part in receive_ranges], [part.start for part in receive_ranges], kind],
        )

    def _large_all_to_all(
        self, send: Array, receive: Array, send_ranges: Sequence[Range], receive_ranges: Sequence[Range], largest: int
    ) -> None:
        # Ranges of more than `largest` elements are separate messages. MPI_Alltoallv exchanges the others.
        tag = transport.PAIR_TAG
        requests = [
            self._irecv(receive[part.slice], peer, tag)
            for peer, part in enumerate(receive_ranges)
            if part.size > largest
        ]
        requests += [
            self._isend(send[part.slice], peer, tag) for peer, part in enumerate(send_ranges) if part.size > largest
        ]
        outgoing, sent = transport.scratch_for(send, send_ranges, largest)
        incoming, received = transport.scratch_for(receive, receive_ranges, largest)
        for part, copy in zip(send_ranges, sent, strict=True):
            if copy:
                outgoing[copy.slice] = send[part.slice]
        self._all_to_all(outgoing, incoming, sent, received)
        for part, copy in zip(receive_ranges, received, strict=True):
            if copy:
                receive[part.slice] = incoming[copy.slice]
        for request in requests:
            request.wait()

    def _typecode(self, message: Array) -> Any:
        return self._mpi.Datatype.fromcode(message.dtype.char)

    def _allgather_object(self, value: Any) -> list[Any]:
        pickled = np.frombuffer(pickle.dumps(value, pickle.HIGHEST_PROTOCOL), np.uint8)
        sizes = np.empty(self.size, np.int64)
        self._comm.Allgather(np.array([pickled.size]), sizes)
        ranges = [Range(start, stop) for start, stop in pairwise(accumulate(sizes.tolist(), initial=0))]
        gathered = np.empty(ranges[-1].stop, np.uint8)
        gathered[ranges[self.rank].slice] = pickled
        del pickled  # before the objects are created
        self._all_gather(gathered, ranges)
        return [pickle.loads(gathered[part.slice].data) for part in ranges]

    def _broadcast_object(self, value: Any, root: int) -> Any:
        pickled = np.empty(0, np.uint8)
        if self.rank == root:
            pickled = np.frombuffer(pickle.dumps(value, pickle.HIGHEST_PROTOCOL), np.uint8)
        size = np.array([pickled.size])
        self._comm.Bcast(size, root)
        if self.rank != root:
            pickled = np.empty(size[0], np.uint8)
        self._broadcast(pickled, root)
        return pickle.loads(pickled.data)

    def _split(self, color: int | None, key: int, name: str) -> "MpiCommunicator | None":
        child = self._comm.Split(self._mpi.UNDEFINED if color is None else color, key)
        return None if color is None else self._made(child, name)

    def _made(self, comm: Any, name: str) -> Self:
        comm.Set_name(name[:60])  # shortened for MPI only; errors and records have the whole name
        return type(self)(self._mpi, comm, name, self.handover, self.declared_node)

    def subgroup(self, ranks: Sequence[int], tag: int, label: str = "group") -> "MpiCommunicator":
        """Return a communicator of ``ranks`` in this order. Threads must use different ``tag`` values. Collective."""
        name = f"{self.name}/{label}"
        # Before the call, in which ranks may wait.
        transport.note_members(name, job_ranks(self._mpi, self._comm, ranks))
        # Under the new name, because the other ranks of this communicator do not call this.
        token = self.events.begin(name, "create_group", "uint8", 0, transport.UNKNOWN_BYTES, -1, 0)
        child = self._create_group(ranks, tag, name)
        self.events.end(token)
        self._adopt(self._passed_on(child))
        return child

    @property
    def mpi4py(self) -> Any:
        """The communicator of mpi4py that this object wraps. Local."""
        return self._comm

    def _create_group(self, ranks: Sequence[int], tag: int, name: str) -> "MpiCommunicator":
        everybody = self._comm.Get_group()
        group = everybody.Incl(ranks)
        child = self._comm.Create_group(group, tag)
        group.Free()
        everybody.Free()
        return self._made(child, name)

    def _first_of_node(self) -> int:
        node = self._comm.Split_type(self._mpi.COMM_TYPE_SHARED, self.rank)
        first = int(node.allreduce(self.rank, self._mpi.MIN))  # identifies the node on all its ranks
        node.Free()
        return first

    def _shared(self, nbytes: int) -> SharedBlock:
        return shared_memory.allocate(self._mpi, self._comm, nbytes)

    def _window(self, nbytes: int) -> window.Window:
        return window.allocate(self._mpi, self._comm, nbytes)

    def supports(self, feature: str) -> bool:
        if feature == "thread_multiple":
            return bool(self._mpi.Query_thread() == self._mpi.THREAD_MULTIPLE)
        if feature == "device_pointers":
            return self.handover.device_pointers
        return feature == "ulfm" and ulfm.is_enabled(self._mpi)

    def _revoke(self) -> None:
        if self._comm:  # false after it was freed
            self._comm.Revoke()

    def failed(self) -> tuple[int, ...]:
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
        """Free the MPI communicator, and the communicators created by `nodes`. Collective."""
        if self._nodes is not None:
            for part in (self._nodes.intra, self._nodes.peers, self._nodes.leaders):
                if part is not None:
                    part.free()
            self._nodes = None
        transport.members.pop(self.name, None)
        self._comm.Free()
