"""The rows that all ranks of a batch job have gathered, and what follows from them for the world as a whole.

Only numbers: nothing here sends a message, so every finding can be tried with made-up rows.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

from hpcdist.arrays.sizes import counted
from hpcdist.comm.diagnosis import FAIL, OK, WARN, Check
from hpcdist.comm.diagnosis_facts import Asked, Facts, Machine
from hpcdist.comm.diagnosis_text import grouped

US: Final = 1e6


@dataclass(frozen=True)
class Greeting:
    """Whether what a rank received was what was sent, and the seconds of a round; None where it has no such peer."""

    arrived: bool
    inside_s: float | None
    across_s: float | None
    reduced_s: float


@dataclass(frozen=True)
class Row:
    """What a rank brings. ``machine`` and ``unseen``, why it does not see the run directory, come from one per node."""

    node: int
    local_rank: int
    facts: Facts
    greeting: Greeting
    machine: Machine | None = None
    unseen: str = ""


@dataclass(frozen=True)
class Table:
    """The rows of all ranks, in rank order."""

    rows: Sequence[Row]

    @cached_property
    def nodes(self) -> list[list[Row]]:
        """The rows of each node, by local rank."""
        found: dict[int, list[Row]] = {}
        for row in self.rows:
            found.setdefault(row.node, []).append(row)
        return [sorted(found[node], key=lambda row: row.local_rank) for node in sorted(found)]

    @cached_property
    def machines(self) -> list[Machine]:
        """The machine of each node."""
        machines = [next((row.machine for row in rows if row.machine is not None), None) for rows in self.nodes]
        assert all(machine is not None for machine in machines), "one rank of each node describes it"
        return [machine for machine in machines if machine is not None]

    @cached_property
    def labels(self) -> list[str]:
        """What each node is called: its host name, or its number where several have one name."""
        hosts = [rows[0].facts.host for rows in self.nodes]
        return hosts if len(set(hosts)) == len(hosts) else [f"node{index}" for index in range(len(hosts))]

    def found(self, texts: Sequence[str]) -> str:
        """Return what is said of each node, once for those of which the same is said."""
        return grouped(self.labels, texts)


@dataclass(frozen=True)
class Lint:
    """A look at the rows of one node, which returns what is wrong or "", and how bad that is, and the cure."""

    look: Callable[[list[Row]], str]
    status: str
    cure: str


def linted(table: Table, name: str, lints: Sequence[Lint]) -> Check | None:
    """Return what the first of ``lints`` that has something to say of any node says of all; None where none has."""
    for lint in lints:
        texts = [lint.look(rows) for rows in table.nodes]
        if any(texts):
            return Check(name, lint.status, table.found(texts), lint.cure)
    return None


def check_size(table: Table, asked: Asked) -> Check:
    """Check that there are as many ranks, on as many nodes, as the scheduler was asked for."""
    ranks, nodes = len(table.rows), len(table.nodes)
    counts = sorted({len(rows) for rows in table.nodes})
    each = f"{counts[0]} to {counts[-1]} on a node" if len(counts) > 1 else f"{counts[0]} on each"
    found = f"{counted(ranks, 'rank')} on {counted(nodes, 'node')} ({each})"
    if not asked.scheduler:
        return Check("scheduler", OK, f"no scheduler; {found}")
    wanted = [
        *([counted(asked.tasks, "task")] if asked.tasks is not None else []),
        *([counted(asked.nodes, "node")] if asked.nodes is not None else []),
    ]
    found = f"{found}; {asked.scheduler} was asked for {' on '.join(wanted) or 'what it does not say'}"
    if asked.tasks is not None and ranks < asked.tasks:
        cure = f"unless nodes are spares: hpcdist run -n {asked.tasks}, or srun without -n; or ask for fewer"
        if ranks == 1:
            cure += ". If this was printed once for each task, they are worlds of one: the launcher is of another MPI"
        return Check("scheduler", WARN, found, cure)
    if asked.nodes is not None and nodes < asked.nodes:
        cure = (
            "nodes without a rank are paid for, unless they are spares: spread the ranks (hpcdist run --ranks-per-node)"
        )
        return Check("scheduler", WARN, found, cure)
    return Check("scheduler", OK, found)


def check_messages(table: Table) -> Check:
    """Check that what the ranks received is what was sent, and say how long it took."""
    wrong = [rank for rank, row in enumerate(table.rows) if not row.greeting.arrived]
    if wrong:
        shown = ", ".join(map(str, wrong[:8])) + (", ..." if len(wrong) > 8 else "")
        cure = "the MPI library or its network damages messages: try another transport, and tell the site"
        return Check("messages", FAIL, f"other data than was sent arrived on rank {shown}", cure)
    kinds = (
        ("inside a node", [row.greeting.inside_s for row in table.rows]),
        ("between nodes", [row.greeting.across_s for row in table.rows]),
        ("an allreduce of 8 bytes", [row.greeting.reduced_s for row in table.rows]),
    )
    found = [f"{what} {_spread(table, times)}" for what, times in kinds if any(time is not None for time in times)]
    return Check("messages", OK, "; ".join(found))


def _spread(table: Table, times: Sequence[float | None]) -> str:
    """Return the median, and where it took longest."""
    known = sorted((time, rank) for rank, time in enumerate(times) if time is not None)
    median, (most, rank) = known[len(known) // 2][0], known[-1]
    slowest = (
        f", slowest {most * US:,.1f} (rank {rank} on {table.labels[_index(table, rank)]})" if len(known) > 1 else ""
    )
    return f"{median * US:,.1f} us{slowest}"


def _index(table: Table, rank: int) -> int:
    return sorted({row.node for row in table.rows}).index(table.rows[rank].node)
