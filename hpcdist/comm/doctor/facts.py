"""Facts of a rank of a batch job about itself and its node, for all ranks to compare (local).

Nothing here raises: what cannot be read is unknown, with the reason where there is one. A rank that raised would
leave the others in the collective that follows.
"""

import hashlib
import importlib.metadata
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
from hpcdist.comm.launch.environment import LaunchEnvironment, inside_srun, started_by_srun
from hpcdist.errors import HpcdistError
from hpcdist.reporting.hostlist import parse_ranges

NUMA: Final = Path("/sys/devices/system/node")
PACKAGES: Final = ("numpy", "mpi4py", "h5py", "numba", "cupy-cuda12x", "cupy-cuda13x")
THREADS: Final = "OMP_NUM_THREADS"
VISIBLE: Final = "CUDA_VISIBLE_DEVICES"
_SETTINGS: Final = ("HPCDIST_", "NCCL_")
_SETTINGS_ALONE: Final = (
    THREADS,
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "NUMBA_NUM_THREADS",
    "CUDA_DEVICE_ORDER",
    "LD_LIBRARY_PATH",
    "PYTHONPATH",
)
_OF_THE_LAUNCH: Final = (failfast.FAILURE_DIR, exit_file.LAUNCH_DIR)  # for ranks on the host of the launcher
_PLUGINS_LIMIT_S: Final = 10.0


@dataclass(frozen=True)
class GpuFacts:
    """The GPUs that a rank may use: how many, and the ``name`` (PCI address, MIG instance) of the one it computes on.

    Where there is none, ``name`` is empty and ``reason`` says why.
    """

    visible: str | None
    count: int
    name: str
    reason: str = ""


@dataclass(frozen=True)
class Volume:
    """A directory that the job needs: its file system, what is left there for this user, or the error."""

    role: str
    path: str
    kind: str
    free_bytes: int
    has_inodes: bool = True
    error: str = ""


@dataclass(frozen=True)
class NodeFacts:
    """Hardware of a node. ``numa`` holds the cores of each memory domain, none where it is unknown.

    ``hardware_threads`` holds the processors of each core that has several. What is called a core elsewhere is one
    of them there.
    """

    processor: str
    cores: int
    numa: tuple[tuple[int, ...], ...]
    software: Mapping[str, str]
    settings: Mapping[str, str]
    volumes: tuple[Volume, ...]
    hardware_threads: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True)
class SchedulerRequest:
    """Request to the scheduler: None for what it does not say; ``scheduler`` is empty without one."""

    scheduler: str
    tasks: int | None = None
    nodes: int | None = None
    holds_gpus: bool = False


@dataclass(frozen=True)
class RankFacts:
    """Resources of a rank: cores, threads, GPU, and its local rank by launcher and by Slurm."""

    host: str
    cores: tuple[int, ...]
    cores_asked: int | None
    threads: str | None
    launcher: str
    announced: int | None
    slurm_local: int | None
    gpu: GpuFacts


def rank_facts(
    said: LaunchEnvironment | None, found: GpuFacts, environment: Mapping[str, str] = os.environ
) -> RankFacts:
    """Return the facts of this rank, which ``said`` announced and which has ``found`` a GPU or none."""
    own = said is not None and started_by_srun(said.size, said.rank, environment)
    return RankFacts(
        host=socket.gethostname().split(".")[0],
        cores=tuple(sorted(os.sched_getaffinity(0))),
        cores_asked=integer_variable(environment, "SLURM_CPUS_PER_TASK"),
        threads=environment.get(THREADS),
        launcher="" if said is None else said.launcher,
        announced=None if said is None else said.local_rank,
        slurm_local=integer_variable(environment, "SLURM_LOCALID") if own else None,
        gpu=found,
    )


def gpu_facts(said: LaunchEnvironment | None, wanted: str, environment: Mapping[str, str] = os.environ) -> GpuFacts:
    """Choose the GPU of this rank as a training does, before MPI starts; return it, or why there is none.

    Nothing is loaded where ``wanted`` is "cpu".
    """
    visible = environment.get(VISIBLE)
    if wanted == "cpu":
        return GpuFacts(visible, 0, "", "the device is the CPU")
    try:
        count = device.count()  # first: without any, it does not matter which
        placement.choose_gpu(said)
        name = device.bus_id()
    except HpcdistError as error:
        return GpuFacts(visible, 0, "", str(error).split("; ")[0])
    except Exception as error:  # noqa: BLE001 - a driver's errors are of many kinds, and the other ranks wait
        return GpuFacts(visible, 0, "", f"{type(error).__name__}: {error}")
    return GpuFacts(visible, count, f"{name} {visible}" if "MIG-" in (visible or "") else name)


def node_facts(
    library: str, volumes: tuple[Volume, ...], environment: Mapping[str, str] = os.environ, numa: Path = NUMA
) -> NodeFacts:
    """Return what the ranks of this node share; the MPI ``library`` is told."""
    found = {"hpcdist": f"{hpcdist.__version__}, sources {source_digest()}", "Python": platform.python_version()}
    found |= {name: version for name in PACKAGES if (version := _version(name))}
    settings = {
        name: _once(value) if name.endswith("_PATH") or name == "PYTHONPATH" else value
        for name, value in sorted(environment.items())
        if name not in _OF_THE_LAUNCH and (name.startswith(_SETTINGS) or name in _SETTINGS_ALONE)
    }
    cores = os.cpu_count() or 1
    return NodeFacts(
        _processor(), cores, numa_domains(numa), found | {"MPI": library}, settings, volumes, hardware_threads()
    )


def volume_facts(role: str, path: Path, kind: str) -> Volume:
    """Return what is free in ``path``, or the nearest directory above that is there, on a file system of ``kind``."""
    there = path.absolute()
    try:
        while not there.exists() and there != there.parent:
            there = there.parent
        found = os.statvfs(there)
    except OSError as error:
        return Volume(role, str(path), kind, 0, error=error.strerror or str(error))
    return Volume(role, str(path), kind, found.f_bavail * found.f_frsize, found.f_files == 0 or found.f_favail > 0)


def numa_domains(root: Path = NUMA) -> tuple[tuple[int, ...], ...]:
    """Return the cores of each memory domain (NUMA node) that has cores; none where the system does not say."""
    found = []
    for path in sorted(root.glob("node[0-9]*/cpulist")):
        try:
            found.append(parse_ranges(path.read_text()))
        except (OSError, ValueError):
            return ()
    return tuple(filter(None, found))


def source_digest(package: Path = Path(hpcdist.__file__).parent) -> str:
    """Return a short digest of all modules of hpcdist, which tells an edited copy from another of its version."""
    digest = hashlib.blake2b(digest_size=6)
    for path in sorted(package.rglob("*.py")):
        try:
            digest.update(str(path.relative_to(package)).encode() + b"\0" + path.read_bytes())
        except OSError:
            return "unreadable"
    return digest.hexdigest()


def scheduler_request(said: LaunchEnvironment | None, environment: Mapping[str, str] = os.environ) -> SchedulerRequest:
    """Return what the scheduler of this job, as rank 0 sees it, was asked for."""
    if "SLURM_JOB_ID" in environment:
        gpus = any(name in environment for name in ("SLURM_JOB_GPUS", "SLURM_STEP_GPUS", "SLURM_GPUS_ON_NODE"))
        if "SLURM_HET_SIZE" in environment:  # the variables are those of its first component
            return SchedulerRequest("Slurm, for a heterogeneous job,", holds_gpus=gpus)
        nodes = integer_variable(environment, "SLURM_JOB_NUM_NODES") or integer_variable(environment, "SLURM_NNODES")
        each, tasks = (
            integer_variable(environment, "SLURM_NTASKS_PER_NODE"),
            integer_variable(environment, "SLURM_NTASKS"),
        )
        if not inside_srun(environment):  # as the batch script sees it, and so the ranks of mpirun on its node
            return SchedulerRequest("Slurm", each * nodes if each and nodes else tasks, nodes, gpus)
        own = said is not None and started_by_srun(said.size, said.rank, environment)
        return SchedulerRequest("Slurm", tasks if own else None, nodes, gpus)  # else they count the daemons of mpirun
    if "PBS_NODEFILE" in environment:
        try:
            lines = Path(environment["PBS_NODEFILE"]).read_text().split()
        except OSError:  # it lies on the first node of the job
            return SchedulerRequest("PBS")
        return SchedulerRequest("PBS", len(lines) or None, len(set(lines)) or None)
    return SchedulerRequest("")


def integer_variable(environment: Mapping[str, str], name: str) -> int | None:
    """Return the whole number that a variable holds, None where it holds none."""
    text = environment.get(name, "")
    return int(text) if text.isascii() and text.isdigit() else None


def plugin_versions(environment: Mapping[str, str] = os.environ) -> str:
    """Return the kinds of PMI that this Slurm's srun knows, "" where it does not say."""
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
    """Return a search path without what it has twice: launchers add their folder again on each hop."""
    return os.pathsep.join(dict.fromkeys(filter(None, path.split(os.pathsep))))


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""
