"""Facts of a rank of a batch job about itself and its node, for comparison on rank 0. Local.

Nothing here raises, because the other ranks would wait in the next collective. Unreadable facts are unknown.
"""

import hashlib
import os
import platform
import shutil
import socket
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import hpcdist
from hpcdist.arrays.gpu import device
from hpcdist.comm import placement
from hpcdist.comm.failure import failfast
from hpcdist.comm.launch import exit_file
from hpcdist.comm.launch.core_binding import hardware_threads
from hpcdist.comm.launch.environment import LaunchEnvironment, inside_srun, integer_variable, started_by_srun
from hpcdist.constants import THREAD_VARIABLES, VISIBLE_GPUS
from hpcdist.errors import HpcdistError
from hpcdist.reporting.machine import package_version, processor
from hpcdist.reporting.units import parse_ranges

NUMA: Final = Path("/sys/devices/system/node")
PACKAGES: Final = ("numpy", "mpi4py", "h5py", "numba", "cupy-cuda12x", "cupy-cuda13x")
THREADS: Final = "OMP_NUM_THREADS"
_SETTINGS: Final = ("HPCDIST_", "NCCL_")
_SETTINGS_ALONE: Final = (*THREAD_VARIABLES, "NUMBA_NUM_THREADS", "CUDA_DEVICE_ORDER", "LD_LIBRARY_PATH", "PYTHONPATH")
_PER_LAUNCH: Final = (failfast.FAILURE_DIR, exit_file.LAUNCH_DIR)  # these exist only on the host of the launcher
_PLUGINS_LIMIT_S: Final = 10.0


@dataclass(frozen=True)
class GpuFacts:
    """The GPUs that a rank sees, and the GPU that the rank chose."""

    visible: str | None
    count: int
    name: str
    reason: str = ""  # why the rank has no GPU, or ""


@dataclass(frozen=True)
class Volume:
    """A directory that the job needs: its role, path, file system type and free space."""

    role: str  # use of the directory, such as "run directory"
    path: str
    kind: str  # file system type
    free_bytes: int
    has_inodes: bool = True
    error: str = ""


@dataclass(frozen=True)
class NodeFacts:
    """Hardware, software, environment variables and directories of a node."""

    processor: str
    cores: int  # number of hardware threads
    numa: tuple[tuple[int, ...], ...]  # cores of each NUMA domain, if known
    software: Mapping[str, str]
    settings: Mapping[str, str]
    volumes: tuple[Volume, ...]
    hardware_threads: tuple[tuple[int, ...], ...] = ()  # only if a physical core has several


@dataclass(frozen=True)
class SchedulerRequest:
    """Resources that the job requested from its scheduler: tasks, nodes and GPUs. None means unknown."""

    scheduler: str  # "" without a scheduler
    tasks: int | None = None
    nodes: int | None = None
    holds_gpus: bool = False


@dataclass(frozen=True)
class RankFacts:
    """Cores, threads and GPU of a rank, and its local rank as announced by the launcher and by Slurm."""

    host: str
    cores: tuple[int, ...]
    cores_asked: int | None
    threads: str | None
    launcher: str
    announced: int | None
    slurm_local: int | None
    gpu: GpuFacts


def rank_facts(
    launch: LaunchEnvironment | None, gpu: GpuFacts, environment: Mapping[str, str] = os.environ
) -> RankFacts:
    """Return this rank's `RankFacts`. ``launch``: values that the launcher announced. ``gpu``: see `gpu_facts`."""
    is_srun_rank = launch is not None and started_by_srun(launch.size, launch.rank, environment)
    return RankFacts(
        host=socket.gethostname().split(".")[0],
        cores=tuple(sorted(os.sched_getaffinity(0))),
        cores_asked=integer_variable(environment, "SLURM_CPUS_PER_TASK"),
        threads=environment.get(THREADS),
        launcher="" if launch is None else launch.launcher,
        announced=None if launch is None else launch.local_rank,
        slurm_local=integer_variable(environment, "SLURM_LOCALID") if is_srun_rank else None,
        gpu=gpu,
    )


def gpu_facts(launch: LaunchEnvironment | None, kind: str, environment: Mapping[str, str] = os.environ) -> GpuFacts:
    """Choose this rank's GPU, unless ``kind`` is "cpu", and return `GpuFacts`. Call this before MPI starts.

    ``launch``: local rank and world size announced by the launcher, or None.
    """
    visible = environment.get(VISIBLE_GPUS)
    if kind == "cpu":
        return GpuFacts(visible, 0, "", "the device is the CPU")
    try:
        count = device.count()  # first, because without GPUs there is nothing to choose
        placement.choose_gpu(launch)
        name = device.bus_id()
    except HpcdistError as error:
        return GpuFacts(visible, 0, "", str(error).split("; ")[0])
    except Exception as error:  # noqa: BLE001 - drivers raise many kinds of errors, and the other ranks wait
        return GpuFacts(visible, 0, "", f"{type(error).__name__}: {error}")
    return GpuFacts(visible, count, f"{name} {visible}" if "MIG-" in (visible or "") else name)


def node_facts(library: str, volumes: tuple[Volume, ...], environment: Mapping[str, str] = os.environ) -> NodeFacts:
    """Return this node's `NodeFacts` with directories ``volumes``. ``library``: version string of the MPI library."""
    software = {"hpcdist": f"{hpcdist.__version__}, sources {source_digest()}", "Python": platform.python_version()}
    software |= {name: version for name in PACKAGES if (version := package_version(name))}
    settings = {
        name: _once(value) if name.endswith("_PATH") or name == "PYTHONPATH" else value
        for name, value in sorted(environment.items())
        if name not in _PER_LAUNCH and (name.startswith(_SETTINGS) or name in _SETTINGS_ALONE)
    }
    cores = os.cpu_count() or 1
    return NodeFacts(
        processor(), cores, numa_domains(), software | {"MPI": library}, settings, volumes, hardware_threads()
    )


def volume_facts(role: str, path: Path, file_system_type: str) -> Volume:
    """Return the `Volume` of ``path``, with the free space of ``path`` or of its nearest existing parent.

    ``role``: purpose of the directory, for the report. ``file_system_type``: for example "lustre".
    """
    existing = path.absolute()
    try:
        while not existing.exists() and existing != existing.parent:
            existing = existing.parent
        status = os.statvfs(existing)
    except OSError as error:
        return Volume(role, str(path), file_system_type, 0, error=error.strerror or str(error))
    has_inodes = status.f_files == 0 or status.f_favail > 0
    return Volume(role, str(path), file_system_type, status.f_bavail * status.f_frsize, has_inodes)


def numa_domains(root: Path = NUMA) -> tuple[tuple[int, ...], ...]:
    """Return the hardware threads of each NUMA domain in the sysfs directory ``root``, or () if unknown."""
    domains = []
    for path in sorted(root.glob("node[0-9]*/cpulist")):
        try:
            domains.append(parse_ranges(path.read_text()))
        except (OSError, ValueError):
            return ()
    return tuple(filter(None, domains))


def source_digest(package: Path = Path(hpcdist.__file__).parent) -> str:
    """Return a short hash of hpcdist's source files in the directory ``package``, to detect edited copies."""
    digest = hashlib.blake2b(digest_size=6)
    for path in sorted(package.rglob("*.py")):
        try:
            digest.update(str(path.relative_to(package)).encode() + b"\0" + path.read_bytes())
        except OSError:
            return "unreadable"
    return digest.hexdigest()


def scheduler_request(
    launch: LaunchEnvironment | None, environment: Mapping[str, str] = os.environ
) -> SchedulerRequest:
    """Return the resources that the job requested, from the variables in ``environment``. Call this on rank 0.

    ``launch``: rank and world size announced by the launcher, or None.
    """
    if "SLURM_JOB_ID" in environment:
        gpus = any(name in environment for name in ("SLURM_JOB_GPUS", "SLURM_STEP_GPUS", "SLURM_GPUS_ON_NODE"))
        if "SLURM_HET_SIZE" in environment:  # the variables describe only the first component
            return SchedulerRequest("Slurm, for a heterogeneous job,", holds_gpus=gpus)
        nodes = integer_variable(environment, "SLURM_JOB_NUM_NODES") or integer_variable(environment, "SLURM_NNODES")
        tasks = integer_variable(environment, "SLURM_NTASKS")
        tasks_per_node = integer_variable(environment, "SLURM_NTASKS_PER_NODE")
        if not inside_srun(environment):  # ranks of mpirun on the first node inherit variables of the batch script
            return SchedulerRequest("Slurm", tasks_per_node * nodes if tasks_per_node and nodes else tasks, nodes, gpus)
        is_srun_rank = launch is not None and started_by_srun(launch.size, launch.rank, environment)
        # Under mpirun, SLURM_NTASKS counts the daemons of mpirun.
        return SchedulerRequest("Slurm", tasks if is_srun_rank else None, nodes, gpus)
    if "PBS_NODEFILE" in environment:
        try:
            lines = Path(environment["PBS_NODEFILE"]).read_text().split()
        except OSError:  # the file is on the first node of the job
            return SchedulerRequest("PBS")
        return SchedulerRequest("PBS", len(lines) or None, len(set(lines)) or None)
    return SchedulerRequest("")


def plugin_versions(environment: Mapping[str, str] = os.environ) -> str:
    """Return the PMI plugins of srun as text: the names that `srun --mpi=list` prints, or "" without srun."""
    srun = shutil.which("srun", path=environment.get("PATH"))
    if srun is None:
        return ""
    try:
        done = subprocess.run(
            [srun, "--mpi=list"], capture_output=True, text=True, timeout=_PLUGINS_LIMIT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    words = [line.strip() for line in (done.stdout + done.stderr).splitlines()]
    return ", ".join(word for word in words if word and " " not in word and ":" not in word)


def _once(path: str) -> str:
    return os.pathsep.join(dict.fromkeys(filter(None, path.split(os.pathsep))))  # nested launchers repeat folders
