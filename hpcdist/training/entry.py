"""Where the processes of a job begin: the ranks that a launcher started, and those that come later for dead ones."""

import os
import time
from pathlib import Path

from hpcdist.checkpoint.lock import RunLock
from hpcdist.comm.failure import failfast
from hpcdist.comm.launch import standard_streams
from hpcdist.comm.start import start
from hpcdist.training import combinations, directory, lives, team
from hpcdist.training.job import Job
from hpcdist.training.origin import Stored
from hpcdist.training.pace import end_of_job
from hpcdist.training.recipe import Recipe
from hpcdist.training.survival import StopWishes


def train(recipe: Recipe, out: Path | None, resume: str, as_json: bool, limit_s: float | None = None) -> None:
    """Train ``recipe`` on all ranks that the launcher started, and leave with the agreed exit code. Collective.

    Before ``limit_s`` seconds are over, or the job is by Slurm's word, the run is saved and stops. A job that `hpcdist
    run --survive` started goes on when ranks die.
    """
    standard_streams.tolerate()
    wishes = StopWishes(ends=end_of_job(limit_s, time.time(), os.environ))
    wishes.listen()
    lock = RunLock()
    wishes.starts(lock.release, failfast.note_end)  # a signal before the end of the first step finds nothing to save
    mode, spares = team.mode_of()
    if mode:
        combinations.refuse_beside_survival(recipe, mode, spares)
    communication = recipe.communication
    session = start(recipe.run.device, communication.ranks_per_node or None, communication.checked)
    survived = lives.begin(session, mode, spares) if mode else None
    run = directory.prepare(session.comm, recipe, out, resume, lock)
    job = Job(recipe, run, wishes, lock, as_json)
    origin = None if run.resume_from is None else Stored(run.resume_from)
    if survived is None:
        session.leave(job.train(session, recipe, origin))
    else:
        lives.Lives(job, session, survived).run(origin)
