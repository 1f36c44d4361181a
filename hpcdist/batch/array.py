"""Batch jobs other than one training: arrays of trials of a sweep or of a script, a benchmark, separate servers.

Loaded only when such a job is submitted.
"""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Final

from hpcdist.batch.job import SUITES, SWEEP, BatchJob, walltime_s
from hpcdist.errors import UsageError
from hpcdist.reporting.units import counted

_MERGE_TIME: Final = "00:10:00"
# Fields of a sweep that the job which merges its results has as well.
_OF_MERGED: Final = (
    *("python", "python_path", "partition", "account", "qos", "constraint", "run_dir", "sbatch_args", "sweep"),
    "folder",
)


@dataclass(frozen=True, kw_only=True)
class ArrayJob(BatchJob):
    """A job array, of which ``at_most`` tasks run at a time (0: as many as there is room for)."""

    at_most: int = 0
    option: ClassVar[str]  # that asks for it

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.links > 1:
            raise UsageError(
                f"--chain {self.links} with {self.option}: a task that is stopped starts again by itself; leave "
                "--chain out"
            )
        if self.at_most < 0:
            raise UsageError(f"--at-most {self.at_most}: give how many tasks run at a time, or 0 for no limit")

    @property
    def count(self) -> int:
        """Number of tasks."""
        raise NotImplementedError

    @property
    def array(self) -> str:
        """The tasks, as sbatch reads them."""
        return f"0-{self.count - 1}" + (f"%{self.at_most}" if self.at_most else "")


@dataclass(frozen=True, kw_only=True)
class SweepJob(ArrayJob):
    """A sweep as a job array: task K runs trial K, on no more ranks than ``nodes`` x ``ranks_per_node`` hold.

    ``trial_ranks`` has the ranks of its trials. Their results and the logs of the tasks lie in ``run_dir``, which
    exists when the job is submitted. With ``retry_failed`` a trial that is recorded as failed is run again.
    """

    template: ClassVar[str] = "sweep.sbatch.j2"
    option: ClassVar[str] = "--array"

    recipe: str = ""
    trial_ranks: tuple[int, ...]
    retry_failed: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_trials(self, self.trial_ranks)
        if self.restarts or self.survive != "none":
            raise UsageError(
                "--restarts and --survive with --array: they would hide what a trial measures; leave them out"
            )
        if "\\" in str(self.run_dir):
            raise UsageError(f"--out {self.run_dir}: Slurm puts no number of a task into a path with \\; rename it")

    @property
    def count(self) -> int:
        """Number of tasks."""
        return len(self.trial_ranks)

    @property
    def limit_s(self) -> int | None:
        """The time after which a trial counts as failed; None where the walltime is not known."""
        return None if self.walltime is None else walltime_s(self.walltime) - self.signal_s

    @property
    def followers(self) -> "tuple[BatchJob, ...]":
        """The job that puts the results of all tasks into one file."""
        return (MergeJob.of(self),)

    def log(self, folder: Path, number: str) -> Path:
        """Return the path of the logs, in which %a stands for the number of a task."""
        return self.run_dir / f"{number}_%a.out"

    @property
    def folder(self) -> str:
        """The directory of the results as a pattern of Slurm's, in which % is written twice."""
        return str(self.run_dir).replace("%", "%%")


@dataclass(frozen=True, kw_only=True)
class ScriptArrayJob(ArrayJob):
    """A script as a job array of ``tasks``: each a run of its own, in a folder of ``run_dir``, that goes on by itself.

    Which of them it is, a script knows by HPCDIST_TASK.
    """

    template: ClassVar[str] = "script_array.sbatch.j2"
    option: ClassVar[str] = "--tasks"

    tasks: int

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tasks < 1:
            raise UsageError(f"--tasks {self.tasks}: give at least 1 task")

    @property
    def count(self) -> int:
        """Number of tasks."""
        return self.tasks

    def log(self, folder: Path, number: str) -> Path:
        """Return the path of the logs, in which %a stands for the number of a task."""
        return folder / f"hpcdist-{number}_%a.out"


@dataclass(frozen=True, kw_only=True)
class MergeJob(BatchJob):
    """Job that puts the results of a `SweepJob` into one file when all of its tasks have ended: the link after it."""

    template: ClassVar[str] = "merge.sbatch.j2"

    recipe: str = ""
    folder: str

    @classmethod
    def of(cls, job: SweepJob) -> "MergeJob":
        """Return the job for the results of ``job``: one core, in the same partition and at the same expense."""
        same = {name: getattr(job, name) for name in _OF_MERGED}
        return cls(**same, nodes=1, name=f"{job.name}-merge", walltime=_MERGE_TIME, check=False, link=2, links=2)

    def log(self, folder: Path, number: str) -> Path:
        """Return the path of the log, which is beside the results."""
        return self.run_dir / f"merge-{number}.out"


@dataclass(frozen=True, kw_only=True)
class BenchmarkJob(BatchJob):
    """Benchmark, one of the SUITES, on nodes that nobody else uses; ``arguments`` are those of `hpcdist bench SUITE`.

    The suite "sweep" measures the trials of ``sweep`` one after the other; ``trial_ranks`` has their ranks.
    """

    template: ClassVar[str] = "benchmark.sbatch.j2"

    recipe: str = ""
    suite: str
    arguments: tuple[str, ...] = ()
    trial_ranks: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.suite not in SUITES:
            raise UsageError(f"--bench {self.suite!r}: choose one of {', '.join(SUITES)}")
        _check_trials(self, self.trial_ranks)
        if bool(self.sweep) != (self.suite == SWEEP):
            raise UsageError(f"--bench {self.suite}: a sweep file belongs to the suite sweep, and to no other")
        if self.links > 1 or self.restarts or self.survive != "none":
            raise UsageError("--chain, --restarts and --survive are for trainings; leave them out with --bench")

    @property
    def on_all_ranks(self) -> bool:
        """Whether all ranks of the job run the benchmark together."""
        return SUITES[self.suite]


@dataclass(frozen=True, kw_only=True)
class ServersJob(BatchJob):
    """A training whose parameter servers have nodes of their own, of another kind: a heterogeneous job.

    The workers are the ranks on ``nodes``, and the first of the world; the servers are the last, as recipes have it.
    """

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
            raise UsageError("--server-partition is empty; give a name, or leave the option out")
        if self.spare_nodes or self.survive != "none":
            raise UsageError(
                "--spare-nodes and --survive with --server-nodes: srun starts both kinds of nodes as one, and ends all "
                "with the first; use --restarts, or leave them out"
            )
        for argument in self.server_sbatch_args:
            # Checks it as it does others; nodes of another kind may have other features, memory and QOS.
            alone = dataclasses.replace(self, server_sbatch_args=(), constraint=None, mem=None, qos=None)
            dataclasses.replace(alone, sbatch_args=(argument,))

    @property
    def server_gpus_per_node(self) -> int:
        """GPUs of a node of servers: one a rank where workers have some, since a server computes as they do."""
        return self.server_ranks_per_node if self.gpus_per_node else 0

    @property
    def gpus_of_nodes(self) -> set[int]:
        """The GPUs that are asked for of a node of each kind."""
        return {self.gpus_per_node, self.server_gpus_per_node}

    @property
    def servers(self) -> int:
        """Number of ranks that serve."""
        return self.server_nodes * self.server_ranks_per_node

    @property
    def ranks(self) -> int:
        """Number of ranks of the whole job, servers included."""
        return super().ranks + self.servers


def _check_trials(job: BatchJob, trial_ranks: tuple[int, ...]) -> None:
    """Raise UsageError for a trial that has more ranks than the job."""
    for trial, ranks in enumerate(trial_ranks):
        if ranks > job.ranks:
            raise UsageError(
                f"trial {trial} of the sweep has {counted(ranks, 'rank')}, and {counted(job.nodes, 'node')} x "
                f"{counted(job.ranks_per_node, 'rank')} hold {job.ranks}; use --nodes "
                f"{-(-ranks // job.ranks_per_node)}, or more --ranks-per-node"
            )
