"""Joining process of an elastic job: trains in the place of a dead rank, or as one more.

Started by `membership` as ``python -m``. It imports what it needs before it joins the others, who wait for it.
"""

import sys

import hpcdist.training.data.prefetch  # noqa: F401
from hpcdist.checkpoint.lock import RunLock
from hpcdist.comm.failure import failfast
from hpcdist.comm.failure.rank_failures import is_rank_failure
from hpcdist.comm.start import end_alone, start_joined
from hpcdist.training.elastic import membership
from hpcdist.training.elastic.job import ElasticJob
from hpcdist.training.run.job import TrainingJob
from hpcdist.training.run.stop_requests import StopRequests


def main() -> int:
    """Join the job that started this process, and train with it to its end. Collective with all that join."""
    stop_requests = StopRequests()
    stop_requests.listen()
    session = start_joined()
    try:
        mine, change, description = membership.join(session.comm)
    except Exception as error:
        if is_rank_failure(error, session.comm):
            end_alone(error)  # the ranks that started it meet again, and start other processes
        raise
    stop_requests.end_at(description["ends"])
    job = TrainingJob(
        description["recipe"],
        description["run"],
        stop_requests,
        RunLock(),
        description["as_json"],
        description["holder"],
        description["lives"],
    )
    ElasticJob(job, session, mine, description["life"], change).run()
    return 0


if __name__ == "__main__":
    sys.exit(failfast.guarded(main))
