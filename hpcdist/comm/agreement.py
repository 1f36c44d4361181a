"""Agreement without waiting for ever: whether all ranks fail alike, and who of them has not come.

Where all ranks fail alike, the job has one failure, not one for each rank.

A recipe that does not fit, data that is not there: every rank finds out, by itself or because they agreed. But a rank
that has failed cannot know whether the others have, or wait for it in a collective for ever; so it asks, and does not
ask for long.
"""

import hashlib
import time
from collections.abc import Sequence
from typing import Final

import numpy as np

from hpcdist.comm.communicator import Communicator, Request
from hpcdist.errors import DeadlineError

PATIENCE_S: Final = 2.0  # ranks that fail alike do so within milliseconds; this is for loaded machines
_SLACK_S: Final = 0.5  # of the others, for the answer of rank 0
_PAUSE_S: Final = 1e-3
_TAG: Final = 32767  # the largest that every MPI has: nobody counts up to it
_MEETING_TAG: Final = 32766
_DIGEST_BYTES: Final = 16


def all_say(comm: Communicator, text: str, patience_s: float = PATIENCE_S) -> bool:
    """Whether every rank of ``comm`` calls this with the same ``text`` within about ``patience_s`` seconds.

    Collective where it is true. Where some do not come, those that do get False, and messages stay under way: they have
    to leave.
    """
    own = np.frombuffer(hashlib.blake2b(text.encode(), digest_size=_DIGEST_BYTES).digest(), np.uint8).copy()
    verdict = np.zeros(1, np.uint8)
    if comm.rank > 0:
        requests = [comm.isend(own, 0, _TAG), comm.irecv(verdict, 0, _TAG)]
        return _complete(requests, patience_s + _SLACK_S) and bool(verdict[0])
    said = np.zeros((comm.size, _DIGEST_BYTES), np.uint8)
    said[0] = own
    others = range(1, comm.size)
    heard = _complete([comm.irecv(said[rank], rank, _TAG) for rank in others], patience_s)
    verdict[0] = heard and bool((said == own).all())
    answers = [comm.isend(verdict, rank, _TAG) for rank in others]
    return bool(verdict[0]) and _complete(answers, _SLACK_S)


def meet(comm: Communicator, what: str, patience_s: float) -> None:
    """Wait until every rank of ``comm`` has called this. Collective; for what is seldom done.

    ``what`` names the call for a person. Raises DeadlineError, which names the ranks that have not come, on those that
    have waited for ``patience_s`` seconds; messages stay under way then, and the job has to end.
    """
    here, absent = np.zeros(1, np.uint8), np.zeros(comm.size, np.uint8)
    others = range(1, comm.size)
    if comm.rank > 0:
        requests = [comm.isend(here, 0, _MEETING_TAG), comm.irecv(absent, 0, _MEETING_TAG)]
        if not _complete(requests, patience_s + _SLACK_S):
            absent[0] = 1
    else:
        calls = [comm.irecv(np.zeros(1, np.uint8), rank, _MEETING_TAG) for rank in others]
        if not _complete(calls, patience_s):
            absent[1:] = [not call.test() for call in calls]
        answers = [comm.isend(absent, rank, _MEETING_TAG) for rank in others if not absent[rank]]
        _complete(answers, _SLACK_S)
    if absent.any():
        missing = np.flatnonzero(absent).tolist()
        named = f"{'rank' if len(missing) == 1 else 'ranks'} {', '.join(map(str, missing[:8]))}"
        more = f" and {len(missing) - 8} more" if len(missing) > 8 else ""
        raise DeadlineError(
            f"{what} is collective: rank {comm.rank} of {comm.name} has waited {patience_s:g} s, and {named}{more} did "
            "not come; every rank must call it"
        )


def _complete(requests: Sequence[Request], patience_s: float) -> bool:
    """Wait until all ``requests`` are complete; False where that takes longer."""
    limit = time.monotonic() + patience_s
    while not all(request.test() for request in requests):
        if time.monotonic() > limit:
            return False
        time.sleep(_PAUSE_S)
    return True
