"""Striping of checkpoint directories over the servers of Lustre and BeeGFS. Local.

    per_shard = bytes / writers
    stripes   = min(per_shard / 1 GiB, servers / writers), at least 1, and at least one for each 100 GB

If the number of servers is unknown, 8 replaces servers / writers. A file inherits the stripe layout of its directory.
On Lustre the layout is progressive (``lfs setstripe -E``).
"""

import ctypes
import os
import re
import shlex
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from hpcdist.reporting.units import counted, format_bytes

LUSTRE: Final = "lustre"
BEEGFS: Final = "beegfs"
_MAGIC: Final = {0x0BD00BD0: LUSTRE, 0x19830326: BEEGFS}  # statfs f_type
_MOUNTED: Final = {"lustre": LUSTRE, "lustre_lite": LUSTRE, "beegfs": BEEGFS, "fhgfs": BEEGFS}
MOUNTS: Final = Path("/proc/self/mounts")
TOOL_LIMIT_S: Final = 30.0
STRIPE_BYTES: Final = 4 << 20
PER_STRIPE_BYTES: Final = 1 << 30
MAX_BYTES_PER_STRIPE: Final = 100 * 10**9
UNKNOWN_SERVERS_STRIPES: Final = 8
MAX_STRIPES: Final = 128


@dataclass(frozen=True)
class MountedFileSystem:
    """File system of the type ``kind`` at the mount point ``mount``."""

    kind: str  # "lustre", "beegfs", or another type
    mount: str

    @property
    def striped(self) -> bool:
        """True if the file system can stripe a file over several servers."""
        return self.kind in (LUSTRE, BEEGFS)


@dataclass(frozen=True)
class StripePlan:
    """Command that stripes a directory over storage servers, and the reason ``why`` this command was chosen."""

    system: MountedFileSystem
    command: tuple[str, ...]  # empty if the directory is not to be striped
    why: str

    @property
    def text(self) -> str:
        """The striping command as text, quoted for a shell."""
        return shlex.join(self.command)


def file_system(path: Path, mounts: Path = MOUNTS) -> MountedFileSystem:
    """Return the file system of ``path``, according to the mount table file ``mounts``."""
    there = path.absolute()
    while not there.exists() and there != there.parent:
        there = there.parent
    mount, mounted = _mount_of(there.resolve(), mounts)
    return MountedFileSystem(_MAGIC.get(_magic(there)) or _MOUNTED.get(mounted, mounted), mount)


def _magic(path: Path) -> int:
    words = (ctypes.c_long * 64)()
    try:
        failed = ctypes.CDLL(None).statfs(os.fsencode(path), words)
    except (OSError, AttributeError):
        return 0
    return 0 if failed else int(words[0]) & 0xFFFFFFFF  # f_type


def _mount_of(path: Path, mounts: Path) -> tuple[str, str]:
    best = ("", "unknown")
    try:
        lines = mounts.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return best
    for line in lines:
        fields = line.split()
        if len(fields) < 3:
            continue
        point = re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), fields[1])
        # The last mount at a point hides the earlier ones.
        if (path == Path(point) or Path(point) in path.parents) and len(point) >= len(best[0]):
            best = (point, fields[2])
    return best


def stripes(nbytes: int, writers: int, servers: int | None = None) -> int:
    """Return the number of storage servers per shard. ``servers``: number of servers, or None if it is unknown.

    ``nbytes``: total size of the checkpoint in bytes. ``writers``: number of shards.
    """
    shard = -(-nbytes // max(1, writers))
    limit = UNKNOWN_SERVERS_STRIPES if servers is None else max(1, servers // max(1, writers))
    count = max(1, min(shard // PER_STRIPE_BYTES, limit), -(-shard // MAX_BYTES_PER_STRIPE))
    return min(count, MAX_STRIPES if servers is None else max(1, servers))


def plan(directory: Path, nbytes: int, writers: int, options: str = "auto", mounts: Path = MOUNTS) -> StripePlan:
    """Return a plan to stripe ``directory`` for checkpoints of ``nbytes`` bytes in ``writers`` shards.

    ``options``: "auto", "none", or options of the striping command. ``mounts``: path of the mount table.
    """
    system = file_system(directory, mounts)
    if options == "none":
        return StripePlan(system, (), "checkpoint.stripe = 'none'")
    begin = _base_command(system.kind if system.striped else LUSTRE)
    if options == "auto":
        servers = _servers(directory) if system.kind == LUSTRE else None
        count = stripes(nbytes, writers, servers)
        servers_text = "an unknown number of servers" if servers is None else counted(servers, "server")
        why = (
            f"{format_bytes(nbytes)} by {counted(writers, 'writer')} on {servers_text}: "
            f"{counted(count, 'stripe')} a shard"
        )
        words = _options(begin, count)
    else:
        words, why = tuple(shlex.split(options)), "set by checkpoint.stripe"
    command = (*begin, *words, str(directory))
    if system.striped:
        return StripePlan(system, command, why)
    there = f"{directory} lies on {system.kind}, which has no stripes"
    return StripePlan(system, (), f"{there}; on Lustre it would be `{shlex.join(command)}` ({why})")


def _base_command(kind: str) -> tuple[str, ...]:
    if kind == LUSTRE:
        return ("lfs", "setstripe")
    return ("beegfs", "entry", "set") if shutil.which("beegfs") else ("beegfs-ctl", "--setpattern")


def _options(begin: tuple[str, ...], count: int) -> tuple[str, ...]:
    if begin[0] == "beegfs":
        return ("--chunk-size", "4Mi", "--num-targets", str(count))
    if begin[0] == "beegfs-ctl":
        return ("--chunksize=4m", f"--numtargets={count}")
    size = f"{STRIPE_BYTES >> 20}M"
    if count == 1:
        return ("-c", "1", "-S", size)
    first = ("-E", "64M", "-c", "1", "-S", size)
    middle = ("-E", "1G", "-c", str(min(4, count)), "-S", size)
    return (*first, *middle, "-E", "-1", "-c", str(count), "-S", size)


def _servers(directory: Path) -> int | None:
    there = next(
        (ancestor for ancestor in (directory.absolute(), *directory.absolute().parents) if ancestor.exists()), Path("/")
    )
    result = _run(("lfs", "osts", str(there)))
    if isinstance(result, str):
        return None
    return len(re.findall(r"^\d+:.* ACTIVE", result.stdout, re.MULTILINE)) or None


def apply(stripe_plan: StripePlan) -> str:
    """Run the command of ``stripe_plan``, if not empty. Return an error text, or "" on success."""
    if not stripe_plan.command:
        return ""
    result = _run(stripe_plan.command)
    if isinstance(result, str):
        return result
    if result.returncode:
        lines = (result.stderr or result.stdout).strip().splitlines() or [f"exit code {result.returncode}"]
        return f"{stripe_plan.command[0]}: {lines[0]}"
    return ""


def _run(command: tuple[str, ...]) -> "subprocess.CompletedProcess[str] | str":
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=TOOL_LIMIT_S, check=False)
    except FileNotFoundError:
        return f"{command[0]} is not installed on this node"
    except subprocess.TimeoutExpired:
        return f"{command[0]} did not answer in {TOOL_LIMIT_S:g} s"
    except OSError as error:
        return f"{command[0]}: {error.strerror}"
