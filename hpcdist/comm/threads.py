"""N ranks as threads of one process: every algorithm can be tested at any size without mpiexec.

Messages are copied when they are sent. Reductions add in rank order. When one rank raises, the others are released
from whatever they wait for with a CommunicationError.
"""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from hpcdist.arrays.backend import Array
from hpcdist.arrays.ranges import Range
from hpcdist.comm.communicator import ANY, Communicator, Message, Request, SharedBlock
from hpcdist.comm.endpoint import Endpoint
from hpcdist.comm.handover import Handover
from hpcdist.errors import CommunicationError, DeadlineError

DEADLINE_S = 60.0
_UFUNC = {"sum": np.add, "max": np.maximum, "min": np.minimum}
Result = TypeVar("Result")


@dataclass
class _Letter:
    source: int
    tag: int
    payload: np.ndarray


@dataclass
class _Group:
    """What the threads of one communicator share."""

    size: int
    deadline_s: float
    changed: threading.Condition = field(default_factory=threading.Condition)
    failed: list[BaseException] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.inbox: list[list[_Letter]] = [[] for _ in range(self.size)]
        self.slots: list[Any] = [None] * self.size
        self.meeting = threading.Barrier(self.size)
        self.children: dict[str, _Group] = {}

    def abort(self) -> None:
        """Release every thread that waits in this group or below."""
        with self.changed:
            self.changed.notify_all()
            children = list(self.children.values())
        self.meeting.abort()
        for child in children:
            child.abort()


class _Done:
    """A request that was complete when it was made: sends copy."""

    def wait(self) -> None:
        return None

    def test(self) -> bool:
        return True


class _Receive:
    def __init__(self, comm: "ThreadCommunicator", message: Array, peer: int, tag: int) -> None:
        self._comm, self._message, self._peer, self._tag = comm, message, peer, tag

    def wait(self) -> None:
        self._comm._recv(self._message, self._peer, self._tag)

    def test(self) -> bool:
        letter = self._comm._take(self._peer, self._tag, wait=False)
        if letter is not None:
            _deliver(letter, self._message)
        return letter is not None


class _Probed:
    def __init__(self, letter: _Letter) -> None:
        self._letter = letter
        self.source, self.tag, self.nbytes = letter.source, letter.tag, letter.payload.nbytes

    def recv(self, buffer: Array) -> None:
        _deliver(self._letter, buffer)


class _Block:
    def __init__(self, views: list[np.ndarray]) -> None:
        self.views = views

    def close(self) -> None:
        self.views = []


def _deliver(letter: _Letter, message: Array) -> None:
    if letter.payload.nbytes != message.nbytes:
        raise CommunicationError(
            f"a message of {letter.payload.nbytes} bytes from rank {letter.source} (tag {letter.tag}) met a buffer "
            f"of {message.nbytes} bytes"
        )
    message.view(np.uint8)[...] = letter.payload


class ThreadCommunicator(Endpoint):
    """A rank that is a thread."""

    def __init__(self, group: _Group, name: str, rank: int, ranks_per_node: int | None) -> None:
        super().__init__(name, rank, group.size, Handover(device_pointers=False), ranks_per_node)
        self._group = group

    def _wait(self, ready: Callable[[], bool], what: str) -> None:
        """Wait under the group's lock, which the caller holds."""
        limit = time.monotonic() + self._group.deadline_s
        while not ready():
            if self._group.failed:
                raise CommunicationError(f"rank {self.rank}: another rank failed while this one waited in {what}")
            if not self._group.changed.wait(max(0.0, limit - time.monotonic())) and time.monotonic() >= limit:
                raise DeadlineError(f"rank {self.rank}: {what} took longer than {self._group.deadline_s} s")

    def _take(self, peer: int, tag: int, wait: bool = True) -> _Letter | None:
        def find() -> int:
            for index, letter in enumerate(self._group.inbox[self.rank]):
                if peer in (ANY, letter.source) and tag in (ANY, letter.tag):
                    return index
            return -1

        with self._group.changed:
            if wait:
                self._wait(lambda: find() >= 0, f"a receive from rank {peer} with tag {tag}")
            index = find()
            return self._group.inbox[self.rank].pop(index) if index >= 0 else None

    def _send(self, message: Array, peer: int, tag: int) -> None:
        if not 0 <= peer < self.size:
            raise CommunicationError(f"rank {peer} does not exist in {self.name} of {self.size} ranks")
        with self._group.changed:
            self._group.inbox[peer].append(_Letter(self.rank, tag, message.view(np.uint8).copy()))
            self._group.changed.notify_all()

    def _recv(self, message: Array, peer: int, tag: int) -> None:
        letter = self._take(peer, tag)
        assert letter is not None
        _deliver(letter, message)

    def _sendrecv(self, send: Array, to: int, receive: Array, source: int, tag: int) -> None:
        self._send(send, to, tag)
        self._recv(receive, source, tag)

    def _isend(self, message: Array, peer: int, tag: int) -> Request:
        self._send(message, peer, tag)
        return _Done()

    def _irecv(self, message: Array, peer: int, tag: int) -> Request:
        return _Receive(self, message, peer, tag)

    def _probe(self, peer: int, tag: int) -> Message:
        letter = self._take(peer, tag)
        assert letter is not None
        return _Probed(letter)

    def _idle(self) -> None:
        if self._group.failed:
            raise CommunicationError(f"rank {self.rank}: another rank failed while this one waited for a request")
        time.sleep(1e-4)

    def _barrier(self) -> None:
        try:
            self._group.meeting.wait(self._group.deadline_s)
        except threading.BrokenBarrierError:
            if self._group.failed:
                raise CommunicationError(f"rank {self.rank}: another rank failed before a collective") from None
            raise DeadlineError(f"rank {self.rank}: a collective on {self.name} passed its deadline") from None

    def _everyone(self, value: Any) -> list[Any]:
        """Return what each rank brought, in rank order."""
        self._group.slots[self.rank] = value
        self._barrier()
        values = list(self._group.slots)
        self._barrier()
        return values

    def _broadcast(self, message: Array, root: int) -> None:
        data = self._everyone(message.copy() if self.rank == root else None)[root]
        message[...] = data

    def _reduced(self, message: Array, op: str) -> Array:
        parts = self._everyone(message.copy())
        if any(part.shape != message.shape or part.dtype != message.dtype for part in parts):
            raise CommunicationError(f"the ranks brought buffers of {[(p.size, str(p.dtype)) for p in parts]}")
        total: Array = parts[0].copy()
        for part in parts[1:]:
            _UFUNC[op](total, part, out=total)
        return total

    def _allreduce(self, message: Array, op: str) -> None:
        message[...] = self._reduced(message, op)

    def _reduce_scatter(self, message: Array, ranges: Sequence[Range], op: str) -> None:
        own = ranges[self.rank].slice
        message[own] = self._reduced(message, op)[own]

    def _all_gather(self, message: Array, ranges: Sequence[Range]) -> None:
        for part, data in zip(ranges, self._everyone(message[ranges[self.rank].slice].copy()), strict=True):
            message[part.slice] = data

    def _all_to_all(
        self, send: Array, receive: Array, send_ranges: Sequence[Range], receive_ranges: Sequence[Range]
    ) -> None:
        columns = self._everyone([send[part.slice].copy() for part in send_ranges])
        for part, row in zip(receive_ranges, columns, strict=True):
            receive[part.slice] = row[self.rank]

    def _allgather_object(self, value: Any) -> list[Any]:
        return self._everyone(value)

    def _broadcast_object(self, value: Any, root: int) -> Any:
        return self._everyone(value)[root]

    def _split(self, color: int | None, key: int, name: str) -> "ThreadCommunicator | None":
        choices = self._everyone((color, key, self.rank))
        if color is None:
            return None
        members = [rank for other, _, rank in sorted(choices, key=lambda c: (c[1], c[2])) if other == color]
        with self._group.changed:
            group = self._group.children.get(name)
            if group is None:
                group = _Group(len(members), self._group.deadline_s, failed=self._group.failed)
                self._group.children[name] = group
        return ThreadCommunicator(group, name, members.index(self.rank), None)

    def _first_of_node(self) -> int:
        return 0

    def _shared(self, nbytes: int) -> SharedBlock:
        return _Block(self._everyone(np.zeros(nbytes, np.uint8)))

    def supports(self, feature: str) -> bool:
        """Threads have no special feature but that of being threads."""
        return feature == "thread_multiple"

    def free(self) -> None:
        """Nothing to give back: the group ends with its last rank."""
        return


def run_threads(
    size: int,
    function: Callable[[Communicator], Result],
    ranks_per_node: int | None = None,
    deadline_s: float = DEADLINE_S,
) -> list[Result]:
    """Call ``function(comm)`` on ``size`` threads and return their results in rank order.

    The first exception is raised here; the ranks it left waiting are released. ``ranks_per_node`` declares nodes.
    """
    group = _Group(size, deadline_s)
    results: list[Any] = [None] * size

    def body(rank: int) -> None:
        try:
            results[rank] = function(ThreadCommunicator(group, "world", rank, ranks_per_node))
        except BaseException as error:  # noqa: BLE001 (raised again by the caller's thread)
            with group.changed:
                group.failed.append(error)
            group.abort()

    threads = [threading.Thread(target=body, args=(rank,), name=f"rank {rank}") for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if group.failed:
        raise group.failed[0]
    return results


def single(ranks_per_node: int | None = None) -> ThreadCommunicator:
    """Return the communicator of one rank that needs no other thread."""
    return ThreadCommunicator(_Group(1, DEADLINE_S), "world", 0, ranks_per_node)
