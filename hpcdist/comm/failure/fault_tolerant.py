"""Fault tolerance of a communicator: revoke, agree and shrink after the death of ranks.

A death is told by an error out of whatever needs the dead rank (see `rank_failures`), and to the ranks that wait for
others by `FaultTolerant.revoke`. Over MPI this is ULFM: Bland et al., "Post-failure recovery of MPI communication
capability", IJHPCA 2013. `revoke`, `agree` and `shrink` on p ranks cost a broadcast, and O(log p) messages twice and
four times.
"""

import contextlib
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Final, Self

from hpcdist.comm.events import UNKNOWN_BYTES, Observable
from hpcdist.errors import MissingCapabilityError

_descendants_lock: Final = threading.Lock()


class FaultTolerant(Observable, ABC):
    """Base of `endpoint.Endpoint`; see `communicator.Communicator` for what each method promises."""

    name: str
    declared_node: int | None

    def __init__(self) -> None:
        super().__init__()
        # All that came of this one, by split, dup and nodes, at any distance: revoked together with it.
        self._descendants: weakref.WeakSet[FaultTolerant] = weakref.WeakSet()
        self._lines = [self._descendants]  # where what is made from this one is entered: its own, and its ancestors'
        self._revoked: set[FaultTolerant] = set()  # of those: held until `abandon`, or nobody could give them back

    def _adopt(self, child: "FaultTolerant") -> None:
        """Enter ``child``, which was made from this one."""
        child._lines += self._lines
        with _descendants_lock:
            for line in self._lines:
                line.add(child)

    def _take_descendants(self) -> list["FaultTolerant"]:
        with _descendants_lock:  # a progress thread may make some
            return list(self._descendants)

    def revoke(self) -> None:
        """Make all operations fail on every rank, also on what was made from this one (local)."""
        self._check_survivable("revoke")
        self._revoked.update(self._take_descendants())
        for descendant in self._revoked:
            descendant._revoke()
        self._revoke()

    def failed(self) -> tuple[int, ...]:
        """Return the ranks known to be dead, ascending (local)."""
        return self._failed()

    def agree(self, flag: bool) -> bool:
        """Return whether all the living brought true. Collective over the living."""
        self._check_survivable("agree")
        token = self.events.begin(self.name, "agree", "uint8", 0, UNKNOWN_BYTES, -1, 0)
        agreed = self._agree(flag)
        self.events.end(token)
        return agreed

    def shrink(self, label: str = "world") -> Self:
        """Return a communicator of the living, named ``label``. Collective over the living."""
        self._check_survivable("shrink")
        token = self.events.begin(self.name, "shrink", "uint8", 0, UNKNOWN_BYTES, -1, 0)
        smaller = self._shrink(label)
        self.events.end(token)
        smaller._looking_on = self._looking_on
        smaller.checked = self.checked
        return smaller

    def grow(self, count: int, arguments: Sequence[str], environment: Mapping[str, str], label: str) -> Self:
        """Return a communicator of these ranks and ``count`` new processes; see `growth.spawn`. Collective."""
        self._check_survivable("grow")
        token = self.events.begin(self.name, "grow", "uint8", 0, UNKNOWN_BYTES, -1, 0)
        larger = self._grow(count, arguments, environment, label)
        self.events.end(token)
        larger._looking_on = self._looking_on
        larger.checked = self.checked
        return larger

    def abandon(self) -> None:
        """Give back a revoked communicator and what was made from it, whatever the MPI library says to it (local)."""
        given_back = {*self._take_descendants(), *self._revoked, self}
        self._revoked.clear()
        for each in given_back:
            each.settled.clear()
            with contextlib.suppress(Exception):
                each._abandon()

    def _check_survivable(self, what: str) -> None:
        if not self.supports("ulfm"):
            raise MissingCapabilityError(
                f"{what} on {self.name}: this MPI, as it was started, cannot go on after a rank has died; start the "
                "job by Open MPI's `mpirun --with-ft ulfm`, or let the job end and start it again"
            )

    @abstractmethod
    def supports(self, feature: str) -> bool:
        """Whether the transport has ``feature``; without "ulfm" some MPI libraries end the process in these calls."""

    @abstractmethod
    def _revoke(self) -> None: ...
    @abstractmethod
    def _failed(self) -> tuple[int, ...]: ...
    @abstractmethod
    def _agree(self, flag: bool) -> bool: ...
    @abstractmethod
    def _shrink(self, name: str) -> Self: ...
    @abstractmethod
    def _grow(self, count: int, arguments: Sequence[str], environment: Mapping[str, str], name: str) -> Self: ...
    @abstractmethod
    def _abandon(self) -> None: ...
