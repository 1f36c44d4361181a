"""Spawned ranks: their environment, node placement and waiting spares; MPI errors that mean a death."""

import sys
import time
from types import ModuleType

import numpy as np
import pytest

from harness.marks import cases
from hpcdist.comm.failure.rank_failures import is_rank_failure
from hpcdist.comm.mpi import spawn
from hpcdist.comm.mpi.spawn import SpawnMember, declared_nodes
from hpcdist.comm.record import flight_recorder
from hpcdist.comm.threads.communicator import run_threads, solo
from hpcdist.comm.threads.group import RankDeath
from hpcdist.errors import MissingCapabilityError, RankDiedError, UsageError

CONNECTION_BROKE, PROC_FAILED, UNKNOWN = 16, 75, 13


def test_spawned_processes_inherit_only_job_variables():
    environment = {"HPCDIST_SURVIVE": "replace", "PYTHONPATH": "/a:/b", "OMP_NUM_THREADS": "2", "HOME": "/root"}
    environment |= {"OMPI_COMM_WORLD_RANK": "3", "HPCDIST_EMPTY": "", "HPCDIST_LINES": "a\nb"}
    assert spawn.inherited_variables(environment) == {
        "HPCDIST_SURVIVE": "replace",
        "PYTHONPATH": "/a:/b",
        "OMP_NUM_THREADS": "2",
    }


@cases(
    "before, after",
    ([None, None, None], [None, None, None]),
    ([0, 0, 1, None], [0, 0, 1, 1]),
    ([0, 1, 1, 2, None, None, None], [0, 1, 1, 2, 0, 2, 0]),
)
def test_new_rank_joins_the_declared_node_with_fewest_ranks(before, after):
    assert declared_nodes([SpawnMember("here", declared_node=node) for node in before]) == after


def test_spawn_without_ulfm_is_rejected():
    with pytest.raises(MissingCapabilityError, match="--with-ft ulfm"):
        spawn.spawn(solo(), 1, ["-c", "pass"])
    with pytest.raises(UsageError, match="at least 1"):
        spawn.spawn(solo(), 0, ["-c", "pass"])


def test_spare_sleeps_until_a_message_or_a_death():
    def body(comm):
        if comm.rank == 2:
            comm.barrier()
            raise RankDeath
        if comm.rank == 0:
            time.sleep(0.05)
            comm.send(np.array([7.0]), 1)
            comm.barrier()
            return None
        output = np.zeros(1)
        spawn.sleep_until_message(comm, 0.01).recv(output)
        comm.barrier()
        with pytest.raises(RankDiedError):
            spawn.sleep_until_message(comm, 0.01)
        return float(output[0])

    assert run_threads(3, body, fault_tolerant=True)[1] == 7.0


def test_records_of_departed_ranks_are_removed(tmp_path):
    kept = ["rank-00000.rec", "rank-00001.stacks", "deadline", "rank-x.rec"]
    for name in [*kept, "rank-00002.rec", "rank-00010.rec", "rank-00002.stacks"]:
        (tmp_path / name).touch()
    flight_recorder.remove_others(tmp_path, 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(kept)


@pytest.fixture
def mpi(monkeypatch):
    """A stand-in for mpi4py.MPI whose errors have classes."""

    class MpiError(Exception):
        def Get_error_class(self):
            return int(self.args[0])

    module = ModuleType("mpi4py.MPI")
    module.__dict__.update(
        Exception=MpiError, ERR_PROC_FAILED=PROC_FAILED, ERR_PROC_FAILED_PENDING=76, ERR_REVOKED=77, ERR_UNKNOWN=UNKNOWN
    )
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", module)
    return module


def test_mpi_error_is_rank_failure_by_class_or_if_a_rank_died(mpi):
    broke = mpi.Exception(CONNECTION_BROKE)

    def body(comm):
        before = [is_rank_failure(broke, comm, patience_s=0.01)] if comm.rank == 0 else []
        comm.barrier()
        if comm.rank == 1:
            raise RankDeath
        return [*before, is_rank_failure(broke), is_rank_failure(broke, comm), is_rank_failure(ValueError(), comm)]

    assert [is_rank_failure(mpi.Exception(code)) for code in (PROC_FAILED, 76, 77, CONNECTION_BROKE)] == [True] * 3 + [
        False
    ]
    assert run_threads(2, body, fault_tolerant=True)[0] == [False, False, True, False]
    assert not is_rank_failure(broke, solo())


def test_unknown_mpi_error_class_is_no_rank_failure(mpi):
    mpi.ERR_PROC_FAILED = mpi.ERR_PROC_FAILED_PENDING = mpi.ERR_REVOKED = UNKNOWN
    assert not is_rank_failure(mpi.Exception(UNKNOWN))
