"""Rank failures: fault-tolerant communicators (ULFM), detection of failed ranks, and agreement with a time limit."""

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
    """Base class of `endpoint.Endpoint` with methods for rank failures, documented in `communicator.Communicator`."""

    name: str
    declared_node: int | None

    def __init__(self) -> None:
        super().__init__()
        # All communicators derived from this one (split, dup, nodes), at any depth. They are revoked together, because
        # ULFM revokes only one, and a rank may wait in any. Weak references, so that unused communicators are freed.
        self._descendants: weakref.WeakSet[FaultTolerant] = weakref.WeakSet()
        self._registries = [self._descendants]  # sets to enter descendants in: this set, and the sets of the ancestors
        self._revoked: set[FaultTolerant] = set()  # descendants to free: strong references until `abandon`

    def _recorded(
        self, op: str, function: Callable[..., Result], *arguments: Any, count: int = 0, peer: int = -1
    ) -> Result:
        token = self.events.begin(self.name, op, "uint8", count, UNKNOWN_BYTES, peer, 0)
        result = function(*arguments)
        self.events.end(token)
        return result

    def _passed_on(self, made: Made) -> Made:
        made.observe_like(self)
        return made

    def _adopt(self, child: "FaultTolerant") -> None:
        child._registries += self._registries
        with _descendants_lock:
            for registry in self._registries:
                registry.add(child)

    def _take_descendants(self) -> list["FaultTolerant"]:
        with _descendants_lock:  # a progress thread may create communicators
            return list(self._descendants)

    def revoke(self) -> None:
        self._check_survivable("revoke")
        self._revoked.update(self._take_descendants())
        for descendant in self._revoked:
            descendant._revoke()
        self._revoke()

    def agree(self, flag: bool) -> bool:
        self._check_survivable("agree")
        return self._recorded("agree", self._agree, flag)

    def shrink(self, label: str = "world") -> Self:
        self._check_survivable("shrink")
        return self._passed_on(self._recorded("shrink", self._shrink, label))

    def grow(self, count: int, arguments: Sequence[str], environment: Mapping[str, str], label: str) -> Self:
        """Return a communicator, named ``label``, of these ranks and ``count`` new Python processes. Collective."""
        self._check_survivable("grow")
        return self._passed_on(self._recorded("grow", self._grow, count, arguments, environment, label))

    def abandon(self) -> None:
        to_free = {*self._take_descendants(), *self._revoked, self}
        self._revoked.clear()
        for communicator in to_free:
            communicator.settled.clear()
            with contextlib.suppress(Exception):
                communicator._abandon()

    def _check_survivable(self, operation: str) -> None:
        if not self.supports("ulfm"):
            raise MissingCapabilityError(
                f"{operation}() on {self.name} needs the fault tolerance of MPI (ULFM), which is off; start the job by "
                "Open MPI's `mpirun --with-ft ulfm`, or let the job end and start the job again"
            )

    @abstractmethod
    def supports(self, feature: str) -> bool:
        """Return True if the transport supports ``feature``, such as "ulfm" (operations after rank failures)."""

    @abstractmethod
    def _revoke(self) -> None: ...
    @abstractmethod
    def failed(self) -> tuple[int, ...]: ...

    @abstractmethod
    def _agree(self, flag: bool) -> bool: ...
    @abstractmethod
    def _shrink(self, name: str) -> Self: ...
    @abstractmethod
    def _grow(self, count: int, arguments: Sequence[str], environment: Mapping[str, str], name: str) -> Self: ...
    @abstractmethod
    def _abandon(self) -> None: ...


DETECTION_PATIENCE_S: Final = 1.0  # a connection may break before the MPI library detects the failure (empirical)
_POLL_S: Final = 1e-3
_UNUSED_TAG: Final = 32766  # a tag without messages


def is_rank_failure(
    error: BaseException, comm: Communicator | None = None, patience_s: float = DETECTION_PATIENCE_S
) -> bool:
    """Return True if ``error`` was caused by a dead rank or by a revoked communicator. Local.

    If ``comm`` is passed, any MPI error counts if a rank of ``comm`` is dead.
    """
    # KeyboardInterrupt never counts.
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
    # The detection of a dead rank may take up to `patience_s` seconds.
    return of_mpi and comm is not None and comm.supports("ulfm") and _has_failed(comm, patience_s)


def _error_chain(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    front: list[BaseException | None] = [error]
    while front:
        current = front.pop()
        if current is not None and id(current) not in seen:
            seen.add(id(current))
            yield current
            front += [current.__context__, current.__cause__]


def _mpi() -> Any:
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


AGREEMENT_PATIENCE_S: Final = 2.0  # ranks that fail alike do so within milliseconds; longer for loaded machines
_SLACK_S: Final = 0.5  # added to the wait of the other ranks for rank 0's answer
_PAUSE_S: Final = 1e-3
_AGREEMENT_TAG: Final = 32767  # the largest tag that every MPI guarantees (MPI_TAG_UB)
_BARRIER_TAG: Final = 32766
_DIGEST_BYTES: Final = 16


def all_agree(comm: Communicator, text: str, patience_s: float = AGREEMENT_PATIENCE_S) -> bool:
    """Return True if every rank of ``comm`` calls this with the same ``text`` within about ``patience_s`` seconds.

    Do not use ``comm`` afterwards.
    """
    local_digest = np.frombuffer(
        hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=_DIGEST_BYTES).digest(), np.uint8
    ).copy()
    # If some ranks do not call this function, their messages remain outstanding, and the other ranks get False.
    verdict = np.zeros(1, np.uint8)
    # Point-to-point and polled, because a collective cannot be given up after a time limit.
    if comm.rank > 0:
        requests = [comm.isend(local_digest, 0, _AGREEMENT_TAG), comm.irecv(verdict, 0, _AGREEMENT_TAG)]
        return _all_complete(requests, patience_s + _SLACK_S) and bool(verdict[0])
    digests = np.zeros((comm.size, _DIGEST_BYTES), np.uint8)
    digests[0] = local_digest
    others = range(1, comm.size)
    heard = _all_complete([comm.irecv(digests[rank], rank, _AGREEMENT_TAG) for rank in others], patience_s)
    verdict[0] = heard and bool((digests == local_digest).all())
    answers = [comm.isend(verdict, rank, _AGREEMENT_TAG) for rank in others]
    return bool(verdict[0]) and _all_complete(answers, _SLACK_S)


def barrier_with_deadline(comm: Communicator, operation: str, patience_s: float) -> None:
    """Wait until every rank of ``comm`` has called this. Raise DeadlineError after ``patience_s`` seconds. Collective.

    After this error, the job must end.
    """
    # All ranks send to rank 0, which is slow but shows the missing ranks.
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
        missing_ranks = f"{'rank' if len(missing) == 1 else 'ranks'} {', '.join(map(str, missing[:8]))}"
        missing_ranks += f" and {len(missing) - 8} more" if len(missing) > 8 else ""
        raise DeadlineError(
            f"{operation} is collective: rank {comm.rank} of {comm.name} has waited {patience_s:g} s, and "
            f"{missing_ranks} did not call {operation}; every rank must call {operation}"
        )


def _all_complete(requests: Sequence[Request], patience_s: float) -> bool:
    limit = time.monotonic() + patience_s
    while not all(request.test() for request in requests):
        if time.monotonic() > limit:
            return False
        time.sleep(_PAUSE_S)
    return True
