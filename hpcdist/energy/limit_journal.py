"""Journal of the power limits and clocks before a change: a file that outlives the process that changed them.

The record of a change is written before the change, and removed after the limits are restored. Records from before a
reboot do not count, because a reboot resets the limits.
"""

import fcntl
import json
import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import msgspec

from hpcdist.comm.launch.environment import boot_id, start_ticks
from hpcdist.errors import StorageError
from hpcdist.reporting import user_cache

FORMAT: Final = 1
LOCK: Final = "lock"
RESTORE_COMMAND: Final = "python -m benchmarks power --restore"


@dataclass(frozen=True)
class ChangedLimit:
    """A device limit that a process has changed. Values are in the unit of the device's driver."""

    kind: str
    device: str
    place: str  # RAPL directory of a processor, or "" for a GPU
    before: int | None  # None: unreadable
    asked: int | None

    @property
    def key(self) -> tuple[str, str]:
        """Pair (kind, device) that identifies the limit. Only one process at a time may change a limit."""
        return self.kind, self.device


@dataclass(frozen=True)
class JournalRecord:
    """File that lists the limits that a process has changed, to restore them if the process is killed."""

    path: Path
    host: str
    boot_id: str
    pid: int
    started: str
    created_utc: str
    changes: tuple[ChangedLimit, ...]

    @property
    def is_of_this_boot(self) -> bool:
        """True if the record was written since the last boot of this machine."""
        return self.boot_id == boot_id()

    @property
    def is_active(self) -> bool:
        """True if the process that wrote the record is running."""
        return self.is_of_this_boot and process_start(self.pid) == self.started


def directory(environment: Mapping[str, str] = os.environ) -> Path:
    """Return the directory of this user's journal, which may not exist. Raises StorageError without a home folder."""
    base = environment.get("XDG_STATE_HOME", "")
    try:
        return (Path(base) if os.path.isabs(base) else Path.home() / ".local" / "state") / "hpcdist" / "limits"
    except RuntimeError as error:
        raise StorageError(
            f"there is no directory for the journal of device limits ({error}); set HOME or XDG_STATE_HOME"
        ) from error


def process_start(pid: int) -> str | None:
    """Return the start time of process ``pid`` in clock ticks, or None if it does not exist."""
    return str(start_ticks(pid) or "") or None


@contextmanager
def locked_journal(folder: Path) -> Iterator[None]:
    """Context manager that locks the journal in ``folder`` against other processes. Raises StorageError."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        held = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise StorageError(
            f"{folder}: the journal of device limits cannot be opened ({error.strerror}), so no limit was changed; set "
            "XDG_STATE_HOME to a writable directory"
        ) from error
    try:
        fcntl.flock(held, fcntl.LOCK_EX)
        yield
    finally:
        os.close(held)


def write(folder: Path, changes: Sequence[ChangedLimit], path: Path | None = None) -> Path:
    """Write ``changes`` to the journal record ``path``, or to a new file. Return the path. Raises StorageError."""
    pid = os.getpid()
    path = path or folder / f"{socket.gethostname()}-{pid}-{os.urandom(4).hex()}.json"
    content = {
        "format": FORMAT,
        "host": socket.gethostname(),
        "boot_id": boot_id(),
        "pid": pid,
        "started": process_start(pid) or "",
        "created_utc": datetime.now(UTC).isoformat(timespec="seconds"),
        "changes": [asdict(change) for change in changes],
    }
    try:
        user_cache.write(path, content)
    except OSError as error:
        raise StorageError(
            f"{path}: the journal record of device limits cannot be written ({error.strerror}); set XDG_STATE_HOME to "
            "a writable directory"
        ) from error
    return path


def records(folder: Path) -> tuple[list[JournalRecord], list[str]]:
    """Return two lists: the journal records in ``folder``, oldest first, and error texts about unreadable records."""
    readable, unreadable = [], []
    for path in sorted(folder.glob("*.json")):
        try:
            readable.append(_record(path, json.loads(user_cache.read(path))))
        except FileNotFoundError:
            continue  # its process has just restored all limits
        except (OSError, ValueError, KeyError, TypeError) as error:
            unreadable.append(f"{path}: cannot be read as a record of limits: {error}")
    return sorted(readable, key=lambda record: record.created_utc), unreadable


def _record(path: Path, content: Any) -> JournalRecord:
    if content["format"] != FORMAT:
        raise ValueError(f"another hpcdist version wrote this record: format {content['format']!r}, expected {FORMAT}")
    return msgspec.convert({**content, "path": path}, JournalRecord)
