"""How many cores of its own each rank of a job of Slurm can be bound to by the mpirun of an MPI (local).

srun binds its ranks by what the job was given. An mpirun inside of the job is told: so many ranks on a node, so many
cores for each. It counts cores from the first that the control group of the job allows, whatever the affinity of the
process that started it, and ends with an error where a node has too few. So ranks are bound only where what this node
and the variables of Slurm say leaves no doubt that each has cores of its own, and otherwise not at all.
"""

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from hpcdist.comm.diagnosis_text import read_spans

SYSTEM: Final = Path("/sys/devices/system/cpu")
_REPEATED: Final = re.compile(r"(\d+)(?:\(x(\d+)\))?", re.ASCII)


@dataclass(frozen=True)
class Node:
    """The ``cores`` that this process may use, each by those of its processors (hardware threads) that it may use.

    ``confined``: the control group allows no other core.
    """

    cores: tuple[tuple[int, ...], ...]
    confined: bool = True

    @property
    def processors(self) -> int:
        """How many this process may use."""
        return sum(len(core) for core in self.cores)

    @property
    def per_core(self) -> int:
        """The processors of a core."""
        return max(len(core) for core in self.cores)


@dataclass(frozen=True)
class Bound:
    """Each of ``ranks_per_node`` ranks is bound to ``cores`` of its own; None: not bound, for a ``reason``.

    Without a reason it is left to the launcher.
    """

    ranks_per_node: int | None = None
    cores: int | None = None
    reason: str = ""


LEFT: Final = Bound()


def in_slurm(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether this process belongs to a job of Slurm."""
    return "SLURM_JOB_ID" in environment


def ranks_per_node(ranks: int, asked: int | None, environment: Mapping[str, str] = os.environ) -> int | None:
    """Return how many of the ``ranks`` each node of the job gets: as ``asked``, else as its tasks; None: unknown."""
    if asked is not None:
        return asked
    tasks = repeated(environment.get("SLURM_TASKS_PER_NODE", ""))
    if len(tasks) == 1:
        return ranks
    return tasks[0] if len(set(tasks)) == 1 and sum(tasks) == ranks else None


def cpus_per_task(each: int | None, environment: Mapping[str, str] = os.environ) -> int | None:
    """Return the processors of a task of the job, where every node has them for ``each`` ranks; else None.

    The ranks that are started need not be the tasks that the job was submitted for.
    """
    asked, given = environment.get("SLURM_CPUS_PER_TASK", ""), _given(environment)
    if each is None or not given or not asked.isdecimal() or each * int(asked) > min(given):
        return None
    return int(asked)


def bound(each: int | None, asked: int | None, node: Node, environment: Mapping[str, str] = os.environ) -> Bound:
    """Return to how many cores each of ``each`` ranks of a node can be bound, ``asked`` or its share of them."""
    if each is None:
        return Bound(reason="how many of them a node gets is not known; say --ranks-per-node")
    given, whole_cores = _given(environment), _counts_cores(environment)
    reason = _doubt(node, given, whole_cores, environment)
    if reason:
        return Bound(each, None, reason)
    count, per_core = len(node.cores), 1 if whole_cores else node.per_core
    cores = count // each
    if asked is not None:
        # A core for each thread where there is room, else its processors, which is what Slurm counts.
        cores = asked if each * asked <= count else -(-asked // per_core)
    if not cores or each * cores > count:
        wanted = f"{each} ranks" if asked is None else f"{each} ranks x {asked} (--cpus-per-task)"
        return Bound(each, None, f"{wanted} do not fit on the {count} cores that the job has on this node")
    if each * cores * per_core > min(given):
        if asked is not None:
            return Bound(each, None, f"a node of the job has {min(given)} CPUs, too few for {each} ranks x {asked}")
        cores = min(given) // (each * per_core)
        if not cores:
            return Bound(each, None, f"a node of the job has {min(given)} CPUs, too few for {each} ranks")
    return Bound(each, cores)


def _doubt(node: Node, given: list[int], whole_cores: bool, environment: Mapping[str, str]) -> str:
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


def _given(environment: Mapping[str, str]) -> list[int]:
    """Return the CPUs that the job has on each of its nodes; none where Slurm does not say."""
    return repeated(environment.get("SLURM_JOB_CPUS_PER_NODE", ""))


def repeated(text: str) -> list[int]:
    """Return the numbers in a list of Slurm's: 4(x2),8 is 4, 4, 8; none where ``text`` is none."""
    numbers: list[int] = []
    for part in text.split(","):
        found = _REPEATED.fullmatch(part.strip())
        if found is None:
            return []
        numbers += [int(found[1])] * int(found[2] or 1)
    return numbers


def node(system: Path = SYSTEM) -> Node:
    """Return the cores of this node that this process may use."""
    usable = os.sched_getaffinity(0)
    cores = _cores(usable, system)
    return Node(tuple(cores.values()), _cores(_allowed(usable, system), system).keys() == cores.keys())


def hardware_threads(system: Path = SYSTEM) -> tuple[tuple[int, ...], ...]:
    """Return the processors of each core that has several; none where the system does not say."""
    try:
        online = read_spans((system / "online").read_text())
    except (OSError, ValueError):
        return ()
    return tuple(core for core in _cores(online, system).values() if len(core) > 1)


def _cores(processors: Iterable[int], system: Path) -> dict[int, tuple[int, ...]]:
    """Return the ``processors`` of each core, by the first of all that it has."""
    found: dict[int, list[int]] = {}
    for one in sorted(processors):
        first = one
        for name in ("core_cpus_list", "thread_siblings_list"):  # the second is the older name
            try:
                first = min(read_spans((system / f"cpu{one}" / "topology" / name).read_text()))
                break
            except (OSError, ValueError):
                continue
        found.setdefault(first, []).append(one)
    return {first: tuple(own) for first, own in found.items()}


def _allowed(usable: set[int], system: Path) -> set[int]:
    """Return the processors that this process could be bound to: all of its control group, whatever its affinity."""
    try:
        online = read_spans((system / "online").read_text())
        os.sched_setaffinity(0, online)  # which the kernel cuts to what is allowed
    except (OSError, ValueError):
        return set()
    try:
        return os.sched_getaffinity(0)
    finally:
        os.sched_setaffinity(0, usable)
