"""Death of ranks that are threads: the errors of the survivors, and their recovery."""

import threading

import numpy as np
import pytest

from harness.jobs import LIMIT_S
from harness.marks import cases
from hpcdist.arrays.ranges import Range
from hpcdist.collectives import ALLREDUCE, allreduce
from hpcdist.comm.communicator import ANY
from hpcdist.comm.failure.rank_failures import is_rank_failure
from hpcdist.comm.record.timing import count_traffic
from hpcdist.comm.threads.communicator import run_threads, solo
from hpcdist.comm.threads.group import RankDeath
from hpcdist.errors import CommunicationError, MissingCapabilityError, RankDiedError

NEEDS_ALL = {
    "barrier": lambda comm: comm.barrier(),
    "broadcast": lambda comm: comm.broadcast(np.zeros(3)),
    "allreduce": lambda comm: comm.allreduce(np.zeros(3)),
    "reduce_scatter": lambda comm: comm.reduce_scatter(np.zeros(comm.size), _ones(comm)),
    "all_gather": lambda comm: comm.all_gather(np.zeros(comm.size), _ones(comm)),
    "all_to_all": lambda comm: comm.all_to_all(np.zeros(comm.size), np.zeros(comm.size), _ones(comm), _ones(comm)),
    "allgather_object": lambda comm: comm.allgather_object(1),
    "broadcast_object": lambda comm: comm.broadcast_object(1),
    "split": lambda comm: comm.split(0),
    "nodes": lambda comm: comm.nodes(),
    "shared": lambda comm: comm.shared(8),
    "window": lambda comm: comm.window(8),
    "iallreduce": lambda comm: comm.iallreduce(np.zeros(3)).wait(),
    "polled iallreduce": lambda comm: comm.wait_any([comm.iallreduce(np.zeros(3))]),
    "probe": lambda comm: comm.probe(),
    "receive from any": lambda comm: comm.recv(np.zeros(1), ANY),
}
NEEDS_RANK_1 = {
    "send": lambda comm: comm.send(np.zeros(1), 1),
    "recv": lambda comm: comm.recv(np.zeros(1), 1),
    "isend": lambda comm: comm.isend(np.zeros(1), 1),
    "irecv": lambda comm: comm.irecv(np.zeros(1), 1).wait(),
    "tested irecv": lambda comm: comm.wait_any([comm.irecv(np.zeros(1), 1)]),
    "poll": lambda comm: comm.poll(1),
}


def _ones(comm):
    return [Range(rank, rank + 1) for rank in range(comm.size)]


def run_fault_tolerant(size, body, **options):
    return run_threads(size, body, deadline_s=LIMIT_S, fault_tolerant=True, **options)


@pytest.mark.parametrize("name", [*NEEDS_ALL, *NEEDS_RANK_1])
def test_operation_that_needs_a_dead_rank_raises(name):
    operation = NEEDS_ALL.get(name) or NEEDS_RANK_1[name]
    buried = threading.Event()

    def body(comm):
        if comm.rank == 1:
            if name in NEEDS_RANK_1:
                comm.recv(np.zeros(1), 0, tag=9)  # the others are about to wait, or already do
            try:
                raise RankDeath
            finally:
                buried.set()
        if name in NEEDS_RANK_1 and comm.rank == 0:
            comm.send(np.zeros(1), 1, tag=9)
        if name in ("send", "isend", "poll"):  # these do not wait
            buried.wait()
        with pytest.raises(RankDiedError, match="rank 1 of communicator world died") as caught:
            operation(comm)
        assert is_rank_failure(caught.value) and caught.value.ranks == comm.failed() == (1,)
        return comm.failed()

    assert run_fault_tolerant(3, body) == [(1,), None, (1,)]


def test_survivors_exchange_messages_after_a_death():
    def body(comm):
        if comm.rank == 1:
            raise RankDeath
        received = np.zeros(1)
        comm.sendrecv(np.array([comm.rank + 10.0]), 2 - comm.rank, received, 2 - comm.rank)
        return float(received[0])

    assert run_fault_tolerant(3, body) == [12.0, None, 10.0]


@pytest.mark.parametrize("made", ["split", "dup", "nodes", "child of a child"])
def test_revoke_releases_waiting_ranks_of_child_communicators(made):
    def body(comm):
        child = {
            "split": lambda: comm.split(comm.rank % 2),
            "dup": comm.dup,
            "nodes": lambda: comm.nodes().intra,
            "child of a child": lambda: comm.dup().dup(),
        }[made]()
        assert child is not None
        if comm.rank == 3:
            raise RankDeath
        if comm.rank == 0:
            with pytest.raises(RankDiedError):
                comm.recv(np.zeros(1), 3)
            comm.revoke()
        else:  # waits for a live rank that has left
            with pytest.raises(RankDiedError):
                (child if child.size > 1 and comm.rank == 2 else comm).recv(np.zeros(1), 0)
            comm.revoke()
        for revoked in (comm, child):
            with pytest.raises(RankDiedError, match="was revoked"):
                revoked.send(np.zeros(1), 0)
            with pytest.raises(RankDiedError, match="was revoked"):
                revoked.poll()

    run_fault_tolerant(4, body, ranks_per_node=4)


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8])
def test_shrink_keeps_rank_order_and_event_sinks(size):
    dies = size // 2

    def body(comm):
        comm.checked = True
        if size > 1 and comm.rank == dies:
            raise RankDeath
        with count_traffic(comm) as traffic:
            smaller = comm.shrink("after")
            comm.abandon()
            total = np.array([float(comm.rank)])
            smaller.allreduce(total)
        assert traffic.calls["allreduce"] == 1 and smaller.checked and smaller.name == "after"
        assert smaller.failed() == () and smaller.supports("ulfm")
        return smaller.rank, smaller.size, float(total[0])

    living = [rank for rank in range(size) if size == 1 or rank != dies]
    result = run_fault_tolerant(size, body)
    assert [result[rank] for rank in living] == [(index, len(living), sum(living)) for index in range(len(living))]


def test_shrink_keeps_node_membership():
    def body(comm):
        if comm.rank in (1, 4):
            raise RankDeath
        return comm.shrink().nodes().members

    assert run_fault_tolerant(6, body, ranks_per_node=2)[0] == ((0,), (1, 2), (3,))


def test_agree_is_consistent_while_ranks_die():
    def body(comm):
        results = []
        for turn in range(6):
            if comm.rank == turn and turn < 3:
                raise RankDeath
            results.append(comm.agree(not (comm.rank == 5 and turn % 2)))
        return results

    assert run_fault_tolerant(6, body)[3:] == [[True, False] * 3] * 3


def test_survivors_recover_from_repeated_and_simultaneous_deaths():
    def body(comm):
        local_data, sizes = comm.rank, []
        for dying in ((7,), (0, 3), (1, 2, 4)):
            try:
                if local_data in dying:
                    raise RankDeath
                while True:
                    allreduce(comm, np.ones(100))
            except RankDiedError:
                comm.revoke()
                smaller = comm.shrink()
                comm.abandon()
                comm = smaller
                sizes.append(comm.size)
        total = np.ones(1)
        comm.allreduce(total)
        assert total[0] == comm.size == 2
        return sizes

    result = run_fault_tolerant(8, body)
    assert result[5] == result[6] and result[5][-1] == 2 and len(result[5]) >= 1


@pytest.mark.parametrize("algorithm", sorted(ALLREDUCE))
def test_allreduce_with_a_dead_rank_does_not_hang(algorithm):
    def several_allreduces(comm):
        for turn in range(4):  # a rank that needs little from the dead rank may succeed once
            if turn == 1 and comm.rank == 2:
                raise RankDeath
            allreduce(comm, np.ones(1000, np.float32), algorithm)

    def body(comm):
        with pytest.raises(RankDiedError):
            several_allreduces(comm)
        comm.revoke()
        smaller = comm.shrink()
        data = np.ones(1000, np.float32)
        allreduce(smaller, data, algorithm)
        assert (data == smaller.size).all()
        return float(data[0])

    assert run_fault_tolerant(4, body) == [3.0, 3.0, None, 3.0]


def test_errors_of_a_dead_rank_are_suppressed():
    last_words = []

    def body(comm):
        if comm.rank == 1:
            try:
                raise RankDeath
            finally:
                try:
                    comm.barrier()
                except RankDeath as error:
                    last_words.append(error)
                raise ValueError("what a dead process would have said")
        with pytest.raises(RankDiedError):
            comm.barrier()

    assert run_fault_tolerant(2, body) == [None, None] and len(last_words) == 1


def test_other_errors_still_end_all_ranks():
    def body(comm):
        if comm.rank == 1:
            raise ZeroDivisionError("mine")
        with pytest.raises(CommunicationError) as caught:
            comm.agree(True)
        assert not is_rank_failure(caught.value)

    with pytest.raises(ZeroDivisionError, match="mine"):
        run_fault_tolerant(3, body)


def test_death_without_fault_tolerance_is_an_error():
    def body(comm):
        raise RankDeath

    with pytest.raises(RankDeath):
        run_threads(2, body)
    assert not solo().supports("ulfm")
    for refused in (solo().revoke, solo().shrink, lambda: solo().agree(True)):
        with pytest.raises(MissingCapabilityError, match="--with-ft ulfm"):
            refused()


def _chain_errors(*errors):
    """Return the last of ``errors``, each raised while the one before it was handled."""
    for before, error in zip(errors, errors[1:], strict=False):
        error.__context__ = before
    return errors[-1]


@cases(
    "error, expected",
    (RankDiedError("gone"), True),
    (CommunicationError("other"), False),
    (_chain_errors(RankDiedError("gone"), CommunicationError("not started")), True),
    (_chain_errors(RankDiedError("gone"), ValueError(), OSError()), True),
    (_chain_errors(ValueError(), OSError()), False),
    (_chain_errors(RankDiedError("gone"), KeyboardInterrupt()), False),
    (_chain_errors(RankDiedError("gone"), SystemExit(3)), False),
)
def test_rank_failure_is_recognised_from_the_error_context(error, expected):
    assert is_rank_failure(error) is expected


def test_cyclic_error_context_is_no_rank_failure():
    first, second = ValueError(), OSError()
    first.__context__, second.__context__ = second, first
    assert not is_rank_failure(first)
