"""Shared memory of the ranks of a node: an anonymous mapping, or an MPI window.

The window is used if processes cannot open each other's descriptors. If neither works, each rank gets private memory,
and ``is_shared`` is False. The mapping stays readable if a rank fails. The caller must order reads and writes.
"""

import contextlib
import mmap
import os
from itertools import accumulate
from pathlib import Path
from typing import Any, Final

import numpy as np

from hpcdist.arrays.ranges import ALIGN_BYTES, align_up
from hpcdist.comm.failure.rank_failures import is_rank_failure
from hpcdist.comm.launch.environment import has_ended, start_ticks
from hpcdist.comm.mpi import ulfm
from hpcdist.constants import SHARED_MEMORY
from hpcdist.errors import RankDiedError

_STRIDE: Final = max(mmap.PAGESIZE, ALIGN_BYTES)


class Members:
    """Detector of failed processes among the ranks of a communicator that are all on one node."""

    def __init__(self, mpi: Any, comm: Any) -> None:
        self._mpi, self._comm = mpi, comm
        announced = ulfm.allgather_objects(mpi, comm, (os.getpid(), start_ticks(os.getpid())))
        # In another pid namespace (container) a pid may be another process: compare the start times.
        visible = all(start_ticks(pid) == began != 0 for pid, began in announced)
        self.see_each_other = all(ulfm.allgather_objects(mpi, comm, visible))
        self._processes = announced
        self._is_notified = False  # MPI has reported a rank failure
        self._was_seen = False  # the last check has seen a rank failure

    def progress(self) -> None:
        """Let MPI make progress without receiving messages. Local."""
        # A rank that only polls shared memory would never complete a send for which another rank waits.
        try:
            self._comm.Iprobe(self._mpi.ANY_SOURCE, self._mpi.ANY_TAG)
        except self._mpi.Exception as error:
            if not is_rank_failure(error):
                raise
            self._is_notified = True

    def are_revoked(self) -> bool:
        """Return True if the communicator of these processes was revoked or freed. Local."""
        return ulfm.is_revoked(self._mpi, self._comm)

    def check_alive(self, since: float) -> None:
        """Raise RankDiedError if this call and the previous call both detect a dead process. Local."""
        self.progress()
        dead = self._dead()
        # After the first detection, the caller may still read data that the dead process wrote.
        was_seen, self._was_seen = self._was_seen, bool(dead) or self._is_notified
        if was_seen and self._was_seen:
            death_report = self._describe(dead)
            raise RankDiedError(f"{death_report}, while this rank waited in shared memory for another rank", dead)

    def _dead(self) -> list[int]:
        dead: set[int] = set()
        if self.see_each_other:
            dead.update(rank for rank, (pid, began) in enumerate(self._processes) if has_ended(pid, began))
        if self._is_notified and ulfm.is_enabled(self._mpi):
            dead.update(ulfm.failed(self._mpi, self._comm))
        return sorted(dead)

    def _describe(self, dead: list[int]) -> str:
        name = self._comm.Get_name()
        if not dead:  # MPI reported a revocation: only the revoking rank knows the failed rank
            return f"a rank of {name} has died, or {name} was revoked because a rank had died"
        processes = ", ".join(str(self._processes[rank][0]) for rank in dead)
        return f"rank {', '.join(map(str, dead))} of {name} (process {processes}) has died"


class MemoryBlock:
    """Memory without an MPI window: shared by the ranks of the node, or private to this rank (``is_shared`` False)."""

    def __init__(self, views: list[np.ndarray], members: Members, *, is_shared: bool) -> None:
        self.views, self.is_shared = views, is_shared
        self.check_alive, self.progress = members.check_alive, members.progress

    def close(self) -> None:
        """Drop this object's views of the memory. The memory is unmapped when no array uses it."""
        self.views = []


class WindowBlock:
    """An MPI shared-memory window over the ranks of one node."""

    is_shared = True

    def __init__(self, mpi: Any, comm: Any, sizes: list[int], members: Members) -> None:
        self._window = mpi.Win.Allocate_shared(max(1, sizes[comm.rank]), 1, comm=comm)
        self._window.Lock_all(mpi.MODE_NOCHECK)  # MPICH allows Win_sync only inside an epoch
        self.views = []
        for rank, size in enumerate(sizes):
            memory, _ = self._window.Shared_query(rank)
            self.views.append(np.frombuffer(memory, np.uint8)[:size])
        self.views[comm.rank][...] = 0
        self.check_alive, self.progress = members.check_alive, members.progress
        self._are_revoked = members.are_revoked
        comm.Barrier()

    def close(self) -> None:
        """Free the window, unless the communicator was revoked. Collective."""
        self.views = []
        if not self._are_revoked():
            self._window.Unlock_all()
            self._window.Free()


def allocate(mpi: Any, comm: Any, nbytes: int) -> MemoryBlock | WindowBlock:
    """Allocate ``nbytes`` zeroed bytes per rank that all ranks of ``comm`` share, or private memory. Collective."""
    sizes = ulfm.allgather_objects(mpi, comm, nbytes)
    members = Members(mpi, comm)
    mapping = _map(comm, sizes) if members.see_each_other else None
    if all(ulfm.allgather_objects(mpi, comm, mapping is not None)):
        assert mapping is not None
        whole = np.frombuffer(mapping, np.uint8)
        views = [whole[start : start + size] for start, size in zip(_starts(sizes), sizes, strict=False)]
        return MemoryBlock(views, members, is_shared=True)
    # An MPI library with too little space in /dev/shm may get a SIGBUS at the first touch: check first.
    if all(ulfm.allgather_objects(mpi, comm, room_in(SHARED_MEMORY) >= sum(sizes))):
        with contextlib.suppress(mpi.Exception):  # then private blocks; `hpcdist doctor` checks /dev/shm
            return WindowBlock(mpi, comm, sizes, members)
    return private_block(comm.rank, sizes, members)


def private_block(rank: int, sizes: list[int], members: Members) -> MemoryBlock:
    """Return a private `MemoryBlock` of ``sizes[rank]`` bytes. ``members``: detector of failed ranks. Local."""
    views = [np.zeros(size if member == rank else 0, np.uint8) for member, size in enumerate(sizes)]
    return MemoryBlock(views, members, is_shared=False)


def _starts(sizes: list[int]) -> list[int]:
    return list(accumulate((align_up(size, _STRIDE) for size in sizes), initial=0))


def _map(comm: Any, sizes: list[int]) -> mmap.mmap | None:
    starts = _starts(sizes)
    total = starts[-1]
    descriptor, failed = -1, False
    if comm.rank == 0:
        try:
            descriptor = os.memfd_create("hpcdist", os.MFD_CLOEXEC)
            os.ftruncate(descriptor, max(total, _STRIDE))
        except OSError:
            failed = True
        failed = failed or available_bytes() < total
    identity = None if descriptor < 0 or failed else _identity(descriptor)
    owner, number, identity = comm.bcast((os.getpid(), descriptor, identity), root=0)
    mapping = None
    if identity is not None:
        # The descriptor is opened through /proc, which needs the same pid namespace and user. If that fails on this
        # rank, the vote of the caller informs the other ranks.
        with contextlib.suppress(OSError):
            memfd = descriptor if comm.rank == 0 else os.open(f"/proc/{owner}/fd/{number}", os.O_RDWR | os.O_CLOEXEC)
            try:
                if _identity(memfd) == identity:  # the same memfd, not a descriptor of another process with that id
                    first, end = starts[comm.rank : comm.rank + 2]
                    mapping = _populated(memfd, first, end - first, max(total, _STRIDE))
            finally:
                if comm.rank != 0:
                    os.close(memfd)
    comm.Barrier()  # the owner closes its descriptor only after all ranks have mapped it
    if descriptor >= 0:
        os.close(descriptor)
    return mapping


def _identity(descriptor: int) -> tuple[int, int]:
    status = os.fstat(descriptor)
    return status.st_dev, status.st_ino


def _populated(descriptor: int, start: int, size: int, total: int) -> mmap.mmap:
    if size:
        os.posix_fallocate(descriptor, start, size)  # a lack of memory raises an error here, not SIGBUS later
    return mmap.mmap(descriptor, total)


def available_bytes() -> float:
    """Return the number of bytes that machine and control group still allow this process to allocate. Local."""
    limits = [float("inf")]
    with contextlib.suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/meminfo").read_text().splitlines()
        limits.append(int(next(line for line in lines if line.startswith("MemAvailable:")).split()[1]) * 1024)
    with contextlib.suppress(OSError, ValueError, StopIteration):
        groups = Path("/proc/self/cgroup").read_text().splitlines()
        cgroup = next(line.split(":", 2)[2] for line in groups if line.startswith("0::")).lstrip("/")
        group = Path("/sys/fs/cgroup") / cgroup
        limits.append(int((group / "memory.max").read_text()) - int((group / "memory.current").read_text()))
    return min(limits)


def room_in(folder: Path) -> float:
    """Return the free bytes of the file system of ``folder``, or 0 if the directory does not exist. Local."""
    try:
        status = os.statvfs(folder)
    except OSError:
        return 0
    return status.f_bavail * status.f_frsize
