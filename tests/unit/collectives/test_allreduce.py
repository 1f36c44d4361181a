"""Every algorithm by its name: right sums, the same bits on all ranks, at any number of ranks, size, dtype and op."""

import numpy as np
import pytest

from harness.marks import cases
from hpcdist import collectives
from hpcdist.arrays.dtypes import FLOATS, INTEGERS
from hpcdist.collectives import ALLREDUCE, ON_GPUS
from hpcdist.collectives.dispatch import SUM_16_BITS
from hpcdist.comm.config import ALGORITHMS
from hpcdist.comm.threads.communicator import run_threads, solo
from hpcdist.errors import BufferHandoverError, HpcdistError, UsageError

SIZES = range(1, 9)
COUNTS = (0, 1, 3, 33, 500)
NUMPY = {"sum": np.add, "max": np.maximum, "min": np.minimum}


def reduced_on(size, algorithm, inputs, op="sum"):
    def body(comm):
        buffer = inputs[comm.rank].copy()
        collectives.allreduce(comm, buffer, algorithm, op)
        return buffer

    return run_threads(size, body)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("algorithm", ALLREDUCE)
def test_allreduce_is_exact_on_small_integers(algorithm, size, rng):
    dtypes = {**FLOATS, "int8": INTEGERS["int8"], "int64": INTEGERS["int64"], "uint16": INTEGERS["uint16"]}
    cases = [(dtype, count, op) for dtype in dtypes.values() for count in COUNTS for op in ("sum", "max")]
    cases.append((np.dtype(np.int32), 77, "min"))
    inputs = [[rng.integers(0, 16, count).astype(dtype) for _ in range(size)] for dtype, count, _ in cases]

    def body(comm):
        for (dtype, count, op), brought in zip(cases, inputs, strict=True):
            buffer = brought[comm.rank].copy()
            collectives.allreduce(comm, buffer, algorithm, op)
            expected = NUMPY[op].reduce([part.astype(np.int64) for part in brought])
            assert buffer.dtype == dtype
            assert np.array_equal(buffer.astype(np.int64), expected), f"{dtype} {count} {op} on rank {comm.rank}"

    run_threads(size, body)


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("algorithm", ALLREDUCE)
def test_extremes_are_nan_wherever_a_rank_has_nan(algorithm, size, rng):
    for dtype in FLOATS.values():
        inputs = rng.standard_normal((size, 300)).astype(dtype)
        inputs[rng.integers(0, size, 300), np.arange(300)] = np.nan
        inputs[:, ::3] = np.arange(size)[:, None]
        for op in ("max", "min"):
            expected = NUMPY[op].reduce(inputs.astype(np.float64), axis=0)
            for result in reduced_on(size, algorithm, list(inputs), op):
                assert np.array_equal(result.astype(np.float64), expected, equal_nan=True), f"{dtype} {op}"


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("algorithm", ALLREDUCE)
@pytest.mark.parametrize("dtype", FLOATS.values(), ids=FLOATS)
def test_allreduce_gives_all_ranks_the_same_bits(algorithm, size, dtype, rng):
    inputs = [(rng.standard_normal(1001) * 10.0 ** rng.integers(-3, 3, 1001)).astype(dtype) for _ in range(size)]
    results = reduced_on(size, algorithm, inputs)
    assert len({result.tobytes() for result in results}) == 1
    exact = np.sum([part.astype(np.float64) for part in inputs], axis=0)
    magnitude = np.sum([np.abs(part.astype(np.float64)) for part in inputs], axis=0)
    # One rounding in 16 bits; p - 1 otherwise. 2^-8 is the unit roundoff of bfloat16, 2^-11 that of float16.
    units = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": size * 2.0**-24, "float64": size * 2.0**-53}
    unit = units[dtype.name]
    denormal = 2.0**-25 if dtype == np.float16 else 0.0
    assert (np.abs(results[0].astype(np.float64) - exact) <= 1.01 * unit * magnitude + denormal).all()


@cases(
    "function, options",
    (collectives.circulant_allreduce, {"segment_bytes": 128}),
    (collectives.circulant_allreduce, {"segment_bytes": 1 << 20}),
    (collectives.rabenseifner_allreduce, {"halves_bytes": 0}),
    (collectives.rabenseifner_allreduce, {"halves_bytes": 1 << 20}),
    (collectives.double_tree_allreduce, {"segment_bytes": 64}),
    (collectives.double_tree_allreduce, {"segment_bytes": 200}),
    (collectives.double_tree_allreduce, {"segment_bytes": 1 << 20}),
)
@pytest.mark.parametrize("size", [*range(1, 10), 13, 16])
def test_pieces_of_any_size_give_all_ranks_the_same_bits(size, function, options, rng):
    for count in (0, 1, 3, 9, 100, 1003):
        inputs = rng.standard_normal((size, count))
        bound = size * np.finfo(np.float64).eps * np.abs(inputs).sum(axis=0)

        def body(comm, inputs=inputs, bound=bound):
            buffer = inputs[comm.rank].copy()
            function(comm, buffer, **options)
            assert (np.abs(buffer - inputs.sum(axis=0)) <= bound).all()
            return buffer.tobytes()

        assert len(set(run_threads(size, body))) == 1


@pytest.mark.filterwarnings("ignore:invalid value")  # the oracle's, and that of threads that act as MPI
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("algorithm", ALLREDUCE)
@pytest.mark.parametrize("op", NUMPY)
def test_allreduce_agrees_on_signed_zeros_and_nan(algorithm, size, op, rng):
    """Payloads of NaN and signs of zeros depend on the order of the operands: it must not differ between ranks."""
    special = np.array([0.0, -0.0, 1.0, np.nan, np.inf, -np.inf], np.float32)
    payloads = np.array([0x7FC00001, 0xFFC00002], np.uint32).view(np.float32)
    inputs = [rng.choice(np.concatenate([special, payloads]), 97) for _ in range(size)]
    results = reduced_on(size, algorithm, inputs, op)
    assert len({result.tobytes() for result in results}) == 1
    assert np.array_equal(results[0], NUMPY[op].reduce(inputs), equal_nan=True)


@pytest.mark.parametrize("algorithm", ALLREDUCE)
def test_allreduce_is_reproducible_and_independent_of_calls_before(algorithm, rng):
    inputs = [rng.standard_normal(700).astype(np.float32) for _ in range(5)]

    def body(comm):
        results = []
        for count in (700, 100, 700):
            buffer = inputs[comm.rank][:count].copy()
            collectives.allreduce(comm, buffer, algorithm)
            results.append(buffer.tobytes())
        return results

    first, _, again = run_threads(5, body)[0]
    assert first == again == reduced_on(5, algorithm, inputs)[3].tobytes()


def test_every_algorithm_that_a_recipe_may_name_is_here():
    assert set(ALGORITHMS) == {"auto", *ALLREDUCE, *ON_GPUS}  # "auto" is resolved where the run is set up


@pytest.mark.parametrize("size", [1, 2])
def test_an_unknown_algorithm_is_refused_with_the_choices(size):
    def body(comm):
        collectives.allreduce(comm, np.zeros(4), "tree")

    with pytest.raises(UsageError, match=r"'tree' is unknown; choose one of native, ring, ring_bidirectional"):
        run_threads(size, body)


@pytest.mark.parametrize("algorithm", ALLREDUCE)
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_an_unknown_op_is_refused_with_the_choices(algorithm, dtype):
    with pytest.raises(ValueError, match=r"'mean' is unknown; choose one of sum, max, min") as caught:
        collectives.allreduce(solo(), np.zeros(4, dtype), algorithm, "mean")
    assert isinstance(caught.value, HpcdistError)


@pytest.mark.parametrize("algorithm", ALLREDUCE)
def test_buffers_that_cannot_be_reduced_in_place_are_refused(algorithm):
    """On one rank as on many: a script that runs alone must not fail for the first time in a job."""
    read_only = np.zeros(4)
    read_only.flags.writeable = False
    refused = {
        "1-D contiguous": np.zeros(10)[::2],
        r"shape \(2, 2\)": np.zeros((2, 2)),
        "float16.*float32.*int64": np.zeros(4, np.complex64),
        "native byte order": np.zeros(4, ">f4"),
        "read-only": read_only,
    }
    for message, buffer in refused.items():
        with pytest.raises(BufferHandoverError, match=message):
            collectives.allreduce(solo(), buffer, algorithm)


@pytest.mark.parametrize("algorithm", sorted(set(ALLREDUCE) - set(SUM_16_BITS)))
def test_16_bit_floats_are_refused_by_algorithms_that_send_partial_sums(algorithm):
    with pytest.raises(BufferHandoverError, match="rounded at every partial sum"):
        ALLREDUCE[algorithm](solo(), np.zeros(4, np.float16))
