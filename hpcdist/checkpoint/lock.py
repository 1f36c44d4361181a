"""Lock of a run directory, so that no two jobs write the same checkpoints (local).

The file ``lock`` names host, process and job of its holder, whose thread touches it every `HEARTBEAT_S`. It is stale
when the holder is known to be dead (same machine and namespace of processes, and no such process), when it is an
earlier start of the same batch job, or when it was not touched for `STALE_S` by the clock of the file system. The
lock of another machine, whose processes cannot be seen from here, is waited for so long: a job that was
requeued to another node then goes on by itself.

A process that was frozen, or cut off from the file system, for longer may have lost its lock meanwhile. It checks
that with `lost` before it writes a checkpoint and before it makes one visible, and never touches the lock of another.

The file also names its directory and its inode. A file with another directory and another inode is a copy of a lock:
it locks nothing.
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

from hpcdist.comm.record.flight_recorder import start_ticks
from hpcdist.errors import StorageError
from hpcdist.reporting import atomic, regular

LOCK_FILE: Final = "lock"
MAX_BYTES: Final = 1 << 16  # of a lock, which has a few hundred
HEARTBEAT_S: Final = 10.0
_PLACE: Final = "place"  # key of the directory and the inode of the lock file in its entry
STALE_S: Final = 60.0

_held_locks: dict[Path, "RunLock"] = {}  # by directory: those of this process


def lost(directory: Path) -> str:
    """Return why this process has lost its lock of ``directory`` and must not write there; "" where it may (local).

    A process that never had the lock may write.
    """
    lock = _held_locks.get(directory.resolve())
    return "" if lock is None else lock.lost()


def is_held(directory: Path) -> bool:
    """Whether a process has the lock of ``directory``, as far as can be seen from here; writes nothing (local)."""
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
    """Lock of one process on a run directory. The rank that commits takes it; a crash leaves the file behind."""

    def __init__(self, environment: Mapping[str, str] = os.environ) -> None:
        self._own = _identity(environment)
        self._path: Path | None = None
        self._ended = threading.Event()

    def take(self, directory: Path, *, waits: bool = True, otherwise: str = "choose another --out") -> None:
        """Lock ``directory``, which exists. Raises StorageError while another process has it.

        Without ``waits`` a holder that may be dead is taken for alive. ``otherwise`` completes the error message.
        """
        path = directory / LOCK_FILE
        if path.is_dir():
            raise StorageError(f"{path} is a directory; expected the lock file of the run, or nothing: move it away")
        limit = time.monotonic() + STALE_S + HEARTBEAT_S
        seen = None
        while not self._made(path):
            holder, age_s = _read_holder(path)
            if holder is None or is_dead(holder, self._own) or age_s > STALE_S:
                _remove(path, holder)
                continue  # others may do the same now: the link in `_made` decides who has it
            touched = path.stat().st_mtime_ns if path.exists() else None
            # A heartbeat was seen while this process waited: the holder lives, wherever it is.
            alive = not waits or _is_visible(holder, self._own) or (seen is not None and touched != seen)
            if alive or time.monotonic() > limit:
                raise StorageError(
                    f"{_description(directory, holder, age_s)}; wait for its end or {otherwise}; if there is no such "
                    f"process any more, remove {path}"
                )
            if seen is None:
                sys.stderr.write(
                    f"hpcdist: {_description(directory, holder, age_s)}; waiting until {path} is untouched for "
                    f"{STALE_S:.0f} s\n"
                )
                sys.stderr.flush()
            seen = touched
            time.sleep(min(1.0, HEARTBEAT_S / 2))
        self._path, self._ended = path, threading.Event()
        _held_locks[directory.resolve()] = self
        threading.Thread(target=self._beat, name="hpcdist lock", daemon=True).start()

    def lost(self) -> str:
        """Return which process has taken this one's lock; "" where this process has it, or never had one."""
        path = self._path
        if path is None:
            return ""
        holder, _ = _read_holder(path)
        if not holder:  # None: the file was removed, and is made again here; {}: it cannot be read
            try:
                if holder is not None or self._made(path):
                    return ""
            except StorageError as error:  # returned, not raised: the calling rank tells all others
                return str(error)
            holder = _read_holder(path)[0] or {}
        if holder == self._own:
            return ""
        return (
            f"process {holder.get('pid')} on {holder.get('host')} has taken {path.parent} over, since this one had "
            f"not been heard of for more than {STALE_S:.0f} s; it writes there no more"
        )

    @property
    def identity(self) -> dict[str, Any]:
        """The entry of this process in the lock file."""
        return self._own

    def take_over(self, directory: Path, predecessor: Mapping[str, Any] | None) -> None:
        """Lock ``directory`` in the place of ``predecessor``, which had it and is known to be dead.

        Nothing happens where this process has it. Raises StorageError while another process has it.
        """
        if self._path is not None:
            return
        holder, _ = _read_holder(directory / LOCK_FILE)
        if holder and holder == predecessor:  # it may have died on another machine, which cannot be seen from here
            _remove(directory / LOCK_FILE, holder)
        self.take(directory)

    def _made(self, path: Path) -> bool:
        """Try to create the lock; whether this process has it now. Raises StorageError where no file can be made."""
        new = atomic.temporary_path(path)
        try:
            with open(atomic.create(new), "w", encoding="utf-8") as file:
                place = {"directory": str(path.parent.resolve()), "inode": os.fstat(file.fileno()).st_ino}
                file.write(json.dumps({**self._own, _PLACE: place}) + "\n")
            _link_new(new, path)
        except FileExistsError:
            return False
        except OSError as error:
            raise StorageError(
                f"{path} cannot be made: {error.strerror}; choose a directory that can be written"
            ) from error
        finally:
            atomic.discard(new)
        return True

    def _beat(self) -> None:
        assert self._path is not None
        while not self._ended.wait(HEARTBEAT_S):
            try:
                if _entry(self._path) != self._own:
                    return  # it is another's now: that one touches it
                os.utime(self._path)
            except (OSError, ValueError):
                continue  # the file system may come back, and `lost` makes a lock that is gone again

    def release(self) -> None:
        """Release the directory, where this process has it."""
        self._ended.set()
        if self._path is not None:
            _held_locks.pop(self._path.parent.resolve(), None)
            if _read_holder(self._path)[0] == self._own:
                atomic.discard(self._path)
        self._path = None


def _link_new(new: Path, path: Path) -> None:
    """Create ``path`` with the contents of ``new``. Raises FileExistsError where it exists.

    link(2) fails where the name exists, also on NFS, and gives it whole: no other process reads half of an entry.
    """
    try:
        os.link(new, path)
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK):
            raise
        with path.open("x", encoding="utf-8") as file:  # a file system without links: whole a moment later
            file.write(json.dumps(_read_holder(new)[0] or {}) + "\n")  # the copy has another inode: without it


def _identity(environment: Mapping[str, str]) -> dict[str, Any]:
    pid = os.getpid()
    return {
        "host": socket.gethostname(),
        "pid": pid,
        "started": _started(pid),
        "machine": _text("/proc/sys/kernel/random/boot_id") + _link("/proc/self/ns/pid"),
        "job": environment.get("SLURM_JOB_ID", ""),
        "restarts": environment.get("SLURM_RESTART_COUNT", "0"),
    }


def _entry(path: Path) -> dict[str, Any] | None:
    """Return the holder in the lock ``path``; {} if the content is invalid, None for the copy of another lock.

    Raises OSError, ValueError.
    """
    entry = regular.json_value(path, MAX_BYTES)
    if not isinstance(entry, dict):
        return {}
    place = entry.pop(_PLACE, None)
    # A shared file system may have other mount points on other nodes, and few file systems change inodes: both differ.
    copied = (
        isinstance(place, dict)
        and place.get("directory") != str(path.parent.resolve())
        and place.get("inode") != path.stat().st_ino
    )
    return None if copied else entry


def _description(directory: Path, holder: Mapping[str, Any], age_s: float) -> str:
    """Return the clause of a message that names the ``holder`` of the lock of ``directory``."""
    touched = f"(touched {age_s:.0f} s ago)"
    if not holder:
        return f"{directory / LOCK_FILE} is damaged {touched}: the process that writes {directory} is unknown"
    job = f", job {holder['job']}" if holder.get("job") else ""
    return f"{directory} is being written by process {holder.get('pid')} on {holder.get('host')}{job} {touched}"


def _read_holder(path: Path) -> tuple[dict[str, Any] | None, float]:
    """Return the entry in the lock and the seconds since it was touched; {}: not readable, None: there is no lock.

    A copy of the lock of another directory is no lock, but its file exists.

    Both times are those of the file system, whose clock may differ from this machine's: a new file says what is now.
    """
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


def is_dead(holder: Mapping[str, Any], own: Mapping[str, Any]) -> bool:
    """Whether the process ``holder`` is known not to run any more, as ``own`` sees it."""
    if own["job"] and holder.get("job") == own["job"] and holder.get("restarts") != own["restarts"]:
        return True  # the batch system restarts a job only when its earlier start has ended
    return _is_visible(holder, own) and _started(holder.get("pid")) != holder.get("started")


def _is_visible(holder: Mapping[str, Any], own: Mapping[str, Any]) -> bool:
    """Whether processes of ``holder`` can be seen from here."""
    return bool(own["machine"]) and holder.get("machine") == own["machine"]


def _started(pid: Any) -> str:
    """Return when a process was started, in clock ticks since boot; "" where there is none, or it is a zombie.

    With it a process is told from a later one with the same number.
    """
    return str(start_ticks(pid) or "") if type(pid) is int else ""


def _remove(path: Path, holder: Mapping[str, Any] | None) -> None:
    """Remove the stale lock of ``holder``, unless another process has done so and holds a new one now.

    Between the look at the lock and its removal, another waiter may have replaced it. So the file is renamed, which one
    process alone succeeds in, and looked at once more: a lock of another than ``holder`` is given its name back.
    """
    aside = path.with_name(f"{LOCK_FILE}.stale.{os.getpid()}")
    try:
        path.rename(aside)
    except FileNotFoundError:
        return
    except OSError as error:
        raise StorageError(f"{path} is stale and cannot be removed: {error.strerror}") from error
    if _read_holder(aside)[0] != holder:
        with contextlib.suppress(FileExistsError):
            _link_new(aside, path)
    atomic.discard(aside)


def _text(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8").strip()
    except OSError:
        return ""


def _link(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""
