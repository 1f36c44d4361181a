"""Launchers and their command lines: one `LauncherKind` with its options for each, and the starters made of them.

The options of mpirun are in `mpirun`, since each MPI has its own. The other launchers belong to a site, whatever the
MPI: srun (Slurm), mpiexec (PALS of HPE Cray, under PBS), ibrun (TACC) and flux. Nothing is started here.
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
    """Requested layout of a start; None leaves a number to the launcher. ``pmi`` is the kind of PMI that ranks use."""

    ranks: int
    ranks_per_node: int | None = None
    cpus_per_task: int | None = None
    pmi: str | None = None

    @property
    def nodes(self) -> int | None:
        """The number of nodes that the ranks fill; None where that is left to the launcher."""
        return None if self.ranks_per_node is None else -(-self.ranks // self.ranks_per_node)


@dataclass(frozen=True)
class LauncherKind:
    """Options of one kind of launcher, with values in braces; empty for what it has no option for.

    ``forwards`` maps a signal meant for the ranks to the signal that, sent to the launcher, has the same effect on
    ranks on other hosts. ``keeps_codes``: it returns the exit code of a rank even if it then kills others.
    ``teardown_s`` is the time that it may need to kill the ranks on all nodes.
    """

    name: str
    program: tuple[str, ...]
    ranks: tuple[str, ...] = ("-n", "{ranks}")
    always: tuple[str, ...] = ()
    per_node: tuple[str, ...] = ()
    cpus: tuple[str, ...] = ()
    pmi: tuple[str, ...] = ()
    without: tuple[str, ...] = ()
    forwards: Mapping[signal.Signals, signal.Signals] = field(default_factory=lambda: dict(_USER))
    keeps_codes: bool = False
    teardown_s: float = 40.0


MPIRUN: Final = LauncherKind(
    "mpirun",
    ("mpirun",),
    # Open MPI's kills the ranks within half a second at SIGINT, SIGTERM and SIGHUP, and passes SIGUSR1 on.
    forwards=_USER | {signal.SIGTERM: signal.SIGUSR1},
    keeps_codes=True,
    teardown_s=3.0,
)

SRUN: Final = LauncherKind(
    "srun",
    ("srun",),
    ranks=("--ntasks={ranks}",),
    always=(
        # The first rank that fails ends the others at once; one that leaves early gives them ten minutes, in which a
        # profiler may write the report of another one.
        "--kill-on-bad-exit=1",
        "--wait=600",
        # In a job of `sbatch --export=NONE` the ranks would get no environment.
        "--export=ALL",
        # Every rank sees all GPUs of its node: with one each, MPI could not copy from GPU to GPU directly (CUDA IPC).
        "--gpu-bind=none",
        # At a first SIGINT srun would print a list of tasks; with this the ranks get it.
        "--disable-status",
    ),
    # Both: otherwise the number of nodes is that of the job, with its spare and lost nodes.
    per_node=("--nodes={nodes}", "--ntasks-per-node={ranks_per_node}"),
    # Since Slurm 22.05 a step has one core per rank, whatever --cpus-per-task of the job was.
    cpus=("--cpus-per-task={cpus_per_task}",),
    pmi=("--mpi={pmi}",),
    without=("--exclude={lost}", "--nodes={nodes}"),
    # SIGTERM and SIGHUP make srun kill the ranks. To the ranks SIGUSR1 means the same: save, leave with 75.
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

# It reads nodes and ranks per node from the job, binds ranks, and starts srun or the mpirun of the MPI module.
IBRUN: Final = LauncherKind("ibrun", ("ibrun",))

FLUX: Final = LauncherKind(
    "flux",
    ("flux", "run"),
    # As for srun: the first rank that fails ends the others, and every rank sees all GPUs of its node.
    always=("-o", "exit-on-error", "-o", "exit-timeout=600s", "-o", "gpu-affinity=off"),
    per_node=("-N", "{nodes}"),  # it spreads the ranks evenly; --tasks-per-node cannot be combined with -n
    cpus=("-c", "{cpus_per_task}"),
    pmi=("-o", "pmi={pmi}"),
    forwards=_USER | {signal.SIGTERM: signal.SIGTERM},
)

KINDS: Final = {kind.name: kind for kind in (MPIRUN, SRUN, MPIEXEC, IBRUN, FLUX)}
HET_GROUP: Final = "--het-group"  # option of srun: which components of a heterogeneous job
# The memory of a step by CPU, GPU or node, of which Slurm reads one; 0 shares all memory of the job.
_MEMORY: Final = ("SLURM_MEM_PER_CPU", "SLURM_MEM_PER_GPU", "SLURM_MEM_PER_NODE")
# Limit of srun's wait for cores: where all are taken by another step, it retries until the walltime ends.
_PATIENCE_S: Final = 300


def kind_named(name: str, environment: Mapping[str, str] = os.environ) -> LauncherKind:
    """Return the kind of launcher ``name``; "auto" is $HPCDIST_LAUNCHER, which a site sets, or else mpirun.

    Raises UsageError, or ConfigurationError where the variable names none.
    """
    chosen = environment.get(VARIABLE) or MPIRUN.name if name == AUTO else name
    if chosen in KINDS:
        return KINDS[chosen]
    if name == AUTO:
        raise ConfigurationError(f"{VARIABLE}={chosen!r} names no launcher; {_suggestion(chosen, list(KINDS))}")
    raise UsageError(f"--launcher {chosen!r}: unknown launcher; {_suggestion(chosen, [AUTO, *KINDS])}")


def restart_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return ``environment`` for a restart in the same Slurm job: steps may overlap and share all memory.

    After a node has crashed its step does not end, and keeps the cores and the memory of the other nodes. Any srun,
    also that of an mpirun, waits for them until Slurm has declared the node down, unless it may share them.
    """
    own = {name: value for name, value in environment.items() if name not in _MEMORY}
    return own | {"SLURM_OVERLAP": "1", "SLURM_MEM_PER_NODE": "0"}


def _suggestion(name: str, known: Sequence[str]) -> str:
    near = nearest(name, known)
    return f"did you mean {near!r}?" if near else f"choose one of {', '.join(known)}"


@dataclass(frozen=True)
class Starter:
    """A chosen launcher of ``kind`` with the layout to start: one of the site. `MpirunStarter` is that by mpirun."""

    kind: LauncherKind
    layout: LaunchRequest

    def settings(self) -> dict[str, str]:
        """Return the variables to add for the launcher and its ranks."""
        return mpirun.common_settings(self.layout.cpus_per_task or 1)

    def line(self, program: Sequence[str], settings: Mapping[str, str], options: Sequence[str]) -> list[str]:
        """Return the command line that starts ``program`` on all ranks; ``options`` of the launcher override ours.

        The ``settings`` are in the launcher's environment, which its ranks inherit.
        """
        kind, layout = self.kind, self.layout
        # In a heterogeneous job each component has its number of ranks: -n would apply to each of them.
        apart = kind is SRUN and any(option.startswith(HET_GROUP) for option in options)
        words = [*(() if apart else kind.ranks), *kind.always]
        words += kind.per_node if layout.ranks_per_node is not None else ()
        words += kind.cpus if layout.cpus_per_task is not None else ()
        words += kind.pmi if layout.pmi is not None else ()
        if kind is SRUN and "SLURM_JOB_ID" in os.environ:  # outside of a job srun waits for an allocation instead
            words.append(f"--immediate={_PATIENCE_S}")
        return [*kind.program, *self._filled(words), *options, *program]

    def _filled(self, words: Sequence[str], **values: object) -> list[str]:
        known = {**vars(self.layout), "nodes": self.layout.nodes, **values}
        return [word.format_map(known) for word in words]

    def session(self, folder: Path, options: Sequence[str]) -> dict[str, str]:
        """Return the variables for the launcher only, not its ranks; it may keep files in ``folder``."""
        return {}

    def without(self, lost: Sequence[str], left: Sequence[str]) -> list[str]:
        """Return the options that start on the nodes ``left``, not on those ``lost``. Raises MissingCapabilityError."""
        if not self.kind.without:
            raise MissingCapabilityError(
                f"the job has lost {', '.join(lost)}, and {self.kind.name} cannot leave nodes out; submit the job again"
            )
        nodes = self.layout.nodes or len(left)
        return self._filled(self.kind.without, lost=",".join(lost), nodes=nodes)

    def unbound(self, options: Sequence[str]) -> str:
        """Return why ranks are not bound to cores, "" where they are, or where the launcher decides."""
        return ""

    def check(self) -> None:
        """Raise MissingCapabilityError when the launcher is not installed here."""
        name = self.kind.program[0]
        path = shutil.which(name)
        if path is None:
            raise MissingCapabilityError(
                f"no {name} on PATH, which --launcher {self.kind.name} starts; run this on a node of a site that has "
                f"it, or choose another of {', '.join(KINDS)}"
            )
        if self.kind is MPIEXEC:
            launcher = mpirun.identify(Path(path))
            if launcher.vendor != mpirun.UNKNOWN:
                raise MissingCapabilityError(
                    f"{path} is of {launcher.vendor}, not of PALS, which --launcher mpiexec speaks to; write "
                    "--launcher mpirun, or load the site's PALS module"
                )


@dataclass(frozen=True)
class MpirunStarter(Starter):
    """Starter by the mpirun of this environment. Where ``surviving``, the job outlives rank failures (ULFM)."""

    launcher: mpirun.Launcher
    surviving: bool = False
    bound: core_binding.CoreBinding | None = None

    def settings(self) -> dict[str, str]:
        """Return the variables to add for the launcher and its ranks."""
        return mpirun.settings(self.launcher, threads=self.layout.cpus_per_task or 1)

    def line(self, program: Sequence[str], settings: Mapping[str, str], options: Sequence[str]) -> list[str]:
        """Return the command line that starts ``program`` on all ranks; ``options`` of the launcher override ours."""
        extra = mpirun.ulfm_options(self.launcher) if self.surviving else []
        extra += mpirun.per_node(self.launcher, self.layout.ranks_per_node, self._bound(options))
        return mpirun.command(self.launcher, self.layout.ranks, program, settings, [*extra, *options])

    def session(self, folder: Path, options: Sequence[str]) -> dict[str, str]:
        """Return the variables for the folders of this start; the launcher may keep files in ``folder``."""
        own = mpirun.session(self.launcher, folder, options)
        own |= mpirun.transports(self.launcher, options, surviving=self.surviving)
        return own | mpirun.daemons(self.launcher, options) | core_binding.whole_node_step()

    def without(self, lost: Sequence[str], left: Sequence[str]) -> list[str]:
        """Return the options that start on the nodes ``left`` alone."""
        return mpirun.on_hosts(self.launcher, left, self.layout.ranks_per_node)

    def unbound(self, options: Sequence[str]) -> str:
        """Return why ranks are not bound to cores, "" where they are, or where the launcher decides."""
        bound = self._bound(options)
        return "" if bound is None else bound.reason

    def _bound(self, options: Sequence[str]) -> core_binding.CoreBinding | None:
        return self.bound if mpirun.binds(self.launcher, options) else None

    def check(self) -> None:
        """Do nothing: `mpirun.find` has found it."""


def choose_starter(
    kind: LauncherKind, layout: LaunchRequest, survive: str | None, environment: Mapping[str, str] = os.environ
) -> Starter:
    """Return the starter of ``layout`` by a launcher of this ``kind``.

    Raises UsageError for requests that it has no option for, and MissingCapabilityError where there is no mpirun.
    """
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
    """Return the starter of ``layout`` by mpirun; in a Slurm job ranks are bound to the cores of the job."""
    if "SLURM_JOB_ID" not in environment:
        return MpirunStarter(MPIRUN, layout, launcher, surviving)
    each = core_binding.ranks_per_node(layout.ranks, layout.ranks_per_node, environment)
    if layout.cpus_per_task is None:
        layout = replace(layout, cpus_per_task=core_binding.cpus_per_task(each, environment))
    if surviving:  # its options do not bind
        unbound = core_binding.CoreBinding(each, None, "ranks may come later, with --survive")
        return MpirunStarter(MPIRUN, layout, launcher, surviving, unbound)
    apart = launcher.vendor == mpirun.OPEN_MPI
    bound = core_binding.bind_ranks(each, layout.cpus_per_task, core_binding.node_cores(), environment, apart=apart)
    return MpirunStarter(MPIRUN, layout, launcher, surviving, bound)


def _refuse(kind: LauncherKind, layout: LaunchRequest, survive: str | None) -> None:
    if survive is not None and kind is not MPIRUN:
        raise UsageError(
            f"--survive {survive}: {kind.name} ends the job when a rank dies; use --launcher mpirun with Open MPI 5, "
            "or --restarts N, which starts the job again from its newest checkpoint"
        )
    if layout.ranks_per_node is not None and not kind.per_node and kind is not MPIRUN:
        raise UsageError(
            f"--ranks-per-node {layout.ranks_per_node}: {kind.name} reads it from the job; leave it out, and submit "
            f"the job with --ntasks-per-node={layout.ranks_per_node}"
        )
    if layout.pmi is not None and not kind.pmi:
        configurable = ", ".join(name for name, other in KINDS.items() if other.pmi)
        raise UsageError(
            f"--pmi {layout.pmi}: {kind.name} brings its own way for ranks to find each other; leave it out, or choose "
            f"a --launcher that can be told: {configurable}"
        )
