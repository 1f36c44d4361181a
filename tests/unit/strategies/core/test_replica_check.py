"""The replica check detects silent differences and locates them."""

import numpy as np
import pytest

from harness.marks import cases, on_threads
from harness.trainings import survive
from hpcdist.arrays.layout import Layout, TensorSpec
from hpcdist.arrays.store import FlatStore
from hpcdist.checkpoint.restoring.restore import newest_complete
from hpcdist.comm.threads.communicator import run_threads
from hpcdist.errors import DataError, DivergenceError
from hpcdist.strategies.core.replica_check import check_batch, check_replicas

LAYOUT = Layout.of([TensorSpec(0, "tokens", (10, 4)), TensorSpec(1, "weight", (50,)), TensorSpec(2, "bias", (3,))])


@pytest.mark.parametrize("algorithm", ["native", "recursive_doubling"])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
@on_threads("size")
def test_equal_replicas_pass(comm, size, algorithm):
    store = FlatStore(LAYOUT, np.float32)
    store.array[...] = np.arange(LAYOUT.size)
    check_replicas(comm, store, 5, algorithm)


@cases(
    "odd, column, output",
    (None, 0, ""),
    (4, 0, ""),  # in the middle of the pipeline: nobody looks at it
    (2, 0, "step 7: rank(s) 2 have other inputs than rank 0, but these ranks all compute replica 0"),
    (3, 1, "step 7: rank(s) 3 have other targets than rank 1, but these ranks all compute replica 1"),
)
def test_ranks_of_a_replica_must_have_the_same_batch(odd, column, output):
    """Two replicas have different samples: ranks 0 and 2 compute one, ranks 1 and 3 the other. Rank 4 reads no data."""

    def body(comm):
        replica = comm.rank % 2
        batch = [np.full((3, 2), replica, np.float32), np.full(3, replica + 5)]
        batch[column][-1] += comm.rank == odd
        try:
            check_batch(comm, replica, *batch, "step 7", looks=comm.rank != 4)
        except DataError as error:
            return str(error)
        return ""

    messages = run_threads(5, body)
    assert len(set(messages)) == 1 and messages[0].startswith(output) and bool(messages[0]) == bool(output)


def test_flipped_bit_is_reported_with_tensor_and_rank():
    def body(comm):
        store = FlatStore(LAYOUT, np.float32)
        if comm.rank == 2:
            store.view("1.weight").view(np.uint32)[7] ^= 1  # a denormal instead of 0
            store.view("2.bias")[0] = 1.0
        with pytest.raises(DivergenceError) as caught:
            check_replicas(comm, store, 40)
        return str(caught.value)

    for text in run_threads(4, body):
        assert "step 40" in text and "1.weight" in text and "rank(s) [2]" in text and "2.bias" not in text


def test_difference_between_two_replicas_names_no_rank():
    def body(comm):
        store = FlatStore(LAYOUT, np.float32)
        store.view("1.weight")[7] = comm.rank
        with pytest.raises(DivergenceError) as caught:
            check_replicas(comm, store, 40)
        return str(caught.value)

    for text in run_threads(2, body):
        assert "1.weight" in text and "the correct bits are unknown" in text and "rank(s)" not in text


def test_differing_replicas_are_not_saved(tmp_path):
    (tmp_path / "text.txt").write_text("to be or not to be, that is the question " * 30)
    keys = {"chaos.corrupt": ["1@3:parameters"], "checkpoint.every_steps": 1}
    with pytest.raises(DivergenceError, match="step 3: replicas differ"):
        survive(3, tmp_path / "run", tmp_path / "text.txt", keys)
    result = newest_complete(tmp_path / "run")
    assert result is not None and result.name == "step-2"


@on_threads(2)
def test_difference_in_the_padding_is_detected(comm):
    store = FlatStore(LAYOUT, np.float64)
    store.array[41] = comm.rank
    with pytest.raises(DivergenceError, match="padding"):
        check_replicas(comm, store, 1)
