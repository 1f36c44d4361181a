"""Job checks of the table of all ranks' facts: size, messages, free space, and differences between nodes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

from hpcdist import constants
from hpcdist.comm.doctor.facts import NodeFacts, RankFacts, SchedulerRequest, Volume
from hpcdist.comm.doctor.mpi_library import FAIL, OK, WARN, Check
from hpcdist.comm.record.clock_offsets import ClockReading
from hpcdist.constants import NS_PER_S
from hpcdist.reporting.units import counted, format_bytes, group_texts

US: Final = 1e6


@dataclass(frozen=True)
class Greeting:
    """Results of a rank's test messages: correctness of the data, and median times in seconds."""

    arrived: bool  # all data arrived unchanged
    inside_s: float | None  # of a message inside the node; None without such a peer
    across_s: float | None  # of a message to another node; None without such a peer
    reduced_s: float  # of an allreduce of 8 bytes


@dataclass(frozen=True)
class RankRow:
    """Facts of one rank, its position in the job, and the results of its test messages."""

    node: int
    local_rank: int
    facts: RankFacts
    greeting: Greeting
    machine: NodeFacts | None = None  # only on one rank per node
    unseen: str = ""  # reason why the node does not see the run directory; only on the rank with `machine`


@dataclass(frozen=True)
class RankTable:
    """Facts of all ranks, one row per rank in rank order."""

    rows: Sequence[RankRow]

    @cached_property
    def nodes(self) -> list[list[RankRow]]:
        """A list of `RankRow` lists, one per node in node order. The rows of a node are sorted by local rank."""
        rows_of: dict[int, list[RankRow]] = {}
        for row in self.rows:
            rows_of.setdefault(row.node, []).append(row)
        return [sorted(rows_of[node], key=lambda row: row.local_rank) for node in sorted(rows_of)]

    @cached_property
    def machines(self) -> list[NodeFacts]:
        """A list of `NodeFacts`, one per node in node order."""
        machines = [next((row.machine for row in rows if row.machine is not None), None) for rows in self.nodes]
        assert all(machine is not None for machine in machines), "one rank of each node describes it"
        return [machine for machine in machines if machine is not None]

    @cached_property
    def labels(self) -> list[str]:
        """The list of node names for the report: host names, or numbers if host names are not unique."""
        hosts = [rows[0].facts.host for rows in self.nodes]
        return hosts if len(set(hosts)) == len(hosts) else [f"node{index}" for index in range(len(hosts))]

    def by_node(self, texts: Sequence[str]) -> str:
        """Join ``texts``, one per node, to "NODES: text; NODES: text", or return the text if all are equal."""
        return group_texts(self.labels, texts)


@dataclass(frozen=True)
class Lint:
    """A check of one node's ranks. A fault is reported with ``status`` and with the advice ``cure``."""

    look: Callable[[list[RankRow]], str]  # returns the fault in the rows of a node, or ""
    status: str
    cure: str


def apply_lints(table: RankTable, name: str, lints: Sequence[Lint]) -> Check | None:
    """Return a `Check` named ``name`` for the first lint that finds a fault in ``table``, or None without a fault."""
    for lint in lints:
        texts = [lint.look(rows) for rows in table.nodes]
        if any(texts):
            return Check(name, lint.status, table.by_node(texts), lint.cure)
    return None


def check_size(table: RankTable, asked: SchedulerRequest) -> Check:
    """Check that the job has the ranks and nodes that it requested (``asked``). ``table``: facts of all ranks."""
    ranks, nodes = len(table.rows), len(table.nodes)
    counts = sorted({len(rows) for rows in table.nodes})
    each = f"{counts[0]} to {counts[-1]} on a node" if len(counts) > 1 else f"{counts[0]} on each"
    summary = f"{counted(ranks, 'rank')} on {counted(nodes, 'node')} ({each})"
    if not asked.scheduler:
        return Check("scheduler", OK, f"no scheduler; {summary}")
    requested = [
        *([counted(asked.tasks, "task")] if asked.tasks is not None else []),
        *([counted(asked.nodes, "node")] if asked.nodes is not None else []),
    ]
    summary = f"{summary}; {asked.scheduler} was asked for {' on '.join(requested) or 'an unknown number of tasks'}"
    if asked.tasks is not None and ranks < asked.tasks:
        cure = f"unless nodes are spares: use hpcdist run -n {asked.tasks}, or srun without -n; or ask for fewer tasks"
        if ranks == 1:
            cure += ". If this was printed once for each task, each is its own world: the launcher is of another MPI"
        return Check("scheduler", WARN, summary, cure)
    if asked.nodes is not None and nodes < asked.nodes:
        cure = "nodes without a rank cost too, unless they are spares: spread the ranks (hpcdist run --ranks-per-node)"
        return Check("scheduler", WARN, summary, cure)
    return Check("scheduler", OK, summary)


def check_messages(table: RankTable) -> Check:
    """Check that all test messages arrived unchanged, and report their times. ``table``: facts of all ranks."""
    wrong = [rank for rank, row in enumerate(table.rows) if not row.greeting.arrived]
    if wrong:
        shown = ", ".join(map(str, wrong[:8])) + (", ..." if len(wrong) > 8 else "")
        cure = "the MPI library or its network damages messages: try another transport, and inform the site"
        return Check("messages", FAIL, f"data arrived changed on rank {shown}", cure)
    kinds = (
        ("inside a node", [row.greeting.inside_s for row in table.rows]),
        ("between nodes", [row.greeting.across_s for row in table.rows]),
        ("an allreduce of 8 bytes", [row.greeting.reduced_s for row in table.rows]),
    )
    timings = [f"{what} {_spread(table, times)}" for what, times in kinds if any(time is not None for time in times)]
    return Check("messages", OK, "; ".join(timings))


def _spread(table: RankTable, times: Sequence[float | None]) -> str:
    measured = sorted((time, rank) for rank, time in enumerate(times) if time is not None)
    median, (most, rank) = measured[len(measured) // 2][0], measured[-1]
    node = sorted({row.node for row in table.rows}).index(table.rows[rank].node)
    slowest = f", slowest {most * US:,.1f} (rank {rank} on {table.labels[node]})" if len(measured) > 1 else ""
    return f"{median * US:,.1f} us{slowest}"


SKEW_S: Final = 1.0  # walltimes and log entries have whole seconds
RUN_DIRECTORY: Final = "run directory"
NODE_LOCAL: Final = "node-local"
SHARED_MEMORY: Final = str(constants.SHARED_MEMORY)
# Least free space (empirical): checkpoints may be larger, but small runs exist. /dev/shm holds the gradients of a
# node's ranks (100 million parameters in float32), the node-local folder holds MPI's session directories.
LEAST_BYTES: Final = {RUN_DIRECTORY: 1 << 30, NODE_LOCAL: 256 << 20, SHARED_MEMORY: 512 << 20}
# File systems of one machine. Others (Lustre, GPFS, NFS, ...) may be shared: the probe file of `gather` shows this.
OF_ONE_NODE: Final = ("tmpfs", "ramfs", "overlay", "ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "squashfs")
_MUST_AGREE: Final = ("hpcdist", "MPI")  # a difference in other packages is only a warning


def check_clocks(table: RankTable, offsets: Sequence[ClockReading]) -> Check:
    """Check that the nodes' clocks agree within `SKEW_S` seconds. ``table``: facts of all ranks.

    ``offsets``: one `ClockReading` per node, relative to rank 0's clock.
    """
    name = "clocks"
    if len(offsets) < 2:
        return Check(name, OK, "one node")
    wrong = [abs(offset.offset_ns) - offset.bound_ns > SKEW_S * NS_PER_S for offset in offsets]
    if any(wrong):
        texts = [_ahead(offset) if bad else "" for offset, bad in zip(offsets, wrong, strict=True)]
        cure = "walltime and logs use these clocks: the site's time service (chronyd, ntpd) does not run there"
        return Check(name, WARN, table.by_node(texts), cure)
    most_ns = max(abs(offset.offset_ns) for offset in offsets)
    bound_ns = max(offset.bound_ns for offset in offsets)
    return Check(name, OK, f"at most {most_ns / 1e6:.3f} ms apart, to within {bound_ns / 1e6:.3f} ms")


def _ahead(offset: ClockReading) -> str:
    # To 0.1 s, so that nodes with the same wrong offset share a text.
    offset_s, bound_s = offset.offset_ns / NS_PER_S, offset.bound_ns / NS_PER_S
    side = "ahead of" if offset_s > 0 else "behind"
    return f"{abs(offset_s):.1f} s {side} the first node, to within {max(0.1, bound_s):.1f} s"


def check_directory(table: RankTable, path: str, failure: str) -> Check:
    """Check that all nodes see the run directory ``path``. ``failure``: error when rank 0 wrote there, or ""."""
    name, count = RUN_DIRECTORY, len(table.nodes)
    if failure:
        return Check(name, FAIL, f"{path}: {failure}", "choose another --out, which this user may write, or free space")
    unseen = [rows[0].unseen for rows in table.nodes]
    kinds = [_volume(machine.volumes, RUN_DIRECTORY).kind for machine in table.machines]
    if any(unseen):
        texts = [f"{reason} ({kind})" if reason else "" for reason, kind in zip(unseen, kinds, strict=True)]
        cure = "checkpoints need one directory: choose an --out on a file system that all nodes share, mounted alike"
        return Check(name, FAIL, f"{path}: {table.by_node(texts)}", cure)
    summary = f"{path} ({table.by_node(kinds)}), seen by {counted(count, 'node')}"
    if count > 1 and any(kind in OF_ONE_NODE for kind in kinds):
        cure = "this type of file system belongs to one machine; nodes on several machines need a shared file system"
        return Check(name, WARN, summary, cure)
    return Check(name, OK, summary)


def check_space(table: RankTable) -> Check:
    """Check the free space in run directory, local directory and /dev/shm of each node. ``table``: all ranks' facts."""
    name = "free space"
    volumes = [machine.volumes for machine in table.machines]
    texts = ["; ".join(filter(None, map(_short_of, node_volumes))) for node_volumes in volumes]
    if any(texts):
        cure = "remove old runs there, set TMPDIR to another folder, or start containers with --shm-size"
        return Check(name, WARN, table.by_node(texts), cure)
    least = [
        min((_volume(node_volumes, role) for node_volumes in volumes), key=lambda volume: volume.free_bytes)
        for role in LEAST_BYTES
    ]
    on = " on the node that has least" if len(volumes) > 1 else ""
    shown = [f"{volume.role} {format_bytes(volume.free_bytes)} ({volume.path}, {volume.kind})" for volume in least]
    return Check(name, OK, f"{', '.join(shown)}{on}")


def _volume(volumes: Sequence[Volume], role: str) -> Volume:
    return next(volume for volume in volumes if volume.role == role)


def _short_of(volume: Volume) -> str:
    if volume.error:
        return f"{volume.role} {volume.path}: {volume.error}"
    if not volume.has_inodes:
        return f"{volume.role} {volume.path} ({volume.kind}): no file can be added, all inodes are taken"
    if volume.free_bytes >= LEAST_BYTES[volume.role]:
        return ""
    return f"{volume.role} {volume.path} ({volume.kind}) has less than {format_bytes(LEAST_BYTES[volume.role])} free"


def check_software(table: RankTable) -> Check:
    """Check that all nodes have equal versions of hpcdist, Python, packages and MPI. ``table``: facts of all ranks."""
    by_node = [machine.software for machine in table.machines]
    names = list(dict.fromkeys(name for software in by_node for name in software))
    differing = [name for name in names if len({software.get(name) for software in by_node}) > 1]
    if not differing:
        return Check("software", OK, ", ".join(f"{name} {by_node[0][name]}" for name in names))
    texts = [", ".join(f"{name} {software.get(name, 'missing')}" for name in differing) for software in by_node]
    status = FAIL if any(name in _MUST_AGREE for name in differing) else WARN
    return Check("software", status, table.by_node(texts), "install once for all nodes, or stage the same copy on each")


def check_processors(table: RankTable) -> Check:
    """Check that all nodes have equal processors, because rounding may depend on them. ``table``: all ranks' facts."""
    texts = [f"{machine.processor}, {counted(machine.cores, 'core')}" for machine in table.machines]
    if len(set(texts)) == 1:
        return Check("processors", OK, texts[0])
    cure = "the slowest sets the pace, and results may differ in the last bits: ask for one kind (--constraint)"
    return Check("processors", WARN, table.by_node(texts), cure)


def check_settings(table: RankTable) -> Check:
    """Check that the environment variables of hpcdist are equal on all nodes. ``table``: facts of all ranks."""
    by_node = [machine.settings for machine in table.machines]
    names = sorted({name for settings in by_node for name in settings})
    differing = [name for name in names if len({settings.get(name) for settings in by_node}) > 1]
    if differing:
        texts = [", ".join(f"{name}={settings.get(name, '(unset)')}" for name in differing) for settings in by_node]
        cure = "pass them to all nodes: srun --export=ALL, Open MPI's mpirun -x NAME; or set them in the job script"
        return Check("environment", WARN, table.by_node(texts), cure)
    settings_shown = [f"{name}={by_node[0][name]}" for name in names if name.startswith("HPCDIST_")]
    return Check("environment", OK, ", ".join(settings_shown) or "no HPCDIST_* is set")
