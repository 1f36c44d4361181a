"""Journal of power limits and clocks before a change: a file that outlives the process that changed them.

It is written before the first change and removed after the last limit was restored, in a folder of the user's state
(``$XDG_STATE_HOME/hpcdist/limits``): a record that is left there is of a process that was killed. A restart of the
machine resets limits by itself, so a record is valid until then only.
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

from hpcdist.comm.launch.environment import boot_id
from hpcdist.comm.record.flight_recorder import start_ticks
from hpcdist.errors import StorageError
from hpcdist.reporting import user_cache

FORMAT: Final = 1
LOCK: Final = "lock"
RESTORE_COMMAND: Final = "hpcdist bench power --restore"


@dataclass(frozen=True)
class ChangedLimit:
    """Changed limit of one device, in the unit of its driver (mW, MHz, uW); ``before`` None: it cannot be read.

    ``place`` is the directory in which Linux shows the zones of RAPL, "" for a GPU.
    """

    kind: str
    device: str
    place: str
    before: int | None
    asked: int | None

    @property
    def key(self) -> tuple[str, str]:
        """The kind and device that no two sweeps may change at once."""
        return self.kind, self.device


@dataclass(frozen=True)
class JournalRecord:
    """Record of the changes of one process, with the identity of that process."""

    path: Path
    host: str
    boot_id: str
    pid: int
    started: str
    created_utc: str
    changes: tuple[ChangedLimit, ...]

    @property
    def is_of_this_start(self) -> bool:
        """Whether it was written since this machine was started."""
        return self.boot_id == boot_id()

    @property
    def is_at_work(self) -> bool:
        """Whether the process that wrote it is still there."""
        return self.is_of_this_start and process_start(self.pid) == self.started


def directory(environment: Mapping[str, str] = os.environ) -> Path:
    """Return the folder of the records of this user; it need not exist. Raises StorageError without a home."""
    base = environment.get("XDG_STATE_HOME", "")
    try:
        return (Path(base) if os.path.isabs(base) else Path.home() / ".local" / "state") / "hpcdist" / "limits"
    except RuntimeError as error:
        raise StorageError(
            f"what limits were before has no place to be kept ({error}): set HOME, or XDG_STATE_HOME to a directory"
        ) from error


def process_start(pid: int) -> str | None:
    """Return when the process ``pid`` began, in ticks of the kernel; None where there is none."""
    return str(start_ticks(pid) or "") or None


@contextmanager
def locked_journal(folder: Path) -> Iterator[None]:
    """Let one process at a time look at the records and add its own. Raises StorageError."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        held = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise StorageError(
            f"{folder}: what limits were before cannot be kept there ({error.strerror}), so none was changed; set "
            "XDG_STATE_HOME to a directory that can be written"
        ) from error
    try:
        fcntl.flock(held, fcntl.LOCK_EX)
        yield
    finally:
        os.close(held)


def write(folder: Path, changes: Sequence[ChangedLimit], path: Path | None = None) -> Path:
    """Write the record of this process, in place of the one at ``path``. Raises StorageError."""
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
            f"{path}: cannot be written ({error.strerror}), and without it no limit is changed; set XDG_STATE_HOME to "
            "a directory that can be written"
        ) from error
    return path


def records(folder: Path) -> tuple[list[JournalRecord], list[str]]:
    """Return the records in ``folder``, the oldest first, and a line for each file that cannot be read as one."""
    readable, unreadable = [], []
    for path in sorted(folder.glob("*.json")):
        try:
            readable.append(_record(path, json.loads(user_cache.read(path))))
        except FileNotFoundError:
            continue  # its process has just put everything back
        except (OSError, ValueError, KeyError, TypeError) as error:
            unreadable.append(f"{path}: cannot be read as a record of limits: {error}")
    return sorted(readable, key=lambda record: record.created_utc), unreadable


def _record(path: Path, content: Any) -> JournalRecord:
    if content["format"] != FORMAT:
        raise ValueError(f"format {content['format']!r}, expected {FORMAT}: it is of another version of hpcdist")
    return msgspec.convert({**content, "path": path}, JournalRecord)
