"""Site profile: how jobs of a site are requested and started, what its nodes have, and where its files are.

A profile is a TOML file with the tables below; slurm/README.md describes every field. Light: it is read on login
nodes.
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

SCHEDULERS: Final = ("slurm", "pbs", "none")
# MPI flavour -> the launchers that start its ranks as one world.
LAUNCHERS_OF: Final = {
    "openmpi": ("mpirun", "srun", "flux"),
    "mpich": ("mpirun", "srun", "mpiexec", "flux"),
    "intel": ("mpirun", "srun", "ibrun"),
    "mvapich": ("mpirun", "srun", "ibrun"),
    "parastation": ("srun", "mpiexec"),
    "cray-mpich": ("srun", "mpiexec", "flux"),
}
GPU_REQUESTS: Final = ("gpus-per-node", "gres", "none")

_VARIABLE: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)
_MODULE: Final = re.compile(r"[A-Za-z0-9_./+@=:-]+", re.ASCII)


@dataclass(frozen=True, kw_only=True)
class SiteScheduler:
    """``[scheduler]``: whose directives a script has, further ``options`` of every job, and whether one must pay.

    ``kind`` "none" means that this machine runs the job itself. ``requeue``: a job may ask to be started again.
    ``partition``, ``qos``, ``constraint`` and ``mem`` are those of jobs that say none, and ``account_suffix`` ends the
    account of each.
    """

    kind: str = "slurm"
    options: tuple[str, ...] = ()
    partition: str = ""
    qos: str = ""
    constraint: str = ""
    mem: str = ""
    account_required: bool = False
    account_suffix: str = ""
    requeue: bool = True

    def __post_init__(self) -> None:
        _one_of("scheduler.kind", self.kind, SCHEDULERS)
        _memory("scheduler.mem", self.mem)
        for option in self.options:
            if not option.startswith("-"):
                raise ConfigurationError(
                    f"scheduler.options has {option!r}, which is no option; write it as one text, as '--account=NAME'"
                )
        for name in ("qos", "constraint"):
            if getattr(self, name) and self.kind != "slurm":
                raise ConfigurationError(
                    f"scheduler.{name} = {getattr(self, name)!r} with scheduler.kind = {self.kind!r}: only Slurm has "
                    "such; leave it out, or say it with scheduler.options"
                )


@dataclass(frozen=True, kw_only=True)
class SiteLauncher:
    """``[launcher]``: what starts the ranks, of which MPI, and for srun through which process manager (``pmi``)."""

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
                f"launcher.kind = {self.kind!r} does not start ranks of launcher.mpi = {self.mpi!r} as one world; "
                f"choose one of {', '.join(able)}"
            )
        if self.pmi and self.kind != "srun":
            raise ConfigurationError(f"launcher.pmi = {self.pmi!r}: only srun has a choice; leave it out")


@dataclass(frozen=True, kw_only=True)
class SiteEnvironment:
    """``[environment]``: a file to source before, modules to load and variables to export, in this order.

    ``purge``: first the modules of the shell that submits are unloaded.
    """

    init: str = ""
    purge: bool = False
    modules: tuple[str, ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in self.modules:
            if not _MODULE.fullmatch(name) or name.startswith("-"):
                raise ConfigurationError(f"environment.modules: {name!r} is no name of a module")
        _variables("environment.variables", self.variables)


@dataclass(frozen=True, kw_only=True)
class SiteGpus:
    """``[gpu]``: how many a node has (0: unknown), how a job asks for them, and the order in which ranks take them.

    ``bind`` is for --gpu-bind: "none" lets each rank see all GPUs of its node, which their direct copies need.
    ``order`` lists them by local rank, for nodes whose GPU 0 is not the one next to core 0. ``variables`` are exported
    by jobs that have GPUs, and by no others. ``unsupported`` says why jobs that have GPUs are refused.
    """

    per_node: int = 0
    request: str = "gpus-per-node"
    type: str = ""
    bind: str = "none"
    order: tuple[int, ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict)
    unsupported: str = ""

    def __post_init__(self) -> None:
        _variables("gpu.variables", self.variables)
        _at_least_0("gpu.per_node", self.per_node)
        _one_of("gpu.request", self.request, GPU_REQUESTS)
        if self.order and sorted(self.order) != list(range(self.per_node or len(self.order))):
            raise ConfigurationError(
                f"gpu.order = {list(self.order)} with gpu.per_node = {self.per_node}: name each GPU of a node once"
            )


@dataclass(frozen=True, kw_only=True)
class StorageRoot:
    """``[[storage.roots]]``: a directory that all nodes see, its file system, and how checkpoints are striped there."""

    path: str
    filesystem: str = ""
    stripe: str = ""

    def __post_init__(self) -> None:
        if not PurePosixPath(self.path).is_absolute():
            raise ConfigurationError(f"storage.roots: path = {self.path!r} is not absolute")


@dataclass(frozen=True, kw_only=True)
class SiteStorage:
    """``[storage]``: what all nodes see (``roots``; none listed: all but ``private``), and each node's own folder.

    ``sbcast``: Slurm passes the archive of an environment on to the nodes, which do not read it themselves.
    """

    roots: tuple[StorageRoot, ...] = ()
    private: tuple[str, ...] = ("/tmp", "/var/tmp", "/dev/shm", "/run")
    node_local: str = "/tmp"
    sbcast: bool = False

    def __post_init__(self) -> None:
        for path in (*self.private, self.node_local):
            if not PurePosixPath(path).is_absolute():
                raise ConfigurationError(f"[storage]: {path!r} is not an absolute path")


@dataclass(frozen=True, kw_only=True)
class SiteLimits:
    """``[limits]``, ``[partitions.NAME]`` or ``[qos.NAME]``: what a node has, and how many of them for how long.

    0 and "" mean not known. Those of a partition go over those of the site, and those of a QOS over both.
    """

    max_walltime: str = ""
    max_nodes: int = 0
    cores_per_node: int = 0
    gpus_per_node: int = -1
    mem_per_node: str = ""

    def over(self, general: "SiteLimits") -> "SiteLimits":
        """Return these limits, with those of ``general`` where nothing is known."""
        known = {item.name: value for item in fields(self) if (value := getattr(self, item.name)) != item.default}
        return replace(general, **known)

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
            raise ConfigurationError(f"gpus_per_node = {self.gpus_per_node}; it must be at least -1 (-1: not known)")


@dataclass(frozen=True, kw_only=True)
class SiteContainer:
    """``[container]``: the ``runtime`` that executes the Python of an ``image``; none where ``image`` is empty."""

    image: str = ""
    runtime: tuple[str, ...] = ("apptainer", "exec", "--nv")
    python: str = "python3"


@dataclass(frozen=True, kw_only=True)
class SiteProfile:
    """A profile, read from the file ``origin``.

    ``recipe`` has defaults of recipe keys, ``blocks`` Jinja text that replaces blocks of the templates.

    ``proven`` says what of it was run, and what was only rendered. ``cluster`` is the name or the file of what
    `hpcdist plan` knows of its machines.
    """

    name: str = ""
    origin: str = ""
    description: str = ""
    proven: str = ""
    cluster: str = ""
    scheduler: SiteScheduler = field(default_factory=SiteScheduler)
    launcher: SiteLauncher = field(default_factory=SiteLauncher)
    environment: SiteEnvironment = field(default_factory=SiteEnvironment)
    gpu: SiteGpus = field(default_factory=SiteGpus)
    storage: SiteStorage = field(default_factory=SiteStorage)
    limits: SiteLimits = field(default_factory=SiteLimits)
    partitions: Mapping[str, SiteLimits] = field(default_factory=dict)
    qos: Mapping[str, SiteLimits] = field(default_factory=dict)
    container: SiteContainer = field(default_factory=SiteContainer)
    recipe: Mapping[str, Any] = field(default_factory=dict)
    blocks: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.launcher.kind == "flux" and self.scheduler.kind != "none":
            raise ConfigurationError(
                f"launcher.kind = 'flux' with scheduler.kind = {self.scheduler.kind!r}: nothing starts a Flux instance "
                "in such a job; set it to 'none', and submit inside of one"
            )

        if self.storage.sbcast and self.scheduler.kind != "slurm":
            raise ConfigurationError(
                f"storage.sbcast with scheduler.kind = {self.scheduler.kind!r}: it is a command of Slurm; leave it out"
            )

    def complete(self, job: BatchJob) -> BatchJob:
        """Return ``job`` with what is asked for here where it says nothing itself, also not by --sbatch-arg."""
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
        """Return the innermost root that holds ``path``, None where none does."""
        holding = [root for root in self.storage.roots if path.is_relative_to(root.path)]
        return max(holding, key=lambda root: len(PurePosixPath(root.path).parts), default=None)


def _one_of(field_name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ConfigurationError(f"{field_name} = {value!r}; choose one of {', '.join(known)}")


def _variables(field_name: str, variables: Mapping[str, str]) -> None:
    for name in variables:
        if not _VARIABLE.fullmatch(name):
            raise ConfigurationError(f"{field_name}: {name!r} is no name of a variable")


def _memory(field_name: str, value: str) -> None:
    if value:
        try:
            memory_mib(value, field_name)
        except UsageError as error:
            raise ConfigurationError(str(error)) from error


def _at_least_0(field_name: str, value: int) -> None:
    if value < 0:
        raise ConfigurationError(f"{field_name} = {value}; it must be at least 0 (0: not known)")
