"""What the launcher says of this process: from the environment alone, before (or without) MPI.

Read for the choice of a GPU, which must precede MPI_Init, and to notice a run that fell apart into singletons.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Announced:
    """Size of the world and place in it, as the launcher announced them; None where it says nothing."""

    launcher: str
    size: int
    rank: int | None
    local_rank: int | None


# (launcher, size, rank, local rank). Open MPI and PMI first: under mpirun in sbatch, SLURM_* describe the batch step.
_VARIABLES = (
    ("Open MPI mpirun", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK"),
    ("MPICH mpirun", "PMI_SIZE", "PMI_RANK", "MPI_LOCALRANKID"),
    ("MVAPICH2", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_LOCAL_RANK"),
    ("PALS mpiexec", "PALS_SIZE", "PALS_RANKID", "PALS_LOCAL_RANKID"),
    ("Flux", "FLUX_JOB_SIZE", "FLUX_TASK_RANK", "FLUX_TASK_LOCAL_ID"),
    ("Slurm srun", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_LOCALID"),
)


def announced(environment: Mapping[str, str] = os.environ) -> Announced | None:
    """Return what the launcher announced, or None when this process was started by hand.

    SLURM_* count only inside a step that srun launched: the batch script itself also sees them.
    """
    for launcher, size, rank, local_rank in _VARIABLES:
        if launcher == "Slurm srun" and not _inside_srun(environment):
            continue
        if size in environment:
            return Announced(
                launcher,
                int(environment[size]),
                _integer(environment.get(rank)),
                _integer(environment.get(local_rank) or environment.get("PMI_LOCAL_RANK")),
            )
    return None


def _inside_srun(environment: Mapping[str, str]) -> bool:
    # srun gives its step a number; in the batch script SLURM_STEP_ID is absent or names the batch step.
    step = environment.get("SLURM_STEP_ID", environment.get("SLURM_STEPID", ""))
    return step.isdigit() and int(step) < 0xFFFFFFF0 and "SLURM_PROCID" in environment


def _integer(text: str | None) -> int | None:
    return int(text) if text and text.isdigit() else None
