"""Site profile: how jobs of a site are requested and started, its node resources, and its file systems.

A profile is a TOML file. slurm/README.md describes every field.
"""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import PurePath, PurePosixPath
from typing import Any, Final

from hpcdist.batch.job import RESOURCES, BatchJob, memory_mib, walltime_s
from hpcdist.comm.launch.launchers import KINDS
from hpcdist.errors import ConfigurationError, UsageError
from hpcdist.reporting.schema import INTERNAL

SCHEDULERS: Final = ("slurm", "pbs", "none")
# MPI implementation -> launchers that start its ranks as one world.
LAUNCHERS_OF: Final = {
    "openmpi": ("mpirun", "srun", "flux"),
    "mpich": ("mpirun", "srun", "mpiexec", "flux"),
    "intel": ("mpirun", "srun", "ibrun"),
    "mvapich": ("mpirun", "srun", "ibrun"),
    "parastation": ("srun", "mpiexec"),
    "cray-mpich": ("srun", "mpiexec", "flux"),
}
GPU_REQUESTS: Final = ("gpus-per-node", "gres", "none")

VARIABLE_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)
_MODULE: Final = re.compile(r"[A-Za-z0-9_./+@=:-]+", re.ASCII)


@dataclass(frozen=True, kw_only=True)
class SiteScheduler:
    """Section ``[scheduler]`` of a site profile: the scheduler, and default options of jobs."""

    kind: str = "slurm"  # "none": jobs run on this machine
    options: tuple[str, ...] = ()  # added to every job
    partition: str = ""
    qos: str = ""
    constraint: str = ""
    mem: str = ""
    account_required: bool = False
    account_suffix: str = ""  # appended to every account
    requeue: bool = True

    def __post_init__(self) -> None:
        _one_of("scheduler.kind", self.kind, SCHEDULERS)
        _memory("scheduler.mem", self.mem)
        for option in self.options:
            if not option.startswith("-"):
                raise ConfigurationError(
                    f"scheduler.options: {option!r} does not begin with '-'; write e.g. '--account=NAME' as one item"
                )
        for name in ("qos", "constraint"):
            if getattr(self, name) and self.kind != "slurm":
                raise ConfigurationError(
                    f"scheduler.{name} = {getattr(self, name)!r} with scheduler.kind = {self.kind!r}: only Slurm has "
                    f"this setting; leave scheduler.{name} out, or use scheduler.options"
                )


@dataclass(frozen=True, kw_only=True)
class SiteLauncher:
    """Section ``[launcher]``: launcher of the ranks, MPI implementation, and process management interface ``pmi``."""

    kind: str = "mpirun"
    mpi: str = "openmpi"
    pmi: str = ""
    options: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _one_of("launcher.kind", self.kind, tuple(KINDS))
        _one_of("launcher.mpi", self.mpi, tuple(LAUNCHERS_OF))
        able = LAUNCHERS_OF[self.mpi]
        if self.kind not in able:
            raise ConfigurationError(
                f"launcher.kind = {self.kind!r} does not start ranks of launcher.mpi = {self.mpi!r} as one MPI job; "
                f"choose one of {', '.join(able)}"
            )
        if self.pmi and self.kind != "srun":
            raise ConfigurationError(f"launcher.pmi = {self.pmi!r} needs launcher.kind = 'srun'; remove launcher.pmi")


@dataclass(frozen=True, kw_only=True)
class SiteEnvironment:
    """Section ``[environment]``: modules to purge and load, ``init`` files to source, and ``variables`` to export."""

    init: str = ""
    purge: bool = False
    modules: tuple[str, ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in self.modules:
            if not _MODULE.fullmatch(name) or name.startswith("-"):
                raise ConfigurationError(
                    f"environment.modules: {name!r} is not a valid module name; write a name as for `module load`"
                )
        _variables("environment.variables", self.variables)


@dataclass(frozen=True, kw_only=True)
class SiteGpus:
    """Section ``[gpu]`` of a site profile: GPUs per node, and their assignment to jobs and ranks."""

    per_node: int = 0  # 0: unknown
    request: str = "gpus-per-node"
    type: str = ""
    bind: str = "none"  # value of --gpu-bind
    order: tuple[int, ...] = ()  # GPU number for each local rank
    variables: Mapping[str, str] = field(default_factory=dict)  # exported only in jobs with GPUs
    unsupported: str = ""  # reason to refuse jobs with GPUs

    def __post_init__(self) -> None:
        _variables("gpu.variables", self.variables)
        _at_least_0("gpu.per_node", self.per_node)
        _one_of("gpu.request", self.request, GPU_REQUESTS)
        if self.order and sorted(self.order) != list(range(self.per_node or len(self.order))):
            raise ConfigurationError(
                f"gpu.order = {list(self.order)} does not fit gpu.per_node = {self.per_node}; list each GPU of a "
                "node once, by index from 0"
            )


@dataclass(frozen=True, kw_only=True)
class StorageRoot:
    """``[[storage.roots]]``: a directory that all nodes see, its file system, and the striping of its checkpoints."""

    path: str
    filesystem: str = ""
    stripe: str = ""

    def __post_init__(self) -> None:
        if not PurePosixPath(self.path).is_absolute():
            raise ConfigurationError(f"storage.roots: path = {self.path!r} is not absolute; it must begin with /")


@dataclass(frozen=True, kw_only=True)
class SiteStorage:
    """Section ``[storage]`` of a site profile: directories shared by all nodes, and directories of each node."""

    roots: tuple[StorageRoot, ...] = ()  # shared; empty: all directories except ``private``
    private: tuple[str, ...] = ("/tmp", "/var/tmp", "/dev/shm", "/run")
    node_local: str = "/tmp"  # directory for staged files on each node
    sbcast: bool = False  # Slurm broadcasts the environment archive to the nodes

    def __post_init__(self) -> None:
        for path in (*self.private, self.node_local):
            if not PurePosixPath(path).is_absolute():
                raise ConfigurationError(f"[storage]: {path!r} is not an absolute path; it must begin with /")


@dataclass(frozen=True, kw_only=True)
class SiteLimits:
    """``[limits]``, ``[partitions.NAME]`` or ``[qos.NAME]``: resources of a node, and maximum nodes and walltime."""

    # 0 and "" mean unknown.
    max_walltime: str = ""
    max_nodes: int = 0
    cores_per_node: int = 0
    gpus_per_node: int = -1
    mem_per_node: str = ""

    def with_defaults(self, general: "SiteLimits") -> "SiteLimits":
        """Return a copy of these limits, with unknown values taken from ``general``, such as the limits of the site."""
        limits = {item.name: value for item in fields(self) if (value := getattr(self, item.name)) != item.default}
        return replace(general, **limits)

    def __post_init__(self) -> None:
        _memory("mem_per_node", self.mem_per_node)
        if self.max_walltime:
            try:
                walltime_s(self.max_walltime, "max_walltime")
            except UsageError as error:
                raise ConfigurationError(str(error)) from error
        _at_least_0("max_nodes", self.max_nodes)
        _at_least_0("cores_per_node", self.cores_per_node)
        if self.gpus_per_node < -1:
            raise ConfigurationError(f"gpus_per_node = {self.gpus_per_node}; it must be at least -1 (-1: unknown)")


@dataclass(frozen=True, kw_only=True)
class SiteContainer:
    """Section ``[container]``: ``runtime`` is the command that runs Python in ``image``, "" for no container."""

    image: str = ""
    runtime: tuple[str, ...] = ("apptainer", "exec", "--nv")
    python: str = "python3"


@dataclass(frozen=True, kw_only=True)
class SiteProfile:
    """Settings of a cluster for batch jobs, read from a site profile file."""

    name: str = field(default="", metadata={INTERNAL: True})
    origin: str = field(default="", metadata={INTERNAL: True})  # path of the file
    description: str = ""
    proven: str = ""  # note on the tests of this profile
    cluster: str = ""  # cluster name or file for `hpcdist plan`
    scheduler: SiteScheduler = field(default_factory=SiteScheduler)
    launcher: SiteLauncher = field(default_factory=SiteLauncher)
    environment: SiteEnvironment = field(default_factory=SiteEnvironment)
    gpu: SiteGpus = field(default_factory=SiteGpus)
    storage: SiteStorage = field(default_factory=SiteStorage)
    limits: SiteLimits = field(default_factory=SiteLimits)
    partitions: Mapping[str, SiteLimits] = field(default_factory=dict)
    qos: Mapping[str, SiteLimits] = field(default_factory=dict)
    container: SiteContainer = field(default_factory=SiteContainer)
    recipe: Mapping[str, Any] = field(default_factory=dict)  # defaults of recipe keys
    blocks: Mapping[str, str] = field(default_factory=dict)  # replacements for Jinja blocks of the job scripts

    def __post_init__(self) -> None:
        if self.launcher.kind == "flux" and self.scheduler.kind != "none":
            raise ConfigurationError(
                f"launcher.kind = 'flux' with scheduler.kind = {self.scheduler.kind!r}: the job has no Flux instance; "
                "set scheduler.kind = 'none', and run `hpcdist submit` in a Flux instance"
            )

        if self.storage.sbcast and self.scheduler.kind != "slurm":
            raise ConfigurationError(
                f"storage.sbcast needs scheduler.kind = 'slurm', got {self.scheduler.kind!r}; leave storage.sbcast out"
            )

    def complete(self, job: BatchJob) -> BatchJob:
        """Return a copy of ``job`` with this site's defaults for options that ``job`` leaves unset.

        Options in ``job.sbatch_args`` count as set.
        """
        options = [argument.partition("=")[0] for argument in job.sbatch_args]
        changes: dict[str, Any] = {}
        for name in ("partition", *RESOURCES):
            default = getattr(self.scheduler, name)
            is_given = any(f"--{name}".startswith(word) or word.startswith(f"--{name}-per-") for word in options)
            if default and getattr(job, name) is None and not is_given:
                changes[name] = default
        suffix = self.scheduler.account_suffix
        account = job.account or (os.environ.get("SBATCH_ACCOUNT") if self.scheduler.kind == "slurm" else None)
        if suffix and account and not account.endswith(suffix):
            changes["account"] = account + suffix
        return replace(job, **changes) if changes else job

    def root_of(self, path: PurePath) -> StorageRoot | None:
        """Return the innermost `StorageRoot` (directory that all nodes see) that contains ``path``, or None."""
        holding = [root for root in self.storage.roots if path.is_relative_to(root.path)]
        return max(holding, key=lambda root: len(PurePosixPath(root.path).parts), default=None)


def _one_of(field_name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigurationError(f"{field_name} = {value!r}; choose one of {', '.join(choices)}")


def _variables(field_name: str, variables: Mapping[str, str]) -> None:
    for name in variables:
        if not VARIABLE_NAME.fullmatch(name):
            raise ConfigurationError(f"{field_name}: {name!r} is not a valid variable name; use letters, digits and _")


def _memory(field_name: str, value: str) -> None:
    if value:
        try:
            memory_mib(value, field_name)
        except UsageError as error:
            raise ConfigurationError(str(error)) from error


def _at_least_0(field_name: str, value: int) -> None:
    if value < 0:
        raise ConfigurationError(f"{field_name} = {value}; it must be at least 0 (0: unknown)")
