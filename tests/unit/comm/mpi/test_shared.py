"""Ranks that wait in shared memory detect deaths reported by the kernel or by the MPI library."""

import os
import sys
from types import SimpleNamespace

import pytest

from hpcdist.comm.launch.environment import start_ticks
from hpcdist.comm.mpi import shared_memory, ulfm
from hpcdist.comm.mpi.shared_memory import Members
from hpcdist.errors import RankDiedError


class _MpiError(Exception):
    """An error of the stand-in for mpi4py.MPI, with an error class."""

    def Get_error_class(self):
        return int(self.args[0])


MPI = SimpleNamespace(
    Exception=_MpiError, ERR_PROC_FAILED=54, ERR_PROC_FAILED_PENDING=55, ERR_REVOKED=56, ERR_UNKNOWN=14, ERR_COMM=5,
    ANY_SOURCE=-1, ANY_TAG=-1,
)  # fmt: skip
SELF = os.getpid(), start_ticks(os.getpid())


class _World:
    """Two ranks that have announced ``processes``. A probe for messages raises ``error`` unless it is None."""

    def __init__(self, processes):
        self.processes = processes
        self.error = None

    def allgather(self, value):
        return [value] * 2 if isinstance(value, bool) else list(self.processes)

    def Iprobe(self, source, tag):
        if self.error is not None:
            raise self.error
        return False

    def Get_name(self):
        return "world"


@pytest.fixture(autouse=True)
def dead_ranks(monkeypatch):
    """The ranks that the MPI library reports as dead. Fault tolerance is on once the members are known."""
    dead = []
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", MPI)
    monkeypatch.setattr(ulfm, "failed", lambda mpi, comm: tuple(dead))
    return dead


def members_of(world, monkeypatch):
    with monkeypatch.context() as making:
        making.setattr(ulfm, "is_enabled", lambda mpi: False)
        members = Members(MPI, world)
    monkeypatch.setattr(ulfm, "is_enabled", lambda mpi: True)
    return members


@pytest.mark.parametrize("kind", [MPI.ERR_PROC_FAILED, MPI.ERR_PROC_FAILED_PENDING])
@pytest.mark.parametrize("visible", [True, False])
def test_death_reported_first_by_mpi_raises_rank_died(kind, visible, dead_ranks, monkeypatch):
    other = SELF if visible else (SELF[0], SELF[1] + 1)  # the kernel shows it as alive, or not at all
    world = _World([SELF, other])
    members = members_of(world, monkeypatch)
    assert members.see_each_other is visible
    members.check_alive(0.0)
    world.error = _MpiError(kind)
    dead_ranks.append(1)
    members.progress()
    members.check_alive(0.0)  # data written before its end is read once more
    with pytest.raises(RankDiedError, match=rf"^rank 1 of world \(process {SELF[0]}\) has died, while this") as caught:
        members.check_alive(0.0)
    assert caught.value.ranks == (1,)


def test_death_reported_by_kernel_and_mpi_is_raised_once(dead_ranks, monkeypatch):
    world = _World([SELF, SELF])
    members = members_of(world, monkeypatch)
    members._processes = [SELF, (SELF[0], SELF[1] + 1)]  # rank 1 has ended since
    members.check_alive(0.0)
    world.error = _MpiError(MPI.ERR_PROC_FAILED)
    dead_ranks.append(1)
    with pytest.raises(RankDiedError, match=r"^rank 1 of world \(process \d+\) has died") as caught:
        members.check_alive(0.0)
    assert caught.value.ranks == (1,)


def test_waiting_rank_is_released_by_revoke(monkeypatch):
    world = _World([SELF, SELF])
    members = members_of(world, monkeypatch)
    world.error = _MpiError(MPI.ERR_REVOKED)
    members.check_alive(0.0)
    with pytest.raises(
        RankDiedError,
        match="^a rank of world has died, or world was revoked because a rank had died, while this rank waited",
    ):
        members.check_alive(0.0)


def test_other_mpi_errors_are_unchanged(monkeypatch):
    world = _World([SELF, SELF])
    members = members_of(world, monkeypatch)
    world.error = _MpiError(MPI.ERR_COMM)
    for look in (members.progress, lambda: members.check_alive(0.0)):
        with pytest.raises(_MpiError):
            look()


def test_death_needs_two_consecutive_findings(monkeypatch):
    members = members_of(_World([SELF, SELF]), monkeypatch)
    for ended in (True, False, True):  # the second check had no file descriptor
        monkeypatch.setattr(shared_memory, "has_ended", lambda pid, began, ended=ended: ended)
        members.check_alive(0.0)
    with pytest.raises(RankDiedError, match=r"^rank 0, 1 of world \(process \d+, \d+\) has died"):
        members.check_alive(0.0)
