"""Batch jobs other than one training: arrays of sweep trials or scripts, benchmarks, separate parameter servers."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Final

from hpcdist.batch.job import SUITES, SWEEP, BatchJob, walltime_s
from hpcdist.errors import UsageError
from hpcdist.reporting.units import counted

_MERGE_TIME: Final = "00:10:00"
# Fields that a merge job copies from its sweep job.
_OF_MERGED: Final = (
    *("python", "python_path", "partition", "account", "qos", "constraint", "run_dir", "sbatch_args", "sweep"),
    "folder",
)


@dataclass(frozen=True, kw_only=True)
class ArrayJob(BatchJob):
    """Batch job that Slurm runs as a job array."""

    at_most: int = 0  # maximum number of concurrent tasks (0: no limit)
    option: ClassVar[str]  # the option of `hpcdist submit` that requests this kind of job

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.links > 1:
            raise UsageError(
                f"--chain {self.links} with {self.option} is not supported and not needed: a stopped task restarts "
                "without a chain; leave --chain out"
            )
        if self.at_most < 0:
            raise UsageError(f"--at-most {self.at_most}: the number of concurrent tasks must be at least 0 (no limit)")

    @property
    def count(self) -> int:
        """Number of tasks of the array."""
        raise NotImplementedError

    @property
    def array(self) -> str:
        """Task numbers as a Slurm --array value, such as 0-9%4: tasks 0 to 9, at most 4 at a time."""
        return f"0-{self.count - 1}" + (f"%{self.at_most}" if self.at_most else "")


@dataclass(frozen=True, kw_only=True)
class SweepJob(ArrayJob):
    """Job array of a parameter sweep: task K measures combination number K of the parameter values."""

    template: ClassVar[str] = "sweep.sbatch.j2"
    option: ClassVar[str] = "--array"

    recipe: str = ""
    trial_ranks: tuple[int, ...]  # number of ranks of each trial, at most ``nodes`` x ``ranks_per_node``
    retry_failed: bool = False  # repeat failed trials

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_trials(self, self.trial_ranks)
        if self.restarts or self.survive != "none":
            raise UsageError(
                "--array cannot be combined with --restarts or --survive, because restarts would distort the measured "
                "times; leave both options out"
            )
        if "\\" in str(self.run_dir):
            raise UsageError(
                f"--out {self.run_dir}: Slurm cannot put a task number into a path with a backslash; rename the "
                "directory"
            )

    @property
    def count(self) -> int:
        return len(self.trial_ranks)

    @property
    def limit_s(self) -> int | None:
        """Time limit of one task's measurement in seconds, or None if the walltime is unknown."""
        return None if self.walltime is None else walltime_s(self.walltime) - self.signal_s

    @property
    def followers(self) -> "tuple[BatchJob, ...]":
        return (MergeJob.of(self),)

    def log(self, folder: Path, number: str) -> Path:
        return self.run_dir / f"{number}_%a.out"

    @property
    def folder(self) -> str:
        """Path of the results directory with each % doubled, as Slurm's file name patterns require."""
        return str(self.run_dir).replace("%", "%%")


@dataclass(frozen=True, kw_only=True)
class ScriptArrayJob(ArrayJob):
    """Job array that runs a script ``tasks`` times, in subfolders of ``run_dir``. $HPCDIST_TASK is the task number."""

    template: ClassVar[str] = "script_array.sbatch.j2"
    option: ClassVar[str] = "--tasks"

    tasks: int

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tasks < 1:
            raise UsageError(f"--tasks {self.tasks}: give at least 1 task")

    @property
    def count(self) -> int:
        return self.tasks

    def log(self, folder: Path, number: str) -> Path:
        return folder / f"hpcdist-{number}_%a.out"


@dataclass(frozen=True, kw_only=True)
class MergeJob(BatchJob):
    """Job that merges the per-task result files of a `SweepJob` into one file, after all tasks have ended."""

    template: ClassVar[str] = "merge.sbatch.j2"

    recipe: str = ""
    folder: str

    @classmethod
    def of(cls, job: SweepJob) -> "MergeJob":
        """Return the job that merges the results of the sweep ``job``, on the same partition."""
        same = {name: getattr(job, name) for name in _OF_MERGED}
        return cls(**same, nodes=1, name=f"{job.name}-merge", walltime=_MERGE_TIME, check=False, link=2, links=2)

    def log(self, folder: Path, number: str) -> Path:
        return self.run_dir / f"merge-{number}.out"


@dataclass(frozen=True, kw_only=True)
class BenchmarkJob(BatchJob):
    """Job that runs a benchmark suite of `hpcdist bench` on exclusive nodes."""

    template: ClassVar[str] = "benchmark.sbatch.j2"

    recipe: str = ""
    suite: str
    arguments: tuple[str, ...] = ()  # options of `hpcdist bench SUITE`
    trial_ranks: tuple[int, ...] = ()  # number of ranks of each parameter combination of ``sweep``

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.suite not in SUITES:
            raise UsageError(f"--bench {self.suite!r}: unknown suite; choose one of {', '.join(SUITES)}")
        _check_trials(self, self.trial_ranks)
        if bool(self.sweep) != (self.suite == SWEEP):
            raise UsageError(
                f"--bench {self.suite}: the suite sweep needs a sweep file, and the other suites take no sweep file"
            )
        if self.links > 1 or self.restarts or self.survive != "none":
            raise UsageError("--bench cannot be combined with --chain, --restarts or --survive; leave them out")

    @property
    def on_all_ranks(self) -> bool:
        """True if the job script starts all ranks of the benchmark, False if the benchmark starts its own ranks."""
        return self.suite != SWEEP


@dataclass(frozen=True, kw_only=True)
class ServersJob(BatchJob):
    """Heterogeneous Slurm job: a training whose parameter servers, its last ranks, run on separate nodes."""

    template: ClassVar[str] = "servers.sbatch.j2"

    server_nodes: int
    server_ranks_per_node: int = 1
    server_partition: str | None = None
    server_sbatch_args: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("server_nodes", "server_ranks_per_node"):
            if getattr(self, name) < 1:
                raise UsageError(f"--{name.replace('_', '-')} {getattr(self, name)}: it must be at least 1")
        if self.server_partition == "":
            raise UsageError("--server-partition is empty; give a name, or leave --server-partition out")
        if self.spare_nodes or self.survive != "none":
            raise UsageError(
                "--spare-nodes and --survive are not supported in a job with --server-nodes; leave both options out, "
                "or use --restarts instead"
            )
        for argument in self.server_sbatch_args:
            # Same checks as for sbatch_args, but server nodes may have other features, memory and QOS.
            alone = dataclasses.replace(self, server_sbatch_args=(), constraint=None, mem=None, qos=None)
            dataclasses.replace(alone, sbatch_args=(argument,))

    @property
    def server_gpus_per_node(self) -> int:
        """GPUs per node of parameter servers: one per rank if the workers have GPUs, else 0."""
        return self.server_ranks_per_node if self.gpus_per_node else 0

    @property
    def gpus_of_nodes(self) -> set[int]:
        return {self.gpus_per_node, self.server_gpus_per_node}

    @property
    def servers(self) -> int:
        """Number of parameter server ranks."""
        return self.server_nodes * self.server_ranks_per_node

    @property
    def ranks(self) -> int:
        return super().ranks + self.servers


def _check_trials(job: BatchJob, trial_ranks: tuple[int, ...]) -> None:
    for trial, ranks in enumerate(trial_ranks):
        if ranks > job.ranks:
            raise UsageError(
                f"trial {trial} of the sweep has {counted(ranks, 'rank')}, but {counted(job.nodes, 'node')} x "
                f"{counted(job.ranks_per_node, 'rank')} provide {job.ranks}; use --nodes "
                f"{-(-ranks // job.ranks_per_node)}, or more --ranks-per-node"
            )
