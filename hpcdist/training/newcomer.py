"""A process that comes to train in the place of a dead rank, or as one more: started by `hpcdist.training.team`.

What it imports, it imports before it joins the others, who wait for it.
"""

import sys

import hpcdist.training.data.prefetch  # noqa: F401
from hpcdist.checkpoint.lock import RunLock
from hpcdist.comm.failure import failfast
from hpcdist.comm.failure.rank_failures import is_rank_failure
from hpcdist.comm.start import end_alone, start_joined
from hpcdist.training import team
from hpcdist.training.job import Job
from hpcdist.training.lives import Lives
from hpcdist.training.survival import StopWishes


def main() -> int:
    """Join the job that started this process, and train with it to its end. Collective with all other newcomers."""
    wishes = StopWishes()
    wishes.listen()
    session = start_joined()
    try:
        mine, change, told = team.join(session.comm)
    except Exception as error:
        if is_rank_failure(error, session.comm):
            end_alone(error)  # who started it meets again, and starts others
        raise
    wishes.ends = told["ends"]
    job = Job(told["recipe"], told["run"], wishes, RunLock(), told["as_json"], told["holder"], told["lives"])
    Lives(job, session, mine, told["life"], change).run()
    return 0


if __name__ == "__main__":
    sys.exit(failfast.guarded(main))
