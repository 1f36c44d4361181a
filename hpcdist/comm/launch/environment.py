"""Launcher variables of this process: size, rank and local rank before (or without) MPI.

Read from the environment alone: for the choice of a GPU, which must precede MPI_Init, and to notice a run that fell
apart into singletons.
"""

import os
import tempfile
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, replace
from typing import Final

RUN_DIR: Final = "HPCDIST_RUN_DIR"  # of the script that `hpcdist run --out` started
RESUME: Final = "HPCDIST_RESUME"  # "auto" or "never": whether that goes on from its newest checkpoint


@dataclass(frozen=True)
class LaunchEnvironment:
    """Size of the world and place in it, as the launcher announced them; None where it says nothing."""

    launcher: str
    size: int
    rank: int | None
    local_rank: int | None


_HYDRA: Final = "MPICH mpirun"
_HYDRA_LOCAL_RANK: Final = "MPI_LOCALRANKID"  # which others with PMI's variables do not set
# (launcher, size, rank, local rank). Open MPI and PMI first: under mpirun in sbatch, SLURM_* describe the batch step.
# PALS, too, has PMI's size.
_VARIABLES = (
    ("Open MPI mpirun", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK"),
    ("PALS mpiexec", "PMI_SIZE", "PALS_RANKID", "PALS_LOCAL_RANKID"),
    (_HYDRA, "PMI_SIZE", "PMI_RANK", _HYDRA_LOCAL_RANK),
    ("MVAPICH2", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_LOCAL_RANK"),
    ("Flux", "FLUX_JOB_SIZE", "FLUX_TASK_RANK", "FLUX_TASK_LOCAL_ID"),
    ("Slurm srun", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_LOCALID"),
)


def launch_environment(environment: Mapping[str, str] = os.environ) -> LaunchEnvironment | None:
    """Return what the launcher announced, or None when this process was started by hand.

    SLURM_* count only inside a step that srun launched: the batch script itself also sees them.
    """
    found = []
    for launcher, size, rank, local_rank in _VARIABLES:
        if launcher == "Slurm srun" and not inside_srun(environment):
            continue
        if size in environment and rank in environment:
            local = _integer(environment.get(local_rank) or environment.get("PMI_LOCAL_RANK"))
            found.append(LaunchEnvironment(launcher, int(environment[size]), _integer(environment[rank]), local))
    if not found:
        return None
    # srun and flux, asked for PMI, announce the world in its variables and the local rank in theirs.
    same = [other for other in found if (other.size, other.rank) == (found[0].size, found[0].rank)]
    own = found[0].launcher != _HYDRA or _HYDRA_LOCAL_RANK in environment
    launcher = found[0].launcher if own else same[-1].launcher
    local_ranks = (other.local_rank for other in same if other.local_rank is not None)
    return replace(found[0], launcher=launcher, local_rank=next(local_ranks, None))


def provide_home(environment: MutableMapping[str, str] = os.environ) -> None:
    """Set HOME where nobody has: without it Open MPI, and each program it brings, ends with an internal error (local).

    It is the home of this user, or the folder of temporary files where the system knows none (as in a container).
    """
    if "HOME" not in environment:
        known = os.path.expanduser("~")  # asks the system, since HOME is not set
        environment["HOME"] = known if os.path.isabs(known) else tempfile.gettempdir()


def started_by_srun(size: int, rank: int | None, environment: Mapping[str, str]) -> bool:
    """Whether srun started this ``rank`` of ``size`` itself, so that SLURM_LOCALID and the like are its own (local).

    It also starts daemons of mpirun, one on each node, which leave their variables to their ranks.
    """
    own = (_integer(environment.get("SLURM_STEP_NUM_TASKS")), _integer(environment.get("SLURM_PROCID")))
    return inside_srun(environment) and own == (size, rank)


def inside_srun(environment: Mapping[str, str]) -> bool:
    """Whether this process, or the daemon that started it, was started by srun (local)."""
    # srun gives its step a number; in the batch script SLURM_STEP_ID is absent or names the batch step.
    step = environment.get("SLURM_STEP_ID", environment.get("SLURM_STEPID", ""))
    return step.isdigit() and int(step) < 0xFFFFFFF0 and "SLURM_PROCID" in environment


def _integer(text: str | None) -> int | None:
    return int(text) if text and text.isdigit() else None
