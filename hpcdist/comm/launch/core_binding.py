"""Core binding in a Slurm job: the number of cores that mpirun can bind each rank to (local).

srun binds its ranks by the allocation. An mpirun inside of the job gets options: so many ranks on a node, so many cores
for each. It counts cores from the first that the control group of the job allows, whatever the affinity of the process
that started it, and fails where a node has too few. So ranks are bound only where this node and the variables of Slurm
prove that each rank has cores of its own, and otherwise not at all.
"""

import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from hpcdist.reporting.hostlist import parse_ranges
from hpcdist.reporting.units import counted

SYSTEM: Final = Path("/sys/devices/system/cpu")
STEP: Final = "SRUN_CPUS_PER_TASK"
_REPEATED: Final = re.compile(r"(\d+)(?:\(x(\d+)\))?", re.ASCII)


@dataclass(frozen=True)
class NodeCores:
    """Cores that this process may use: for each, its usable processors (hardware threads).

    ``packages`` is the number of these cores by socket. ``confined``: the control group allows no other core;
    ``whole``: the node has no other core.
    """

    cores: tuple[tuple[int, ...], ...]
    packages: tuple[int, ...]
    confined: bool = True
    whole: bool = True

    @property
    def processors(self) -> int:
        """The number of processors (hardware threads) that this process may use."""
        return sum(len(core) for core in self.cores)

    @property
    def per_core(self) -> int:
        """The most processors of any core."""
        return max(len(core) for core in self.cores)


@dataclass(frozen=True)
class CoreBinding:
    """Binding of each of ``ranks_per_node`` ranks to ``cores`` cores of its own; None: not bound.

    ``reason`` says why not; it is empty where the only rank of a node has all cores of the job there.
    """

    ranks_per_node: int | None
    cores: int | None
    reason: str = ""


def ranks_per_node(ranks: int, requested: int | None, environment: Mapping[str, str] = os.environ) -> int | None:
    """Return the ranks on each node of the job: ``requested``, else by Slurm's tasks per node; None: unknown."""
    if requested is not None:
        return requested
    tasks = expand_repeated(environment.get("SLURM_TASKS_PER_NODE", ""))
    if len(tasks) == 1:
        return ranks
    return tasks[0] if len(set(tasks)) == 1 and sum(tasks) == ranks else None


def cpus_per_task(per_node: int | None, environment: Mapping[str, str] = os.environ) -> int | None:
    """Return the job's CPUs per task, if every node has that many for ``per_node`` ranks; else None.

    The ranks that are started need not be the tasks for which the job was submitted.
    """
    task_cpus, job_cpus = environment.get("SLURM_CPUS_PER_TASK", ""), _job_cpus(environment)
    if per_node is None or not job_cpus or not task_cpus.isdecimal() or per_node * int(task_cpus) > min(job_cpus):
        return None
    return int(task_cpus)


def whole_node_step(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the variable that gives the daemons of an mpirun, which srun starts, all CPUs of the job on their nodes.

    Job scripts often export it with the CPUs of one task, which all ranks of a node would then share.
    """
    job_cpus = _job_cpus(environment)
    return {STEP: str(min(job_cpus))} if job_cpus and STEP in environment else {}


def bind_ranks(
    per_node: int | None,
    requested: int | None,
    node: NodeCores,
    environment: Mapping[str, str] = os.environ,
    *,
    apart: bool = True,
) -> CoreBinding:
    """Return the binding of ``per_node`` ranks of a node: to ``requested`` cores, or to equal shares of all.

    ``apart``: the mpirun fails for a rank that would be bound to cores of two sockets, as that of Open MPI does.
    """
    if per_node is None:
        return CoreBinding(None, None, "how many of them a node gets is not known; say --ranks-per-node")
    job_cpus, whole_cores = _job_cpus(environment), _counts_cores(environment)
    reason = _doubt(node, job_cpus, whole_cores, environment)
    if reason:
        return CoreBinding(per_node, None, reason)
    count, per_core = len(node.cores), 1 if whole_cores else node.per_core
    # One core per thread where there are enough, else one processor per thread, which is what Slurm counts.
    cores = -(-(requested or 0) // (1 if per_node * (requested or 0) <= count else per_core))
    if requested is None:  # as many as the smallest node has for each rank
        cores = min(count, min(job_cpus) // per_core) // per_node
        while apart and cores > 1 and per_node > 1 and not _fits(per_node, cores, node):
            cores -= 1
    ranks = f"{counted(per_node, 'rank')} x {requested} (--cpus-per-task)" if requested else counted(per_node, "rank")
    if per_node * max(1, cores) > count:
        return CoreBinding(
            per_node, None, f"{ranks} do not fit on the {counted(count, 'core')} that the job has on this node"
        )
    if not cores or per_node * cores * per_core > min(job_cpus):
        return CoreBinding(
            per_node, None, f"{ranks} do not fit on a node of which the job has {counted(min(job_cpus), 'CPU')}"
        )
    if per_node == 1 and cores == count:
        return CoreBinding(per_node, None)
    reason = _across(per_node, cores, node, len(job_cpus)) if apart else ""
    return CoreBinding(per_node, None, reason) if reason else CoreBinding(per_node, cores)


def _fits(per_node: int, cores: int, node: NodeCores) -> bool:
    return sum(package // cores for package in node.packages) >= per_node


def _across(per_node: int, cores: int, node: NodeCores, nodes: int) -> str:
    """Return why a rank would get cores of two sockets, here or perhaps on another node; "" where none would."""
    if not _fits(per_node, cores, node):
        sizes = " + ".join(map(str, node.packages))
        return (
            f"{counted(per_node, 'rank')} x {counted(cores, 'core')} do not fit on sockets of {sizes} cores undivided"
        )
    if cores > 1 and nodes > 1 and len(node.packages) > 1 and not node.whole:
        return "the cores of a rank may be of two sockets where the job has a part of a node; ask for whole ones"
    return ""


def _doubt(node: NodeCores, job_cpus: list[int], whole_cores: bool, environment: Mapping[str, str]) -> str:
    """Return why the cores of the job are not known; "" where they are."""
    if "SLURM_HET_SIZE" in environment:
        return "the components of a heterogeneous job differ"
    if "SLURMD_NODENAME" not in environment or not job_cpus:
        return "this is no node of the job, whose cores are not known here"
    if not node.cores or not node.confined:
        return "the job has cores by affinity alone, which mpirun does not regard"
    own = environment.get("SLURM_NODEID", "0")
    here = job_cpus[int(own)] if own.isdecimal() and int(own) < len(job_cpus) else min(job_cpus)
    seen = len(node.cores) if whole_cores else node.processors
    if seen > here:
        return f"the job has {here} of the {seen} CPUs that it sees on this node, and Slurm does not say which"
    return ""


def _counts_cores(environment: Mapping[str, str]) -> bool:
    """Whether Slurm counts cores as the CPUs of the job, even where they have several hardware threads."""
    return environment.get("SLURM_THREADS_PER_CORE") == "1" or "nomultithread" in environment.get("SLURM_HINT", "")


def _job_cpus(environment: Mapping[str, str]) -> list[int]:
    """Return the number of CPUs of the job on each of its nodes; empty where Slurm does not say."""
    return expand_repeated(environment.get("SLURM_JOB_CPUS_PER_NODE", ""))


def expand_repeated(text: str) -> list[int]:
    """Return the numbers of a Slurm list: 4(x2),8 is 4, 4, 8; empty where ``text`` is no such list."""
    numbers: list[int] = []
    for part in text.split(","):
        match = _REPEATED.fullmatch(part.strip())
        if match is None:
            return []
        numbers += [int(match[1])] * int(match[2] or 1)
    return numbers


def node_cores(system: Path = SYSTEM) -> NodeCores:
    """Return the cores of this node that this process may use."""
    usable = os.sched_getaffinity(0)
    cores = _cores(usable, system)
    packages = Counter(_package(first, system) for first in cores)
    others = (_allowed(usable, system), _online(system))
    confined, whole = (_cores(processors, system).keys() == cores.keys() for processors in others)
    return NodeCores(tuple(cores.values()), tuple(packages.values()), confined, whole)


def _package(processor: int, system: Path) -> str:
    try:
        return (system / f"cpu{processor}" / "topology" / "physical_package_id").read_text().strip()
    except OSError:
        return ""


def _online(system: Path) -> tuple[int, ...]:
    """Return the online processors of this node; empty where the system does not say."""
    try:
        return parse_ranges((system / "online").read_text())
    except (OSError, ValueError):
        return ()


def hardware_threads(system: Path = SYSTEM) -> tuple[tuple[int, ...], ...]:
    """Return the processors of each core that has several; empty where the system does not say."""
    return tuple(core for core in _cores(_online(system), system).values() if len(core) > 1)


def _cores(processors: Iterable[int], system: Path) -> dict[int, tuple[int, ...]]:
    """Return the ``processors`` grouped by core; the key is the first of all processors of the core."""
    by_first: dict[int, list[int]] = {}
    for processor in sorted(processors):
        first = processor
        for name in ("core_cpus_list", "thread_siblings_list"):  # the second is the older name
            try:
                first = min(parse_ranges((system / f"cpu{processor}" / "topology" / name).read_text()))
                break
            except (OSError, ValueError):
                continue
        by_first.setdefault(first, []).append(processor)
    return {first: tuple(own) for first, own in by_first.items()}


def _allowed(usable: set[int], system: Path) -> set[int]:
    """Return the processors that this process could be bound to: all of its control group, whatever its affinity."""
    try:
        os.sched_setaffinity(0, _online(system))  # the kernel reduces the mask to the processors allowed
    except OSError:
        return set()
    try:
        return os.sched_getaffinity(0)
    finally:
        os.sched_setaffinity(0, usable)
