"""Shared memory of the ranks of a node: an anonymous mapping, or an MPI window.

The window serves where processes cannot see each other's descriptors. The mapping has no name: nothing is left behind
after SIGKILL, and it stays readable for the survivors of a dead rank. Where neither can be had, each rank gets memory
of its own, and the block says so. Ordering of reads and writes is the caller's affair: barriers, or the flags of an
algorithm.
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
from hpcdist.comm.mpi import ulfm
from hpcdist.comm.record.flight_recorder import has_ended, start_ticks
from hpcdist.errors import RankDiedError

_STRIDE: Final = max(mmap.PAGESIZE, ALIGN_BYTES)
_SHM: Final = Path("/dev/shm")  # where MPI libraries put their windows


class Members:
    """The processes behind a communicator of one node, as this one sees them."""

    def __init__(self, mpi: Any, comm: Any) -> None:
        self._mpi, self._comm = mpi, comm
        announced = ulfm.objects(mpi, comm, (os.getpid(), start_ticks(os.getpid())))
        # In containers of their own, a number may be that of another process: its start tells them apart.
        visible = all(start_ticks(pid) == began != 0 for pid, began in announced)
        self.see_each_other = all(ulfm.objects(mpi, comm, visible))
        self._processes = announced
        self._is_told = False  # of a death, by MPI
        self._was_seen = False  # a death, by the last check

    def progress(self) -> None:
        """Let MPI progress; no message is taken, and of a death only `check_alive` tells (local).

        A rank that waits in shared memory would otherwise never send what another one needs to come there.
        """
        try:
            self._comm.Iprobe(self._mpi.ANY_SOURCE, self._mpi.ANY_TAG)
        except self._mpi.Exception as error:
            if not is_rank_failure(error):
                raise
            self._is_told = True

    def are_given_up(self) -> bool:
        """Whether their communicator was revoked, or left (local)."""
        return ulfm.is_given_up(self._mpi, self._comm)

    def check_alive(self, since: float) -> None:
        """Let MPI progress, and raise RankDiedError when a member has died (local).

        The first check that sees a death returns: what the member wrote before it may be all that the caller waits
        for, and can be read by now. However long it is ``since`` the wait began: deadlines are the watchdog's, the
        operation is open in the record.
        """
        self.progress()
        dead = self._dead()
        known, self._was_seen = self._was_seen, bool(dead) or self._is_told
        if known and self._was_seen:
            raise RankDiedError(f"{self._described(dead)}, and this rank waited for it in shared memory", dead)

    def _dead(self) -> list[int]:
        """Return who has ended, as the kernel shows it, and whom MPI has told of: either may be the first (local)."""
        dead: set[int] = set()
        if self.see_each_other:
            dead.update(rank for rank, (pid, began) in enumerate(self._processes) if has_ended(pid, began))
        if self._is_told and ulfm.is_enabled(self._mpi):
            dead.update(ulfm.failed(self._mpi, self._comm))
        return sorted(dead)

    def _described(self, dead: list[int]) -> str:
        name = self._comm.Get_name()
        if not dead:  # MPI did not say who, or whoever revoked it knows more
            return f"a rank of {name} has died, or it was revoked because one had"
        processes = ", ".join(str(self._processes[rank][0]) for rank in dead)
        return f"rank {', '.join(map(str, dead))} of {name} (process {processes}) has died"


class MappedBlock:
    """One anonymous mapping of the node, cut into a part for each rank."""

    is_shared = True

    def __init__(self, mapping: mmap.mmap, sizes: list[int], members: Members) -> None:
        whole = np.frombuffer(mapping, np.uint8)
        self.views = [whole[start : start + size] for start, size in zip(_starts(sizes), sizes, strict=False)]
        self.check_alive, self.progress = members.check_alive, members.progress

    def close(self) -> None:
        """Drop the views; the mapping goes when the last array over it does."""
        self.views = []


class WindowBlock:
    """An MPI shared-memory window of the node."""

    is_shared = True

    def __init__(self, mpi: Any, comm: Any, sizes: list[int], members: Members) -> None:
        self._window = mpi.Win.Allocate_shared(max(1, sizes[comm.rank]), 1, comm=comm)
        self._window.Lock_all(mpi.MODE_NOCHECK)  # MPICH lets nobody synchronise outside an epoch
        self.views = []
        for rank, size in enumerate(sizes):
            memory, _ = self._window.Shared_query(rank)
            self.views.append(np.frombuffer(memory, np.uint8)[:size])
        self.views[comm.rank][...] = 0
        self.check_alive, self.progress = members.check_alive, members.progress
        self._are_given_up = members.are_given_up
        comm.Barrier()

    def close(self) -> None:
        """Free the window. Collective, unless the communicator was revoked: then it can only be left as it is."""
        self.views = []
        if not self._are_given_up():
            self._window.Unlock_all()
            self._window.Free()


class PrivateBlock:
    """Memory of this rank alone, where nothing can be shared: the views of the others are empty."""

    is_shared = False

    def __init__(self, rank: int, sizes: list[int], members: Members) -> None:
        self.views = [np.zeros(size if other == rank else 0, np.uint8) for other, size in enumerate(sizes)]
        self.check_alive, self.progress = members.check_alive, members.progress

    def close(self) -> None:
        """Drop the views."""
        self.views = []


def allocate(mpi: Any, comm: Any, nbytes: int) -> MappedBlock | WindowBlock | PrivateBlock:
    """Return zeroed shared memory, ``nbytes`` for each rank of ``comm``. Collective.

    ``comm`` is an mpi4py communicator of one node.
    """
    sizes = ulfm.objects(mpi, comm, nbytes)
    members = Members(mpi, comm)
    mapping = _map(comm, sizes) if members.see_each_other else None
    if all(ulfm.objects(mpi, comm, mapping is not None)):
        assert mapping is not None
        return MappedBlock(mapping, sizes, members)
    # An MPI library that finds too little room may die of a SIGBUS at the first touch: ask before it does.
    if all(ulfm.objects(mpi, comm, room_in(_SHM) >= sum(sizes))):
        with contextlib.suppress(mpi.Exception):
            return WindowBlock(mpi, comm, sizes, members)
    return PrivateBlock(comm.rank, sizes, members)


def _starts(sizes: list[int]) -> list[int]:
    """Return where each rank's part begins, and behind them where the last one ends: no page belongs to two."""
    return list(accumulate((align_up(size, _STRIDE) for size in sizes), initial=0))


def _map(comm: Any, sizes: list[int]) -> mmap.mmap | None:
    """Map memory of the node's first rank into every rank; None where this one cannot open it, or it has no room."""
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
        # The descriptor is reached through /proc, which needs one pid namespace and the same user. What this rank
        # cannot do is told to the others by the caller's vote.
        with contextlib.suppress(OSError):
            own = descriptor if comm.rank == 0 else os.open(f"/proc/{owner}/fd/{number}", os.O_RDWR | os.O_CLOEXEC)
            try:
                if _identity(own) == identity:  # and not what has this number in another process of that number
                    first, end = starts[comm.rank : comm.rank + 2]
                    mapping = _populated(own, first, end - first, max(total, _STRIDE))
            finally:
                if comm.rank != 0:
                    os.close(own)
    comm.Barrier()  # nobody closes the owner's descriptor before all have mapped it
    if descriptor >= 0:
        os.close(descriptor)
    return mapping


def _identity(descriptor: int) -> tuple[int, int]:
    status = os.fstat(descriptor)
    return status.st_dev, status.st_ino


def _populated(descriptor: int, start: int, size: int, total: int) -> mmap.mmap:
    """Map the whole, and take the pages of the own part: near this rank's core, and not as a SIGBUS later."""
    if size:
        os.posix_fallocate(descriptor, start, size)
    return mmap.mmap(descriptor, total)


def available_bytes() -> float:
    """Return how much memory this process may still take: the machine's, or what its control group leaves (local)."""
    limits = [float("inf")]
    with contextlib.suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/meminfo").read_text().splitlines()
        limits.append(int(next(line for line in lines if line.startswith("MemAvailable:")).split()[1]) * 1024)
    with contextlib.suppress(OSError, ValueError, StopIteration):
        groups = Path("/proc/self/cgroup").read_text().splitlines()
        own = next(line.split(":", 2)[2] for line in groups if line.startswith("0::")).lstrip("/")
        group = Path("/sys/fs/cgroup") / own
        limits.append(int((group / "memory.max").read_text()) - int((group / "memory.current").read_text()))
    return min(limits)


def room_in(folder: Path) -> float:
    """Return the free bytes of the file system that holds ``folder``; 0 where there is none (local)."""
    try:
        status = os.statvfs(folder)
    except OSError:
        return 0
    return status.f_bavail * status.f_frsize
