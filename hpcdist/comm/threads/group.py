"""Group of ranks that are threads: message queues, collectives, requests, and the death of a rank.

Messages match as in MPI. A `RankDeath` looks like a SIGKILL to the other ranks. Reductions combine in rank order.
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
from hpcdist.comm.transport import check_size
from hpcdist.errors import CommunicationError, DeadlineError, RankDiedError


@dataclass(eq=False)
class ThreadMessage:
    """A message in flight: its source, its tag, and its payload, which is a copy of the sent buffer."""

    source: int
    tag: int
    payload: np.ndarray


@dataclass(eq=False)
class PostedReceive:
    """A posted receive, and the message that matched it or None. Receives match in posting order, as in MPI."""

    peer: int
    tag: int
    envelope: ThreadMessage | None = None

    def matches(self, envelope: ThreadMessage) -> bool:
        """Return True if this receive accepts the message ``envelope``."""
        return self.peer in (ANY, envelope.source) and self.tag in (ANY, envelope.tag)


@dataclass
class SurvivorAgreement:
    """State of one call of `agree` by the survivors: the flag of each rank, and the ranks alive at the decision."""

    number: int
    brought: dict[int, bool] = field(default_factory=dict)
    living: tuple[int, ...] | None = None  # ranks alive at the decision; set once, so equal on all ranks


@dataclass
class ThreadGroup:
    """State of one communicator, shared by the threads of all ranks: messages in flight, failures and deadline."""

    members: tuple[int, ...]  # world ranks, in rank order
    deadline_s: float
    # guards all message queues; `met` guards the values exchanged in collectives
    changed: threading.Condition = field(default_factory=threading.Condition)
    failed: list[BaseException] = field(default_factory=list)  # common to all communicators of a world
    dead: set[int] = field(default_factory=set)  # world ranks, common to all communicators of a world
    fault_tolerant: bool = False

    def __post_init__(self) -> None:
        self.size = len(self.members)
        self.unexpected: list[list[ThreadMessage]] = [[] for _ in range(self.size)]  # arrived, not matched yet
        self.posted: list[list[PostedReceive]] = [[] for _ in range(self.size)]  # receives without a message so far
        # A separate condition: every message notifies `changed`, and would wake all ranks that wait in a collective.
        self.met = threading.Condition()
        self.meetings: dict[int, dict[int, Any]] = {}  # number of a collective -> rank -> its value
        self.rounds: dict[int, dict[int, np.ndarray]] = {}  # number of an iallreduce -> rank -> its buffer
        self.agreements: dict[int, SurvivorAgreement] = {}
        self.revoked = False
        self.children: dict[str, ThreadGroup] = {}

    def child(self, key: str, ranks: Sequence[int]) -> "ThreadGroup":
        """Return the child group named ``key``, with the ``ranks`` of this group. The first caller creates it."""
        with self.changed:
            group = self.children.get(key)
            if group is None:
                members = tuple(self.members[rank] for rank in ranks)
                group = ThreadGroup(
                    members, self.deadline_s, failed=self.failed, dead=self.dead, fault_tolerant=self.fault_tolerant
                )
                self.children[key] = group
                # If a rank died meanwhile, its `mark_dead` did not see this group among the children.
                if group.dead_ranks():
                    group.stop()
        return group

    def abort(self) -> None:
        """Wake all threads that wait in this group or in its derived groups, because a rank has failed."""
        self.stop()
        for child in self._all_children():
            child.abort()

    def stop(self) -> None:
        """Wake every thread that waits in this group, so that the thread checks for failures."""
        for condition in (self.changed, self.met):
            with condition:
                condition.notify_all()

    def mark_dead(self, member: int) -> None:
        """Mark the world rank ``member`` as dead. Wake the waiting threads of this group and its subgroups."""
        self.dead.add(member)
        if member in self.members:
            self.stop()
        for child in self._all_children():
            child.mark_dead(member)

    def _all_children(self) -> list["ThreadGroup"]:
        with self.changed:
            return list(self.children.values())

    def dead_ranks(self) -> list[int]:
        """Return a list of the dead ranks of this group."""
        return [rank for rank, member in enumerate(self.members) if member in self.dead]


class _RankLife(threading.local):
    end: Callable[[], None] | None = None  # marks the rank of this thread as dead


_rank_life = _RankLife()


class RankDeath(BaseException):
    """Exception that makes a rank of ``run_threads(fault_tolerant=True)`` die. A dead rank cannot communicate."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        if _rank_life.end is not None:
            _rank_life.end()


def register_rank(group: ThreadGroup, member: int) -> None:
    """Make a later `RankDeath` in this thread mark the world rank ``member`` of ``group`` as dead. Local."""
    _rank_life.end = lambda: group.mark_dead(member)


class FailureDetector:
    """Detector of failed ranks of ``group``, used by rank ``rank``. ``name``: communicator name for error messages."""

    def __init__(self, group: ThreadGroup, rank: int, name: str) -> None:
        self._group, self.rank, self._name = group, rank, name
        self._agreements = 0

    def check(self, peer: int | None, what: str) -> None:
        """Raise CommunicationError if a rank has failed. Else call `check_deaths` with ``peer`` and ``what``. Local."""
        if self._group.failed:
            raise CommunicationError(
                f"rank {self.rank}: another rank failed while this rank waited in {what}; see the error of that rank"
            )
        self.check_deaths(peer, what)

    def check_deaths(self, peer: int | None, what: str) -> None:
        """Raise RankDiedError if the communicator was revoked or rank ``peer`` is dead.

        ``peer``: None or ANY checks all ranks. ``what``: name of the operation, for the error message.
        """
        group = self._group
        if not group.dead and not group.revoked:
            return
        if group.members[self.rank] in group.dead:
            # This rank was marked as dead: end its thread.
            raise RankDeath
        dead_ranks = group.dead_ranks()
        if group.revoked:
            raise RankDiedError(
                f"rank {self.rank}: operation {what!r} failed: communicator {self._name} was revoked because a rank "
                "died; call shrink() on this communicator",
                dead_ranks,
            )
        if dead_ranks and (peer is None or peer == ANY or peer in dead_ranks):
            dead = ", ".join(map(str, dead_ranks))
            raise RankDiedError(
                f"rank {self.rank}: operation {what!r} failed: rank {dead} of communicator {self._name} died; call "
                "shrink() on this communicator",
                dead_ranks,
            )

    def agree(self, flag: bool) -> SurvivorAgreement:
        """Wait for the ``flag`` of every survivor, and return the complete agreement. Collective over the survivors."""
        group, limit = self._group, time.monotonic() + self._group.deadline_s
        with group.changed:
            agreement = group.agreements.setdefault(self._agreements, SurvivorAgreement(self._agreements))
            self._agreements += 1
            agreement.brought[self.rank] = flag
            group.changed.notify_all()
            while agreement.living is None:
                # Decide by the ranks that are alive now; each death wakes all ranks, so nobody waits for a dead rank.
                # The first rank to see all flags sets `living` under the lock: later deaths do not change the decision.
                dead_ranks = group.dead_ranks()
                if self.rank in dead_ranks:
                    raise RankDeath
                living = tuple(rank for rank in range(group.size) if rank not in dead_ranks)
                if all(rank in agreement.brought for rank in living):
                    agreement.living = living
                elif group.failed:
                    raise CommunicationError(
                        f"rank {self.rank}: another rank failed while this rank waited for the agreement of the "
                        "survivors; see the error of the failed rank"
                    )
                elif time.monotonic() >= limit:
                    raise DeadlineError(
                        f"rank {self.rank}: not all survivors called agree() within {group.deadline_s} s"
                    )
                else:
                    group.changed.wait(limit - time.monotonic())
        return agreement


class CompletedRequest:
    """A request of an operation that was already complete when the request was created."""

    def wait(self) -> None:
        """Return immediately."""

    def test(self) -> bool:
        return True


class ReceiveRequest:
    """Request of a receive into the array ``message``. ``arrived(posted)`` must wait for the message and return it."""

    def __init__(
        self,
        posted: PostedReceive,
        message: Array,
        arrived: Callable[[PostedReceive], ThreadMessage],
        detector: FailureDetector,
    ) -> None:
        self._posted, self._message, self._arrived, self._detector = posted, message, arrived, detector

    def wait(self) -> None:
        deliver(self._arrived(self._posted), self._message)

    def test(self) -> bool:
        if self._posted.envelope is None:
            self._detector.check_deaths(self._posted.peer, "a receive")
            return False
        deliver(self._posted.envelope, self._message)
        return True


class ProbedMessage:
    """A message that a probe has reserved in the queue of this rank, so that no other receive can match it."""

    def __init__(self, envelope: ThreadMessage, handover: Handover) -> None:
        self._envelope, self._handover = envelope, handover
        self.source, self.tag, self.nbytes = envelope.source, envelope.tag, envelope.payload.nbytes

    def recv(self, buffer: Array) -> None:
        message, finish = self._handover.incoming(buffer)
        deliver(self._envelope, message)
        if finish is not None:
            finish()


class ThreadBlock:
    """Shared memory of ranks that are threads of this process."""

    is_shared = True

    def __init__(self, views: list[np.ndarray], detector: FailureDetector, deadline_s: float) -> None:
        self.views, self._detector, self._deadline_s = views, detector, deadline_s

    def progress(self) -> None:
        self._detector.check(None, "shared memory")

    def check_alive(self, since: float) -> None:
        self.progress()
        if time.monotonic() - since > self._deadline_s:
            raise DeadlineError(
                f"rank {self._detector.rank}: waited {self._deadline_s} s for another rank in shared memory; check "
                "that all ranks make the same calls in the same order"
            )

    def close(self) -> None:
        self.views = []


def deliver(envelope: ThreadMessage, message: Array) -> None:
    """Copy the payload of ``envelope`` into the array ``message``. Raises CommunicationError if the sizes differ."""
    check_size(envelope.payload.nbytes, envelope.source, envelope.tag, message)
    message.view(np.uint8)[...] = envelope.payload


_UFUNC: Final = {"sum": np.add, "max": np.maximum, "min": np.minimum}


class ReductionRequest:
    """Request of an iallreduce over ``size`` ranks. The result is written to the array ``message``."""

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
        self._until(lambda: len(self._parts) == self._size)
        self.test()

    def test(self) -> bool:
        if len(self._parts) < self._size:
            self._detector.check_deaths(None, "an iallreduce")
            return False
        self._message[...] = reduce_in_order([self._parts[rank] for rank in range(self._size)], self._message, self._op)
        return True


def reduce_in_order(parts: Sequence[Array], message: Array, op: str) -> Array:
    """Reduce ``parts``, one array per rank, in rank order. Each must have the shape and the dtype of ``message``."""
    if any(part.shape != message.shape or part.dtype != message.dtype for part in parts):
        raise CommunicationError(
            f"all ranks must pass the same size and dtype, but they passed {[(p.size, str(p.dtype)) for p in parts]}"
        )
    total: Array = parts[0].copy()
    for part in parts[1:]:
        _UFUNC[op](total, part, out=total)
    return total
