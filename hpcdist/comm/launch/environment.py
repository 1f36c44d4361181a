"""Environment of a rank: launcher variables, the Python to run on ranks, processes of this host, and TCP sockets.

Launcher variables are read before MPI starts, to choose a GPU and to detect a run that fell apart into singletons.
Listening sockets are listed and restricted to the loopback interface; Linux only.
"""

import ipaddress
import os
import shlex
import signal
import socket
import sys
import sysconfig
import tempfile
from collections.abc import Mapping, MutableMapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import hpcdist
from hpcdist.comm.launch.exit_file import SURVIVE
from hpcdist.errors import ConfigurationError, UsageError

BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")


def boot_id() -> str:
    """Return the kernel's boot id (equal for all processes of the machine), or else the host name. Local."""
    try:
        return BOOT_ID.read_text().strip()
    except OSError:
        return os.uname().nodename


def process_fields(pid: int) -> list[str]:
    """Return the list of fields of /proc/``pid``/stat from field 3 (state) on. Raises OSError for an ended process."""
    # "pid (name) state ppid ...": the name may contain anything, so split after the last bracket.
    return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()


def descendants(pid: int) -> list[int]:
    """Return the process ids of the living descendants of process ``pid``."""
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
    """Send the signal ``number`` to the process with id ``pid``, unless it has ended."""
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def is_stopped(pid: int) -> bool:
    """Return True if process ``pid`` is stopped by a signal (SIGSTOP, SIGTSTP), not by a debugger."""
    try:
        return process_fields(pid)[0] == "T"
    except OSError:
        return False


def environment_of(pid: int) -> dict[str, str]:
    """Return the start environment of process ``pid``, or {} if the process has ended or is another user's."""
    try:
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return {}
    return {
        os.fsdecode(name): os.fsdecode(value) for name, _, value in (variable.partition(b"=") for variable in variables)
    }


def parent_of(pid: int) -> int:
    """Return the process id of the parent of process ``pid``, or 0 if ``pid`` has ended."""
    try:
        return int(process_fields(pid)[1])
    except OSError:
        return 0


def launcher_options(text: str) -> list[str]:
    """Split ``text`` into launcher options as a shell does. Raises UsageError for unbalanced quotes."""
    return _split_words("--mpi-args", text, "-x NAME")


def _split_words(option: str, text: str, example: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise UsageError(
            f"{option} {text!r} cannot be split into words: {error}; quote as in a shell, e.g. {option} '{example}'"
        ) from error


def interpreter_words(python: str | None) -> list[str]:
    """Return the command words that start Python on the ranks. ``python``: command line, or None for this Python."""
    chosen = [sys.executable] if python is None else _split_words("--python", python, "apptainer exec my.sif python3")
    if not chosen:
        raise UsageError("--python is empty; give the Python command of the ranks, e.g. --python /local/env/bin/python")
    return chosen


def source_folder() -> str | None:
    """Return the directory that contains hpcdist, such as a git clone, or None for a package in site-packages."""
    home = str(Path(hpcdist.__file__).resolve().parents[1])
    installed = {str(Path(sysconfig.get_path(kind)).resolve()) for kind in ("purelib", "platlib")}
    return None if home in installed else home


def python_path_variables() -> dict[str, str]:
    """Return environment variables {name: value} that make ranks import the same hpcdist as this process."""
    home, rest = source_folder(), os.environ.get("PYTHONPATH")
    if home is None:
        return {}
    return {"PYTHONPATH": os.pathsep.join([home, rest] if rest else [home])}


RUN_DIR: Final = "HPCDIST_RUN_DIR"  # run directory of a script that `hpcdist run --out` started
RESUME: Final = "HPCDIST_RESUME"  # "auto" or "never": whether that script resumes from its newest checkpoint
ENERGY: Final = "HPCDIST_ENERGY"  # "1": a script with the PyTorch backend hpcdist measures and prints its energy


@dataclass(frozen=True)
class LaunchEnvironment:
    """Name of the launcher, and the world size, rank and local rank that it announced. None: not announced."""

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
    """Return the launcher's `LaunchEnvironment`, or None without a launcher. Raises ConfigurationError."""
    announced = []
    for launcher, size, rank, local_rank in _VARIABLES:
        if launcher == "Slurm srun" and not inside_srun(environment):
            continue
        if environment.get(size) and environment.get(rank):
            ranks = integer_variable(environment, size)
            if ranks is None:
                text = environment[size]
                raise ConfigurationError(f"{size}={text!r} is not a number of ranks; correct or unset {size}")
            local = integer_variable(environment, local_rank if environment.get(local_rank) else "PMI_LOCAL_RANK")
            announced.append(LaunchEnvironment(launcher, ranks, integer_variable(environment, rank), local))
    if not announced:
        return None
    # srun and flux with PMI announce the world in PMI's variables, and the local rank in their variables.
    same = [other for other in announced if (other.size, other.rank) == (announced[0].size, announced[0].rank)]
    is_reliable = announced[0].launcher != _HYDRA or _HYDRA_LOCAL_RANK in environment
    launcher = announced[0].launcher if is_reliable else same[-1].launcher
    local_ranks = (other.local_rank for other in same if other.local_rank is not None)
    return replace(announced[0], launcher=launcher, local_rank=next(local_ranks, None))


def provide_home(environment: MutableMapping[str, str] = os.environ) -> None:
    """If HOME is unset in ``environment``, set it to this user's home or a temporary directory, for Open MPI. Local."""
    if "HOME" not in environment:
        home = os.path.expanduser("~")  # from the user database, because HOME is not set
        environment["HOME"] = home if os.path.isabs(home) else tempfile.gettempdir()


def drop_empty(environment: MutableMapping[str, str] = os.environ) -> None:
    """Remove empty variables of Slurm, PMI and MPI: an empty SLURM_CPUS_PER_TASK makes mpirun fail."""
    for name in [name for name, value in environment.items() if not value and name.startswith(_LAUNCHERS)]:
        del environment[name]


def started_by_srun(size: int, rank: int | None, environment: Mapping[str, str]) -> bool:
    """Return True if srun started this process as ``rank`` of ``size`` ranks directly, not through mpirun. Local."""
    announced = (integer_variable(environment, "SLURM_STEP_NUM_TASKS"), integer_variable(environment, "SLURM_PROCID"))
    return inside_srun(environment) and announced == (size, rank)


def inside_srun(environment: Mapping[str, str]) -> bool:
    """Return True if srun started this process, directly or through mpirun's daemon. Local."""
    # srun numbers its steps; in the batch script SLURM_STEP_ID is absent or names the batch step.
    step = environment.get("SLURM_STEP_ID", environment.get("SLURM_STEPID", ""))
    return step.isdigit() and int(step) < 0xFFFFFFF0 and "SLURM_PROCID" in environment


def integer_variable(environment: Mapping[str, str], name: str) -> int | None:
    """Return the variable ``name`` as an integer, or None if it is unset or not an integer >= 0."""
    text = environment.get(name, "")
    return int(text) if text.isascii() and text.isdigit() else None


OPEN_MPI_TRANSPORTS: Final = "OMPI_MCA_btl"
UCX_TRANSPORTS: Final = "UCX_TLS"
TCP_INTERFACE: Final = "OMPI_MCA_btl_tcp_if_include"
FAULT_TOLERANCE: Final = "OMPI_MCA_mpi_ft_enable"  # in the environment of every rank started with --with-ft
_MPIRUN_SIZES: Final = (  # world size, number of ranks on this host, transports
    ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", OPEN_MPI_TRANSPORTS),
    ("PMI_SIZE", "MPI_LOCALNRANKS", UCX_TRANSPORTS),
)
_LISTENING: Final = "0A"  # TCP_LISTEN in /proc/net/tcp


def listening(pid: int | str = "self") -> dict[int, str]:
    """Return {file descriptor: "address:port"} of the listening TCP sockets of process ``pid``. Local."""
    process = Path("/proc") / str(pid)
    inodes: dict[str, str] = {}
    for table in ("tcp", "tcp6"):
        with suppress(OSError):
            for line in (process / "net" / table).read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == _LISTENING:
                    inodes[f"socket:[{fields[9]}]"] = _socket_address(fields[1])
    addresses: dict[int, str] = {}
    with suppress(OSError):
        for link in (process / "fd").iterdir():
            with suppress(OSError):  # closed meanwhile
                target = os.readlink(link)
                if target in inodes:
                    addresses[int(link.name)] = inodes[target]
    return addresses


def rank_listeners() -> list[str]:
    """Return a list of the TCP addresses on which this process listens, except the launcher's sockets. Local."""
    inherited = set(listening(os.getppid()).values())
    return [address for address in listening().values() if address not in inherited]


def _socket_address(text: str) -> str:
    host, _, port = text.partition(":")
    # /proc/net/tcp has hexadecimal words in host byte order.
    words = [bytes.fromhex(host[index : index + 8]) for index in range(0, len(host), 8)]
    address = ipaddress.ip_address(b"".join(word[::-1] if sys.byteorder == "little" else word for word in words))
    return f"[{address}]:{int(port, 16)}" if address.version == 6 else f"{address}:{int(port, 16)}"


def is_loopback(address: str) -> bool:
    """Return True if ``address``, as returned by `listening`, is on the loopback interface."""
    return ipaddress.ip_address(address.rpartition(":")[0].strip("[]")).is_loopback


def restrict_to_loopback() -> None:
    """Bind all listening sockets to ``lo`` if MPI may use TCP only on ``lo``. Needs Linux 5.7 or root. Local."""
    if os.environ.get(TCP_INTERFACE) != "lo":
        return
    for descriptor, address in listening().items():
        if not is_loopback(address):
            with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as listener:
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, b"lo\0")


def exclude_tcp(environment: MutableMapping[str, str] = os.environ) -> None:
    """Disable MPI's TCP transports in ``environment`` if a plain mpirun started all ranks on this host. Local."""
    if environment.get(SURVIVE) or FAULT_TOLERANCE in environment:
        # With fault tolerance, new ranks need TCP.
        return
    for world_size, local_size, transports in _MPIRUN_SIZES:
        if world_size in environment and environment[world_size] == environment.get(local_size):
            environment.setdefault(transports, "^tcp")


def start_ticks(pid: int) -> int:
    """Return the start time of process ``pid`` in clock ticks since boot, or 0 if it has ended. Local."""
    try:
        return process_state(pid)[1]
    except OSError:
        return 0


def has_ended(pid: int, began: int) -> bool:
    """Return True if the process ``pid`` with start time ``began`` (see `start_ticks`) has surely ended. Local."""
    try:
        return process_state(pid)[1] != began
    except OSError:
        return False


def process_state(pid: int) -> tuple[str, int]:
    """Return (state letter, start time in clock ticks since boot) of process ``pid``, or ("", 0) if it has ended."""
    try:
        fields = process_fields(pid)
    except (FileNotFoundError, ProcessLookupError):
        return "", 0
    return ("", 0) if fields[0] in "ZX" else (fields[0], int(fields[19]))
