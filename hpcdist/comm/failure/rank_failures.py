"""Rank failures: fault-tolerant communicators (ULFM), detection of failed ranks, and agreement with a time limit.

`FaultTolerant` is the part of a communicator that survives rank failures: revoke, agree, shrink, and grow.
`is_rank_failure` tells the failure of a rank from other errors by the MPI error class, also of the errors that led to
it.

`all_agree` finds out whether all ranks fail alike: then the job reports one failure, not one for each rank. Errors such
as a bad recipe or missing data occur on every rank. But a rank that has failed cannot know whether the others have, or
wait for it in a collective for ever: so this is no collective but messages to rank 0 with a time limit.
`barrier_with_deadline` names the ranks that have not come.
"""

import contextlib
import hashlib
import sys
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, Self, TypeVar

import numpy as np

from hpcdist.comm.communicator import Communicator, Request
from hpcdist.comm.events import UNKNOWN_BYTES, Observable
from hpcdist.errors import DeadlineError, MissingCapabilityError, RankDiedError

_descendants_lock: Final = threading.Lock()
Result = TypeVar("Result")
Made = TypeVar("Made", bound="FaultTolerant")


class FaultTolerant(Observable, ABC):
    """Base of `endpoint.Endpoint`: fault tolerance. `communicator.Communicator` documents each method."""

    name: str
    declared_node: int | None

    def __init__(self) -> None:
        super().__init__()
        # All communicators made from this one (split, dup, nodes), at any depth: revoked together with it, since ULFM
        # revokes one communicator only, and a rank may wait in any of them. Weak, so that dropped ones are collected.
        self._descendants: weakref.WeakSet[FaultTolerant] = weakref.WeakSet()
        self._registries = [self._descendants]  # where descendants are entered: in this set, and those of the ancestors
        self._revoked: set[FaultTolerant] = set()  # descendants to free: strong references until `abandon`

    def _recorded(
        self, op: str, function: Callable[..., Result], *arguments: Any, count: int = 0, peer: int = -1
    ) -> Result:
        """Return ``function(*arguments)``, recorded as the operation ``op``, of which the sent bytes are not known."""
        token = self.events.begin(self.name, op, "uint8", count, UNKNOWN_BYTES, peer, 0)
        result = function(*arguments)
        self.events.end(token)
        return result

    def _passed_on(self, made: Made) -> Made:
        """Return ``made``, a communicator made from this one, with the event sink and the checked mode of this one."""
        made.observe_like(self)
        return made

    def _adopt(self, child: "FaultTolerant") -> None:
        """Register ``child``, which was made from this communicator, with it and its ancestors."""
        child._registries += self._registries
        with _descendants_lock:
            for registry in self._registries:
                registry.add(child)

    def _take_descendants(self) -> list["FaultTolerant"]:
        with _descendants_lock:  # a progress thread may create communicators
            return list(self._descendants)

    def revoke(self) -> None:
        """Revoke this communicator and all made from it: their operations fail on every rank (local)."""
        self._check_survivable("revoke")
        self._revoked.update(self._take_descendants())
        for descendant in self._revoked:
            descendant._revoke()
        self._revoke()

    def agree(self, flag: bool) -> bool:
        """Return whether all survivors passed true. Collective over the survivors."""
        self._check_survivable("agree")
        return self._recorded("agree", self._agree, flag)

    def shrink(self, label: str = "world") -> Self:
        """Return a communicator of the survivors, named ``label``. Collective over the survivors."""
        self._check_survivable("shrink")
        return self._passed_on(self._recorded("shrink", self._shrink, label))

    def grow(self, count: int, arguments: Sequence[str], environment: Mapping[str, str], label: str) -> Self:
        """Return a communicator of these ranks and ``count`` new processes; see `spawn.spawn`. Collective."""
        self._check_survivable("grow")
        return self._passed_on(self._recorded("grow", self._grow, count, arguments, environment, label))

    def abandon(self) -> None:
        """Free a revoked communicator and those made from it, ignoring errors of the MPI library (local)."""
        to_free = {*self._take_descendants(), *self._revoked, self}
        self._revoked.clear()
        for communicator in to_free:
            communicator.settled.clear()
            with contextlib.suppress(Exception):
                communicator._abandon()

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
    def failed(self) -> tuple[int, ...]:
        """Return the ranks known to have failed, ascending (local)."""

    @abstractmethod
    def _agree(self, flag: bool) -> bool: ...
    @abstractmethod
    def _shrink(self, name: str) -> Self: ...
    @abstractmethod
    def _grow(self, count: int, arguments: Sequence[str], environment: Mapping[str, str], name: str) -> Self: ...
    @abstractmethod
    def _abandon(self) -> None: ...


DETECTION_PATIENCE_S: Final = 1.0  # a connection may break before the MPI library learns of the failure (empirical)
_POLL_S: Final = 1e-3
_UNUSED_TAG: Final = 32766  # a tag without messages


def is_rank_failure(
    error: BaseException, comm: Communicator | None = None, patience_s: float = DETECTION_PATIENCE_S
) -> bool:
    """Whether ``error`` is a rank failure, the revocation that follows one, or was caused by either (local).

    With ``comm`` any other error of the MPI library counts as well if, within ``patience_s`` seconds, a member of
    ``comm`` is known to have failed: a broken connection may be reported before its cause. KeyboardInterrupt never
    counts.
    """
    if not isinstance(error, Exception):
        return False
    of_mpi = False
    for cause in _error_chain(error):
        if isinstance(cause, RankDiedError):
            return True
        code = _error_class(cause)
        if code is not None:
            if code in _failure_classes():
                return True
            of_mpi = True
    return of_mpi and comm is not None and comm.supports("ulfm") and _has_failed(comm, patience_s)


def _error_chain(error: BaseException) -> Iterator[BaseException]:
    """Yield ``error`` and, transitively, its ``__cause__`` and ``__context__``."""
    seen: set[int] = set()
    front: list[BaseException | None] = [error]
    while front:
        current = front.pop()
        if current is not None and id(current) not in seen:
            seen.add(id(current))
            yield current
            front += [current.__context__, current.__cause__]


def _mpi() -> Any:
    """Return mpi4py.MPI if it is loaded: otherwise no error is one of MPI."""
    return sys.modules.get("mpi4py.MPI")


def _error_class(error: BaseException) -> int | None:
    mpi = _mpi()
    return int(error.Get_error_class()) if mpi is not None and isinstance(error, mpi.Exception) else None


def _failure_classes() -> set[int]:
    mpi = _mpi()
    # For a library without ULFM mpi4py sets these constants to ERR_UNKNOWN.
    return {mpi.ERR_PROC_FAILED, mpi.ERR_PROC_FAILED_PENDING, mpi.ERR_REVOKED} - {mpi.ERR_UNKNOWN}


def _has_failed(comm: Communicator, patience_s: float) -> bool:
    limit = time.monotonic() + patience_s
    while not comm.failed():
        if time.monotonic() > limit:
            return False
        try:
            comm.poll(tag=_UNUSED_TAG)  # the MPI library detects failures while it progresses
        except Exception as error:  # noqa: BLE001 - classified here
            return is_rank_failure(error)
        time.sleep(_POLL_S)
    return True


AGREEMENT_PATIENCE_S: Final = 2.0  # ranks that fail alike do so within milliseconds; this is for loaded machines
_SLACK_S: Final = 0.5  # that the others wait longer than rank 0, for its answer
_PAUSE_S: Final = 1e-3
_AGREEMENT_TAG: Final = 32767  # the largest that every MPI guarantees (MPI_TAG_UB)
_BARRIER_TAG: Final = 32766
_DIGEST_BYTES: Final = 16


def all_agree(comm: Communicator, text: str, patience_s: float = AGREEMENT_PATIENCE_S) -> bool:
    """Whether every rank of ``comm`` calls this with the same ``text`` within about ``patience_s`` seconds.

    Collective where it returns true. Where some ranks do not call, those that do get False, and messages stay under
    way: they have to leave the job.
    """
    own = np.frombuffer(
        hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=_DIGEST_BYTES).digest(), np.uint8
    ).copy()
    verdict = np.zeros(1, np.uint8)
    # Point-to-point and polled: a collective could not be given up after a time limit.
    if comm.rank > 0:
        requests = [comm.isend(own, 0, _AGREEMENT_TAG), comm.irecv(verdict, 0, _AGREEMENT_TAG)]
        return _all_complete(requests, patience_s + _SLACK_S) and bool(verdict[0])
    digests = np.zeros((comm.size, _DIGEST_BYTES), np.uint8)
    digests[0] = own
    others = range(1, comm.size)
    heard = _all_complete([comm.irecv(digests[rank], rank, _AGREEMENT_TAG) for rank in others], patience_s)
    verdict[0] = heard and bool((digests == own).all())
    answers = [comm.isend(verdict, rank, _AGREEMENT_TAG) for rank in others]
    return bool(verdict[0]) and _all_complete(answers, _SLACK_S)


def barrier_with_deadline(comm: Communicator, what: str, patience_s: float) -> None:
    """Wait until every rank of ``comm`` has called this. Collective; all messages go to rank 0, so not for each step.

    ``what`` names the call in the error. Raises DeadlineError, which names the ranks that have not come, on those that
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
