"""Arrays and numbers that the collectives accept and reject."""

import numpy as np
import pytest

import hpcdist
from hpcdist.collectives.arrays import OPS
from hpcdist.comm.threads.communicator import run_threads, solo
from hpcdist.errors import BufferHandoverError, HpcdistError, UsageError

IN_PLACE = ("allreduce", "broadcast")
CALLS = (*IN_PLACE, "reduce_scatter", "all_gather", "all_to_all")


@pytest.fixture(autouse=True)
def without_measurements(monkeypatch):
    monkeypatch.setenv("HPCDIST_TUNING", "off")


def call(name, array, comm):
    return getattr(hpcdist, name)([array] * comm.size if name == "all_to_all" else array, comm=comm)


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize(
    "dtype", [">f8", ">i4", "bool", "complex64", "longdouble", "O", "U2", "M8[s]", [("a", "i4"), ("b", "f8")]], ids=str
)
def test_unsupported_dtype_error_names_the_call(name, dtype):
    with pytest.raises(
        BufferHandoverError,
        match=rf"^{name} cannot communicate this array: dtype .* is not supported; .* or choose one of float16",
    ):
        call(name, np.zeros(2, dtype), solo())


@pytest.mark.parametrize("name", CALLS)
def test_masked_array_is_rejected(name):
    with pytest.raises(UsageError, match=rf"^{name} does not accept masked arrays; pass array.filled"):
        call(name, np.ma.masked_array(np.ones(3), [0, 1, 0]), solo())


@pytest.mark.parametrize("name", IN_PLACE)
def test_array_that_cannot_be_written_in_place_is_rejected(name):
    with pytest.raises(BufferHandoverError, match=f"^{name} works in place, and the array is read-only"):
        call(name, np.broadcast_to(np.ones(3), (2, 3)), solo())
    with pytest.raises(BufferHandoverError, match=f"^{name} works in place, and elements of the array share memory"):
        call(name, np.lib.stride_tricks.as_strided(np.ones(4), (3, 2), (8, 8)), solo())


@pytest.mark.parametrize("name", CALLS)
def test_object_of_another_type_is_rejected(name):
    for value in ("text", None, [1.0], {"a": 1}):
        with pytest.raises(HpcdistError):
            call(name, value, solo())


@pytest.mark.filterwarnings("ignore:the matrix subclass")
@pytest.mark.parametrize("name", CALLS)
def test_unaligned_array_and_matrix_match_a_plain_array(name):
    def body(comm):
        plain = np.arange(4.0).reshape(2, 2) + comm.rank
        unaligned = np.frombuffer(bytearray(33), np.uint8)[1:].view(np.float64).reshape(2, 2)
        unaligned[...] = plain
        results = [call(name, array, comm) for array in (np.matrix(plain), unaligned, plain)]
        return [np.array(result) for result in results]

    for *others, expected in run_threads(2, body):
        assert all(np.array_equal(other, expected) for other in others)


@pytest.mark.parametrize("ranks", [1, 3])
def test_python_integers_are_reduced_exactly_or_rejected(ranks):
    def body(comm):
        exact = [hpcdist.allreduce(2**62 + comm.rank, op, comm=comm) for op in ("sum", "max", "min")]
        with pytest.raises(UsageError, match="more than 64 bits"):
            hpcdist.allreduce(2**70 if comm.rank == 0 else 1, comm=comm)
        with pytest.raises(UsageError, match="more than 64 bits"):
            hpcdist.allreduce(10**400 if comm.rank == 0 else 1, "mean", comm=comm)
        return exact

    total = sum(2**62 + rank for rank in range(ranks))
    assert run_threads(ranks, body) == [[total, 2**62 + ranks - 1, 2**62]] * ranks


def test_numbers_of_different_types_are_reduced_together():
    numbers = (1, 2.5, True)
    results = run_threads(3, lambda comm: [hpcdist.allreduce(numbers[comm.rank], op, comm=comm) for op in OPS])
    assert results == [[4.5, 1.5, 2.5, 1.0]] * 3
    with_nan = (7, float("nan"), 9)
    extremes = run_threads(3, lambda comm: hpcdist.allreduce(with_nan[comm.rank], "max", comm=comm))
    assert all(np.isnan(value) for value in extremes)


def test_all_to_all_keeps_the_shape_of_empty_parts():
    parts = run_threads(2, lambda comm: hpcdist.all_to_all(np.zeros((2, 3, 0, 2)), comm=comm))
    assert [[part.shape for part in received] for received in parts] == [[(3, 0, 2)] * 2] * 2


def test_all_gather_rejects_different_row_shapes():
    def body(comm):
        with pytest.raises(UsageError, match="may differ between the ranks only in their number of rows"):
            hpcdist.all_gather(np.zeros((comm.rank, 7 - comm.rank)), comm=comm)

    run_threads(2, body)


def test_checked_mode_raises_an_error_of_one_rank_on_all_ranks():
    def body(comm):
        comm.checked = True
        array = np.ma.masked_array(np.ones(3)) if comm.rank else np.ones(3)
        with pytest.raises(HpcdistError, match="masked arrays"):
            hpcdist.all_gather(array, comm=comm)

    run_threads(2, body)
