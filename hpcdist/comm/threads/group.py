"""Group of ranks that are threads: shared mailboxes, meetings, requests under way, and the death of a rank.

A `RankDeath` is to the others as a SIGKILL: they go on without that rank, by the agreement of the survivors.
Reductions combine the parts in rank order, and are complete when the last part came.
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
    """A message under way: a copy of what was sent."""

    source: int
    tag: int
    payload: np.ndarray


@dataclass(eq=False)
class PostedReceive:
    """A receive that waits for its letter. Receives match in the order in which they were posted, as in MPI."""

    peer: int
    tag: int
    letter: ThreadMessage | None = None

    def matches(self, letter: ThreadMessage) -> bool:
        """Whether ``letter`` is one that this receive takes."""
        return self.peer in (ANY, letter.source) and self.tag in (ANY, letter.tag)


@dataclass
class SurvivorAgreement:
    """A meeting of the living: what each brought, and what the first to see all of them made of it."""

    number: int
    brought: dict[int, bool] = field(default_factory=dict)
    living: tuple[int, ...] | None = None  # ranks that lived when it was decided: the same for all


@dataclass
class ThreadGroup:
    """State that the threads of one communicator share. ``members`` are their numbers in the world, in rank order.

    ``failed`` and ``dead``, numbers in the world, are those of the whole world; ``mortal``: a rank may die alone.
    """

    members: tuple[int, ...]
    deadline_s: float
    changed: threading.Condition = field(default_factory=threading.Condition)
    failed: list[BaseException] = field(default_factory=list)
    dead: set[int] = field(default_factory=set)
    mortal: bool = False

    def __post_init__(self) -> None:
        self.size = len(self.members)
        self.inbox: list[list[ThreadMessage]] = [[] for _ in range(self.size)]  # letters that nobody waits for yet
        self.posted: list[list[PostedReceive]] = [
            [] for _ in range(self.size)
        ]  # receives whose letter is still to come
        self.met = threading.Condition()  # apart from `changed`, which every letter notifies
        self.meetings: dict[int, dict[int, Any]] = {}  # number of a collective -> rank -> what it brought
        self.rounds: dict[int, dict[int, np.ndarray]] = {}  # the same of each iallreduce
        self.partings: dict[int, SurvivorAgreement] = {}
        self.revoked = False
        self.children: dict[str, ThreadGroup] = {}

    def child(self, key: str, ranks: Sequence[int]) -> "ThreadGroup":
        """Return the group of some of the members under ``key``; the first to ask makes it."""
        with self.changed:
            group = self.children.get(key)
            if group is None:
                members = tuple(self.members[rank] for rank in ranks)
                group = ThreadGroup(members, self.deadline_s, failed=self.failed, dead=self.dead, mortal=self.mortal)
                self.children[key] = group
                if group.gone():  # while it was made: nobody will come round again to say so
                    group.stop()
        return group

    def abort(self) -> None:
        """Release every thread that waits in this group or below."""
        self.stop()
        for child in self._all_children():
            child.abort()

    def stop(self) -> None:
        """Release every thread that waits in this group: it finds out why by itself."""
        for condition in (self.changed, self.met):
            with condition:
                condition.notify_all()

    def mark_dead(self, member: int) -> None:
        """Let every thread in this group or below that waits for ``member``, a number in the world, see its death."""
        self.dead.add(member)
        if member in self.members:
            self.stop()
        for child in self._all_children():
            child.mark_dead(member)

    def _all_children(self) -> list["ThreadGroup"]:
        with self.changed:
            return list(self.children.values())

    def gone(self) -> list[int]:
        """Return the ranks that are dead."""
        return [rank for rank, member in enumerate(self.members) if member in self.dead]


class _RankLife(threading.local):
    end: Callable[[], None] | None = None  # of the rank that this thread is


_rank_life = _RankLife()


class RankDeath(BaseException):
    """Raised by a rank of ``run_threads(mortal=True)``: from its making on the rank is dead, and nobody hears of it.

    Messages that it still tries to send while the exception passes through its code raise this again.
    """

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        if _rank_life.end is not None:
            _rank_life.end()


def register_rank(group: ThreadGroup, member: int) -> None:
    """Let this thread be ``member`` of the world ``group`` (local)."""
    _rank_life.end = lambda: group.mark_dead(member)


class FailureDetector:
    """State of the rest of ``group``, as its rank ``rank`` sees it."""

    def __init__(self, group: ThreadGroup, rank: int, name: str) -> None:
        self._group, self.rank, self._name = group, rank, name
        self._parted = 0

    def look(self, peer: int | None, what: str) -> None:
        """Raise an error where ``what`` can never be complete (local).

        It needs the rank ``peer``; ANY and None need all.
        """
        if self._group.failed:
            raise CommunicationError(f"rank {self.rank}: another rank failed while this one waited in {what}")
        self.look_for_deaths(peer, what)

    def look_for_deaths(self, peer: int | None, what: str) -> None:
        """Raise Death where this rank is dead, RankDiedError where ``what`` needs one that is, or was revoked."""
        group = self._group
        if not group.dead and not group.revoked:
            return
        if group.members[self.rank] in group.dead:
            raise RankDeath
        gone = group.gone()
        if group.revoked:
            raise RankDiedError(f"rank {self.rank}: {self._name} was revoked, and with it {what}", gone)
        if gone and (peer is None or peer == ANY or peer in gone):
            dead = ", ".join(map(str, gone))
            raise RankDiedError(f"rank {self.rank}: rank {dead} of {self._name} died, and {what} needs it", gone)

    def part(self, flag: bool) -> SurvivorAgreement:
        """Meet all that live, and return what they decided: the same object for all. Collective over the living."""
        group, limit = self._group, time.monotonic() + self._group.deadline_s
        with group.changed:
            parting = group.partings.setdefault(self._parted, SurvivorAgreement(self._parted))
            self._parted += 1
            parting.brought[self.rank] = flag
            group.changed.notify_all()
            while parting.living is None:
                gone = group.gone()
                if self.rank in gone:
                    raise RankDeath
                living = tuple(rank for rank in range(group.size) if rank not in gone)
                if all(rank in parting.brought for rank in living):
                    parting.living = living
                elif group.failed:
                    raise CommunicationError(f"rank {self.rank}: another rank failed, and does not come to agree")
                elif time.monotonic() >= limit:
                    raise DeadlineError(f"rank {self.rank}: the living did not meet within {group.deadline_s} s")
                else:
                    group.changed.wait(limit - time.monotonic())
        return parting


class CompletedRequest:
    """A request that was complete when it was made: sends copy."""

    def wait(self) -> None:
        """Return at once."""

    def test(self) -> bool:
        """Return True."""
        return True


class ReceiveRequest:
    """A receive under way; ``arrived`` waits for its letter."""

    def __init__(
        self,
        posted: PostedReceive,
        message: Array,
        arrived: Callable[[PostedReceive], ThreadMessage],
        fate: FailureDetector,
    ) -> None:
        self._posted, self._message, self._arrived, self._fate = posted, message, arrived, fate

    def wait(self) -> None:
        """Return when the letter is in the message."""
        deliver(self._arrived(self._posted), self._message)

    def test(self) -> bool:
        """Whether the letter has come; then it is in the message."""
        if self._posted.letter is None:
            self._fate.look_for_deaths(self._posted.peer, "a receive")
            return False
        deliver(self._posted.letter, self._message)
        return True


class ProbedMessage:
    """A letter that was taken out of the matching."""

    def __init__(self, letter: ThreadMessage, handover: Handover) -> None:
        self._letter, self._handover = letter, handover
        self.source, self.tag, self.nbytes = letter.source, letter.tag, letter.payload.nbytes

    def recv(self, buffer: Array) -> None:
        """Copy the letter into ``buffer``."""
        message, finish = self._handover.incoming(buffer)
        deliver(self._letter, message)
        if finish is not None:
            finish()


class ThreadBlock:
    """Memory that all threads see."""

    is_shared = True

    def __init__(self, views: list[np.ndarray], fate: FailureDetector, deadline_s: float) -> None:
        self.views, self._fate, self._deadline_s = views, fate, deadline_s

    def progress(self) -> None:
        """Raise where another rank failed or died."""
        self._fate.look(None, "shared memory")

    def check_alive(self, since: float) -> None:
        """Raise where another rank failed or died, or this one has waited too long."""
        self.progress()
        if time.monotonic() - since > self._deadline_s:
            raise DeadlineError(f"rank {self._fate.rank}: nobody came to shared memory within {self._deadline_s} s")

    def close(self) -> None:
        """Drop the views."""
        self.views = []


def deliver(letter: ThreadMessage, message: Array) -> None:
    """Copy ``letter`` into ``message``, which must have its size."""
    if letter.payload.nbytes != message.nbytes:
        raise CommunicationError(
            f"a message of {letter.payload.nbytes} bytes from rank {letter.source} (tag {letter.tag}) met a buffer "
            f"of {message.nbytes} bytes"
        )
    message.view(np.uint8)[...] = letter.payload


_UFUNC: Final = {"sum": np.add, "max": np.maximum, "min": np.minimum}


class ReductionRequest:
    """An iallreduce under way: ``parts`` fills up with what each of ``size`` ranks brings.

    ``until`` waits for a condition, under the deadline of the group; ``fate`` tells of deaths.
    """

    def __init__(
        self,
        parts: dict[int, Array],
        size: int,
        message: Array,
        op: str,
        until: Callable[[Callable[[], bool]], None],
        fate: FailureDetector,
    ) -> None:
        self._parts, self._size, self._message, self._op, self._until = parts, size, message, op, until
        self._fate = fate

    def wait(self) -> None:
        """Return when the last part has come, with the result in the message."""
        self._until(lambda: len(self._parts) == self._size)
        self.test()

    def test(self) -> bool:
        """Whether the last part has come; then the result is in the message."""
        if len(self._parts) < self._size:
            self._fate.look_for_deaths(None, "an iallreduce")
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
