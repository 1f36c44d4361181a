"""Group of ranks that are threads: message queues, collectives, requests under way, and the death of a rank.

Messages match as in MPI: each rank has a queue of unexpected messages and one of posted receives. A `RankDeath` looks
to the other ranks like a SIGKILL: the survivors agree and go on without that rank. Reductions combine the parts in
rank order, and are complete when the last part has come.
"""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from hpcdist.arrays.backend import Array
from hpcdist.comm.communicator import ANY
from hpcdist.comm.handover import Handover
from hpcdist.errors import CommunicationError, DeadlineError, RankDiedError


@dataclass(eq=False)
class ThreadMessage:
    """Envelope (source and tag) and payload of a message; the payload is a copy of the sent buffer."""

    source: int
    tag: int
    payload: np.ndarray


@dataclass(eq=False)
class PostedReceive:
    """A receive and the message that it has matched, if any. Receives match in the order of posting, as in MPI."""

    peer: int
    tag: int
    envelope: ThreadMessage | None = None

    def matches(self, envelope: ThreadMessage) -> bool:
        """Whether this receive takes ``envelope``."""
        return self.peer in (ANY, envelope.source) and self.tag in (ANY, envelope.tag)


@dataclass
class SurvivorAgreement:
    """An agreement of the survivors: the flag of each, and the survivors at the moment of the decision."""

    number: int
    brought: dict[int, bool] = field(default_factory=dict)
    living: tuple[int, ...] | None = None  # ranks alive when it was decided, set once: so the same for all


@dataclass
class ThreadGroup:
    """State that the threads of one communicator share. ``members`` are their world ranks, in rank order.

    ``failed`` (exceptions) and ``dead`` (world ranks) are shared by all groups of a world. ``fault_tolerant``: a rank
    may die alone. All queues are guarded by ``changed``, and ``meetings`` by ``met``.
    """

    members: tuple[int, ...]
    deadline_s: float
    changed: threading.Condition = field(default_factory=threading.Condition)
    failed: list[BaseException] = field(default_factory=list)
    dead: set[int] = field(default_factory=set)
    fault_tolerant: bool = False

    def __post_init__(self) -> None:
        self.size = len(self.members)
        self.unexpected: list[list[ThreadMessage]] = [[] for _ in range(self.size)]  # arrived, not matched yet
        self.posted: list[list[PostedReceive]] = [
            [] for _ in range(self.size)
        ]  # receives whose envelope is still to come
        # A condition of its own: every message notifies `changed`, and would wake all ranks that wait in a collective.
        self.met = threading.Condition()
        self.meetings: dict[int, dict[int, Any]] = {}  # number of a collective -> rank -> its value
        self.rounds: dict[int, dict[int, np.ndarray]] = {}  # number of an iallreduce -> rank -> its buffer
        self.agreements: dict[int, SurvivorAgreement] = {}
        self.revoked = False
        self.children: dict[str, ThreadGroup] = {}

    def child(self, key: str, ranks: Sequence[int]) -> "ThreadGroup":
        """Return the group of the members ``ranks`` under ``key``; the first rank that calls makes it."""
        with self.changed:
            group = self.children.get(key)
            if group is None:
                members = tuple(self.members[rank] for rank in ranks)
                group = ThreadGroup(
                    members, self.deadline_s, failed=self.failed, dead=self.dead, fault_tolerant=self.fault_tolerant
                )
                self.children[key] = group
                # A rank that died meanwhile: its `mark_dead` did not see this group among the children.
                if group.dead_ranks():
                    group.stop()
        return group

    def abort(self) -> None:
        """Wake every thread that waits in this group or one made from it."""
        self.stop()
        for child in self._all_children():
            child.abort()

    def stop(self) -> None:
        """Wake every thread that waits in this group; each checks for failures by itself."""
        for condition in (self.changed, self.met):
            with condition:
                condition.notify_all()

    def mark_dead(self, member: int) -> None:
        """Mark world rank ``member`` as dead, and wake the threads that wait in groups that it is a member of."""
        self.dead.add(member)
        if member in self.members:
            self.stop()
        for child in self._all_children():
            child.mark_dead(member)

    def _all_children(self) -> list["ThreadGroup"]:
        with self.changed:
            return list(self.children.values())

    def dead_ranks(self) -> list[int]:
        """Return the ranks that are dead."""
        return [rank for rank, member in enumerate(self.members) if member in self.dead]


class _RankLife(threading.local):
    end: Callable[[], None] | None = None  # marks the rank of this thread as dead


_rank_life = _RankLife()


class RankDeath(BaseException):
    """Death of a rank of ``run_threads(fault_tolerant=True)``, which raises this: dead as soon as the object is made.

    It is a BaseException, and messages that the rank still sends while it unwinds (cleanup code) raise it again.
    """

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        if _rank_life.end is not None:
            _rank_life.end()


def register_rank(group: ThreadGroup, member: int) -> None:
    """Register this thread as rank ``member`` of the world ``group``, so that a `RankDeath` marks it dead (local)."""
    _rank_life.end = lambda: group.mark_dead(member)


class FailureDetector:
    """Failure detection for rank ``rank`` of ``group``, and agreement among the survivors."""

    def __init__(self, group: ThreadGroup, rank: int, name: str) -> None:
        self._group, self.rank, self._name = group, rank, name
        self._agreements = 0

    def check(self, peer: int | None, what: str) -> None:
        """Raise an error where ``what`` can never be complete (local).

        It needs the rank ``peer``; with ANY or None it needs all.
        """
        if self._group.failed:
            raise CommunicationError(f"rank {self.rank}: another rank failed while this one waited in {what}")
        self.check_deaths(peer, what)

    def check_deaths(self, peer: int | None, what: str) -> None:
        """Raise RankDeath where this rank is dead, RankDiedError where a dead rank is needed, or after a revoke."""
        group = self._group
        if not group.dead and not group.revoked:
            return
        if group.members[self.rank] in group.dead:
            raise RankDeath
        dead_ranks = group.dead_ranks()
        if group.revoked:
            raise RankDiedError(f"rank {self.rank}: {self._name} was revoked, and with it {what}", dead_ranks)
        if dead_ranks and (peer is None or peer == ANY or peer in dead_ranks):
            dead = ", ".join(map(str, dead_ranks))
            raise RankDiedError(f"rank {self.rank}: rank {dead} of {self._name} died, and {what} needs it", dead_ranks)

    def agree(self, flag: bool) -> SurvivorAgreement:
        """Return the agreement of all survivors, one object for all of them. Collective over the survivors."""
        group, limit = self._group, time.monotonic() + self._group.deadline_s
        with group.changed:
            agreement = group.agreements.setdefault(self._agreements, SurvivorAgreement(self._agreements))
            self._agreements += 1
            agreement.brought[self.rank] = flag
            group.changed.notify_all()
            while agreement.living is None:
                # Decide by the ranks that are alive now; each death wakes all, so nobody waits for a dead rank. The
                # first to see all flags sets `living`, under the lock: a later death does not change the decision.
                dead_ranks = group.dead_ranks()
                if self.rank in dead_ranks:
                    raise RankDeath
                living = tuple(rank for rank in range(group.size) if rank not in dead_ranks)
                if all(rank in agreement.brought for rank in living):
                    agreement.living = living
                elif group.failed:
                    raise CommunicationError(f"rank {self.rank}: another rank failed, and does not come to agree")
                elif time.monotonic() >= limit:
                    raise DeadlineError(f"rank {self.rank}: the living did not meet within {group.deadline_s} s")
                else:
                    group.changed.wait(limit - time.monotonic())
        return agreement


class CompletedRequest:
    """A request that was complete when it was made."""

    def wait(self) -> None:
        """Return at once."""

    def test(self) -> bool:
        """Return True."""
        return True


class ReceiveRequest:
    """A receive under way; ``arrived`` waits for its message."""

    def __init__(
        self,
        posted: PostedReceive,
        message: Array,
        arrived: Callable[[PostedReceive], ThreadMessage],
        detector: FailureDetector,
    ) -> None:
        self._posted, self._message, self._arrived, self._detector = posted, message, arrived, detector

    def wait(self) -> None:
        """Return when the message has been copied into the buffer."""
        deliver(self._arrived(self._posted), self._message)

    def test(self) -> bool:
        """Whether the message has come; then it has been copied into the buffer."""
        if self._posted.envelope is None:
            self._detector.check_deaths(self._posted.peer, "a receive")
            return False
        deliver(self._posted.envelope, self._message)
        return True


class ProbedMessage:
    """A message that a matched probe took out of the matching."""

    def __init__(self, envelope: ThreadMessage, handover: Handover) -> None:
        self._envelope, self._handover = envelope, handover
        self.source, self.tag, self.nbytes = envelope.source, envelope.tag, envelope.payload.nbytes

    def recv(self, buffer: Array) -> None:
        """Copy the payload into ``buffer``."""
        message, finish = self._handover.incoming(buffer)
        deliver(self._envelope, message)
        if finish is not None:
            finish()


class ThreadBlock:
    """Shared memory of ranks that are threads."""

    is_shared = True

    def __init__(self, views: list[np.ndarray], detector: FailureDetector, deadline_s: float) -> None:
        self.views, self._detector, self._deadline_s = views, detector, deadline_s

    def progress(self) -> None:
        """Raise where another rank failed or died."""
        self._detector.check(None, "shared memory")

    def check_alive(self, since: float) -> None:
        """Raise where another rank failed or died, or this one has waited too long."""
        self.progress()
        if time.monotonic() - since > self._deadline_s:
            raise DeadlineError(f"rank {self._detector.rank}: nobody came to shared memory within {self._deadline_s} s")

    def close(self) -> None:
        """Drop the views."""
        self.views = []


def deliver(envelope: ThreadMessage, message: Array) -> None:
    """Copy the payload of ``envelope`` into the buffer ``message``, which must have its size."""
    if envelope.payload.nbytes != message.nbytes:
        raise CommunicationError(
            f"a message of {envelope.payload.nbytes} bytes from rank {envelope.source} (tag {envelope.tag}) met a "
            f"buffer of {message.nbytes} bytes"
        )
    message.view(np.uint8)[...] = envelope.payload


_UFUNC: Final = {"sum": np.add, "max": np.maximum, "min": np.minimum}


class ReductionRequest:
    """An iallreduce under way: ``parts`` collects the buffers of ``size`` ranks.

    ``until`` waits for a condition, under the deadline of the group; ``detector`` reports dead ranks.
    """

    def __init__(
        self,
        parts: dict[int, Array],
        size: int,
        message: Array,
        op: str,
        until: Callable[[Callable[[], bool]], None],
        detector: FailureDetector,
    ) -> None:
        self._parts, self._size, self._message, self._op, self._until = parts, size, message, op, until
        self._detector = detector

    def wait(self) -> None:
        """Return when the last part has come and the result is in the buffer."""
        self._until(lambda: len(self._parts) == self._size)
        self.test()

    def test(self) -> bool:
        """Whether the last part has come; then the result is in the buffer."""
        if len(self._parts) < self._size:
            self._detector.check_deaths(None, "an iallreduce")
            return False
        self._message[...] = reduce_in_order([self._parts[rank] for rank in range(self._size)], self._message, self._op)
        return True


def reduce_in_order(parts: Sequence[Array], message: Array, op: str) -> Array:
    """Return ``parts``, one of each rank and all like ``message``, reduced in rank order."""
    if any(part.shape != message.shape or part.dtype != message.dtype for part in parts):
        raise CommunicationError(f"the ranks brought buffers of {[(p.size, str(p.dtype)) for p in parts]}")
    total: Array = parts[0].copy()
    for part in parts[1:]:
        _UFUNC[op](total, part, out=total)
    return total
