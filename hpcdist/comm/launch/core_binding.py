"""Core binding in a Slurm job: the number of cores that mpirun can bind each rank to (local).

srun binds its ranks by what the job was given. An mpirun inside of the job is told: so many ranks on a node, so many
cores for each. It counts cores from the first that the control group of the job allows, whatever the affinity of the
process that started it, and ends with an error where a node has too few. So ranks are bound only where what this node
and the variables of Slurm say leaves no doubt that each has cores of its own, and otherwise not at all.
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
    """The ``cores`` that this process may use, each by those of its processors (hardware threads) that it may use.

    ``packages`` has how many of them each socket has. ``confined``: the control group allows no other core; ``whole``:
    the node has no other.
    """

    cores: tuple[tuple[int, ...], ...]
    packages: tuple[int, ...]
    confined: bool = True
    whole: bool = True

    @property
    def processors(self) -> int:
        """The number of cores that this process may use."""
        return sum(len(core) for core in self.cores)

    @property
    def per_core(self) -> int:
        """The processors of a core."""
        return max(len(core) for core in self.cores)


@dataclass(frozen=True)
class CoreBinding:
    """Each of ``ranks_per_node`` ranks is bound to ``cores`` of its own; None: not bound.

    There is a ``reason`` for that, or the only rank of a node has all cores of the job there.
    """

    ranks_per_node: int | None
    cores: int | None
    reason: str = ""


def in_slurm(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether this process belongs to a job of Slurm."""
    return "SLURM_JOB_ID" in environment


def ranks_per_node(ranks: int, asked: int | None, environment: Mapping[str, str] = os.environ) -> int | None:
    """Return how many of the ``ranks`` each node of the job gets: as ``asked``, else as its tasks; None: unknown."""
    if asked is not None:
        return asked
    tasks = expand_repeated(environment.get("SLURM_TASKS_PER_NODE", ""))
    if len(tasks) == 1:
        return ranks
    return tasks[0] if len(set(tasks)) == 1 and sum(tasks) == ranks else None


def cpus_per_task(each: int | None, environment: Mapping[str, str] = os.environ) -> int | None:
    """Return the processors of a task of the job, where every node has them for ``each`` ranks; else None.

    The ranks that are started need not be the tasks that the job was submitted for.
    """
    asked, given = environment.get("SLURM_CPUS_PER_TASK", ""), _job_cpus(environment)
    if each is None or not given or not asked.isdecimal() or each * int(asked) > min(given):
        return None
    return int(asked)


def whole_node_step(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the variable with which what an mpirun starts on each node by srun has all processors of the job there.

    Those who start ranks by srun export it with the processors of one task, which all ranks of a node would share.
    """
    given = _job_cpus(environment)
    return {STEP: str(min(given))} if given and STEP in environment else {}


def bind_ranks(
    each: int | None,
    asked: int | None,
    node: NodeCores,
    environment: Mapping[str, str] = os.environ,
    *,
    apart: bool = True,
) -> CoreBinding:
    """Return to how many cores each of ``each`` ranks of a node can be bound, ``asked`` or its share of them.

    ``apart``: the mpirun binds no rank to cores of two sockets, and ends with an error instead, as that of Open MPI.
    """
    if each is None:
        return CoreBinding(None, None, "how many of them a node gets is not known; say --ranks-per-node")
    given, whole_cores = _job_cpus(environment), _counts_cores(environment)
    reason = _doubt(node, given, whole_cores, environment)
    if reason:
        return CoreBinding(each, None, reason)
    count, per_core = len(node.cores), 1 if whole_cores else node.per_core
    # A core for each thread where there is room, else its processors, which is what Slurm counts.
    cores = -(-(asked or 0) // (1 if each * (asked or 0) <= count else per_core))
    if asked is None:  # as many as all nodes have for each of them
        cores = min(count, min(given) // per_core) // each
        while apart and cores > 1 and each > 1 and not _fits(each, cores, node):
            cores -= 1
    ranks = f"{counted(each, 'rank')} x {asked} (--cpus-per-task)" if asked else counted(each, "rank")
    if each * max(1, cores) > count:
        return CoreBinding(
            each, None, f"{ranks} do not fit on the {counted(count, 'core')} that the job has on this node"
        )
    if not cores or each * cores * per_core > min(given):
        return CoreBinding(
            each, None, f"{ranks} do not fit on a node of which the job has {counted(min(given), 'CPU')}"
        )
    if each == 1 and cores == count:
        return CoreBinding(each, None)
    reason = _across(each, cores, node, len(given)) if apart else ""
    return CoreBinding(each, None, reason) if reason else CoreBinding(each, cores)


def _fits(each: int, cores: int, node: NodeCores) -> bool:
    return sum(package // cores for package in node.packages) >= each


def _across(each: int, cores: int, node: NodeCores, nodes: int) -> str:
    """Return why a rank would have cores of two sockets, or could have on another node; "" where none would."""
    if not _fits(each, cores, node):
        sizes = " + ".join(map(str, node.packages))
        return f"{counted(each, 'rank')} x {counted(cores, 'core')} do not fit on sockets of {sizes} cores undivided"
    if cores > 1 and nodes > 1 and len(node.packages) > 1 and not node.whole:
        return "the cores of a rank may be of two sockets where the job has a part of a node; ask for whole ones"
    return ""


def _doubt(node: NodeCores, given: list[int], whole_cores: bool, environment: Mapping[str, str]) -> str:
    """Return why it is not known which cores are those of the job; "" where it is."""
    if "SLURM_HET_SIZE" in environment:
        return "the components of a heterogeneous job differ"
    if "SLURMD_NODENAME" not in environment or not given:
        return "this is no node of the job, whose cores are not known here"
    if not node.cores or not node.confined:
        return "the job has cores by affinity alone, which mpirun does not regard"
    own = environment.get("SLURM_NODEID", "0")
    here = given[int(own)] if own.isdecimal() and int(own) < len(given) else min(given)
    seen = len(node.cores) if whole_cores else node.processors
    if seen > here:
        return f"the job has {here} of the {seen} CPUs that it sees on this node, and Slurm does not say which"
    return ""


def _counts_cores(environment: Mapping[str, str]) -> bool:
    """Whether the CPUs of the job are cores, though these may have several hardware threads."""
    return environment.get("SLURM_THREADS_PER_CORE") == "1" or "nomultithread" in environment.get("SLURM_HINT", "")


def _job_cpus(environment: Mapping[str, str]) -> list[int]:
    """Return the CPUs that the job has on each of its nodes; none where Slurm does not say."""
    return expand_repeated(environment.get("SLURM_JOB_CPUS_PER_NODE", ""))


def expand_repeated(text: str) -> list[int]:
    """Return the numbers in a list of Slurm's: 4(x2),8 is 4, 4, 8; none where ``text`` is none."""
    numbers: list[int] = []
    for part in text.split(","):
        found = _REPEATED.fullmatch(part.strip())
        if found is None:
            return []
        numbers += [int(found[1])] * int(found[2] or 1)
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
    """Return the processors of this node; none where the system does not say."""
    try:
        return parse_ranges((system / "online").read_text())
    except (OSError, ValueError):
        return ()


def hardware_threads(system: Path = SYSTEM) -> tuple[tuple[int, ...], ...]:
    """Return the processors of each core that has several; none where the system does not say."""
    return tuple(core for core in _cores(_online(system), system).values() if len(core) > 1)


def _cores(processors: Iterable[int], system: Path) -> dict[int, tuple[int, ...]]:
    """Return the ``processors`` of each core, by the first of all that it has."""
    found: dict[int, list[int]] = {}
    for one in sorted(processors):
        first = one
        for name in ("core_cpus_list", "thread_siblings_list"):  # the second is the older name
            try:
                first = min(parse_ranges((system / f"cpu{one}" / "topology" / name).read_text()))
                break
            except (OSError, ValueError):
                continue
        found.setdefault(first, []).append(one)
    return {first: tuple(own) for first, own in found.items()}


def _allowed(usable: set[int], system: Path) -> set[int]:
    """Return the processors that this process could be bound to: all of its control group, whatever its affinity."""
    try:
        os.sched_setaffinity(0, _online(system))  # which the kernel cuts to what is allowed
    except OSError:
        return set()
    try:
        return os.sched_getaffinity(0)
    finally:
        os.sched_setaffinity(0, usable)
