"""Ranks that are threads and die: as by SIGKILL for the others, who go on without them."""

import threading
import time
from collections.abc import Callable
from typing import Any

from hpcdist.comm.communicator import ANY
from hpcdist.comm.mailbox import Group, Parting
from hpcdist.errors import CommunicationError, DeadlineError, RankDiedError


class _Life(threading.local):
    end: Callable[[], None] | None = None  # of the rank that this thread is


_life = _Life()


class Death(BaseException):
    """Raised by a rank of ``run_threads(mortal=True)``: from its making on the rank is dead, and nobody hears of it.

    Messages that it still tries to send while the exception passes through its code raise this again.
    """

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        if _life.end is not None:
            _life.end()


def is_born(group: Group, member: int) -> None:
    """Let this thread be ``member`` of the world ``group`` (local)."""
    _life.end = lambda: group.bury(member)


class Fate:
    """How the rest of ``group`` fares, as its rank ``rank`` sees it."""

    def __init__(self, group: Group, rank: int, name: str) -> None:
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
            raise Death
        gone = group.gone()
        if group.revoked:
            raise RankDiedError(f"rank {self.rank}: {self._name} was revoked, and with it {what}", gone)
        if gone and (peer is None or peer == ANY or peer in gone):
            dead = ", ".join(map(str, gone))
            raise RankDiedError(f"rank {self.rank}: rank {dead} of {self._name} died, and {what} needs it", gone)

    def part(self, flag: bool) -> Parting:
        """Meet all that live, and return what they decided: the same object for all. Collective over the living."""
        group, limit = self._group, time.monotonic() + self._group.deadline_s
        with group.changed:
            parting = group.partings.setdefault(self._parted, Parting(self._parted))
            self._parted += 1
            parting.brought[self.rank] = flag
            group.changed.notify_all()
            while parting.living is None:
                gone = group.gone()
                if self.rank in gone:
                    raise Death
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
