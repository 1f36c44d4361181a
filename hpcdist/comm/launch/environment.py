"""Environment of a rank: launcher variables, the Python to run on ranks, and the processes of this host.

`launch_environment` reads size, rank and local rank from the environment, before (or without) MPI: for the choice of a
GPU, which must precede MPI_Init, and to notice a run that fell apart into singletons. `interpreter_words` and
`python_path_variables` say how ranks start Python and find hpcdist. The rest reads /proc: boot id, process tree and
variables of processes.
"""

import os
import shlex
import signal
import sys
import sysconfig
import tempfile
from collections.abc import Mapping, MutableMapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import hpcdist
from hpcdist.errors import ConfigurationError, UsageError

BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")


def boot_id() -> str:
    """Return the boot id of the running kernel, the same for all of its processes, also in containers (local).

    It changes with a reboot; where the kernel has none, it is the name of the machine.
    """
    try:
        return BOOT_ID.read_text().strip()
    except OSError:
        return os.uname().nodename


def process_fields(pid: int) -> list[str]:
    """Return the fields of a process from its state on (field 3 of proc(5)). Raises OSError, also where it has gone."""
    # "pid (name) state ppid ...": the name may hold anything, what follows the last bracket is regular.
    return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()


def descendants(pid: int) -> list[int]:
    """Return the living descendants of process ``pid``."""
    children: dict[int, list[int]] = {}
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            try:
                state, parent = process_fields(int(entry.name))[:2]
            except OSError:
                continue  # it has just ended
            if state != "Z":
                children.setdefault(int(parent), []).append(int(entry.name))
    pids, front = [], [pid]
    while front:
        front = [child for parent in front for child in children.get(parent, ())]
        pids += front
    return pids


def send_signal(pid: int, number: signal.Signals) -> None:
    """Send a signal to ``pid``, unless it has ended."""
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def is_stopped(pid: int) -> bool:
    """Whether ``pid`` is stopped (SIGSTOP, SIGTSTP), other than by a debugger."""
    try:
        return process_fields(pid)[0] == "T"
    except OSError:
        return False


def environment_of(pid: int) -> dict[str, str]:
    """Return the variables that ``pid`` was started with; empty where it has ended or is another user's."""
    try:
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return {}
    return {
        os.fsdecode(name): os.fsdecode(value) for name, _, value in (variable.partition(b"=") for variable in variables)
    }


def parent_of(pid: int) -> int:
    """Return the parent of ``pid``, 0 where it has ended."""
    try:
        return int(process_fields(pid)[1])
    except OSError:
        return 0


def launcher_options(text: str) -> list[str]:
    """Return the options in ``text``, which is quoted as for a shell. Raises UsageError."""
    return _split_words("--mpi-args", text, "-x NAME")


def _split_words(option: str, text: str, example: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise UsageError(f"{option} {text!r}: {error}; quote it as for a shell, e.g. {option} '{example}'") from error


def interpreter_words(python: str | None) -> list[str]:
    """Return the command words that run Python on the ranks: ``python``, by default this one. Raises UsageError."""
    chosen = [sys.executable] if python is None else _split_words("--python", python, "apptainer exec my.sif python3")
    if not chosen:
        raise UsageError("--python is empty; name what runs Python on the ranks, e.g. --python /local/env/bin/python")
    return chosen


def source_folder() -> str | None:
    """Return the folder that contains hpcdist, e.g. a clone; None where it is installed in this Python."""
    home = str(Path(hpcdist.__file__).resolve().parents[1])
    installed = {str(Path(sysconfig.get_path(kind)).resolve()) for kind in ("purelib", "platlib")}
    return None if home in installed else home


def python_path_variables() -> dict[str, str]:
    """Return the variables that ranks need to import the same hpcdist as this process."""
    home, rest = source_folder(), os.environ.get("PYTHONPATH")
    if home is None:
        return {}
    return {"PYTHONPATH": os.pathsep.join([home, rest] if rest else [home])}


RUN_DIR: Final = "HPCDIST_RUN_DIR"  # run directory of a script that `hpcdist run --out` started
RESUME: Final = "HPCDIST_RESUME"  # "auto" or "never": whether that script resumes from its newest checkpoint
ENERGY: Final = "HPCDIST_ENERGY"  # "1": a script over the backend hpcdist of PyTorch counts its joules, and prints them


@dataclass(frozen=True)
class LaunchEnvironment:
    """World size, rank and local rank as the launcher announced them; None where it announces none."""

    launcher: str
    size: int
    rank: int | None
    local_rank: int | None


_LAUNCHERS: Final = ("SLURM", "SRUN_", "PMI", "OMPI_COMM_", "MPI_LOCAL", "MV2_COMM_", "PALS_", "FLUX_")
_HYDRA: Final = "MPICH mpirun"
_HYDRA_LOCAL_RANK: Final = "MPI_LOCALRANKID"  # other launchers with PMI's variables do not set it
# (launcher, size, rank, local rank). Open MPI and PMI first: under mpirun in sbatch, SLURM_* describe the batch step.
# PALS also sets PMI_SIZE.
_VARIABLES = (
    ("Open MPI mpirun", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK"),
    ("PALS mpiexec", "PMI_SIZE", "PALS_RANKID", "PALS_LOCAL_RANKID"),
    (_HYDRA, "PMI_SIZE", "PMI_RANK", _HYDRA_LOCAL_RANK),
    ("MVAPICH2", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_LOCAL_RANK"),
    ("Flux", "FLUX_JOB_SIZE", "FLUX_TASK_RANK", "FLUX_TASK_LOCAL_ID"),
    ("Slurm srun", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_LOCALID"),
)


def launch_environment(environment: Mapping[str, str] = os.environ) -> LaunchEnvironment | None:
    """Return size and ranks as the launcher announced them, or None when this process was started by hand.

    SLURM_* count only inside a step that srun launched: the batch script itself also sees them. Raises
    ConfigurationError if the announced size is not a number.
    """
    announced = []
    for launcher, size, rank, local_rank in _VARIABLES:
        if launcher == "Slurm srun" and not inside_srun(environment):
            continue
        if environment.get(size) and environment.get(rank):
            ranks = integer_variable(environment, size)
            if ranks is None:
                raise ConfigurationError(f"{size}={environment[size]!r}; expected a whole number: unset it")
            local = integer_variable(environment, local_rank if environment.get(local_rank) else "PMI_LOCAL_RANK")
            announced.append(LaunchEnvironment(launcher, ranks, integer_variable(environment, rank), local))
    if not announced:
        return None
    # srun and flux with PMI announce the world in PMI's variables and the local rank in their own.
    same = [other for other in announced if (other.size, other.rank) == (announced[0].size, announced[0].rank)]
    own = announced[0].launcher != _HYDRA or _HYDRA_LOCAL_RANK in environment
    launcher = announced[0].launcher if own else same[-1].launcher
    local_ranks = (other.local_rank for other in same if other.local_rank is not None)
    return replace(announced[0], launcher=launcher, local_rank=next(local_ranks, None))


def provide_home(environment: MutableMapping[str, str] = os.environ) -> None:
    """Set HOME if it is unset: without it Open MPI and its programs fail with an internal error (local).

    The value is the home of this user, or the temporary folder where the system knows none (as in a container).
    """
    if "HOME" not in environment:
        known = os.path.expanduser("~")  # from the user database, since HOME is not set
        environment["HOME"] = known if os.path.isabs(known) else tempfile.gettempdir()


def drop_empty(environment: MutableMapping[str, str] = os.environ) -> None:
    """Remove the empty variables of Slurm, PMI and MPI launchers: an empty variable counts as unset (local).

    mpirun of Open MPI fails with code 250 if SLURM_CPUS_PER_TASK is empty.
    """
    for name in [name for name, value in environment.items() if not value and name.startswith(_LAUNCHERS)]:
        del environment[name]


def started_by_srun(size: int, rank: int | None, environment: Mapping[str, str]) -> bool:
    """Whether srun itself started this ``rank`` of ``size``, so that SLURM_LOCALID and the like are its own (local).

    srun also starts the daemons of mpirun, one on each node, whose variables their ranks inherit.
    """
    own = (integer_variable(environment, "SLURM_STEP_NUM_TASKS"), integer_variable(environment, "SLURM_PROCID"))
    return inside_srun(environment) and own == (size, rank)


def inside_srun(environment: Mapping[str, str]) -> bool:
    """Whether this process, or the daemon that started it, was started by srun (local)."""
    # srun gives its step a number; in the batch script SLURM_STEP_ID is absent or names the batch step.
    step = environment.get("SLURM_STEP_ID", environment.get("SLURM_STEPID", ""))
    return step.isdigit() and int(step) < 0xFFFFFFF0 and "SLURM_PROCID" in environment


def integer_variable(environment: Mapping[str, str], name: str) -> int | None:
    """Return the whole number in a variable, None where it has none."""
    text = environment.get(name, "")
    return int(text) if text.isascii() and text.isdigit() else None
