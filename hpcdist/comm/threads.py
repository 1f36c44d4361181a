"""N ranks as threads of one process: every algorithm can be tested at any size without mpiexec.

Messages are copied when they are sent. Reductions add in rank order. When one rank raises, the others are released
from whatever they wait for with a CommunicationError.
"""

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np

from hpcdist.arrays.backend import Array
from hpcdist.arrays.ranges import Range
from hpcdist.comm.communicator import Communicator, Message, Request, SharedBlock
from hpcdist.comm.endpoint import Endpoint
from hpcdist.comm.handover import Handover
from hpcdist.comm.mailbox import Group, Letter, Posted
from hpcdist.comm.rounds import Round, combined
from hpcdist.errors import CommunicationError, DeadlineError

DEADLINE_S = 60.0
Result = TypeVar("Result")


class _Done:
    """A request that was complete when it was made: sends copy."""

    def wait(self) -> None:
        return None

    def test(self) -> bool:
        return True


class _Receive:
    def __init__(self, comm: "ThreadCommunicator", message: Array, posted: Posted) -> None:
        self._comm, self._message, self._posted = comm, message, posted

    def wait(self) -> None:
        _deliver(self._comm._arrived(self._posted), self._message)

    def test(self) -> bool:
        if self._posted.letter is None:
            return False
        _deliver(self._posted.letter, self._message)
        return True


class _Probed:
    def __init__(self, letter: Letter, handover: Handover) -> None:
        self._letter, self._handover = letter, handover
        self.source, self.tag, self.nbytes = letter.source, letter.tag, letter.payload.nbytes

    def recv(self, buffer: Array) -> None:
        message, finish = self._handover.incoming(buffer)
        _deliver(self._letter, message)
        if finish is not None:
            finish()


class _Block:
    is_shared = True

    def __init__(self, comm: "ThreadCommunicator", views: list[np.ndarray]) -> None:
        self.views = views
        self._group, self._rank = comm._group, comm.rank

    def progress(self) -> None:
        if self._group.failed:
            raise CommunicationError(f"rank {self._rank}: another rank failed while this one waited in shared memory")

    def check_alive(self, since: float) -> None:
        self.progress()
        if time.monotonic() - since > self._group.deadline_s:
            raise DeadlineError(f"rank {self._rank}: nobody came to shared memory within {self._group.deadline_s} s")

    def close(self) -> None:
        self.views = []


def _deliver(letter: Letter, message: Array) -> None:
    if letter.payload.nbytes != message.nbytes:
        raise CommunicationError(
            f"a message of {letter.payload.nbytes} bytes from rank {letter.source} (tag {letter.tag}) met a buffer "
            f"of {message.nbytes} bytes"
        )
    message.view(np.uint8)[...] = letter.payload


class ThreadCommunicator(Endpoint):
    """A rank that is a thread."""

    def __init__(self, group: Group, name: str, rank: int, declared_node: int | None) -> None:
        super().__init__(name, rank, group.size, Handover(device_pointers=False), declared_node)
        self._group = group
        self._rounds = 0

    def _wait(self, ready: Callable[[], bool], what: str) -> None:
        """Wait under the group's lock, which the caller holds."""
        limit = time.monotonic() + self._group.deadline_s
        while not ready():
            if self._group.failed:
                raise CommunicationError(f"rank {self.rank}: another rank failed while this one waited in {what}")
            if not self._group.changed.wait(max(0.0, limit - time.monotonic())) and time.monotonic() >= limit:
                raise DeadlineError(f"rank {self.rank}: {what} took longer than {self._group.deadline_s} s")

    def _until(self, ready: Callable[[], bool]) -> None:
        with self._group.changed:
            self._wait(ready, "an iallreduce")

    def _post(self, peer: int, tag: int) -> Posted:
        """Begin to receive: take the first letter that fits, or stand in line for it."""
        posted = Posted(peer, tag)
        with self._group.changed:
            inbox = self._group.inbox[self.rank]
            posted.letter = next((letter for letter in inbox if posted.matches(letter)), None)
            if posted.letter is None:
                self._group.posted[self.rank].append(posted)
            else:
                inbox.remove(posted.letter)
        return posted

    def _arrived(self, posted: Posted) -> Letter:
        """Wait for the letter of a receive."""
        with self._group.changed:
            self._wait(lambda: posted.letter is not None, f"a receive from rank {posted.peer} with tag {posted.tag}")
        assert posted.letter is not None
        return posted.letter

    def _send(self, message: Array, peer: int, tag: int) -> None:
        if not 0 <= peer < self.size:
            raise CommunicationError(f"rank {peer} does not exist in {self.name} of {self.size} ranks")
        letter = Letter(self.rank, tag, message.view(np.uint8).copy())
        with self._group.changed:
            line = self._group.posted[peer]
            first = next((posted for posted in line if posted.matches(letter)), None)
            if first is None:
                self._group.inbox[peer].append(letter)
            else:
                line.remove(first)
                first.letter = letter
            self._group.changed.notify_all()

    def _recv(self, message: Array, peer: int, tag: int) -> None:
        _deliver(self._arrived(self._post(peer, tag)), message)

    def _sendrecv(self, send: Array, to: int, receive: Array, source: int, tag: int) -> None:
        self._send(send, to, tag)
        self._recv(receive, source, tag)

    def _isend(self, message: Array, peer: int, tag: int) -> Request:
        self._send(message, peer, tag)
        return _Done()

    def _irecv(self, message: Array, peer: int, tag: int) -> Request:
        return _Receive(self, message, self._post(peer, tag))

    def _probe(self, peer: int, tag: int) -> Message:
        return _Probed(self._arrived(self._post(peer, tag)), self.handover)

    def _poll(self, peer: int, tag: int) -> Message | None:
        wanted = Posted(peer, tag)
        with self._group.changed:
            if self._group.failed:
                raise CommunicationError(f"rank {self.rank}: another rank failed while this one polled")
            inbox = self._group.inbox[self.rank]
            letter = next((letter for letter in inbox if wanted.matches(letter)), None)
            if letter is None:
                return None
            inbox.remove(letter)
        return _Probed(letter, self.handover)

    def _idle(self, since: float) -> None:
        if self._group.failed:
            raise CommunicationError(f"rank {self.rank}: another rank failed while this one waited for a request")
        if time.monotonic() - since > self._group.deadline_s:
            raise DeadlineError(f"rank {self.rank}: no request was complete within {self._group.deadline_s} s")
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

    def _allreduce(self, message: Array, op: str) -> None:
        message[...] = combined(self._everyone(message.copy()), message, op)

    def _iallreduce(self, message: Array, op: str) -> Request:
        with self._group.changed:
            parts = self._group.rounds.setdefault(self._rounds, {})
            parts[self.rank] = message.copy()
            if len(parts) == self.size:
                del self._group.rounds[self._rounds]  # every rank holds it
            self._group.changed.notify_all()
        self._rounds += 1
        return Round(parts, self.size, message, op, self._until)

    def _reduce_scatter(self, message: Array, ranges: Sequence[Range], op: str) -> None:
        own = ranges[self.rank].slice
        message[own] = combined(self._everyone(message.copy()), message, op)[own]

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
                group = Group(len(members), self._group.deadline_s, failed=self._group.failed)
                self._group.children[name] = group
        child = ThreadCommunicator(group, name, members.index(self.rank), self.declared_node)
        child.handover = self.handover
        return child

    def _first_of_node(self) -> int:
        return 0

    def _shared(self, nbytes: int) -> SharedBlock:
        return _Block(self, self._everyone(np.zeros(nbytes, np.uint8)))

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
    group = Group(size, deadline_s)
    results: list[Any] = [None] * size

    def body(rank: int) -> None:
        try:
            node = None if ranks_per_node is None else rank // ranks_per_node
            results[rank] = function(ThreadCommunicator(group, "world", rank, node))
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


def single() -> ThreadCommunicator:
    """Return the communicator of one rank that needs no other thread."""
    return ThreadCommunicator(Group(1, DEADLINE_S), "world", 0, None)
