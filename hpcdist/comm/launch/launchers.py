"""Launchers and their command lines: one `LauncherKind` with options per launcher, and the starters that use it.

Launchers of a site are srun (Slurm), mpiexec (PALS of HPE Cray, under PBS), ibrun (TACC) and flux. See also `mpirun`.
"""

import os
import shutil
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from hpcdist.comm.launch import core_binding, mpirun
from hpcdist.errors import ConfigurationError, MissingCapabilityError, UsageError
from hpcdist.reporting.nearest import nearest

VARIABLE: Final = "HPCDIST_LAUNCHER"
AUTO: Final = "auto"

_USER = {number: number for number in (signal.SIGUSR1, signal.SIGUSR2)}


@dataclass(frozen=True)
class LaunchRequest:
    """Ranks, cores and PMI type that the user requested. None: the launcher decides."""

    ranks: int
    ranks_per_node: int | None = None
    cpus_per_task: int | None = None
    pmi: str | None = None

    @property
    def nodes(self) -> int | None:
        """The number of nodes that the ranks need, or None if the launcher decides."""
        return None if self.ranks_per_node is None else -(-self.ranks // self.ranks_per_node)


@dataclass(frozen=True)
class LauncherKind:
    """Command-line options of one type of launcher. () means that the launcher has no such option."""

    name: str
    program: tuple[str, ...]
    ranks: tuple[str, ...] = ("-n", "{ranks}")
    always: tuple[str, ...] = ()
    per_node: tuple[str, ...] = ()
    cpus: tuple[str, ...] = ()
    pmi: tuple[str, ...] = ()
    without: tuple[str, ...] = ()
    # {signal for the ranks: signal to send to the launcher, which then sends the first signal to the ranks}
    forwards: Mapping[signal.Signals, signal.Signals] = field(default_factory=lambda: dict(_USER))
    keeps_codes: bool = False  # the launcher returns the exit code of the failed rank
    teardown_s: float = 40.0  # time that the launcher may need to kill all ranks


MPIRUN: Final = LauncherKind(
    "mpirun",
    ("mpirun",),
    # Open MPI's mpirun kills the ranks within half a second at SIGINT, SIGTERM and SIGHUP, and forwards SIGUSR1.
    forwards=_USER | {signal.SIGTERM: signal.SIGUSR1},
    keeps_codes=True,
    teardown_s=3.0,
)

SRUN: Final = LauncherKind(
    "srun",
    ("srun",),
    ranks=("--ntasks={ranks}",),
    always=(
        # The first rank that fails ends the others at once; a rank that exits early gives them ten minutes, in which a
        # profiler may write its report.
        "--kill-on-bad-exit=1",
        "--wait=600",
        # In a job of `sbatch --export=NONE` the ranks would get no environment.
        "--export=ALL",
        # Every rank sees all GPUs of its node: with one GPU each, MPI could not copy between GPUs directly (CUDA IPC).
        "--gpu-bind=none",
        # At a first SIGINT srun would print a list of tasks; with this option the ranks get the signal.
        "--disable-status",
    ),
    # Both, because otherwise all nodes of the job are used, including spare and lost nodes.
    per_node=("--nodes={nodes}", "--ntasks-per-node={ranks_per_node}"),
    # Since Slurm 22.05 a step has one core per rank, whatever --cpus-per-task of the job was.
    cpus=("--cpus-per-task={cpus_per_task}",),
    pmi=("--mpi={pmi}",),
    without=("--exclude={lost}", "--nodes={nodes}"),
    # SIGTERM and SIGHUP make srun kill the ranks. For the ranks, SIGUSR1 means the same: save, exit with 75.
    forwards=_USER | {signal.SIGINT: signal.SIGINT, signal.SIGTERM: signal.SIGUSR1},
)

MPIEXEC: Final = LauncherKind(
    "mpiexec",
    ("mpiexec",),
    always=("--genvall",),  # the whole environment
    per_node=("--ppn", "{ranks_per_node}"),
    cpus=("--depth", "{cpus_per_task}", "--cpu-bind", "depth"),
    pmi=("--pmi={pmi}",),
    forwards=_USER | {signal.SIGTERM: signal.SIGTERM},
)

# ibrun reads nodes and ranks per node from the job, binds ranks, and starts srun or the MPI module's mpirun.
IBRUN: Final = LauncherKind("ibrun", ("ibrun",))

FLUX: Final = LauncherKind(
    "flux",
    ("flux", "run"),
    # As for srun: the first failed rank ends the others, and every rank sees all GPUs of its node.
    always=("-o", "exit-on-error", "-o", "exit-timeout=600s", "-o", "gpu-affinity=off"),
    per_node=("-N", "{nodes}"),  # flux spreads ranks evenly; --tasks-per-node cannot be combined with -n
    cpus=("-c", "{cpus_per_task}"),
    pmi=("-o", "pmi={pmi}"),
    forwards=_USER | {signal.SIGTERM: signal.SIGTERM},
)

KINDS: Final = {kind.name: kind for kind in (MPIRUN, SRUN, MPIEXEC, IBRUN, FLUX)}
HET_GROUP: Final = "--het-group"  # option of srun that selects components of a heterogeneous job
# The memory of a step by CPU, GPU or node, of which Slurm reads one; 0 shares all memory of the job.
_MEMORY: Final = ("SLURM_MEM_PER_CPU", "SLURM_MEM_PER_GPU", "SLURM_MEM_PER_NODE")
# Limit of srun's wait for cores: if another step has all cores, srun retries until the walltime ends.
_PATIENCE_S: Final = 300


def kind_named(name: str, environment: Mapping[str, str] = os.environ) -> LauncherKind:
    """Return the `LauncherKind` of the launcher ``name``. "auto" means $HPCDIST_LAUNCHER, or mpirun if it is unset."""
    chosen = environment.get(VARIABLE) or MPIRUN.name if name == AUTO else name
    if chosen in KINDS:
        return KINDS[chosen]
    if name == AUTO:
        raise ConfigurationError(f"{VARIABLE}={chosen!r} is an unknown launcher; {_suggestion(chosen, list(KINDS))}")
    raise UsageError(f"--launcher {chosen!r} is an unknown launcher; {_suggestion(chosen, [AUTO, *KINDS])}")


def restart_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return a copy of ``environment``, changed so that srun can start again in the same Slurm job."""
    kept = {name: value for name, value in environment.items() if name not in _MEMORY}
    # The new step may share cores and memory with the old step: after a node crash, the old step keeps both until Slurm
    # declares the node down.
    return kept | {"SLURM_OVERLAP": "1", "SLURM_MEM_PER_NODE": "0"}


def _suggestion(name: str, names: Sequence[str]) -> str:
    near = nearest(name, names)
    return f"did you mean {near!r}?" if near else f"choose one of {', '.join(names)}"


@dataclass(frozen=True)
class Starter:
    """Builder of command lines for the launcher ``kind``. ``layout``: requested ranks, cores and PMI type."""

    kind: LauncherKind
    layout: LaunchRequest

    def settings(self) -> dict[str, str]:
        """Return {name: value} of environment variables to set for the launcher and the ranks."""
        return mpirun.common_settings(self.layout.cpus_per_task or 1)

    def line(self, program: Sequence[str], settings: Mapping[str, str], options: Sequence[str]) -> list[str]:
        """Return the launcher command for ``program``, with variables ``settings`` and the user's ``options``."""
        kind, layout = self.kind, self.layout
        # In a heterogeneous job each component has its number of ranks: -n would apply to each component.
        apart = kind is SRUN and any(option.startswith(HET_GROUP) for option in options)
        words = [*(() if apart else kind.ranks), *kind.always]
        words += kind.per_node if layout.ranks_per_node is not None else ()
        words += kind.cpus if layout.cpus_per_task is not None else ()
        words += kind.pmi if layout.pmi is not None else ()
        if kind is SRUN and "SLURM_JOB_ID" in os.environ:  # outside of a job srun waits for an allocation instead
            words.append(f"--immediate={_PATIENCE_S}")
        return [*kind.program, *self._filled(words), *options, *program]

    def _filled(self, words: Sequence[str], **values: object) -> list[str]:
        fields = {**vars(self.layout), "nodes": self.layout.nodes, **values}
        return [word.format_map(fields) for word in words]

    def session(self, folder: Path, options: Sequence[str]) -> dict[str, str]:
        """Return {name: value} of launcher variables. ``folder``: for session files. ``options``: from the user."""
        return {}

    def without(self, lost: Sequence[str], left: Sequence[str]) -> list[str]:
        """Return launcher options to use nodes ``left``, not ``lost``. Raises MissingCapabilityError if impossible."""
        if not self.kind.without:
            raise MissingCapabilityError(
                f"the nodes {', '.join(lost)} of the job have failed, and the launcher {self.kind.name} cannot exclude "
                "nodes; submit the job again"
            )
        nodes = self.layout.nodes or len(left)
        return self._filled(self.kind.without, lost=",".join(lost), nodes=nodes)

    def unbound(self, options: Sequence[str]) -> str:
        """Return the reason why ranks are not bound to cores, or "". ``options``: the user's launcher options."""
        return ""

    def check(self) -> None:
        """Raise MissingCapabilityError if the launcher is not installed on this host."""
        name = self.kind.program[0]
        path = shutil.which(name)
        if path is None:
            raise MissingCapabilityError(
                f"the command {name} is not on PATH, but --launcher {self.kind.name} needs {name}; use a host that has "
                f"{name}, or choose another launcher: {', '.join(KINDS)}"
            )
        if self.kind is MPIEXEC:
            launcher = mpirun.identify(Path(path))
            if launcher.vendor != mpirun.UNKNOWN:
                raise MissingCapabilityError(
                    f"{path} is the mpiexec of {launcher.vendor}, but --launcher mpiexec supports only PALS; use "
                    "--launcher mpirun, or load the site's PALS module"
                )


@dataclass(frozen=True)
class MpirunStarter(Starter):
    """Builder of mpirun command lines."""

    launcher: mpirun.Launcher
    surviving: bool = False  # the job must survive rank failures (ULFM)
    bound: core_binding.CoreBinding | None = None

    def settings(self) -> dict[str, str]:
        return mpirun.settings(self.launcher, threads=self.layout.cpus_per_task or 1)

    def line(self, program: Sequence[str], settings: Mapping[str, str], options: Sequence[str]) -> list[str]:
        extra = mpirun.ulfm_options(self.launcher) if self.surviving else []
        extra += mpirun.per_node(self.launcher, self.layout.ranks_per_node, self._bound(options))
        return mpirun.command(self.launcher, self.layout.ranks, program, settings, [*extra, *options])

    def session(self, folder: Path, options: Sequence[str]) -> dict[str, str]:
        variables = mpirun.session(self.launcher, folder, options)
        variables |= mpirun.transports(self.launcher, options, surviving=self.surviving)
        return variables | mpirun.daemons(self.launcher, options) | core_binding.whole_node_step()

    def without(self, lost: Sequence[str], left: Sequence[str]) -> list[str]:
        return mpirun.on_hosts(self.launcher, left, self.layout.ranks_per_node)

    def unbound(self, options: Sequence[str]) -> str:
        bound = self._bound(options)
        return "" if bound is None else bound.reason

    def _bound(self, options: Sequence[str]) -> core_binding.CoreBinding | None:
        return self.bound if mpirun.binds(self.launcher, options) else None

    def check(self) -> None:
        """Do nothing, because `mpirun.find` has already found the launcher."""


def choose_starter(
    kind: LauncherKind, layout: LaunchRequest, survive: str | None, environment: Mapping[str, str] = os.environ
) -> Starter:
    """Return a `Starter`. Raises UsageError if launcher ``kind`` does not support ``layout`` or ``survive``."""
    _refuse(kind, layout, survive)
    if kind is MPIRUN:
        return _mpirun(mpirun.find(environment), layout, survive is not None, environment)
    cores = environment.get("SLURM_CPUS_PER_TASK", "")  # of the job
    if kind is SRUN and layout.cpus_per_task is None and cores.isdecimal():
        layout = replace(layout, cpus_per_task=int(cores))
    return Starter(kind, layout)


def _mpirun(
    launcher: mpirun.Launcher, layout: LaunchRequest, surviving: bool, environment: Mapping[str, str]
) -> MpirunStarter:
    if "SLURM_JOB_ID" not in environment:
        return MpirunStarter(MPIRUN, layout, launcher, surviving)
    per_node = core_binding.ranks_per_node(layout.ranks, layout.ranks_per_node, environment)
    if layout.cpus_per_task is None:
        layout = replace(layout, cpus_per_task=core_binding.cpus_per_task(per_node, environment))
    if surviving:  # the options of ULFM do not bind
        unbound = core_binding.CoreBinding(per_node, None, "with --survive, new ranks may join later")
        return MpirunStarter(MPIRUN, layout, launcher, surviving, unbound)
    apart = launcher.vendor == mpirun.OPEN_MPI
    bound = core_binding.bind_ranks(per_node, layout.cpus_per_task, core_binding.node_cores(), environment, apart=apart)
    return MpirunStarter(MPIRUN, layout, launcher, surviving, bound)


def _refuse(kind: LauncherKind, layout: LaunchRequest, survive: str | None) -> None:
    if survive is not None and kind is not MPIRUN:
        raise UsageError(
            f"--survive {survive}: the launcher {kind.name} ends the job when a rank dies; use --launcher mpirun with "
            "Open MPI 5, or --restarts N, which starts the job again from its newest checkpoint"
        )
    if layout.ranks_per_node is not None and not kind.per_node and kind is not MPIRUN:
        raise UsageError(
            f"--ranks-per-node {layout.ranks_per_node}: the launcher {kind.name} takes this number from the Slurm job; "
            f"omit --ranks-per-node, and submit the job with --ntasks-per-node={layout.ranks_per_node}"
        )
    if layout.pmi is not None and not kind.pmi:
        configurable = ", ".join(name for name, other in KINDS.items() if other.pmi)
        raise UsageError(
            f"--pmi {layout.pmi}: the launcher {kind.name} chooses the PMI by itself; omit --pmi, or choose one of "
            f"these launchers: {configurable}"
        )
