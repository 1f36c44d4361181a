"""Communicator of ranks that are threads of one process, and of a single rank (`solo`).

Messages are copied when they are sent. If a rank raises, waiting ranks get a CommunicationError.
"""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self, TypeVar

import numpy as np

from hpcdist.arrays.backend import Array
from hpcdist.arrays.ranges import Range
from hpcdist.comm.communicator import Communicator
from hpcdist.comm.handover import Handover
from hpcdist.comm.threads.group import (
    CompletedRequest,
    FailureDetector,
    PostedReceive,
    ProbedMessage,
    RankDeath,
    ReceiveRequest,
    ReductionRequest,
    ThreadBlock,
    ThreadGroup,
    ThreadMessage,
    deliver,
    reduce_in_order,
    register_rank,
)
from hpcdist.comm.transport import Message, Request, SharedBlock
from hpcdist.errors import CommunicationError, DeadlineError, MissingCapabilityError

__all__ = ["DEADLINE_S", "RankDeath", "ThreadCommunicator", "run_threads", "solo"]

DEADLINE_S = 60.0
Result = TypeVar("Result")


class ThreadCommunicator(Communicator):
    """Communicator whose ranks are threads of this process. Each rank has a separate object."""

    def __init__(self, group: ThreadGroup, name: str, rank: int, declared_node: int | None) -> None:
        super().__init__(name, rank, group.size, Handover(device_pointers=False), declared_node)
        self._group, self._detector = group, FailureDetector(group, rank, name)
        self._meetings = self._rounds = 0

    def _wait(self, condition: threading.Condition, ready: Callable[[], bool], peer: int | None, what: str) -> None:
        limit = time.monotonic() + self._group.deadline_s
        while not ready():
            self._detector.check(peer, what)
            if not condition.wait(max(0.0, limit - time.monotonic())) and time.monotonic() >= limit:
                raise DeadlineError(
                    f"rank {self.rank}: {what} did not finish within {self._group.deadline_s} s; check that the other "
                    "ranks make the matching calls"
                )

    def _until(self, ready: Callable[[], bool]) -> None:
        with self._group.changed:
            self._wait(self._group.changed, ready, None, "an iallreduce")

    def _post(self, peer: int, tag: int) -> PostedReceive:
        posted = PostedReceive(peer, tag)
        with self._group.changed:
            unexpected = self._group.unexpected[self.rank]
            posted.envelope = next((envelope for envelope in unexpected if posted.matches(envelope)), None)
            if posted.envelope is None:
                self._group.posted[self.rank].append(posted)
            else:
                unexpected.remove(posted.envelope)
        return posted

    def _arrived(self, posted: PostedReceive) -> ThreadMessage:
        what = f"a receive from rank {posted.peer} with tag {posted.tag}"
        with self._group.changed:
            self._wait(self._group.changed, lambda: posted.envelope is not None, posted.peer, what)
        assert posted.envelope is not None
        return posted.envelope

    def _send(self, message: Array, peer: int, tag: int) -> None:
        if not 0 <= peer < self.size:
            raise CommunicationError(f"rank {peer} does not exist: communicator {self.name!r} has {self.size} ranks")
        self._detector.check_deaths(peer, "a send")
        envelope = ThreadMessage(self.rank, tag, message.view(np.uint8).copy())
        with self._group.changed:
            line = self._group.posted[peer]
            first = next((posted for posted in line if posted.matches(envelope)), None)
            if first is None:
                self._group.unexpected[peer].append(envelope)
            else:
                line.remove(first)
                first.envelope = envelope
            self._group.changed.notify_all()

    def _recv(self, message: Array, peer: int, tag: int) -> None:
        deliver(self._arrived(self._post(peer, tag)), message)

    def _sendrecv(self, send: Array, to: int, receive: Array, source: int, tag: int) -> None:
        self._send(send, to, tag)
        self._recv(receive, source, tag)

    def _isend(self, message: Array, peer: int, tag: int) -> Request:
        self._send(message, peer, tag)
        return CompletedRequest()

    def _irecv(self, message: Array, peer: int, tag: int) -> Request:
        return ReceiveRequest(self._post(peer, tag), message, self._arrived, self._detector)

    def _probe(self, peer: int, tag: int) -> Message:
        return ProbedMessage(self._arrived(self._post(peer, tag)), self.handover)

    def _poll(self, peer: int, tag: int) -> Message | None:
        receive = PostedReceive(peer, tag)
        with self._group.changed:
            unexpected = self._group.unexpected[self.rank]
            envelope = next((envelope for envelope in unexpected if receive.matches(envelope)), None)
            if envelope is None or self._group.failed or self._group.revoked:
                self._detector.check(peer, "a poll")
                return None
            unexpected.remove(envelope)
        return ProbedMessage(envelope, self.handover)

    def _idle(self, since: float) -> None:
        if self._group.failed:
            raise CommunicationError(f"rank {self.rank}: another rank failed; see the error of the failed rank")
        if time.monotonic() - since > self._group.deadline_s:
            raise DeadlineError(
                f"rank {self.rank}: no outstanding request completed within {self._group.deadline_s} s; check that the "
                "other ranks make the matching calls"
            )
        time.sleep(1e-4)

    def _barrier(self) -> None:
        self._everyone(None)

    def _everyone(self, value: Any) -> list[Any]:
        group, number = self._group, self._meetings
        self._meetings += 1  # the n-th calls of all ranks belong together
        with group.met:
            self._detector.check(None, "a collective")
            brought = group.meetings.setdefault(number, {})
            brought[self.rank] = value
            if len(brought) == self.size:
                del group.meetings[number]  # every rank has its own reference to `brought`
                group.met.notify_all()
            else:
                self._wait(group.met, lambda: len(brought) == self.size, None, f"a collective on {self.name}")
        return [brought[rank] for rank in range(self.size)]

    def _broadcast(self, message: Array, root: int) -> None:
        data = self._everyone(message.copy() if self.rank == root else None)[root]
        message[...] = data

    def _allreduce(self, message: Array, op: str) -> None:
        message[...] = reduce_in_order(self._everyone(message.copy()), message, op)

    def _iallreduce(self, message: Array, op: str) -> Request:
        with self._group.changed:
            parts = self._group.rounds.setdefault(self._rounds, {})
            parts[self.rank] = message.copy()
            if len(parts) == self.size:
                del self._group.rounds[self._rounds]  # every rank has its own reference to `parts`
            self._group.changed.notify_all()
        self._rounds += 1
        return ReductionRequest(parts, self.size, message, op, self._until, self._detector)

    def _reduce_scatter(self, message: Array, ranges: Sequence[Range], op: str) -> None:
        local_range = ranges[self.rank].slice
        message[local_range] = reduce_in_order(self._everyone(message.copy()), message, op)[local_range]

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
        group = self._group.child(name, members)
        child = ThreadCommunicator(group, name, members.index(self.rank), self.declared_node)
        child.handover = self.handover
        return child

    def _first_of_node(self) -> int:
        return 0

    def _shared(self, nbytes: int) -> SharedBlock:
        return ThreadBlock(self._everyone(np.zeros(nbytes, np.uint8)), self._detector, self._group.deadline_s)

    def supports(self, feature: str) -> bool:
        return feature == "thread_multiple" or (feature == "ulfm" and self._group.fault_tolerant)

    def _revoke(self) -> None:
        self._group.revoked = True
        self._group.stop()

    def failed(self) -> tuple[int, ...]:
        return tuple(self._group.dead_ranks())

    def _agree(self, flag: bool) -> bool:
        agreement = self._detector.agree(flag)
        return all(agreement.brought[rank] for rank in agreement.living or ())

    def _shrink(self, name: str) -> Self:
        agreement = self._detector.agree(True)
        assert agreement.living is not None
        group = self._group.child(f"{name} of the living {agreement.number}", agreement.living)
        child = type(self)(group, name, agreement.living.index(self.rank), self.declared_node)
        child.handover = self.handover
        return child

    def _grow(self, count: int, arguments: Sequence[str], environment: Mapping[str, str], name: str) -> Self:
        raise MissingCapabilityError("ranks that are threads cannot start processes; use spare ranks")

    def _abandon(self) -> None:
        return

    def free(self) -> None:
        """Do nothing, because Python's garbage collector frees the communicator."""


def run_threads(
    size: int,
    function: Callable[[Communicator], Result],
    ranks_per_node: int | None = None,
    deadline_s: float = DEADLINE_S,
    *,
    fault_tolerant: bool = False,  # ranks continue after a `RankDeath`
) -> list[Result]:
    """Call ``function(comm)`` in ``size`` threads, one per rank. Return the results by rank, or raise the first error.

    ``ranks_per_node``: ranks per simulated node, or None for one node. ``deadline_s``: longest wait in seconds.
    """
    group = ThreadGroup(tuple(range(size)), deadline_s, fault_tolerant=fault_tolerant)
    results: list[Any] = [None] * size

    def body(rank: int) -> None:
        if fault_tolerant:
            register_rank(group, rank)
        try:
            node = None if ranks_per_node is None else rank // ranks_per_node
            result = function(ThreadCommunicator(group, "world", rank, node))
            results[rank] = None if rank in group.dead else result
        except BaseException as error:  # noqa: BLE001 (raised again by the caller's thread)
            if rank not in group.dead:  # a dead rank reports nothing
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


def solo() -> ThreadCommunicator:
    """Return a communicator whose only rank is this process."""
    return ThreadCommunicator(ThreadGroup((0,), DEADLINE_S), "world", 0, None)
