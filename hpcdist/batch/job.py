"""Description of a batch job (size, limits, input), validated before a scheduler sees it."""

import hashlib
import os
import re
from dataclasses import dataclass
from datetime import datetime
from importlib.resources import files
from pathlib import Path
from typing import ClassVar, Final

import hpcdist
from hpcdist.comm.launch.exit_file import SURVIVE_MODES
from hpcdist.errors import MissingCapabilityError, UsageError

TEMPLATES: Final = "templates"  # job scripts
PROFILES: Final = "profiles"  # site profiles: generic/ and machines/
INSTALL: Final = "install"  # for administrators: epilog, Apptainer, Spack, EasyBuild
MONITORING: Final = "monitoring"  # Prometheus and Grafana
MODULEFILES: Final = "modulefiles"

# Folder -> its path in a clone. In a wheel the same path is in hpcdist/batch (see the package data in setup.cfg).
_PATHS: Final = {
    TEMPLATES: "slurm/templates",
    PROFILES: "slurm/profiles",
    INSTALL: "slurm/install",
    MONITORING: "slurm/monitoring",
    MODULEFILES: "modulefiles",
}


def folder(name: str) -> Path:
    """Return the path of hpcdist's data folder ``name``. Raises MissingCapabilityError if there is no such folder."""
    clone = Path(hpcdist.__file__).resolve().parents[1]
    places = [root / _PATHS[name] for root in (Path(str(files("hpcdist.batch"))), clone)]
    for place in places:
        if place.is_dir():
            return place
    raise MissingCapabilityError(
        f"this installation has no folder {name} (searched {places[0]} and {places[1]}); reinstall the wheel, or use a "
        "complete clone"
    )


SURVIVE: Final = ("none", *SURVIVE_MODES)
SWEEP: Final = "sweep"
SUITES: Final = ("collectives", SWEEP)  # benchmarks of `hpcdist submit --bench`
RESOURCES: Final = ("qos", "constraint", "mem")  # fields that are also sbatch options
MAX_SIGNAL_S: Final = 65535  # limit of sbatch --signal

_WALLTIME: Final = re.compile(
    r"(?:(?P<days>\d{1,4})-)?(?P<hours>\d{1,4}):(?P<minutes>[0-5]\d):(?P<seconds>[0-5]\d)", re.ASCII
)
_MEMORY: Final = re.compile(r"(\d{1,9})([KMGT]?)", re.ASCII | re.IGNORECASE)
_MIB: Final = {"K": 1 / 1024, "": 1, "M": 1, "G": 1024, "T": 1024**2}
_SBATCH_ARGUMENT: Final = re.compile(r"(?P<option>--[a-z][a-z0-9-]*)(=.*)?", re.DOTALL)
# sbatch options that hpcdist's script sets, with the hpcdist option to use instead.
_OWNED: Final = {
    "--job-name": "use --job-name",
    "--nodes": "use --nodes",
    "--ntasks": "use --nodes and --ranks-per-node",
    "--ntasks-per-node": "use --ranks-per-node",
    "--cpus-per-task": "use --cpus-per-task",
    "--time": "use --time",
    "--partition": "use --partition",
    "--account": "use --account",
    "--signal": "use --signal-seconds",
    "--output": "the log of all starts is hpcdist-<job>.out",
    "--open-mode": "the log of all starts is hpcdist-<job>.out",
    "--requeue": "the job is requeued until all steps are done, except with --chain",
    "--no-requeue": "use --chain, or a site profile with scheduler.requeue = false",
    "--chdir": "submit from that directory",
    "--test-only": "use --dry-run; submit always tests with Slurm first",
    "--wait": "check `hpcdist jobs status` for the end of the job",
    "--wrap": "hpcdist writes the script",
    "--dependency": "use --chain for consecutive jobs",
    "--array": "use --array",
}
_OWNED_WITH_GPU: Final = {
    "--gpus-per-node": "use --gpus-per-node",
    "--gpu-bind": "set gpu.bind in the site profile",
}
_OWNED_WITH_MEM: Final = {"--mem-per-cpu": "use --mem", "--mem-per-gpu": "use --mem"}
_OWNED_WITH_BEGIN: Final = {"--begin": "--carbon sets the start time"}


@dataclass(frozen=True, kw_only=True)
class BatchJob:
    """Batch job that runs a recipe, a parameter sweep or a program on ``nodes`` x ``ranks_per_node`` ranks."""

    template: ClassVar[str | None] = None  # None: the scheduler's template of a training

    nodes: int
    python: str  # interpreter that runs hpcdist
    recipe: str  # text of the complete recipe; every start trains it in ``run_dir``
    ranks_per_node: int = 1
    cpus_per_task: int = 1
    name: str = "hpcdist"
    walltime: str | None = None  # time limit in Slurm's format (None: the partition's default)
    signal_s: int = 120  # seconds before the end of the job when it saves and stops
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    mem: str | None = None  # memory per node in Slurm's format ("0": all)
    run_dir: Path = Path("run")
    sbatch_args: tuple[str, ...] = ()
    mpi_args: str = ""
    gpus_per_node: int = 0
    python_path: str | None = None
    restarts: int = 0  # maximum number of restarts within the job
    spare_nodes: int = 0  # nodes that replace lost nodes
    survive: str = "none"  # option --survive of `hpcdist run`, or "none"
    link: int = 1  # number of this job in a chain of ``links`` jobs
    links: int = 1
    most_fruitless: int = 3  # maximum number of consecutive starts without a new checkpoint (0: no limit)
    python_of_ranks: tuple[str, ...] = ()  # interpreter on the ranks, if different
    environment: Path | None = None  # archive of a Python environment, unpacked into ``local``
    data: Path | None = None  # file or directory to copy to ``local``
    local: Path | None = None  # directory that the job creates on each node and removes at its end
    warmup: bool = False
    check: bool = True
    begin: datetime | None = None
    sweep: str = ""  # text of a file with a parameter sweep, instead of a recipe
    program: tuple[str, ...] = ()  # command line, instead of a recipe
    program_keys: tuple[tuple[str, str], ...] = ()  # environment variables of the program: (name, value)

    def __post_init__(self) -> None:
        for name in ("nodes", "ranks_per_node", "cpus_per_task"):
            if getattr(self, name) < 1:
                raise UsageError(f"{_option(name)} {getattr(self, name)}: it must be at least 1")
        for name in ("gpus_per_node", "most_fruitless", "restarts"):
            if getattr(self, name) < 0:
                raise UsageError(f"{_option(name)} {getattr(self, name)}: it must be at least 0")
        if not 1 <= self.link <= self.links:
            raise UsageError(f"--chain {self.links}: give the number of jobs, at least 1")
        if self.spare_nodes < 0 or (self.spare_nodes and not self.restarts):
            raise UsageError(
                f"--spare-nodes {self.spare_nodes}: spare nodes replace failed nodes in a restart; add --restarts, or "
                "leave --spare-nodes out"
            )
        if self.environment is not None and self.python_of_ranks:
            raise UsageError(
                "--stage-environment cannot be combined with a container, because the image already has an "
                "environment; leave --stage-environment out, or use no container"
            )
        if self.survive not in SURVIVE:
            raise UsageError(f"--survive {self.survive}: choose one of {', '.join(SURVIVE)}")
        if self.program and self.survive != "none":
            raise UsageError(
                f"--survive {self.survive} is not supported for {self.program[0]}: only the training of a recipe can "
                "continue after losing a rank; leave --survive out, or use --restarts"
            )
        for name in ("name", "partition", "account", "qos", "constraint"):
            if getattr(self, name) == "":
                raise UsageError(f"{_option(name)} is empty; give a name, or leave the option out")
        if self.mem is not None:
            memory_mib(self.mem)
        for argument in self.sbatch_args:
            self._check_further(argument)
        self._check_times()

    def _check_further(self, argument: str) -> None:
        match = _SBATCH_ARGUMENT.fullmatch(argument)
        if match is None:
            raise UsageError(f"--sbatch-arg {argument!r}: expected a long option, e.g. --sbatch-arg=--qos=debug")
        with_gpu = _OWNED_WITH_GPU if self.gpus_per_node else {}
        with_begin = {} if self.begin is None else _OWNED_WITH_BEGIN
        with_mem = {} if self.mem is None else _OWNED_WITH_MEM
        with_own_options = {f"--{name}": f"use --{name}" for name in RESOURCES if getattr(self, name) is not None}
        for owned, cure in (_OWNED | with_gpu | with_begin | with_own_options | with_mem).items():
            if owned in ("--requeue", "--no-requeue") and owned.startswith(match["option"]):
                raise UsageError(f"--sbatch-arg {argument!r}: the job script controls requeueing; {cure}")
            if owned.startswith(match["option"]):  # sbatch takes abbreviations
                raise UsageError(
                    f"--sbatch-arg {argument!r} conflicts with the option {owned} of the job script; {cure}"
                )

    def _check_times(self) -> None:
        limit_s = None if self.walltime is None else walltime_s(self.walltime)
        if not 1 <= self.signal_s <= MAX_SIGNAL_S:
            raise UsageError(f"--signal-seconds {self.signal_s}: it must be between 1 and {MAX_SIGNAL_S}")
        if limit_s is not None and self.signal_s >= limit_s:
            raise UsageError(
                f"--signal-seconds {self.signal_s} must be less than the walltime {self.walltime} ({limit_s} s): the "
                "job would be stopped before it starts; use a longer --time, or fewer --signal-seconds"
            )

    @property
    def input_text(self) -> str:
        """Text of the job's recipe or parameter sweep; "" if the job runs a script."""
        return self.recipe or self.sweep

    @property
    def input_file(self) -> Path:
        """Path of the file that stores `input_text`. The name contains a digest of the text."""
        digest = hashlib.blake2b(os.fsencode(self.input_text), digest_size=4).hexdigest()
        return self.run_dir / f"job-{digest}.toml"

    @property
    def ranks(self) -> int:
        """Number of ranks of the job."""
        return self.nodes * self.ranks_per_node

    @property
    def gpus_of_nodes(self) -> set[int]:
        """Set of the distinct numbers of GPUs per node. Worker nodes and parameter server nodes may differ."""
        return {self.gpus_per_node}

    @property
    def followers(self) -> "tuple[BatchJob, ...]":
        """Jobs to submit after this job, in order. Each job starts after the job before it has ended."""
        return ()

    def log(self, folder: Path, number: str) -> Path:
        """Return the path of the job's log. ``folder``: directory of the log file. ``number``: job id."""
        return folder / f"hpcdist-{number}.out"


def walltime_s(text: str, option: str = "--time") -> int:
    """Convert ``text``, D-HH:MM:SS, HH:MM:SS or minutes, to seconds. Raises UsageError for other formats.

    ``option``: name of the command-line option in the error message.
    """
    match, seconds = _WALLTIME.fullmatch(text), 0
    if match is None:
        seconds = int(text) * 60 if re.fullmatch(r"\d{1,9}", text, re.ASCII) else 0
    elif match["days"] is None or int(match["hours"]) < 24:
        hours = int(match["days"] or 0) * 24 + int(match["hours"])
        seconds = (hours * 60 + int(match["minutes"])) * 60 + int(match["seconds"])
    if seconds < 60:
        raise UsageError(
            f"{option} {text!r}: expected D-HH:MM:SS, HH:MM:SS or whole minutes, at least one minute; "
            "for example 1-12:00:00, 00:30:00 or 90"
        )
    return seconds


def memory_mib(text: str, option: str = "--mem") -> float:
    """Convert the size ``text``, such as 4000 (MiB) or 200G, to MiB. Raises UsageError for other formats.

    ``option``: command-line option to name in the error message.
    """
    match = _MEMORY.fullmatch(text)
    if match is None:
        raise UsageError(f"{option} {text!r}: expected MiB, or a number with K, M, G or T; for example 4000 or 200G")
    return int(match[1]) * _MIB[match[2].upper()]


def _option(name: str) -> str:
    return {"name": "--job-name"}.get(name, "--" + name.replace("_", "-"))
