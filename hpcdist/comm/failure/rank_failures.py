"""Rank failures: detection of failed ranks, and agreement with a time limit."""

import hashlib
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any, Final, TypeVar

import numpy as np

from hpcdist.comm.communicator import Communicator
from hpcdist.comm.transport import LARGEST_TAG, Request
from hpcdist.errors import DeadlineError, RankDiedError

Result = TypeVar("Result")


DETECTION_PATIENCE_S: Final = 1.0  # a connection may break before the MPI library detects the failure (empirical)
_POLL_S: Final = 1e-3
_UNUSED_TAG: Final = LARGEST_TAG - 1  # a tag without messages


def is_rank_failure(
    error: BaseException, comm: Communicator | None = None, patience_s: float = DETECTION_PATIENCE_S
) -> bool:
    """Return True if a rank failure caused ``error``. Waits up to ``patience_s`` seconds for MPI to report it."""
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
_AGREEMENT_TAG: Final = LARGEST_TAG
_BARRIER_TAG: Final = LARGEST_TAG - 1
_DIGEST_BYTES: Final = 16


def all_agree(comm: Communicator, text: str, patience_s: float = AGREEMENT_PATIENCE_S) -> bool:
    """Return True if all ranks pass the same ``text`` within ``patience_s`` seconds. Do not use ``comm`` afterwards."""
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
    """Wait for all ranks. Raises DeadlineError, which names ``operation``, after ``patience_s`` seconds. Collective."""
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
