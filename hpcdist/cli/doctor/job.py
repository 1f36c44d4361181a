"""`hpcdist doctor --job`: the ranks of a batch job check their nodes before the training starts. Needs MPI."""

import math
import os
import socket
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final

from hpcdist.checkpoint.lock import LOCK_FILE
from hpcdist.comm import start
from hpcdist.comm.doctor import binding_checks, facts, gather, job_checks, mpi_library
from hpcdist.comm.doctor.mpi_library import FAIL, OK, WARN, Check
from hpcdist.comm.failure import failfast
from hpcdist.comm.launch import environment as launch_environment
from hpcdist.errors import FAILURE, ConfigurationError, HpcdistError

if TYPE_CHECKING:
    from hpcdist.comm.doctor.facts import SchedulerRequest, Volume
    from hpcdist.comm.start import Session

REPORTING_S: Final = 180.0  # time limit for rank 0, which may query a busy scheduler
UNLIMITED_S: Final = 366 * 86400.0  # Slurm gives a far-away end time to jobs without a limit
# Prefix of temporary lock files. The training must not take the file of a killed rank for the lock of another run.
DOCTOR_PREFIX: Final = f"{LOCK_FILE}.doctor"


def examine(out: Path | None, device: str, recipe: Path | None, show: Callable[..., int]) -> int:
    """Check the nodes of this job. Return the same exit code on all ranks. Collective over all ranks of the job.

    ``out``: run directory to check. ``device``: "cpu", "gpu" or "". ``recipe``: recipe to check for missing packages.
    ``show(checks)`` prints the result on rank 0, and returns the exit code.
    """
    launched = launch_environment.launch_environment()
    gpus = facts.gpu_facts(launched, device)
    try:
        session = start.start(check_local_ranks=False)
    except HpcdistError as error:
        if launched is None or not launched.rank:
            show([_world_failure(launched, error)])
        failfast.agreed_exit(FAILURE)  # every rank fails alike, or this rank is alone
    comm, directory = session.comm, (out or Path()).absolute()
    deadline = gather.StageDeadline(f"rank {comm.rank} on {socket.gethostname()}")
    gathered = gather.gather(
        comm,
        facts.rank_facts(launched, gpus),
        lambda: facts.node_facts(mpi_library.short_version(session.library), _volumes(directory)),
        directory,
        deadline.stage,
        DOCTOR_PREFIX,
    )
    deadline.stage("waiting for the report of rank 0", REPORTING_S)
    code = 0
    if gathered is not None:
        requested = facts.scheduler_request(launched)
        checks = [
            _world(session, launched),
            _walltime(requested.scheduler),
            *_checks(gathered, requested, device, directory),
        ]
        if recipe is not None:
            checks.append(_packages(recipe))
        code = show(checks, ranks=comm.size, nodes=gathered.table.labels)
    code = comm.broadcast_object(code)
    deadline.stop()
    session.leave(code)
    return code


def _checks(gathered: gather.Gathered, requested: "SchedulerRequest", device: str, directory: Path) -> list[Check]:
    table = gathered.table
    return [
        job_checks.check_size(table, requested),
        job_checks.check_messages(table),
        binding_checks.check_local_ranks(table),
        binding_checks.check_gpus(table, device, requested.holds_gpus),
        binding_checks.check_cores(table, requested.scheduler),
        job_checks.check_clocks(table, gathered.offsets),
        job_checks.check_directory(table, str(directory), gathered.failure),
        job_checks.check_space(table),
        job_checks.check_software(table),
        job_checks.check_processors(table),
        job_checks.check_settings(table),
    ]


def _packages(path: Path) -> Check:
    from hpcdist.training.recipe import recipe as recipes
    from hpcdist.training.recipe import requirements

    try:
        recipe = recipes.load_stored(path)
    except HpcdistError as error:
        return Check("packages", FAIL, str(error), "submit the job again")
    absent = requirements.missing_packages(recipe)
    if absent:
        return Check("packages", FAIL, "; ".join(absent), "install them where the ranks run")
    modules = sorted({need.module for need in requirements.requirements(recipe)})
    return Check("packages", OK, ", ".join(modules) or "the recipe needs no optional packages")


def _volumes(directory: Path) -> "tuple[Volume, ...]":
    return (
        _volume(job_checks.RUN_DIRECTORY, directory),
        _volume(job_checks.NODE_LOCAL, Path(os.environ.get("TMPDIR") or "/tmp")),
        _volume(job_checks.SHARED_MEMORY, Path("/dev/shm")),
    )


def _volume(role: str, path: Path) -> "Volume":
    from hpcdist.checkpoint.stripe import file_system

    try:
        kind = file_system(path).kind
    except OSError:
        kind = "unknown"  # `volume_facts` fails for the same reason, and reports the reason
    return facts.volume_facts(role, path, kind)


def _world(session: "Session", launched: launch_environment.LaunchEnvironment | None) -> Check:
    if launched is None:
        return Check("world", OK, "this process alone: it was not started by a launcher")
    text = f"announced by {launched.launcher}; {mpi_library.short_version(session.library)}"
    if session.comm.supports("thread_multiple"):
        return Check("world", OK, f"{text}, MPI_THREAD_MULTIPLE")
    return Check("world", WARN, f"{text}, below MPI_THREAD_MULTIPLE", mpi_library.WITHOUT_THREADS)


def _world_failure(
    launched: launch_environment.LaunchEnvironment | None,
    error: HpcdistError,
    environment: Mapping[str, str] = os.environ,
) -> Check:
    cure = (
        "start the job with the mpirun of the MPI that mpi4py loads: `hpcdist doctor` shows both, `hpcdist run` does it"
    )
    # With --mpi=pmi2, srun sets the same environment variables as the mpirun of MPICH.
    if launched is not None and (
        launched.launcher == "Slurm srun"
        or launch_environment.started_by_srun(launched.size, launched.rank, environment)
    ):
        kinds = facts.plugin_versions() or "nothing"
        cure = f"use srun --mpi=pmix for Open MPI, --mpi=pmi2 for MPICH (available here: {kinds}), or `hpcdist run`"
    return Check("world", FAIL, str(error), cure)


def _walltime(scheduler: str, environment: Mapping[str, str] = os.environ, now: float | None = None) -> Check:
    from hpcdist.training.run.stop_requests import JOB_END, end_of_job

    name, now = "walltime", time.time() if now is None else now
    try:
        ends = end_of_job(None, now, environment)
    except ConfigurationError as error:
        return Check(name, FAIL, str(error), f"unset {JOB_END}")
    if math.isfinite(ends):
        return Check(name, OK, _time_left(ends - now, now))
    if not scheduler:
        return Check(name, OK, "no scheduler, no limit")
    left_s = _queued_s(environment.get("SLURM_JOB_ID", ""))
    if left_s is None:
        return Check(
            name, WARN, f"{scheduler} does not report the end of the job", "set it: hpcdist train --time-limit"
        )
    alone = f"known from squeue only: {JOB_END} is not set, so set --time-limit or a warning signal for the training"
    return Check(name, OK, f"{_time_left(left_s, now)}, {alone}")


def _time_left(left_s: float, now: float) -> str:
    if left_s > UNLIMITED_S:
        return "no limit"
    minutes, seconds = divmod(max(0, int(left_s)), 60)
    at = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(now + left_s))
    return f"{minutes // 60}:{minutes % 60:02}:{seconds:02} left, until {at}"


def _queued_s(job: str) -> float | None:
    from hpcdist.batch.schedulers import slurm

    try:
        return next((state.time_left_s for state in slurm.queued([job])), None) if job else None
    except HpcdistError:
        return None
