"""Description of a batch job: shape, limits and what it trains, checked before any scheduler sees it."""

import hashlib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from importlib.resources import files
from pathlib import Path
from typing import ClassVar, Final

import hpcdist
from hpcdist.comm.launch.exit_file import SURVIVE_MODES
from hpcdist.errors import MissingCapabilityError, UsageError

TEMPLATES: Final = "templates"  # of job scripts
PROFILES: Final = "profiles"  # of sites: generic/ and machines/
INSTALL: Final = "install"  # for administrators: epilog, Apptainer, Spack, EasyBuild
MONITORING: Final = "monitoring"  # of Prometheus and Grafana
MODULEFILES: Final = "modulefiles"

# Folder -> where it lies in the clone. In a wheel the same path lies in hpcdist/batch: setup.cfg maps slurm/ and
# modulefiles/ there, as packages of data.
_PATHS: Final = {
    TEMPLATES: "slurm/templates",
    PROFILES: "slurm/profiles",
    INSTALL: "slurm/install",
    MONITORING: "slurm/monitoring",
    MODULEFILES: "modulefiles",
}


def folder(name: str) -> Path:
    """Return one of the folders above. Raises MissingCapabilityError where neither a wheel nor a clone has it."""
    clone = Path(hpcdist.__file__).resolve().parents[1]
    places = [root / _PATHS[name] for root in (Path(str(files("hpcdist.batch"))), clone)]
    for place in places:
        if place.is_dir():
            return place
    raise MissingCapabilityError(
        f"this installation has no {name} of hpcdist (looked in {places[0]} and {places[1]}); install the wheel again, "
        "or use a complete clone"
    )


SURVIVE: Final = ("none", *SURVIVE_MODES)
RECIPE_FILE: Final = "recipe.toml"  # of a run directory, as `hpcdist.training` names it, which is slow to load
# Benchmark -> whether all ranks of the job run it; the others start ranks themselves.
SWEEP: Final = "sweep"
SUITES: Final[Mapping[str, bool]] = {
    "collectives": True,
    "checkpoint": True,
    "pipeline": True,
    "data": False,
    SWEEP: False,
}
RESOURCES: Final = ("qos", "constraint", "mem")  # fields that sbatch has as options
MAX_SIGNAL_S: Final = 65535  # of sbatch --signal

_WALLTIME: Final = re.compile(
    r"(?:(?P<days>\d{1,4})-)?(?P<hours>\d{1,4}):(?P<minutes>[0-5]\d):(?P<seconds>[0-5]\d)", re.ASCII
)
_MEMORY: Final = re.compile(r"(\d{1,9})([KMGT]?)", re.ASCII | re.IGNORECASE)
_MIB: Final = {"K": 1 / 1024, "": 1, "M": 1, "G": 1024, "T": 1024**2}
_SBATCH_ARGUMENT: Final = re.compile(r"(?P<option>--[a-z][a-z0-9-]*)(=.*)?", re.DOTALL)
# Options of sbatch that the script has, and what to use in place of them; it would not work with others.
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
    "--requeue": "it does until all steps are done, but with --chain",
    "--no-requeue": "--chain does without, and so does a profile of the site with scheduler.requeue = false",
    "--chdir": "submit from that directory",
    "--test-only": "use --dry-run; submit asks Slurm in any case",
    "--wait": "`hpcdist jobs status` tells when the job has ended",
    "--wrap": "the script is that of hpcdist",
    "--dependency": "use --chain for jobs that go on with one another",
    "--array": "use --array",
}
_OWNED_WITH_GPU: Final = {
    "--gpus-per-node": "use --gpus-per-node",
    "--gpu-bind": "the site profile says it, with gpu.bind",
}
_OWNED_WITH_MEM: Final = {"--mem-per-cpu": "use --mem", "--mem-per-gpu": "use --mem"}
_OWNED_WITH_BEGIN: Final = {"--begin": "--carbon says when"}


@dataclass(frozen=True, kw_only=True)
class BatchJob:
    """A training on ``nodes`` x ``ranks_per_node`` ranks.

    ``walltime`` is written as Slurm reads it, and None leaves it to the partition. ``signal_s`` seconds before its end
    the job saves and is started again. ``recipe`` is the text of a whole recipe, which every start trains in
    ``run_dir``; or, where there is none, ``sweep`` is that of a sweep which needs no other file, or ``program`` has the
    words of a command, which every start runs, with its run directory and the variables ``program_keys``
    (HPCDIST_SET__..., pairs of name and value). ``mem`` is the memory of a node as Slurm reads it ("0": all of it),
    ``constraint`` what nodes must have, and ``qos`` a quality of service. ``sbatch_args`` are further options of the
    scheduler, ``mpi_args`` of the launcher. ``python`` runs hpcdist, and finds it in ``python_path`` where that is not
    None.

    A start that fails is repeated, up to ``restarts`` times, inside of the job, whose ``spare_nodes`` then take the
    place of nodes that it has lost. With ``survive`` other than "none" it outlives its ranks: see `hpcdist run`.

    It is link ``link`` of a chain of ``links`` jobs, each of which goes on where the one before it stopped; a job alone
    is requeued in place of that. After ``most_fruitless`` starts in a row that saved nothing new none is made (0: there
    always is).

    ``python_of_ranks`` runs hpcdist on the ranks, where ``python`` does not (words, as of a container). ``environment``
    is an archive that each node unpacks for itself, ``data`` a file or directory that it copies; both lie in ``local``
    then. With ``warmup`` each node compiles the kernels first. With ``check`` the ranks look at their nodes and at
    one another before they train. ``begin`` (aware) is when the job may start.
    """

    template: ClassVar[str | None] = None  # None: that of a training, which each scheduler has

    nodes: int
    python: str
    recipe: str
    ranks_per_node: int = 1
    cpus_per_task: int = 1
    name: str = "hpcdist"
    walltime: str | None = None
    signal_s: int = 120
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    mem: str | None = None
    run_dir: Path = Path("run")
    sbatch_args: tuple[str, ...] = ()
    mpi_args: str = ""
    gpus_per_node: int = 0
    python_path: str | None = None
    restarts: int = 0
    spare_nodes: int = 0
    survive: str = "none"
    link: int = 1
    links: int = 1
    most_fruitless: int = 3
    python_of_ranks: tuple[str, ...] = ()
    environment: Path | None = None
    data: Path | None = None
    local: Path | None = None
    warmup: bool = False
    check: bool = True
    begin: datetime | None = None
    sweep: str = ""
    program: tuple[str, ...] = ()
    program_keys: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        for name in ("nodes", "ranks_per_node", "cpus_per_task"):
            if getattr(self, name) < 1:
                raise UsageError(f"{_option(name)} {getattr(self, name)}: it must be at least 1")
        for name in ("gpus_per_node", "most_fruitless"):
            if getattr(self, name) < 0:
                raise UsageError(f"{_option(name)} {getattr(self, name)}: it must be at least 0")
        if not 1 <= self.link <= self.links:
            raise UsageError(f"--chain {self.links}: give the number of jobs, at least 1")
        if self.restarts < 0:
            raise UsageError(f"--restarts {self.restarts}: give how often a failed start is repeated, or 0")
        if self.spare_nodes < 0 or (self.spare_nodes and not self.restarts):
            raise UsageError(
                f"--spare-nodes {self.spare_nodes}: they take the place of failed nodes when the training starts "
                "again; add --restarts, or leave them out"
            )
        if self.environment is not None and self.python_of_ranks:
            raise UsageError(
                "--stage-environment with a container: the image has an environment of its own; leave one of them out"
            )
        if self.survive not in SURVIVE:
            raise UsageError(f"--survive {self.survive}: choose one of {', '.join(SURVIVE)}")
        if self.program and self.survive != "none":
            raise UsageError(
                f"--survive {self.survive}: only the training of a recipe goes on without a rank, not "
                f"{self.program[0]}; leave it out, or use --restarts"
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
                raise UsageError(f"--sbatch-arg {argument!r}: the script says whether the job is requeued; {cure}")
            if owned.startswith(match["option"]):  # sbatch takes abbreviations
                raise UsageError(f"--sbatch-arg {argument!r} contradicts {owned} of the script; {cure}")

    def _check_times(self) -> None:
        limit_s = None if self.walltime is None else walltime_s(self.walltime)
        if not 1 <= self.signal_s <= MAX_SIGNAL_S:
            raise UsageError(f"--signal-seconds {self.signal_s}: it must be between 1 and {MAX_SIGNAL_S}")
        if limit_s is not None and self.signal_s >= limit_s:
            raise UsageError(
                f"--signal-seconds {self.signal_s} is not less than the walltime {self.walltime} ({limit_s} s): the "
                "job would be told to stop before it starts; use a longer --time, or fewer --signal-seconds"
            )

    @property
    def input_text(self) -> str:
        """The text that its starts read: that of the recipe, or of the sweep; "" for a program."""
        return self.recipe or self.sweep

    @property
    def input_file(self) -> Path:
        """The file of that text, in the run directory, named by its content: no later submission changes it."""
        digest = hashlib.blake2b(os.fsencode(self.input_text), digest_size=4).hexdigest()
        return self.run_dir / f"job-{digest}.toml"

    @property
    def ranks(self) -> int:
        """Number of ranks of the whole job."""
        return self.nodes * self.ranks_per_node

    @property
    def gpus_of_nodes(self) -> set[int]:
        """The GPUs that are asked for of a node: one number, unless there are nodes of several kinds."""
        return {self.gpus_per_node}

    @property
    def followers(self) -> "tuple[BatchJob, ...]":
        """The jobs that start when this one has ended, each after the one before, beside the links of its chain."""
        return ()

    def log(self, folder: Path, number: str) -> Path:
        """Return where the log goes when the job has the ``number`` and was submitted from ``folder``."""
        return folder / f"hpcdist-{number}.out"


def walltime_s(text: str, option: str = "--time") -> int:
    """Return the seconds of a walltime: D-HH:MM:SS, HH:MM:SS or minutes. Raises UsageError for anything else.

    Slurm reads 10:00 as ten minutes, which is easily meant as ten hours: so two fields are refused.
    """
    match, seconds = _WALLTIME.fullmatch(text), 0
    if match is None:
        seconds = int(text) * 60 if re.fullmatch(r"\d{1,9}", text, re.ASCII) else 0
    elif match["days"] is None or int(match["hours"]) < 24:
        hours = int(match["days"] or 0) * 24 + int(match["hours"])
        seconds = (hours * 60 + int(match["minutes"])) * 60 + int(match["seconds"])
    if seconds < 60:
        raise UsageError(
            f"{option} {text!r}: expected D-HH:MM:SS, HH:MM:SS or whole minutes, at least one minute in all; "
            "for example 1-12:00:00, 00:30:00 or 90"
        )
    return seconds


def memory_mib(text: str, option: str = "--mem") -> float:
    """Return the MiB of a memory size: a number, of MiB, or with K, M, G or T. Raises UsageError for anything else."""
    match = _MEMORY.fullmatch(text)
    if match is None:
        raise UsageError(f"{option} {text!r}: expected MiB, or a number with K, M, G or T; for example 4000 or 200G")
    return int(match[1]) * _MIB[match[2].upper()]


def _option(name: str) -> str:
    return {"name": "--job-name"}.get(name, "--" + name.replace("_", "-"))
