"""Core binding in a Slurm job: the number of cores that mpirun can bind each rank to. Local.

Ranks are bound only if this node and Slurm's variables prove that each rank gets separate cores. Otherwise, mpirun
could fail.
"""

import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from hpcdist.reporting.units import counted, parse_ranges

SYSTEM: Final = Path("/sys/devices/system/cpu")
STEP: Final = "SRUN_CPUS_PER_TASK"
_REPEATED: Final = re.compile(r"(\d+)(?:\(x(\d+)\))?", re.ASCII)


@dataclass(frozen=True)
class NodeCores:
    """Cores of this node that this process may use, with the hardware threads of each core and the cores per socket."""

    cores: tuple[tuple[int, ...], ...]  # usable hardware threads of each core
    packages: tuple[int, ...]  # number of these cores in each socket
    confined: bool = True  # the control group allows only these cores
    whole: bool = True  # these are all cores of the node

    @property
    def processors(self) -> int:
        """The number of hardware threads that this process may use."""
        return sum(len(core) for core in self.cores)

    @property
    def per_core(self) -> int:
        """The largest number of usable hardware threads of one core."""
        return max(len(core) for core in self.cores)


@dataclass(frozen=True)
class CoreBinding:
    """Number of cores to which each rank of a node is bound, or the reason why ranks are not bound."""

    ranks_per_node: int | None
    cores: int | None  # per rank; None: ranks are not bound
    reason: str = ""  # why ranks are not bound; "": no binding is necessary


def ranks_per_node(ranks: int, requested: int | None, environment: Mapping[str, str] = os.environ) -> int | None:
    """Return the ranks per node: ``requested``, else from Slurm, or None if unknown. ``ranks``: ranks of the job."""
    if requested is not None:
        return requested
    tasks = expand_repeated(environment.get("SLURM_TASKS_PER_NODE", ""))
    if len(tasks) == 1:
        return ranks
    return tasks[0] if len(set(tasks)) == 1 and sum(tasks) == ranks else None


def cpus_per_task(per_node: int | None, environment: Mapping[str, str] = os.environ) -> int | None:
    """Return Slurm's CPUs per task, or None if unknown or if a node has too few CPUs for ``per_node`` tasks."""
    task_cpus, job_cpus = environment.get("SLURM_CPUS_PER_TASK", ""), _job_cpus(environment)
    if per_node is None or not job_cpus or not task_cpus.isdecimal() or per_node * int(task_cpus) > min(job_cpus):
        return None
    return int(task_cpus)


def whole_node_step(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return environment variables {name: value} that let mpirun's internal srun use all CPUs of the job."""
    job_cpus = _job_cpus(environment)
    return {STEP: str(min(job_cpus))} if job_cpus and STEP in environment else {}


def bind_ranks(
    per_node: int | None,
    requested: int | None,
    node: NodeCores,
    environment: Mapping[str, str] = os.environ,
    *,
    apart: bool = True,  # no rank may get cores of two sockets
) -> CoreBinding:
    """Return the binding of ``per_node`` ranks on ``node``. ``requested``: cores per rank, or None for the maximum."""
    if per_node is None:
        return CoreBinding(None, None, "the number of ranks per node is unknown; set --ranks-per-node")
    job_cpus = _job_cpus(environment)
    has_one_thread = environment.get("SLURM_THREADS_PER_CORE") == "1"
    whole_cores = has_one_thread or "nomultithread" in environment.get("SLURM_HINT", "")
    reason = _doubt(node, job_cpus, whole_cores, environment)
    if reason:
        return CoreBinding(per_node, None, reason)
    count, per_core = len(node.cores), 1 if whole_cores else node.per_core
    # One core per thread if there are enough cores, else one processor per thread, which is the unit of Slurm.
    cores = -(-(requested or 0) // (1 if per_node * (requested or 0) <= count else per_core))
    if requested is None:  # as many as the smallest node has per rank
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
    if not _fits(per_node, cores, node):
        sizes = " + ".join(map(str, node.packages))
        return (
            f"{counted(per_node, 'rank')} x {counted(cores, 'core')} do not fit on sockets of {sizes} cores undivided"
        )
    if cores > 1 and nodes > 1 and len(node.packages) > 1 and not node.whole:
        return "a rank may get cores of two sockets if the job has only a part of a node; ask for whole nodes"
    return ""


def _doubt(node: NodeCores, job_cpus: list[int], whole_cores: bool, environment: Mapping[str, str]) -> str:
    if "SLURM_HET_SIZE" in environment:
        return "the components of a heterogeneous job differ"
    if "SLURMD_NODENAME" not in environment or not job_cpus:
        return "this process is on no node of the job, whose cores are not known here"
    if not node.cores or not node.confined:
        return "the job has cores by affinity alone, which mpirun ignores"
    node_index = environment.get("SLURM_NODEID", "0")
    here = job_cpus[int(node_index)] if node_index.isdecimal() and int(node_index) < len(job_cpus) else min(job_cpus)
    seen = len(node.cores) if whole_cores else node.processors
    if seen > here:
        return f"the job has {here} of the {seen} CPUs that it sees on this node, and Slurm does not say which"
    return ""


def _job_cpus(environment: Mapping[str, str]) -> list[int]:
    return expand_repeated(environment.get("SLURM_JOB_CPUS_PER_NODE", ""))


def expand_repeated(text: str) -> list[int]:
    """Expand a Slurm list with repeat counts: "4(x2),8" becomes [4, 4, 8]. Returns [] if ``text`` is invalid."""
    numbers: list[int] = []
    for part in text.split(","):
        match = _REPEATED.fullmatch(part.strip())
        if match is None:
            return []
        numbers += [int(match[1])] * int(match[2] or 1)
    return numbers


def node_cores(system: Path = SYSTEM) -> NodeCores:
    """Return the cores of this node that this process may use, from the sysfs directory ``system``."""
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
    try:
        return parse_ranges((system / "online").read_text())
    except (OSError, ValueError):
        return ()


def hardware_threads(system: Path = SYSTEM) -> tuple[tuple[int, ...], ...]:
    """Return one tuple of hardware threads for each core with at least two. ``system``: sysfs directory of CPUs."""
    return tuple(core for core in _cores(_online(system), system).values() if len(core) > 1)


def _cores(processors: Iterable[int], system: Path) -> dict[int, tuple[int, ...]]:
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
    # {lowest hardware thread of a core: all hardware threads of this core}
    return {first: tuple(group) for first, group in by_first.items()}


def _allowed(usable: set[int], system: Path) -> set[int]:
    try:
        os.sched_setaffinity(0, _online(system))  # the kernel removes processors that the control group forbids
    except OSError:
        return set()
    try:
        return os.sched_getaffinity(0)
    finally:
        os.sched_setaffinity(0, usable)
