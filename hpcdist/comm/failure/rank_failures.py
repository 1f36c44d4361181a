"""Rank failures: tell the death of a rank from other errors, and agree within a time limit.

`is_rank_failure` looks at the class of an error, and of those that led to it.

`all_agree` finds out whether all ranks fail alike: then the job has one failure, not one for each rank. A recipe that
does not fit, data that is not there: every rank finds out, by itself or because they agreed. But a rank that has
failed cannot know whether the others have, or wait for it in a collective for ever; so it asks, and does not ask for
long. `barrier_with_deadline` names the ranks that have not come.
"""

import contextlib
import hashlib
import sys
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, Self

import numpy as np

from hpcdist.comm.communicator import Communicator, Request
from hpcdist.comm.events import UNKNOWN_BYTES, Observable
from hpcdist.errors import DeadlineError, MissingCapabilityError, RankDiedError

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


DETECTION_PATIENCE_S: Final = (
    1.0  # a connection may break before the MPI library is told of the death (empirical: see below)
)
_POLL_S: Final = 1e-3
_UNUSED_TAG: Final = 32766  # a tag without messages


def is_rank_failure(
    error: BaseException, comm: Communicator | None = None, patience_s: float = DETECTION_PATIENCE_S
) -> bool:
    """Whether ``error`` is the death of a rank, the revocation that follows one, or came of either (local).

    With ``comm`` also any other error of the MPI library counts when, within ``patience_s`` seconds, a member of
    ``comm`` is known to be dead: a broken connection may be told before its cause. An interrupt is none, whatever it
    interrupted.
    """
    if not isinstance(error, Exception):
        return False
    of_mpi = False
    for each in _error_chain(error):
        if isinstance(each, RankDiedError):
            return True
        code = _error_class(each)
        if code is not None:
            if code in _failure_classes():
                return True
            of_mpi = True
    return of_mpi and comm is not None and comm.supports("ulfm") and _has_failed(comm, patience_s)


def _error_chain(error: BaseException) -> Iterator[BaseException]:
    """Yield ``error``, and those that it was raised from or while handling."""
    seen: set[int] = set()
    front: list[BaseException | None] = [error]
    while front:
        each = front.pop()
        if each is not None and id(each) not in seen:
            seen.add(id(each))
            yield each
            front += [each.__context__, each.__cause__]


def _mpi() -> Any:
    """Return mpi4py.MPI if anybody has loaded it: without it no error is one of MPI."""
    return sys.modules.get("mpi4py.MPI")


def _error_class(error: BaseException) -> int | None:
    mpi = _mpi()
    return int(error.Get_error_class()) if mpi is not None and isinstance(error, mpi.Exception) else None


def _failure_classes() -> set[int]:
    mpi = _mpi()
    # Where a library knows none of them, mpi4py gives them the class of unknown errors.
    return {mpi.ERR_PROC_FAILED, mpi.ERR_PROC_FAILED_PENDING, mpi.ERR_REVOKED} - {mpi.ERR_UNKNOWN}


def _has_failed(comm: Communicator, patience_s: float) -> bool:
    limit = time.monotonic() + patience_s
    while not comm.failed():
        if time.monotonic() > limit:
            return False
        try:
            comm.poll(tag=_UNUSED_TAG)  # the MPI library learns of a death while it progresses
        except Exception as error:  # noqa: BLE001 - asked for what it is
            return is_rank_failure(error)
        time.sleep(_POLL_S)
    return True


AGREEMENT_PATIENCE_S: Final = 2.0  # ranks that fail alike do so within milliseconds; this is for loaded machines
_SLACK_S: Final = 0.5  # of the others, for the answer of rank 0
_PAUSE_S: Final = 1e-3
_AGREEMENT_TAG: Final = 32767  # the largest that every MPI has: nobody counts up to it
_BARRIER_TAG: Final = 32766
_DIGEST_BYTES: Final = 16


def all_agree(comm: Communicator, text: str, patience_s: float = AGREEMENT_PATIENCE_S) -> bool:
    """Whether every rank of ``comm`` calls this with the same ``text`` within about ``patience_s`` seconds.

    Collective where it is true. Where some do not come, those that do get False, and messages stay under way: they have
    to leave.
    """
    own = np.frombuffer(hashlib.blake2b(text.encode(), digest_size=_DIGEST_BYTES).digest(), np.uint8).copy()
    verdict = np.zeros(1, np.uint8)
    if comm.rank > 0:
        requests = [comm.isend(own, 0, _AGREEMENT_TAG), comm.irecv(verdict, 0, _AGREEMENT_TAG)]
        return _all_complete(requests, patience_s + _SLACK_S) and bool(verdict[0])
    said = np.zeros((comm.size, _DIGEST_BYTES), np.uint8)
    said[0] = own
    others = range(1, comm.size)
    heard = _all_complete([comm.irecv(said[rank], rank, _AGREEMENT_TAG) for rank in others], patience_s)
    verdict[0] = heard and bool((said == own).all())
    answers = [comm.isend(verdict, rank, _AGREEMENT_TAG) for rank in others]
    return bool(verdict[0]) and _all_complete(answers, _SLACK_S)


def barrier_with_deadline(comm: Communicator, what: str, patience_s: float) -> None:
    """Wait until every rank of ``comm`` has called this. Collective; for what is seldom done.

    ``what`` names the call for a person. Raises DeadlineError, which names the ranks that have not come, on those that
    have waited for ``patience_s`` seconds; messages stay under way then, and the job has to end.
    """
    here, absent = np.zeros(1, np.uint8), np.zeros(comm.size, np.uint8)
    others = range(1, comm.size)
    if comm.rank > 0:
        requests = [comm.isend(here, 0, _BARRIER_TAG), comm.irecv(absent, 0, _BARRIER_TAG)]
        if not _all_complete(requests, patience_s + _SLACK_S):
            absent[0] = 1
    else:
        calls = [comm.irecv(np.zeros(1, np.uint8), rank, _BARRIER_TAG) for rank in others]
        if not _all_complete(calls, patience_s):
            absent[1:] = [not call.test() for call in calls]
        answers = [comm.isend(absent, rank, _BARRIER_TAG) for rank in others if not absent[rank]]
        _all_complete(answers, _SLACK_S)
    if absent.any():
        missing = np.flatnonzero(absent).tolist()
        named = f"{'rank' if len(missing) == 1 else 'ranks'} {', '.join(map(str, missing[:8]))}"
        more = f" and {len(missing) - 8} more" if len(missing) > 8 else ""
        raise DeadlineError(
            f"{what} is collective: rank {comm.rank} of {comm.name} has waited {patience_s:g} s, and {named}{more} did "
            "not come; every rank must call it"
        )


def _all_complete(requests: Sequence[Request], patience_s: float) -> bool:
    """Wait until all ``requests`` are complete; False where that takes longer."""
    limit = time.monotonic() + patience_s
    while not all(request.test() for request in requests):
        if time.monotonic() > limit:
            return False
        time.sleep(_PAUSE_S)
    return True
