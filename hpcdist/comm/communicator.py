"""Communicator: a group of ranks with its own message context, and the operations of every transport.

Buffers are 1-D, C-contiguous numpy or cupy arrays. A call is collective over the communicator (every rank must make it,
in the same order) unless its docstring says "Local" or names another rank. Subclasses add a transport, in methods with
a leading underscore: `mpi.communicator.MpiCommunicator`, and `threads.communicator` for ranks that are threads and for
a single rank. The transport only gets buffers that it can read or write directly.
"""

import time
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from hpcdist.arrays.backend import Array
from hpcdist.arrays.dtypes import name_of
from hpcdist.arrays.ranges import Range
from hpcdist.comm import checks
from hpcdist.comm.checks import REDUCTIONS, check_reduction, check_tiling, is_plain
from hpcdist.comm.failure.family import CommunicatorFamily
from hpcdist.comm.handover import Handover
from hpcdist.comm.transport import UNKNOWN_BYTES, Message, PendingRequest, Request, SharedBlock
from hpcdist.comm.window import DeferredWindow, ObservedWindow, Window
from hpcdist.errors import UsageError

ANY: Final = -1  # any source or any tag, in `probe` and `poll`


@dataclass(frozen=True)
class Nodes:
    """Split of a communicator by node: communicators within and between nodes, and the ranks of each node."""

    intra: "Communicator"  # ranks of this node
    peers: "Communicator"  # ranks with this rank's position on each node
    leaders: "Communicator | None"  # first rank of each node; None on other ranks
    uniform: bool  # all nodes have equally many ranks
    index: int  # number of this rank's node
    count: int  # number of nodes
    members: tuple[tuple[int, ...], ...]  # ranks of each node


class Communicator(CommunicatorFamily):
    """A group of ranks with its own message context: its messages never match messages of another communicator."""

    def __init__(self, name: str, rank: int, size: int, handover: Handover, declared_node: int | None) -> None:
        super().__init__()
        self.name, self.rank, self.size = name, rank, size
        self.handover = handover
        self.declared_node = declared_node  # this rank's node number; None: the transport detects the nodes
        self._children = 0
        self._nodes: Nodes | None = None

    def _begin(self, op: str, buffer: Array, sent_bytes: int, peer: int = -1, tag: int = 0) -> int:
        return self.events.begin(self.name, op, name_of(buffer.dtype), buffer.size, sent_bytes, peer, tag)

    def _in_place(
        self, op: str, buffer: Array, transport: Callable[..., None], *arguments: Any, peer: int = -1
    ) -> None:
        # The operators of extremes that propagate NaN run on the host, and get no address of a GPU.
        needs_host = buffer.dtype.kind == "f" and arguments[-1:] in (("max",), ("min",))
        message, finish = self.handover.both(buffer, "" if needs_host else op)
        token = self._begin(op, buffer, UNKNOWN_BYTES, peer)
        transport(message, *arguments)
        if finish is not None:
            finish()
        self.events.end(token)

    def send(self, buffer: Array, peer: int, tag: int = 0) -> None:
        """Send ``buffer`` to rank ``peer``. After the return, the caller may change ``buffer``."""
        message = self.handover.outgoing(buffer)
        token = self._begin("send", buffer, buffer.nbytes, peer, tag)
        self._send(message, peer, tag)
        self.events.end(token)

    def recv(self, buffer: Array, peer: int, tag: int = 0) -> None:
        """Receive a message from rank ``peer`` into ``buffer``. The message must have the size of ``buffer``."""
        message, finish = self.handover.incoming(buffer)
        token = self._begin("recv", buffer, 0, peer, tag)
        self._recv(message, peer, tag)
        if finish is not None:
            finish()
        self.events.end(token)

    def sendrecv(self, send: Array, to: int, receive: Array, source: int, tag: int = 0) -> None:
        """Send the array ``send`` to rank ``to``, and receive from rank ``source`` into ``receive``."""
        outgoing = self.handover.outgoing(send)
        incoming, finish = self.handover.incoming(receive)
        token = self._begin("sendrecv", send, send.nbytes, to, tag)
        self._sendrecv(outgoing, to, incoming, source, tag)
        if finish is not None:
            finish()
        self.events.end(token)

    def isend(self, buffer: Array, peer: int, tag: int = 0) -> Request:
        """Start to send ``buffer`` to rank ``peer``. Do not change ``buffer`` before the request is complete."""
        message = self.handover.outgoing(buffer)
        token = self._begin("isend", buffer, buffer.nbytes, peer, tag)
        return PendingRequest(self.events, token, self._isend(message, peer, tag), None)

    def irecv(self, buffer: Array, peer: int, tag: int = 0) -> Request:
        """Start to receive from rank ``peer`` into ``buffer``. Use ``buffer`` only after the request is complete."""
        message, finish = self.handover.incoming(buffer)
        token = self._begin("irecv", buffer, 0, peer, tag)
        return PendingRequest(self.events, token, self._irecv(message, peer, tag), finish)

    def wait_any(self, requests: Sequence[Request]) -> int:
        """Wait until one of ``requests`` is complete, and return its index. Local."""
        if not requests:
            raise UsageError("wait_any got no requests; pass at least one request")
        since = time.monotonic()
        while True:
            for index, request in enumerate(requests):
                if request.test():
                    return index
            self._idle(since)

    def probe(self, peer: int = ANY, tag: int = ANY) -> Message:
        """Wait for a message from rank ``peer``. Return a `Message`: only its `recv` can receive the data. Local."""
        token = self.events.begin(self.name, "probe", "uint8", 0, 0, peer, tag)
        message = self._probe(peer, tag)
        self.events.end(token)
        return message

    def poll(self, peer: int = ANY, tag: int = ANY) -> Message | None:
        """Return a `Message`, like `probe`, or None if no message from rank ``peer`` has arrived. Never waits."""
        message = self._poll(peer, tag)
        if message is not None:
            self.events.end(self.events.begin(self.name, "probe", "uint8", 0, 0, message.source, message.tag))
        return message

    def barrier(self) -> None:
        """Wait until every rank has called this method."""
        if self._checked:
            checks.compare_native(self, "barrier", checks.NO_BUFFER)
        token = self.events.begin(self.name, "barrier", "uint8", 0, 0, -1, 0)
        self._barrier()
        self.events.end(token)

    def broadcast(self, buffer: Array, root: int = 0) -> None:
        """Overwrite ``buffer`` with the buffer of rank ``root``."""
        if self._checked:
            checks.compare_native(self, "broadcast", buffer, extra=f"from rank {root}")
        self._in_place("broadcast", buffer, self._broadcast, root, peer=root)

    def allreduce(self, buffer: Array, op: str = "sum", *, record: bool = True) -> None:
        """Reduce ``buffer`` in place with the algorithm of the transport (such as MPI). Not for 16-bit floats.

        ``record``: False if the caller records the operation; plain arrays are then not recorded here.
        """
        if self._checked:
            checks.compare_native(self, "allreduce", buffer, op)
        if op not in REDUCTIONS or not is_plain(buffer):  # for a few bytes the hand-over costs as much as the reduction
            check_reduction(buffer, op)
            self._in_place("allreduce", buffer, self._allreduce, op)
            return
        if not record:
            self._allreduce(buffer, op)
            return
        events = self._sink_cell[0]  # not through `_begin`: for 8 bytes each extra call is measurable
        token = events.begin(self.name, "allreduce", name_of(buffer.dtype), buffer.size, UNKNOWN_BYTES, -1, 0)
        self._allreduce(buffer, op)
        events.end(token)

    def iallreduce(self, buffer: Array, op: str = "sum") -> Request:
        """Start `allreduce`. Do not use ``buffer`` before the request is complete. Not for 16-bit floats."""
        check_reduction(buffer, op)
        message, finish = self.handover.both(buffer)
        token = self._begin("iallreduce", buffer, UNKNOWN_BYTES)
        return PendingRequest(self.events, token, self._iallreduce(message, op), finish)

    def reduce_scatter(self, buffer: Array, ranges: Sequence[Range], op: str = "sum") -> None:
        """Reduce ``buffer`` in place. Rank r gets only ``ranges[r]``. ``ranges`` cover ``buffer`` in rank order."""
        if self._checked:
            checks.compare_native(self, "reduce_scatter", buffer, op, checks.ranges_fingerprint(ranges))
        check_reduction(buffer, op)
        check_tiling(buffer, ranges, self.size)
        self._in_place("reduce_scatter", buffer, self._reduce_scatter, ranges, op)

    def all_gather(self, buffer: Array, ranges: Sequence[Range]) -> None:
        """Fill ``buffer`` on all ranks: rank r sends its ``buffer[ranges[r]]`` to every other rank."""
        if self._checked:
            checks.compare_native(self, "all_gather", buffer, extra=checks.ranges_fingerprint(ranges))
        check_tiling(buffer, ranges, self.size)
        self._in_place("all_gather", buffer, self._all_gather, ranges)

    def all_to_all(
        self, send: Array, receive: Array, send_ranges: Sequence[Range], receive_ranges: Sequence[Range]
    ) -> None:
        """Send ``send[send_ranges[q]]`` to each rank q, and receive from q into ``receive[receive_ranges[q]]``."""
        if self._checked:
            checks.compare_native(self, "all_to_all", send[:0])  # parts differ from rank to rank
        outgoing = self.handover.outgoing(send, "all_to_all")
        incoming, finish = self.handover.incoming(receive, "all_to_all")
        sent = sum(part.size for peer, part in enumerate(send_ranges) if peer != self.rank) * send.itemsize
        token = self._begin("all_to_all", send, sent)
        self._all_to_all(outgoing, incoming, send_ranges, receive_ranges)
        if finish is not None:
            finish()
        self.events.end(token)

    def allgather_object(self, value: Any) -> list[Any]:
        """Return a list of all ranks' ``value`` (small, picklable) in rank order. For set-up, not training steps."""
        return self._recorded("allgather_object", self._allgather_object, value)

    def broadcast_object(self, value: Any, root: int = 0) -> Any:
        """Return the ``value`` (small, picklable) of rank ``root``. For set-up, not for training steps."""
        return self._recorded("broadcast_object", self._broadcast_object, value, root, peer=root)

    def split(self, color: int | None, key: int = 0, label: str = "split") -> "Communicator | None":
        """Return a communicator of all ranks with this rank's ``color``, or None if ``color`` is None.

        Its ranks are sorted by (``key``, rank). ``label``: text for the name of the new communicator.
        """
        self._children += 1
        suffix = "" if color is None else f"/{label}{self._children}.{color}"
        child = self._recorded("split", self._split, color, key, self.name + suffix)
        if child is not None:
            self._adopt(self._passed_on(child))
        return child

    def dup(self, label: str = "dup") -> "Communicator":
        """Return a communicator of the same ranks with a separate message context. ``label``: text for its name."""
        child = self.split(0, self.rank, label)
        assert child is not None
        return child

    def nodes(self) -> Nodes:
        """Return this communicator split by node. The first call is collective; later calls return the same object."""
        if self._nodes is None:
            node, count, locals_ = self._place()
            mine = locals_[node]
            local = mine.index(self.rank)
            intra = self.split(node, self.rank, "node")
            peers = self.split(local, self.rank, "peers")
            leaders = self.split(0 if local == 0 else None, self.rank, "leaders")
            assert intra is not None and peers is not None
            uniform = all(len(ranks) == len(mine) for ranks in locals_)
            self._nodes = Nodes(intra, peers, leaders, uniform, node, count, tuple(map(tuple, locals_)))
        return self._nodes

    def _place(self) -> tuple[int, int, list[list[int]]]:
        # (this rank's node number, number of nodes, ranks of each node); nodes are ordered by their first rank
        if self.declared_node is not None:
            declared = self.allgather_object(self.declared_node)
            first_of = [declared.index(node) for node in declared]
        else:
            first_of = self.allgather_object(self._first_of_node())
        firsts = sorted(set(first_of))
        ranks = [[rank for rank in range(self.size) if first_of[rank] == first] for first in firsts]
        return firsts.index(first_of[self.rank]), len(firsts), ranks

    def shared(self, nbytes: int) -> SharedBlock:
        """Allocate ``nbytes`` zeroed bytes per rank, shared by the ranks of one node, or private if sharing fails."""
        return self._recorded("shared", self._shared, nbytes, count=nbytes)

    def window(self, nbytes: int) -> Window:
        """Return a one-sided `Window` with ``nbytes`` zeroed bytes on this rank. Raises MissingCapabilityError."""
        sizes = self.allgather_object(nbytes)
        transfers = self._recorded("window", self._window, nbytes, count=nbytes)
        return ObservedWindow(transfers, self.name, sizes, lambda: self.events)

    def _window(self, nbytes: int) -> Window:
        return DeferredWindow(self._shared(nbytes).views, self.rank)

    @abstractmethod
    def _send(self, message: Array, peer: int, tag: int) -> None: ...
    @abstractmethod
    def _recv(self, message: Array, peer: int, tag: int) -> None: ...
    @abstractmethod
    def _sendrecv(self, send: Array, to: int, receive: Array, source: int, tag: int) -> None: ...
    @abstractmethod
    def _isend(self, message: Array, peer: int, tag: int) -> Request: ...
    @abstractmethod
    def _irecv(self, message: Array, peer: int, tag: int) -> Request: ...
    @abstractmethod
    def _probe(self, peer: int, tag: int) -> Message: ...
    @abstractmethod
    def _poll(self, peer: int, tag: int) -> Message | None: ...
    @abstractmethod
    def _idle(self, since: float) -> None: ...
    @abstractmethod
    def _barrier(self) -> None: ...
    @abstractmethod
    def _broadcast(self, message: Array, root: int) -> None: ...
    @abstractmethod
    def _allreduce(self, message: Array, op: str) -> None: ...
    @abstractmethod
    def _iallreduce(self, message: Array, op: str) -> Request: ...
    @abstractmethod
    def _reduce_scatter(self, message: Array, ranges: Sequence[Range], op: str) -> None: ...
    @abstractmethod
    def _all_gather(self, message: Array, ranges: Sequence[Range]) -> None: ...
    @abstractmethod
    def _all_to_all(
        self, send: Array, receive: Array, send_ranges: Sequence[Range], receive_ranges: Sequence[Range]
    ) -> None: ...
    @abstractmethod
    def _allgather_object(self, value: Any) -> list[Any]: ...
    @abstractmethod
    def _broadcast_object(self, value: Any, root: int) -> Any: ...
    @abstractmethod
    def _split(self, color: int | None, key: int, name: str) -> "Communicator | None": ...
    @abstractmethod
    def _first_of_node(self) -> int: ...  # lowest rank on this rank's node
    @abstractmethod
    def _shared(self, nbytes: int) -> SharedBlock: ...
    @abstractmethod
    def free(self) -> None:
        """Free the communicator. No operation may be in flight."""
