"""Checked mode: if ranks call one collective with different arguments, all fail with a list of the calls."""

import re

import numpy as np
import pytest

from harness.marks import cases, on_threads
from hpcdist import collectives
from hpcdist.arrays.ranges import Range
from hpcdist.collectives import ALLREDUCE, SHARDED
from hpcdist.comm import checks
from hpcdist.comm.record.timing import count_traffic
from hpcdist.comm.threads.communicator import run_threads
from hpcdist.errors import BufferHandoverError, CommunicationError, HpcdistError, UsageError


def failure_messages(size, call):
    """Return the CommunicationError message of each rank after ``call``."""

    def body(comm):
        comm.checked = True
        with pytest.raises(CommunicationError, match="made different collective calls") as caught:
            call(comm)
        return str(caught.value)

    return run_threads(size, body)


def odd_on_rank_1(comm, usual, odd):
    return odd if comm.rank == 1 else usual


@pytest.mark.parametrize("algorithm", ALLREDUCE)
def test_different_sizes_are_detected_for_every_algorithm(algorithm):
    texts = failure_messages(
        4, lambda comm: collectives.allreduce(comm, np.zeros(odd_on_rank_1(comm, 10, 12)), algorithm)
    )
    assert len(set(texts)) == 1
    assert f"ranks 0, 2-3: {algorithm} allreduce (sum) of 10 float64, at " in texts[0]
    assert f"rank 1: {algorithm} allreduce (sum) of 12 float64, at " in texts[0]
    assert "same calls in the same order" in texts[0]


def all_to_all(comm, algorithm, block=2, dtype=np.float64, extra=0):
    rows = [Range(block * rank, block * (rank + 1)) for rank in range(comm.size + extra)]
    buffers = [np.ones(block * len(rows), dtype) for _ in range(2)]
    collectives.all_to_all(comm, *buffers, rows, rows, algorithm)


CASES = {
    "dtype": (
        lambda comm: collectives.allreduce(comm, np.zeros(4, odd_on_rank_1(comm, np.float32, np.int32)), "ring"),
        ("ring allreduce (sum) of 4 float32", "ring allreduce (sum) of 4 int32"),
    ),
    "op": (
        lambda comm: collectives.allreduce(comm, np.zeros(4), "ring", odd_on_rank_1(comm, "sum", "max")),
        ("ring allreduce (sum) of 4 float64", "ring allreduce (max) of 4 float64"),
    ),
    "algorithm": (
        lambda comm: collectives.allreduce(comm, np.zeros(4, np.float16), odd_on_rank_1(comm, "ring", "native")),
        ("ring allreduce (sum) of 4 float16", "native allreduce (sum) of 4 float16"),
    ),
    "scale": (
        lambda comm: collectives.allreduce(comm, np.zeros(4), scale=odd_on_rank_1(comm, 0.5, 0.25)),
        ("of 4 float64, times 0.5", "of 4 float64, times 0.25"),
    ),
    "all-to-all": (
        lambda comm: all_to_all(comm, odd_on_rank_1(comm, "pairwise", "native"), dtype=np.float64),
        ("pairwise all_to_all of any number of float64", "native all_to_all of any number of float64"),
    ),
    "dtype of an all-to-all": (
        lambda comm: all_to_all(comm, "pairwise", dtype=odd_on_rank_1(comm, np.float32, np.int32)),
        ("pairwise all_to_all of any number of float32", "pairwise all_to_all of any number of int32"),
    ),
    "blocks": (
        lambda comm: all_to_all(comm, "bruck", block=odd_on_rank_1(comm, 2, 3)),
        ("bruck all_to_all of blocks of 2 float64", "bruck all_to_all of blocks of 3 float64"),
    ),
    "root": (
        lambda comm: collectives.broadcast(comm, np.zeros(4), odd_on_rank_1(comm, 0, 1), "chain"),
        ("chain broadcast of 4 float64, from rank 0", "chain broadcast of 4 float64, from rank 1"),
    ),
}


HALVES = [Range(0, 2), Range(2, 4)]
OWN = {
    "size": (
        lambda comm: comm.allreduce(np.zeros(odd_on_rank_1(comm, 4, 5))),
        ("communicator's allreduce (sum) of 4 float64", "communicator's allreduce (sum) of 5 float64"),
    ),
    "op": (
        lambda comm: comm.allreduce(np.zeros(4), odd_on_rank_1(comm, "sum", "max")),
        ("allreduce (sum) of 4", "allreduce (max) of 4"),
    ),
    "operation": (
        lambda comm: comm.barrier() if comm.rank else comm.allreduce(np.zeros(4)),
        ("communicator's allreduce (sum) of 4 float64", "communicator's barrier"),
    ),
    "root": (
        lambda comm: comm.broadcast(np.zeros(4), comm.rank),
        ("broadcast of 4 float64, from rank 0", "broadcast of 4 float64, from rank 1"),
    ),
    "dtype of a gather": (
        lambda comm: comm.all_gather(np.zeros(4, odd_on_rank_1(comm, "f4", "f8")), HALVES),
        ("all_gather of 4 float32", "all_gather of 4 float64"),
    ),
    "shares": (
        lambda comm: comm.reduce_scatter(np.zeros(4), odd_on_rank_1(comm, HALVES, [Range(0, 1), Range(1, 4)])),
        ("reduce_scatter (sum) of 4 float64, shares ", "communicator's"),
    ),
    "door": (
        lambda comm: comm.allreduce(np.zeros(4)) if comm.rank else collectives.allreduce(comm, np.zeros(4), "native"),
        ("native allreduce (sum) of 4 float64", "communicator's allreduce (sum) of 4 float64"),
    ),
}


@pytest.mark.parametrize("what", OWN)
def test_communicator_collectives_are_compared(what):
    call, words = OWN[what]
    for text in failure_messages(2, call):
        assert all(word in text for word in words), text


@on_threads(2)
def test_equal_communicator_collectives_pass(comm):
    comm.checked = True
    values = np.full(4, comm.rank + 1.0)
    comm.barrier()
    comm.allreduce(values)
    comm.broadcast(values, 1)
    comm.all_gather(values, HALVES)
    comm.reduce_scatter(values, HALVES)
    comm.all_to_all(values, np.zeros(4), HALVES, HALVES)
    assert values[2 * comm.rank] == 6


@pytest.mark.parametrize("what", CASES)
@pytest.mark.parametrize("size", [2, 3])
def test_each_difference_between_ranks_is_detected(what, size):
    call, (usual, odd) = CASES[what]
    for text in failure_messages(size, call):
        assert usual in text and odd in text


def test_all_to_all_rejected_by_one_rank_fails_on_all_ranks():
    def body(comm):
        comm.checked = True
        with pytest.raises(UsageError if comm.rank == 1 else CommunicationError) as caught:
            all_to_all(comm, "pairwise", extra=odd_on_rank_1(comm, 0, 1))
        return str(caught.value)

    texts = run_threads(3, body)
    assert texts[0] == texts[2] and "rank 1: pairwise all_to_all refused: a collective of 3 ranks" in texts[0]


@pytest.mark.parametrize("algorithm", ["native", "pairwise"])
def test_all_to_all_block_sizes_must_match(algorithm):
    """Rank q sends q + r + 1 elements to rank r, so all sizes differ between ranks. Then one size is wrong."""

    def body(comm, more):
        comm.checked = True
        sizes = [comm.rank + other + 1 for other in range(comm.size)]
        expected = [size + (more if (comm.rank, other) == (2, 0) else 0) for other, size in enumerate(sizes)]
        ranges = [
            [Range(sum(each[:other]), sum(each[: other + 1])) for other in range(comm.size)]
            for each in (sizes, expected)
        ]
        send, receive = np.full(sum(sizes), comm.rank), np.empty(sum(expected), np.int64)
        collectives.all_to_all(comm, send, receive, *ranges, algorithm)
        for other, part in enumerate(ranges[1]):
            assert (receive[part.slice] == other).all()

    def check_wrong_size(comm):
        with pytest.raises(CommunicationError, match="rank 0 sends 3 elements to rank 2, which expects 4"):
            body(comm, 1)

    run_threads(3, lambda comm: body(comm, 0))
    run_threads(3, check_wrong_size)


def test_different_collectives_are_detected_with_call_sites():
    def call(comm):
        buffer, shares = np.zeros(8), SHARDED["ring"].shares(comm, 8, 8)
        if comm.rank == 0:
            collectives.allreduce(comm, buffer, "ring")
        else:
            SHARDED["ring"].all_gather(comm, buffer, shares)

    text = failure_messages(3, call)[2]
    places = re.findall(rf"at {re.escape(__file__)}:(\d+)", text)
    assert len(places) == 2 and int(places[1]) == int(places[0]) + 2
    assert "rank 0: ring allreduce (sum) of 8 float64" in text and "ranks 1-2: ring all_gather of 8 float64" in text


def test_different_shares_are_detected():
    def call(comm):
        cut = odd_on_rank_1(comm, 4, 2)
        SHARDED["native"].reduce_scatter(comm, np.zeros(8), [Range(0, cut), Range(cut, 8)])

    assert failure_messages(2, call)[0].count("native reduce_scatter (sum) of 8 float64, shares ") == 2


@pytest.mark.parametrize("algorithm", ALLREDUCE)
@on_threads(3)
def test_equal_calls_from_different_call_sites_pass(comm, algorithm):
    comm.checked = True
    buffer = np.full(5, 2.0**comm.rank, np.float32)
    if comm.rank:
        collectives.allreduce(comm, buffer, algorithm, scale=0.5)
    else:
        collectives.allreduce(comm, buffer, algorithm, scale=0.5)
    assert (buffer == 3.5).all()
    part = comm.split(comm.rank // 2)
    assert part is not None and part.checked
    collectives.allreduce(part, buffer, algorithm, "max")


@cases(
    "error, bring",
    (BufferHandoverError, lambda comm: (np.zeros(8)[::2], "ring", "sum")),
    (BufferHandoverError, lambda comm: (np.zeros(8, ">f8"), "ring", "sum")),
    (UsageError, lambda comm: (np.zeros(8), "ring", "mean")),
    (UsageError, lambda comm: (np.zeros(8), "rong", "sum")),
)
def test_rejected_call_of_one_rank_fails_on_all_ranks(error, bring):
    """The rank raises its own error. The other ranks, which would wait forever, raise it too."""

    def body(comm):
        comm.checked = True
        with pytest.raises(HpcdistError) as caught:
            collectives.allreduce(comm, *(bring(comm) if comm.rank == 1 else (np.zeros(8), "ring", "sum")))
        assert type(caught.value) is (error if comm.rank == 1 else CommunicationError)
        return str(caught.value)

    texts = run_threads(3, body)
    assert "allreduce refused: " + texts[1][:40] in texts[0]
    assert texts[0] == texts[2]


@on_threads(2)
def test_integers_scaled_on_one_rank_fail_on_all_ranks(comm):
    comm.checked = True
    buffer = np.zeros(3, np.int64)
    with pytest.raises(UsageError if comm.rank else CommunicationError, match="cannot be multiplied by 0.5"):
        collectives.allreduce(comm, buffer, "ring", scale=odd_on_rank_1(comm, 1.0, 0.5))


def test_checked_mode_adds_one_all_gather():
    def body(comm):
        calls = []
        for comm.checked in (False, True, False):
            with count_traffic(comm) as traffic:
                collectives.allreduce(comm, np.zeros(4), "ring")
            calls.append(dict(traffic.calls))
        return calls

    off, on, again = run_threads(2, body)[0]
    assert off == again and on == {**off, "all_gather": 1}


def test_long_call_site_is_truncated_at_its_start(monkeypatch):
    monkeypatch.setattr(checks, "call_site", lambda: "/" + "x" * 5000 + "/train.py:7")
    assert (
        "x/train.py:7"
        in failure_messages(2, lambda comm: collectives.allreduce(comm, np.zeros(odd_on_rank_1(comm, 1, 2))))[0]
    )
