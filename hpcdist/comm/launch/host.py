"""Host and its processes as the Linux kernel shows them: boot id, descendants, state, environment.

Imports nothing but the standard library. The boot id names a running kernel, for files that several hosts see.
"""

import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import Final

BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")


def boot_id() -> str:
    """Return what all processes under this kernel, in containers too, and no others have in common (local).

    It is another one after a reboot; where the kernel does not say, it is the name of the machine.
    """
    try:
        return BOOT_ID.read_text().strip()
    except OSError:
        return os.uname().nodename


def descendants(pid: int) -> list[int]:
    """Return the living processes below ``pid``: its children, and what those started."""
    children: dict[int, list[int]] = {}
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            try:
                # "pid (name) state ppid ...": the name may hold blanks and parentheses
                state, parent = Path(entry.path, "stat").read_text().rpartition(")")[2].split()[:2]
            except OSError:
                continue  # it has just ended
            if state != "Z":
                children.setdefault(int(parent), []).append(int(entry.name))
    found, front = [], [pid]
    while front:
        front = [child for parent in front for child in children.get(parent, ())]
        found += front
    return found


def send_signal(pid: int, number: signal.Signals) -> None:
    """Signal ``pid``, unless it ended by itself."""
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def is_stopped(pid: int) -> bool:
    """Whether somebody has stopped ``pid`` (SIGSTOP, SIGTSTP), other than a debugger."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    except OSError:
        return False


def environment_of(pid: int) -> dict[str, str]:
    """Return the variables that ``pid`` was started with; none where it has ended or is somebody else's."""
    try:
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return {}
    return {os.fsdecode(name): os.fsdecode(value) for name, _, value in (each.partition(b"=") for each in variables)}


def parent_of(pid: int) -> int:
    """Return the process that ``pid`` is a child of, 0 where it has ended."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0
