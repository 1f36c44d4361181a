"""Entry points of `hpcdist train` (`train`), and of processes added to an elastic job (`join`).

`membership` starts added processes as ``python -m``. They import their modules before they join waiting ranks.
"""

import sys
from pathlib import Path

from hpcdist.checkpoint.lock import RunLock
from hpcdist.comm.failure import failfast
from hpcdist.comm.failure.rank_failures import is_rank_failure
from hpcdist.comm.launch import standard_streams
from hpcdist.comm.start import end_alone, start, start_joined
from hpcdist.errors import MissingCapabilityError
from hpcdist.training import run_directory
from hpcdist.training.build.state_source import CheckpointSource
from hpcdist.training.recipe.recipe import Recipe
from hpcdist.training.run import elastic_job, membership
from hpcdist.training.run.job import TrainingJob
from hpcdist.training.run.stop_requests import StopRequests


def train(
    recipe: Recipe,
    out: Path | None,
    resume: str,
    as_json: bool,
    limit_s: float | None = None,
    is_verbose: bool = False,
) -> None:
    """Train ``recipe`` on all ranks of the launcher, then exit with the same code on all ranks. Collective.

    ``out``: run directory, or None to choose a name. ``resume``: "auto" or "never". ``as_json``: print the summary as
    JSON. ``limit_s``: seconds until the run saves and stops, or None. The run also stops before its Slurm job ends.
    """
    # Under `hpcdist run --survive`, the run survives rank failures.
    standard_streams.tolerate()
    lock = RunLock()
    stop_requests = StopRequests.listening(limit_s, lock.release, failfast.note_end)
    mode, spares = membership.mode_of()
    if mode:
        recipe.check_world(0, **{"--survive": mode, "--spares": spares})
    communication = recipe.communication
    session = start(recipe.run.device, communication.ranks_per_node or None, communication.checked)
    if mode and not session.comm.supports("ulfm"):
        raise MissingCapabilityError(
            f"this MPI library ({session.library}) ends the job when a rank dies; use an Open MPI with ULFM and "
            "`hpcdist run --survive`, or `hpcdist run --restarts N`, which restarts the job from its newest checkpoint"
        )
    survived = membership.Membership.begin(session.comm, mode, spares) if mode else None
    run = run_directory.prepare_run_directory(session.comm, recipe, out, resume, lock)
    job = TrainingJob(recipe, run, stop_requests, lock, as_json, is_verbose=is_verbose)
    origin = None if run.resume_from is None else CheckpointSource(run.resume_from)
    if survived is None:
        session.leave(job.train(session, recipe, origin))
    else:
        elastic_job.ElasticJob(job, session, survived).run(origin)


def join() -> int:
    """Join the running job that started this process, and train to the end. Collective over all new processes."""
    import hpcdist.training.data.prefetch  # noqa: F401

    stop_requests = StopRequests()
    stop_requests.listen()
    session = start_joined()
    try:
        mine, change, description = membership.join(session.comm)
    except Exception as error:
        if is_rank_failure(error, session.comm):
            end_alone(error)  # the ranks that started it recover, and start other processes
        raise
    stop_requests.ends = description["ends"]
    job = TrainingJob(
        description["recipe"],
        description["run"],
        stop_requests,
        RunLock(),
        description["as_json"],
        description["holder"],
        description["lives"],
    )
    elastic_job.ElasticJob(job, session, mine, description["life"], change).run()
    return 0


if __name__ == "__main__":
    sys.exit(failfast.guarded(join))
