"""Every allreduce algorithm: correct sums, and equal bits on all ranks, for any number of ranks, size, dtype and op."""

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


def allreduce_on_threads(size, algorithm, inputs, op="sum"):
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
            for result in allreduce_on_threads(size, algorithm, list(inputs), op):
                assert np.array_equal(result.astype(np.float64), expected, equal_nan=True), f"{dtype} {op}"


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("algorithm", ALLREDUCE)
@pytest.mark.parametrize("dtype", FLOATS.values(), ids=FLOATS)
def test_allreduce_has_equal_bits_on_all_ranks(algorithm, size, dtype, rng):
    inputs = [(rng.standard_normal(1001) * 10.0 ** rng.integers(-3, 3, 1001)).astype(dtype) for _ in range(size)]
    results = allreduce_on_threads(size, algorithm, inputs)
    assert len({result.tobytes() for result in results}) == 1
    exact = np.sum([part.astype(np.float64) for part in inputs], axis=0)
    magnitude = np.sum([np.abs(part.astype(np.float64)) for part in inputs], axis=0)
    # One rounding in 16 bits, otherwise p - 1. The unit roundoff is 2^-8 for bfloat16 and 2^-11 for float16.
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
def test_any_segment_size_has_equal_bits_on_all_ranks(size, function, options, rng):
    for count in (0, 1, 3, 9, 100, 1003):
        inputs = rng.standard_normal((size, count))
        bound = size * np.finfo(np.float64).eps * np.abs(inputs).sum(axis=0)

        def body(comm, inputs=inputs, bound=bound):
            buffer = inputs[comm.rank].copy()
            function(comm, buffer, **options)
            assert (np.abs(buffer - inputs.sum(axis=0)) <= bound).all()
            return buffer.tobytes()

        assert len(set(run_threads(size, body))) == 1


@pytest.mark.filterwarnings("ignore:invalid value")  # of the reference and of the thread backend
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("algorithm", ALLREDUCE)
@pytest.mark.parametrize("op", NUMPY)
def test_allreduce_agrees_on_signed_zeros_and_nan(algorithm, size, op, rng):
    """NaN payloads and signs of zeros depend on the order of the operands, which must be equal on all ranks."""
    special = np.array([0.0, -0.0, 1.0, np.nan, np.inf, -np.inf], np.float32)
    payloads = np.array([0x7FC00001, 0xFFC00002], np.uint32).view(np.float32)
    inputs = [rng.choice(np.concatenate([special, payloads]), 97) for _ in range(size)]
    results = allreduce_on_threads(size, algorithm, inputs, op)
    assert len({result.tobytes() for result in results}) == 1
    assert np.array_equal(results[0], NUMPY[op].reduce(inputs), equal_nan=True)


@pytest.mark.parametrize("algorithm", ALLREDUCE)
def test_allreduce_is_independent_of_earlier_calls(algorithm, rng):
    inputs = [rng.standard_normal(700).astype(np.float32) for _ in range(5)]

    def body(comm):
        results = []
        for count in (700, 100, 700):
            buffer = inputs[comm.rank][:count].copy()
            collectives.allreduce(comm, buffer, algorithm)
            results.append(buffer.tobytes())
        return results

    first, _, again = run_threads(5, body)[0]
    assert first == again == allreduce_on_threads(5, algorithm, inputs)[3].tobytes()


def test_recipe_algorithms_match_the_registry():
    assert set(ALGORITHMS) == {"auto", *ALLREDUCE, *ON_GPUS}  # "auto" is resolved at the start of a run


@pytest.mark.parametrize("size", [1, 2])
def test_unknown_algorithm_error_lists_the_choices(size):
    def body(comm):
        collectives.allreduce(comm, np.zeros(4), "tree")

    with pytest.raises(UsageError, match=r"'tree' is unknown; choose one of native, ring, ring_bidirectional"):
        run_threads(size, body)


@pytest.mark.parametrize("algorithm", ALLREDUCE)
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_unknown_op_error_lists_the_choices(algorithm, dtype):
    with pytest.raises(ValueError, match=r"'mean' is unknown; choose one of sum, max, min") as caught:
        collectives.allreduce(solo(), np.zeros(4, dtype), algorithm, "mean")
    assert isinstance(caught.value, HpcdistError)


@pytest.mark.parametrize("algorithm", ALLREDUCE)
def test_buffers_that_cannot_be_reduced_in_place_are_rejected(algorithm):
    """One rank rejects them too: a script must not fail for the first time on several ranks."""
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
def test_16_bit_floats_are_rejected_by_partial_sum_algorithms(algorithm):
    with pytest.raises(BufferHandoverError, match="at every partial sum"):
        ALLREDUCE[algorithm](solo(), np.zeros(4, np.float16))
