"""Lock of a run directory, so that no two jobs write the same checkpoints. Local.

The file ``lock`` names its holder, who touches the file every `HEARTBEAT_S`. The lock is stale if its holder is dead or
is an earlier start of the same batch job, or if the file was not touched for `STALE_S` by the clock of the file system.
A suspended process may lose its lock, so it must call `lost` before it writes or commits a checkpoint.
"""

import contextlib
import errno
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from hpcdist.comm.launch.environment import boot_id, start_ticks
from hpcdist.errors import StorageError
from hpcdist.reporting import atomic, regular

LOCK_FILE: Final = "lock"
MAX_BYTES: Final = 1 << 16  # largest accepted lock file; a normal one has a few hundred bytes
HEARTBEAT_S: Final = 10.0
STALE_S: Final = 60.0
_PLACE: Final = "place"  # key of the directory and the inode in the lock file

_held_locks: dict[Path, "RunLock"] = {}  # the locks of this process, by directory


def lost(directory: Path) -> str:
    """Return an error text if this process has lost its lock on ``directory``, else "". Local."""
    lock = _held_locks.get(directory.resolve())
    return "" if lock is None else lock.lost()


def is_held(directory: Path) -> bool:
    """Return True if a live process seems to hold the lock on ``directory``. Changes no file. Local."""
    path = directory / LOCK_FILE
    try:
        if time.time() - path.stat().st_mtime >= STALE_S:
            return False
        holder = _entry(path)
    except OSError:
        return False
    except ValueError:
        return True
    return holder is not None and not (holder and is_dead(holder, _identity({})))


class RunLock:
    """Lock file of a run directory, held by the rank that commits checkpoints."""

    def __init__(self, environment: Mapping[str, str] = os.environ) -> None:
        self.identity = _identity(environment)  # description of this process, as stored in its lock file
        self._path: Path | None = None
        self._ended = threading.Event()

    def take(self, directory: Path, *, waits: bool = True, otherwise: str = "choose another --out") -> None:
        """Lock ``directory``. Raises StorageError with the advice ``otherwise`` if another process holds the lock.

        ``waits``: True to wait for a heartbeat of the other process, unless this process can see if the other is alive.
        """
        path = directory / LOCK_FILE
        if path.is_dir():
            raise StorageError(f"{path} is a directory; expected a lock file or nothing; move the directory away")
        limit = time.monotonic() + STALE_S + HEARTBEAT_S
        seen = None
        while not self._made(path):
            holder, age_s = _read_holder(path)
            if holder is None or is_dead(holder, self.identity) or age_s > STALE_S:
                _remove(path, holder)
                continue  # other waiters may do the same: the link in `_made` decides which process gets the lock
            touched = path.stat().st_mtime_ns if path.exists() else None
            # A heartbeat during the wait proves that the holder lives, on whatever machine.
            alive = not waits or _is_visible(holder, self.identity) or (seen is not None and touched != seen)
            if alive or time.monotonic() > limit:
                description = _description(directory, holder, age_s)
                raise StorageError(
                    f"{description}; wait until the process ends, or {otherwise}; if the process is dead, remove {path}"
                )
            if seen is None:
                sys.stderr.write(
                    f"hpcdist: {_description(directory, holder, age_s)}; waiting for {STALE_S:.0f} s without a "
                    f"heartbeat in {path}\n"
                )
                sys.stderr.flush()
            seen = touched
            time.sleep(min(1.0, HEARTBEAT_S / 2))
        self._path, self._ended = path, threading.Event()
        _held_locks[directory.resolve()] = self
        threading.Thread(target=self._beat, name="hpcdist lock", daemon=True).start()

    def lost(self) -> str:
        """Return an error text if another process has taken over this lock, else ""."""
        path = self._path
        if path is None:
            return ""
        holder, _ = _read_holder(path)
        if not holder:  # None: the file was removed, so create it again; {}: it cannot be read
            try:
                if holder is not None or self._made(path):
                    return ""
            except StorageError as error:  # returned, not raised: the calling rank reports it to all others
                return str(error)
            holder = _read_holder(path)[0] or {}
        if holder == self.identity:
            return ""
        return (
            f"process {holder.get('pid')} on {holder.get('host')} has taken {path.parent} over, because this process "
            f"did not update its lock for more than {STALE_S:.0f} s; this process may not write there any more"
        )

    def take_over(self, directory: Path, predecessor: Mapping[str, Any] | None) -> None:
        """Take the lock of a dead process. ``predecessor``: the dead process's `identity`. Raises StorageError."""
        if self._path is not None:
            return
        holder, _ = _read_holder(directory / LOCK_FILE)
        if holder and holder == predecessor:  # its machine may not be visible from here
            _remove(directory / LOCK_FILE, holder)
        self.take(directory)

    def _made(self, path: Path) -> bool:
        new = atomic.temporary_path(path)
        try:
            with open(atomic.create(new), "w", encoding="utf-8") as file:
                place = {"directory": str(path.parent.resolve()), "inode": os.fstat(file.fileno()).st_ino}
                file.write(json.dumps({**self.identity, _PLACE: place}) + "\n")
            _link_new(new, path)
        except FileExistsError:
            return False
        except OSError as error:
            raise StorageError(f"{path} cannot be created: {error.strerror}; choose a writable directory") from error
        finally:
            atomic.discard(new)
        return True

    def _beat(self) -> None:
        assert self._path is not None
        while not self._ended.wait(HEARTBEAT_S):
            try:
                if _entry(self._path) != self.identity:
                    return  # another process has the lock now
                os.utime(self._path)
            except (OSError, ValueError):
                continue  # the file system may come back; `lost` creates a missing lock file again

    def release(self) -> None:
        """Release the lock, if this process holds it."""
        self._ended.set()
        if self._path is not None:
            _held_locks.pop(self._path.parent.resolve(), None)
            if _read_holder(self._path)[0] == self.identity:
                atomic.discard(self._path)
        self._path = None


def _link_new(new: Path, path: Path) -> None:
    # Atomic, also on NFS.
    try:
        os.link(new, path)
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK):
            raise
        with path.open("x", encoding="utf-8") as file:  # no hard links on this file system: briefly incomplete
            file.write(json.dumps(_read_holder(new)[0] or {}) + "\n")  # no inode: the copy has another


def _identity(environment: Mapping[str, str]) -> dict[str, Any]:
    pid = os.getpid()
    return {
        "host": socket.gethostname(),
        "pid": pid,
        "started": _started(pid),
        "machine": boot_id() + _pid_namespace(),
        "job": environment.get("SLURM_JOB_ID", ""),
        "restarts": environment.get("SLURM_RESTART_COUNT", "0"),
    }


def _entry(path: Path) -> dict[str, Any] | None:
    # {}: invalid. None: a copy of another lock.
    entry = regular.json_value(path, MAX_BYTES)
    if not isinstance(entry, dict):
        return {}
    place = entry.pop(_PLACE, None)
    # Mount points differ between nodes, and a few file systems change inodes. In a copy, both differ.
    copied = (
        isinstance(place, dict)
        and place.get("directory") != str(path.parent.resolve())
        and place.get("inode") != path.stat().st_ino
    )
    return None if copied else entry


def _description(directory: Path, holder: Mapping[str, Any], age_s: float) -> str:
    touched = f"(touched {age_s:.0f} s ago)"
    if not holder:
        return f"{directory / LOCK_FILE} is damaged {touched}: the process that writes {directory} is unknown"
    job = f", job {holder['job']}" if holder.get("job") else ""
    return f"{directory} is being written by process {holder.get('pid')} on {holder.get('host')}{job} {touched}"


def _read_holder(path: Path) -> tuple[dict[str, Any] | None, float]:
    # Content {}: unreadable. None: missing, or a copy of another lock.
    now, age_s = atomic.temporary_path(path), 0.0
    try:
        os.close(atomic.create(now))
        age_s = now.stat().st_mtime - path.stat().st_mtime
        return _entry(path), age_s
    except FileNotFoundError:
        return None, 0.0
    except (OSError, ValueError):
        return {}, age_s
    finally:
        atomic.discard(now)


def is_dead(holder: Mapping[str, Any], identity: Mapping[str, Any]) -> bool:
    """Return True if the process ``holder`` has certainly ended. ``identity``: `RunLock.identity` of this process."""
    if identity["job"] and holder.get("job") == identity["job"] and holder.get("restarts") != identity["restarts"]:
        return True  # the batch system restarts a job only after its earlier start has ended
    return _is_visible(holder, identity) and _started(holder.get("pid")) != holder.get("started")


def _is_visible(holder: Mapping[str, Any], identity: Mapping[str, Any]) -> bool:
    return bool(identity["machine"]) and holder.get("machine") == identity["machine"]


def _started(pid: Any) -> str:
    return str(start_ticks(pid) or "") if type(pid) is int else ""


def _remove(path: Path, holder: Mapping[str, Any] | None) -> None:
    aside = path.with_name(f"{LOCK_FILE}.stale.{os.getpid()}")
    try:
        path.rename(aside)
    except FileNotFoundError:
        return
    except OSError as error:
        raise StorageError(f"the stale lock {path} cannot be removed: {error.strerror}; remove the file") from error
    # Only one process can rename the file. If it is the new lock of another process, rename it back.
    if _read_holder(aside)[0] != holder:
        with contextlib.suppress(FileExistsError):
            _link_new(aside, path)
    atomic.discard(aside)


def _pid_namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""
