"""In what the nodes of a job differ, and what each has left: software, processors, settings, clocks, directories."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from hpcdist.arrays.sizes import counted, in_units
from hpcdist.comm.diagnosis import FAIL, OK, WARN, Check
from hpcdist.comm.diagnosis_facts import Volume
from hpcdist.comm.diagnosis_table import Table

SKEW_S: Final = 1.0  # walltimes are whole seconds, and so is what people read in logs
RUN_DIRECTORY: Final = "run directory"
NODE_LOCAL: Final = "node-local"
SHARED_MEMORY: Final = "/dev/shm"
# What must be free (empirical): checkpoints are larger, but smaller runs exist; /dev/shm holds the gradients of the
# ranks of a node (100 million parameters in float32), the node-local folder what MPI keeps of its sessions.
LEAST_BYTES: Final = {RUN_DIRECTORY: 1 << 30, NODE_LOCAL: 256 << 20, SHARED_MEMORY: 512 << 20}
# File systems of one machine. Others (Lustre, GPFS, NFS, ...) may be shared: only a look from every node tells.
OF_ONE_NODE: Final = ("tmpfs", "ramfs", "overlay", "ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "squashfs")
_MUST_AGREE: Final = ("hpcdist", "MPI")  # the rest may differ a little, and a run goes on


@dataclass(frozen=True)
class Offset:
    """How far the clock of a node is ahead of the first's, in seconds, and by how much that may be wrong."""

    offset_s: float
    bound_s: float

    @property
    def certain_s(self) -> float:
        """What is left of the difference where the message took all of its time one way."""
        return max(0.0, abs(self.offset_s) - self.bound_s)


def check_clocks(table: Table, offsets: Sequence[Offset], limit_s: float = SKEW_S) -> Check:
    """Check that the clocks of all nodes agree; ``offsets`` has one for each node, the first of which is zero."""
    name = "clocks"
    if len(offsets) < 2:
        return Check(name, OK, "one node")
    wrong = [offset.certain_s > limit_s for offset in offsets]
    if any(wrong):
        texts = [_ahead(offset) if bad else "" for offset, bad in zip(offsets, wrong, strict=True)]
        cure = "walltime and logs go by them: the site's time service (chronyd, ntpd) does not run there"
        return Check(name, WARN, table.found(texts), cure)
    most = max(offsets, key=lambda offset: abs(offset.offset_s))
    bound_s = max(offset.bound_s for offset in offsets)
    return Check(name, OK, f"at most {abs(most.offset_s) * 1e3:.3f} ms apart, to within {bound_s * 1e3:.3f} ms")


def _ahead(offset: Offset) -> str:
    # To 0.1 s: nodes that were set wrong together are told together.
    side = "ahead of" if offset.offset_s > 0 else "behind"
    return f"{abs(offset.offset_s):.1f} s {side} the first node, to within {max(0.1, offset.bound_s):.1f} s"


def check_directory(table: Table, path: str, failure: str) -> Check:
    """Check that the run directory is one and the same on all nodes; ``failure``: why rank 0 cannot write there."""
    name, count = RUN_DIRECTORY, len(table.nodes)
    if failure:
        return Check(name, FAIL, f"{path}: {failure}", "choose another --out, which this user may write, or free space")
    unseen = [rows[0].unseen for rows in table.nodes]
    kinds = [_volume(machine.volumes, RUN_DIRECTORY).kind for machine in table.machines]
    if any(unseen):
        texts = [f"{reason} ({kind})" if reason else "" for reason, kind in zip(unseen, kinds, strict=True)]
        cure = "checkpoints need one directory: an --out on a file system that all nodes share, mounted alike"
        return Check(name, FAIL, f"{path}: {table.found(texts)}", cure)
    found = f"{path} ({table.found(kinds)}), seen by {counted(count, 'node')}"
    if count > 1 and any(kind in OF_ONE_NODE for kind in kinds):
        cure = "that type is of one machine, which the nodes may be parts of; real ones need a shared file system"
        return Check(name, WARN, found, cure)
    return Check(name, OK, found)


def check_space(table: Table) -> Check:
    """Check that every node has room in the run directory, in its own folder and in /dev/shm."""
    name = "free space"
    volumes = [machine.volumes for machine in table.machines]
    texts = ["; ".join(filter(None, map(_short_of, each))) for each in volumes]
    if any(texts):
        cure = "remove old runs there, set TMPDIR to another folder, or start containers with --shm-size"
        return Check(name, WARN, table.found(texts), cure)
    least = [min((_volume(each, role) for each in volumes), key=lambda one: one.free_bytes) for role in LEAST_BYTES]
    on = " on the node that has least" if len(volumes) > 1 else ""
    shown = [f"{one.role} {in_units(one.free_bytes)} ({one.path}, {one.kind})" for one in least]
    return Check(name, OK, f"{', '.join(shown)}{on}")


def _volume(volumes: Sequence[Volume], role: str) -> Volume:
    return next(one for one in volumes if one.role == role)


def _short_of(one: Volume) -> str:
    if one.error:
        return f"{one.role} {one.path}: {one.error}"
    if not one.has_inodes:
        return f"{one.role} {one.path} ({one.kind}): no file can be added, all inodes are taken"
    if one.free_bytes >= LEAST_BYTES[one.role]:
        return ""
    return f"{one.role} {one.path} ({one.kind}) has less than {in_units(LEAST_BYTES[one.role])} free"


def check_software(table: Table) -> Check:
    """Check that all nodes load the same hpcdist, Python, packages and MPI."""
    found = [machine.software for machine in table.machines]
    names = list(dict.fromkeys(name for software in found for name in software))
    differing = [name for name in names if len({software.get(name) for software in found}) > 1]
    if not differing:
        return Check("software", OK, ", ".join(f"{name} {found[0][name]}" for name in names))
    texts = [", ".join(f"{name} {software.get(name, 'missing')}" for name in differing) for software in found]
    status = FAIL if any(name in _MUST_AGREE for name in differing) else WARN
    return Check("software", status, table.found(texts), "install once for all nodes, or stage the same copy on each")


def check_processors(table: Table) -> Check:
    """Check that all nodes are of one kind: the slowest sets the pace, and other kinds round otherwise."""
    texts = [f"{machine.processor}, {counted(machine.cores, 'core')}" for machine in table.machines]
    if len(set(texts)) == 1:
        return Check("processors", OK, texts[0])
    cure = "the slowest sets the pace, and results may differ in the last bits: ask for one kind (--constraint)"
    return Check("processors", WARN, table.found(texts), cure)


def check_settings(table: Table) -> Check:
    """Check that the variables which change how hpcdist runs have reached all nodes alike."""
    found = [machine.settings for machine in table.machines]
    names = sorted({name for settings in found for name in settings})
    differing = [name for name in names if len({settings.get(name) for settings in found}) > 1]
    if differing:
        texts = [", ".join(f"{name}={settings.get(name, '(unset)')}" for name in differing) for settings in found]
        cure = "hand them to all nodes: srun --export=ALL, Open MPI's mpirun -x NAME; or set them in the job script"
        return Check("environment", WARN, table.found(texts), cure)
    own = [f"{name}={found[0][name]}" for name in names if name.startswith("HPCDIST_")]
    return Check("environment", OK, ", ".join(own) or "no HPCDIST_* is set")
